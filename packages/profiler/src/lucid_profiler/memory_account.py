"""Joins the monitor's, the allocator's and the context's figures into the account of one device's memory.

Only a device of which the allocator says something has an account: on any other, what is used is somebody else's.

The three are read at times of their own. For a sample of the device that figure of the others counts which was read
nearest to it, before or after, if in between the use did not change by more than 1 % and the figure is not older than
two of the times that usually lie between its readings (two seconds, where those are shorter). What was read before the
first sample or after the last one counts for none: of the use at that time nothing is known. Private pools are read
less often, and count however old they are, but only while what torch has reserved did not change either.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Generic, TypeVar

from lucid_profiler.context import Measured
from lucid_profiler.entries import AllocatorEntry
from lucid_profiler.monitor.records import Sample
from lucid_profiler.monitored import MemoryAccount, MemoryRow
from lucid_profiler.reconcile import (
    SAME_SHARE,
    WARNING_SHARE,
    MemoryReadings,
    Reconciliation,
    Term,
    TimedReadings,
    reconcile_peak,
    reconcile_series,
    reserved_is_inside_used,
)

_MIN_AGE_NS = 2_000_000_000

T = TypeVar("T")
Values = Mapping[str, Any]

__all__ = ["Accounted", "memory_account"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounted:
    """The memory of one device over a run.

    Attributes:
        account: at the largest use.
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
    rows = [(one.mono_ns, values) for one in samples if (values := one.gpus.get(uuid))]
    moments = list(_Terms(uuid, rows, allocator=allocator, context=context, reasons=reasons).moments())
    peak = reconcile_peak(moments)
    if peak is None:
        return None
    listed = {mono_ns for mono_ns, values in rows if "process_memory_bytes" in values}
    series = reconcile_series(one for one in moments if one.mono_ns in listed)
    series = tuple(one for one in series if one.memory.device_used.bytes is not None)
    account = MemoryAccount(
        uuid=uuid,
        mono_ns=peak.mono_ns,
        rows=tuple(_rows(peak.memory)),
        residue_share=peak.memory.residue_share,
        warning=_warning(peak.memory),
        num_times=len(series),
        num_times_warned=sum(bool(one.memory.warning) for one in series),
        unread_peak_bytes=None if peak.unread is None else peak.unread.memory.device_used.bytes,
        unread_peak_ns=None if peak.unread is None else peak.unread.mono_ns,
    )
    columns: dict[str, tuple[int | None, ...]] = {"mono_ns": tuple(one.mono_ns for one in series)}
    for name in _ORDER:
        columns[f"{name}_bytes"] = tuple(getattr(one.memory, name).bytes for one in series)
    return Accounted(account=account, columns=columns)


class _Use:
    """How much was used, or reserved, when.

    Args:
        entries: times and bytes, in order.
    """

    def __init__(self, entries: Sequence[tuple[int, int]]) -> None:
        self._times = [at_ns for at_ns, _ in entries]
        self._bytes = [used for _, used in entries]

    def is_steady(self, one_ns: int, other_ns: int) -> bool:
        """Return whether the entries from before one moment until after another are within 1 % of each other."""
        begin_ns, end_ns = sorted((one_ns, other_ns))
        first, last = bisect_right(self._times, begin_ns) - 1, bisect_left(self._times, end_ns)
        if first < 0 or last == len(self._times):
            return False
        seen = self._bytes[first : last + 1]
        return max(seen) - min(seen) <= SAME_SHARE * max(seen)


class _Source(Generic[T]):
    """What was read at times of its own.

    Args:
        entries: times and readings, in order.
        max_age_ns: how old one may be; None for what follows from the times between them.
    """

    def __init__(self, entries: Sequence[tuple[int, T]], *, max_age_ns: float | None = None) -> None:
        self._times = [at_ns for at_ns, _ in entries]
        self._readings = [reading for _, reading in entries]
        spacing_ns = median(after - before for before, after in pairwise(self._times)) if entries[1:] else 0
        self._max_age_ns = max(_MIN_AGE_NS, 2 * spacing_ns) if max_age_ns is None else max_age_ns

    def nearest(self, at_ns: int, use: _Use) -> tuple[int, T | None]:
        """Return the age, before or after a moment, of the reading that counts for it, and the reading if one does."""
        after = bisect_left(self._times, at_ns)
        ages = {place: abs(self._times[place] - at_ns) for place in (after - 1, after) if 0 <= place < len(self._times)}
        for place, age_ns in sorted(ages.items(), key=lambda entry: entry[1]):
            if age_ns <= self._max_age_ns and use.is_steady(at_ns, self._times[place]):
                return age_ns, self._readings[place]
        return 0, None


class _Terms:
    """The terms of each moment at which a device's used memory was read."""

    def __init__(
        self,
        uuid: str,
        rows: Sequence[tuple[int, Values]],
        *,
        allocator: Sequence[AllocatorEntry],
        context: Measured | None,
        reasons: Mapping[str, str],
    ) -> None:
        self._uuid = uuid
        self._reasons = reasons
        self._context = _context(context)
        self._rows = [row for row in rows if row[1].get("memory_used_bytes") is not None]
        self._use = _Use([(at_ns, values["memory_used_bytes"]) for at_ns, values in self._rows])
        lists = [row for row in rows if "process_memory_bytes" in row[1]]
        self._lists = _Source(lists)
        self._lines = _Source([(entry.mono_ns, entry) for entry in allocator])
        pools = [(entry.mono_ns, entry) for entry in allocator if entry.private_pools_bytes is not None]
        self._pools = _Source(pools, max_age_ns=math.inf)
        self._reserved = _Use([(entry.mono_ns, entry.reserved_bytes or 0) for entry in allocator])
        self._why_no_pools = "not_read" if pools else "not_asked_for"
        self._is_listed = any(values["process_memory_bytes"] is not None for _, values in lists)

    def moments(self) -> Iterator[TimedReadings]:
        """Yield what counts for each of them."""
        for at_ns, values in self._rows:
            list_age_ns, listed = self._lists.nearest(at_ns, self._use)
            line_age_ns, line = self._lines.nearest(at_ns, self._use)
            _, pool = (0, None) if line is None else self._pools.nearest(line.mono_ns, self._reserved)
            readings = self._readings(values, listed, line, pool=pool)
            num_unread = (self._is_listed and readings.process.bytes is None) + (line is None)
            yield TimedReadings(
                mono_ns=at_ns, readings=readings, num_unread=num_unread, age_ns=max(list_age_ns, line_age_ns)
            )

    def _readings(
        self, values: Values, listed: Values | None, line: AllocatorEntry | None, *, pool: AllocatorEntry | None
    ) -> MemoryReadings:
        return MemoryReadings(
            device_used=self._term(values, "memory_used_bytes"),
            driver_reserved=self._term(values, "memory_reserved_bytes"),
            others=self._term(listed, "others_memory_bytes"),
            process=self._term(listed, "process_memory_bytes"),
            torch_reserved=_of(line, lambda entry: entry.reserved_bytes),
            torch_allocated=_of(line, lambda entry: entry.allocated_bytes),
            private_pools=_of(pool, lambda entry: entry.private_pools_bytes, self._why_no_pools),
            private_pools_allocated=_of(pool, lambda entry: entry.private_pools_allocated_bytes, self._why_no_pools),
            context=self._context,
            used_includes_reserved=_includes_reserved(values),
        )

    def _term(self, values: Values | None, field: str) -> Term:
        if values is None:
            return Term(reason="not_read")
        value = values.get(field)
        reason = self._reasons.get(f"gpu:{self._uuid}.{field}", "not_read")
        return Term(bytes=value, reason=None if value is not None else reason)


def _of(entry: AllocatorEntry | None, read: Callable[[AllocatorEntry], int | None], missing: str = "not_read") -> Term:
    if entry is None:
        return Term(reason=missing)
    value = read(entry)
    return Term(bytes=value, reason=None if value is not None else "not_supported")


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
