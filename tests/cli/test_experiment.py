from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid_cli.experiment import DEFAULT_PAIRS, TAINT_RULES, Order, control_arm, pairs_of, plan_slots, rules
from lucid_profiler.records import TAINTS, Arm, Slot


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


@given(
    pairs=st.integers(1, 12),
    discarded=st.integers(0, 2),
    others=st.integers(1, 4),
    control_pairs=st.integers(0, 15),
    seed=st.none() | st.integers(0, 2**32),
)
def test_every_pair_has_the_base_and_one_other_arm(
    pairs: int, discarded: int, others: int, control_pairs: int, seed: int | None
) -> None:
    """Each arm has as many pairs as were asked for, in every order, and a pair is two runs in a row."""
    arms = ["base", *(f"arm{place}" for place in range(others))]
    order: Order = "abba" if seed is None else "random"
    slots = plan_slots(pairs, discarded, arms=arms, control_pairs=control_pairs, order=order, seed=seed)
    assert [slot.slot for slot in slots] == list(range(len(slots)))
    both = [tuple(slot.arm for slot in pair) for pair in pairs_of(slots)]
    assert all(len(pair) == 2 and "base" in pair for pair in both)
    counts = Counter(arm for pair in both for arm in pair if arm != "base")
    expected = dict.fromkeys(arms[1:], pairs + discarded) | ({"control": control_pairs} if control_pairs else {})
    assert counts == expected
    assert [slot.discarded for slot in slots] == [place < 2 * discarded * others for place in range(len(slots))]


@given(pairs=st.integers(1, 12), others=st.integers(1, 3), control_pairs=st.integers(0, 9))
def test_abba_is_kept_for_every_arm_and_for_the_control(pairs: int, others: int, control_pairs: int) -> None:
    """Of one arm's pairs no two in a row begin alike; the first begins with the base."""
    arms = ["base", *(f"arm{place}" for place in range(others))]
    slots = plan_slots(pairs, 0, arms=arms, control_pairs=control_pairs)
    for arm in (*arms[1:], "control"):
        firsts = [pair[0].arm == "base" for pair in pairs_of(slots) if arm in {slot.arm for slot in pair}]
        assert firsts == [place % 2 == 0 for place in range(len(firsts))]


@pytest.mark.parametrize(
    ("pairs", "control_pairs", "before"),
    [(6, 1, [3]), (6, 2, [1, 4]), (6, 3, [1, 3, 5]), (6, 6, [0, 1, 2, 3, 4, 5]), (2, 4, [0, 0, 1, 1]), (1, 1, [0])],
)
def test_control_pairs_lie_evenly_between_the_rounds(pairs: int, control_pairs: int, before: list[int]) -> None:
    """`before` has the number of measured pairs that lie before each."""
    others = [
        pair[0].arm if pair[0].arm != "native" else pair[1].arm for pair in pairs_of(_controlled(pairs, control_pairs))
    ]
    places = [place for place, arm in enumerate(others) if arm == "control"]
    assert [others[:place].count("captured") for place in places] == before


def _controlled(pairs: int, control_pairs: int) -> tuple[Slot, ...]:
    return plan_slots(pairs, 0, control_pairs=control_pairs)


def test_a_drawn_order_follows_from_its_seed_alone() -> None:
    """The same seed gives the same order in every version of Python; another one gives another."""
    drawn = [pair[0].arm for pair in pairs_of(plan_slots(8, 0, order="random", seed=1))]
    native, captured = "native", "captured"
    assert drawn == [native, captured, captured, native, native, native, captured, captured]
    assert plan_slots(8, 0, order="random", seed=2) != plan_slots(8, 0, order="random", seed=1)


def test_each_arm_comes_first_in_half_of_many_drawn_pairs() -> None:
    """The coin is fair: 5,000 of 10,000 within five standard deviations."""
    firsts = Counter(pair[0].arm for pair in pairs_of(plan_slots(10_000, 0, order="random", seed=0)))
    assert abs(firsts["native"] - 5000) < 250


@pytest.mark.parametrize(("order", "seed"), [("abba", 1), ("random", None)])
def test_only_a_drawn_order_has_a_seed(order: Order, seed: int | None) -> None:
    """One without the other is refused."""
    with pytest.raises(ValueError, match="seed"):
        plan_slots(1, 0, order=order, seed=seed)


def test_every_taint_has_its_rule() -> None:
    """What leaves a pair out is said in one sentence each; a failed run always does."""
    assert tuple(TAINT_RULES) == TAINTS
    assert len(rules(TAINTS)) == 1 + len(TAINTS)
    assert len(rules(())) == 1


def test_the_control_is_the_base_under_another_name() -> None:
    """It sets the same variables."""
    base = Arm(name="a", env={"X": "1"})
    assert control_arm(base) == Arm(name="control", env={"X": "1"}, control=True)
