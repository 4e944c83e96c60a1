"""Three clocks read together: where the wall clock stood, and whether it was set or the machine slept meanwhile.

Durations come from the monotonic clock only. Linux stops it while the machine sleeps; the boot clock goes on.
"""

import time
from dataclasses import dataclass
from typing import Literal, Protocol

ANCHOR_PERIOD_NS = 10_000_000_000
JUMP_THRESHOLD_NS = 50_000_000
_NUM_ATTEMPTS = 5
# https://man7.org/linux/man-pages/man2/clock_gettime.2.html; other systems have no such clock.
_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

__all__ = [
    "ANCHOR_PERIOD_NS",
    "JUMP_THRESHOLD_NS",
    "Anchor",
    "Clock",
    "ClockWatch",
    "Jump",
    "SystemClock",
    "jumps_between",
    "take_anchor",
]


class Clock(Protocol):
    """The clocks of a machine, in ns: `mono_ns` stands still while it sleeps, `boot_ns` does not, `wall_ns` is set."""

    def cpu_ns(self) -> int:
        """Return the processor time that this process has used."""

    def mono_ns(self) -> int:
        """Return the monotonic time."""

    def wall_ns(self) -> int:
        """Return the time since 1970, UTC."""

    def boot_ns(self) -> int:
        """Return the time since the machine was booted, sleep included."""


class SystemClock:
    """The clocks of this machine."""

    cpu_ns = staticmethod(time.process_time_ns)
    mono_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)

    def boot_ns(self) -> int:
        """Return the time since the machine was booted, sleep included."""
        return time.clock_gettime_ns(_BOOT_CLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One moment on three clocks; `mono_ns` is known to `uncertainty_ns` either way."""

    mono_ns: int
    wall_ns: int
    boot_ns: int
    uncertainty_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """The wall clock was set, or the machine slept, by `size_ns`, somewhere between two anchors."""

    name: Literal["wall_step", "suspend"]
    size_ns: int
    begin_ns: int
    end_ns: int


def take_anchor(clock: Clock) -> Anchor:
    """Read wall and boot clock between two readings of the monotonic one; of several attempts the tightest counts."""
    return min((_bracket(clock) for _ in range(_NUM_ATTEMPTS)), key=lambda anchor: anchor.uncertainty_ns)


def _bracket(clock: Clock) -> Anchor:
    before_ns = clock.mono_ns()
    wall_ns, boot_ns = clock.wall_ns(), clock.boot_ns()
    after_ns = clock.mono_ns()
    uncertainty_ns = (after_ns - before_ns + 1) // 2
    return Anchor(mono_ns=before_ns + uncertainty_ns, wall_ns=wall_ns, boot_ns=boot_ns, uncertainty_ns=uncertainty_ns)


def jumps_between(begin: Anchor, end: Anchor) -> tuple[Jump, ...]:
    """Return what happened to the clocks between two anchors.

    Sleep moves the wall clock as well; only what it moved beyond that is a step of its own.
    """
    slept_ns = end.boot_ns - begin.boot_ns - (end.mono_ns - begin.mono_ns)
    stepped_ns = end.wall_ns - begin.wall_ns - (end.boot_ns - begin.boot_ns)
    jumps = []
    if slept_ns > JUMP_THRESHOLD_NS:
        jumps.append(Jump(name="suspend", size_ns=slept_ns, begin_ns=begin.mono_ns, end_ns=end.mono_ns))
    if abs(stepped_ns) > JUMP_THRESHOLD_NS:
        jumps.append(Jump(name="wall_step", size_ns=stepped_ns, begin_ns=begin.mono_ns, end_ns=end.mono_ns))
    return tuple(jumps)


class ClockWatch:
    """Takes an anchor every ten seconds, and at once where a quick look says that a clock has jumped.

    Args:
        clock: the clocks to watch.

    Attributes:
        anchor: the last anchor taken.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.anchor = take_anchor(clock)
        self._latest = self.anchor

    def check(self) -> tuple[Anchor | None, tuple[Jump, ...]]:
        """Return a new anchor, None if none is due, and what the clocks did since the last look."""
        # A quick look is one bracket; where the process was interrupted in it, an anchor decides.
        look = _bracket(self._clock)
        if look.mono_ns - self.anchor.mono_ns < ANCHOR_PERIOD_NS and not jumps_between(self._latest, look):
            self._latest = look
            return None, ()
        anchor = take_anchor(self._clock)
        jumps = jumps_between(self._latest, anchor)
        self.anchor = self._latest = anchor
        return anchor, jumps
