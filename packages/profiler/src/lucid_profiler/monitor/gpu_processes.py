"""Whose memory is whose on one GPU: the driver's process list against the process ids of the target.

The driver may name processes as the host does while this process lives in a container. A match is tried by process
id, by the ids that `/proc/*/status` gives a process in its other namespaces, and at last by its being the only one.
"""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lucid_profiler.monitor.readings import Reading

__all__ = ["FIELDS", "GpuProcess", "IsMember", "Match", "Shares", "never", "share_out"]

FIELDS = ("process_memory_bytes", "others_memory_bytes", "num_other_processes", "num_unknown_processes")

_PID_LIMIT = 2**22
"""Linux gives no larger process id: PID_MAX_LIMIT in https://man7.org/linux/man-pages/man5/proc_sys_kernel.5.html."""
_HOST_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of Linux: the namespace that is no container's."""
_SLACK_BYTES = 256 * 2**20
_PROC = Path("/proc")

Match = Literal["pid", "namespace", "only_process"]
"""How the target's processes were recognised; "only_process" is an estimate."""
IsMember = Callable[[int], bool]
"""Tells whether the process of that number is the target's, though it was not known to be."""
_Owner = Literal["pid", "namespace", "other", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """One entry of the driver's list; `used_bytes` is None where the driver does not say."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How the memory of one GPU is shared.

    Attributes:
        process: Bytes of the target's processes.
        others: Bytes of all others.
        num_others: Processes that run here and are not the target's; None where the list cannot be believed.
        num_unknown: Entries that name no process here: ended, hidden or in another namespace.
        match: How the target was recognised; None where it was not.
    """

    process: Reading
    others: Reading
    num_others: int | None
    num_unknown: int | None
    match: Match | None

    def readings(self) -> tuple[Reading, Reading, Reading, Reading]:
        """Return the readings in the order of `FIELDS`."""
        why = self.others.reason
        counts = (Reading(value=self.num_others, reason=why), Reading(value=self.num_unknown, reason=why))
        return (self.process, self.others, *counts)


def never(_pid: int) -> bool:
    """Say of no process that it is the target's."""
    return False


def share_out(
    processes: Sequence[GpuProcess],
    pids: Collection[int],
    *,
    is_member: IsMember = never,
    used_bytes: int | None = None,
    proc: Path = _PROC,
) -> Shares:
    """Tell the target's memory on one GPU from that of others.

    Args:
        processes: The driver's list.
        pids: The target's processes, as this process sees them, as far as they are known.
        is_member: Asked about every other process that runs here before it counts as somebody else's.
        used_bytes: Memory in use on the GPU, where known: shares far above it are not believed.
        proc: Where the process file system is.
    """
    if any(_is_scrambled(process) for process in processes):
        return _nothing("abi_suspect")
    owners = _owners(processes, pids, is_member=is_member, proc=proc)
    ours = [process for process, owner in zip(processes, owners, strict=True) if owner in {"pid", "namespace"}]
    match: Match | None = ("pid" if "pid" in owners else "namespace") if ours else None
    if not ours and owners == ["unknown"] and _is_alone(pids, proc):
        ours, owners, match = list(processes), ["namespace"], "only_process"
    others = [process for process in processes if process not in ours]
    if not _adds_up(processes, used_bytes):
        return _nothing("implausible")
    num_unknown = owners.count("unknown")
    why_missing = "pid_namespace" if num_unknown else "not_found"
    return Shares(
        process=_sum(ours, at_least=1) if ours else Reading(value=None, reason=why_missing),
        others=Reading(value=None, reason=why_missing) if num_unknown and not ours else _sum(others, at_least=0),
        num_others=owners.count("other"),
        num_unknown=num_unknown,
        match=match,
    )


def _is_scrambled(process: GpuProcess) -> bool:
    """Tell whether an entry was read with another layout than it was written: ids out of range, or an id as bytes."""
    used = process.used_bytes
    return not 0 <= process.pid <= _PID_LIMIT or (process.pid == 0 and used is not None and 0 < used <= _PID_LIMIT)


def _owners(processes: Iterable[GpuProcess], pids: Collection[int], *, is_member: IsMember, proc: Path) -> list[_Owner]:
    is_container = _is_container(proc)
    owners = [_owner(process.pid, pids, proc=proc, is_container=is_container) for process in processes]
    owners = [
        "pid" if owner == "other" and is_member(process.pid) else owner
        for process, owner in zip(processes, owners, strict=True)
    ]
    if "unknown" not in owners:
        return owners
    # The driver may name the target as it is called inside its container.
    inner = {number for pid in pids for number in _ids_by_namespace(pid, proc)[1:]}
    return [
        "namespace" if owner == "unknown" and process.pid in inner else owner
        for process, owner in zip(processes, owners, strict=True)
    ]


def _owner(pid: int, pids: Collection[int], *, proc: Path, is_container: bool) -> _Owner:
    if pid in pids:
        return "pid"
    if pid <= 0 or not (proc / str(pid)).exists():
        return "unknown"
    # The process file system may be the host's: then the id here is the innermost one there.
    inner = _ids_by_namespace(pid, proc) if is_container else []
    return "namespace" if len(inner) > 1 and inner[-1] in pids and _shares_namespace(pid, proc) else "other"


def _ids_by_namespace(pid: int, proc: Path) -> list[int]:
    """Return the ids of a process from the outermost namespace that can be seen to its own."""
    with suppress(OSError, ValueError):
        for line in (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return [int(number) for number in line.split()[1:]]
    return []


def _shares_namespace(pid: int, proc: Path) -> bool:
    own = _link(proc / "self" / "ns" / "pid")
    return own is not None and own == _link(proc / str(pid) / "ns" / "pid")


def _is_alone(pids: Iterable[int], proc: Path) -> bool:
    """Tell whether a single foreign id may be the target's: only in a container, and only if the target uses CUDA."""
    return _is_container(proc) and any(_uses_cuda(pid, proc) for pid in pids)


def _is_container(proc: Path) -> bool:
    return _link(proc / "self" / "ns" / "pid") not in {None, _HOST_PID_NAMESPACE}


def _uses_cuda(pid: int, proc: Path) -> bool:
    with suppress(OSError):
        return any(_link(file) == "/dev/nvidia-uvm" for file in (proc / str(pid) / "fd").iterdir())
    return False


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115 - such links name no path
    except OSError:
        return None


def _adds_up(processes: Iterable[GpuProcess], used_bytes: int | None) -> bool:
    total = sum(process.used_bytes or 0 for process in processes)
    return used_bytes is None or total <= used_bytes + used_bytes // 4 + _SLACK_BYTES


def _sum(processes: Iterable[GpuProcess], *, at_least: int) -> Reading:
    used = [process.used_bytes for process in processes]
    if None in used:
        return Reading(value=None, reason="not_supported")
    total = sum(number or 0 for number in used)
    # A process with a context on the GPU holds memory there: zero says that the driver did not look.
    return Reading(value=total) if total >= at_least else Reading(value=None, reason="implausible")


def _nothing(reason: str) -> Shares:
    unread = Reading(value=None, reason=reason)
    return Shares(process=unread, others=unread, num_others=None, num_unknown=None, match=None)
