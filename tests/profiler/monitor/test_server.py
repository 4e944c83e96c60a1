import fcntl
import os
import selectors
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.jsonio import MAX_DEPTH
from lucid_profiler.monitor.address import (
    MAX_SOCKET_PATH_BYTES,
    Lock,
    holder,
    lock_path,
    make_private,
    runtime_directory,
    socket_path,
)
from lucid_profiler.monitor.protocol import MAX_FRAME_BYTES, Decoder, encode
from lucid_profiler.monitor.server import CLIENT_LIMIT_NS, MAX_CLIENTS, MAX_REQUESTS, Server
from support.clock import ManualClock


class Loop:
    """A server with the loop that a daemon would have around it, one step at a time."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.selector = selectors.DefaultSelector()
        self.requests: list[dict[str, Any]] = []
        self.trusted_ends = 0
        self.server = Server(self.selector, self._handle, mono_ns=self.clock.mono_ns, on_trusted_end=self._on_end)
        self.path = path
        self.server.listen(path)

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        return {"ok": True, "echo": request}

    def _on_end(self) -> None:
        self.trusted_ends += 1

    def step(self, num: int = 1) -> None:
        for _ in range(num):
            for key, _ in self.selector.select(0.005):
                key.data()
            self.server.catch_up()
            self.server.expire(self.clock.mono)

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(5)
        client.connect(str(self.path))
        return client

    def ask(self, client: socket.socket, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request; None where the connection is closed instead."""
        client.sendall(encode(request))
        self.step(3)
        return receive(client)


def receive(client: socket.socket) -> dict[str, Any] | None:
    """Return the next message; None where the connection is closed instead."""
    decoder = Decoder()
    while (message := decoder.next()) is None:
        try:
            data = client.recv(65536)
        except ConnectionResetError:
            return None
        if not data:
            return None
        decoder.feed(data)
    return message


def is_closed(client: socket.socket) -> bool:
    """Return whether the other side has closed the connection."""
    client.setblocking(False)
    try:
        while client.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    """Give a server that listens."""
    made = Loop(tmp_path / "s")
    yield made
    made.server.close()
    made.selector.close()


def test_a_request_gets_one_answer(loop: Loop) -> None:
    """Several requests on one connection are answered in order."""
    with loop.connect() as client:
        for number in range(3):
            assert loop.ask(client, {"n": number}) == {"ok": True, "echo": {"n": number}}


def test_requests_may_come_together(loop: Loop) -> None:
    """Frames that arrive in one piece are answered one by one."""
    with loop.connect() as client:
        client.sendall(encode({"n": 1}) + encode({"n": 2})[:5])
        loop.step(3)
        client.sendall(encode({"n": 2})[5:])
        loop.step(3)
        assert loop.requests == [{"n": 1}, {"n": 2}]


def test_a_client_that_sends_nothing_is_closed_after_a_second(loop: Loop) -> None:
    """Others are served meanwhile."""
    with loop.connect() as silent, loop.connect() as client:
        loop.step(3)
        loop.clock.pass_ns(CLIENT_LIMIT_NS - 1)
        assert loop.ask(client, {"n": 1}) is not None
        assert not is_closed(silent)
        assert loop.server.next_deadline_ns == loop.clock.mono + 1
        loop.clock.pass_ns(1)
        loop.step()
        assert is_closed(silent)
        assert not is_closed(client)


def test_a_client_is_not_closed_for_what_the_server_was_late_with(loop: Loop) -> None:
    """Its request arrives in time, and nobody looks for three seconds; it is answered, and has another second then."""
    with loop.connect() as client, loop.connect() as silent:
        loop.step(3)
        client.sendall(encode({"n": 1}))
        loop.clock.pass_ns(3 * CLIENT_LIMIT_NS)
        loop.server.expire(loop.clock.mono)
        assert not loop.requests
        assert loop.ask(client, {"n": 2}) == {"ok": True, "echo": {"n": 1}}
        assert is_closed(silent)
        assert not is_closed(client)


def test_half_a_request_gets_time_once(loop: Loop) -> None:
    """A byte at each end of the time would else keep a client for ever."""
    with loop.connect() as client:
        loop.step(3)
        for byte in encode({"n": 1})[:3]:
            with suppress(BrokenPipeError):
                client.sendall(bytes([byte]))
            loop.clock.pass_ns(CLIENT_LIMIT_NS)
            loop.server.expire(loop.clock.mono)
            loop.step()
        assert is_closed(client)


def test_requests_of_many_clients_are_answered_in_turn(loop: Loop) -> None:
    """One that sends sixty at once does not make another wait for all of them."""
    with loop.connect() as flood, loop.connect() as client:
        loop.step(3)
        flood.sendall(b"".join(encode({"flood": number}) for number in range(60)))
        client.sendall(encode({"n": 1}))
        loop.step(3)
        assert {"n": 1} in loop.requests[:8]
        loop.step(60)
        assert [one for one in loop.requests if "flood" in one] == [{"flood": number} for number in range(60)]
        assert not loop.server.is_behind


def test_a_client_that_sends_half_a_frame_is_closed_after_a_second(loop: Loop) -> None:
    """More bytes of the same frame do not buy more time."""
    with loop.connect() as client:
        frame = encode({"n": 1})
        for byte in frame[:-1]:
            client.sendall(bytes([byte]))
            loop.step(2)
            loop.clock.pass_ns(CLIENT_LIMIT_NS // len(frame) + 1)
        loop.clock.pass_ns(CLIENT_LIMIT_NS // 5)
        loop.step()
        assert is_closed(client)
        assert not loop.requests


def test_a_client_that_never_reads_is_not_waited_for(loop: Loop) -> None:
    """It gets no second answer before the first is taken, and is closed after a second."""
    with loop.connect() as deaf, loop.connect() as client:
        deaf.setblocking(False)
        frame = encode({"x": "y" * (MAX_FRAME_BYTES - 100)})
        for _ in range(40):
            try:
                deaf.send(frame)
            except BlockingIOError:
                break
            loop.step(2)
        num_answered = len(loop.requests)
        loop.step(5)
        assert len(loop.requests) == num_answered < MAX_REQUESTS
        assert loop.ask(client, {"n": 1}) is not None
        loop.clock.pass_ns(CLIENT_LIMIT_NS)
        loop.step()
        assert loop.server.next_deadline_ns is None


def test_a_client_that_floods_is_closed(loop: Loop) -> None:
    """One connection may ask sixty-four times."""
    with loop.connect() as client:
        client.sendall(encode({"n": 1}) * (MAX_REQUESTS + 10))
        loop.step(MAX_REQUESTS + 10)
        assert len(loop.requests) == MAX_REQUESTS
        assert is_closed(client)


def test_more_clients_than_there_is_room_for_are_closed(loop: Loop) -> None:
    """Descriptors stay bounded, and when the others are gone there is room again."""
    clients = []
    for _ in range(MAX_CLIENTS + 1):
        clients.append(loop.connect())
        loop.step()
    assert [is_closed(client) for client in clients] == [False] * MAX_CLIENTS + [True]
    for client in clients:
        client.close()
    loop.step(MAX_CLIENTS)
    with loop.connect() as client:
        assert loop.ask(client, {"n": 1}) is not None


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, b"\0\0\0\x02[]", b"\0\0\0\0"])
def test_a_client_that_speaks_something_else_is_closed(loop: Loop, data: bytes) -> None:
    """Nothing is guessed."""
    with loop.connect() as client:
        client.sendall(data)
        loop.step(3)
        assert is_closed(client)
        assert not loop.requests


def test_a_client_that_goes_away_leaves_nothing(loop: Loop) -> None:
    """Before, in the middle of and after a request."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for data in (b"", encode({"n": 1})[:7], encode({"n": 1})):
        client = loop.connect()
        client.sendall(data)
        client.close()
        loop.step(4)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("is_trusted", [False, True])
def test_an_answer_that_cannot_be_sent_is_refused_and_ends_nothing(loop: Loop, *, is_trusted: bool) -> None:
    """Too long or too deep for a frame: the connection goes on, also the launcher's, whose end would end all."""
    too_deep: list[Any] = []
    for _ in range(MAX_DEPTH - 2):
        too_deep = [too_deep]
    ours, theirs = socket.socketpair()
    if is_trusted:
        loop.server.adopt(theirs)
    with ours, theirs, ours if is_trusted else loop.connect() as client:
        client.settimeout(5)
        for request in ({"x": "y" * (MAX_FRAME_BYTES - 20)}, {"x": too_deep}):
            answer = loop.ask(client, request)
            assert answer is not None
            assert answer["ok"] is False
            assert answer["error"].startswith("the answer cannot be sent: ")
            assert loop.ask(client, {"n": 1}) == {"ok": True, "echo": {"n": 1}}
        assert loop.trusted_ends == 0


def test_an_inherited_connection_has_no_limit_and_its_end_is_reported(loop: Loop) -> None:
    """It is the launcher's, whose end the daemon has to notice."""
    ours, theirs = socket.socketpair()
    loop.server.adopt(theirs)
    with ours:
        ours.settimeout(5)
        loop.clock.pass_ns(100 * CLIENT_LIMIT_NS)
        for number in range(MAX_REQUESTS + 10):
            assert loop.ask(ours, {"n": number}) is not None
        assert loop.trusted_ends == 0
    loop.step(2)
    assert loop.trusted_ends == 1


def test_the_socket_is_the_user_s_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    """Its mode is 0600, and nothing is left."""
    loop = Loop(tmp_path / "s")
    assert stat.S_IMODE(loop.path.stat().st_mode) == 0o600
    loop.server.close()
    loop.selector.close()
    assert not list(tmp_path.iterdir())


def test_a_socket_that_a_killed_daemon_left_is_replaced(tmp_path: Path) -> None:
    """Who holds the lock may take the name over."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "s"))
    loop = Loop(tmp_path / "s")
    with loop.connect() as client:
        assert loop.ask(client, {"n": 1}) is not None
    loop.server.close()
    loop.selector.close()


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    """The second is told whose it is; when it is released, the file is gone."""
    lock = Lock(tmp_path)
    with pytest.raises(EnvironmentUnusableError, match=f"a daemon runs already, process {os.getpid()}"):
        Lock(tmp_path)
    lock.release()
    assert not lock_path(tmp_path).exists()
    Lock(tmp_path).release()


def test_a_lock_file_that_a_killed_daemon_left_is_taken_over(tmp_path: Path) -> None:
    """The kernel has let go of the lock; a number in the file means nothing."""
    lock_path(tmp_path).write_text("1\n2345678901234567890")
    lock = Lock(tmp_path)
    assert lock_path(tmp_path).read_text() == f"{os.getpid()}\n"
    lock.release()


def test_whoever_looks_who_holds_a_lock_keeps_nobody_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look holds the file for a moment, in which a daemon may want it."""
    lock_path(tmp_path).write_text("1\n")
    looking = os.open(lock_path(tmp_path), os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda _seconds: os.close(looking))
    Lock(tmp_path).release()


def test_who_holds_a_lock_is_known(tmp_path: Path) -> None:
    """Nobody does where there is none, or where a killed daemon has left its file."""
    assert holder(tmp_path) is None
    lock = Lock(tmp_path)
    assert holder(tmp_path) == str(os.getpid())
    lock.release()
    assert holder(tmp_path) is None
    lock_path(tmp_path).write_text("1\n")
    assert holder(tmp_path) is None


def test_the_directory_lies_where_the_system_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_RUNTIME_DIR where it is absolute, else a directory of the user's own among the temporary ones."""
    assert runtime_directory({"XDG_RUNTIME_DIR": "/run/user/1"}) == Path("/run/user/1/lucid")
    monkeypatch.setattr("tempfile.tempdir", "/short")
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "relative"}):
        assert runtime_directory(environ) == Path(f"/short/lucid-{os.geteuid()}")


def test_a_name_too_long_for_a_socket_is_refused_with_a_remedy() -> None:
    """Deep directories are common; the system would say only that the path is too long."""
    rest = len("/lucid/monitor.sock")
    longest = "/" + "é" * ((MAX_SOCKET_PATH_BYTES - rest - 1) // 2)
    assert len(os.fsencode(socket_path(runtime_directory({"XDG_RUNTIME_DIR": longest})))) == MAX_SOCKET_PATH_BYTES - 1
    with pytest.raises(EnvironmentUnusableError, match="set XDG_RUNTIME_DIR to a directory with a shorter name"):
        runtime_directory({"XDG_RUNTIME_DIR": longest + "é"})


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    """Nor is a link followed, which somebody else could have made."""
    private, open_to_all, link = tmp_path / "private", tmp_path / "open", tmp_path / "link"
    make_private(private)
    make_private(private)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    link.symlink_to(private)
    for directory in (open_to_all, link):
        with pytest.raises(EnvironmentUnusableError, match="no directory that only this user can enter"):
            make_private(directory)
