"""The records of a monitor's log, one JSON object a line; times are monotonic ns unless a name says otherwise."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lucid_profiler.monitor.readings import Values

SCHEMA = "lucid.monitor/1"

__all__ = [
    "SCHEMA",
    "AnchorTaken",
    "End",
    "Event",
    "Gap",
    "Header",
    "Mark",
    "ReasonsChanged",
    "Record",
    "Sample",
    "TargetExit",
    "from_fields",
    "to_fields",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first record of a file: what is followed, how often, and on which devices.

    Attributes:
        target: its `pid`, `start_ticks` and `argv`.
        started: RFC 3339, UTC.
        anchor: the clocks at the start, fields as in `AnchorTaken`.
        tiers: `fast_ns` and `slow_ns`, the times between two readings of the fields of each.
        devices: each GPU's identity.
        reason: why there are no devices, None where there are.
        part: number of the file from 0 where the log was rotated.
    """

    kind: ClassVar[str] = "header"
    schema: str = SCHEMA
    target: Mapping[str, Any]
    started: str
    anchor: Mapping[str, int]
    interval_ns: int
    tiers: Mapping[str, int]
    devices: tuple[Mapping[str, Any], ...]
    memory_api: str | None
    reason: str | None
    versions: Mapping[str, str | None]
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One tick. A field is absent where the tick did not read it, and None where it could not be read.

    Attributes:
        late_ns: how long after its deadline it was taken.
        host: of the target and its descendants, and the machine's available memory.
        gpus: by UUID.
    """

    kind: ClassVar[str] = "sample"
    mono_ns: int
    late_ns: int
    host: Values | None
    gpus: Mapping[str, Values]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonsChanged:
    """Why fields are None from here on: `host.FIELD` or `gpu:UUID.FIELD`, and a code of `readings.REASONS`.

    Where the log was rotated, each file repeats the last one after its header, with the time that it had.
    """

    kind: ClassVar[str] = "reasons"
    mono_ns: int
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time without samples, or without those of one device, or without room to write records.

    Attributes:
        device: UUID; None where everything is missing.
        num_records: how many could not be written, where that is the reason.
    """

    kind: ClassVar[str] = "gap"
    begin_ns: int
    end_ns: int
    reason: str
    device: str | None = None
    num_records: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorTaken:
    """One moment on three clocks."""

    kind: ClassVar[str] = "anchor"
    mono_ns: int
    wall_ns: int
    boot_ns: int
    uncertainty_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that makes the samples around it doubtful, `wall_step` or `suspend`, or worth knowing."""

    kind: ClassVar[str] = "event"
    mono_ns: int
    name: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment that somebody named, with the energy counters read at it; reading them ended at `read_ns`.

    Attributes:
        energy_ns: by UUID, the times before and after the call that read the counter; empty in older logs.
        cpu_time_s: processor time of the run's processes at `mono_ns`; None where it is not known, and in older logs.
    """

    kind: ClassVar[str] = "mark"
    mono_ns: int
    name: str
    energy_mj: Mapping[str, int | float | None]
    read_ns: int
    energy_ns: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cpu_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetExit:
    """The process that was followed has ended.

    Attributes:
        status: `returncode`, or the name of the `signal` that ended it; None where the system does not say.
    """

    kind: ClassVar[str] = "target_exit"
    mono_ns: int
    pid: int
    status: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last record: what the monitor did and what it cost.

    Attributes:
        num_missed: deadlines that came while the monitor was held up.
        late_ns: median, 99th percentile and maximum, the quantiles within 1.6 %.
        gaps: the first of them, as in `Gap`; `num_gaps` counts all.
        distinct: by field, how many readings differed from the one before.
        own_cpu_s: processor time of the monitor itself, since its process was started.
        nvml_s: time inside NVML.
        nvml_calls: by call, `num` and `total_ns`.
        num_dropped_records: records that could not be written.
        status: `stopped`, `target_exit`, `launcher_exit`, `signal` or `fault`.
        cadence: by tier of `plan.TIERS`, how often it was read (`num`) and the longest time between two readings, from
            the begin and to the end included (`longest_ns`); a tier that was never read is absent.
        num_nvml_errors: answers of the driver that were no value; None in older logs.
    """

    kind: ClassVar[str] = "end"
    mono_ns: int
    num_samples: int
    num_missed: int
    late_ns: Mapping[str, int | None]
    gaps: tuple[Mapping[str, Any], ...]
    num_gaps: int
    distinct: Mapping[str, int]
    own_cpu_s: float
    wall_s: float
    nvml_s: float
    nvml_calls: Mapping[str, Mapping[str, int]]
    num_dropped_records: int
    status: str
    max_rss_bytes: int | None = field(default=None)
    cadence: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    num_nvml_errors: int | None = None


Record = Header | Sample | ReasonsChanged | Gap | AnchorTaken | Event | Mark | TargetExit | End
_KINDS: Mapping[str, type[Record]] = {
    kind.kind: kind for kind in (Header, Sample, ReasonsChanged, Gap, AnchorTaken, Event, Mark, TargetExit, End)
}


def to_fields(record: Record) -> dict[str, Any]:
    """Return what is written of a record: its kind and its fields, without those that have their default of None."""
    fields: dict[str, Any] = {"kind": record.kind}
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        if value is not None or each.default is dataclasses.MISSING:
            fields[each.name] = value
    return fields


def from_fields(fields: Any) -> Record | None:
    """Return the record that was written as `fields`; None where its kind is newer than this reader.

    Raises:
        ValueError: it is no record, or misses a field.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise ValueError("no object with a kind")  # noqa: TRY004 - the file is wrong, not the caller
    kind = _KINDS.get(fields["kind"])
    if kind is None:
        return None
    known: dict[str, Any] = {
        each.name: _frozen(each.name, fields[each.name]) for each in dataclasses.fields(kind) if each.name in fields
    }
    if fields.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(f"schema {fields['schema']!r}; this version reads {SCHEMA!r}")
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(f"a {fields['kind']} record: {error}") from error


def _frozen(name: str, value: Any) -> Any:
    if name == "energy_ns" and isinstance(value, dict):
        return {uuid: _frozen("", times) for uuid, times in value.items()}
    return tuple(value) if isinstance(value, list) else value
