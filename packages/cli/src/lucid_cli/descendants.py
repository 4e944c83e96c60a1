"""What keeps processes from outliving lucid or the run they belong to; on systems other than Linux it does nothing.

While `adopting_orphans` is entered, a process whose parent has ended becomes a child of lucid instead of init's, in
whatever session it is. A program that recognises orphans by the parent number 1 sees lucid's number there instead.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# https://man7.org/linux/man-pages/man2/prctl.2.html
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_PROC = Path("/proc")
_DEAD = frozenset("ZXx")
_POLL_S = 0.02
_END_LIMIT_S = 5.0  # for the kernel to take down what was killed

__all__ = ["adopting_orphans", "death_signal", "descendants", "end_orphans", "sessions", "wait_for_orphans"]


def _load_prctl() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    # PyDLL keeps the interpreter's lock, as code between fork and exec should.
    function = getattr(ctypes.PyDLL(None), "prctl", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    function.restype = ctypes.c_int
    prctl: Callable[..., int] = function
    return prctl


_prctl = _load_prctl()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    parent: int
    session: int
    name: str
    is_running: bool


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of all orphans among its descendants; the setting is given back on leaving."""
    if _prctl is None or _is_adopting():
        yield
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def death_signal() -> Callable[[], None] | None:
    """Return what a child calls before exec so that it is killed when lucid is; None where that is not safe.

    Code that runs between fork and exec may wait forever for a lock that another thread held, so there must be no
    other thread, be it Python's or a library's. The kernel forgets the setting for a setuid program, and descendants
    of the child do not inherit it.
    """
    prctl = _prctl
    if prctl is None or _num_threads() != 1:
        return None
    parent, number = os.getpid(), int(signal.SIGKILL)

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)

    return set_death_signal


def sessions() -> frozenset[int]:
    """Return the sessions of this process and its descendants, zombies included.

    A process can begin a session but never enter one: what is in one of these does not come from a command that is
    started later in a session of its own, whoever its parent is by then.
    """
    return frozenset({os.getsid(0), *(process.session for process in _below(()).values())})


def descendants(spared: Collection[int]) -> dict[int, str]:
    """Return the running descendants of this process by number, with their names.

    Args:
        spared: sessions whose processes are left out with their own descendants.
    """
    return {pid: process.name for pid, process in _below(spared).items() if process.is_running}


def wait_for_orphans(spared: Collection[int], *, timeout_s: float) -> dict[int, str]:
    """Let descendants end by themselves; return those that are still running."""
    deadline = time.monotonic() + timeout_s
    while (found := descendants(spared)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


def end_orphans(spared: Collection[int]) -> tuple[dict[int, str], dict[int, str]]:
    """Kill and reap all children but those in spared sessions, then those that they leave behind.

    Only children are signalled: the number of a child belongs to nobody else before it is reaped.

    Returns:
        What was killed, and what is still running, each by number with its name.
    """
    killed: dict[int, str] = {}
    deadline = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < deadline:
        own = _level(_processes(), {os.getpid()}, spared)
        if not own:
            return killed, {}
        for pid in own:
            if own[pid].is_running:
                killed[pid] = own[pid].name
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S / 10)
    left = descendants(spared)
    return {pid: name for pid, name in killed.items() if pid not in left}, left


def _num_threads() -> int:
    with suppress(OSError):
        return len(list((_PROC / "self" / "task").iterdir()))
    return 0


def _is_adopting() -> bool:
    setting = ctypes.c_int(0)
    return (
        _prctl is not None
        and _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(setting), 0, 0, 0) == 0
        and setting.value != 0
    )


def _below(spared: Collection[int]) -> dict[int, _Process]:
    processes = _processes()
    found: dict[int, _Process] = {}
    level = _level(processes, {os.getpid()}, spared)
    while level:
        found |= level
        level = _level(processes, level, spared)
    return found


def _level(processes: Mapping[int, _Process], parents: Collection[int], spared: Collection[int]) -> dict[int, _Process]:
    return {
        pid: process
        for pid, process in processes.items()
        if process.parent in parents and process.session not in spared
    }


def _processes() -> dict[int, _Process]:
    """Return all processes that /proc shows; none where orphans are not adopted, so that nothing else is ended."""
    found = {}
    names = os.listdir(_PROC) if _is_adopting() and _PROC.is_dir() else []  # noqa: PTH208 - only names are needed
    for name in names:
        if name.isdecimal():
            with suppress(OSError):
                found[int(name)] = _parse((_PROC / name / "stat").read_bytes())
    return found


def _parse(stat: bytes) -> _Process:
    # The name may hold blanks and parentheses: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    name, _, rest = stat.partition(b"(")[2].rpartition(b")")
    state, parent, _group, session = rest.split()[:4]
    return _Process(
        parent=int(parent),
        session=int(session),
        name=name.decode("utf-8", "replace"),
        is_running=state.decode() not in _DEAD,
    )
