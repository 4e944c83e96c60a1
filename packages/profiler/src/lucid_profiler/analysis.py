"""What one report comes to: metrics by arm and by pair, parity, capture counters, and the verdict.

`analyze` is pure; `dataclasses.asdict` of what it returns is the `summary` record, and `verify_summary` holds the
records of a report against what follows from its runs and states.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lucid_profiler import jsonio
from lucid_profiler.drift import AnalysisWarning, find_warnings
from lucid_profiler.metrics import MetricAnalysis, analyze_metric, metric_names, paired_logs, run_effect
from lucid_profiler.parity import Parity, check_parity, first_state_difference
from lucid_profiler.reader import Report
from lucid_profiler.records import Pair, PairParity, Run, Summary
from lucid_profiler.verdict import CaptureCheck, Verdict, check_capture, judge

__all__ = ["Analysis", "ExcludedPair", "analyze", "included_pairs", "pair_record", "verify_summary"]

_REL_TOL = 1e-9
"""Logarithms of another machine's libm may differ in the last digits."""
_WITHOUT_WARNINGS = frozenset({"paired/1"})
"""Methods whose verdicts know no warnings, and whose summaries need not list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedPair:
    """A measured pair that stays in the file and out of the statistics, on both sides."""

    pair: int
    reasons: tuple[str, ...]
    """Such as `timeout:5`, the status and number of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """All that a report comes to."""

    base: str
    """Name of the first arm, empty if there is none."""
    other: str
    """Name of the second arm, which is compared with the first."""
    num_pairs: int
    """Pairs in the file, discarded ones included."""
    num_discarded: int
    num_included: int
    excluded: tuple[ExcludedPair, ...]
    metrics: dict[str, MetricAnalysis]
    """Over the included pairs."""
    capture: dict[str, CaptureCheck]
    """By arm, over the included pairs."""
    parity: Parity
    """Over all successful runs, those of discarded and excluded pairs too."""
    verdict: Verdict
    warnings: tuple[AnalysisWarning, ...] = ()
    """Of the primary metric, over the included pairs."""


def analyze(report: Report) -> Analysis:
    """Compute what a report comes to, from its header, run, state and pair records alone."""
    base, other = _arms(report)
    runs = {run.run: run for run in report.runs}
    pairs = _pairs_of_arms(report, runs)
    measured = _measured(pairs, runs)
    included = included_pairs(report)
    alpha, primary = report.header.alpha, report.header.primary
    metrics = {name: analyze_metric(name, included, alpha=alpha) for name in metric_names(included)}
    capture = {arm: check_capture(pair[side] for pair in included) for side, arm in enumerate((base, other))}
    warnings = _warnings(metrics.get(primary), included, report)
    parity = check_parity(
        report.states,
        base_runs=[run.run for run in report.runs if run.arm == base and run.status == "ok"],
        pairs=[pair.runs for pair in pairs if not _failures(pair, runs)],
        arms={run.run: run.arm for run in report.runs},
    )
    return Analysis(
        base=base,
        other=other,
        num_pairs=len(pairs),
        num_discarded=len(pairs) - len(measured),
        num_included=len(included),
        excluded=tuple(ExcludedPair(pair=pair.pair, reasons=reasons) for pair, reasons in measured if reasons),
        metrics=metrics,
        capture=capture,
        parity=parity,
        verdict=judge(
            metrics.get(primary),
            name=primary,
            num_included=len(included),
            capture=capture,
            parity=parity,
            alpha=alpha,
            warnings=() if report.header.method in _WITHOUT_WARNINGS else warnings,
        ),
        warnings=warnings,
    )


def _warnings(
    metric: MetricAnalysis | None, included: Sequence[tuple[Run, Run]], report: Report
) -> tuple[AnalysisWarning, ...]:
    """Return the warnings of the primary metric; exact ones have no noise, and no effect has nothing to warn of."""
    if metric is None or metric.exact or metric.effect is None:
        return ()
    return find_warnings(paired_logs(report.header.primary, included), metric.effect, alpha=report.header.alpha)


def included_pairs(report: Report) -> list[tuple[Run, Run]]:
    """Return base and other run of every pair that the statistics use."""
    runs = {run.run: run for run in report.runs}
    measured = _measured(_pairs_of_arms(report, runs), runs)
    return [(runs[pair.runs[0]], runs[pair.runs[1]]) for pair, reasons in measured if not reasons]


def pair_record(report: Report, base: Run, other: Run) -> Pair:
    """Return the record of the pair that two runs make; the report need only hold their states."""
    runs, arms = (base.run, other.run), {base.run: base.arm, other.run: other.arm}
    flags = [f"{run.status}:{run.run}" for run in (base, other) if run.status != "ok"]
    status, difference = ("not_observed", None) if flags else first_state_difference(report.states, runs, arms)
    if base.discarded or other.discarded:
        flags.insert(0, "discarded")
    return Pair(
        pair=base.pair,
        runs=runs,
        included=not flags,
        flags=tuple(flags),
        effects={name: run_effect(base, other, name) for name in metric_names([(base, other)])},
        parity=PairParity(status=status, difference=difference.text if difference else None),
    )


def verify_summary(report: Report) -> list[str]:
    """Return every place where pairs and summary do not follow from the other records; none is well."""
    runs = {run.run: run for run in report.runs}
    found = []
    for pair in report.pairs:
        if pair.runs[0] in runs and pair.runs[1] in runs:
            expected = pair_record(report, runs[pair.runs[0]], runs[pair.runs[1]])
            found += _differences(_plain(expected), _plain(pair), f"pair {pair.pair}")
        else:
            found.append(f"pair {pair.pair}: one of its runs {pair.runs[0]} and {pair.runs[1]} is missing")
    states = sorted({state.run for state in report.states} - runs.keys())
    found += [f"state of run {run}: there is no such run" for run in states]
    found += _check_end(report)
    if report.summary is not None:
        found += _differences(_expected_summary(report, report.summary), report.summary.analysis, "summary")
    elif report.complete:
        found.append("summary: missing")
    return found


def _expected_summary(report: Report, summary: Summary) -> Any:
    expected = _plain(analyze(report))
    if report.header.method in _WITHOUT_WARNINGS and "warnings" not in summary.analysis:
        del expected["warnings"]
    return expected


def _check_end(report: Report) -> list[str]:
    """Return what the end says that the runs do not bear out: complete is every planned run, and each of them ok."""
    if report.end is None:
        return []
    status, num_failed = report.end.status, sum(run.status != "ok" for run in report.runs)
    missing = {slot.slot for slot in report.header.slots} - {run.run for run in report.runs}
    if status == "complete" and (num_failed or missing):
        counted = f"{len(missing)} planned runs are missing" if missing else f"{num_failed} runs are not ok"
        return [f"end.status: says 'complete', but {counted}"]
    if status == "failed" and not num_failed:
        return ["end.status: says 'failed', but every run is ok"]
    if status == "interrupted" and report.header.slots and not (num_failed or missing):
        return ["end.status: says 'interrupted', but every planned run is there and ok"]
    return []


def _arms(report: Report) -> tuple[str, str]:
    base, other, *_ = [*(arm.name for arm in report.header.arms), "", ""]
    return base, other


def _pairs_of_arms(report: Report, runs: Mapping[int, Run]) -> list[Pair]:
    return [pair for pair in report.pairs if _joins(pair, runs, _arms(report))]


def _measured(pairs: Sequence[Pair], runs: Mapping[int, Run]) -> list[tuple[Pair, tuple[str, ...]]]:
    """Return the pairs that are not discarded, each with the reasons for leaving it out."""
    return [(pair, _exclusion(pair, runs)) for pair in pairs if not _is_discarded(pair, runs)]


def _joins(pair: Pair, runs: Mapping[int, Run], arms: tuple[str, str]) -> bool:
    """Return whether a pair is one of these arms; a missing run leaves that open."""
    return all(run not in runs or runs[run].arm == arm for run, arm in zip(pair.runs, arms, strict=True))


def _is_discarded(pair: Pair, runs: Mapping[int, Run]) -> bool:
    return "discarded" in pair.flags or any(runs[run].discarded for run in pair.runs if run in runs)


def _failures(pair: Pair, runs: Mapping[int, Run]) -> tuple[str, ...]:
    statuses = {run: runs[run].status if run in runs else "missing" for run in pair.runs}
    return tuple(f"{status}:{run}" for run, status in statuses.items() if status != "ok")


def _exclusion(pair: Pair, runs: Mapping[int, Run]) -> tuple[str, ...]:
    """Return why a measured pair is left out, empty if it is not."""
    failures = _failures(pair, runs)
    if failures or pair.included:
        return failures
    return pair.flags or ("not_included",)


def _plain(record: Any) -> Any:
    return jsonio.loads(jsonio.dumps(asdict(record)))


def _differences(expected: Any, found: Any, path: str) -> list[str]:
    """Return the paths at which two values of plain data differ by more than rounding."""
    if isinstance(expected, dict) and isinstance(found, dict):
        names = sorted(expected.keys() | found.keys())
        return _all_differences([(expected.get(name), found.get(name), f"{path}.{name}") for name in names])
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return _all_differences(
            [(*both, f"{path}[{index}]") for index, both in enumerate(zip(expected, found, strict=True))]
        )
    if isinstance(expected, float) and isinstance(found, float):
        equal = math.isclose(expected, found, rel_tol=_REL_TOL, abs_tol=1e-12)
    else:
        equal = type(expected) is type(found) and expected == found
    return [] if equal else [f"{path}: says {found!r}, the runs give {expected!r}"]


def _all_differences(triples: Sequence[tuple[Any, Any, str]]) -> list[str]:
    return [text for expected, found, path in triples for text in _differences(expected, found, path)]
