from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid_cli.experiment import DEFAULT_PAIRS, plan_slots


@given(pairs=st.integers(1, 30), discarded=st.integers(0, 4))
def test_each_pair_holds_both_arms_and_the_order_alternates(pairs: int, discarded: int) -> None:
    """Slots count up, pairs are whole, discarded ones come first, and no two pairs in a row begin alike."""
    slots = plan_slots(pairs, discarded)
    assert [slot.slot for slot in slots] == list(range(2 * (pairs + discarded)))
    assert [slot.pair for slot in slots] == [pair for pair in range(pairs + discarded) for _ in range(2)]
    assert [slot.discarded for slot in slots] == [index < 2 * discarded for index in range(len(slots))]
    firsts, seconds = [slot.arm for slot in slots[::2]], [slot.arm for slot in slots[1::2]]
    assert all({first, second} == {"native", "captured"} for first, second in zip(firsts, seconds, strict=True))
    assert all(before != after for before, after in pairwise(firsts))
    assert firsts[discarded] == "native"


@given(pairs=st.integers(1, 15).map(lambda half: 2 * half), slope=st.integers(-1000, 1000))
def test_a_linear_drift_cancels_over_an_even_number_of_pairs(pairs: int, slope: int) -> None:
    """The sum of captured minus native is zero when time grows with the slot alone."""
    slots = plan_slots(pairs, 1)
    signs = {"native": -1, "captured": 1}
    assert sum(signs[slot.arm] * slope * slot.slot for slot in slots if not slot.discarded) == 0
    assert DEFAULT_PAIRS % 2 == 0


@pytest.mark.parametrize(("pairs", "discarded"), [(0, 1), (-1, 0), (1, -1)])
def test_an_experiment_without_a_measured_pair_is_refused(pairs: int, discarded: int) -> None:
    """There is no plan without a pair."""
    with pytest.raises(ValueError, match="at least 1"):
        plan_slots(pairs, discarded)
