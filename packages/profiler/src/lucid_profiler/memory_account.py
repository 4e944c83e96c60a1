"""Joins the monitor's, the allocator's and the context's figures into the account of one device's memory.

Only a device of which the allocator says something has an account: on any other, what is used is somebody else's.

The three are read at times of their own; for each sample of the device the latest figure of the others counts, if it
is not older than two of their intervals.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lucid_profiler.context import Measured
from lucid_profiler.entries import AllocatorEntry
from lucid_profiler.monitor.records import Sample
from lucid_profiler.monitored import MemoryAccount, MemoryRow
from lucid_profiler.reconcile import (
    WARNING_SHARE,
    MemoryReadings,
    Reconciliation,
    Term,
    reconcile_series,
    reserved_is_inside_used,
)

MAX_AGE_NS = 2_000_000_000

T = TypeVar("T")

__all__ = ["MAX_AGE_NS", "Accounted", "memory_account"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounted:
    """The memory of one device over a run.

    Attributes:
        account: at the sample at which most was used.
        columns: over time, one row wherever the driver's list of processes was read; bytes, None where not known.
    """

    account: MemoryAccount
    columns: dict[str, tuple[int | None, ...]]


def memory_account(
    uuid: str,
    samples: Sequence[Sample],
    *,
    allocator: Sequence[AllocatorEntry],
    context: Measured | None,
    reasons: Mapping[str, str],
) -> Accounted | None:
    """Return the account of a device; None if its memory was never read.

    Args:
        uuid: of the device.
        samples: of the monitor.
        allocator: what torch's allocator held in the run's process on this device.
        context: of an empty process; None if it was not measured.
        reasons: why fields of the monitor were null.
    """
    series = reconcile_series(_readings(uuid, samples, allocator, context, reasons))
    known = [one for one in series if one.memory.device_used.bytes is not None]
    if not known:
        return None
    peak = max(known, key=lambda one: one.memory.device_used.bytes or 0)
    listed = {sample.mono_ns for sample in samples if "process_memory_bytes" in sample.gpus.get(uuid, {})}
    rows = [one for one in series if one.mono_ns in listed]
    account = MemoryAccount(
        uuid=uuid,
        mono_ns=peak.mono_ns,
        rows=tuple(_rows(peak.memory)),
        residue_share=peak.memory.residue_share,
        warning=_warning(peak.memory),
        num_times=len(rows),
        num_times_warned=sum(bool(one.memory.warning) for one in rows),
    )
    columns: dict[str, tuple[int | None, ...]] = {"mono_ns": tuple(one.mono_ns for one in rows)}
    for name in _ORDER:
        columns[f"{name}_bytes"] = tuple(getattr(one.memory, name).bytes for one in rows)
    return Accounted(account=account, columns=columns)


def _readings(
    uuid: str,
    samples: Sequence[Sample],
    allocator: Sequence[AllocatorEntry],
    context: Measured | None,
    reasons: Mapping[str, str],
) -> Iterator[tuple[int, MemoryReadings]]:
    processes = [
        (sample.mono_ns, values)
        for sample in samples
        if "process_memory_bytes" in (values := sample.gpus.get(uuid, {}))
    ]
    lines = [(entry.mono_ns, entry) for entry in allocator]
    pools = [(entry.mono_ns, entry) for entry in allocator if entry.private_pools_bytes is not None]

    def term(values: Mapping[str, Any] | None, field: str) -> Term:
        value = None if values is None else values.get(field)
        return Term(bytes=value, reason=None if value is not None else reasons.get(f"gpu:{uuid}.{field}", "not_read"))

    for sample in samples:
        values = sample.gpus.get(uuid, {})
        if values.get("memory_used_bytes") is None:
            continue
        shares, line = _latest(processes, sample.mono_ns), _latest(lines, sample.mono_ns)
        # Pools only change when something is recorded, and are read less often.
        pool = _latest(pools, sample.mono_ns, max_age_ns=None)
        yield (
            sample.mono_ns,
            MemoryReadings(
                device_used=term(values, "memory_used_bytes"),
                driver_reserved=term(values, "memory_reserved_bytes"),
                others=term(shares, "others_memory_bytes"),
                process=term(shares, "process_memory_bytes"),
                torch_reserved=_of(line, lambda entry: entry.reserved_bytes),
                torch_allocated=_of(line, lambda entry: entry.allocated_bytes),
                private_pools=_of(pool, lambda entry: entry.private_pools_bytes, "not_asked_for"),
                private_pools_allocated=_of(pool, lambda entry: entry.private_pools_allocated_bytes, "not_asked_for"),
                context=_context(context),
                used_includes_reserved=_includes_reserved(values),
            ),
        )


def _latest(entries: Sequence[tuple[int, T]], mono_ns: int, *, max_age_ns: int | None = MAX_AGE_NS) -> T | None:
    place = bisect_right(entries, mono_ns, key=lambda entry: entry[0])
    if not place or (max_age_ns is not None and mono_ns - entries[place - 1][0] > max_age_ns):
        return None
    return entries[place - 1][1]


def _of(
    entry: AllocatorEntry | None, read: Callable[[AllocatorEntry], int | None], reason: str = "not_supported"
) -> Term:
    if entry is None:
        return Term(reason="not_read")
    value = read(entry)
    return Term(bytes=value, reason=None if value is not None else reason)


def _context(context: Measured | None) -> Term:
    if context is None:
        return Term(reason="not_measured")
    return Term(bytes=context.bytes, reason=context.reason)


def _includes_reserved(values: Mapping[str, Any]) -> bool | None:
    total, used, free = (values.get(f"memory_{name}_bytes") for name in ("total", "used", "free"))
    if total is None or used is None or free is None:
        return None
    return reserved_is_inside_used(total=total, reserved=values.get("memory_reserved_bytes"), used=used, free=free)


_DEPTHS = {None: 0, "device_used": 1, "target": 2, "torch_reserved": 3}
# The words of a table, in the order of the sums.
_NAMES = {
    "device_used": "used on the device",
    "driver_reserved": "reserved by the driver",
    "others": "other processes",
    "target": "this run",
    "device_residue": "residue of the device",
    "context": "CUDA context and libraries, of an empty process",
    "torch_reserved": "reserved by torch",
    "target_residue": "residue of the run",
    "allocated": "allocated",
    "graph_pools": "private pools of graphs",
    "cached": "cached",
}
_ORDER = (
    "device_used",
    "driver_reserved",
    "others",
    "target",
    "context",
    "torch_reserved",
    "allocated",
    "graph_pools",
    "cached",
    "target_residue",
    "device_residue",
)


def _rows(memory: Reconciliation) -> Iterator[MemoryRow]:
    rows = {row.name: row for row in memory.rows()}
    for name in _ORDER:
        row = rows[name]
        yield MemoryRow(
            name=_NAMES[name],
            value_bytes=row.bytes,
            reason=row.reason,
            level=_DEPTHS[row.parent],
            is_estimate=row.is_estimate,
        )


def _warning(memory: Reconciliation) -> str | None:
    if not memory.warning:
        return None
    if memory.residue_share is not None and abs(memory.residue_share) > WARNING_SHARE:
        return f"{memory.residue_share:.1%} of the used memory is not explained (more than {WARNING_SHARE:.0%})"
    return f"a residue is above {WARNING_SHARE:.0%} of the used memory"
