"""Statistics of paired runs, pure and small: log-ratios, t intervals, how many pairs would settle it.

The unit is the pair of fresh processes. An effect is ln(other / base): -0.105 is 10 % less time. The t interval assumes
that the pairs' effects are independent and roughly normal; the range needs neither more than independence.
"""

import functools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "MIN_PAIRS",
    "Moments",
    "PairedEffect",
    "WelchInterval",
    "log_ratio",
    "moments",
    "paired_effect",
    "pairs_needed",
    "student_t_quantile",
    "welch_interval",
]

ALL_EQUAL = "all values are equal: the interval has no width and says nothing about rare differences"
MAX_PAIRS_NEEDED = 100_000
MIN_PAIRS = 3
"""Fewer pairs give no verdict and no warning: with two, Student's t has a single degree of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Size, mean and standard deviation of a sample."""

    n: int
    mean: float
    sd: float | None
    """With n - 1 in the denominator; None for a single value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedEffect:
    """What n pairs say about one metric; all values but `n` and `range_coverage` are natural logarithms of ratios."""

    n: int
    mean: float
    sd: float | None
    median: float
    low: float
    """The smallest pair's."""
    high: float
    """The largest pair's."""
    range_coverage: float
    """Probability that [low, high] holds the true median: 1 - 2**(1 - n)."""
    t_low: float | None
    """Student's interval for the mean, None for a single pair."""
    t_high: float | None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WelchInterval:
    """The difference of two means, b - a, with its interval; the variances need not be equal."""

    difference: float
    low: float
    high: float
    df: float
    """Degrees of freedom after Welch and Satterthwaite."""


def log_ratio(base: float, other: float) -> float | None:
    """Return ln(other / base), None unless both are positive and finite as doubles."""
    if not (0 < base <= sys.float_info.max and 0 < other <= sys.float_info.max):
        return None
    ratio = float(other) / float(base)
    return math.log(ratio) if 0 < ratio < math.inf else math.log(other) - math.log(base)


def moments(values: Sequence[float]) -> Moments:
    """Return the moments of a sample of at least one finite value.

    Raises:
        ValueError: If there is no value, or one is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"a sample needs finite values, not {list(values)[:5]}")
    if min(values) == max(values):
        return Moments(n=len(values), mean=float(values[0]), sd=0.0 if len(values) > 1 else None)
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Moments(n=len(values), mean=mean, sd=math.sqrt(variance))


def paired_effect(log_ratios: Sequence[float], *, alpha: float = 0.05) -> PairedEffect:
    """Return what the pairs' log-ratios say together.

    Raises:
        ValueError: If there is no pair, or a log-ratio is not finite.
    """
    sample = moments(log_ratios)
    half = None if sample.sd is None else _half_width(sample.n, sample.sd, alpha)
    return PairedEffect(
        n=sample.n,
        mean=sample.mean,
        sd=sample.sd,
        median=statistics.median(log_ratios),
        low=min(log_ratios),
        high=max(log_ratios),
        range_coverage=1 - 2.0 ** (1 - sample.n),
        t_low=None if half is None else sample.mean - half,
        t_high=None if half is None else sample.mean + half,
        note=ALL_EQUAL if sample.sd == 0 else None,
    )


def pairs_needed(mean: float, sd: float, alpha: float = 0.05) -> int | None:
    """Return the fewest pairs whose t interval would exclude 0 if mean and sd stayed as they are.

    None if no number up to `MAX_PAIRS_NEEDED` would, above all for a mean of 0.
    """
    if mean == 0:
        return None
    # The normal quantile is below Student's, so this many pairs or more are needed.
    floor = (statistics.NormalDist().inv_cdf(1 - alpha / 2) * sd / abs(mean)) ** 2
    n = max(MIN_PAIRS, math.floor(min(floor, MAX_PAIRS_NEEDED + 1)))
    while n <= MAX_PAIRS_NEEDED:
        if _half_width(n, sd, alpha) < abs(mean):
            return n
        n += 1
    return None


def welch_interval(a: Moments, b: Moments, *, alpha: float = 0.05) -> WelchInterval | None:
    """Return the interval for mean b - mean a, None if a sample has a single value.

    Source: B. L. Welch, Biometrika 34 (1947), https://doi.org/10.1093/biomet/34.1-2.28
    """
    if a.sd is None or b.sd is None:
        return None
    difference = b.mean - a.mean
    variance_a, variance_b = a.sd**2 / a.n, b.sd**2 / b.n
    variance = variance_a + variance_b
    if variance == 0:
        return WelchInterval(difference=difference, low=difference, high=difference, df=a.n + b.n - 2)
    # Shares instead of the textbook's squares, which underflow for small variances.
    share_a, share_b = variance_a / variance, variance_b / variance
    df = 1 / (share_a**2 / (a.n - 1) + share_b**2 / (b.n - 1))
    half = student_t_quantile(1 - alpha / 2, df) * math.sqrt(variance)
    return WelchInterval(difference=difference, low=difference - half, high=difference + half, df=df)


@functools.lru_cache(maxsize=1024)
def student_t_quantile(p: float, df: float) -> float:
    """Return the value that Student's t with `df` degrees of freedom stays below with probability `p`.

    Raises:
        ValueError: Unless 0 < p < 1 and df > 0.
    """
    if not (0 < p < 1 and df > 0):
        raise ValueError(f"no quantile of Student's t for p = {p}, df = {df}; 0 < p < 1 and df > 0 are needed")
    if p < 0.5:
        return -student_t_quantile(1 - p, df)
    # The tail is convex, so Newton's steps from the normal quantile, which is below, never pass the solution.
    t = statistics.NormalDist().inv_cdf(p)
    while (step := (_upper_tail(t, df) - (1 - p)) / _density(t, df)) > 1e-14 * t:
        t += step
    return t


def _half_width(n: int, sd: float, alpha: float) -> float:
    return student_t_quantile(1 - alpha / 2, n - 1) * sd / math.sqrt(n) if sd else 0.0


def _density(t: float, df: float) -> float:
    """Return the density of Student's t at t."""
    log_scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(df * math.pi) / 2
    return math.exp(log_scale - (df + 1) / 2 * math.log1p(t * t / df))


def _upper_tail(t: float, df: float) -> float:
    """Return the probability that Student's t exceeds t >= 0."""
    if t == 0:
        return 0.5
    return _incomplete_beta(df / (df + t * t), df / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b) for 0 < x <= 1.

    Source: https://dlmf.nist.gov/8.17.E22
    """
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a * _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Evaluate 1/(1+ d1/(1+ d2/(1+ …))) by Lentz's method, https://dlmf.nist.gov/3.10.E16 ."""
    tiny = 1e-300
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(1, 10_000):
        m = step // 2
        if step % 2:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / ((1 + numerator * d) or tiny)
        c = (1 + numerator / c) or tiny
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return 1 / fraction
