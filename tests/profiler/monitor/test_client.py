import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.client import Client
from lucid_profiler.monitor.protocol import Decoder, encode

LIMIT_S = 30.0


class Monitor:
    """The other end of a client's connection, answering when the test says so."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = Decoder()

    def next(self) -> dict[str, Any]:
        while (request := self._decoder.next()) is None:
            self._decoder.feed(self._connection.recv(65536))
        return request

    def send(self, **answer: Any) -> None:
        self._connection.sendall(encode(answer))


@pytest.fixture
def ends() -> Iterator[tuple[Client, Monitor]]:
    """Give a client and what answers it."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(LIMIT_S)
    client = Client(ours, timeout_s=LIMIT_S)
    with theirs:
        yield client, Monitor(theirs)
        client.close()


def test_an_answer_that_came_too_late_is_not_the_next_request_s(ends: tuple[Client, Monitor]) -> None:
    """A mark that ran out of time must not give its energy to the mark after it."""
    client, monitor = ends
    with pytest.raises(TimeoutError):
        client.request("mark", timeout_s=0.01, name="begin")
    late = monitor.next()
    monitor.send(ok=True, id=late["id"], name="begin")
    monitor.send(ok=True, id=late["id"] + 1, name="end")
    assert client.request("mark", name="end") == {"ok": True, "name": "end"}
    assert monitor.next()["id"] == late["id"] + 1


def test_a_refusal_that_came_too_late_is_not_the_next_request_s(ends: tuple[Client, Monitor]) -> None:
    """Nor is an error."""
    client, monitor = ends
    with pytest.raises(TimeoutError):
        client.request("start", timeout_s=0.01)
    late = monitor.next()
    monitor.send(ok=False, id=late["id"], error="no")
    monitor.send(ok=True, id=late["id"] + 1)
    assert client.request("status") == {"ok": True}


def test_a_monitor_that_cannot_begin_is_heard(ends: tuple[Client, Monitor]) -> None:
    """It refuses before it has read the request."""
    client, monitor = ends
    monitor.send(ok=False, error="a daemon runs already")
    with pytest.raises(EnvironmentUnusableError, match="a daemon runs already"):
        client.request("start")


def test_refused_starts_leave_no_descriptor() -> None:
    """Whatever is wrong with a start, the daemon lets go of the process that it named."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "lucid_profiler.monitor", "--control", str(theirs.fileno())]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        client = Client(ours, timeout_s=LIMIT_S)

        def refuse(output: str) -> int:
            with pytest.raises(EnvironmentUnusableError):
                client.request("start", pid=os.getpid(), output=output)
            return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))

        before = refuse("/nowhere/a")
        for output in ("/nowhere/a", "/nowhere\0"):
            for _ in range(5):
                assert refuse(output) == before
        client.request("stop")
        client.close()
        process.wait(LIMIT_S)
