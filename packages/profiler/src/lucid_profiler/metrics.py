"""One metric over the runs of two arms: medians, the paired effect, and what changed."""

import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lucid_profiler.drift import PairedLogs
from lucid_profiler.pairs import PairedEffect, log_ratio, paired_effect
from lucid_profiler.records import Better, Metric, Run

__all__ = [
    "ArmSummary",
    "Change",
    "MetricAnalysis",
    "analyze_metric",
    "metric_names",
    "paired_logs",
    "paired_values",
    "run_effect",
]

Change = Literal["better", "worse", "lower", "higher", "no_change", "new", "mixed", "inconclusive", "unknown"]
Number = float | int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One metric over the runs of one arm that the statistics use, in the metric's unit; None without runs."""

    n: int
    median: float | int | None
    min: float | int | None
    max: float | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricAnalysis:
    """One metric, both arms and their pairs."""

    unit: str
    better: Better
    exact: bool
    """Whether equal runs give equal numbers, so that any difference is one."""
    base: ArmSummary
    other: ArmSummary
    ratio_of_medians: float | None
    """other / base; None for a base of 0. It need not equal the exponential of the effect's median."""
    effect: PairedEffect | None
    """Over the pairs in which both runs have a value; None if one of those has no logarithm."""
    effect_reason: str | None
    """Why there is no effect: `no_value`, `zero_baseline`, `not_positive`."""
    change: Change
    """`new`: a base of 0 and another value; `lower`, `higher`: where neither is better; `mixed`: both ways."""
    num_missing: int
    """Included pairs in which one run or both have no value; they count on neither side."""
    reasons: dict[str, int]
    """Why not, counted by run: `nan`, `inf`, `-inf`, `not_recorded` where the metric is absent, else as recorded."""


def metric_names(pairs: Sequence[tuple[Run, Run]]) -> list[str]:
    """Return the names of all metrics that a run of these pairs records, sorted."""
    return sorted({name for pair in pairs for run in pair for name in run.metrics})


def run_effect(base: Run, other: Run, name: str) -> float | None:
    """Return ln(other / base) of one metric of two runs, None where it has no meaning."""
    values = [_value(run.metrics.get(name)) for run in (base, other)]
    return None if values[0] is None or values[1] is None else log_ratio(values[0], values[1])


def paired_values(name: str, pairs: Sequence[tuple[Run, Run]]) -> list[tuple[Number, Number]]:
    """Return one metric of the pairs in which both runs have a finite value, base first."""
    values = [(_value(base.metrics.get(name)), _value(other.metrics.get(name))) for base, other in pairs]
    return [(base, other) for base, other in values if base is not None and other is not None]


def paired_logs(name: str, pairs: Sequence[tuple[Run, Run]]) -> list[PairedLogs]:
    """Return the logarithms of one metric with the places of their runs, for the pairs in which both have one."""
    found = []
    for base, other in pairs:
        values = [_value(run.metrics.get(name)) for run in (base, other)]
        logs = [math.log(value) for value in values if value is not None and value > 0]
        if len(logs) == 2:
            found.append(
                PairedLogs(pair=base.pair, base=logs[0], other=logs[1], base_run=base.run, other_run=other.run)
            )
    return found


def analyze_metric(name: str, pairs: Sequence[tuple[Run, Run]], *, alpha: float) -> MetricAnalysis:
    """Analyse one metric over included pairs of (base, other) runs, at least one of which records it."""
    metric = next(run.metrics[name] for pair in pairs for run in pair if name in run.metrics)
    values = paired_values(name, pairs)
    effect, reason = _effect(values, alpha)
    reasons = [_reason(run.metrics.get(name)) for pair in pairs for run in pair]
    base, other = _summarize([pair[0] for pair in values]), _summarize([pair[1] for pair in values])
    return MetricAnalysis(
        unit=metric.unit,
        better=metric.better,
        exact=metric.exact,
        base=base,
        other=other,
        ratio_of_medians=_ratio(base.median, other.median),
        effect=effect,
        effect_reason=reason,
        change=_change(metric, values, effect),
        num_missing=len(pairs) - len(values),
        reasons=dict(sorted(Counter(filter(None, reasons)).items())),
    )


def _value(metric: Metric | None) -> Number | None:
    return None if metric is None or _reason(metric) else metric.value


def _reason(metric: Metric | None) -> str:
    """Return why a run has no value, empty if it has one."""
    if metric is None:
        return "not_recorded"
    if metric.value is None:
        return metric.reason or "unknown"
    if abs(metric.value) <= sys.float_info.max:
        return ""
    return str(metric.value) if isinstance(metric.value, float) else "beyond_double"


def _summarize(values: Sequence[Number]) -> ArmSummary:
    if not values:
        return ArmSummary(n=0, median=None, min=None, max=None)
    return ArmSummary(n=len(values), median=_median(values), min=min(values), max=max(values))


def _median(values: Sequence[Number]) -> Number:
    median = statistics.median(values)
    # The sum of two middle values can be beyond the range of a double although their mean is not.
    return median if abs(median) <= sys.float_info.max else statistics.median([value / 2 for value in values]) * 2


def _ratio(base: Number | None, other: Number | None) -> float | None:
    ratio = other / base if base and other is not None else math.inf
    return ratio if math.isfinite(ratio) else None


def _effect(values: Sequence[tuple[Number, Number]], alpha: float) -> tuple[PairedEffect | None, str | None]:
    if not values:
        return None, "no_value"
    ratios = [log_ratio(base, other) for base, other in values]
    known = [ratio for ratio in ratios if ratio is not None]
    # Leaving out single pairs for their values would be a selection: one without logarithm, and there is no effect.
    if len(known) < len(ratios):
        return None, "zero_baseline" if any(base == 0 for base, _ in values) else "not_positive"
    return paired_effect(known, alpha=alpha), None


def _change(metric: Metric, values: Sequence[tuple[Number, Number]], effect: PairedEffect | None) -> Change:
    if not values:
        return "unknown"
    if all(base == other for base, other in values):
        return "no_change"
    if all(base == 0 for base, _ in values):
        return "new"
    return _exact_change(metric.better, values) if metric.exact else _measured_change(metric.better, effect)


def _exact_change(better: Better, values: Sequence[tuple[Number, Number]]) -> Change:
    is_lower = any(other < base for base, other in values)
    is_higher = any(other > base for base, other in values)
    return "mixed" if is_lower and is_higher else _direction(better, is_lower=is_lower)


def _measured_change(better: Better, effect: PairedEffect | None) -> Change:
    if effect is None:
        return "unknown"
    if effect.t_low is None or effect.t_high is None or effect.t_low <= 0 <= effect.t_high:
        return "inconclusive"
    return _direction(better, is_lower=effect.mean < 0)


def _direction(better: Better, *, is_lower: bool) -> Change:
    if better == "none":
        return "lower" if is_lower else "higher"
    return "better" if is_lower == (better == "lower") else "worse"
