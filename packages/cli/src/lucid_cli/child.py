"""One measured process: started as typed in a session of its own, drained, awaited, and its group cleared away."""

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import IO, Literal

from lucid_cli.command import cannot_start
from lucid_cli.descendants import death_signal, end_orphans, sessions, wait_for_orphans
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
        outlived: names of the processes it had started that went on after its end and were ended.
        unended: names of those that could not be ended.
        held_output: whether somebody kept its output open after its end.
        was_unwatched: whether lucid was stopped meanwhile: its end may have been seen late, and its output not read.
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
    outlived: tuple[str, ...]
    unended: tuple[str, ...]
    held_output: bool
    was_unwatched: bool = False


def run_child(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    interrupts: Interrupts,
    timeout_s: float | None = None,
    stdin: IO[bytes] | None = None,
    copy_output: bool = False,
    on_start: Callable[[int], None] | None = None,
    spared: Callable[[], Collection[int]] = tuple,
) -> Ended:
    """Run a command to its end.

    Args:
        command: program and arguments, passed on byte for byte; the program is looked up in the PATH of `env`.
        env: the whole environment.
        interrupts: signals to lucid; the first is forwarded to the process group, the second kills it.
        timeout_s: seconds after which the group is ended.
        stdin: what the command reads; a file from its beginning, through a descriptor of its own that only reads. None
            for nothing.
        copy_output: also copy what the command prints to lucid's standard error.
        on_start: called with the command's number once it runs, while its end is already being awaited. What it takes
            delays signals and limits, so it must not wait. If it raises, the command is ended.
        spared: called once the command has ended; returns the numbers of children of lucid's own that do not belong to
            the run; each leads a session.

    Raises:
        CannotStartError: the command cannot be started.
    """
    own_max_rss = _max_rss_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    num_continued = interrupts.num_continued
    with _Child(command, env, stdin=stdin) as child, child.drain(copy_output=copy_output) as drain:
        ending, end_ns = _follow(child.pid, interrupts, timeout_s=timeout_s, on_start=on_start)
        child.spare(spared())
        finished = child.settle(drain)
    code = child.returncode
    max_rss = _max_rss_bytes(child.usage.ru_maxrss)
    return Ended(
        returncode=code if code >= 0 else None,
        signal=_signal_name(-code) if code < 0 else None,
        ending=ending,
        begin_ns=child.begin_ns,
        end_ns=end_ns,
        max_rss_bytes=max_rss if max_rss > own_max_rss else None,
        stdout_bytes=drain.stdout_bytes,
        stderr_bytes=drain.stderr_bytes,
        output_tail=drain.tail(),
        outlived=tuple(sorted(child.outlived.values())),
        unended=tuple(sorted(child.unended.values())),
        held_output=not finished,
        was_unwatched=interrupts.num_continued > num_continued,
    )


class _Child:
    """A process from its start to its end: however the block is left, its group is killed and it is reaped.

    What it leaves behind outside its group is ended too where lucid adopts orphans.
    """

    returncode: int
    usage: resource.struct_rusage

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, stdin: IO[bytes] | None) -> None:
        self.outlived: dict[int, str] = {}
        self.unended: dict[int, str] = {}
        # A shell may exec lucid beside its own jobs, whose orphans become lucid's too.
        self._spared = set(sessions())
        with _input(stdin) as source:
            self.begin_ns = time.monotonic_ns()
            try:
                self._process = subprocess.Popen(  # noqa: S603 - running what the user typed is the purpose
                    command,
                    env=env,
                    stdin=source,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                    preexec_fn=death_signal(),  # noqa: PLW1509 - None where lucid has another thread
                )
            except OSError as error:
                raise cannot_start(command[0], error) from error
        self.pid = self._process.pid

    def spare(self, leaders: Collection[int]) -> None:
        """Leave the sessions of these children of lucid out of what the run has left behind."""
        self._spared.update(leaders)

    def drain(self, *, copy_output: bool) -> Drain:
        """Return what reads the two pipes from now on, and closes them."""
        return Drain(self._process.stdout, self._process.stderr, copy_output=copy_output)

    def settle(self, drain: Drain) -> bool:
        """Give what the process has left behind a moment to end; return whether its output has ended."""
        deadline = time.monotonic() + DRAIN_GRACE_S
        finished = drain.join(DRAIN_GRACE_S)
        self.outlived = wait_for_orphans(self._spared, timeout_s=deadline - time.monotonic())
        return finished

    def __enter__(self) -> "_Child":  # noqa: PYI034 - typing.Self is newer than the oldest Python supported
        return self

    def __exit__(self, *_: object) -> None:
        # The process is not reaped yet, so its number cannot belong to another group.
        _signal_group(self.pid, signal.SIGKILL)
        _pid, status, self.usage = os.wait4(self.pid, 0)
        self._process.returncode = self.returncode = os.waitstatus_to_exitcode(status)
        killed, self.unended = end_orphans(self._spared)
        self.outlived = {pid: name for pid, name in {**self.outlived, **killed}.items() if pid not in self.unended}
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _input(stdin: IO[bytes] | None) -> AbstractContextManager[IO[bytes] | int]:
    """Return the standard input of a run; of a file a descriptor that shares neither offset nor the right to write."""
    if stdin is None:
        return nullcontext(subprocess.DEVNULL)
    if not stdin.seekable():
        return nullcontext(stdin)
    stdin.seek(0)
    with suppress(OSError):
        return Path(f"/proc/self/fd/{stdin.fileno()}").open("rb", buffering=0)
    return nullcontext(stdin)


def _follow(
    pid: int, interrupts: Interrupts, *, timeout_s: float | None, on_start: Callable[[int], None] | None
) -> tuple[Ending, int]:
    """Wait for the end; return what made the process end, and when that was on the monotonic clock."""
    ends_ns: list[int] = []
    waiter = threading.Thread(target=_wait_for_end, args=(pid, interrupts, ends_ns), daemon=True)
    waiter.start()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        if on_start is not None:
            on_start(pid)
        ending = _await(pid, interrupts, deadline=deadline)
    except BaseException:
        _signal_group(pid, signal.SIGKILL)
        raise
    finally:
        waiter.join()
    return ending, ends_ns[0]


def _wait_for_end(pid: int, interrupts: Interrupts, ends_ns: list[int]) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        # Reaped already: an error ended the run before the process did.
        return
    ends_ns.append(time.monotonic_ns())
    interrupts.events.put("ended")


def _await(pid: int, interrupts: Interrupts, *, deadline: float | None) -> Ending:
    """Wait until the process has ended, pass signals on to its group, and keep the limits."""
    ending: Ending = "by_itself"
    while True:
        try:
            event = interrupts.events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
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
