"""The energy of a run's devices: the counter between the marks at the ends of its wall, else its power readings.

A device's counter is read before the wall begins and after it ends, a device after the other and milliseconds each, so
that its window is not the wall. Its energy is scaled to the wall, and what that may be off by is in the bound.

A device that answered nothing for a time between the marks may have been reset: its counter may have begun anew and
have passed its first reading since, so that the difference says nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

from lucid_profiler.monitor.energy import (
    Energy,
    PowerSample,
    describe,
    difference,
    hold_ns,
    integrate_power,
    prefer,
)
from lucid_profiler.monitor.readings import REASONS, WINDOWS_NS
from lucid_profiler.monitor.records import Mark
from lucid_profiler.monitor_mark import FIT_MARKS
from lucid_profiler.monitor_view import View
from lucid_profiler.monitored import DeviceEnergy

_AWAY = frozenset({"lost", "no_driver", "driver_mismatch", "unknown_error", "no_devices"})
_SPOILT = _AWAY | {"counter_reset", "stuck_counter", "implausible"}

__all__ = ["device_energy"]


def device_energy(view: View, marks: Sequence[Mark]) -> tuple[list[DeviceEnergy], list[str]]:
    """Return the energy of each device that the run used, and what a reader has to know, one sentence each."""
    found: list[DeviceEnergy] = []
    notes: list[str] = []
    for uuid in view.uuids:
        power = [(sample.mono_ns, sample.gpus.get(uuid, {}).get("power_draw_mw")) for sample in view.samples]
        held = integrate_power(
            power, begin_ns=view.wall.begin_ns, end_ns=view.wall.end_ns, max_hold_ns=hold_ns(view.interval_ns)
        )
        if held.reason == "gap":
            held = replace(held, reason=view.why_mostly_null(uuid, "power_draw_mw"))
        counter = _counter(view, marks, uuid, power)
        best = prefer(counter, held)
        disagreement = describe(counter, held)
        found.append(
            DeviceEnergy(
                uuid=uuid,
                value_j=best.value_j,
                # One of the two is not within its bound, and nobody knows which.
                bound_j=None if disagreement else best.bound_j,
                source=best.source,
                coverage=best.coverage,
                reason=best.reason,
            )
        )
        if counter.reason in _SPOILT:
            notes.append(f"the energy counter of {uuid} was not used: {REASONS[counter.reason]}")
        if counter.reason == "not_marked" and view.wall.source == "fit":
            notes.append(
                f"the energy counter of {uuid} was not used: the monitor was not there, or did not answer in time, "
                "at an end of fit()"
            )
        notes += filter(None, [disagreement])
    return found, notes


def _counter(view: View, marks: Sequence[Mark], uuid: str, power: Sequence[PowerSample]) -> Energy:
    wall_ns = view.wall.end_ns - view.wall.begin_ns
    begin = view.mark(marks, FIT_MARKS[0], view.wall.begin_ns)
    end = view.mark(marks, FIT_MARKS[1], view.wall.end_ns)
    if begin is None or end is None:
        return difference(None, None, window_ns=wall_ns, reason=_why_unread(view, marks, uuid) or "not_marked")
    begin_ns, begin_slack_ns = _read_at(begin, uuid)
    end_ns, end_slack_ns = _read_at(end, uuid)
    why_unread = _why_unread(view, [begin], uuid) or _why_unread(view, [end], uuid)
    why_not = why_unread or _why_away(view, uuid, begin_ns, end_ns)
    if why_not is not None:
        return difference(None, None, window_ns=wall_ns, reason=why_not)
    outside_ns = abs(begin_ns - view.wall.begin_ns) + abs(end_ns - view.wall.end_ns)
    energy = difference(
        begin.energy_mj.get(uuid),
        end.energy_mj.get(uuid),
        window_ns=round(end_ns - begin_ns),
        wall_ns=wall_ns,
        unsure_ns=outside_ns + begin_slack_ns + end_slack_ns,
        power_mw=_largest(power, begin_ns, end_ns),
    )
    # Of power that nobody saw nobody knows how large it was.
    return energy if view.interval_ns <= WINDOWS_NS["power_draw_mw"] else replace(energy, bound_j=None)


def _why_unread(view: View, marks: Sequence[Mark], uuid: str) -> str | None:
    """Return why a device's counter was read at none of the marks; None where it was, or where there are none."""
    if not marks or any(mark.energy_mj.get(uuid) is not None for mark in marks):
        return None
    return view.why_null(uuid, "energy_mj", marks[-1].mono_ns)


def _why_away(view: View, uuid: str, begin_ns: float, end_ns: float) -> str | None:
    """Return why a device or its driver was away for a part of an interval; None where it was not."""
    away = (gap for gap in view.gaps if gap.device == uuid and gap.reason in _AWAY)
    return next((gap.reason for gap in away if gap.begin_ns < end_ns and gap.end_ns > begin_ns), None)


def _read_at(mark: Mark, uuid: str) -> tuple[float, float]:
    """Return the middle of the call that read a device's counter, and how far from it the counter was read at most."""
    before_ns, after_ns = mark.energy_ns.get(uuid, (mark.mono_ns, mark.read_ns))
    return (before_ns + after_ns) / 2, (after_ns - before_ns) / 2


def _largest(power: Sequence[PowerSample], begin_ns: float, end_ns: float) -> float | None:
    """Return the largest power that was read of the time between two moments, None if none was."""
    last_ns = end_ns + WINDOWS_NS["power_draw_mw"]
    return max((mw for at_ns, mw in power if mw is not None and begin_ns <= at_ns <= last_ns), default=None)
