"""The verdict on one report: a speed claim only where enough pairs, parity and the capture counters allow one."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from lucid_profiler.drift import AnalysisWarning, WarningCode
from lucid_profiler.metrics import MetricAnalysis
from lucid_profiler.pairs import MIN_PAIRS, pairs_needed
from lucid_profiler.parity import Parity
from lucid_profiler.records import Run

__all__ = ["CaptureCheck", "CaptureClaim", "Claims", "Comparison", "Decision", "Verdict", "check_capture", "judge"]

_TAKE_BACK: tuple[WarningCode, ...] = ("drift_explains", "control_differs")
"""Warnings that make better and worse inconclusive."""

Decision = Literal["better", "worse", "inconclusive", "withheld", "undecidable", "parity_failed"]


Comparison = Literal["same", "different", "control"]
"""What the other arm is to the base: the same computation in another way, another one, or the base itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCheck:
    """What the optimizers of one arm say about their captures, over the runs that the statistics use."""

    num_runs: int
    num_reporting: int
    """Runs with at least one optimizer that reports captures."""
    num_replaying: int
    """Runs with at least one replay."""
    recordings: int
    replays: int
    reasons: dict[str, int]
    """Steps that ran native, by reason, and runs without any capture report, by reason."""


class CaptureClaim(NamedTuple):
    """What an arm is said to do about captures, and what its runs did."""

    arm: str
    is_captured: bool
    """Whether each run is to replay; else none may."""
    check: CaptureCheck


class Claims(NamedTuple):
    """What has to be so for a verdict, beside parity and the number of pairs."""

    captures: Sequence[CaptureClaim] = ()
    """Of the arms that are said to capture or not; of others nothing is asked."""
    walls: Mapping[str, Sequence[Run]] = MappingProxyType({})
    """By arm, the runs whose walls have to span the same; none where the metric is no wall."""
    uncovered: Sequence[str] = ()
    """What was trained in a run and is in no digest, in words; nothing may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer, or why there is none."""

    decision: Decision
    reason: str
    """A code, such as `interval_excludes_zero`, `no_replays` or `walls_differ`."""
    detail: str | None = None
    """What is behind the code, in words."""
    metric: str
    """The primary metric, on which the decision rests."""
    parts: tuple[str, ...] = ()
    """The parts of the state for which parity was observed; the verdict speaks of no other. None of a `different` arm,
    of which parity is not asked."""
    pairs_needed: int | None = None
    """When inconclusive: the pairs that would settle it if mean and spread stayed as they are."""


def check_capture(runs: Iterable[Run]) -> CaptureCheck:
    """Add up the capture reports of runs of one arm."""
    num_runs = num_reporting = num_replaying = recordings = replays = 0
    reasons: Counter[str] = Counter()
    for run in runs:
        groups = [group for report in run.capture or () for group in report.groups]
        run_replays = sum(group.replays for group in groups)
        num_runs += 1
        num_reporting += bool(run.capture)
        num_replaying += run_replays > 0
        recordings += sum(group.recordings for group in groups)
        replays += run_replays
        for group in groups:
            reasons.update(group.reasons)
        if not run.capture:
            reasons["no_capture_report" if run.agent.loaded else run.agent.reason or "no_agent"] += 1
    return CaptureCheck(
        num_runs=num_runs,
        num_reporting=num_reporting,
        num_replaying=num_replaying,
        recordings=recordings,
        replays=replays,
        reasons=dict(sorted(reasons.items())),
    )


def judge(
    metric: MetricAnalysis | None,
    *,
    name: str,
    num_included: int,
    claims: Claims,
    parity: Parity,
    alpha: float,
    warnings: Sequence[AnalysisWarning] = (),
    kind: Comparison = "same",
) -> Verdict:
    """Return the verdict on the primary metric.

    What speaks against the claim itself comes before what is merely missing: differing states, then the absence of
    pairs, of observed states, of whole ones and of replays, then walls of unequal work, then the number of pairs.

    Args:
        metric: Its analysis, None if no included run records it.
        name: Its name.
        num_included: Pairs in the statistics.
        claims: What has to be so.
        parity: Of the runs.
        alpha: Two-sided rate of false verdicts.
        warnings: Of the primary metric; `drift_explains` and `control_differs` take better and worse back.
        kind: What the other arm is: of a control nothing is claimed, of a `different` one no parity is asked.
    """
    decision, reason, detail = (
        (None if kind == "different" else _check_states(parity))
        or _check_presence(parity, num_included, kind)
        or (_check_coverage(claims.uncovered) if kind == "same" else None)
        or _check_captures(claims.captures)
        or _check_walls(claims.walls)
        or _check_number(metric, num_included)
        or _check_warnings(metric, warnings)
        or _decide(metric)
    )
    needed = None
    effect = metric.effect if metric is not None else None
    # Pairs that lean to one order would lean to it if there were more of them, too; more pairs quieten no machine.
    is_open = decision == "inconclusive" and reason not in _TAKE_BACK
    if is_open and effect is not None and effect.sd is not None:
        needed = pairs_needed(effect.mean, effect.sd, alpha)
    return Verdict(
        decision=decision,
        reason=reason,
        detail=detail,
        metric=name,
        parts=() if kind == "different" else parity.covered,
        pairs_needed=needed,
    )


_Outcome = tuple[Decision, str, str | None]


def _check_number(metric: MetricAnalysis | None, num_included: int) -> _Outcome | None:
    if num_included < MIN_PAIRS:
        return "withheld", "too_few_pairs", f"{num_included} of at least {MIN_PAIRS} pairs are in the statistics"
    num_values = 0 if metric is None else metric.base.n
    if 0 < num_values < MIN_PAIRS:
        return "withheld", "too_few_pairs", f"{num_values} of at least {MIN_PAIRS} pairs have a value"
    return None


def _check_states(parity: Parity) -> _Outcome | None:
    text = parity.difference.text if parity.difference else None
    if parity.status == "undecidable":
        return "undecidable", "base_runs_differ", text
    if parity.status == "different":
        return "parity_failed", _difference_code(parity), text
    return None


def _difference_code(parity: Parity) -> str:
    if parity.difference is not None and parity.difference.is_missing:
        return "part_not_recorded"
    return "states_differ" if parity.num_base_runs > 1 else "base_not_repeated"


def _check_presence(parity: Parity, num_included: int, kind: Comparison) -> _Outcome | None:
    if not num_included:
        return "withheld", "no_pairs", "no pair is in the statistics"
    if kind == "control":
        return "withheld", "control", "the runs are the base's own, so their difference is noise"
    if parity.status == "not_observed" and kind == "same":
        return "withheld", "parity_not_observed", "no run recorded a digest of its state"
    return None


def _check_coverage(uncovered: Sequence[str]) -> _Outcome | None:
    if not uncovered:
        return None
    more = f", and {len(uncovered) - 1} more" if len(uncovered) > 1 else ""
    return "withheld", "parity_incomplete", f"{uncovered[0]}{more}"


def _check_captures(claims: Sequence[CaptureClaim]) -> _Outcome | None:
    for arm, is_captured, check in sorted(claims, key=lambda claim: not claim.is_captured):
        if is_captured and check.num_replaying < check.num_runs:
            num_native = check.num_runs - check.num_replaying
            counted = ", ".join(f"{reason} ({count})" for reason, count in check.reasons.items()) or "no reason given"
            detail = f"{num_native} of {check.num_runs} {arm} runs replayed nothing: {counted}"
            return "withheld", "no_replays", detail
        if not is_captured and check.num_replaying:
            detail = f"{check.num_replaying} of {check.num_runs} {arm} runs replayed graphs"
            return "withheld", "native_replayed", detail
    return None


def _check_walls(walls: Mapping[str, Sequence[Run]]) -> _Outcome | None:
    """Ask that the walls span the same.

    One that is taken from optimizer steps ends with the last one that was seen. Steps that call no optimizer, as in a
    replayed graph that holds them, are in no such wall: where their numbers differ, the walls are of unequal work.
    """
    spans = {arm: sorted({_span(run) for run in runs}) for arm, runs in walls.items()}
    if len({span for found in spans.values() for span in found}) <= 1:
        return None
    listed = " and ".join(f"{_span_words(found)} in {arm} runs" for arm, found in spans.items())
    return "withheld", "walls_differ", f"the wall spans {listed}"


def _span(run: Run) -> tuple[str, int]:
    """Return where a run's wall comes from, and of how many optimizer steps it is where it is of these."""
    source = "" if run.wall is None else run.wall.source
    return source, run.agent.num_steps if source == "steps" else 0


def _span_words(spans: Sequence[tuple[str, int]]) -> str:
    names = {"fit": "fit()", "process": "the whole process", "": "an unknown time"}
    nums = [num for source, num in spans if source == "steps"]
    words = [names[source] for source, _ in spans if source != "steps"]
    if nums:
        steps = f"{nums[0]}" if len(nums) == 1 else f"{nums[0]} to {nums[-1]}"
        words.append(f"{steps} seen optimizer step{'' if nums == [1] else 's'}")
    return " or ".join(words)


def _check_warnings(metric: MetricAnalysis | None, warnings: Sequence[AnalysisWarning]) -> _Outcome | None:
    found = {warning.code: warning for warning in warnings}
    code = next((code for code in _TAKE_BACK if code in found), None)
    if code is None or metric is None or metric.change not in {"better", "worse"}:
        return None
    return "inconclusive", code, found[code].words


def _decide(metric: MetricAnalysis | None) -> _Outcome:
    if metric is None or metric.change == "unknown":
        return "withheld", (metric.effect_reason if metric else None) or "no_value", "the primary metric has no effect"
    if metric.change == "new":
        return "withheld", "zero_baseline", "the base arm's value is 0"
    if metric.change in {"lower", "higher"}:
        return "withheld", "no_direction", "neither lower nor higher is better for the primary metric"
    if metric.change == "better":
        return "better", _certain(metric), None
    if metric.change == "worse":
        return "worse", _certain(metric), None
    return "inconclusive", "no_difference" if metric.change == "no_change" else "interval_includes_zero", None


def _certain(metric: MetricAnalysis) -> str:
    return "exact" if metric.exact else "interval_excludes_zero"
