"""Whether the arms ended in the same state: a row a part, a row a pair, and the first difference."""

from collections.abc import Mapping, Sequence

from lucid_cli.html.markup import Html, details, table, tag
from lucid_cli.html.section import Section, missing
from lucid_cli.reporters.sentences import parity_status
from lucid_cli.reporters.words import counted
from lucid_profiler.compare import Analysis, PartParity
from lucid_profiler.reader import Report

MAX_PAIRS = 200
MAX_DIFFERENCE_CHARS = 1000
WORDS = {
    "equal": "equal to the last bit",
    "different": "different",
    "undecidable": "undecidable",
    "not_observed": "not observed",
}

__all__ = ["WORDS", "parity_section"]


def parity_section(report: Report, analyses: Sequence[Analysis]) -> Section:
    """Return the tables of every comparison."""
    parts: list[Html] = []
    for analysis in analyses:
        if len(analyses) > 1:
            parts.append(tag("h3", f"{analysis.other} against {analysis.base}"))
        parts += _comparison(report, analysis)
    parts += [tag("p", f"Located: {one.text[:MAX_DIFFERENCE_CHARS]}", class_="note") for one in report.located]
    return Section(ident="parity", title="Parity", parts=parts)


def _comparison(report: Report, analysis: Analysis) -> list[Html]:
    parity = analysis.parity
    if parity.status == "not_observed":
        return [missing("Parity was not observed: no run left a digest of its state.")]
    repeats = (
        f"{counted(parity.num_base_runs, f'{analysis.base} run')} with a state"
        if parity.num_base_runs > 1
        else f"one {analysis.base} run alone has a state, so nothing shows whether {analysis.base} runs repeat"
    )
    parts = [tag("p", f"The whole: {parity_status(analysis, WORDS)}; {repeats}.")]
    if parity.difference is not None:
        parts.append(tag("p", f"First difference: {parity.difference.text[:MAX_DIFFERENCE_CHARS]}", class_="note"))
    observed = {name: part for name, part in parity.parts.items() if part.status != "not_observed"}
    words = {"equal": "base runs agree", "undecidable": "base runs differ"} if analysis.is_different else {}
    rows = [_row(report, name, part, {**WORDS, **words}) for name, part in observed.items()]
    head = ["part", "bits", "runs", "tensors", "bytes", "not finite", "same strides"]
    whose = f"{analysis.base} runs" if analysis.is_different else f"{analysis.other} and {analysis.base}"
    parts.append(table(head, rows, caption=f"Parity of {whose} by part", num_text=2))
    unseen = [name for name, part in parity.parts.items() if part.status == "not_observed"]
    if unseen:
        parts.append(tag("p", f"Not observed: {', '.join(unseen)}.", class_="quiet"))
    parts.append(details("By pair", _pairs(report, analysis)))
    return parts


def _row(report: Report, name: str, part: PartParity, words: Mapping[str, str]) -> list[str]:
    states = [state for state in report.states if state.part == name]
    strides = {True: "yes", False: "no", None: "-"}[part.equal_strides]
    sizes = [_span({state.num_tensors for state in states}), _span({state.num_bytes for state in states})]
    return [name, words[part.status], str(part.num_runs), *sizes, str(part.nonfinite), strides]


def _span(nums: set[int]) -> str:
    if not nums:
        return "-"
    return f"{min(nums):,}" if len(nums) == 1 else f"{min(nums):,} to {max(nums):,}"


def _pairs(report: Report, analysis: Analysis) -> Html:
    arms = {run.run: run.arm for run in report.runs}
    wanted = (analysis.base, analysis.other)
    chosen = [pair for pair in report.pairs if tuple(arms.get(run) for run in pair.runs) == wanted]
    rows = [
        [
            f"pair {pair.pair}",
            f"{pair.runs[0]} and {pair.runs[1]}",
            "not asked" if analysis.is_different else WORDS.get(pair.parity.status, pair.parity.status),
            (pair.parity.difference or "")[:MAX_DIFFERENCE_CHARS],
        ]
        for pair in chosen[:MAX_PAIRS]
    ]
    return table(["", "runs", "bits", "first difference"], rows, caption="Parity by pair", num_text=4)
