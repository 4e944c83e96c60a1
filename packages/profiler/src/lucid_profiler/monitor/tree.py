"""A process and its descendants as /proc shows them: processor time, memory and I/O of all of them together.

A process belongs to the tree once it has been seen below it, also when its parent has ended since. The monitor itself
never does, though its target may have started it. What processes used that have ended is kept by `Total`.
"""

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lucid_profiler.monitor.readings import Reasons, Values
from lucid_profiler.monitor.totals import Part, Total

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ENDED = frozenset("ZXx")
_GONE = frozenset({errno.ENOENT, errno.ESRCH})
_READ_BYTES = 8192
_MAX_GENERATIONS = 64
_MAX_DIGITS = 40  # of a number in /proc with the blanks before it

__all__ = ["Stat", "Tree", "read_available_bytes", "read_own_peak_bytes", "read_stat", "why_hidden"]


class Stat(NamedTuple):
    """What /proc/PID/stat says, in the units it uses; https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html."""

    state: str
    parent: int
    own_ticks: int
    inherited_ticks: int  # of the children whose status it has taken
    num_threads: int
    start_ticks: int
    rss_pages: int
    exit_code: int  # 0 also where the kernel does not tell us

    @property
    def has_ended(self) -> bool:
        """Whether all of its threads have ended; the first may end before the others, and is a zombie then."""
        return self.state in _ENDED and self.num_threads <= 1


class _Io(NamedTuple):
    read_bytes: int
    write_bytes: int


def read_stat(pid: int) -> Stat | None:
    """Return what /proc says about a process; None where there is none."""
    try:
        return _find_stat(pid)
    except OSError:
        return None


def _find_stat(pid: int) -> Stat | None:
    """Return what /proc says about a process; None where there is none.

    Raises:
        OSError: it could not be read although there may be one.
    """
    try:
        return _parse_stat(_read(f"/proc/{pid}/stat"))
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def _shows_newest_pid() -> bool:
    """Return whether /proc/loadavg is the kernel's: what a container puts in its place may stand still."""
    try:
        return os.stat("/proc/loadavg").st_dev == os.stat("/proc").st_dev  # noqa: PTH116 - as above
    except OSError:
        return False


def why_hidden() -> str | None:
    """Return why /proc shows nothing of any process here, a code of `REASONS`; None where it does.

    Its numbers are of no use where they are those of another namespace.
    """
    try:
        own = str(Path("/proc/self").readlink())
    except OSError:
        return "not_supported"
    return None if own == str(os.getpid()) else "pid_namespace"


def read_available_bytes() -> int | None:
    """Return how much memory this machine could still give to programs; None where it does not say."""
    return _amount_in("/proc/meminfo", b"MemAvailable:")


def read_own_peak_bytes() -> int | None:
    """Return the largest memory that this process has held; None where the system does not say."""
    return _amount_in("/proc/self/status", b"VmHWM:")


class Tree:
    """A process and all descendants of it that were seen.

    Args:
        pid: the process at the root.
        start_ticks: when it was started; None where /proc shows nothing of it, and then every reading is None.
        why_hidden: why it does not, a code of `REASONS`.
    """

    def __init__(self, pid: int, *, start_ticks: int | None, why_hidden: str = "pid_namespace") -> None:
        self._members: dict[int, int] = {} if start_ticks is None else {pid: start_ticks}
        self._is_readable = start_ticks is not None
        self._absence = "not_found" if self._is_readable else why_hidden
        self._known: set[int] = set()
        self._last_pid: int | None = None
        self._is_stale = False  # a number that was ours may be another's
        self._counts_starts = _shows_newest_pid()
        self._cpu, self._read, self._written = Total(_inherited_ticks), Total(_read_bytes), Total(_written_bytes)

    @property
    def pids(self) -> tuple[int, ...]:
        """The numbers of the processes, the root first."""
        return tuple(self._members)

    def scan(self) -> None:
        """Look for new descendants; only processes that were not there at the last look are read."""
        if not self._is_readable:
            return
        last_pid = self._newest_pid()
        if last_pid is not None and last_pid == self._last_pid and not self._is_stale:
            return
        try:
            listed = {int(name) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208 - only names
        except OSError:
            return  # the next look may be luckier
        if last_pid is not None and self._last_pid is not None and last_pid < self._last_pid:
            self._known.clear()  # numbers are given out anew: a known one may be another process's by now
        self._last_pid, self._is_stale = last_pid, False
        self._known &= listed
        new = {pid: stat for pid in sorted(listed - self._known) if (stat := read_stat(pid)) is not None}
        self._known |= {pid for pid, stat in new.items() if stat.parent in listed or stat.parent == 0}
        self._adopt(new)

    def owns(self, pid: int) -> bool:
        """Return whether a process is one of the tree, which it joins here if it was started since the last scan."""
        line: dict[int, Stat] = {}
        ancestor = pid
        while self._members and ancestor not in self._members and len(line) < _MAX_GENERATIONS:
            stat = read_stat(ancestor) if ancestor > 0 else None
            if stat is None:
                return False
            line[ancestor] = stat
            ancestor = stat.parent
        self._adopt(line)
        return pid in self._members

    def read(self) -> tuple[Values, Reasons]:
        """Return what all of the processes together have used and hold now."""
        living: dict[int, Stat] = {}
        usage: dict[int, _Io | None] = {}
        for pid, start_ticks in list(self._members.items()):
            # The number is checked last: then everything before it was about the same process.
            io = _read_io(pid)
            try:
                stat = _find_stat(pid)
            except OSError:  # out of descriptors, for example: nothing is known of this one, and so not of all
                return _unreadable("gap")
            if stat is None or stat.start_ticks != start_ticks:
                del self._members[pid]
                # Another process may have got its number.
                self._known.discard(pid)
                self._is_stale = True
                continue
            living[pid], usage[pid] = stat, io
        if not living:
            return _unreadable(self._absence)
        stats = living.values()
        values: Values = {
            "cpu_time_s": self._cpu.update({pid: _ticks(stat) for pid, stat in living.items()}) / _TICKS_PER_S,
            "rss_bytes": sum(_rss_pages(pid, stat) for pid, stat in living.items()) * _PAGE_BYTES,
            "num_processes": sum(not stat.has_ended for stat in stats),
            "num_threads": sum(stat.num_threads for stat in stats if not stat.has_ended),
        }
        more, reasons = self._io(living, usage)
        return {**values, **more}, reasons

    def read_pss(self) -> tuple[Values, Reasons]:
        """Return the memory of all processes, with pages that n processes share counted as 1/n in each."""
        total = 0
        found = False
        for pid in self._members:
            try:
                amount = _read_pss(pid)
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
        return {"pss_bytes": None}, {"pss_bytes": "not_supported" if has_root else self._absence}

    def _newest_pid(self) -> int | None:
        """Return the number that was given out last, which changes when a process is started; None if not known."""
        if not self._counts_starts:
            return None
        try:
            return int(_read("/proc/loadavg").rpartition(b" ")[2])
        except (OSError, ValueError):
            return None

    def _adopt(self, new: dict[int, Stat]) -> None:
        """Take in what is below the tree, parents before children."""
        new.pop(os.getpid(), None)
        found = True
        while found:
            found = False
            for pid in [pid for pid, stat in new.items() if stat.parent in self._members]:
                self._members.setdefault(pid, new.pop(pid).start_ticks)
                found = True

    def _io(self, living: Mapping[int, Stat], usage: Mapping[int, _Io | None]) -> tuple[Values, Reasons]:
        known = {pid: io for pid, io in usage.items() if io is not None}
        if len(known) < len(usage):
            fields = ("read_bytes", "write_bytes")
            return dict.fromkeys(fields), dict.fromkeys(fields, "no_permission")
        read = {pid: Part(living[pid].parent, io.read_bytes, io.read_bytes) for pid, io in known.items()}
        written = {pid: Part(living[pid].parent, io.write_bytes, io.write_bytes) for pid, io in known.items()}
        return {"read_bytes": self._read.update(read), "write_bytes": self._written.update(written)}, {}


def _rss_pages(pid: int, stat: Stat) -> int:
    if stat.state not in _ENDED:
        return stat.rss_pages
    thread = _living_thread(pid, stat)
    return 0 if thread is None else thread[1].rss_pages


def _read_pss(pid: int) -> int | None:
    """Return the PSS of a process in bytes; None where the kernel does not say.

    Raises:
        OSError: it cannot be read, or there is no such process.
    """
    try:
        return _kib_field(_read(f"/proc/{pid}/smaps_rollup"), b"Pss:")
    except OSError as error:
        stat = read_stat(pid) if error.errno in _GONE else None
        thread = None if stat is None else _living_thread(pid, stat)
        if thread is None:
            raise
        return _kib_field(_read(f"/proc/{thread[0]}/smaps_rollup"), b"Pss:")


def _living_thread(pid: int, stat: Stat) -> tuple[int, Stat] | None:
    """Return a thread that goes on after the first one has ended: only under its number /proc shows their memory."""
    if stat.state not in _ENDED or stat.has_ended:
        return None
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - only names
            thread = read_stat(int(name))
            if thread is not None and thread.state not in _ENDED:
                return int(name), thread
    return None


def _ticks(stat: Stat) -> Part:
    return Part(stat.parent, stat.own_ticks + stat.inherited_ticks, stat.inherited_ticks)


def _inherited_ticks(pid: int) -> int | None:
    stat = read_stat(pid)
    return None if stat is None else stat.inherited_ticks


def _read_bytes(pid: int) -> int | None:
    io = _read_io(pid)
    return None if io is None else io.read_bytes


def _written_bytes(pid: int) -> int | None:
    io = _read_io(pid)
    return None if io is None else io.write_bytes


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
        own_ticks=int(fields[11]) + int(fields[12]),
        inherited_ticks=int(fields[13]) + int(fields[14]),
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
    # Not line by line: this is read at every tick, and the line wanted is never the first.
    _, found, rest = text.partition(b"\n" + name)
    return int(rest[:_MAX_DIGITS].split(None, 1)[0]) * 1024 if found else None
