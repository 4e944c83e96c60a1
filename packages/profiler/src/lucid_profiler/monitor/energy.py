"""Energy of an interval with its bound: from the driver's counter, or from power readings held until the next. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lucid_profiler.monitor.readings import is_plausible

__all__ = ["COUNTER_STEP_NS", "Energy", "PowerSample", "describe", "difference", "integrate_power", "prefer"]

COUNTER_STEP_NS = 100_000_000
"""Time between two moves of the counter, as measured on current data-center GPUs."""

_MIN_STEPS = 10  # fewer, and the bound is above a tenth of the energy
_MAX_HOLD_NS = 1_000_000_000
_MIN_COVERAGE = 0.95
_MAX_DISAGREEMENT = 0.05

PowerSample = tuple[int, int | float | None]
"""Time on the monotonic clock in ns; power in mW, None where it could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy of one GPU in one interval.

    Attributes:
        value_j: Joules, None where they cannot be told.
        bound_j: The value is off by at most this much because readings are discrete.
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
    power_mw: float | None = None,
    step_ns: int = COUNTER_STEP_NS,
    reason: str | None = None,
) -> Energy:
    """Return the energy between two readings of the counter.

    Args:
        begin_mj: The counter at the begin, in mJ; None where it could not be read.
        end_mj: Likewise at the end.
        window_ns: Time between the readings.
        power_mw: Typical power for the bound; without it the interval's mean.
        step_ns: How often the counter moves. An interval of fewer than ten steps is "below_resolution".
        reason: Why a reading is None.
    """
    if begin_mj is None or end_mj is None:
        return _unknown("counter", reason or "not_supported")
    if not (is_plausible("energy_mj", begin_mj) and is_plausible("energy_mj", end_mj)):
        return _unknown("counter", "implausible")
    if end_mj < begin_mj:
        return _unknown("counter", "counter_reset")
    if window_ns < _MIN_STEPS * step_ns:
        return _unknown("counter", "below_resolution")
    if end_mj == begin_mj:
        return _unknown("counter", "stuck_counter")
    value_j = (end_mj - begin_mj) / 1e3
    watts = value_j / (window_ns / 1e9) if power_mw is None else power_mw / 1e3
    return Energy(value_j=value_j, bound_j=watts * step_ns / 1e9, source="counter")


def integrate_power(
    samples: Sequence[PowerSample], *, begin_ns: int, end_ns: int, max_hold_ns: int = _MAX_HOLD_NS
) -> Energy:
    """Return the energy of `[begin_ns, end_ns]` from power readings, each held until the next one.

    Every sample counts, also one that repeats the value before it. A reading is held for `max_hold_ns` at most and ends
    where a sample is None; where less than 95 % of the interval is covered the energy is None, "gap". The bound adds up
    how far the power may have been elsewhere between two readings; it knows nothing of the driver's own averaging.

    Args:
        samples: In the order of their times; those outside the interval may be given, one before it covers its begin.
        begin_ns: Where the interval begins on the clock of the samples.
        end_ns: Where it ends.
        max_hold_ns: Longest time for which a reading is believed.
    """
    value_j = bound_j = 0.0
    covered_ns = 0
    for held_ns, power_mw, next_mw in _held(samples, begin_ns=begin_ns, end_ns=end_ns, max_hold_ns=max_hold_ns):
        covered_ns += held_ns
        value_j += power_mw * held_ns / 1e12
        bound_j += abs(next_mw - power_mw) * held_ns / 1e12
    coverage = covered_ns / (end_ns - begin_ns) if end_ns > begin_ns else 0.0
    if coverage < _MIN_COVERAGE:
        return _unknown("power_held", "gap" if end_ns > begin_ns else "below_resolution", coverage=coverage)
    return Energy(value_j=value_j, bound_j=bound_j, source="power_held", coverage=coverage)


def prefer(counter: Energy, held: Energy) -> Energy:
    """Return the counter's energy, and that of the power readings, so labelled, where the counter has none."""
    return counter if counter.value_j is not None or held.value_j is None else held


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
) -> Iterator[tuple[int, float, float]]:
    """Yield for each reading inside the interval how long it holds, its power and the next reading's."""
    for (at_ns, power_mw), (next_ns, next_mw) in pairwise([*samples, (end_ns, None)]):
        held_ns = min(next_ns, at_ns + max_hold_ns, end_ns) - max(at_ns, begin_ns)
        if power_mw is not None and held_ns > 0:
            yield held_ns, power_mw, power_mw if next_mw is None else next_mw


def _unknown(source: Literal["counter", "power_held"], reason: str, *, coverage: float = 1.0) -> Energy:
    return Energy(value_j=None, bound_j=None, source=source, coverage=coverage, reason=reason)
