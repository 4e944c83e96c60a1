"""Energy of an interval with its bound: from the driver's counter, or from power readings held until the next. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lucid_profiler.monitor.readings import LIMITS, WINDOWS_NS, is_plausible

__all__ = [
    "COUNTER_STEP_NS",
    "Energy",
    "PowerSample",
    "describe",
    "difference",
    "hold_ns",
    "integrate_power",
    "prefer",
]

COUNTER_STEP_NS = 100_000_000
"""Time between two moves of the counter, as measured on current data-center GPUs."""

_MIN_STEPS = 10  # fewer, and the bound is above a tenth of the energy
_MIN_HOLD_NS = 1_000_000_000
_POWER_WINDOW_NS = WINDOWS_NS["power_draw_mw"]
_MAX_UNSEEN_NS = _POWER_WINDOW_NS * 11 // 10  # readings come a little early and late
_POWER_STEP_MW = 1.0  # the driver's readings are whole milliwatts
_MIN_COVERAGE = 0.95
_MAX_DISAGREEMENT = 0.05
_MAX_POWER_MW = LIMITS["power_draw_mw"][1]

PowerSample = tuple[int, int | float | None]
"""Time on the monotonic clock in ns; power in mW, None where it could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy of one GPU in one interval.

    Attributes:
        value_j: Joules, None where they cannot be told.
        bound_j: The value is off by at most this much because of when and how coarsely the driver was read, its means
            over a second included. Power that lasted shorter than a reading's window counts as that reading, and what
            the sensor itself is off by is not in it: NVIDIA states 5 % for some products and nothing for others.
        source: Where it comes from; the two are never mixed.
        coverage: Share of the interval, from 0 to 1, in which the power was known.
        reason: A code of `REASONS` where `value_j` is None.
    """

    value_j: float | None
    bound_j: float | None
    source: Literal["counter", "power_held"]
    coverage: float = 1.0
    reason: str | None = None


def difference(
    begin_mj: float | None,
    end_mj: float | None,
    *,
    window_ns: int,
    wall_ns: int | None = None,
    unsure_ns: float = 0,
    power_mw: float | None = None,
    step_ns: int = COUNTER_STEP_NS,
    reason: str | None = None,
) -> Energy:
    """Return the energy of an interval from two readings of the counter around it.

    Args:
        begin_mj: The counter at the begin, in mJ; None where it could not be read.
        end_mj: Likewise at the end.
        window_ns: Time between the readings.
        wall_ns: Length of the interval, to which the energy of the window is scaled; None where that is the window.
        unsure_ns: Time at the two ends of which it is not known whether the readings cover it, or which they do not.
        power_mw: Largest power for the bound, if it is above the window's mean.
        step_ns: How often the counter moves. An interval of fewer than ten steps is "below_resolution".
        reason: Why a reading is None; "gap" where that is not known.
    """
    if begin_mj is None or end_mj is None:
        return _unknown("counter", reason or "gap")
    is_possible = end_mj - begin_mj <= _MAX_POWER_MW * (window_ns + step_ns) / 1e9
    if not (is_possible and is_plausible("energy_mj", begin_mj) and is_plausible("energy_mj", end_mj)):
        return _unknown("counter", "implausible")
    if end_mj < begin_mj:
        return _unknown("counter", "counter_reset")
    wall_ns = window_ns if wall_ns is None else wall_ns
    if min(window_ns, wall_ns) < _MIN_STEPS * step_ns:
        return _unknown("counter", "below_resolution")
    if end_mj == begin_mj:
        return _unknown("counter", "stuck_counter")
    mean_mw = (end_mj - begin_mj) / (window_ns / 1e9)
    bound_mw = max(mean_mw, power_mw or 0.0)
    return Energy(value_j=mean_mw * wall_ns / 1e12, bound_j=bound_mw * (step_ns + unsure_ns) / 1e12, source="counter")


def hold_ns(interval_ns: int) -> int:
    """Return for how long a power reading is believed where one is taken every `interval_ns`.

    >>> hold_ns(1_500_000_000)
    2250000000
    """
    return max(_MIN_HOLD_NS, interval_ns * 3 // 2)


def integrate_power(
    samples: Sequence[PowerSample], *, begin_ns: int, end_ns: int, max_hold_ns: int = _MIN_HOLD_NS
) -> Energy:
    """Return the energy of `[begin_ns, end_ns]` from power readings, each held until the next one.

    Every sample counts, also one that repeats the value before it. A reading is held for `max_hold_ns` at most and ends
    where a sample is None; where less than 95 % of the interval is covered the energy is None, "gap", and what is not
    covered counts as the rest does.

    The bound adds up how far the power may have been elsewhere between two readings, what the largest power comes to
    in time that is not covered, a step of the readings, and how far they trail behind: each is a mean of the second
    before it, so that what is read within the interval began up to a second earlier and lacks as much at its end. Where
    readings lie farther apart than that second, nobody saw what was between them, and there is no bound.

    Args:
        samples: In the order of their times; those outside the interval may be given, one before it covers its begin.
        begin_ns: Where the interval begins on the clock of the samples.
        end_ns: Where it ends.
        max_hold_ns: Longest time for which a reading is believed.
    """
    length_ns = end_ns - begin_ns
    if length_ns <= 0:
        return _unknown("power_held", "below_resolution", coverage=0.0)
    held = list(_held(samples, begin_ns=begin_ns, end_ns=end_ns, max_hold_ns=max_hold_ns))
    covered_ns = sum(held_ns for held_ns, _, _ in held)
    if covered_ns < _MIN_COVERAGE * length_ns:
        return _unknown("power_held", "gap", coverage=covered_ns / length_ns)
    powers = [power_mw for _, power_mw, _ in held]
    unknown_mw = max(powers) - min(powers)  # how far away a reading may have been that there is none of
    moved = sum((unknown_mw if next_mw is None else abs(next_mw - mw)) * held_ns for held_ns, mw, next_mw in held)
    missing = max(powers) * (length_ns - covered_ns)
    is_seen = max(held_ns for held_ns, _, _ in held) <= _MAX_UNSEEN_NS
    trailing = _spread_mw(samples, begin_ns=begin_ns, end_ns=end_ns) * _POWER_WINDOW_NS
    return Energy(
        value_j=sum(power_mw * held_ns for held_ns, power_mw, _ in held) / covered_ns * length_ns / 1e12,
        bound_j=(moved + missing + trailing + _POWER_STEP_MW * length_ns) / 1e12 if is_seen else None,
        source="power_held",
        coverage=covered_ns / length_ns,
    )


def prefer(counter: Energy, held: Energy) -> Energy:
    """Return the counter's energy, and that of the power readings, so labelled, where the counter has none.

    Where neither has, and the device has no counter, it is the readings that could have told: theirs is the reason.
    """
    is_held = counter.value_j is None and (held.value_j is not None or counter.reason == "not_supported")
    return held if is_held else counter


def describe(counter: Energy, held: Energy) -> str | None:
    """Return one sentence where the two sources differ by more than 5 % and more than their bounds, else None."""
    if counter.value_j is None or held.value_j is None:
        return None
    apart_j = abs(counter.value_j - held.value_j)
    bound_j = (counter.bound_j or 0.0) + (held.bound_j or 0.0)
    share = apart_j / max(counter.value_j, held.value_j, 1e-9)
    if share <= _MAX_DISAGREEMENT or apart_j <= bound_j:
        return None
    return (
        f"the energy counter says {counter.value_j:.1f} J and the power readings say {held.value_j:.1f} J, "
        f"{share:.0%} apart"
    )


def _held(
    samples: Sequence[PowerSample], *, begin_ns: int, end_ns: int, max_hold_ns: int
) -> Iterator[tuple[int, float, float | None]]:
    """Yield for each reading inside the interval how long it holds, its power, and the next one's if there is one."""
    for (at_ns, power_mw), (next_ns, next_mw) in pairwise([*samples, (end_ns, None)]):
        held_ns = min(next_ns, at_ns + max_hold_ns, end_ns) - max(at_ns, begin_ns)
        if power_mw is not None and held_ns > 0:
            yield held_ns, power_mw, next_mw


def _spread_mw(samples: Sequence[PowerSample], *, begin_ns: int, end_ns: int) -> float:
    """Return how far apart the readings are whose means reach across one of the ends, and their neighbours."""
    near: list[float] = []
    for at_ns in (begin_ns, end_ns):
        first = bisect_left(samples, at_ns - _POWER_WINDOW_NS, key=_time)
        last = bisect_right(samples, at_ns + _POWER_WINDOW_NS, key=_time)
        near += [power_mw for _, power_mw in samples[max(first - 1, 0) : last + 1] if power_mw is not None]
    return max(near, default=0.0) - min(near, default=0.0)


def _time(sample: PowerSample) -> int:
    return sample[0]


def _unknown(source: Literal["counter", "power_held"], reason: str, *, coverage: float = 1.0) -> Energy:
    return Energy(value_j=None, bound_j=None, source=source, coverage=coverage, reason=reason)
