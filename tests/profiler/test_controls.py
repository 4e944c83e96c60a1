"""How often pairs of the base with itself take a verdict back, over simulated reports whose truth is known."""

import functools
from dataclasses import replace

import pytest
from scipy import stats
from tools.bench.simulated import ALPHA, Setting, tally

NUM_REPORTS = 1000
NOISE = Setting(name="noise")
EFFECT = replace(NOISE, effect=-0.01)

counted = functools.cache(tally)


@pytest.mark.parametrize("num_controls", [3, 4, 6])
def test_a_machine_without_a_difference_seldom_takes_a_verdict_back(num_controls: int) -> None:
    """As often as the control's own interval misses 0, which is 5 %, within a binomial limit of 99 %."""
    counts = counted(replace(EFFECT, num_controls=num_controls), NUM_REPORTS)
    limit = stats.binom.ppf(0.99, NUM_REPORTS, ALPHA)
    assert counts.codes["control_differs"] <= limit
    assert counts.taken_back <= counts.codes["control_differs"]
    assert counts.found + counts.taken_back >= 0.9 * NUM_REPORTS


def test_controls_change_nothing_else() -> None:
    """The measured pairs of a report are the same with controls and without, and no verdict comes from controls."""
    plain, beside = (counted(replace(NOISE, num_controls=num), 1) for num in (0, 4))
    assert plain.decisions.total() == beside.decisions.total() == 1
    with_controls = counted(replace(NOISE, num_controls=4), NUM_REPORTS)
    assert with_controls.false <= stats.binom.ppf(0.99, NUM_REPORTS, ALPHA)


@pytest.mark.parametrize(("num_controls", "share"), [(4, 0.25), (6, 0.02)])
def test_a_machine_that_favours_a_name_is_caught(num_controls: int, share: float) -> None:
    """Where a second name alone costs 1 %, nearly every report would have a false verdict; controls catch it."""
    favoured = replace(NOISE, bias=0.01)
    assert counted(favoured, NUM_REPORTS).false >= 0.95 * NUM_REPORTS
    assert counted(replace(favoured, num_controls=num_controls), NUM_REPORTS).false <= share * NUM_REPORTS
