"""One report as text: a row a metric, then steps, parity, captures, what went wrong, and the verdict.

Of several comparisons the first has everything; what concerns the whole report is not said again in the others.
"""

import shlex
from collections import Counter
from collections.abc import Iterable

from lucid_cli.reporters.kernels import render_kernels
from lucid_cli.reporters.layout import labelled
from lucid_cli.reporters.metrics import render_metrics
from lucid_cli.reporters.monitoring import render_memory, render_monitoring
from lucid_cli.reporters.phases import render_phases
from lucid_cli.reporters.sentences import verdict_sentence, warning_sentence
from lucid_cli.reporters.words import abbreviated, counted, counted_reasons, run_words, value_words
from lucid_profiler.analysis import unasked_runs
from lucid_profiler.compare import (
    Analysis,
    Block,
    CaptureCheck,
    analyze_all,
    blocks,
    planned_slots,
    unpaired_runs,
)
from lucid_profiler.reader import Report
from lucid_profiler.records import Pair, Run

_MAX_NOTES = 12
_MAX_VALUES = 40
_MAX_VALUE_CHARS = 120
SETTINGS_PART = "settings"
"""The part as which a script says what it was told, and under which flags its runs repeat."""
METRICS_PART = "metrics"

__all__ = ["environment_words", "render_report"]


def render_report(report: Report, analysis: Analysis) -> str:
    """Return the whole text, ending in a newline.

    Args:
        report: The report.
        analysis: Of its first two arms; the comparisons of further arms are made here.
    """
    parts = [
        _head(report, analysis),
        render_metrics(report, analysis),
        render_phases(report, analysis),
        [
            *_steps(report),
            *_parity(report, analysis),
            *(line for located in report.located for line in labelled("located", located.text)),
            *_captures(report, analysis),
            *render_monitoring(report),
            *_exceptions(report),
            *_exceptional_pairs(report, analysis),
            *_notes(report.runs),
        ],
        render_memory(report),
        render_kernels(report),
        *_ending(report, analysis),
    ]
    for further in analyze_all(report)[1:]:
        parts += _further(report, further)
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _further(report: Report, analysis: Analysis) -> list[list[str]]:
    """Return what belongs to one more comparison alone; of a control, which claims nothing, its noise floor."""
    exceptions = _exceptional_pairs(report, analysis)
    if analysis.is_control:
        return [exceptions, *_ending(report, analysis)]
    return [
        labelled("compared", f"{analysis.other} with {analysis.base}: {_pairs(report, analysis)}"),
        render_metrics(report, analysis),
        render_phases(report, analysis),
        [*_parity(report, analysis), *_captures(report, analysis, analysis.other), *exceptions],
        *_ending(report, analysis),
    ]


def _ending(report: Report, analysis: Analysis) -> list[list[str]]:
    label = "control" if analysis.is_control else "verdict"
    return [
        [line for one in analysis.warnings for line in labelled("warning", warning_sentence(one, analysis))],
        labelled(label, verdict_sentence(analysis, alpha=report.header.alpha)),
    ]


def _head(report: Report, analysis: Analysis) -> list[str]:
    header = report.header
    when = header.created[:16].replace("T", " ")
    order = header.order if header.seed is None else f"{header.order} (seed {header.seed})"
    cool_down = f", {header.cool_down_s:g} s between runs" if header.cool_down_s else ""
    return [
        *labelled("command", abbreviated(shlex.join(header.command))),
        *labelled("pairs", f"{_pairs(report, analysis)}; order {order}{cool_down}, {when} UTC"),
        *_blocks(report),
        *labelled("where", environment_words(report)),
        *_values(report, "settings", SETTINGS_PART, is_flat=True),
        *_values(report, "metrics", METRICS_PART),
    ]


def _pairs(report: Report, analysis: Analysis) -> str:
    """Count the pairs of a comparison: measured and planned ones, discarded ones, and those in the statistics."""
    num_measured = analysis.num_pairs - analysis.num_discarded
    arms = f"{analysis.base} and {analysis.other}" if analysis.other else analysis.base
    num_planned = report.header.pairs
    of_plan = f"{num_measured} of {counted(num_planned, 'pair')}"
    if num_measured > num_planned:  # a pair that was left out, and a resume measured another in its place
        of_plan = f"{counted(num_measured, 'pair')} ({num_planned} planned)"
    pairs = f"{of_plan} of {arms} runs"
    left = f", {analysis.num_included} in the statistics" if analysis.num_included < num_measured else ""
    return f"{pairs}, {analysis.num_discarded} discarded{left}"


def _blocks(report: Report) -> list[str]:
    """Say which runs were measured without a break, and what a break has left."""
    if not report.resumes:
        return []
    found = blocks(report)
    lines = labelled("blocks", f"{len(found)}: {', '.join(map(_block, found))}")
    num = len(unpaired_runs(report))
    cut_off = f"{counted(num, 'run')} of pairs that were cut off, in no statistic"
    return lines + (labelled("", cut_off) if num else [])


def _block(block: Block) -> str:
    numbers = [run.run for run in block.runs]
    runs = (
        "no run" if not numbers else f"runs {min(numbers)}-{max(numbers)}" if len(numbers) > 1 else f"run {numbers[0]}"
    )
    resume = block.resume
    if resume is None:
        return runs
    where = "" if resume.same_devices else " on another GPU of the same model"
    changed = ", the machine changed" if resume.host_changed else ""
    return f"{runs} (resumed {resume.created[:16].replace('T', ' ')} UTC{where}{changed})"


def _values(report: Report, label: str, part: str, *, is_flat: bool = False) -> list[str]:
    """Name the plain values of a part, those of lists and mappings inside it only where `is_flat`.

    Where runs differ in it, nothing is named here: parity has the word.
    """
    states = [state for state in report.states if state.part == part]
    if len({state.digest for state in states}) != 1:
        return []
    values = {name: value for name, value in states[0].values.items() if is_flat or "." not in name}
    shown = [f"{name}={value_words(value)}"[:_MAX_VALUE_CHARS] for name, value in values.items()]
    more = [f"and {len(shown) - _MAX_VALUES} more"] if len(shown) > _MAX_VALUES else []
    return labelled(label, ", ".join([*shown[:_MAX_VALUES], *more])) if shown else []


def environment_words(report: Report) -> str:
    """Name the GPU or processor, the driver and torch."""
    facts = {key: value for env in report.envs for key, value in env.identity.items() if value is not None}
    names = [str(facts[key]) for key in ("gpu_name", "cpu_model") if key in facts][:1]
    if "driver_major" in facts:
        names.append(f"driver {facts['driver_major']}")
    names += [f"{key} {facts[key]}" for key in ("torch", "python") if key in facts]
    return ", ".join(names) or "not recorded"


def _steps(report: Report) -> list[str]:
    runs = [run for run in report.runs if run.status == "ok"]
    counts = {arm.name: [run.agent.num_steps for run in runs if run.arm == arm.name] for arm in report.header.arms}
    text = ", ".join(f"{name} {_span(nums)}" for name, nums in counts.items() if nums)
    num_processes = max((run.agent.num_processes for run in runs), default=0)
    all_in_one = f", of {num_processes} processes together" if num_processes > 1 else ""
    dropped = sum(run.agent.num_dropped for run in report.runs)
    lost = f"; {dropped} records lost" if dropped else ""
    return labelled("steps", f"{text} in each run{all_in_one}{lost}" if text else f"no run was ok{lost}")


def _span(nums: list[int]) -> str:
    return f"{min(nums)}" if min(nums) == max(nums) else f"{min(nums)} to {max(nums)}"


def _parity(report: Report, analysis: Analysis) -> list[str]:
    parity = analysis.parity
    if parity.status == "not_observed":
        return labelled("parity", "not observed: no run left a digest of its state")
    unasked = unasked_runs(report)
    asked = [pair for pair in _pairs_of(report, analysis) if not unasked.intersection(pair.runs)]
    compared = [pair for pair in asked if pair.parity.status != "not_observed"]
    num_equal = sum(pair.parity.status == "equal" for pair in compared)
    pairs = f"{num_equal} of {counted(len(compared), 'pair')} equal"
    if analysis.is_different:
        pairs = f"not asked of {analysis.other}, which computes something else"
    lines = labelled("parity", f"{pairs}, {_base_runs(analysis)}: {', '.join(parity.covered)}")
    if parity.difference is not None:
        lines += labelled("", f"first difference: {parity.difference.text}")
    nonfinite = [name for name, part in parity.parts.items() if part.nonfinite]
    return lines + (labelled("", f"NaN or infinity in {', '.join(nonfinite)}") if nonfinite else [])


def _base_runs(analysis: Analysis) -> str:
    """Say whether the base runs repeat."""
    if analysis.parity.status == "undecidable":
        return f"{analysis.base} runs differ among themselves"
    if analysis.parity.num_base_runs < 2 and analysis.parity.status == "equal":
        return f"one {analysis.base} run"
    if analysis.parity.num_base_runs < 2:
        return f"one {analysis.base} run, so nothing shows whether {analysis.base} runs repeat"
    return f"{analysis.base} runs agree among themselves"


def _captures(report: Report, analysis: Analysis, *arms: str) -> list[str]:
    """Say what the optimizers of the arms report, of both where none is named."""
    return [
        line
        for arm, check in analysis.capture.items()
        if arm in (arms or (analysis.base, analysis.other))
        for line in labelled(arm, _capture(check) + _overridden([run for run in report.runs if run.arm == arm]))
    ]


def _overridden(runs: list[Run]) -> str:
    num = sum(any(capture.overridden for capture in run.capture or ()) for run in runs)
    return f"; the arm's setting overrode an explicit capture_updates in {counted(num, 'run')}" if num else ""


def _capture(check: CaptureCheck) -> str:
    if not check.num_runs:
        return "no run in the statistics"
    replays = f"{counted(check.replays, 'replay')} of {counted(check.recordings, 'recording')}"
    runs = counted(check.num_runs, "run")
    return f"{replays if check.replays else 'no replays'} in {runs}" + (
        f"; native: {counted_reasons(check.reasons)}" if check.reasons else ""
    )


def _exceptions(report: Report) -> list[str]:
    """Name what went wrong with runs, whatever their arm."""
    lines = []
    if report.end is None or report.end.status != "complete":
        status = report.end.status if report.end else "without an end"
        num_planned = len(planned_slots(report))
        lines += labelled("status", f"{status}, after {len(report.runs)} of {counted(num_planned, 'run')}")
    for run in report.runs:
        if run.status != "ok":
            lines += labelled("failed", f"run {run.run} (pair {run.pair}, {run.arm}): {run_words(run)}")
    return lines


def _exceptional_pairs(report: Report, analysis: Analysis) -> list[str]:
    """Name the pairs that are left out, and those that something bent and no rule leaves out."""
    lines = []
    for pair in analysis.excluded:
        lines += labelled("left out", f"pair {pair.pair}: {', '.join(pair.reasons)}")
    for flagged in _pairs_of(report, analysis):
        if flagged.included and flagged.flags:
            lines += labelled("bent", f"pair {flagged.pair}: {', '.join(flagged.flags)}; it stays in the statistics")
    return lines


def _pairs_of(report: Report, analysis: Analysis) -> list[Pair]:
    runs = {run.run: run.arm for run in report.runs}
    arms = (analysis.base, analysis.other)
    return [
        pair
        for pair in report.pairs
        if all(runs.get(run, arm) == arm for run, arm in zip(pair.runs, arms, strict=True))
    ]


def _notes(runs: Iterable[Run]) -> list[str]:
    notes = Counter(note for run in runs for note in run.notes)
    lines = [
        line
        for note, num in notes.most_common(_MAX_NOTES)
        for line in labelled("note", f"{note} ({counted(num, 'run')})")
    ]
    return lines + (
        labelled("", f"and {counted(len(notes) - _MAX_NOTES, 'other note')}") if len(notes) > _MAX_NOTES else []
    )
