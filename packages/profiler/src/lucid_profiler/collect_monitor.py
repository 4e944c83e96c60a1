"""Turns a monitor's log into what a report says of one run: how sampling went, its series, and metrics of the wall.

A mean is one over readings that exist; a metric that the readings cannot carry is None with its reason.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from lucid_profiler.context import Measured
from lucid_profiler.entries import AllocatorEntry
from lucid_profiler.errors import ReportError
from lucid_profiler.memory_account import memory_account
from lucid_profiler.monitor.energy import Energy, describe, difference, integrate_power, prefer
from lucid_profiler.monitor.log import Log, read_log
from lucid_profiler.monitor.readings import is_too_short
from lucid_profiler.monitor.records import End, Event, Header, Mark, ReasonsChanged, Sample
from lucid_profiler.monitor_mark import FIT_MARKS
from lucid_profiler.monitored import DeviceEnergy, Gap, MonitoredDevice, MonitorReport
from lucid_profiler.records import Metric, Samples, Wall

SLOW = ":slow"  # ends the name of the series of what is read once a second

R = TypeVar("R")
Number = float | int
Row = Mapping[str, Number | None]

__all__ = ["Monitored", "observe_monitor", "unmonitored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitored:
    """What was sampled beside one run."""

    report: MonitorReport
    metrics: dict[str, Metric]
    samples: tuple[Samples, ...] = ()


def unmonitored(reason: str, *, detail: str | None = None) -> Monitored:
    """Return what is known where nothing was sampled: every metric is None with the reason; `detail` is a note."""
    unknown = {name: Metric(value=None, unit=unit, better=better, reason=reason) for name, unit, better in _METRICS}
    return Monitored(
        report=MonitorReport(reason=reason, nvml_reason=reason, notes=(detail,) if detail else ()), metrics=unknown
    )


def observe_monitor(
    path: Path,
    *,
    run: int,
    wall: Wall,
    allocator: Sequence[AllocatorEntry] = (),
    context: Measured | None = None,
) -> Monitored:
    """Read the log of one run's monitor; a log that is damaged or missing is said, and raises nothing.

    Args:
        path: of the log.
        run: number of the run, for the records.
        wall: the interval that the metrics are of.
        allocator: what torch held in the run's first process.
        context: what an empty CUDA context takes; None where that was not measured.
    """
    try:
        log = read_log(path)
    except ReportError:
        return unmonitored("no_monitor_log")
    header = next(_all(log, Header), None)
    if header is None:
        return unmonitored("no_monitor_log")
    samples = list(_all(log, Sample))
    reasons = {field: reason for one in _all(log, ReasonsChanged) for field, reason in one.fields.items()}
    view = _View(header, samples, reasons, wall)
    energy, notes = _energy(view, list(_all(log, Mark)))
    report = _report(log, header, samples, notes)
    accounts = [
        account
        for uuid in view.uuids
        if (
            account := memory_account(
                uuid, samples, allocator=_of_one_device(allocator), context=context, reasons=reasons
            )
        )
    ]
    return Monitored(
        report=replace(report, reasons=reasons, energy=tuple(energy), memory=tuple(accounts)),
        metrics=_metrics(view, energy),
        samples=tuple(_series(samples, run)),
    )


def _of_one_device(allocator: Sequence[AllocatorEntry]) -> Sequence[AllocatorEntry]:
    """Return the lines of a process that uses one device; of several, nothing says which is which UUID."""
    return allocator if len({entry.device for entry in allocator}) == 1 else ()


def _all(log: Log, kind: type[R]) -> Iterator[R]:
    return (record for record in log.records if isinstance(record, kind))


def _report(log: Log, header: Header, samples: Sequence[Sample], notes: Sequence[str]) -> MonitorReport:
    end = next(_all(log, End), None)
    if end is None:
        notes = [*notes, "the monitor ended without its last record: what it cost is not known"]
    lateness = [sample.late_ns for sample in samples]
    return MonitorReport(
        nvml_reason=header.reason,
        interval_ns=header.interval_ns,
        num_samples=len(samples),
        num_missed=end.num_missed if end else 0,
        late_median_ns=round(median(lateness)) if lateness else None,
        late_max_ns=max(lateness, default=None),
        gaps=tuple(
            Gap(begin_ns=gap["begin_ns"], end_ns=gap["end_ns"], reason=gap["reason"])
            for gap in (end.gaps if end else ())
        ),
        events=dict(Counter(event.name for event in _all(log, Event))),
        distinct=dict(end.distinct) if end else {},
        own_cpu_s=end.own_cpu_s if end else None,
        wall_s=end.wall_s if end else None,
        nvml_s=end.nvml_s if end else None,
        num_dropped_records=end.num_dropped_records if end else 0,
        memory_api=header.memory_api,
        devices=tuple(_device(device) for device in header.devices),
        notes=tuple(notes),
    )


def _device(device: Mapping[str, Any]) -> MonitoredDevice:
    return MonitoredDevice(
        uuid=str(device["uuid"]),
        name=device.get("name"),
        memory_total_bytes=device.get("memory_total_bytes"),
        parent_uuid=device.get("parent_uuid"),
        is_target=bool(device.get("is_target", True)),
    )


def _series(samples: Sequence[Sample], run: int) -> Iterator[Samples]:
    """Yield the series of the host and of each GPU; what some samples lack is a slower series of its own."""
    rows: dict[str, list[tuple[Sample, Row]]] = {}
    for sample in samples:
        if sample.host is not None:
            rows.setdefault("host", []).append((sample, sample.host))
        for uuid, values in sample.gpus.items():
            rows.setdefault(f"gpu:{uuid}", []).append((sample, values))
    for name, entries in rows.items():
        times = Counter(field for _, row in entries for field in row)
        fast = [field for field, num in times.items() if num == len(entries)]
        slow = [field for field in times if field not in fast]
        yield from _chunks(name, run, entries, fast)
        if slow:
            yield from _chunks(name + SLOW, run, [entry for entry in entries if slow[0] in entry[1]], slow)


def _chunks(series: str, run: int, entries: Sequence[tuple[Sample, Row]], fields: Sequence[str]) -> Iterator[Samples]:
    for start in range(0, len(entries), Samples.MAX_ROWS):
        chunk = entries[start : start + Samples.MAX_ROWS]
        yield Samples(
            run=run,
            series=series,
            columns={
                "mono_ns": tuple(sample.mono_ns for sample, _ in chunk),
                "late_ns": tuple(sample.late_ns for sample, _ in chunk),
                **{field: tuple(row.get(field) for _, row in chunk) for field in fields},
            },
        )


# Name, unit, which direction is better; in the order of a table.
_METRICS: tuple[tuple[str, str, Any], ...] = (
    ("cpu_time", "s", "lower"),
    ("gpu_energy", "J", "lower"),
    ("gpu_power", "W", "none"),
    ("gpu_utilization", "1", "none"),
    ("gpu_clock_sm", "MHz", "none"),
    ("gpu_process_memory", "By", "lower"),
)


def _mean(values: Iterable[Number]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


class _View:
    """The readings of the wall interval, and of which devices they are.

    Args:
        header: of the log.
        samples: all of it.
        reasons: why fields were null.
        wall: the interval.
    """

    def __init__(self, header: Header, samples: Sequence[Sample], reasons: Mapping[str, str], wall: Wall) -> None:
        self.samples = samples
        self.reasons = reasons
        self.begin_ns, self.end_ns = wall.begin_ns, wall.end_ns
        self.inside = [one for one in samples if wall.begin_ns <= one.mono_ns <= wall.end_ns]
        self.no_gpu = header.reason
        known = [str(device["uuid"]) for device in header.devices if device.get("is_target", True)]
        used = [uuid for uuid in known if any(one.gpus.get(uuid, {}).get("process_memory_bytes") for one in samples)]
        self.uuids = used or (known if len(known) == 1 else [])
        self.unclear = "pid_namespace" if len(known) > 1 else "no_devices"

    def readings(self, uuid: str, field: str) -> list[Number]:
        """Return the readings of one field of a device that exist."""
        values = (sample.gpus.get(uuid, {}).get(field) for sample in self.inside)
        return [value for value in values if value is not None]

    def combined(
        self, field: str, over_time: Any, over_devices: Any, *, scale: float | None = None
    ) -> tuple[Number | None, str | None]:
        """Return one number for a field of the devices that the run used, or why there is none."""
        if self.no_gpu or not self.uuids:
            return None, self.no_gpu or self.unclear
        if is_too_short(field, self.end_ns - self.begin_ns):
            return None, "below_resolution"
        values = []
        for uuid in self.uuids:
            readings = self.readings(uuid, field)
            if not readings:
                return None, self.reasons.get(f"gpu:{uuid}.{field}", "gap")
            values.append(over_time(readings))
        value = over_devices(values)
        return value if scale is None else value * scale, None

    def growth(self, field: str) -> tuple[Number | None, str | None]:
        """Return by how much a cumulative field of the host grew in the interval, to one sample's width."""
        rows = [(one.mono_ns, one.host.get(field)) for one in self.samples if one.host is not None]
        known = [(at_ns, value) for at_ns, value in rows if value is not None and at_ns <= self.end_ns]
        if not known:
            return None, self.reasons.get(f"host.{field}", "gap")
        before = [value for at_ns, value in known if at_ns <= self.begin_ns]
        return known[-1][1] - (before[-1] if before else 0), None


def _metrics(view: _View, energy: Sequence[DeviceEnergy]) -> dict[str, Metric]:
    found: dict[str, tuple[Number | None, str | None]] = {
        "cpu_time": view.growth("cpu_time_s"),
        "gpu_energy": _total(energy, view),
        "gpu_power": view.combined("power_draw_mw", _mean, sum, scale=1e-3),
        "gpu_utilization": view.combined("utilization_gpu_percent", _mean, _mean, scale=1e-2),
        "gpu_clock_sm": view.combined("clock_sm_mhz", median, _mean),
        "gpu_process_memory": view.combined("process_memory_bytes", max, sum),
    }
    return {
        name: Metric(value=found[name][0], unit=unit, better=better, reason=found[name][1])
        for name, unit, better in _METRICS
    }


def _energy(view: _View, marks: Sequence[Mark]) -> tuple[list[DeviceEnergy], list[str]]:
    """Return each device's energy from the counter where the interval's ends were marked, else from power readings."""
    found: list[DeviceEnergy] = []
    notes: list[str] = []
    for uuid in view.uuids:
        power = [(sample.mono_ns, sample.gpus.get(uuid, {}).get("power_draw_mw")) for sample in view.samples]
        held = integrate_power(power, begin_ns=view.begin_ns, end_ns=view.end_ns)
        counter = _counter(view, marks, uuid)
        best = prefer(counter, held)
        found.append(
            DeviceEnergy(
                uuid=uuid,
                value_j=best.value_j,
                bound_j=best.bound_j,
                source=best.source,
                coverage=best.coverage,
                reason=best.reason,
            )
        )
        notes += filter(None, [describe(counter, held)])
    return found, notes


def _total(energy: Sequence[DeviceEnergy], view: _View) -> tuple[Number | None, str | None]:
    if view.no_gpu or not energy:
        return None, view.no_gpu or view.unclear
    values = [one.value_j for one in energy if one.value_j is not None]
    if len(values) < len(energy):
        return None, next(one.reason for one in energy if one.value_j is None)
    return sum(values), None


def _counter(view: _View, marks: Sequence[Mark], uuid: str) -> Energy:
    ends = [next((mark for mark in marks if mark.name == name), None) for name in FIT_MARKS]
    if ends[0] is None or ends[1] is None:
        return difference(None, None, window_ns=view.end_ns - view.begin_ns, reason="not_marked")
    return difference(
        ends[0].energy_mj.get(uuid),
        ends[1].energy_mj.get(uuid),
        window_ns=ends[1].mono_ns - ends[0].mono_ns,
        reason=view.reasons.get(f"gpu:{uuid}.energy_mj"),
    )
