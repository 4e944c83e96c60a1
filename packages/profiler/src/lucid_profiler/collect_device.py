"""What the agents saw of the device: times of its side of the steps, the allocator's series, what was not finite."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

from lucid_profiler.device_times import DeviceRecord
from lucid_profiler.entries import AllocatorEntry, DeviceEntry, DeviceTimesEntry, NonfiniteEntry
from lucid_profiler.records import Metric, Samples
from lucid_profiler.traces import ProcessTrace

T = TypeVar("T")

__all__ = ["Inside", "bare_uuid", "device_metrics", "device_notes", "device_samples", "devices_inside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What the processes of a run say of the devices that they used, by UUID without its kind.

    Attributes:
        uuids: the devices.
        allocator: what torch held there, where one process alone used the device.
    """

    uuids: tuple[str, ...] = ()
    allocator: Mapping[str, Sequence[AllocatorEntry]] = field(default_factory=dict)


def bare_uuid(uuid: str) -> str:
    """Return a UUID without `GPU-` or `MIG-` before it: torch leaves them out."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def devices_inside(traces: Sequence[ProcessTrace]) -> Inside:
    """Join what each process held with its devices' identity, which is known of those that ended by themselves."""
    holders: dict[str, list[Sequence[AllocatorEntry]]] = {}
    for trace in traces:
        lines = trace.all(AllocatorEntry)
        for device in {entry.device: entry for entry in trace.all(DeviceEntry) if entry.uuid}.values():
            own = [line for line in lines if line.device == device.device]
            holders.setdefault(bare_uuid(device.uuid or ""), []).append(own)
    return Inside(
        uuids=tuple(holders), allocator={uuid: held[0] for uuid, held in holders.items() if len(held) == 1 and held[0]}
    )


def device_metrics(first: ProcessTrace, *, optimizer: int | None, reason: str) -> dict[str, Metric]:
    """Return the medians of one optimizer's device times, None with the reason where there are none.

    Args:
        first: the process that they are of.
        optimizer: index of the optimizer; None where no step was seen.
        reason: why there are no times, where there is none.
    """
    records = [record for record in first.device_times.records if record.optimizer == optimizer]
    return {
        "step_device_median": _seconds(record.step_ns for record in records)
        or Metric(value=None, unit="s", reason=reason),
        "optimizer_device_median": _seconds(record.optimizer_ns for record in records)
        or Metric(value=None, unit="s", reason=reason),
    }


def _seconds(times_ns: Iterator[int | None]) -> Metric | None:
    known = [time_ns for time_ns in times_ns if time_ns is not None]
    return Metric(value=median(known) / 1e9, unit="s") if known else None


_STEP_COLUMNS: dict[str, Callable[[DeviceRecord], int | None]] = {
    "begin_ns": lambda record: record.begin_ns,
    "optimizer": lambda record: record.optimizer,
    "step": lambda record: record.step,
    "optimizer_device_ns": lambda record: record.optimizer_ns,
    "step_device_ns": lambda record: record.step_ns,
}
_ALLOCATOR_FIELDS = (
    "mono_ns",
    "step",
    "device",
    "allocated_bytes",
    "reserved_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "num_alloc_retries",
    "num_ooms",
    "private_pools_bytes",
    "private_pools_allocated_bytes",
)


def device_samples(first: ProcessTrace, run: int) -> Iterator[Samples]:
    """Yield the series `device_steps` and `allocator` of a process."""
    for chunk in _chunks(first.device_times.records):
        columns: dict[str, tuple[Any, ...]] = {
            name: tuple(read(record) for record in chunk) for name, read in _STEP_COLUMNS.items()
        }
        yield Samples(run=run, series="device_steps", columns=columns)
    for lines in _chunks(first.all(AllocatorEntry)):
        columns = {name: tuple(getattr(line, name) for line in lines) for name in _ALLOCATOR_FIELDS}
        yield Samples(run=run, series="allocator", columns=columns)


def _chunks(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    return (rows[start : start + Samples.MAX_ROWS] for start in range(0, len(rows), Samples.MAX_ROWS))


def device_notes(traces: Sequence[ProcessTrace]) -> list[str]:
    """Say what was not finite first, and which steps the device's clock does not cover."""
    notes = []
    for trace in traces:
        notes += [_nonfinite(entry) for entry in trace.all(NonfiniteEntry) if entry.step is not None]
        times = trace.last(DeviceTimesEntry)
        if times is not None and times.num_captured:
            notes.append(f"{times.num_captured} steps inside a capture have no device time")
        if times is not None and times.num_behind:
            notes.append(f"{times.num_behind} steps have no device time: the device was too far behind")
    return notes


def _nonfinite(entry: NonfiniteEntry) -> str:
    if entry.what == "loss":
        return f"the loss was first not finite at call {entry.step}"
    name = f"parameter {entry.name!r}" if entry.name else "a parameter"
    return f"{name} of optimizer {entry.optimizer} was first not finite after step {entry.step}"
