"""One metric of two reports: the difference of its effects, its word, and whether its base arms agree. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lucid_profiler.between import (
    ROUNDING,
    Judgement,
    RowVerdict,
    amounts,
    changed,
    effects,
    exact_interval,
    judged,
    measured_interval,
    pairs_needed_each,
    ratio_order,
)
from lucid_profiler.metrics import MetricAnalysis
from lucid_profiler.pairs import WelchInterval, log_ratio, moments, welch_interval
from lucid_profiler.records import Better

__all__ = ["Canary", "DiffRow", "compare_values"]

Number = float | int
_WORDS = frozenset({"better", "worse", "lower", "higher"})
_Values = Sequence[tuple[Number, Number]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The base arms of both reports against each other, as ln(b / a) of one metric."""

    metric: str
    interval: WelchInterval
    is_quiet: bool
    """Whether the difference is within the limit."""
    is_certain: bool
    """Whether the interval excludes 0; one that is loud and not certain cannot tell the base arms apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRow:
    """One metric of both reports."""

    metric: str
    unit: str
    better: Better
    exact: bool
    a: MetricAnalysis
    b: MetricAnalysis
    difference: WelchInterval | None
    """Of the mean effects, b - a: the logarithm of the ratio of the paired ratios, infinite where a value appears or
    vanishes. Of an exact metric the range over single pairs. None if either report has no effect."""
    amount: WelchInterval | None
    """The same of what the other arm adds, in the metric's unit; None where the units differ."""
    canary: Canary | None
    """Of this metric."""
    verdict: RowVerdict
    """How the effect in b compares with that in a."""
    reason: str
    """A code, such as `interval_excludes_zero`, `within_margin` or, of what is not comparable, `too_few_pairs`."""
    pairs_needed: int | None
    """Of an inconclusive one: the pairs in each report that would settle it."""
    bent_by: str | None
    """What bent this measurement in either report, such as `drift_explains`, whatever the interval says."""


def compare_values(
    name: str,
    metrics: tuple[MetricAnalysis, MetricAnalysis],
    values: tuple[_Values, _Values],
    *,
    alpha: float,
    canary_limit: float,
    margin: float | None = None,
    obstacle: str | None = None,
    bent_by: str | None = None,
) -> DiffRow:
    """Return one metric of both reports.

    Args:
        name: of the metric.
        metrics: its analyses in both reports.
        values: the pairs' values behind them.
        alpha: two-sided rate of false verdicts.
        canary_limit: percent by which the base arms may differ.
        margin: in percent, within which differences are none.
        obstacle: why there is no word.
        bent_by: the code of what takes back better, worse and within the margin, such as `drift_explains`.
    """
    a, b = metrics
    exact = a.exact and b.exact
    logs = effects(values[0]), effects(values[1])
    difference = _interval(*logs, exact=exact, alpha=alpha)
    added = amounts(values[0]), amounts(values[1])
    amount = _interval(*added, exact=exact, alpha=alpha) if a.unit == b.unit else None
    # Where every difference is one, it need not be a ratio.
    basis = amount if exact and difference is None else difference
    judgement = _judgement(basis, metrics, obstacle=obstacle, margin=margin)
    if exact and margin is None and judgement.reason == "no_difference" and (sign := ratio_order(*values)):
        judgement = changed(b.better, is_lower=sign < 0)
    if bent_by is not None and (judgement.verdict in _WORDS or judgement.reason == "within_margin"):
        judgement = Judgement(verdict="inconclusive", reason=bent_by)
    needed = None
    if judgement.reason == "interval_includes_zero" and not exact and logs[0] and logs[1]:
        needed = pairs_needed_each(moments(logs[0]), moments(logs[1]), alpha=alpha, margin=margin)
    return DiffRow(
        metric=name,
        unit=b.unit,
        better=b.better,
        exact=exact,
        a=a,
        b=b,
        difference=difference,
        amount=amount,
        canary=_canary(name, values, alpha=alpha, limit=canary_limit),
        verdict=judgement.verdict,
        reason=judgement.reason,
        pairs_needed=needed,
        bent_by=bent_by,
    )


def _interval(
    a: Sequence[Number] | None, b: Sequence[Number] | None, *, exact: bool, alpha: float
) -> WelchInterval | None:
    if not a or not b:
        return None
    return exact_interval(a, b) if exact else measured_interval(a, b, alpha=alpha)


def _judgement(
    difference: WelchInterval | None,
    metrics: tuple[MetricAnalysis, MetricAnalysis],
    *,
    obstacle: str | None,
    margin: float | None,
) -> Judgement:
    if obstacle is None and difference is not None:
        return judged(difference, metrics[1].better, margin)
    if obstacle is None:
        reasons = [metric.effect_reason for metric in metrics if metric.effect_reason]
        obstacle = reasons[0] if reasons else "too_few_pairs"
    return Judgement(verdict="not_comparable", reason=obstacle)


def _canary(name: str, values: tuple[_Values, _Values], *, alpha: float, limit: float) -> Canary | None:
    logs = [[log for base, _ in side if (log := log_ratio(1.0, base)) is not None] for side in values]
    if not logs[0] or not logs[1]:
        return None
    interval = welch_interval(moments(logs[0]), moments(logs[1]), alpha=alpha)
    if interval is None:
        return None
    return Canary(
        metric=name,
        interval=interval,
        is_quiet=abs(interval.difference) <= _log_limit(limit, interval.difference) + ROUNDING,
        is_certain=not interval.low <= 0 <= interval.high,
    )


def _log_limit(percent: float, difference: float) -> float:
    """Return the size of the logarithm of a change by so many percent, in the direction of a difference."""
    if difference > 0:
        return math.log1p(percent / 100)
    return -math.log1p(-percent / 100) if percent < 100 else math.inf
