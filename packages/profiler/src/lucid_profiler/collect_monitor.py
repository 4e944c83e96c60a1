"""Turns a monitor's log into what a report says of one run: how sampling went, its series, and metrics of the wall.

A mean is one over readings that exist; a metric that the readings cannot carry is None with its reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from lucid_profiler.collect_device import Inside, bare_uuid
from lucid_profiler.collect_energy import device_energy
from lucid_profiler.context import Measured
from lucid_profiler.errors import ReportError
from lucid_profiler.memory_account import Accounted, memory_account
from lucid_profiler.monitor.log import Log, read_log
from lucid_profiler.monitor.records import End, Event, Header, Mark, ReasonsChanged, Sample
from lucid_profiler.monitor.records import Gap as LoggedGap
from lucid_profiler.monitor_reasons import WhyNull
from lucid_profiler.monitor_view import Known, Number, View, mean
from lucid_profiler.monitored import DeviceEnergy, Gap, MonitoredDevice, MonitorReport
from lucid_profiler.records import Metric, Samples, Wall

SLOW = ":slow"  # ends the name of the series of what is read more rarely
_COUNTED_EVENTS = frozenset({"wall_step", "suspend"})

R = TypeVar("R")
Row = Mapping[str, Number | None]

__all__ = ["Monitored", "observe_monitor", "unmonitored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitored:
    """What was sampled beside one run."""

    report: MonitorReport
    metrics: dict[str, Metric]
    samples: tuple[Samples, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader has to know, one sentence each."""


def unmonitored(reason: str, *, detail: str | None = None) -> Monitored:
    """Return what is known where nothing was sampled: every metric is None with the reason; `detail` is a note."""
    unknown = {name: Metric(value=None, unit=unit, better=better, reason=reason) for name, unit, better in _METRICS}
    return Monitored(
        report=MonitorReport(reason=reason, nvml_reason=reason), metrics=unknown, notes=(detail,) if detail else ()
    )


def observe_monitor(
    path: Path, *, run: int, wall: Wall, inside: Inside | None = None, context: Measured | None = None
) -> Monitored:
    """Read the log of one run's monitor; a log that is damaged or missing is said, and raises nothing.

    Args:
        path: of the log.
        run: number of the run, for the records.
        wall: the interval that the metrics are of.
        inside: what the run's processes say of their devices.
        context: what an empty CUDA context takes; None where that was not measured.
    """
    try:
        log = read_log(path)
    except ReportError as error:
        return unmonitored("no_monitor_log", detail=error.message)
    header = next(_all(log, Header), None)
    if header is None:
        return unmonitored("no_monitor_log", detail="the monitor's log has no header: its disk may be full")
    inside = inside or Inside()
    samples = list(_all(log, Sample))
    devices, no_gpu = _devices(log, header)
    reasons = _reasons(log, header)
    view = View(
        samples=samples,
        devices=devices,
        no_gpu=no_gpu,
        reasons=reasons,
        wall=wall,
        interval_ns=header.interval_ns,
        used=inside.uuids,
        gaps=list(_all(log, LoggedGap)),
    )
    marks = list(_all(log, Mark))
    energy, notes = device_energy(view, marks)
    accounted = list(_accounts(view, inside, context))
    report = replace(
        _report(log, header, samples),
        nvml_reason=no_gpu,
        devices=tuple(_device(device) for device in devices),
        reasons=reasons.latest,
        energy=tuple(energy),
        memory=tuple(one.account for one in accounted),
    )
    return Monitored(
        report=report,
        metrics=_metrics(view, energy, marks),
        samples=(*_series(samples, run), *_memory_series(accounted, run)),
        notes=tuple(dict.fromkeys([*_notes(log), *notes])),
    )


def _all(log: Log, kind: type[R]) -> Iterator[R]:
    return (record for record in log.records if isinstance(record, kind))


def _devices(log: Log, header: Header) -> tuple[Sequence[Mapping[str, Any]], str | None]:
    """Return the devices, and why there are none: a driver may come after the header was written."""
    found = _arrivals(log)
    if found:
        return found[-1].data["devices"], None
    return header.devices, None if header.devices else header.reason


def _reasons(log: Log, header: Header) -> WhyNull:
    return WhyNull(
        changes=list(_all(log, ReasonsChanged)),
        no_gpu=None if header.devices else header.reason,
        came_ns=next((event.mono_ns for event in _arrivals(log)), None),
    )


def _arrivals(log: Log) -> list[Event]:
    """Return the events that name devices."""
    return [event for event in _all(log, Event) if event.name == "devices" and event.data.get("devices")]


def _accounts(view: View, inside: Inside, context: Measured | None) -> Iterator[Accounted]:
    """Yield the account of each device of which one process of the run says what it holds there."""
    for uuid in view.uuids:
        lines = inside.allocator.get(bare_uuid(uuid), ())
        if not lines:
            continue
        measured = None if context is None or bare_uuid(context.device_uuid or "") != bare_uuid(uuid) else context
        accounted = memory_account(uuid, view.samples, allocator=lines, context=measured, reasons=view.reasons.latest)
        if accounted is not None:
            yield accounted


def _notes(log: Log) -> list[str]:
    """Return what the monitor itself has to say, and that it died, if it did."""
    texts = {"note": "", "fault": "a fault of its own: "}
    notes = [f"{texts[one.name]}{one.data.get('text')}"[:500] for one in _all(log, Event) if one.name in texts]
    if not any(_all(log, End)):
        notes.append("it ended without its last record, so what it cost and missed is not known")
    return notes


def _report(log: Log, header: Header, samples: Sequence[Sample]) -> MonitorReport:
    end = next(_all(log, End), None)
    lateness = [sample.late_ns for sample in samples]
    return MonitorReport(
        interval_ns=header.interval_ns,
        num_samples=len(samples),
        num_missed=end.num_missed if end else None,
        late_median_ns=round(median(lateness)) if lateness else None,
        late_max_ns=max(lateness, default=None),
        gaps=tuple(_gaps(log, end)),
        events=dict(Counter(event.name for event in _all(log, Event) if event.name in _COUNTED_EVENTS)),
        distinct=dict(end.distinct) if end else {},
        own_cpu_s=end.own_cpu_s if end else None,
        wall_s=end.wall_s if end else None,
        nvml_s=end.nvml_s if end else None,
        num_dropped_records=end.num_dropped_records if end else None,
        cadence={name: dict(of) for name, of in end.cadence.items()} if end else {},
        num_nvml_errors=end.num_nvml_errors if end else None,
        memory_api=_memory_api(log, header),
    )


def _memory_api(log: Log, header: Header) -> str | None:
    """Return which version of the memory query answered: the older one where it ever was, since it counts otherwise."""
    later = (event.data.get("memory_api") for event in _all(log, Event) if event.name == "devices")
    return min((version for version in (header.memory_api, *later) if version is not None), default=None)


def _gaps(log: Log, end: End | None) -> Iterator[Gap]:
    """Yield the gaps that the last record names; where there is none, those that were written as they ended."""
    for gap in end.gaps if end else map(asdict, _all(log, LoggedGap)):
        yield Gap(begin_ns=gap["begin_ns"], end_ns=gap["end_ns"], reason=gap["reason"], device=gap.get("device"))


def _device(device: Mapping[str, Any]) -> MonitoredDevice:
    return MonitoredDevice(
        uuid=str(device["uuid"]),
        name=device.get("name"),
        memory_total_bytes=device.get("memory_total_bytes"),
        parent_uuid=device.get("parent_uuid"),
        is_target=bool(device.get("is_target", True)),
    )


def _series(samples: Sequence[Sample], run: int) -> Iterator[Samples]:
    """Yield the series of the host and of each GPU; fields that are read more rarely make series of their own."""
    rows: dict[str, list[tuple[Sample, Row]]] = {}
    for sample in samples:
        if sample.host is not None:
            rows.setdefault("host", []).append((sample, sample.host))
        for uuid, values in sample.gpus.items():
            rows.setdefault(f"gpu:{uuid}", []).append((sample, values))
    for name, entries in rows.items():
        patterns: dict[tuple[int, ...], list[str]] = {}
        for field in dict.fromkeys(field for _, row in entries for field in row):
            places = tuple(place for place, (_, row) in enumerate(entries) if field in row)
            patterns.setdefault(places, []).append(field)
        num_slow = 0
        for places, fields in sorted(patterns.items(), key=lambda pattern: -len(pattern[0])):
            is_slow = len(places) < len(entries)
            num_slow += is_slow
            suffix = "" if not is_slow else SLOW if num_slow == 1 else f"{SLOW}{num_slow}"
            yield from _chunks(name + suffix, run, [entries[place] for place in places], fields)


def _memory_series(accounted: Sequence[Accounted], run: int) -> Iterator[Samples]:
    for one in accounted:
        for start in range(0, len(one.columns["mono_ns"]), Samples.MAX_ROWS):
            end = start + Samples.MAX_ROWS
            part: dict[str, tuple[Number | None, ...]] = {name: of[start:end] for name, of in one.columns.items()}
            yield Samples(run=run, series=f"memory:{one.account.uuid}", columns=part)


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


def _total(energy: Sequence[DeviceEnergy], view: View) -> Known:
    if view.why_unknown is not None:
        return None, view.why_unknown
    values = [one.value_j for one in energy if one.value_j is not None]
    if len(values) < len(energy):
        return None, next(one.reason for one in energy if one.value_j is None)
    return sum(values), None


def _metrics(view: View, energy: Sequence[DeviceEnergy], marks: Sequence[Mark]) -> dict[str, Metric]:
    marked = [(mark.mono_ns, mark.cpu_time_s) for mark in marks if mark.cpu_time_s is not None]
    found: dict[str, Known] = {
        "cpu_time": view.growth("cpu_time_s", marked=marked),
        "gpu_energy": _total(energy, view),
        "gpu_power": view.combined("power_draw_mw", mean, sum, scale=1e-3),
        "gpu_utilization": view.combined("utilization_gpu_percent", mean, mean, scale=1e-2),
        "gpu_clock_sm": view.combined("clock_sm_mhz", median, mean),
        "gpu_process_memory": view.combined("process_memory_bytes", max, sum, is_slow=True),
    }
    return {
        name: Metric(value=found[name][0], unit=unit, better=better, reason=found[name][1])
        for name, unit, better in _METRICS
    }
