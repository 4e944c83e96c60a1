import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid_profiler.device_times import DeviceRecord
from lucid_profiler.estimate import (
    MIN_STEPS,
    WORTH,
    Capture,
    Known,
    Spread,
    StepShare,
    device_share,
    host_share,
    judge,
    main_optimizer,
    read_capture,
    replay_gain,
    share_of_steps,
    speedup,
    with_medians,
)
from lucid_profiler.records import CaptureGroup
from lucid_profiler.ring import StepRecord

MS = 1_000_000


def shares(*values: float, step_ms: int = 10) -> StepShare:
    """Return the summary of steps with these shares, repeated to be enough."""
    found = share_of_steps([(step_ms * MS, round(value * step_ms * MS)) for value in values for _ in range(MIN_STEPS)])
    assert found is not None
    return found


def capture(
    *,
    replays: int = 20,
    native: float | None = 2e-3,
    replay: float | None = 5e-4,
    reasons: dict[str, int] | None = None,
) -> Capture:
    """Return what an optimizer with one group reports."""
    group = CaptureGroup(captured=replays > 0, replays=replays, reasons=reasons or {})
    return Capture(optimizer="MuSGD", index=0, groups=(group,), native_seconds=native, replay_seconds=replay)


def known(share: StepShare | None, captured: Capture | None = None, **others: Any) -> Known:
    """Return what the runs of a program on a CUDA device have told."""
    return Known(**{"share": share, "used_cuda": True, "can_capture": True, "captured": captured, **others})


def judged(*args: Any, **others: Any) -> tuple[str, str]:
    """Return decision and reason."""
    judgement = judge(known(*args, **others))
    return judgement.decision, judgement.reason


def steps(*begins: int, optimizer: int = 0, took: int = 1) -> list[StepRecord]:
    """Return the steps of an optimizer that begin at these times."""
    return [
        StepRecord(optimizer=optimizer, step=number, begin_ns=begin, end_ns=begin + took)
        for number, begin in enumerate(begins, 1)
    ]


def test_a_step_lasts_from_one_begin_to_the_next() -> None:
    """Medians over the steps that have ended, and the share step by step: 2 of 10, of 20, of 40."""
    share = host_share(steps(100, 110, 130, 170, took=2), 0)
    assert share is not None
    assert (share.num_steps, share.step_s, share.optimizer_s) == (3, 20e-9, 2e-9)
    assert (share.share.low, share.share.median, share.share.high) == pytest.approx((0.075, 0.1, 0.15))


def test_the_steps_of_other_optimizers_do_not_count() -> None:
    """Interleaved steps of a second optimizer are inside the steps of the first."""
    mixed = [*steps(100, 110, 120, took=2), *steps(103, 113, optimizer=1, took=3)]
    share = host_share(sorted(mixed, key=lambda step: step.begin_ns), 0)
    assert share is not None
    assert (share.num_steps, share.share.median) == (2, 0.2)


@pytest.mark.parametrize("records", [[], steps(5)], ids=["none", "one"])
def test_fewer_than_two_steps_have_no_share(records: list[StepRecord]) -> None:
    """One begin is no step."""
    assert host_share(records, 0) is None


def test_the_device_s_steps_need_both_times() -> None:
    """Steps without a time of their own, or with an optimizer on another stream, are left out."""
    times = [(None, 2), (10, 4), (10, None), (10, 6)]
    records = [
        DeviceRecord(begin_ns=number, optimizer=0, step=number, step_ns=step, optimizer_ns=optimizer)
        for number, (step, optimizer) in enumerate(times, 1)
    ]
    share = device_share(records, 0)
    assert share is not None
    assert (share.num_steps, share.share.median) == (2, 0.5)
    assert device_share(records, 1) is None


def test_the_optimizer_that_can_capture_is_looked_at_before_one_that_steps_more_often() -> None:
    """Among equals it is the first; without steps there is none."""
    mixed = [*steps(1, 2, 3), *steps(4, 5, optimizer=1)]
    assert main_optimizer(mixed) == 0
    assert main_optimizer(mixed, [replace(capture(), index=1)]) == 1
    assert main_optimizer(mixed, [replace(capture(), index=7)]) == 0
    assert main_optimizer([*steps(1, optimizer=1), *steps(2)]) == 0
    assert main_optimizer([]) is None


@pytest.mark.parametrize(("saved", "times"), [(0.0, 1.0), (0.5, 2.0), (0.75, 4.0), (1.0, math.inf), (-1.0, 0.5)])
def test_amdahl(saved: float, times: float) -> None:
    """A step without half of it is twice as fast; without all of it, infinitely so; a cost slows down."""
    assert speedup(saved) == times


@given(st.lists(st.tuples(st.integers(1, 10**12), st.integers(0, 10**12)), min_size=1))
def test_quartiles_are_ordered_parts_of_a_step(times: list[tuple[int, int]]) -> None:
    """Whatever was measured, a share is from 0 to 1, and its quartiles are in order."""
    share = share_of_steps(times)
    assert share is not None
    assert 0 <= share.share.low <= share.share.median <= share.share.high <= 1


def test_steps_without_duration_have_no_share() -> None:
    """A clock that stood still divides nothing."""
    assert share_of_steps([(0, 0)]) is None


def test_a_replay_saves_its_part_of_the_share() -> None:
    """A share of 40 %, a replay in a quarter of the native time: 30 % of a step."""
    gain = replay_gain(Spread(low=0.2, median=0.4, high=0.6), capture())
    assert gain is not None
    assert (gain.low, gain.median, gain.high) == pytest.approx((0.15, 0.3, 0.45))


def replay_records(*optimizer_ms: int) -> list[DeviceRecord]:
    """Return the device's steps of the captured run."""
    return [
        DeviceRecord(begin_ns=number, optimizer=0, step=number, step_ns=None, optimizer_ns=time * MS)
        for number, time in enumerate(optimizer_ms, 1)
    ]


def test_replayed_steps_are_timed_by_their_median() -> None:
    """Steps before the first replay are left out, and the set-up is paid back by the difference of the medians."""
    told = replace(capture(), first_replay_step=3, setup_seconds=0.01)
    found = with_medians(told, shares(0.4), replay_records(9, 9, 1, 1, 1, 1, 8))
    assert (found.native_seconds, found.replay_seconds, found.num_timed) == (0.004, 0.001, 5)
    assert found.break_even_steps == math.ceil(0.01 / 0.003)


def test_replays_that_are_slower_are_never_paid_back() -> None:
    """Whatever the optimizer thought after one step."""
    told = replace(capture(), first_replay_step=1, setup_seconds=0.01, break_even_steps=4)
    found = with_medians(told, shares(0.4), replay_records(5, 5, 5, 5, 5))
    assert (found.break_even_steps, found.never_pays) == (None, True)


@pytest.mark.parametrize("first", [None, 4])
def test_single_steps_stay_where_medians_are_not_known(first: int | None) -> None:
    """Replayed steps that cannot be told apart, or are too few."""
    told = replace(capture(), first_replay_step=first)
    assert with_medians(told, shares(0.4), replay_records(1, 1, 1, 1, 1, 1, 1)) is told
    assert with_medians(replace(capture(), first_replay_step=1), None, replay_records(1, 1, 1, 1, 1)).num_timed is None


def test_a_slower_replay_costs() -> None:
    """The gain is negative, its ends are in order."""
    gain = replay_gain(Spread(low=0.2, median=0.4, high=0.6), capture(native=1e-3, replay=2e-3))
    assert gain is not None
    assert (gain.low, gain.median, gain.high) == pytest.approx((-0.6, -0.4, -0.2))


@pytest.mark.parametrize(
    ("native", "replay"), [(None, 1.0), (1.0, None), (0.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, -1.0)]
)
def test_without_both_times_nothing_is_invented(native: float | None, replay: float | None) -> None:
    """No gain is known, and the judgement says so."""
    reported = capture(native=native, replay=replay)
    assert replay_gain(Spread(low=0.2, median=0.4, high=0.6), reported) is None
    assert judged(shares(0.4), reported) == ("cannot_say", "no_replay_time")


def test_a_share_of_nothing_is_not_worth_it() -> None:
    """Whatever captures, and also where nothing can."""
    assert judged(shares(0.0), capture()) == ("not_worth_it", "small_share")
    assert judged(shares(0.0), can_capture=False) == ("not_worth_it", "small_share")


def test_a_share_of_everything_gains_what_the_replay_saves() -> None:
    """A step that is all optimizer, replayed in a quarter of the time."""
    judgement = judge(known(shares(1.0), capture()))
    assert (judgement.decision, judgement.reason) == ("worth_it", "gain")
    assert judgement.gain is not None
    assert judgement.gain.median == 0.75


def test_a_replay_that_never_pays_is_not_worth_it() -> None:
    """A replay as slow as the native step gains nothing."""
    reported = capture(native=1e-3, replay=1e-3)
    assert reported.never_pays
    assert judged(shares(0.4), reported) == ("not_worth_it", "no_gain")
    assert not capture(replay=None).never_pays


def test_gains_around_the_least_that_counts() -> None:
    """Below it is not worth it; a spread across it cannot be told from a short run."""
    reported = capture(native=2e-3, replay=1e-3)
    assert judged(shares(1.5 * WORTH), reported) == ("not_worth_it", "small_gain")
    assert judged(shares(WORTH, 2 * WORTH, 8 * WORTH, 9 * WORTH), reported) == ("cannot_say", "spread")
    assert judged(shares(4 * WORTH), reported) == ("worth_it", "gain")


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ({"warming_up": 3}, ("cannot_say", "warming_up")),
        ({}, ("cannot_say", "warming_up")),
        ({"warming_up": 3, "dtype": 27}, ("not_worth_it", "not_certified")),
        ({"not_requested": 30}, ("cannot_say", "not_requested")),
    ],
)
def test_a_capture_without_replays(reasons: dict[str, int], expected: tuple[str, str]) -> None:
    """Steps before a recording decide nothing; a reason against capture does."""
    assert judged(shares(0.4), capture(replays=0, reasons=reasons)) == expected


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"share": None, "share_reason": "no_agent"}, "no_agent"),
        ({"share": replace(shares(0.4), num_steps=MIN_STEPS - 1)}, "too_few_steps"),
        ({"used_cuda": False}, "no_cuda"),
        ({"used_cuda": None}, "not_finished"),
        ({"can_capture": False}, "no_capture_report"),
        ({"native": capture()}, "native_replayed"),
        ({"captured": None, "captured_reason": "captured_failed"}, "captured_failed"),
    ],
)
def test_what_is_missing_is_named(others: dict[str, Any], reason: str) -> None:
    """Nothing is concluded without it."""
    assert judge(known(**{"share": shares(0.4), "captured": capture(), **others})).reason == reason


def test_a_capture_report_is_read_with_what_others_add_to_it() -> None:
    """Unknown fields are left alone, and counts are summed over groups, the most frequent reason first."""
    groups = [
        {"captured": True, "replays": 7, "reasons": {"warming_up": 3}},
        {"captured": False, "replays": 0, "reasons": {"dtype": 10}},
    ]
    found = read_capture({"optimizer": "MuSGD", "index": 2, "groups": groups, "setup_seconds": 1, "later": "field"})
    assert found is not None
    assert (found.index, found.num_replays, found.num_replayed_groups, found.setup_seconds) == (2, 7, 1, 1.0)
    assert list(found.reasons.items()) == [("dtype", 10), ("warming_up", 3)]
    assert found.break_even_steps is None


@pytest.mark.parametrize("report", [None, 3, {}, {"optimizer": 5}, {"optimizer": "X", "setup_seconds": "long"}])
def test_what_is_no_capture_report_is_none(report: Any) -> None:
    """Any optimizer may have a method of that name."""
    assert read_capture(report) is None
