"""One measured process: started as typed in a session of its own, drained, awaited, and its group cleared away."""

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty
from typing import IO, Literal

from lucid_cli.drain import Drain
from lucid_cli.interrupts import Interrupts

INTERRUPT_GRACE_S = 30.0  # for a program that saves its work when it is interrupted
TIMEOUT_GRACE_S = 2.0
DRAIN_GRACE_S = 1.0

__all__ = ["DRAIN_GRACE_S", "INTERRUPT_GRACE_S", "TIMEOUT_GRACE_S", "Ended", "run_child"]

Ending = Literal["by_itself", "timeout", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended, what it used, and what it printed.

    Attributes:
        returncode: exit status, None when a signal ended it.
        signal: name of that signal.
        ending: what made it end; a status that exists counts before a limit that ran out.
        max_rss_bytes: the kernel's high-water mark; None when it is not above lucid's own, which it starts from.
        left_processes: whether processes it had started kept its output open and were killed.
    """

    returncode: int | None
    signal: str | None
    ending: Ending
    begin_ns: int
    end_ns: int
    max_rss_bytes: int | None
    stdout_bytes: int
    stderr_bytes: int
    output_tail: str
    left_processes: bool


def run_child(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    interrupts: Interrupts,
    timeout_s: float | None = None,
    stdin: IO[bytes] | None = None,
    copy_output: bool = False,
) -> Ended:
    """Run a command to its end.

    Args:
        command: program and arguments, passed on byte for byte; the program is looked up in the PATH of `env`.
        env: the whole environment.
        interrupts: signals to lucid; the first is forwarded to the process group, the second kills it.
        timeout_s: seconds after which the group is ended.
        stdin: what the command reads, from its beginning if it is a file; None for nothing.
        copy_output: also copy what the command prints to lucid's standard error.

    Raises:
        OSError: the command cannot be started.
    """
    own_max_rss = _max_rss_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    if stdin is not None and stdin.seekable():
        stdin.seek(0)
    begin_ns = time.monotonic_ns()
    process = subprocess.Popen(  # noqa: S603 - running what the user typed is the purpose
        command,
        env=env,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    drain = Drain(process.stdout, process.stderr, copy_output=copy_output)
    ends_ns: list[int] = []
    waiter = threading.Thread(target=_wait_for_end, args=(process.pid, interrupts, ends_ns), daemon=True)
    waiter.start()
    ending = _await(process.pid, interrupts, timeout_s=timeout_s)
    waiter.join()
    finished = drain.join(DRAIN_GRACE_S)
    # The process is still a zombie, so its number cannot belong to another group yet.
    _signal_group(process.pid, signal.SIGKILL)
    if not finished:
        drain.stop()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    code = process.returncode
    max_rss = _max_rss_bytes(usage.ru_maxrss)
    return Ended(
        returncode=code if code >= 0 else None,
        signal=_signal_name(-code) if code < 0 else None,
        ending=ending,
        begin_ns=begin_ns,
        end_ns=ends_ns[0],
        max_rss_bytes=max_rss if max_rss > own_max_rss else None,
        stdout_bytes=drain.stdout_bytes,
        stderr_bytes=drain.stderr_bytes,
        output_tail=drain.tail(),
        left_processes=not finished,
    )


def _wait_for_end(pid: int, interrupts: Interrupts, ends_ns: list[int]) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ends_ns.append(time.monotonic_ns())
    interrupts.events.put("ended")


def _await(pid: int, interrupts: Interrupts, *, timeout_s: float | None) -> Ending:
    """Wait until the process has ended, pass signals on to its group, and keep the limits."""
    ending: Ending = "by_itself"
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            event = interrupts.events.get(timeout=remaining)
        except Empty:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                deadline = None
            elif ending == "by_itself":
                ending = "timeout"
                _signal_group(pid, signal.SIGTERM)
                deadline = time.monotonic() + TIMEOUT_GRACE_S
            else:
                _signal_group(pid, signal.SIGKILL)
                deadline = None
            continue
        if isinstance(event, str):
            return ending
        if ending == "interrupted":
            _signal_group(pid, signal.SIGKILL)
        else:
            ending = "interrupted"
            _signal_group(pid, signal.Signals(event))
            deadline = time.monotonic() + INTERRUPT_GRACE_S


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def _max_rss_bytes(value: int) -> int:
    # Linux counts KiB, macOS bytes: https://man7.org/linux/man-pages/man2/getrusage.2.html
    return value if os.uname().sysname == "Darwin" else value * 1024
