"""What control groups allow this process: a quota of processor time, a limit of memory, in either version.

Limits hold for a group and all groups below it, so every group on the way up counts. Inside a container the path of
/proc/self/cgroup may be the host's, of which only the root is to be seen; what does not exist is passed over.
Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lucid_profiler.checkup.files import read_text
from lucid_profiler.checkup.finding import Finding, Level, size_words, unknown

__all__ = ["MemoryLimit", "Quota", "cpu_quotas", "look_at_container", "memory_limits"]

_UNLIMITED_BYTES = 2**60
"""Version 1 writes the largest number of whole pages where there is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Processors' worth of time in each period, and how many periods were cut short; None where not told."""

    num_cpus: float
    num_throttled: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Bytes allowed, and used without what the kernel can take back at once; None where not told."""

    bytes: int
    used_bytes: int | None


def look_at_container(root: Path = Path("/")) -> list[Finding]:
    """Return the findings about the limits of processor time and memory.

    Args:
        root: Where /proc and /sys are.
    """
    if not any(_groups(root, "cpu")) and not any(_groups(root, "memory")):
        words = "no control groups are to be seen"
        return [unknown("cpu_limit", "not_found", words), unknown("memory_limit", "not_found", words)]
    return [_cpu_finding(cpu_quotas(root)), _memory_finding(memory_limits(root))]


def cpu_quotas(root: Path = Path("/")) -> list[Quota]:
    """Return the quotas that hold for this process, tightest first."""
    return sorted(_quotas(root), key=lambda quota: quota.num_cpus)


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the limits of memory that hold for this process, tightest first."""
    return sorted(_limits(root), key=lambda limit: limit.bytes)


def _cpu_finding(quotas: list[Quota]) -> Finding:
    machine = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    value: dict[str, float | None] = {
        "num_cpus": machine,
        "num_usable_cpus": usable,
        "quota_cpus": None,
        "num_throttled": None,
    }
    words = f"{usable} of {machine} processors"
    if not quotas:
        return Finding(code="cpu_limit", level="ok", found=f"{words}, no quota", value=value)
    quota = quotas[0]
    value |= {"quota_cpus": quota.num_cpus, "num_throttled": quota.num_throttled}
    words += f", with a quota of {quota.num_cpus:g} of them"
    words += f", throttled {quota.num_throttled} times" if quota.num_throttled else ""
    level: Level = "warning" if quota.num_cpus < usable or quota.num_throttled else "note"
    return Finding(code="cpu_limit", level=level, found=words, value=value)


def _memory_finding(limits: list[MemoryLimit]) -> Finding:
    if not limits:
        return Finding(code="memory_limit", level="ok", found="no limit", value={"limit_bytes": None})
    limit = limits[0]
    used = "unknown" if limit.used_bytes is None else size_words(limit.used_bytes)
    return Finding(
        code="memory_limit",
        level="note",
        found=f"{size_words(limit.bytes)}, of which {used} in use",
        value={"limit_bytes": limit.bytes, "used_bytes": limit.used_bytes},
    )


def _quotas(root: Path) -> Iterator[Quota]:
    for folder, version in _groups(root, "cpu"):
        if version == 2:
            words = (read_text(folder / "cpu.max").text or "").split()
            quota, period = words if len(words) == 2 else ("max", "0")
        else:
            quota = read_text(folder / "cpu.cfs_quota_us").text or "-1"
            period = read_text(folder / "cpu.cfs_period_us").text or "0"
        if quota.isdecimal() and period.isdecimal() and int(period):
            num_throttled = _counter(folder / "cpu.stat", "nr_throttled")
            yield Quota(num_cpus=int(quota) / int(period), num_throttled=num_throttled)


def _counter(path: Path, wanted: str) -> int | None:
    for line in (read_text(path).text or "").splitlines():
        name, _, number = line.partition(" ")
        if name == wanted:
            return _number(number)
    return None


def _limits(root: Path) -> Iterator[MemoryLimit]:
    names = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for folder, version in _groups(root, "memory"):
        limit_name, used_name, cache_name = names[version]
        limit, used = (_number(read_text(folder / name).text) for name in (limit_name, used_name))
        if limit is not None and limit < _UNLIMITED_BYTES:
            cache = _counter(folder / "memory.stat", cache_name) or 0
            yield MemoryLimit(bytes=limit, used_bytes=None if used is None else max(0, used - cache))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's groups that exist, from its own to the root, with their version."""
    for line in (read_text(root / "proc/self/cgroup").text or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if number == "0" and not controllers:
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controllers, 1
            base = base if base.is_dir() else root / "sys/fs/cgroup" / controller
        else:
            continue
        own = PurePosixPath(place.strip().lstrip("/"))
        for inner in (own, *own.parents) if own.parts else (own,):
            folder = base / inner
            if ".." not in inner.parts and folder.is_dir():
                yield folder, version
