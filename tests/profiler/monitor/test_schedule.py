import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid_profiler.monitor.schedule import CREDIT_NS, Distribution, Pacer, Schedule


@given(
    interval_ns=st.integers(1, 10**6),
    steps_ns=st.lists(st.integers(0, 10**7), max_size=50),
    begin_ns=st.integers(0, 10**15),
)
def test_every_deadline_is_taken_or_missed(interval_ns: int, steps_ns: list[int], begin_ns: int) -> None:
    """Deadlines stay on their grid however late they are served, none is served twice, and none is forgotten."""
    schedule = Schedule(begin_ns, interval_ns=interval_ns)
    now_ns = begin_ns
    taken = []
    for now_ns in itertools.accumulate(steps_ns, initial=begin_ns):
        tick = schedule.take(now_ns)
        if tick is not None:
            assert 0 <= tick.late_ns < interval_ns
            assert tick.deadline_ns + tick.late_ns == now_ns
            taken.append(tick.deadline_ns)
        assert now_ns < schedule.next_ns <= now_ns + interval_ns
    assert taken == sorted(set(taken))
    assert all((deadline_ns - begin_ns) % interval_ns == 0 for deadline_ns in taken)
    num_due = (now_ns - begin_ns) // interval_ns + 1
    assert len(taken) + schedule.num_missed == num_due


def test_after_a_hold_up_one_tick_comes_and_not_many() -> None:
    """Deadlines that have passed are counted as missed, not made up for."""
    schedule = Schedule(0, interval_ns=100)
    assert schedule.take(0) is not None
    tick = schedule.take(1234)
    assert tick is not None
    assert (tick.deadline_ns, tick.late_ns, tick.num_missed) == (1200, 34, 11)
    assert schedule.take(1299) is None
    assert schedule.next_ns == 1300


def test_what_passes_before_the_end_is_missed() -> None:
    """Each deadline that nobody served within its interval is counted, and counted once."""
    schedule = Schedule(0, interval_ns=100)
    assert schedule.take(30) is not None
    assert [schedule.end(end_ns) for end_ns in (40, 100, 199, 1234, 1240)] == [0, 0, 0, 11, 0]
    assert (schedule.num_missed, schedule.next_ns) == (11, 1200)


@pytest.mark.parametrize("interval_ns", [0, -1])
def test_an_interval_must_be_above_zero(interval_ns: int) -> None:
    """Else there would be no next deadline."""
    with pytest.raises(ValueError, match="must be above 0"):
        Schedule(0, interval_ns=interval_ns)


def test_work_is_done_once_a_period() -> None:
    """A deadline exactly one period later is due, however late the last one was served."""
    pacer = Pacer(period_ns=1000, max_share=0.5, max_wait_ns=1000)
    done = []
    for deadline_ns in range(0, 3001, 100):
        if pacer.is_due(deadline_ns):
            done.append(deadline_ns)
            pacer.spent(deadline_ns, 10)
    assert done == [0, 1000, 2000, 3000]


@given(costs_ns=st.lists(st.integers(0, 10**5), min_size=1, max_size=30), max_share=st.floats(0.001, 1))
def test_work_never_takes_more_than_its_share(costs_ns: list[int], max_share: float) -> None:
    """Until the next beginning, what was done fills at most its share of the time."""
    pacer = Pacer(period_ns=0, max_share=max_share, max_wait_ns=10**12)
    now_ns = 0
    for cost_ns in costs_ns:
        pacer.spent(now_ns, cost_ns)
        while not pacer.is_due(now_ns):
            now_ns += 1000
    assert sum(costs_ns) <= max_share * (now_ns + len(costs_ns)) + len(costs_ns)


def test_one_dear_reading_is_paid_from_the_share_before_it() -> None:
    """Else a single slow one would leave a gap; what may be kept is bounded, however long nothing was spent."""
    pacer = Pacer(period_ns=0, max_share=0.01, max_wait_ns=10**12)
    pacer.spent(0, 0)
    pacer.spent(3600 * 10**9, CREDIT_NS // 100)
    assert pacer.is_due(3600 * 10**9)
    pacer.spent(3600 * 10**9, 5)
    assert [pacer.is_due(3600 * 10**9 + later_ns) for later_ns in (499, 500)] == [False, True]


def test_what_was_spent_beyond_the_longest_wait_is_forgiven() -> None:
    """When the work becomes cheap again, it is done as often as before."""
    pacer = Pacer(period_ns=0, max_share=0.001, max_wait_ns=500)
    for deadline_ns in (0, 500, 1000):
        pacer.spent(deadline_ns, 10**9)
    pacer.spent(1500, 0)
    assert pacer.is_due(1500)


def test_work_is_put_off_for_a_limited_time() -> None:
    """However much it costs; the period holds where it is longer."""
    for period_ns, expected_ns in ((0, 500), (800, 800)):
        pacer = Pacer(period_ns=period_ns, max_share=0.001, max_wait_ns=500)
        pacer.spent(0, 10**6)
        assert [pacer.is_due(expected_ns - 1), pacer.is_due(expected_ns)] == [False, True]


@given(durations_ns=st.lists(st.integers(0, 2**40), min_size=1), share=st.floats(0, 1))
def test_a_quantile_is_within_its_precision(durations_ns: list[int], share: float) -> None:
    """The distribution's quantile is the one of the sorted values, within 1.6 %; the maximum is exact."""
    distribution = Distribution()
    for duration_ns in durations_ns:
        distribution.add(duration_ns)
    wanted = max(1, share * len(durations_ns))
    exact = next(value for rank, value in enumerate(sorted(durations_ns), start=1) if rank >= wanted)
    quantile = distribution.quantile(share)
    assert quantile is not None
    assert abs(quantile - exact) <= 0.016 * exact
    assert distribution.max_ns == max(durations_ns)


def test_nothing_has_no_quantile() -> None:
    """A run without samples has no lateness, rather than one of 0."""
    assert Distribution().summary() == {"median": None, "p99": None, "max": None}
