"""The process that is followed: held by a descriptor that no other process can take over, whatever its number."""

import ctypes
import errno
import fcntl
import os
import select
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.tree import Stat, read_stat, why_hidden

MAX_ARGV_CHARS = 4096  # of what answers say; even words that are no text stay far below a frame
_NR_PIDFD_OPEN = 434  # the same on every architecture: https://man7.org/linux/man-pages/man2/pidfd_open.2.html
# linux/pidfd.h: mask, cgroup id, pid, tgid, ppid, eight user and group ids, exit code.
_PIDFD_INFO = struct.Struct("@QQ" + "I" * 11 + "i")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11

__all__ = ["MAX_ARGV_CHARS", "ExitStatus", "Target", "open_pidfd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a process ended: with `returncode`, or by the signal of this name."""

    returncode: int | None
    signal: str | None


def open_pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends.

    Raises:
        OSError: there is no such process, or the system has no such descriptors.
    """
    function: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    if function is not None:
        return function(pid)
    # Interpreters built with old system headers lack the function, not the system call.
    fd = int(ctypes.CDLL(None, use_errno=True).syscall(_NR_PIDFD_OPEN, pid, 0))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd


class Target:
    """A process that is followed to its end.

    Args:
        pid: its number in the namespace of this process.
        start_ticks: when it was started, in clock ticks since boot, if the caller knows: another process of that
            number is refused then.

    Attributes:
        why_hidden: a code of `REASONS` for where /proc shows nothing of it.

    Raises:
        EnvironmentUnusableError: there is no such process, or it cannot be followed here.
    """

    def __init__(self, pid: int, *, start_ticks: int | None = None) -> None:
        self.pid = pid
        self.fd = _open(pid)
        try:
            stat = _stat_of(pid)
            # While the descriptor says that it runs, the number is its own: what was read belongs to it.
            if self.has_ended() or (stat is not None and start_ticks not in {None, stat.start_ticks}):
                raise _no_process(pid)
        except EnvironmentUnusableError:
            self.close()
            raise
        self.start_ticks = None if stat is None else stat.start_ticks
        # Of processes of other users /proc may be told to show nothing.
        self.why_hidden = why_hidden() or "no_permission"
        self.argv = None if stat is None else _argv(pid)

    def has_ended(self) -> bool:
        """Return whether the process has ended; its parent need not have asked for its status."""
        return bool(select.select([self.fd], [], [], 0)[0])

    def exit_status(self) -> ExitStatus | None:
        """Return how the process ended; None where it still runs, or the system does not tell this user."""
        if not self.has_ended():
            return None
        stat = _stat_of(self.pid)
        is_known = stat is not None and stat.start_ticks == self.start_ticks and stat.state in "ZX"
        # Another user's process shows a code of 0 however it ended.
        if stat is not None and is_known and (stat.exit_code or _may_look_into(self.pid)):
            return _decode(stat.exit_code)
        code = _pidfd_exit_code(self.fd)
        return None if code is None else _decode(code)

    def environ(self) -> dict[str, str] | None:
        """Return the environment that the process was started with; None where that is denied or overwritten.

        Of a variable that is there twice the first counts, as for getenv(3).
        """
        if self.start_ticks is None:
            return None
        try:
            with open(f"/proc/{self.pid}/environ", "rb") as file:  # noqa: PTH123 - /proc is no place for paths
                entries = [entry.partition(b"=") for entry in file.read().removesuffix(b"\0").split(b"\0")]
        except OSError:
            return None
        # A program may write a title for itself over its environment.
        is_whole = all(name and mark for name, mark, _ in entries) or entries == [(b"", b"", b"")]
        if self.has_ended() or not is_whole:
            return None
        return {os.fsdecode(name): os.fsdecode(value) for name, mark, value in reversed(entries) if mark}

    def describe(self) -> Mapping[str, object]:
        """Return what the log's header says about the process."""
        return {"pid": self.pid, "start_ticks": self.start_ticks, "argv": self.argv}

    def brief(self) -> Mapping[str, object]:
        """Return what answers say about the process: of a long command line, the first words and how many follow."""
        if self.argv is None:
            return {**self.describe(), "num_argv_left_out": None}
        num_kept = _num_that_fit(self.argv)
        return {**self.describe(), "argv": self.argv[:num_kept], "num_argv_left_out": len(self.argv) - num_kept}

    def close(self) -> None:
        """Let go of the process."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _open(pid: int) -> int:
    try:
        return open_pidfd(pid)
    except (ProcessLookupError, OverflowError) as error:
        raise _no_process(pid) from error
    except OSError as error:
        # A thread's number, or a number that no process can have.
        if error.errno in {errno.EINVAL, errno.ENOENT}:
            raise _no_process(pid, process=_process_of(pid)) from error
        raise EnvironmentUnusableError(
            f"process {pid} cannot be followed: this system has no process descriptors ({error.strerror})"
        ) from error


def _no_process(pid: int, *, process: int | None = None) -> EnvironmentUnusableError:
    if process is not None:
        return EnvironmentUnusableError(f"{pid} is a thread of process {process}; name that process")
    stat = _stat_of(pid)
    if stat is not None and stat.has_ended:
        return EnvironmentUnusableError(f"process {pid} has ended; only its status is still to be asked for")
    return EnvironmentUnusableError(f"process {pid} does not exist")


def _process_of(pid: int) -> int | None:
    """Return the process to which a thread belongs; None where there is no such thread of another number."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123 - /proc is no place for paths
            process = int(file.read().partition(b"\nTgid:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError):
        return None
    return None if process == pid else process


def _stat_of(pid: int) -> Stat | None:
    return None if why_hidden() else read_stat(pid)


def _argv(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - /proc is no place for paths
            return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return None


def _num_that_fit(words: Sequence[str]) -> int:
    """Return how many of the first words, each with its end, take no more than `MAX_ARGV_CHARS`."""
    num = 0
    for num_chars in accumulate(len(word) + 1 for word in words):
        if num_chars > MAX_ARGV_CHARS:
            break
        num += 1
    return num


def _may_look_into(pid: int) -> bool:
    """Return whether the kernel shows a process's private values to this one; reading its I/O asks for the same right.

    Source: PTRACE_MODE_READ_FSCREDS in https://man7.org/linux/man-pages/man5/proc_pid_io.5.html and proc_pid_stat(5).
    """
    try:
        with open(f"/proc/{pid}/io", "rb") as file:  # noqa: PTH123 - /proc is no place for paths
            file.read(1)
    except OSError:
        return False
    return True


def _pidfd_exit_code(fd: int) -> int | None:
    """Ask the descriptor itself, which Linux 6.15 and later answer once the parent has taken the status."""
    buffer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, *_, code = _PIDFD_INFO.unpack(buffer)
    return code if mask & _PIDFD_INFO_EXIT else None


def _decode(code: int) -> ExitStatus:
    returncode = os.waitstatus_to_exitcode(code)
    if returncode >= 0:
        return ExitStatus(returncode=returncode, signal=None)
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"SIG{-returncode}"
    return ExitStatus(returncode=None, signal=name)
