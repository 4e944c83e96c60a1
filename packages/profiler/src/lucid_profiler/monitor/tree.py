"""A process and its descendants as /proc shows them: processor time, memory and I/O of all of them together.

A process belongs to the tree once it has been seen below it, also when its parent has ended since. Linux adds what a
process used to its parent when the parent asks for its status; what was lost otherwise is kept by `Total`.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lucid_profiler.monitor.readings import Reasons, Values

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ENDED = frozenset("ZXx")
_READ_BYTES = 8192

__all__ = ["Stat", "Total", "Tree", "read_available_bytes", "read_own_peak_bytes", "read_stat", "sees_own_namespace"]


class Stat(NamedTuple):
    """What /proc/PID/stat says, in the units it uses; https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html."""

    state: str
    parent: int
    cpu_ticks: int  # its own and that of the children whose status it has taken
    num_threads: int
    start_ticks: int
    rss_pages: int
    exit_code: int  # 0 where the kernel does not tell us


class _Io(NamedTuple):
    read_bytes: int
    write_bytes: int


def read_stat(pid: int) -> Stat | None:
    """Return what /proc says about a process; None where there is none."""
    try:
        return _parse_stat(_read(f"/proc/{pid}/stat"))
    except OSError:
        return None


def sees_own_namespace() -> bool:
    """Return whether /proc numbers processes as this process does, rather than as another namespace does."""
    try:
        return str(Path("/proc/self").readlink()) == str(os.getpid())
    except OSError:
        return False


def read_available_bytes() -> int | None:
    """Return how much memory this machine could still give to programs; None where it does not say."""
    return _amount_in("/proc/meminfo", b"MemAvailable:")


def read_own_peak_bytes() -> int | None:
    """Return the largest memory that this process has held; None where the system does not say."""
    return _amount_in("/proc/self/status", b"VmHWM:")


class Total:
    """A sum over processes of something that only grows, kept when one of them ends.

    When a process ends, its part moves to its parent; between the two it may be in neither. So a sum that is lower is
    first taken for a look in between, and only if it stays lower was something lost: the last known sum is kept then.
    """

    def __init__(self) -> None:
        self._lost = 0
        self._peak = 0
        self._is_lower = False

    def update(self, living: int) -> int:
        """Take the sum over living processes; return the sum over all that ever were."""
        if living < self._peak and not self._is_lower:
            self._is_lower = True
            return self._lost + self._peak
        if living < self._peak:
            self._lost += self._peak - living
        self._is_lower = False
        self._peak = living
        return self._lost + self._peak


class Tree:
    """A process and all descendants of it that were seen.

    Args:
        pid: the process at the root.
        start_ticks: when it was started; None where /proc cannot be used, and then every reading is None.
    """

    def __init__(self, pid: int, *, start_ticks: int | None) -> None:
        self._members: dict[int, int] = {} if start_ticks is None else {pid: start_ticks}
        self._is_readable = start_ticks is not None
        self._known: set[int] = set()
        self._last_pid = b""
        self._cpu, self._read, self._written = Total(), Total(), Total()

    @property
    def pids(self) -> tuple[int, ...]:
        """The numbers of the processes, the root first."""
        return tuple(self._members)

    def scan(self) -> None:
        """Look for new descendants; only processes that were not there at the last look are read."""
        last_pid = self._newest_pid()
        if not self._is_readable or last_pid == self._last_pid:
            return
        self._last_pid = last_pid
        listed = {int(name) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208 - only names
        self._known &= listed
        new = {pid: stat for pid in sorted(listed - self._known) if (stat := read_stat(pid)) is not None}
        self._known |= {pid for pid, stat in new.items() if stat.parent in listed or stat.parent == 0}
        self._adopt(new)

    def read(self) -> tuple[Values, Reasons]:
        """Return what all of the processes together have used and hold now."""
        living: list[Stat] = []
        usage: list[_Io | None] = []
        for pid, start_ticks in list(self._members.items()):
            # The number is checked last: then everything before it was about the same process.
            io = _read_io(pid)
            stat = read_stat(pid)
            if stat is None or stat.start_ticks != start_ticks:
                del self._members[pid]
                continue
            living.append(stat)
            usage.append(io)
        if not living:
            return _unreadable("not_found" if self._is_readable else "pid_namespace")
        values: Values = {
            "cpu_time_s": self._cpu.update(sum(stat.cpu_ticks for stat in living)) / _TICKS_PER_S,
            "rss_bytes": sum(stat.rss_pages for stat in living) * _PAGE_BYTES,
            "num_processes": sum(stat.state not in _ENDED for stat in living),
            "num_threads": sum(stat.num_threads for stat in living if stat.state not in _ENDED),
        }
        return self._add_io(values, usage)

    def read_pss(self) -> tuple[Values, Reasons]:
        """Return the memory of all processes, with pages that n processes share counted as 1/n in each."""
        total = 0
        found = False
        for pid in self._members:
            try:
                amount = _kib_field(_read(f"/proc/{pid}/smaps_rollup"), b"Pss:")
            except PermissionError:
                return {"pss_bytes": None}, {"pss_bytes": "no_permission"}
            except OSError:
                continue
            if amount is not None:
                total += amount
                found = True
        if found:
            return {"pss_bytes": total}, {}
        has_root = any(os.path.exists(f"/proc/{pid}") for pid in self._members)  # noqa: PTH110 - /proc
        return {"pss_bytes": None}, {"pss_bytes": "not_supported" if has_root else self._absence()}

    def _absence(self) -> str:
        return "not_found" if self._is_readable else "pid_namespace"

    def _newest_pid(self) -> bytes:
        """Return a text that changes when a process is started."""
        try:
            return _read("/proc/loadavg").rpartition(b" ")[2]
        except OSError:
            return os.urandom(8)

    def _adopt(self, new: dict[int, Stat]) -> None:
        found = True
        while found:
            found = False
            for pid in [pid for pid, stat in new.items() if stat.parent in self._members]:
                self._members.setdefault(pid, new.pop(pid).start_ticks)
                found = True

    def _add_io(self, values: Values, usage: Sequence[_Io | None]) -> tuple[Values, Reasons]:
        amounts = [io for io in usage if io is not None]
        if len(amounts) < len(usage):
            fields = ("read_bytes", "write_bytes")
            return {**values, **dict.fromkeys(fields)}, dict.fromkeys(fields, "no_permission")
        values["read_bytes"] = self._read.update(sum(io.read_bytes for io in amounts))
        values["write_bytes"] = self._written.update(sum(io.write_bytes for io in amounts))
        return values, {}


def _unreadable(reason: str) -> tuple[Values, Reasons]:
    fields = ("cpu_time_s", "rss_bytes", "num_processes", "num_threads", "read_bytes", "write_bytes")
    return dict.fromkeys(fields), dict.fromkeys(fields, reason)


def _read(path: str) -> bytes:
    # Half the cost of a file object, and a sample reads many.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _READ_BYTES)
    finally:
        os.close(fd)


def _parse_stat(data: bytes) -> Stat:
    # The name may hold blanks and parentheses. Fields are numbered from 1 in the manual; the third is the first here.
    fields = data.rpartition(b")")[2].split()
    return Stat(
        state=fields[0].decode("ascii"),
        parent=int(fields[1]),
        cpu_ticks=sum(map(int, fields[11:15])),
        num_threads=int(fields[17]),
        start_ticks=int(fields[19]),
        rss_pages=int(fields[21]),
        exit_code=int(fields[49]),
    )


def _read_io(pid: int) -> _Io | None:
    """Return what a process has read from and written to storage; None where that is denied."""
    with suppress(OSError):
        fields = dict(line.split(b": ", 1) for line in _read(f"/proc/{pid}/io").splitlines())
        if b"read_bytes" in fields and b"write_bytes" in fields:
            return _Io(int(fields[b"read_bytes"]), int(fields[b"write_bytes"]))
    return None


def _amount_in(path: str, name: bytes) -> int | None:
    try:
        return _kib_field(_read(path), name)
    except OSError:
        return None


def _kib_field(text: bytes, name: bytes) -> int | None:
    """Return an amount that /proc gives as a line like `Pss:  12 kB`, in bytes."""
    for line in text.splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None
