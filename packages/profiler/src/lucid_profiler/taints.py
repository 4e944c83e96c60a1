"""What bent a run from outside, as its monitor saw it: slowed clocks, foreign processes, a machine that slept. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from lucid_profiler.collect_monitor import Monitored
from lucid_profiler.records import Samples, Wall

THROTTLING = 0x8 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, too hot for the software's or the hardware's limit, power brake:
https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html."""
POWER_CAP = 0x4
_UNKNOWN = "not known which of the GPUs the run used, so throttling and other processes were not looked for"

__all__ = ["POWER_CAP", "THROTTLING", "find_taints"]


def find_taints(
    monitored: Monitored, *, wall: Wall, was_unwatched: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the taints of a run, codes of `records.TAINTS`, and notes about what is no taint.

    `throttled`: a GPU of the run was held back for heat or by its power supply at one sample of the wall or more; the
    power cap holds a busy GPU back at any time, so it is a note. `foreign`: a process outside of the run had one of
    these GPUs at one look of the wall or more. `suspended`: the machine slept while the run was followed, or lucid
    was stopped. Where the driver hides which of several GPUs the run used, a note says that none was looked at.

    Args:
        monitored: what was sampled beside the run.
        wall: the interval that the run's metrics are of.
        was_unwatched: whether lucid itself was stopped during the run.
    """
    own = _own(monitored)
    bits = [int(mask) for uuid in _with_parents(monitored, own) for mask in _readings(monitored, uuid, wall)]
    found = {
        "throttled": any(mask & THROTTLING for mask in bits),
        "foreign": any(_num_foreign(monitored, uuid, wall) for uuid in own),
        "suspended": was_unwatched or monitored.report.events.get("suspend", 0) > 0,
    }
    notes = {
        "the power cap held the clocks of its GPU back": any(mask & POWER_CAP for mask in bits),
        _UNKNOWN: not own and _is_hidden(monitored),
    }
    return _true(found), _true(notes)


def _true(found: Mapping[str, bool]) -> tuple[str, ...]:
    return tuple(text for text, is_there in found.items() if is_there)


def _own(monitored: Monitored) -> tuple[str, ...]:
    """Return the devices that the run used, as far as that is known."""
    return tuple(energy.uuid for energy in monitored.report.energy)


def _is_hidden(monitored: Monitored) -> bool:
    """Tell whether the GPUs had processes of which it is not known whether they were the run's."""
    energy = monitored.metrics.get("gpu_energy")
    return energy is not None and energy.reason == "pid_namespace"


def _with_parents(monitored: Monitored, uuids: Sequence[str]) -> set[str]:
    """Return the devices with the whole GPUs of those that are instances: clocks are the GPU's."""
    parents = {device.uuid: device.parent_uuid for device in monitored.report.devices}
    return {*uuids, *(parent for uuid in uuids if (parent := parents.get(uuid)))}


def _readings(monitored: Monitored, uuid: str, wall: Wall) -> Iterator[float]:
    """Yield why the clocks of a device were not higher, at each sample of the wall that says so."""
    for row in _rows(monitored, uuid, wall, ("clocks_event_reasons",)):
        if row[0] is not None:
            yield row[0]


def _num_foreign(monitored: Monitored, uuid: str, wall: Wall) -> int:
    """Return the most processes outside of the run that were seen on a device at once.

    An entry of the driver's list that names no process here counts only where the run's own were recognised: else it
    may be the run itself, under the number that it has outside of its container.
    """
    fields = ("num_other_processes", "num_unknown_processes", "process_memory_bytes")
    rows = _rows(monitored, uuid, wall, fields)
    return max((int(other or 0) + (int(unknown or 0) if own else 0) for other, unknown, own in rows), default=0)


def _rows(
    monitored: Monitored, uuid: str, wall: Wall, fields: tuple[str, ...]
) -> Iterator[tuple[float | int | None, ...]]:
    """Yield these fields of a device at each sample of the wall, from whichever of its series has them."""
    for samples in _series_of(monitored.samples, uuid):
        times = samples.columns.get("mono_ns", ())
        if fields[0] in samples.columns:
            blank = (None,) * len(times)
            columns = [samples.columns.get(field, blank) for field in fields]
            for at_ns, *row in zip(times, *columns, strict=True):
                if at_ns is not None and wall.begin_ns <= at_ns <= wall.end_ns:
                    yield tuple(row)


def _series_of(samples: Sequence[Samples], uuid: str) -> Iterator[Samples]:
    name = f"gpu:{uuid}"
    return (one for one in samples if one.series == name or one.series.startswith(f"{name}:"))
