"""Whose memory a device's is: from what the driver counts down to what torch's allocator holds. Pure.

    device used    = driver reserved + others + target + device residue
    target         = context + torch reserved + target residue
    torch reserved = allocated + graph pools + cached

`device used` includes what the driver reserves for itself. `allocated` and `cached` are those outside the private
pools of graphs. What is not known is None with a reason and makes every sum that needs it None: it never counts as 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

WARNING_SHARE = 0.02
SAME_SHARE = WARNING_SHARE / 2
"""Two amounts of used memory that are no farther apart count as one: it makes no warning by itself."""

__all__ = [
    "SAME_SHARE",
    "WARNING_SHARE",
    "MemoryReadings",
    "Peak",
    "Reconciliation",
    "Row",
    "Term",
    "TimedReadings",
    "TimedReconciliation",
    "reconcile",
    "reconcile_peak",
    "reconcile_series",
    "reserved_is_inside_used",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One amount of memory in bytes; None with a reason.

    An estimate was not read but follows from others; its reason says why it was not read.
    """

    bytes: int | None = None
    reason: str | None = None
    is_estimate: bool = False

    def __post_init__(self) -> None:
        if self.bytes is None and not self.reason:
            raise ValueError("an amount that is not known needs a reason")


_NOT_READ = Term(reason="not_read")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReadings:
    """What was read at one time; the figures of one device."""

    device_used: Term = _NOT_READ
    """NVML's `used`."""
    driver_reserved: Term = _NOT_READ
    """NVML's `reserved`, which only version 2 of its call tells."""
    others: Term = _NOT_READ
    """All processes that are not the target's. Where those cannot be told apart: what was used before it started."""
    process: Term = _NOT_READ
    """The target's processes, as the driver counts them."""
    torch_reserved: Term = _NOT_READ
    torch_allocated: Term = _NOT_READ
    """All of it, inside and outside of private pools."""
    private_pools: Term = _NOT_READ
    """What torch reserved for the private pools of graphs."""
    private_pools_allocated: Term = _NOT_READ
    """The part of `torch_allocated` that is inside them."""
    context: Term = _NOT_READ
    """Of an empty process, without what torch reserved in it."""
    used_includes_reserved: bool | None = None
    """True for version 1 of NVML's call; see `reserved_is_inside_used`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedReadings:
    """What counts for one moment, a monotonic time.

    Attributes:
        num_unread: how many of its terms were read at other moments of the run and not near this one.
        age_ns: how far away that term was read which was read farthest from it.
    """

    mono_ns: int
    readings: MemoryReadings
    num_unread: int = 0
    age_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the reconciliation, with its share of what is used on the device."""

    name: str
    parent: Literal["device_used", "target", "torch_reserved"] | None
    bytes: int | None
    reason: str | None
    is_estimate: bool
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """The terms of one time; a residue is what a sum does not explain, and may be negative.

    `residue` is that of both levels together: what neither the driver, nor others, the context or torch account for.
    `warning` is True if any known residue is above 2 % of what is used, None if none is and the whole is not known.
    """

    device_used: Term
    driver_reserved: Term
    others: Term
    target: Term
    device_residue: Term
    context: Term
    torch_reserved: Term
    target_residue: Term
    allocated: Term
    graph_pools: Term
    cached: Term
    residue: Term
    residue_share: float | None
    warning: bool | None

    def rows(self) -> tuple[Row, ...]:
        """Return the terms in the order of the sums, each below what it is a part of."""
        used = self.device_used.bytes
        return tuple(
            Row(
                name=name,
                parent=parent,
                bytes=term.bytes,
                reason=term.reason,
                is_estimate=term.is_estimate,
                share=_share(term, used),
            )
            for name, parent in _PARENTS.items()
            if isinstance(term := getattr(self, name), Term)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedReconciliation:
    """The reconciliation of one sample."""

    mono_ns: int
    memory: Reconciliation


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The reconciliation that stands for the largest use.

    `unread` is the moment of the largest use where that was more than 1 % above this one: its terms were not read then.
    """

    mono_ns: int
    memory: Reconciliation
    unread: TimedReconciliation | None = None


def reserved_is_inside_used(*, total: int, reserved: int | None, used: int, free: int) -> bool | None:
    """Return whether NVML's `used` contains `reserved`; None if its figures do not add up either way.

    The header says both of version 2 of the call, so the figures decide. Version 1 tells no `reserved`, and it does.
    """
    if total == used + free:
        return True
    return False if reserved is not None and total == reserved + used + free else None


def reconcile(readings: MemoryReadings) -> Reconciliation:
    """Set up the three sums of one sample."""
    used = _device_used(readings)
    process = _plausible_process(readings)
    target = process if process.bytes is not None else _estimated_target(used, readings, process)
    reserved, others, torch_reserved = readings.driver_reserved, readings.others, readings.torch_reserved
    explained = {"driver_reserved": reserved, "others": others}
    device_residue = _rest(used, **explained, target=target)
    if target.is_estimate:
        device_residue = Term(reason="estimated_target")
    target_residue = _rest(target, context=readings.context, torch_reserved=torch_reserved)
    residue = _rest(used, **explained, context=readings.context, torch_reserved=torch_reserved)
    allocated, cached = _allocator(readings)
    return Reconciliation(
        device_used=used,
        driver_reserved=reserved,
        others=others,
        target=target,
        device_residue=device_residue,
        context=readings.context,
        torch_reserved=torch_reserved,
        target_residue=target_residue,
        allocated=allocated,
        graph_pools=readings.private_pools,
        cached=cached,
        residue=residue,
        residue_share=_share(residue, used.bytes),
        warning=_warning(used, residue, device_residue, target_residue),
    )


def reconcile_series(samples: Iterable[TimedReadings]) -> tuple[TimedReconciliation, ...]:
    """Reconcile each sample."""
    return tuple(TimedReconciliation(mono_ns=one.mono_ns, memory=reconcile(one.readings)) for one in samples)


def reconcile_peak(samples: Iterable[TimedReadings]) -> Peak | None:
    """Reconcile the moment of the largest use at which all was read; None if what was used is known of no sample.

    Of samples within 1 % of the largest use it is the one whose terms were read nearest to it. Where none of these has
    all of them, it is one within 1 % of the largest use at which they were read, and the larger one is told beside it:
    peaks of single terms, or terms of before the peak, are of different times and do not add up.
    """
    used = [(one, bytes_) for one in samples if (bytes_ := _device_used(one.readings).bytes) is not None]
    if not used:
        return None
    largest, largest_bytes = max(used, key=lambda entry: entry[1])
    read = [entry for entry in used if not entry[0].num_unread] or used
    top_bytes = max(bytes_ for _, bytes_ in read)
    if largest_bytes - top_bytes <= SAME_SHARE * largest_bytes:
        top_bytes = largest_bytes
    near = [one for one, bytes_ in read if top_bytes - bytes_ <= SAME_SHARE * top_bytes]
    chosen = min(near, key=lambda one: (one.num_unread, one.age_ns, one.mono_ns))
    unread = reconcile_series([largest] if top_bytes < largest_bytes else [])
    return Peak(mono_ns=chosen.mono_ns, memory=reconcile(chosen.readings), unread=next(iter(unread), None))


def _device_used(readings: MemoryReadings) -> Term:
    """Return what is used with what the driver reserves."""
    used = readings.device_used
    if used.bytes is None or readings.used_includes_reserved:
        return used
    if readings.used_includes_reserved is None:
        return Term(reason="used_with_or_without_reserved")
    return _sum(used, driver_reserved=readings.driver_reserved)


def _plausible_process(readings: MemoryReadings) -> Term:
    """Drop the 0 that a driver gives for a process that it cannot see, while torch holds memory in it."""
    process, torch_reserved = readings.process, readings.torch_reserved
    if process.bytes == 0 and torch_reserved.bytes:
        return Term(reason="implausible")
    return process


def _estimated_target(used: Term, readings: MemoryReadings, process: Term) -> Term:
    rest = _rest(used, driver_reserved=readings.driver_reserved, others=readings.others)
    if rest.bytes is None:
        return Term(reason=process.reason)
    return replace(rest, reason=process.reason, is_estimate=True)


def _allocator(readings: MemoryReadings) -> tuple[Term, Term]:
    """Return what is allocated and what is cached outside of private pools."""
    inside = Term(bytes=0) if readings.private_pools.bytes == 0 else readings.private_pools_allocated
    allocated = _not_negative(_rest(readings.torch_allocated, private_pools_allocated=inside))
    cached = _rest(readings.torch_reserved, allocated=allocated, private_pools=readings.private_pools)
    return allocated, _not_negative(cached)


def _not_negative(term: Term) -> Term:
    # Figures that were not read at one time can contradict each other.
    return Term(reason="inconsistent") if term.bytes is not None and term.bytes < 0 else term


def _sum(first: Term, **others: Term) -> Term:
    return _combine(1, first, others)


def _rest(whole: Term, **parts: Term) -> Term:
    return _combine(-1, whole, parts)


def _combine(sign: int, first: Term, others: dict[str, Term]) -> Term:
    """Add to or subtract from the first; not known with the first reason of what is not known."""
    if first.bytes is None:
        return Term(reason=first.reason)
    total, is_estimate = first.bytes, first.is_estimate
    for name, term in others.items():
        if term.bytes is None:
            return Term(reason=f"{name}: {term.reason}")
        total += sign * term.bytes
        is_estimate = is_estimate or term.is_estimate
    return Term(bytes=total, is_estimate=is_estimate)


def _share(term: Term, used_bytes: int | None) -> float | None:
    return None if term.bytes is None or not used_bytes else term.bytes / used_bytes


def _warning(used: Term, residue: Term, *others: Term) -> bool | None:
    shares = [_share(term, used.bytes) for term in (residue, *others)]
    if any(share is not None and abs(share) > WARNING_SHARE for share in shares):
        return True
    return None if shares[0] is None else False


_PARENTS: dict[str, Literal["device_used", "target", "torch_reserved"] | None] = {
    "device_used": None,
    "driver_reserved": "device_used",
    "others": "device_used",
    "target": "device_used",
    "device_residue": "device_used",
    "context": "target",
    "torch_reserved": "target",
    "target_residue": "target",
    "allocated": "torch_reserved",
    "graph_pools": "torch_reserved",
    "cached": "torch_reserved",
}
