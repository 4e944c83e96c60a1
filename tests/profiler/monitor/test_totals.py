from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid_profiler.monitor.totals import Part, Total

ROOT, PARENT, CHILD, SIBLING = 10, 11, 12, 13
OUTSIDE = 1
Look = Mapping[int, Part]


def of(root: int, inherited: int = 0, **children: int) -> dict[int, Part]:
    """Return a look at a root with children that have used so much; `a` is the child, `b` its sibling."""
    numbers = {"a": CHILD, "b": SIBLING}
    found = {ROOT: Part(OUTSIDE, root + inherited, inherited)}
    return found | {numbers[name]: Part(ROOT, amount, 0) for name, amount in children.items()}


def totals(*looks: Look) -> list[int]:
    """Return the total after each look, where nothing changes between reading a process and asking it again."""
    now: dict[int, Part] = {}

    def look_at(look: Look) -> Look:
        now.clear()
        now.update(look)
        return look

    total = Total(lambda pid: now[pid].inherited if pid in now else None)
    return [total.update(look_at(look)) for look in looks]


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ((of(5, a=100), of(5, 101)), 106),  # its parent has asked for its status
        ((of(5, a=100), of(5)), 105),  # its parent ignores how its children end
        ((of(5, a=100, b=10), of(5, b=200)), 305),  # and a busy sibling does not hide that
        ((of(5, a=100, b=10), of(5, 12, b=200)), 305),  # nor does one that was asked about, of 12 that were not seen
        ((of(5, a=100, b=10), of(5, 112)), 117),  # both are asked about
        ((of(5, a=100), of(5), of(5), of(5, b=7)), 112),  # what was lost is lost once
        ((of(5, a=100), of(5, 100), of(5, 100, a=7)), 112),  # a number comes back with another process
    ],
)
def test_what_a_process_used_stays_when_it_has_ended(looks: tuple[Look, ...], expected: int) -> None:
    """Once: at its parent if that has taken it, else here."""
    assert totals(*looks)[-1] == expected


def test_a_process_whose_parent_is_outside_takes_nothing_along() -> None:
    """An orphan's status is asked for by a process that is not in the tree."""
    orphan = {CHILD: Part(OUTSIDE, 50, 0)}
    assert totals(of(5) | orphan, of(6)) == [55, 56]


def test_a_family_that_ends_between_two_looks_is_with_its_next_ancestor() -> None:
    """The grandchild's part went to the child and both to the root; or nobody asked about it, and it is kept."""
    family = {PARENT: Part(ROOT, 20, 0), CHILD: Part(PARENT, 100, 0)}
    assert totals(of(5) | family, of(5, 121)) == [125, 126]
    assert totals(of(5) | family, of(5, 21)) == [125, 125]


def test_a_parent_that_was_read_before_it_asked_is_asked_again() -> None:
    """Then nothing is lost, the total does not fall meanwhile, and nothing counts twice afterwards."""
    inherited = {ROOT: 0}
    total = Total(inherited.get)
    assert total.update(of(5, a=100)) == 105
    inherited[ROOT] = 103
    assert total.update(of(5)) == 105
    assert total.update(of(6, 103)) == 109


def test_a_parent_that_ends_meanwhile_counts_as_it_was_read() -> None:
    """Asked again it is gone; what was read of it before holds."""
    total = Total(lambda _: None)
    assert total.update(of(5, a=100)) == 105
    assert total.update(of(5, 101)) == 106


@given(
    looks=st.lists(
        st.dictionaries(
            st.integers(1, 6), st.builds(Part, st.integers(0, 6), st.integers(0, 100), st.integers(0, 100))
        ),
        max_size=20,
    )
)
def test_a_total_never_falls(looks: list[dict[int, Part]]) -> None:
    """Whatever ends, what was used was used; parents may even form a ring."""
    found = totals(*looks)
    assert found == sorted(found)
    assert all(total >= sum(part.amount for part in look.values()) for total, look in zip(found, looks, strict=True))


@given(steps=st.lists(st.integers(0, 100), max_size=30))
def test_a_sum_that_only_grows_is_passed_on(steps: list[int]) -> None:
    """Without losses the total is the sum over the living."""
    amounts = [sum(steps[:num]) for num in range(len(steps))]
    assert totals(*(of(amount, a=3) for amount in amounts)) == [amount + 3 for amount in amounts]
