"""Starts the monitor as a process of its own, and ends it; nothing that goes wrong there stops a measurement."""

import fcntl
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.client import Client
from lucid_profiler.monitor.protocol import ProtocolError

READY_LIMIT_S = 2.0
STOP_LIMIT_S = 5.0
_TERMINATE_LIMIT_S = 3.0  # more than a monitor takes whose driver does not answer
_FAULTS = (OSError, ProtocolError, EnvironmentUnusableError, subprocess.SubprocessError)

__all__ = ["READY_LIMIT_S", "STOP_LIMIT_S", "Monitor", "launch"]


class Monitor:
    """A monitor process from the side of whoever launched it, or the reason why there is none. Raises nothing.

    Args:
        process: the process; None where there is none.
        client: the connection to it.
        output: its log.
        reason: why there is no monitor, one line; None where there is one.

    Attributes:
        pid: number of the process; None where there is none.
    """

    def __init__(
        self, *, process: "subprocess.Popen[bytes] | None", client: Client | None, output: Path, reason: str | None
    ) -> None:
        self.output = output
        self.reason = reason
        self.pid = None if process is None else process.pid
        self._process = process
        self._client = client

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the monitor has ended by itself, as it does after its target; return whether it has."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, timeout_s: float = STOP_LIMIT_S) -> None:
        """Have the last records written and the process ended; it is killed when it takes longer than `timeout_s`.

        Does nothing the second time.
        """
        if self._process is None:
            return
        deadline = time.monotonic() + timeout_s
        if self._process.poll() is None:
            self._ask_to_stop(timeout_s)
        if not self.wait(max(0.0, deadline - time.monotonic())):
            _end(self._process)
        self._release()

    def detach(self) -> None:
        """Let go of a monitor that listens in a directory: it goes on by itself."""
        if self._process is not None and self._process.poll() is None:
            # Else the interpreter warns that a process was forgotten.
            self._process.returncode = 0
        self._release()

    def _release(self) -> None:
        self._process = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask_to_stop(self, timeout_s: float) -> None:
        with suppress(*_FAULTS):
            if self._client is not None:
                self._client.request("stop", timeout_s=timeout_s)


def launch(
    *,
    target_pid: int,
    output: Path,
    interval_s: float = 0.1,
    with_nvml: bool = True,
    directory: Path | None = None,
    timeout_s: float = READY_LIMIT_S,
) -> Monitor:
    """Start a monitor and wait until it follows the target.

    It ends within 2 s of the end of the target. Without a `directory` it also ends with this process.

    Args:
        target_pid: number of the process to follow.
        output: its log; an existing one is continued.
        interval_s: time between two samples, in seconds.
        with_nvml: whether to read the devices.
        directory: private directory in which it listens for others and outlives this process.
        timeout_s: longest time until it is ready.

    Returns:
        The monitor; where it could not be started, one whose `reason` says why.
    """
    request: dict[str, Any] = {
        "pid": target_pid,
        "output": os.path.abspath(output),  # noqa: PTH100 - resolving links would need the file
        "interval_s": interval_s,
        "with_nvml": with_nvml,
    }
    process = None
    try:
        process, connection = _spawn(directory)
        client = Client(connection, timeout_s=timeout_s)
    except OSError as error:
        return Monitor(process=None, client=None, output=output, reason=f"the monitor cannot be started: {error}")
    try:
        client.request("start", **request)
    except _FAULTS as error:
        client.close()
        _end(process)
        words = f"the monitor was not ready within {timeout_s} s" if isinstance(error, TimeoutError) else str(error)
        return Monitor(process=None, client=None, output=output, reason=words)
    return Monitor(process=process, client=client, output=output, reason=None)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process: asked first, so that it takes its socket away, and killed if it does not answer.

    One that the kernel holds in a call of the driver goes when that returns; nobody waits for it.
    """
    for end in (process.terminate, process.kill):
        end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_LIMIT_S)
            return


def _spawn(directory: Path | None) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start the process in a session of its own: what a terminal sends to this one does not reach it."""
    ours, theirs = (_above_standard(end) for end in socket.socketpair())
    words = ["--control", str(theirs.fileno())]
    words += ["--launcher", str(os.getpid())] if directory is None else ["--directory", str(directory.absolute())]
    try:
        process = subprocess.Popen(  # noqa: S603 - this interpreter with arguments made here
            [sys.executable, "-m", "lucid_profiler.monitor", *words],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # `-m` looks for modules in the current directory first, where a program's own may have any name.
            cwd="/",
            env=_environment(),
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def _above_standard(connection: socket.socket) -> socket.socket:
    """Return a connection under a number of no standard file: where those are closed, new files get their numbers."""
    if connection.fileno() > 2:
        return connection
    with connection:
        return socket.socket(fileno=fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def _environment() -> dict[str, str]:
    """Return this process's environment with module directories that hold from everywhere."""
    environ = dict(os.environ)
    directories = environ.get("PYTHONPATH", "").split(os.pathsep)
    if any(directories):
        environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in directories if entry)  # noqa: PTH100
    return environ
