import math
import random

import pytest
from scipy import stats
from tools.bench.simulated_differences import SETTINGS, Setting, rates

from lucid_profiler.between import (
    amounts,
    effects,
    exact_interval,
    judged,
    margin_logs,
    measured_interval,
    pairs_needed_each,
)
from lucid_profiler.diff import diff
from lucid_profiler.pairs import WelchInterval, moments
from lucid_profiler.records import Better, Metric
from support.paired_reports import Pairs, make_report

WALL = Metric(value=None, unit="s")
NUM_COMPARISONS = 600


def interval(low: float, high: float) -> WelchInterval:
    """Return an interval of logarithms."""
    return WelchInterval(difference=(low + high) / 2, low=low, high=high, df=5.0)


@pytest.mark.parametrize("seed", range(8))
def test_the_interval_is_that_of_scipy(seed: int) -> None:
    """Welch's interval of two samples of any size and spread, against scipy's."""
    rng = random.Random(seed)
    a, b = ([rng.gauss(-0.1, spread) for _ in range(rng.randint(2, 9))] for spread in (0.003, rng.uniform(1e-6, 0.1)))
    got = measured_interval(a, b, alpha=0.05)
    expected = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert got is not None
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), rel=1e-7)


@pytest.mark.parametrize(("difference", "margin"), [(0.004, None), (0.0, 1.0), (0.004, 1.0), (-0.02, 1.0), (0.02, 0.5)])
def test_the_pairs_that_would_settle_it_are_the_fewest(difference: float, margin: float | None) -> None:
    """With that many pairs in each report scipy's interval excludes 0 or lies in the margin; with one less not."""
    sd_a, sd_b = 0.004, 0.011
    a, b = (
        moments([mean - sd / math.sqrt(2), mean + sd / math.sqrt(2)]) for mean, sd in ((0.0, sd_a), (difference, sd_b))
    )
    n = pairs_needed_each(a, b, alpha=0.05, margin=margin)
    assert n is not None

    def is_settled(num: int) -> bool:
        error = math.hypot(sd_a, sd_b) / math.sqrt(num)
        df = error**4 / ((sd_a**4 + sd_b**4) / num**2 / (num - 1))
        half = stats.t.ppf(0.975, df) * error
        limits = margin_logs(margin) if margin else (0.0, 0.0)
        return bool(abs(difference) > half or limits[0] < difference - half < difference + half < limits[1])

    assert is_settled(n)
    assert n == 3 or not is_settled(n - 1)


def test_no_number_of_pairs_settles_equal_effects_without_a_margin() -> None:
    """A difference of 0 stays one, and a single pair has no spread."""
    sample, single = moments([0.0, 0.1]), moments([0.0])
    assert pairs_needed_each(sample, sample, alpha=0.05) is None
    assert pairs_needed_each(sample, single, alpha=0.05) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([(1.0, 2.0), (1.0, 4.0)], [math.log(2), math.log(4)]),
        ([(0, 0), (0.0, -0.0)], [0.0, 0.0]),
        ([(-3.0, -3.0)], [0.0]),
        ([(0, 5), (0, 7)], [math.inf, math.inf]),
        ([(5, 0), (7, 0)], [-math.inf, -math.inf]),
        ([(0, 5), (1, 7)], None),
        ([(-1.0, 1.0)], None),
        ([(0, -5)], None),
        ([], None),
    ],
)
def test_effects_of_zeros_and_negative_values(values: Pairs, expected: list[float] | None) -> None:
    """Equal is 0, from nothing is inf, to nothing -inf, and what has no ratio has no effect."""
    assert effects(values) == (None if expected is None else pytest.approx(expected))


def test_amounts_are_what_the_other_arm_adds() -> None:
    """They have a sign and stay integers."""
    assert amounts([(2, 5), (5, 2)]) == [3, -3]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0.0, 0.0), (math.inf,) * 2, math.inf),
        ((math.inf,) * 2, (0.0, 0.1), -math.inf),
        ((-math.inf,) * 2, (0.0,) * 2, math.inf),
    ],
)
def test_what_appears_or_vanishes_is_infinitely_far(a: list[float], b: list[float], expected: float) -> None:
    """The interval has no width; the exact one neither."""
    for got in (measured_interval(a, b, alpha=0.05), exact_interval(a, b)):
        assert got is not None
        assert (got.low, got.high) == (expected, expected)


def test_two_infinite_effects_have_no_difference() -> None:
    """What appears in both reports cannot be compared as a ratio."""
    assert measured_interval([math.inf] * 3, [math.inf] * 3, alpha=0.05) is None
    assert exact_interval([math.inf], [math.inf]) is None


@pytest.mark.parametrize(
    ("low", "high", "better", "margin", "expected"),
    [
        (-0.03, -0.01, "lower", None, ("better", "interval_excludes_zero")),
        (-0.03, -0.01, "higher", None, ("worse", "interval_excludes_zero")),
        (0.01, 0.03, "none", None, ("higher", "interval_excludes_zero")),
        (-0.03, -0.01, "none", None, ("lower", "interval_excludes_zero")),
        (-0.01, 0.03, "lower", None, ("inconclusive", "interval_includes_zero")),
        (-0.01, 0.0, "lower", None, ("inconclusive", "interval_includes_zero")),
        (0.0, 0.0, "lower", None, ("same", "no_difference")),
        (-1e-16, 1e-16, "lower", None, ("same", "no_difference")),
        (-0.009, 0.009, "lower", 1.0, ("same", "within_margin")),
        (0.001, 0.009, "lower", 1.0, ("same", "within_margin")),
        (0.001, 0.011, "lower", 1.0, ("worse", "interval_excludes_zero")),
        (-0.011, 0.001, "lower", 1.0, ("inconclusive", "interval_includes_zero")),
        (math.log(0.99), math.log(1.01), "lower", 1.0, ("same", "within_margin")),
        (math.inf, math.inf, "lower", 1.0, ("worse", "appears")),
        (-math.inf, -math.inf, "lower", None, ("better", "vanishes")),
    ],
)
def test_the_whole_interval_decides(
    low: float, high: float, better: Better, margin: float | None, expected: tuple[str, str]
) -> None:
    """Beyond 0 it is better or worse, in the margin the same, and else inconclusive."""
    got = judged(interval(low, high), better, margin)
    assert (got.verdict, got.reason) == expected


@pytest.mark.parametrize("margin", [0.0, -1.0, 100.0, math.nan])
def test_a_margin_is_a_percentage(margin: float) -> None:
    """0 would call nothing the same, 100 everything that became smaller."""
    with pytest.raises(ValueError, match="not above 0 and below 100"):
        margin_logs(margin)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.num_pairs} {setting.sd}")
def test_intervals_and_verdicts_keep_their_rates(setting: Setting) -> None:
    """Of simulated comparisons 5 % are false where both reports have as many pairs, and at most 7 % where they do not.

    Limits are binomial at 99 %.
    """
    found = rates(setting, NUM_COMPARISONS)
    limit = 0.055 if len(set(setting.num_pairs)) == 1 else 0.07
    assert found.false <= stats.binom.ppf(0.99, NUM_COMPARISONS, limit) / NUM_COMPARISONS
    assert found.covered >= stats.binom.ppf(0.01, NUM_COMPARISONS, 1 - limit) / NUM_COMPARISONS
    assert found.false_same <= stats.binom.ppf(0.99, NUM_COMPARISONS, limit / 2) / NUM_COMPARISONS
    assert found.false_failure <= stats.binom.ppf(0.99, NUM_COMPARISONS, limit / 2) / NUM_COMPARISONS


def test_reports_of_one_effect_are_seldom_called_different() -> None:
    """Whole reports, compared as the command compares them: false verdicts within 5 % and a 99 % limit."""
    rng = random.Random("equal reports")

    def pairs() -> Pairs:
        return [(math.exp(rng.gauss(0, 0.003)), 0.9 * math.exp(rng.gauss(0, 0.003))) for _ in range(6)]

    reports = [make_report({"wall": (WALL, pairs())}) for _ in range(300)]
    found = [diff(a, b).decision for a, b in zip(reports[::2], reports[1::2], strict=True)]
    num_false = sum(decision in {"better", "worse"} for decision in found)
    assert set(found) <= {"better", "worse", "inconclusive"}
    assert num_false <= stats.binom.ppf(0.99, len(found), 0.05)
