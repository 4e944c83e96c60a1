"""What can bend paired runs, found by rules that are fixed here and not chosen after a look at the numbers.

Everything works on logarithms of one metric, each with the number of its run, which is its place in time. A rule warns
and leaves nothing out. Each is a test at `WARNING_ALPHA`, or has a limit far above what independent noise shows, so
that all of them together seldom speak without a cause; docs/statistics.md has their measured rates. Two are apart:
`drift_explains` asks at the rate of the verdict that it takes back, and `order_untested` says what could not be asked.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lucid_profiler.pairs import MIN_PAIRS, PairedEffect, moments, student_t_quantile

__all__ = [
    "GAP_LIMIT",
    "RESOLUTION",
    "WARNING_ALPHA",
    "WARNING_WORDS",
    "AnalysisWarning",
    "PairedLogs",
    "Slope",
    "WarningCode",
    "find_warnings",
    "order_untested",
    "slope_per_run",
]

WARNING_ALPHA = 0.01
"""Two-sided rate at which a test below warns of independent noise; all rules together warn of about 3 %."""
GAP_LIMIT = 6.0
"""Gap between two groups of runs, in deviations within the groups."""
_MIN_PAIRS_OF_ORDER = 2
MIN_PAIRS_FOR_GAP = 4
"""Reports of normal noise show a gap beyond the limit: with three pairs 3.6 %, four 1.0 %, five 0.2 %, six 0.03 %."""
RESOLUTION = 1e-6
"""A logarithm below which nothing is worth a warning: rounding can make equal runs differ by less."""

WarningCode = Literal[
    "drift",
    "step",
    "two_modes",
    "order_effect",
    "outlying_pair",
    "drift_explains",
    "control_differs",
    "order_untested",
]

WARNING_WORDS: dict[WarningCode, str] = {
    "drift": "the runs became slower or faster with time",
    "step": "all runs from one on are apart from all runs before it",
    "two_modes": "the runs fall into two groups that change places in time",
    "order_effect": "pairs that began with one arm have another effect than pairs that began with the other",
    "outlying_pair": "one pair is far from the others",
    "drift_explains": "one arm ran later than the other on average, and drift may be what made the difference",
    "control_differs": "the base differs from itself: the machine shows a difference where there is none",
    "order_untested": "too few pairs began with one of the arms to test what a first run leaves to the second",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedLogs:
    """One pair: the logarithms of both values, and where its runs stand in the order."""

    pair: int
    base: float
    other: float
    base_run: int
    other_run: int

    @property
    def effect(self) -> float:
        """Return ln(other / base)."""
        return self.other - self.base

    @property
    def distance(self) -> int:
        """Return by how many runs the other arm came later."""
        return self.other_run - self.base_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """How much a run adds to the logarithm of the next, whatever its arm."""

    per_run: float
    standard_error: float
    df: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisWarning:
    """Something that a reader of the effect should know."""

    code: WarningCode
    words: str
    """The same for every warning of a code."""
    numbers: dict[str, float]
    """By name; sizes are natural logarithms of ratios, `run` and `pair` are numbers of the report."""


def find_warnings(
    pairs: Sequence[PairedLogs], effect: PairedEffect, *, alpha: float = 0.05
) -> tuple[AnalysisWarning, ...]:
    """Apply every rule to the pairs of one metric, in any order of theirs.

    Args:
        pairs: Those in the statistics; with fewer than three nothing can be said.
        effect: What they say together.
        alpha: Two-sided rate of false verdicts.
    """
    if len(pairs) < MIN_PAIRS:
        return ()
    ordered = sorted(pairs, key=lambda pair: min(pair.base_run, pair.other_run))
    slope = slope_per_run(ordered)
    groups = _groups(ordered)
    # A step is a slope too; the step says more.
    has_step = groups is not None and groups.code == "step"
    found = [
        groups,
        None if has_step else _drift(ordered, slope),
        _order_effect(ordered),
        _outlying_pair(ordered),
        _drift_explains(ordered, (effect, slope), alpha),
    ]
    return tuple(warning for warning in found if warning is not None)


def order_untested(pairs: Sequence[PairedLogs]) -> AnalysisWarning | None:
    """Warn if fewer than two of at least three pairs began with one of the arms, so that no order effect is looked for.

    What a first run leaves to the second, such as heat, then counts as an effect of the arm that mostly came second.
    """
    num_base_first, num_other_first = map(len, _by_order(pairs))
    if len(pairs) < MIN_PAIRS or min(num_base_first, num_other_first) >= _MIN_PAIRS_OF_ORDER:
        return None
    return _warning("order_untested", num_base_first=num_base_first, num_other_first=num_other_first)


def slope_per_run(pairs: Sequence[PairedLogs]) -> Slope:
    """Fit one line through all runs in time order, each arm with a level of its own (least squares).

    The slope does not depend on the arms' levels, so that an effect is no slope. At least three pairs are needed.
    """
    arms = [[(pair.base_run, pair.base) for pair in pairs], [(pair.other_run, pair.other) for pair in pairs]]
    centred = [point for arm in arms for point in _centred(arm)]
    spread = math.fsum(x * x for x, _ in centred)
    per_run = math.fsum(x * y for x, y in centred) / spread
    residual = math.fsum((y - per_run * x) ** 2 for x, y in centred)
    df = len(centred) - 3
    return Slope(per_run=per_run, standard_error=math.sqrt(residual / df / spread), df=df)


def _centred(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    x_mean, y_mean = (math.fsum(values) / len(points) for values in zip(*points, strict=True))
    return [(x - x_mean, y - y_mean) for x, y in points]


def _drift(pairs: Sequence[PairedLogs], slope: Slope) -> AnalysisWarning | None:
    """Warn of a slope whose t interval at `WARNING_ALPHA` excludes 0."""
    half = student_t_quantile(1 - WARNING_ALPHA / 2, slope.df) * slope.standard_error
    runs = [run for pair in pairs for run in (pair.base_run, pair.other_run)]
    total = slope.per_run * (max(runs) - min(runs))
    if abs(slope.per_run) <= half or abs(total) <= RESOLUTION:
        return None
    return _warning("drift", per_run=slope.per_run, total=total, num_runs=len(runs))


def _order_effect(pairs: Sequence[PairedLogs]) -> AnalysisWarning | None:
    """Warn if pairs that began with the base differ from the others by Student's test at `WARNING_ALPHA`."""
    base_first, other_first = _by_order(pairs)
    if min(len(base_first), len(other_first)) < _MIN_PAIRS_OF_ORDER:
        return None
    a, b = moments(base_first), moments(other_first)
    df = a.n + b.n - 2
    squares = sum(group.sd**2 * (group.n - 1) for group in (a, b) if group.sd is not None)
    half = student_t_quantile(1 - WARNING_ALPHA / 2, df) * math.sqrt(squares / df * (1 / a.n + 1 / b.n))
    difference = a.mean - b.mean
    if abs(difference) <= max(half, RESOLUTION):
        return None
    return _warning("order_effect", difference=difference, num_base_first=a.n, num_other_first=b.n)


def _by_order(pairs: Sequence[PairedLogs]) -> tuple[list[float], list[float]]:
    """Return the effects of the pairs that began with the base, and of the others."""
    return [pair.effect for pair in pairs if pair.distance > 0], [pair.effect for pair in pairs if pair.distance < 0]


def _outlying_pair(pairs: Sequence[PairedLogs]) -> AnalysisWarning | None:
    """Warn if the pair that is farthest from the others lies outside what they predict, at `WARNING_ALPHA` over all.

    Source: F. E. Grubbs, Annals of Mathematical Statistics 21 (1950), https://doi.org/10.1214/aoms/1177729885 ,
    in its leave-one-out form, Bonferroni's bound over the pairs.
    """
    num_others = len(pairs) - 1
    quantile = student_t_quantile(1 - WARNING_ALPHA / (2 * len(pairs)), num_others - 1)
    found = []
    for pair in pairs:
        others = moments([other.effect for other in pairs if other is not pair])
        half = quantile * (others.sd or 0.0) * math.sqrt(1 + 1 / num_others)
        distance = abs(pair.effect - others.mean)
        if distance > max(half, RESOLUTION):
            found.append((distance, pair, others.mean))
    if not found:
        return None
    _, pair, mean = max(found, key=lambda one: one[0])
    return _warning("outlying_pair", pair=pair.pair, effect=pair.effect, mean_without=mean)


def _groups(pairs: Sequence[PairedLogs]) -> AnalysisWarning | None:
    """Warn of two groups of at least two runs each, whose gap is beyond `GAP_LIMIT` deviations within them.

    The arms are put side by side by their largest values and by their smallest, so that an effect is no gap; both must
    show one, or else a single run that is far from the others of its arm would move them all. Groups that follow each
    other in time are a step; else they are modes.
    """
    if len(pairs) < MIN_PAIRS_FOR_GAP or _split(_aligned(pairs, max)) is None:
        return None
    groups = _split(_aligned(pairs, min))
    if groups is None:
        return None
    low, high = groups
    size = _mean(high) - _mean(low)
    low_runs, high_runs = ([run for _, run, _ in group] for group in groups)
    if max(low_runs) < min(high_runs):
        return _warning("step", size=size, run=min(high_runs))
    if max(high_runs) < min(low_runs):
        return _warning("step", size=-size, run=min(low_runs))
    num_other = sum(arm for _, _, arm in high)
    return _warning(
        "two_modes", size=size, num_high_base=len(high) - num_other, num_high_other=num_other, num_runs=2 * len(pairs)
    )


_Runs = list[tuple[float, int, int]]


def _aligned(pairs: Sequence[PairedLogs], extreme: Callable[[Iterable[float]], float]) -> _Runs:
    """Return value, run and side of each run, sorted, each arm's extreme value being 0."""
    base, other = extreme(pair.base for pair in pairs), extreme(pair.other for pair in pairs)
    runs = [(pair.base - base, pair.base_run, 0) for pair in pairs]
    return sorted(runs + [(pair.other - other, pair.other_run, 1) for pair in pairs])


def _split(runs: _Runs) -> tuple[_Runs, _Runs] | None:
    """Divide sorted runs at their widest gap that leaves two on each side, None if it is not beyond the limit."""
    gaps = [high[0] - low[0] for low, high in pairwise(runs)]
    gap, split = max((gap, index + 1) for index, gap in enumerate(gaps) if 1 <= index < len(gaps) - 1)
    low, high = runs[:split], runs[split:]
    return (low, high) if gap > max(GAP_LIMIT * _deviation_within(low, high), RESOLUTION) else None


def _mean(group: _Runs) -> float:
    return math.fsum(value for value, _, _ in group) / len(group)


def _deviation_within(low: _Runs, high: _Runs) -> float:
    squares = math.fsum((value - _mean(group)) ** 2 for group in (low, high) for value, _, _ in group)
    return math.sqrt(squares / (len(low) + len(high) - 2))


def _drift_explains(
    pairs: Sequence[PairedLogs], found: tuple[PairedEffect, Slope], alpha: float
) -> AnalysisWarning | None:
    """Warn if the effect excludes 0 and no longer does once the drift's share is taken out.

    Where the other arm ran `distance` runs later on average, a slope b adds b · distance to the mean effect. ABBA with
    an even number of pairs has no distance, and nothing is asked. Else the effect must also exclude 0 on its side after
    b · distance is subtracted, with both intervals' halves added in squares: the slope is fitted within the arms, so
    under independent noise it is independent of the difference of their means. The slope is used whether or not it is
    significant: with few pairs it would bend the effect long before a test finds it.
    """
    effect, slope = found
    distance = math.fsum(pair.distance for pair in pairs) / len(pairs)
    if distance == 0 or effect.t_low is None or effect.t_high is None or effect.t_low <= 0 <= effect.t_high:
        return None
    shift = slope.per_run * distance
    shift_half = student_t_quantile(1 - alpha / 2, slope.df) * slope.standard_error * distance
    half = math.hypot((effect.t_high - effect.t_low) / 2, shift_half)
    if (effect.mean - shift) * math.copysign(1, effect.mean) > half:
        return None
    return _warning(
        "drift_explains",
        shift=shift,
        low=effect.mean - shift - half,
        high=effect.mean - shift + half,
        num_base_first=sum(pair.distance > 0 for pair in pairs),
        num_other_first=sum(pair.distance < 0 for pair in pairs),
    )


def _warning(code: WarningCode, **numbers: float) -> AnalysisWarning:
    return AnalysisWarning(code=code, words=WARNING_WORDS[code], numbers=numbers)
