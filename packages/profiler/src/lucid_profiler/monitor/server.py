"""The control socket inside the daemon's loop: no client can hold up the sampling, whatever it sends or does not read.

A client has one second for each request, is read in pieces of bounded size, gets one answer at a time, and is closed
when it breaks a rule. What it has done in time counts as that, also where the daemon comes to it later.
"""

import os
import select
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lucid_profiler.monitor.protocol import Decoder, ProtocolError, encode_answer

CLIENT_LIMIT_NS = 1_000_000_000
MAX_CLIENTS = 16
MAX_REQUESTS = 64  # of one connection
_PIECE_BYTES = 64 << 10
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: https://man7.org/linux/man-pages/man7/unix.7.html

__all__ = ["CLIENT_LIMIT_NS", "MAX_CLIENTS", "MAX_REQUESTS", "Server"]

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class _Client:
    """One connection. A trusted one was inherited: it has no limit of time or number, and its end is reported."""

    def __init__(self, connection: socket.socket, *, deadline_ns: int | None) -> None:
        self.socket = connection
        self.deadline_ns = deadline_ns
        self.decoder = Decoder()
        self.unsent = b""
        self.num_requests = 0
        self.has_grace = True  # once for each request: this process may be the one that was late

    @property
    def is_trusted(self) -> bool:
        return self.deadline_ns is None

    def is_late(self, now_ns: int) -> bool:
        return self.deadline_ns is not None and now_ns >= self.deadline_ns


class Server:
    """Answers requests on sockets that a selector watches; whoever owns the selector calls what it selects.

    Args:
        selector: the `data` of a key is called without arguments when its file is ready.
        handle: takes a request, returns the answer.
        mono_ns: the monotonic clock.
        on_trusted_end: called when the other end of an inherited connection is gone.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        handle: Handler,
        *,
        mono_ns: Callable[[], int],
        on_trusted_end: Callable[[], None],
    ) -> None:
        self._selector = selector
        self._handle = handle
        self._mono_ns = mono_ns
        self._on_trusted_end = on_trusted_end
        self._clients: set[_Client] = set()
        self._waiting: deque[_Client] = deque()  # those of which more has arrived than was answered
        self._listener: socket.socket | None = None
        self._path: Path | None = None

    @property
    def next_deadline_ns(self) -> int | None:
        """When the next client runs out of time; None without such clients."""
        return min((client.deadline_ns for client in self._clients if client.deadline_ns is not None), default=None)

    @property
    def is_behind(self) -> bool:
        """Whether requests may have arrived of which no file tells."""
        return bool(self._waiting)

    def catch_up(self) -> None:
        """Answer one request of those that have arrived already."""
        if self._waiting:
            client = self._waiting.popleft()
            if client in self._clients:
                self._attempt(client, self._answer)

    def listen(self, path: Path) -> None:
        """Accept connections at this name; a socket that is there belongs to nobody any more and is replaced.

        Raises:
            OSError: there can be no socket of that name.
        """
        with suppress(FileNotFoundError):
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(path))
            path.chmod(0o600)
            listener.listen(MAX_CLIENTS)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listener, self._path = listener, path
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def adopt(self, connection: socket.socket) -> None:
        """Answer the requests of an inherited connection."""
        self._add(connection, deadline_ns=None)

    def expire(self, now_ns: int) -> None:
        """Close the clients that have run out of time; one that waits for this process gets as much once more."""
        for client in [client for client in self._clients if client.is_late(now_ns)]:
            if client.has_grace and (client in self._waiting or _is_ready(client)):
                client.has_grace = False
                client.deadline_ns = now_ns + CLIENT_LIMIT_NS
            else:
                self._close(client)

    def stop_listening(self) -> None:
        """Remove the socket's name; who is connected stays so."""
        if self._listener is not None and self._path is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            with suppress(FileNotFoundError):
                self._path.unlink()
            self._listener = None

    def close(self) -> None:
        """Remove the socket's name and close all connections."""
        self.stop_listening()
        for client in list(self._clients):
            self._clients.discard(client)
            self._selector.unregister(client.socket)
            client.socket.close()

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._clients) >= MAX_CLIENTS or _peer_uid(connection) not in {os.geteuid(), 0}:
            connection.close()
            return
        self._add(connection, deadline_ns=self._mono_ns() + CLIENT_LIMIT_NS)

    def _add(self, connection: socket.socket, *, deadline_ns: int | None) -> None:
        connection.setblocking(False)
        client = _Client(connection, deadline_ns=deadline_ns)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._serve(client))

    def _serve(self, client: _Client) -> None:
        """Go on with a client whose socket can be read or written."""
        self._attempt(client, self._exchange)

    def _attempt(self, client: _Client, serve: Callable[[_Client], None]) -> None:
        try:
            serve(client)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self._close(client)

    def _exchange(self, client: _Client) -> None:
        if client in self._waiting:
            return  # what has arrived is answered first
        if client.unsent:
            self._send(client)
        else:
            data = client.socket.recv(_PIECE_BYTES)
            if not data:
                self._close(client)
                return
            client.decoder.feed(data)
        self._answer(client)

    def _answer(self, client: _Client) -> None:
        """Answer one request, if one has arrived whole and the client has taken the last answer."""
        if client.unsent or (request := client.decoder.next()) is None:
            return
        client.num_requests += 1
        answer = self._handle(request)
        self._give_time(client)
        client.unsent = encode_answer(answer)
        self._send(client)
        if client.num_requests >= MAX_REQUESTS and not client.is_trusted:
            self._close(client)
        elif not client.decoder.is_empty and not client.unsent:
            self._waiting.append(client)

    def _send(self, client: _Client) -> None:
        with suppress(BlockingIOError):
            client.unsent = client.unsent[client.socket.send(client.unsent) :]
        if not client.unsent:
            self._give_time(client)
        wanted = selectors.EVENT_WRITE if client.unsent else selectors.EVENT_READ
        self._selector.modify(client.socket, wanted, lambda: self._serve(client))

    def _give_time(self, client: _Client) -> None:
        if client.deadline_ns is not None:
            client.deadline_ns = self._mono_ns() + CLIENT_LIMIT_NS
            client.has_grace = True

    def _close(self, client: _Client) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._selector.unregister(client.socket)
        client.socket.close()
        if client.is_trusted:
            self._on_trusted_end()


def _is_ready(client: _Client) -> bool:
    """Return whether a client has sent something, or taken what it was sent, that nobody has looked at yet."""
    poll = select.poll()
    poll.register(client.socket, select.POLLOUT if client.unsent else select.POLLIN)
    return bool(poll.poll(0))


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return int(uid)
