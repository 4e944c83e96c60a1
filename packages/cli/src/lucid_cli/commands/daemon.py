"""`lucid profile daemon`: a monitor that goes on after the command has ended, one for each user."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import click

from lucid_cli.commands.profile_attach import following, new_log
from lucid_cli.output import one_line, say, write_result
from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.address import (
    holder,
    lock_path,
    make_private,
    runtime_directory,
    socket_path,
)
from lucid_profiler.monitor.client import Client, connect
from lucid_profiler.monitor.process import Monitor, launch
from lucid_profiler.monitor.protocol import ProtocolError

NOT_RUNNING = 9
_READY_LIMIT_S = 10.0
_END_LIMIT_S = 5.0  # more than a monitor takes whose driver does not answer
_POLL_S = 0.05
_SOCKETLESS_LIMIT_S = 1.0

_Answer = TypeVar("_Answer")

__all__ = ["command"]


@click.group("daemon")
def command() -> None:
    """Follow a process in the background."""


@command.command("start")
@following
def start(pid: int, *, output: str | None, interval: float, no_nvml: bool) -> int:
    """Follow the process PID and its descendants in the background, until it ends or `stop`.

    Where that process is followed already, nothing changes.
    """
    deadline = time.monotonic() + _READY_LIMIT_S
    answer = _running(deadline)
    if answer is not None:
        return _keep(answer, pid)
    path = new_log(output, pid)
    directory = runtime_directory(os.environ)
    make_private(directory)
    while (monitor := _launch(pid, path, interval=interval, with_nvml=not no_nvml)).reason is not None:
        # Another start may have been first; a daemon that is about to end gives its lock back.
        answer = _running(deadline)
        if answer is not None:
            return _keep(answer, pid)
        if not lock_path(directory).exists() or time.monotonic() >= deadline:
            raise EnvironmentUnusableError(monitor.reason)
        time.sleep(_POLL_S)
    say(f"daemon: process {monitor.pid}")
    say(f"log: {one_line(str(path))}")
    monitor.detach()
    return 0


@command.command("stop")
def stop() -> int:
    """Stop the daemon; its log is finished first. Without one, nothing happens."""
    if _asked(_end) is None:
        say("no daemon runs")
    return 0


@command.command("status")
def status() -> int:
    """Show what the daemon follows; exits 9 where none runs."""
    answer = _asked(lambda client: dict(client.request("status")))
    if answer is None:
        write_result("no daemon runs\n")
        return NOT_RUNNING
    write_result(_render(answer))
    return 0


def _launch(pid: int, path: Path, *, interval: float, with_nvml: bool) -> Monitor:
    return launch(
        target_pid=pid,
        output=path,
        interval_s=interval,
        with_nvml=with_nvml,
        directory=runtime_directory(os.environ),
        timeout_s=_READY_LIMIT_S,
    )


def _running(deadline: float) -> dict[str, object] | None:
    """Return the status of the daemon that runs; None without one, or where it ends just now.

    One that was just begun listens before it is told what to follow: that is waited for until the deadline.

    Raises:
        EnvironmentUnusableError: it does not answer.
    """
    directory = runtime_directory(os.environ)
    with _answering():
        try:
            while (client := connect(directory, timeout_s=_READY_LIMIT_S)) is not None:
                with closing(client):
                    answer = dict(client.request("status"))
                if answer.get("target") is not None or time.monotonic() >= deadline:
                    return answer
                time.sleep(_POLL_S)
        except ConnectionError:
            return None
    return None


@contextmanager
def _answering() -> Iterator[None]:
    """Say of a daemon that does not answer how to end it.

    Raises:
        EnvironmentUnusableError: it does not answer.
    """
    directory = runtime_directory(os.environ)
    try:
        yield
    except PermissionError as error:
        raise EnvironmentUnusableError(
            f"{directory} belongs to another user; set XDG_RUNTIME_DIR to a directory of your own"
        ) from error
    except (OSError, ProtocolError) as error:
        path = lock_path(directory)
        raise EnvironmentUnusableError(
            f"the daemon does not answer ({error}); end it by hand, its number is in {path}"
        ) from error


def _end(client: Client) -> bool:
    client.request("stop")
    if not client.wait_for_end(timeout_s=_END_LIMIT_S):
        raise TimeoutError("it does not come to its end")
    return True


def _asked(ask: Callable[[Client], _Answer]) -> _Answer | None:
    """Return what the daemon that runs is asked for; None without one, or where it ends just now.

    Raises:
        EnvironmentUnusableError: it does not answer, or cannot be reached.
    """
    deadline = time.monotonic() + _END_LIMIT_S
    with _answering():
        while True:
            try:
                client = _connect()
                if client is None:
                    return None
                with closing(client):
                    return ask(client)
            except ConnectionError:  # noqa: PERF203 - it ends, or has no room for one more
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_S)


def _connect() -> Client | None:
    """Return a connection to the daemon; None where none runs. One that begins or ends has no socket for a moment.

    Raises:
        EnvironmentUnusableError: it runs, and its socket is gone.
        OSError: it does not answer.
        ProtocolError: what answers is no monitor.
    """
    directory = runtime_directory(os.environ)
    deadline = time.monotonic() + _SOCKETLESS_LIMIT_S
    while (client := connect(directory, timeout_s=_READY_LIMIT_S)) is None:
        owner = holder(directory)
        if owner is None:
            return None
        if time.monotonic() >= deadline:
            raise EnvironmentUnusableError(
                f"a daemon runs, process {owner}, but its socket {socket_path(directory)} was removed; end it by hand"
            )
        time.sleep(_POLL_S)
    return client


def _keep(answer: dict[str, object], pid: int) -> int:
    """Leave the daemon that answered so as it is, where it follows the process that is asked for.

    Raises:
        EnvironmentUnusableError: it follows another.
    """
    followed = _pid(answer)
    if followed != pid:
        whom = "no process yet, and runs" if followed is None else f"process {followed}"
        raise EnvironmentUnusableError(f"a daemon follows {whom} already; end it first: lucid profile daemon stop")
    say(f"process {pid} is followed already, into {one_line(str(answer['output']))}")
    return 0


def _pid(answer: dict[str, object]) -> object:
    target = answer.get("target")
    return target.get("pid") if isinstance(target, dict) else None


def _render(answer: dict[str, object]) -> str:
    if answer.get("target") is None:
        return "the daemon follows no process yet\n"
    return (
        f"follows process {_pid(answer)} every {answer['interval_s']} s, into {one_line(str(answer['output']))}\n"
        f"{answer['num_samples']} samples, {answer['num_missed']} missed, "
        f"{answer['num_dropped_records']} records could not be written\n"
        + ("its log was deleted: what it records is lost\n" if answer.get("is_log_removed") else "")
    )
