"""Whose a device's memory was: figures that were read at different times make a sum only where they are of one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lucid_profiler.context import Measured
from lucid_profiler.entries import AllocatorEntry
from lucid_profiler.memory_account import Accounted, memory_account
from lucid_profiler.monitor.records import Sample

S = 1_000_000_000
GIB = 2**30
GPU = "GPU-1"
CONTEXT = GIB // 2

Held = Callable[[float], int]
"""What torch has reserved at a time in seconds."""


def grown_at(at_s: float, *, until_s: float = 1e9, last: int = 10) -> Held:
    """Return an allocator that has 10 GiB, then 30 GiB, and `last` in the end."""
    return lambda now_s: 10 * GIB if now_s < at_s else 30 * GIB if now_s < until_s else last * GIB


def sampled(held: Held, *, seconds: float, listed_s: float = 1.0) -> list[Sample]:
    """Return ten samples a second of a device on which torch and a context have all that is used."""
    samples = []
    for place in range(round(seconds * 10)):
        used = CONTEXT + held(place / 10)
        values: dict[str, Any] = {
            "memory_total_bytes": 141 * GIB,
            "memory_reserved_bytes": GIB,
            "memory_used_bytes": used,
            "memory_free_bytes": 140 * GIB - used,
        }
        if place % round(10 * listed_s) == 0:
            values |= {"process_memory_bytes": used, "others_memory_bytes": 0}
        samples.append(Sample(mono_ns=place * S // 10, late_ns=0, host=None, gpus={GPU: values}))
    return samples


def lines(held: Held, times_s: Sequence[float]) -> list[AllocatorEntry]:
    """Return what the allocator says at these times."""
    return [
        AllocatorEntry(mono_ns=int(at * S), step=1, device=0, allocated_bytes=held(at), reserved_bytes=held(at))
        for at in times_s
    ]


def accounted(samples: Sequence[Sample], allocator: Sequence[AllocatorEntry]) -> Accounted:
    """Return the account with a context that was measured."""
    found = memory_account(
        GPU, samples, allocator=allocator, context=Measured(bytes=CONTEXT, method="process"), reasons={}
    )
    assert found is not None
    return found


def rows(found: Accounted) -> dict[str, int | None]:
    """Return the amounts of an account by name."""
    return {row.name: row.value_bytes for row in found.account.rows}


@pytest.mark.parametrize("every_s", [1.0, 10.0])
def test_figures_that_agree_at_every_moment_leave_nothing_unexplained(every_s: float) -> None:
    """The first sample after a growth is seen before the other figures are: it is not the peak of an account."""
    held = grown_at(5.25)
    times = [0.05 + every_s * place for place in range(round(20 / every_s))]
    found = accounted(sampled(held, seconds=20), lines(held, times))
    assert rows(found)["reserved by torch"] == 30 * GIB
    assert (found.account.residue_share, found.account.warning) == (0.0, None)
    assert (found.account.num_times, found.account.num_times_warned) == (20, 0)
    assert found.account.unread_peak_bytes is None


def test_the_moment_is_the_one_whose_terms_were_read_nearest() -> None:
    """Of a long plateau that at which list and allocator were read together."""
    held = grown_at(2.25)
    found = accounted(sampled(held, seconds=10), lines(held, [0.5, 1.4, 2.6, 3.7, 5.05, 6.3, 7.4, 8.6, 9.4]))
    assert found.account.mono_ns == 5 * S


def test_a_short_spike_is_told_and_not_accounted_for() -> None:
    """Nobody read whose it was while it lasted; the account is of the largest use of which that is known."""
    held = grown_at(5.25, until_s=5.55)
    found = accounted(sampled(held, seconds=20), lines(held, [0.05 + place for place in range(20)]))
    assert found.account.unread_peak_bytes == 30 * GIB + CONTEXT + GIB
    assert found.account.unread_peak_ns == 53 * S // 10
    assert rows(found)["used on the device"] == 10 * GIB + CONTEXT + GIB
    assert (found.account.residue_share, found.account.warning) == (0.0, None)


def test_a_spike_that_only_the_allocator_saw_is_not_accounted_for() -> None:
    """Without the driver's list nobody knows what else was there."""
    held = grown_at(5.25, until_s=5.55)
    found = accounted(sampled(held, seconds=20), lines(held, [0.45 + place for place in range(20)]))
    assert rows(found)["used on the device"] == 10 * GIB + CONTEXT + GIB
    assert found.account.unread_peak_bytes == 30 * GIB + CONTEXT + GIB


@pytest.mark.parametrize("line_s", [1.02, 3.55], ids=["before the growth", "after the last sample"])
def test_use_of_which_nothing_is_ever_read_leaves_its_terms_null(line_s: float) -> None:
    """A residue is not invented from an allocator that was heard of when another amount was used, or nobody knows."""
    held = grown_at(1.05, until_s=3.5)
    samples = sampled(held, seconds=3.5)[10:]
    found = accounted(samples, lines(held, [line_s]))
    after_growth = accounted(samples[1:], lines(held, [line_s]))
    assert found.columns["torch_reserved_bytes"][1:] == (None, None)
    assert rows(after_growth)["used on the device"] == 30 * GIB + CONTEXT + GIB
    assert {row.name: row.reason for row in after_growth.account.rows}["reserved by torch"] == "not_read"
    assert (after_growth.account.residue_share, after_growth.account.warning) == (None, None)


@pytest.mark.parametrize(("every_s", "age_s", "is_known"), [(10.0, 19.0, True), (10.0, 21.0, False), (1.0, 3.0, False)])
def test_how_old_a_figure_may_be_follows_from_how_often_it_is_read(
    every_s: float, age_s: float, is_known: bool
) -> None:
    """Two of its own intervals, whatever the interval was set to."""

    def steady(_now_s: float) -> int:
        return 10 * GIB

    times = [every_s * place for place in range(5)]
    found = accounted(sampled(steady, seconds=times[-1] + age_s + 0.1), lines(steady, times))
    assert (found.columns["torch_reserved_bytes"][-1] is not None) is is_known


def test_use_that_moves_by_less_than_1_percent_is_the_same_use() -> None:
    """A page here and there does not part figures that belong together."""

    def breathing(now_s: float) -> int:
        return 10 * GIB + (50 << 20) * (round(now_s * 10) % 2)

    found = accounted(sampled(breathing, seconds=10), lines(breathing, [0.05 + place for place in range(10)]))
    assert found.account.num_times_warned == 0
    assert None not in found.columns["torch_reserved_bytes"]


@pytest.mark.parametrize(("later_s", "pools"), [(9.05, 2 * GIB), (None, None)], ids=["read again", "never again"])
def test_pools_read_before_torch_reserved_more_are_not_those_of_later(later_s: float | None, pools: int | None) -> None:
    """A recording that followed is told by its next reading, however late, and else not at all."""
    held = grown_at(1.0)
    allocator = lines(held, [0.05 + place for place in range(10)])
    allocator[0] = replace(allocator[0], private_pools_bytes=0)
    if later_s is not None:
        allocator[9] = replace(allocator[9], private_pools_bytes=2 * GIB)
    found = accounted(sampled(held, seconds=10), allocator)
    assert rows(found)["used on the device"] == 30 * GIB + CONTEXT + GIB
    assert rows(found)["private pools of graphs"] == pools
    assert found.columns["graph_pools_bytes"] == (0, *[pools] * 9)


def test_pools_that_were_not_read_yet_are_not_called_unwanted() -> None:
    """They were asked for, and come later."""
    held = grown_at(1.0)
    late = AllocatorEntry(mono_ns=9 * S, step=1, device=0, reserved_bytes=40 * GIB, private_pools_bytes=0)
    found = accounted(sampled(held, seconds=8), [*lines(held, [0.05 + place for place in range(8)]), late])
    reasons = {row.name: row.reason for row in found.account.rows}
    assert reasons["private pools of graphs"] == "not_read"
