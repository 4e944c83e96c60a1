"""`lucid profile daemon`: a monitor that goes on after the command has ended, one for each user."""

import os

import click

from lucid_cli.commands.profile_attach import following, new_log
from lucid_cli.output import one_line, say, write_result
from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.address import lock_path, make_private, runtime_directory
from lucid_profiler.monitor.client import Client, connect
from lucid_profiler.monitor.process import launch
from lucid_profiler.monitor.protocol import ProtocolError

NOT_RUNNING = 9
_READY_LIMIT_S = 10.0

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
    directory = runtime_directory(os.environ)
    client = _connect()
    if client is not None:
        return _keep(client, pid)
    path = new_log(output, pid)
    make_private(directory)
    monitor = launch(
        target_pid=pid,
        output=path,
        interval_s=interval,
        with_nvml=not no_nvml,
        directory=directory,
        timeout_s=_READY_LIMIT_S,
    )
    if monitor.reason is not None:
        raise EnvironmentUnusableError(monitor.reason)
    say(f"daemon: process {monitor.pid}")
    say(f"log: {one_line(str(path))}")
    monitor.detach()
    return 0


@command.command("stop")
def stop() -> int:
    """Stop the daemon; its log is finished first. Without one, nothing happens."""
    client = _connect()
    if client is None:
        say("no daemon runs")
        return 0
    try:
        _ask(client, "stop")
    finally:
        client.close()
    return 0


@command.command("status")
def status() -> int:
    """Show what the daemon follows; exits 9 where none runs."""
    client = _connect()
    if client is None:
        write_result("no daemon runs\n")
        return NOT_RUNNING
    try:
        write_result(_render(_ask(client, "status")))
    finally:
        client.close()
    return 0


def _connect() -> Client | None:
    directory = runtime_directory(os.environ)
    try:
        return connect(directory)
    except (OSError, ProtocolError) as error:
        raise EnvironmentUnusableError(
            f"the daemon does not answer ({error}); end it by hand, its number is in {lock_path(directory)}"
        ) from error


def _ask(client: Client, verb: str) -> dict[str, object]:
    try:
        return dict(client.request(verb))
    except ProtocolError as error:
        raise EnvironmentUnusableError(f"the daemon does not answer: {error}") from error


def _keep(client: Client, pid: int) -> int:
    """Leave a daemon as it is where it follows the process that is asked for.

    Raises:
        EnvironmentUnusableError: it follows another.
    """
    try:
        answer = _ask(client, "status")
    finally:
        client.close()
    followed = _pid(answer)
    if followed != pid:
        raise EnvironmentUnusableError(
            f"a daemon follows process {followed} already; end it first: lucid profile daemon stop"
        )
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
    )
