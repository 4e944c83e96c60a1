"""The difference of one metric between two reports: an interval, a word, and how many pairs would settle it. Pure.

A difference is b - a of the reports' mean paired effects: of logarithms, and then it is the logarithm of the ratio of
their paired ratios, or of amounts in the metric's unit. Metrics that are exact have a range instead of an interval.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from lucid_profiler.pairs import MAX_PAIRS_NEEDED, Moments, WelchInterval, log_ratio, moments, welch_interval
from lucid_profiler.records import Better

__all__ = [
    "ROUNDING",
    "Judgement",
    "RowVerdict",
    "amounts",
    "changed",
    "effects",
    "exact_interval",
    "judged",
    "margin_logs",
    "measured_interval",
    "pairs_needed_each",
    "ratio_order",
]

Number = float | int
RowVerdict = Literal["better", "worse", "lower", "higher", "same", "inconclusive", "not_comparable"]
ROUNDING = 1e-12
"""Logarithms that differ by less do so by the way in which they were computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a difference comes to, and why."""

    verdict: RowVerdict
    reason: str


def effects(values: Sequence[tuple[Number, Number]]) -> list[float] | None:
    """Return what the other arm does to each (base, other) pair, as logarithms, None where they have no meaning.

    Equal values are 0, also where they have no logarithm. Where every base is 0 and every other value above, the value
    appears: inf. Where every base is above 0 and every other value 0, it vanishes: -inf.
    """
    if not values:
        return None
    if all(base == other for base, other in values):
        return [0.0] * len(values)
    logs = [log_ratio(base, other) for base, other in values]
    known = [log for log in logs if log is not None]
    if len(known) == len(values):
        return known
    if all(base == 0 < other for base, other in values):
        return [math.inf] * len(values)
    if all(other == 0 < base for base, other in values):
        return [-math.inf] * len(values)
    return None


def amounts(values: Sequence[tuple[Number, Number]]) -> list[Number]:
    """Return what the other arm adds to each (base, other) pair, in the metric's unit; negative where it is less."""
    added = [other - base for base, other in values]
    return [value if abs(value) <= sys.float_info.max else math.copysign(math.inf, value) for value in added]


def measured_interval(a: Sequence[Number], b: Sequence[Number], *, alpha: float) -> WelchInterval | None:
    """Return Welch's interval for mean b - mean a, without width where one side is infinite and the other is not.

    None if a side has a single value, if both are infinite on the same side, or if squares are beyond a double.
    """
    if min(len(a), len(b)) < 2:
        return None
    if all(map(math.isfinite, (*a, *b))):
        try:
            return welch_interval(moments(a), moments(b), alpha=alpha)
        except OverflowError:
            return None
    difference = b[0] - a[0]
    if math.isnan(difference):
        return None
    return WelchInterval(difference=difference, low=difference, high=difference, df=len(a) + len(b) - 2)


def exact_interval(a: Sequence[Number], b: Sequence[Number]) -> WelchInterval | None:
    """Return from where to where the differences of single pairs, b - a, go; a single pair a side is enough."""
    low, high = float(min(b)) - float(max(a)), float(max(b)) - float(min(a))
    if math.isnan(low) or math.isnan(high):
        return None
    if not (math.isfinite(low) and math.isfinite(high)):
        return WelchInterval(difference=low, low=low, high=high, df=len(a) + len(b) - 2)
    middle = math.fsum(value / len(b) for value in b) - math.fsum(value / len(a) for value in a)
    return WelchInterval(difference=middle, low=low, high=high, df=len(a) + len(b) - 2)


def ratio_order(a: Sequence[tuple[Number, Number]], b: Sequence[tuple[Number, Number]]) -> int:
    """Return whether the paired ratios of b, none of which is further from a's than logarithms tell, are above them.

    1 where some are above and none below, -1 the other way round; 0 where they are equal, where they are on both sides,
    and where a value is no integer or a base is 0: then they may differ by the way in which they were computed.
    """
    ratios = [
        [Fraction(other, base) for base, other in side if isinstance(base, int) and isinstance(other, int) and base]
        for side in (a, b)
    ]
    if not a or not b or [len(side) for side in ratios] != [len(a), len(b)]:
        return 0
    is_above, is_below = max(ratios[1]) > min(ratios[0]), min(ratios[1]) < max(ratios[0])
    return is_above - is_below


def margin_logs(percent: float) -> tuple[float, float]:
    """Return the logarithms of a change by -percent and by +percent.

    Raises:
        ValueError: unless it is above 0 and below 100.
    """
    if not 0 < percent < 100:
        raise ValueError(f"a margin of {percent} % is not above 0 and below 100")
    return math.log1p(-percent / 100), math.log1p(percent / 100)


def judged(interval: WelchInterval, better: Better, margin: float | None = None) -> Judgement:
    """Return what an interval of logarithms comes to.

    Args:
        interval: of b - a.
        better: the metric's direction.
        margin: in percent; an interval that lies in it as a whole is the same, also where it excludes 0.
    """
    if max(abs(interval.low), abs(interval.high)) <= ROUNDING:
        return Judgement(verdict="same", reason="no_difference")
    if margin is not None:
        low, high = margin_logs(margin)
        if low - ROUNDING <= interval.low and interval.high <= high + ROUNDING:
            return Judgement(verdict="same", reason="within_margin")
    if interval.low <= 0 <= interval.high:
        return Judgement(verdict="inconclusive", reason="interval_includes_zero")
    is_lower = interval.high < 0
    reason = "interval_excludes_zero"
    if math.isinf(interval.difference):
        reason = "vanishes" if is_lower else "appears"
    return changed(better, is_lower=is_lower, reason=reason)


def changed(better: Better, *, is_lower: bool, reason: str = "interval_excludes_zero") -> Judgement:
    """Return the word for a metric that is certainly another one."""
    if better == "none":
        return Judgement(verdict="lower" if is_lower else "higher", reason=reason)
    return Judgement(verdict="better" if is_lower == (better == "lower") else "worse", reason=reason)


def pairs_needed_each(a: Moments, b: Moments, *, alpha: float, margin: float | None = None) -> int | None:
    """Return the fewest pairs in each report that would settle it if means and spreads stayed as they are.

    Settled is an interval that excludes 0, or with a margin in percent one that lies in it. None if no number up to
    `MAX_PAIRS_NEEDED` would, above all for a difference of 0 without a margin.
    """
    if a.sd is None or b.sd is None:
        return None
    difference = b.mean - a.mean
    room = abs(difference)
    if margin is not None:
        low, high = margin_logs(margin)
        room = max(room, min(high - difference, difference - low))
    if room <= 0 or not _settles(MAX_PAIRS_NEEDED, room, (a.sd, b.sd), alpha=alpha):
        return None
    low_n, high_n = 2, MAX_PAIRS_NEEDED
    while low_n + 1 < high_n:
        middle = (low_n + high_n) // 2
        if _settles(middle, room, (a.sd, b.sd), alpha=alpha):
            high_n = middle
        else:
            low_n = middle
    return high_n


def _settles(n: int, room: float, sds: tuple[float, float], *, alpha: float) -> bool:
    a, b = (Moments(n=n, mean=0.0, sd=sd) for sd in sds)
    interval = welch_interval(a, b, alpha=alpha)
    return interval is not None and interval.high < room
