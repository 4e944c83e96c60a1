import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lucid_profiler.drift import (
    GAP_LIMIT,
    WARNING_ALPHA,
    AnalysisWarning,
    PairedLogs,
    WarningCode,
    find_warnings,
    order_untested,
    slope_per_run,
)
from lucid_profiler.pairs import paired_effect

STATISTICS = Path(__file__).parents[2] / "docs" / "statistics.md"


def in_order(base: Sequence[float], other: Sequence[float], *, abba: bool = True) -> list[PairedLogs]:
    """Return pairs with the runs' places in ABBA order, or with the base always first."""
    pairs = []
    for pair, logs in enumerate(zip(base, other, strict=True)):
        runs = (2 * pair, 2 * pair + 1)[:: -1 if abba and pair % 2 else 1]
        pairs.append(PairedLogs(pair=pair, base=logs[0], other=logs[1], base_run=runs[0], other_run=runs[1]))
    return pairs


def bent(pairs: Sequence[PairedLogs], by_run: Sequence[float]) -> list[PairedLogs]:
    """Add to each run what its place says."""
    return [
        replace(pair, base=pair.base + by_run[pair.base_run], other=pair.other + by_run[pair.other_run])
        for pair in pairs
    ]


def noise(seed: int, num_pairs: int = 6) -> list[PairedLogs]:
    """Return pairs of noise alone in ABBA order."""
    rng = random.Random(seed)
    return in_order(*([rng.gauss(0, 0.003) for _ in range(num_pairs)] for _ in range(2)))


def warned(pairs: Sequence[PairedLogs]) -> dict[str, AnalysisWarning]:
    """Return the warnings by code."""
    effect = paired_effect([pair.effect for pair in pairs])
    return {warning.code: warning for warning in find_warnings(pairs, effect)}


@given(st.integers(0, 10**6), st.integers(3, 12))
@settings(max_examples=50)
def test_the_slope_is_that_of_least_squares(seed: int, num_pairs: int) -> None:
    """Slope and standard error are numpy's, of a line with a level for each arm."""
    pairs = noise(seed, num_pairs)
    rows = [(1, 0, pair.base_run, pair.base) for pair in pairs] + [(0, 1, pair.other_run, pair.other) for pair in pairs]
    table = np.array(rows, dtype=float)
    design, values = table[:, :3], table[:, 3]
    solution, squares, *_ = np.linalg.lstsq(design, values, rcond=None)
    df = len(rows) - 3
    error = np.sqrt(squares[0] / df * np.linalg.inv(design.T @ design)[2, 2])
    got = slope_per_run(pairs)
    assert (got.per_run, got.standard_error) == pytest.approx((solution[2], error), rel=1e-6, abs=1e-12)
    assert got.df == df


def test_drift_is_named_with_its_size() -> None:
    """Half a percent a run over twelve runs warns of drift and of nothing else, whatever the effect."""
    for effect in (0.0, -0.1):
        pairs = [replace(pair, other=pair.other + effect) for pair in bent(noise(1), [0.005 * n for n in range(12)])]
        found = warned(pairs)
        assert found.keys() == {"drift"}
        assert found["drift"].numbers["per_run"] == pytest.approx(0.005, abs=3e-4)
        assert found["drift"].numbers["total"] == pytest.approx(0.055, abs=3e-3)


@pytest.mark.parametrize("size", [0.15, -0.15])
@pytest.mark.parametrize("run", [2, 5, 10])
def test_a_step_is_named_with_its_first_run(size: float, run: int) -> None:
    """A level that changes from one run on is a step and no drift, up or down, also within a pair."""
    found = warned(bent(noise(2), [size * (n >= run) for n in range(12)]))
    assert "drift" not in found
    assert "two_modes" not in found
    assert found["step"].numbers["run"] == run
    assert found["step"].numbers["size"] == pytest.approx(size, abs=0.005)


@pytest.mark.parametrize("run", [0, 1, 11])
def test_a_single_run_is_no_mode(run: int) -> None:
    """One slow run makes an outlying pair, which names its effect and the others' mean."""
    pairs = bent(noise(3), [0.1 * (n == run) for n in range(12)])
    found = warned(pairs)
    assert found.keys() == {"outlying_pair"}
    numbers = found["outlying_pair"].numbers
    assert numbers["pair"] == run // 2
    others = [pair.effect for pair in pairs if pair.pair != run // 2]
    assert numbers["mean_without"] == pytest.approx(np.mean(others))
    assert abs(numbers["effect"]) == pytest.approx(0.1, abs=0.01)


def test_two_modes_are_counted_by_arm() -> None:
    """Runs that change between two levels are two modes; each arm's share of the upper one is told."""
    slow = {0, 3, 4, 7, 10}
    pairs = bent(noise(4), [0.05 * (n in slow) for n in range(12)])
    found = warned(pairs)["two_modes"].numbers
    num_base = sum(pair.base_run in slow for pair in pairs)
    assert (found["num_high_base"], found["num_high_other"]) == (num_base, len(slow) - num_base)
    assert found["num_runs"] == 12
    assert found["size"] == pytest.approx(0.05, abs=0.005)


def test_modes_need_a_gap_far_beyond_the_noise() -> None:
    """Two levels that are less than the limit apart are noise."""
    slow = [0.003 * 2 * (n % 3 == 0) for n in range(12)]
    assert "two_modes" not in warned(bent(noise(5), slow))
    assert GAP_LIMIT > 5


def test_the_order_effect_is_students_test() -> None:
    """It warns where scipy's two-sample test rejects at the rate of the warnings, and there alone."""
    for seed in range(40):
        pairs = [replace(pair, other=pair.other + 0.004 * (pair.distance > 0)) for pair in noise(seed)]
        sides = [[pair.effect for pair in pairs if (pair.distance > 0) is first] for first in (True, False)]
        assert ("order_effect" in warned(pairs)) is bool(stats.ttest_ind(*sides).pvalue < WARNING_ALPHA)


@pytest.mark.parametrize(
    ("num_pairs", "abba", "expected"),
    [(2, False, None), (3, True, (2, 1)), (3, False, (3, 0)), (4, True, None), (6, False, (6, 0))],
)
def test_an_order_that_cannot_be_tested_is_told(num_pairs: int, abba: bool, expected: tuple[int, int] | None) -> None:
    """From three pairs on, where fewer than two began with one of the arms; with two of each there is a test."""
    walls = [[0.0] * num_pairs, [0.02] * num_pairs]
    found = order_untested(in_order(*walls, abba=abba))
    numbers = found and (found.numbers["num_base_first"], found.numbers["num_other_first"])
    assert numbers == expected


def test_the_outlying_pair_is_the_leave_one_out_test() -> None:
    """It warns where a pair is beyond what the others predict by Student's t, at the rate over all pairs."""
    num_warned = 0
    for seed in range(60):
        pairs = [replace(pair, other=pair.other + 0.012 * (pair.pair == 2)) for pair in noise(seed)]
        effects = [pair.effect for pair in pairs]
        limit = stats.t.ppf(1 - WARNING_ALPHA / 12, 4)
        scores = []
        for left_out, effect in enumerate(effects):
            others = effects[:left_out] + effects[left_out + 1 :]
            scores.append(abs(effect - np.mean(others)) / (np.std(others, ddof=1) * np.sqrt(1 + 1 / 5)))
        found = warned(pairs)
        assert ("outlying_pair" in found) is bool(max(scores) > limit)
        num_warned += "outlying_pair" in found
    assert 0 < num_warned < 60


def test_a_balanced_order_leaves_nothing_for_drift_to_explain() -> None:
    """In ABBA order with an even number of pairs no drift takes an effect back."""
    pairs = [replace(pair, other=pair.other - 0.1) for pair in bent(noise(6), [0.02 * n for n in range(12)])]
    assert "drift_explains" not in warned(pairs)


def test_drift_explains_the_effect_of_a_one_sided_order() -> None:
    """With the base always first, drift looks like an effect, and its share is named; a true effect stays."""
    rng = random.Random(9)
    quiet = in_order(*([rng.gauss(0, 0.001) for _ in range(6)] for _ in range(2)), abba=False)
    pairs = bent(quiet, [0.01 * n for n in range(12)])
    found = warned(pairs)["drift_explains"].numbers
    assert found["shift"] == pytest.approx(0.01, abs=1e-3)
    assert found["low"] < 0 < found["high"]
    assert (found["num_base_first"], found["num_other_first"]) == (6, 0)
    assert "drift_explains" not in warned([replace(pair, other=pair.other - 0.1) for pair in pairs])
    assert "drift_explains" not in warned([replace(pair, other=pair.other + 0.1) for pair in pairs])


def test_an_effect_that_was_never_claimed_needs_no_explanation() -> None:
    """Where the t interval holds 0 nothing is explained away."""
    assert "drift_explains" not in warned(in_order([0.0, 0.01, 0.0], [0.01, 0.0, 0.001], abba=False))


@pytest.mark.parametrize("num_pairs", [1, 2])
def test_fewer_than_three_pairs_say_nothing(num_pairs: int) -> None:
    """One and two pairs warn of nothing, however odd they are."""
    assert warned(in_order([0.0, 5.0][:num_pairs], [9.0, -3.0][:num_pairs])) == {}


@pytest.mark.parametrize("value", [0.0, 1e-300, 700.0])
def test_equal_values_warn_of_nothing(value: float) -> None:
    """Runs that are all equal, or differ by rounding alone, have no drift, no modes and no outlier."""
    assert warned(in_order([value] * 6, [value] * 6)) == {}
    rounded = in_order([value] * 6, [*[value] * 5, value * (1 + 2**-52)])
    assert warned(rounded) == {}


@given(st.integers(0, 10**6), st.permutations(range(6)))
@settings(max_examples=30)
def test_the_order_in_which_pairs_are_listed_does_not_matter(seed: int, order: list[int]) -> None:
    """The places of the runs decide, not those of the records."""
    pairs = bent(noise(seed), [0.004 * n for n in range(12)])
    assert warned([pairs[at] for at in order]) == warned(pairs)


def test_every_warning_is_explained_in_the_pages() -> None:
    """The page on statistics has a row for each code."""
    page = STATISTICS.read_text()
    for code in get_args(WarningCode):
        assert f"| `{code}` |" in page, code
