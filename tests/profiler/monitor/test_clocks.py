import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid_profiler.monitor.clocks import Anchor, ClockWatch, SystemClock, jumps_between, take_anchor
from support.clock import ManualClock

S = 1_000_000_000


def _after(begin: Anchor, *, mono_ns: int, wall_ns: int, boot_ns: int) -> Anchor:
    return Anchor(
        mono_ns=begin.mono_ns + mono_ns,
        wall_ns=begin.wall_ns + wall_ns,
        boot_ns=begin.boot_ns + boot_ns,
        uncertainty_ns=0,
    )


BEGIN = Anchor(mono_ns=1, wall_ns=2, boot_ns=3, uncertainty_ns=0)


def test_an_anchor_lies_in_the_middle_of_its_bracket() -> None:
    """Wall and boot time belong to the monotonic time halfway between two readings, give or take half of it."""
    anchor = take_anchor(ManualClock(read_ns=100))
    assert anchor.uncertainty_ns == 50
    assert (anchor.mono_ns - 50) % 100 == 5_000_000_000 % 100


def test_the_tightest_of_several_brackets_counts() -> None:
    """An attempt that was interrupted does not make the anchor worse."""

    class Interrupted(ManualClock):
        num_reads = 0

        def boot_ns(self) -> int:
            self.num_reads += 1
            self.pass_ns(S if self.num_reads != 3 else 10)
            return self.boot

    assert take_anchor(Interrupted()).uncertainty_ns == 5


def test_the_clocks_of_this_machine_can_be_anchored() -> None:
    """The bracket of a real anchor is a time in which the anchor was taken."""
    clock = SystemClock()
    before_ns = clock.mono_ns()
    anchor = take_anchor(clock)
    assert before_ns <= anchor.mono_ns <= clock.mono_ns()
    assert anchor.uncertainty_ns >= 0
    assert clock.cpu_ns() > 0


@given(passed_ns=st.integers(0, 10**15), drift_ns=st.integers(-49_000_000, 49_000_000))
def test_clocks_that_run_together_have_not_jumped(passed_ns: int, drift_ns: int) -> None:
    """A wall clock that is slewed by less than 50 ms is no event."""
    assert not jumps_between(BEGIN, _after(BEGIN, mono_ns=passed_ns, wall_ns=passed_ns + drift_ns, boot_ns=passed_ns))


@given(passed_ns=st.integers(0, 10**15), step_ns=st.integers(51_000_000, 10**16), sign=st.sampled_from((1, -1)))
def test_a_wall_clock_that_is_set_is_a_step_of_that_size(passed_ns: int, step_ns: int, sign: int) -> None:
    """Forward and backward, in ns, and nothing else is reported."""
    (jump,) = jumps_between(
        BEGIN, _after(BEGIN, mono_ns=passed_ns, wall_ns=passed_ns + sign * step_ns, boot_ns=passed_ns)
    )
    assert (jump.name, jump.size_ns) == ("wall_step", sign * step_ns)
    assert (jump.begin_ns, jump.end_ns) == (BEGIN.mono_ns, BEGIN.mono_ns + passed_ns)


@given(passed_ns=st.integers(0, 10**15), slept_ns=st.integers(51_000_000, 10**16))
def test_sleep_is_a_suspend_and_no_step_of_the_wall_clock(passed_ns: int, slept_ns: int) -> None:
    """The wall clock goes on while the machine sleeps; nobody has set it."""
    total_ns = passed_ns + slept_ns
    (jump,) = jumps_between(BEGIN, _after(BEGIN, mono_ns=passed_ns, wall_ns=total_ns, boot_ns=total_ns))
    assert (jump.name, jump.size_ns) == ("suspend", slept_ns)


def test_an_anchor_is_due_every_ten_seconds() -> None:
    """Between two anchors nothing is reported."""
    clock = ManualClock()
    watch = ClockWatch(clock)
    taken = []
    for _ in range(205):
        clock.pass_s(0.1)
        anchor, jumps = watch.check()
        assert not jumps
        taken += [] if anchor is None else [anchor.mono_ns]
    assert taken == [15 * S, 25 * S]


@pytest.mark.parametrize("jump_s", [0.06, 3600.0, -3600.0])
def test_a_jump_is_seen_at_the_next_look_and_only_once(jump_s: float) -> None:
    """A new anchor is taken at once, and later looks start from it."""
    clock = ManualClock()
    watch = ClockWatch(clock)
    clock.pass_s(0.1)
    assert watch.check() == (None, ())
    clock.pass_s(0.1)
    clock.wall += round(jump_s * 1e9)
    anchor, (jump,) = watch.check()
    assert anchor is not None
    assert anchor.wall_ns == clock.wall
    assert (jump.name, jump.size_ns) == ("wall_step", round(jump_s * 1e9))
    assert (jump.begin_ns, jump.end_ns) == (clock.mono - S // 10, clock.mono)
    clock.pass_s(0.1)
    assert watch.check() == (None, ())


def test_an_interrupted_look_is_no_jump() -> None:
    """When the process is held up between two readings, a tight anchor shows that the clocks agree."""

    class Interrupted(ManualClock):
        hold_ns = 0

        def wall_ns(self) -> int:
            wall = self.wall
            self.pass_ns(self.hold_ns)
            self.hold_ns = 0
            return wall

    clock = Interrupted()
    watch = ClockWatch(clock)
    clock.pass_s(0.1)
    clock.hold_ns = S
    anchor, jumps = watch.check()
    assert anchor is not None
    assert not jumps
