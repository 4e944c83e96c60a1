import math
import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lucid_profiler.pairs import (
    MAX_PAIRS_NEEDED,
    log_ratio,
    moments,
    paired_effect,
    pairs_needed,
    student_t_quantile,
    welch_interval,
)

samples = st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=12)


def spread(values: Sequence[float]) -> bool:
    """Return whether a sample's spread is well above rounding, where two implementations must agree."""
    return max(values) - min(values) > 1e-6


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 7, 9, 19, 30, 100, 1000, 1.5, 4.37, 29.9, 1e5])
@pytest.mark.parametrize("p", [0.5, 0.6, 0.9, 0.95, 0.975, 0.995, 0.9995, 0.999999, 0.025, 1e-6])
def test_quantiles_of_students_t_are_scipys(p: float, df: float) -> None:
    """Our quantile agrees with scipy's to ten digits, for whole and broken degrees of freedom."""
    assert student_t_quantile(p, df) == pytest.approx(float(stats.t.ppf(p, df)), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("p", "df"), [(0.0, 3), (1.0, 3), (0.5, 0), (0.5, -1), (math.nan, 3)])
def test_quantiles_that_do_not_exist_are_refused(p: float, df: float) -> None:
    """Probabilities outside (0, 1) and no degrees of freedom are a ValueError."""
    with pytest.raises(ValueError, match="no quantile"):
        student_t_quantile(p, df)


@given(samples.filter(spread), st.sampled_from([0.01, 0.05, 0.2]))
@settings(max_examples=100)
def test_the_interval_of_the_mean_is_scipys(values: list[float], alpha: float) -> None:
    """Mean, deviation, median, range and t interval agree with scipy and the standard library."""
    effect = paired_effect(values, alpha=alpha)
    expected = stats.ttest_1samp(values, 0).confidence_interval(1 - alpha)
    assert (effect.t_low, effect.t_high) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-9)
    assert effect.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-12)
    assert effect.sd == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-12)
    assert (effect.low, effect.high) == (min(values), max(values))
    assert effect.median == statistics.median(values)
    assert effect.note is None


@given(st.floats(-5, 5), st.integers(2, 20))
@settings(max_examples=100)
def test_equal_values_give_an_interval_without_width(value: float, n: int) -> None:
    """Samples that are all equal have their own value as mean, both ends equal to it, a note, and no NaN."""
    effect = paired_effect([value] * n)
    assert effect.mean == effect.median == effect.low == effect.high == effect.t_low == effect.t_high == value
    assert effect.sd == 0.0
    assert effect.note is not None
    assert "no width" in effect.note


def test_a_single_pair_has_no_interval() -> None:
    """One pair has a value and a range that covers nothing, and no deviation."""
    effect = paired_effect([-0.1])
    assert (effect.n, effect.mean, effect.range_coverage) == (1, -0.1, 0.0)
    assert (effect.sd, effect.t_low, effect.t_high, effect.note) == (None, None, None, None)


@pytest.mark.parametrize("values", [[], [math.nan, 1.0], [math.inf]])
def test_a_sample_without_finite_values_is_refused(values: list[float]) -> None:
    """No values, or values that are not finite, are a ValueError."""
    with pytest.raises(ValueError, match="finite values"):
        paired_effect(values)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8])
def test_the_range_covers_the_median_as_often_as_it_says(n: int) -> None:
    """Over simulated skewed samples, [low, high] holds the true median with probability 1 - 2**(1 - n)."""
    rng = random.Random(n)
    draws = 4000
    effects = [paired_effect([rng.expovariate(1.0) for _ in range(n)]) for _ in range(draws)]
    hits = sum(effect.low <= math.log(2) <= effect.high for effect in effects)
    stated = 1 - 2.0 ** (1 - n)
    assert {effect.range_coverage for effect in effects} == {stated}
    low, high = stats.binom.interval(0.999, draws, stated)
    assert low <= hits <= high


@pytest.mark.parametrize("n", [3, 6, 10])
def test_the_t_interval_covers_the_mean_as_often_as_it_says(n: int) -> None:
    """Over simulated normal samples, the 95 % interval holds the true mean in 95 % of cases."""
    rng = random.Random(100 + n)
    draws = 3000
    hits = 0
    for _ in range(draws):
        effect = paired_effect([rng.gauss(0.02, 0.003) for _ in range(n)])
        assert effect.t_low is not None
        assert effect.t_high is not None
        hits += effect.t_low <= 0.02 <= effect.t_high
    low, high = stats.binom.interval(0.999, draws, 0.95)
    assert low <= hits <= high


@pytest.mark.parametrize(
    ("base", "other", "expected"),
    [
        (2.0, 1.0, -math.log(2)),
        (120.85, 108.75, -0.10550),
        (2**60, 2**60 + 2**20, 2.0**-40),
        (0, 0, None),
        (0.0, 5.0, None),
        (5.0, -0.0, None),
        (-1.0, 2.0, None),
        (-1.0, -2.0, None),
        (math.nan, 1.0, None),
        (1.0, math.inf, None),
        (1e-300, 1e300, 600 * math.log(10)),
        (1e300, 1e-300, -600 * math.log(10)),
        (5e-324, 1e308, math.log(1e308) - math.log(5e-324)),
        (10**300, 10**301, math.log(10)),
        (10**400, 1, None),
        (1, 10**400, None),
    ],
)
def test_a_log_ratio_exists_for_positive_finite_values_alone(base: float, other: float, expected: float | None) -> None:
    """Zero, negative and non-finite values never go into a logarithm; extreme ones do not overflow."""
    got = log_ratio(base, other)
    if expected is None:
        assert got is None
    else:
        assert got == pytest.approx(expected, rel=1e-4)


@given(st.floats(-0.2, 0.2).filter(lambda mean: abs(mean) > 1e-3), st.floats(0.0001, 0.1))
@settings(max_examples=50)
def test_the_pairs_needed_are_the_fewest(mean: float, sd: float) -> None:
    """With that many pairs the interval excludes 0, with one fewer it does not (scipy's quantiles)."""
    n = pairs_needed(mean, sd)
    assert n is not None

    def excludes(n: int) -> bool:
        return bool(stats.t.ppf(0.975, n - 1) * sd / math.sqrt(n) < abs(mean))

    assert excludes(n)
    assert n == 3 or not excludes(n - 1)


def test_some_questions_no_number_of_pairs_settles() -> None:
    """No effect, or one far below the noise, has no number; no noise needs the minimum."""
    assert pairs_needed(0.0, 0.1) is None
    assert pairs_needed(1e-9, 0.1) is None
    assert pairs_needed(1e-300, 1e300) is None
    assert pairs_needed(0.1, 0.0) == 3
    assert MAX_PAIRS_NEEDED > 1000


@given(samples.filter(spread), samples.filter(spread))
@settings(max_examples=100)
def test_the_interval_between_two_samples_is_scipys(a: list[float], b: list[float]) -> None:
    """Difference, degrees of freedom and interval agree with scipy's Welch test."""
    got = welch_interval(moments(a), moments(b))
    assert got is not None
    test = stats.ttest_ind(b, a, equal_var=False)
    expected = test.confidence_interval(0.95)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-9)
    assert got.df == pytest.approx(test.df, rel=1e-6)


def test_two_samples_without_spread_differ_exactly() -> None:
    """Without any spread the interval has no width; with a single value there is none."""
    got = welch_interval(moments([0.5, 0.5]), moments([0.25, 0.25, 0.25]))
    assert got is not None
    assert (got.difference, got.low, got.high, got.df) == (-0.25, -0.25, -0.25, 3)
    assert welch_interval(moments([0.5]), moments([0.25, 0.3])) is None
