"""What one report comes to: metrics by arm and by pair, parity, capture counters, and the verdict.

`analyze` compares one arm with the base, `analyze_all` each of them; both are pure, and `plain_analysis` of what they
return is what the `summary` record holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lucid_profiler.blocks import unpaired_runs
from lucid_profiler.controls import control_warning
from lucid_profiler.drift import AnalysisWarning, find_warnings, order_untested
from lucid_profiler.metrics import MetricAnalysis, analyze_metric, metric_names, paired_logs
from lucid_profiler.pairing import (
    arm_names,
    arm_of,
    failures,
    included_pairs,
    measured_pairs,
    pair_record,
    pairs_of_arms,
)
from lucid_profiler.parity import Parity, check_parity
from lucid_profiler.reader import Report
from lucid_profiler.records import Pair, Run
from lucid_profiler.verdict import CaptureCheck, CaptureClaim, Claims, Comparison, Verdict, check_capture, judge

__all__ = [
    "Analysis",
    "ExcludedPair",
    "analyze",
    "analyze_all",
    "included_pairs",
    "pair_record",
    "plain_analysis",
    "unasked_runs",
]

WITHOUT_WARNINGS = frozenset({"paired/1"})
"""Methods whose verdicts know no warnings, and whose summaries need not list them."""
_UNSAID = ("is_control", "is_different")
_WALL = "wall"
_UNTESTED = "order_untested"
_CHANGED = "changed"
_CAPTURE_VARIABLE = "LUCID_CAPTURE_UPDATES"
_CLAIMS_BY_VALUE = {"0": False, "1": True}
_CLAIMS_BY_NAME = {"native": False, "captured": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedPair:
    """A measured pair that stays in the file and out of the statistics, on both sides."""

    pair: int
    reasons: tuple[str, ...]
    """Such as `timeout:5`, the status and number of a run, or `throttled:5`, what bent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """All that the comparison of one arm with the base comes to."""

    base: str
    """Name of the first arm, empty if there is none."""
    other: str
    """Name of the arm that is compared with it."""
    num_pairs: int
    """Pairs of these arms in the file, discarded ones included."""
    num_discarded: int
    num_included: int
    excluded: tuple[ExcludedPair, ...]
    metrics: dict[str, MetricAnalysis]
    """Over the included pairs."""
    capture: dict[str, CaptureCheck]
    """By arm, over the included pairs."""
    parity: Parity
    """Over all successful runs, those of discarded and excluded pairs too, but for `unasked_runs`; of the base alone if
    the other arm is a control or computes something else."""
    verdict: Verdict
    warnings: tuple[AnalysisWarning, ...] = ()
    """Of the primary metric, over the included pairs."""
    is_control: bool = False
    """Whether the other arm is the base again, so that what they differ by is noise."""
    is_different: bool = False
    """Whether the other arm computes something else, so that parity is not asked of it."""


def analyze_all(report: Report) -> tuple[Analysis, ...]:
    """Compare each further arm with the base, in the header's order; one comparison if there is no further arm."""
    return tuple(analyze(report, arm.name) for arm in report.header.arms[1:]) or (analyze(report),)


def analyze(report: Report, other: str | None = None) -> Analysis:
    """Compute what a comparison comes to, from the report's header, run, state and pair records alone.

    Args:
        report: The report.
        other: Name of the arm that is compared with the base; the second one if None.

    Raises:
        ValueError: If no arm but the base has that name.
    """
    arms = arm_names(report, other)
    arm = arm_of(report, arms[1])
    kind: Comparison = "control" if arm.control else "different" if arm.different else "same"
    runs = {run.run: run for run in report.runs}
    pairs = pairs_of_arms(report, runs, arms)
    measured = measured_pairs(report, pairs, runs)
    included = [(runs[pair.runs[0]], runs[pair.runs[1]]) for pair, reasons in measured if not reasons]
    alpha, primary = report.header.alpha, report.header.primary
    metrics = {name: analyze_metric(name, included, alpha=alpha) for name in metric_names(included)}
    runs_of = {name: [pair[side] for pair in included] for side, name in enumerate(arms)}
    capture = {name: check_capture(used) for name, used in runs_of.items()}
    warnings = _warnings(report, metrics.get(primary), included)
    if kind != "control":
        warnings += _control_warnings(report)
    parity = _parity(report, kind, [pair for pair in pairs if not failures(pair, runs)])
    return Analysis(
        base=arms[0],
        other=arms[1],
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
            claims=Claims(
                tuple(_claims(report, capture)),
                runs_of if primary == _WALL else {},
                tuple(dict.fromkeys(text for pair in included for run in pair for text in run.agent.uncovered)),
            ),
            parity=parity,
            alpha=alpha,
            warnings=() if report.header.method in WITHOUT_WARNINGS else warnings,
            kind=kind,
        ),
        warnings=warnings,
        is_control=kind == "control",
        is_different=kind == "different",
    )


def _claims(report: Report, capture: Mapping[str, CaptureCheck]) -> Iterator[CaptureClaim]:
    """Yield what arms are said to do about captures, by their environment or else by their name."""
    for name, check in capture.items():
        asked = arm_of(report, name).env.get(_CAPTURE_VARIABLE)
        is_captured = _CLAIMS_BY_NAME.get(name) if asked is None else _CLAIMS_BY_VALUE.get(asked)
        if is_captured is not None:
            yield CaptureClaim(name, is_captured, check)


def plain_analysis(analysis: Analysis) -> dict[str, Any]:
    """Return an analysis as plain data, as a summary holds it.

    What an arm is not goes unsaid, and so does which rule had too few pairs: the pairs themselves say it.
    """
    plain = asdict(analysis)
    plain["warnings"] = [warning for warning in plain["warnings"] if warning["code"] != _UNTESTED]
    return {name: value for name, value in plain.items() if value or name not in _UNSAID}


def unasked_runs(report: Report) -> set[int]:
    """Return the runs whose states are not compared: those of pairs that were cut off, and `changed` ones left out.

    Under other versions or flags than its arm's first good run had a run may well end in another state. What bends
    times alone, such as heat, leaves states to be compared.
    """
    changed = [run for run in report.runs if _CHANGED in run.taints] if _CHANGED in report.header.taints else []
    return {run.run for run in (*changed, *unpaired_runs(report))}


def _warnings(
    report: Report, metric: MetricAnalysis | None, included: Sequence[tuple[Run, Run]]
) -> tuple[AnalysisWarning, ...]:
    """Return the warnings of the primary metric; exact ones have no noise, and no effect has nothing to warn of."""
    if metric is None or metric.exact or metric.effect is None:
        return ()
    pairs = paired_logs(report.header.primary, included)
    untested = order_untested(pairs)
    return (
        *find_warnings(pairs, metric.effect, alpha=report.header.alpha),
        *(() if untested is None else (untested,)),
    )


def _control_warnings(report: Report) -> tuple[AnalysisWarning, ...]:
    """Return a warning for each control whose runs differ from the base's, although they are the base's own."""
    found = []
    for arm in report.header.arms[1:]:
        included = included_pairs(report, arm.name) if arm.control else []
        if report.header.primary in metric_names(included):
            metric = analyze_metric(report.header.primary, included, alpha=report.header.alpha)
            found.append(control_warning(metric, _warnings(report, metric, included)))
    return tuple(warning for warning in found if warning is not None)


def _parity(report: Report, kind: Comparison, pairs: Sequence[Pair]) -> Parity:
    """Compare states: base runs and controls, and the pairs where the other arm should compute the same."""
    repeats = {arm.name for index, arm in enumerate(report.header.arms) if index == 0 or arm.control}
    unasked = unasked_runs(report)
    return check_parity(
        report.states,
        base_runs=[
            run.run for run in report.runs if run.arm in repeats and run.status == "ok" and run.run not in unasked
        ],
        pairs=[pair.runs for pair in pairs if not unasked.intersection(pair.runs)] if kind == "same" else [],
        arms={run.run: run.arm for run in report.runs},
    )
