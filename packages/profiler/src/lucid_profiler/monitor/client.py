"""The other end of the control socket: one request, one answer, never longer than it was told to wait."""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.address import socket_path
from lucid_profiler.monitor.protocol import Decoder, ProtocolError, encode
from lucid_profiler.monitor.records import SCHEMA

__all__ = ["Client", "connect"]

_PIECE_BYTES = 64 << 10
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: https://man7.org/linux/man-pages/man7/unix.7.html


class Client:
    """Asks a monitor over a connected socket, which it owns.

    Args:
        connection: the socket.
        timeout_s: longest time for one request and its answer.
    """

    def __init__(self, connection: socket.socket, *, timeout_s: float = 5.0) -> None:
        self._socket = connection
        self._timeout_s = timeout_s
        self._decoder = Decoder()
        self._num_requests = 0

    def request(self, verb: str, *, timeout_s: float | None = None, **fields: Any) -> Mapping[str, Any]:
        """Send a request and return the answer.

        Raises:
            EnvironmentUnusableError: the monitor refuses; its words are the message.
            OSError: the monitor is gone, or does not answer in time.
            ProtocolError: what answers is no monitor.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        self._limit(deadline)
        self._num_requests += 1
        self._socket.sendall(encode({"verb": verb, **fields, "id": self._num_requests}))
        while not self._is_awaited(answer := self._receive(deadline)):
            pass
        if answer.get("ok") is not True:
            raise EnvironmentUnusableError(str(answer.get("error", "the monitor refuses without a reason")))
        return {name: value for name, value in answer.items() if name != "id"}

    def wait_for_end(self, *, timeout_s: float) -> bool:
        """Wait until the monitor has closed the connection, as it does when its log is finished; return whether it has.

        Whatever it answers meanwhile is lost.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                self._limit(deadline)
                if not self._socket.recv(_PIECE_BYTES):
                    return True
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _is_awaited(self, answer: Mapping[str, Any]) -> bool:
        """Tell the answer to the last request from those to requests that ran out of time before."""
        # A monitor that cannot begin says so without having been asked.
        is_refusal = "id" not in answer and answer.get("ok") is not True
        return is_refusal or answer.get("id") == self._num_requests

    def _receive(self, deadline: float) -> Mapping[str, Any]:
        while (answer := self._decoder.next()) is None:
            self._limit(deadline)
            data = self._socket.recv(_PIECE_BYTES)
            if not data:
                raise ConnectionResetError("the monitor has closed the connection")
            self._decoder.feed(data)
        return answer

    def _limit(self, deadline: float) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the monitor does not answer")
        self._socket.settimeout(remaining_s)


def connect(directory: Path, *, timeout_s: float = 5.0) -> Client | None:
    """Return a connection to the daemon of a directory, which has said that it speaks this schema; None without one.

    Raises:
        EnvironmentUnusableError: it is of another version.
        OSError: it does not answer.
        ProtocolError: what answers is no monitor.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(os.fspath(socket_path(directory)))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError:
        connection.close()
        raise
    client = Client(connection, timeout_s=timeout_s)
    try:
        _check_peer(connection, directory)
        client.request("hello", schema=SCHEMA)
    except (OSError, ProtocolError, EnvironmentUnusableError):
        client.close()
        raise
    return client


def _check_peer(connection: socket.socket, directory: Path) -> None:
    """See that the other end belongs to this user: whoever made the directory first could answer anything.

    Raises:
        EnvironmentUnusableError: it belongs to somebody else.
    """
    if hasattr(socket, "SO_PEERCRED"):
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid not in {os.geteuid(), 0}:
            raise EnvironmentUnusableError(
                f"{socket_path(directory)} belongs to another user; remove {directory}, or set XDG_RUNTIME_DIR"
            )
