"""Prints the tables of a page of evidence from its reports, and checks that the page says the same.

A page has blocks between `<!-- figures: REPORT.jsonl TABLE... -->` and `<!-- end of figures -->`; the names of tables
are those of `TABLES`. Without options the tables go to standard output. Exit status: 0 done, 1 the page differs from
its reports, 2 the page or a report cannot be used.
"""

import argparse
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lucid_cli.reporters.sentences import verdict_sentence, warning_sentence
from lucid_cli.reporters.table import environment_words
from lucid_cli.reporters.words import amount, counted, interval, metric_name, percent, reason_words, scale
from lucid_profiler.compare import Analysis, analyze_all
from lucid_profiler.errors import ReportError
from lucid_profiler.monitored import MemoryAccount
from lucid_profiler.parity import KNOWN_PARTS, check_parity
from lucid_profiler.phases import phase_times
from lucid_profiler.reader import Report, read_report
from lucid_profiler.records import Pair, Run

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "evidence" / "lucid-yolo-fit.md"
COMMAND = "make evidence-tables"
NOT_MEASURED = "Not measured yet: there is no"
BLOCK = re.compile(
    r"(?P<begin><!-- figures: (?P<words>[^\n]*?) -->\n)(?P<body>.*?)(?P<end><!-- end of figures -->)", re.DOTALL
)
BEGIN = "<!-- figures:"
# What `tools/rehash.py` says of a value and of a part that it found equal, and at the end.
EQUAL = re.compile(r"equal +run (?P<run>\d+) process (?P<process>\d+)  (?P<part>.+?)  .+")
ALL_EQUAL = "all equal"
SMALLEST_REST = 0.0005  # of the wall: what lies between marks is often less than a digit
DASH = "\N{EN DASH}"
# The rows of the fit's table.
FIT_METRICS = ("wall", "peak_allocated", "peak_reserved", "step_time_median", "data_wait", "cpu_time", "gpu_energy")
NATIVE_STEPS = "native steps of groups, or runs without a report"
SHARES = (
    ("on the device", "optimizer_device_median", "step_device_median"),
    ("on the host", "optimizer_time_median", "step_time_median"),
)


class UnusableError(Exception):
    """A page or a report that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One comparison of a report: the base with one other arm."""

    report: Report
    analysis: Analysis

    @property
    def arms(self) -> tuple[str, str]:
        """The names of both."""
        return self.analysis.base, self.analysis.other

    def pairs(self) -> list[tuple[Pair, Run, Run]]:
        """Return every pair with its runs, discarded ones included."""
        runs = {run.run: run for run in self.report.runs}
        of_pairs = [(pair, runs[pair.runs[0]], runs[pair.runs[1]]) for pair in self.report.pairs]
        return [found for found in of_pairs if (found[1].arm, found[2].arm) == self.arms]

    def included(self, side: int) -> list[Run]:
        """Return the runs of one arm that the statistics use."""
        return [(base, other)[side] for pair, base, other in self.pairs() if pair.included]


def fit_table(compared: Compared) -> list[str]:
    """Return median and range of each arm, and the ratio of the medians."""
    rows = []
    for name in FIT_METRICS:
        metric = compared.analysis.metrics.get(name)
        if metric is None or not metric.base.n:
            continue
        scaled = scale(metric.unit, metric.base.median)
        cells = [
            f"{amount(arm.median, scaled)} ({amount(arm.min, scaled)}{DASH}{amount(arm.max, scaled)})"
            for arm in (metric.base, metric.other)
        ]
        ratio = "-" if metric.ratio_of_medians is None else f"{metric.ratio_of_medians:.4f}"
        num_known = compared.analysis.num_included - metric.num_missing
        known = f" of {counted(num_known, 'pair')}" if metric.num_missing else ""
        rows.append([f"{metric_name(name)}, {scaled[1]}, median (range){known}", *cells, ratio])
    return _table([f"{counted(compared.analysis.num_included, 'pair')}", *compared.arms, "ratio of medians"], rows)


def paired_table(compared: Compared) -> list[str]:
    """Return the change within pairs, each metric's and then each pair's."""
    rows = []
    for name in FIT_METRICS:
        metric = compared.analysis.metrics.get(name)
        if metric is not None and metric.effect is not None:
            effect = metric.effect
            spans = [interval(effect.low, effect.high), interval(effect.t_low, effect.t_high)]
            means = [percent(effect.median), percent(effect.mean)]
            rows.append([metric_name(name), str(effect.n), *means, *spans])
    lines = _table(["change within pairs, %", "pairs", "median", "mean", "range", "95 % t of the mean"], rows)
    each = []
    for pair, base, other in compared.pairs():
        change = pair.effects.get("wall") if _went_well(base, other) else None
        each.append([_pair_name(pair), _seconds(base), _seconds(other), percent(change)])
    return [*lines, "", *_table(["pair", *(f"{arm}, s" for arm in compared.arms), "change, %"], each)]


def parity_table(compared: Compared) -> list[str]:
    """Return, for each part of the state, whether it agrees in each pair."""
    if compared.analysis.is_different:
        return [f"{compared.arms[1]} is declared to be another computation: its states are not compared."]
    states, pairs = compared.report.states, compared.pairs()
    seen = {state.part for state in states}
    parts = [part for part in (*KNOWN_PARTS, *sorted(seen - set(KNOWN_PARTS))) if part in seen]
    rows = []
    for part in parts:
        of_part = [state for state in states if state.part == part]
        found = [
            check_parity(of_part, base_runs=[], pairs=[pair.runs]).status if _went_well(base, other) else "not_observed"
            for pair, base, other in pairs
        ]
        agreed = compared.analysis.parity.parts.get(part)
        num_base = len({state.run for state in of_part} & {base.run for _, base, _ in pairs})
        among = "-" if agreed is None or num_base < 2 else "no" if agreed.status == "undecidable" else "yes"
        num_tensors, num_values = max((state.num_tensors, len(state.tensors) - state.num_tensors) for state in of_part)
        rows.append([part, f"{num_tensors} + {num_values}", *map(_parity_word, found), among])
    names = [_pair_name(pair) for pair, _, _ in pairs]
    return _table(["part", "tensors + other values", *names, f"{compared.arms[0]} runs agree"], rows)


def share_table(compared: Compared) -> list[str]:
    """Return the optimizer's part of a step of each arm, and how long all the rest of a step takes."""
    if any("step time includes" in note for run in compared.report.runs for note in run.notes):
        return ["The time of an optimizer step includes its closure, so the optimizer's part is not known."]
    rows = []
    for where, optimizer, step in SHARES:
        cells = [_share(compared.included(side), optimizer, step) for side in (0, 1)]
        if any(cell != "-" for cell in cells):
            rows.append([where, *cells])
    for what, of_run in (("the optimizer's part", _optimizer), ("the rest", _rest)):
        cells = [_milliseconds(map(of_run, compared.included(side))) for side in (0, 1)]
        if any(cell != "-" for cell in cells):
            rows.append([f"{what} of a step on the host, ms", *cells])
    return _table(["optimizer's time of the step's, median (range of runs)", *compared.arms], rows)


def phase_table(compared: Compared) -> list[str]:
    """Return where the wall went, by phase."""
    arms = [{phase.name: phase for phase in phase_times(compared.included(side))} for side in (0, 1)]
    rows = [
        [
            name or "(not marked)",
            *(f"{arm[name].seconds:.3f} s, {arm[name].share:.1%}" if name in arm else "-" for arm in arms),
        ]
        for name in dict.fromkeys(name for arm in arms for name in arm)
        if name or max(arm[name].share for arm in arms if name in arm) >= SMALLEST_REST
    ]
    return _table(["phase, median", *compared.arms], rows)


def memory_table(compared: Compared) -> list[str]:
    """Return where each arm's device memory was, in the last of its runs that was accounted for."""
    accounts = [_last_account(compared.included(side)) for side in (0, 1)]
    names = list(dict.fromkeys((row.level, row.name) for one in accounts if one for row in one.rows))
    rows = [[f"{f'{DASH} ' * level}{name}", *(_term(one, level, name) for one in accounts)] for level, name in names]
    shares = ["-" if one is None or one.residue_share is None else f"{one.residue_share:.1%}" for one in accounts]
    rows.append(["not explained, of what is used", *shares])
    warnings = [
        f"{arm}: {one.warning}; at {one.num_times_warned} of {counted(one.num_times, 'time')} a residue was that large"
        for arm, one in zip(compared.arms, accounts, strict=True)
        if one is not None and one.warning
    ]
    head = "where most was used, in the last run of the arm, MiB"
    return [*_table([head, *compared.arms], rows), *_sentences(warnings)]


def energy_table(compared: Compared) -> list[str]:
    """Return the energy of each arm with the bound of its readings."""
    rows = []
    for side, arm in enumerate(compared.arms):
        runs = compared.included(side)
        known = [one for run in runs if run.monitor for one in run.monitor.energy if one.value_j is not None]
        bounds = [one.bound_j for one in known if one.bound_j is not None]
        values = [value for run in runs if (value := _value(run, "gpu_energy")) is not None]
        energy = f"{median(values):.1f} ({min(values):.1f}{DASH}{max(values):.1f})" if values else "-"
        sources = ", ".join(sorted({one.source.replace("_", " ") for one in known})) or "-"
        rows.append([arm, energy, f"{max(bounds):.1f}" if bounds else "-", sources])
    return _table(["arm", "J in the fit, median (range)", "largest bound of a run, J", "source"], rows)


def capture_table(compared: Compared) -> list[str]:
    """Return what the optimizers say about their captures."""
    rows = []
    for side, arm in enumerate(compared.arms):
        reports = [report for run in compared.included(side) for report in run.capture or ()]
        check = compared.analysis.capture[arm]
        reasons = ", ".join(f"{reason_words(reason)} ({count})" for reason, count in check.reasons.items())
        names = ", ".join(sorted({report.optimizer for report in reports})) or "no capture report"
        groups = str(max((len(report.groups) for report in reports), default=0))
        rows.append(
            [arm, names, groups, str(check.num_runs), str(check.recordings), str(check.replays), reasons or "-"]
        )
    return _table(["arm", "optimizer", "groups", "runs", "recordings", "replays", NATIVE_STEPS], rows)


def where_table(compared: Compared) -> list[str]:
    """Return on what, when and how it was measured."""
    report, analysis = compared.report, compared.analysis
    pairs = f"{analysis.num_included} in the statistics of {counted(analysis.num_pairs, 'pair')}, "
    rows = [
        ["measured", f"{report.header.created[:16].replace('T', ' ')} UTC, {environment_words(report)}"],
        ["command", f"`{shlex.join(_short(word) for word in report.header.command)}`"],
        ["pairs", f"{pairs}{analysis.num_discarded} discarded; order {report.header.order}"],
        ["steps a run", ", ".join(sorted({str(run.agent.num_steps) for run in report.runs if run.status == "ok"}))],
    ]
    if report.resumes:
        rows.append(["taken up again", counted(len(report.resumes), "time")])
    if report.end is not None and report.end.status != "complete":
        rows.append(["ended", report.end.status])
    if settings := _settings(compared):
        rows.append(["settings", settings])
    return _table(["", f"{compared.arms[0]} and {compared.arms[1]}"], rows)


def rehash_table(compared: Compared) -> list[str]:
    """Return what `tools/rehash.py` said of the values that were kept, from the file beside the report."""
    kept = Path(compared.report.path).with_suffix(".rehash.txt")
    if not kept.exists():
        return [f"{NOT_MEASURED} `{kept.name}`."]
    try:
        *lines, last = kept.read_text(encoding="utf-8").strip().splitlines()
    except (OSError, ValueError) as error:  # a ValueError where there is no line, too
        raise UnusableError(f"{kept.name}: {error}") from error
    if last == ALL_EQUAL and not _is_whole_pair(lines, compared.report):
        raise UnusableError(f"{kept.name}: it does not have every value of a pair of {compared.report.path} as equal")
    return [f"> {last}", "", f"Every part: [{kept.name}]({kept.name})."]


def verdict_table(compared: Compared) -> list[str]:
    """Return the verdict in a sentence, and what to know about it."""
    warnings = [warning_sentence(warning, compared.analysis) for warning in compared.analysis.warnings]
    return [f"> {line}" for line in (verdict_sentence(compared.analysis), *warnings)]


TABLES: dict[str, Callable[[Compared], list[str]]] = {
    "where": where_table,
    "fit": fit_table,
    "paired": paired_table,
    "verdict": verdict_table,
    "parity": parity_table,
    "rehash": rehash_table,
    "share": share_table,
    "phases": phase_table,
    "memory": memory_table,
    "energy": energy_table,
    "capture": capture_table,
}


def render_block(folder: Path, words: str) -> str:
    """Return what stands between the markers of a block.

    Raises:
        UnusableError: If the report cannot be read, or a table has no such name.
    """
    file, *names = words.split() or [""]
    unknown = [name for name in names if name not in TABLES]
    if unknown or not names:
        raise UnusableError(f"{BEGIN} {words}: name a report and tables of {', '.join(TABLES)}")
    if not (folder / file).exists():
        return f"{NOT_MEASURED} `{file}`.\n"
    try:
        report = read_report(folder / file)
    except ReportError as error:
        raise UnusableError(str(error)) from error
    if not report.complete:
        raise UnusableError(f"{file}: it is a part of a report; `lucid profile run --resume` completes it")
    blocks = []
    for analysis in analyze_all(report):
        compared = Compared(report=report, analysis=analysis)
        blocks += ["\n".join(TABLES[name](compared)) for name in names]
    return "\n\n".join([*filter(None, blocks), f"From [{file}]({file}), `{COMMAND}`."]) + "\n"


def render_page(page: Path) -> str:
    """Return the page with the figures that its reports give.

    Raises:
        UnusableError: If the page has no block, or one cannot be made.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UnusableError(f"{page}: {error.strerror}") from error
    if len(BLOCK.findall(text)) != text.count(BEGIN) or BEGIN not in text:
        raise UnusableError(f"{page}: it needs blocks from `{BEGIN} REPORT TABLE... -->` to `<!-- end of figures -->`")
    return BLOCK.sub(lambda at: at["begin"] + render_block(page.parent, at["words"]) + at["end"], text)


def main(words: Sequence[str] | None = None) -> int:
    """Print, write or check the tables of a page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--check", action="store_true", help="fail if the page says anything else")
    doing.add_argument("--write", action="store_true", help="put the tables into the page")
    options = parser.parse_args(words)
    try:
        rendered = render_page(options.page)
    except UnusableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.check:
        return _check(options.page, rendered)
    if options.write:
        options.page.write_text(rendered, encoding="utf-8")
        return 0
    print("\n".join(f"{at['words']}\n\n{at['body']}" for at in BLOCK.finditer(rendered)), end="")
    return 0


def _check(page: Path, rendered: str) -> int:
    """Name the first block that differs from its report; return the exit status."""
    text = page.read_text(encoding="utf-8")
    if text == rendered:
        return 0
    blocks = zip(BLOCK.finditer(text), BLOCK.finditer(rendered), strict=True)
    first = next(written for written, given in blocks if written["body"] != given["body"])
    print(
        f"{page}: the figures of {first['words']} are not what the report gives; --write puts them in", file=sys.stderr
    )
    return 1


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in Markdown; none without rows."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines] if lines else []


def _is_whole_pair(lines: Sequence[str], report: Report) -> bool:
    """Whether the lines are one for each value, and one for each part, of what the runs of one pair ended with."""
    matches = [EQUAL.fullmatch(line) for line in lines]
    found = Counter((int(one["run"]), int(one["process"]), one["part"]) for one in matches if one)
    whole = [
        {
            (state.run, state.process, state.part): len(state.tensors) + 1
            for state in report.states
            if state.run in pair.runs
        }
        for pair in report.pairs
    ]
    return None not in matches and len(set(lines)) == len(lines) and bool(found) and found in whole


def _short(word: str) -> str:
    """Return a word of a command, of a path on the measuring machine only the name."""
    return Path(word).name if Path(word).is_absolute() else word


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts as a paragraph after a table."""
    for text in dict.fromkeys(texts):
        yield from ("", f"{text[0].upper()}{text[1:]}.")


def _pair_name(pair: Pair) -> str:
    """Return a pair's number, and why it is not in the statistics."""
    return f"{pair.pair}" if pair.included else f"{pair.pair} ({', '.join(pair.flags)})"


def _went_well(base: Run, other: Run) -> bool:
    return base.status == other.status == "ok"


def _settings(compared: Compared) -> str:
    """Return what the runs say that they were made with; where they differ, each value."""
    runs = {run.run for pair in compared.pairs() for run in pair[1:] if run.status == "ok"}
    found: dict[str, dict[str, None]] = {}
    for state in compared.report.states:
        if state.part == "settings" and state.run in runs:
            for name, value in state.values.items():
                found.setdefault(name, {})[value.strip("'")] = None
    return ", ".join(f"{name} {' / '.join(values)}" for name, values in found.items())


def _seconds(run: Run) -> str:
    value = _value(run, "wall") if run.status == "ok" else None
    return "-" if value is None else f"{value:.3f}"


def _value(run: Run, name: str) -> float | None:
    metric = run.metrics.get(name)
    return None if metric is None else metric.value


def _parity_word(status: str) -> str:
    return {"not_observed": "-", "different": "**different**"}.get(status, status)


def _share(runs: Sequence[Run], optimizer: str, step: str) -> str:
    """Return the share of the optimizer, over runs."""
    both = [(_value(run, optimizer), _value(run, step)) for run in runs]
    shares = [part / whole for part, whole in both if part is not None and whole]
    return f"{median(shares):.1%} ({min(shares):.1%}{DASH}{max(shares):.1%})" if shares else "-"


def _optimizer(run: Run) -> float | None:
    return _value(run, "optimizer_time_median")


def _rest(run: Run) -> float | None:
    """Return the seconds that a step takes beside the optimizer's."""
    part, whole = _optimizer(run), _value(run, "step_time_median")
    return whole - part if part is not None and whole else None


def _milliseconds(seconds: Iterable[float | None]) -> str:
    """Return median and range over runs."""
    known = [1e3 * one for one in seconds if one is not None]
    return f"{median(known):.1f} ({min(known):.1f}{DASH}{max(known):.1f})" if known else "-"


def _last_account(runs: Sequence[Run]) -> MemoryAccount | None:
    accounts = [account for run in runs if run.monitor is not None for account in run.monitor.memory]
    return accounts[-1] if accounts else None


def _term(account: MemoryAccount | None, level: int, name: str) -> str:
    """Return a term of an account in MiB, or why it is not known."""
    row = next((row for row in account.rows if (row.level, row.name) == (level, name)), None) if account else None
    if row is None:
        return "-"
    if row.value_bytes is None:
        return f"- ({reason_words(row.reason.rpartition(': ')[2])})" if row.reason else "-"
    return f"{row.value_bytes / 2**20:.1f}{' (estimated)' if row.is_estimate else ''}"


if __name__ == "__main__":
    sys.exit(main())
