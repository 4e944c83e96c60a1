"""A standard error that is read slowly or by nobody: it holds up neither a run nor the end of lucid."""

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.harness import LIMIT_S, LUCID, Lucid, wait_for
from lucid_cli.child import run_child
from lucid_cli.interrupts import Interrupts
from lucid_cli.output import Outlet, never_waiting, outlet, say

RUN = ("profile", "run", "--pairs", "1", "--discard-pairs", "0", "--interval", "0", "--no-agent", "-o", "report.jsonl")
FLOOD = "head -c 3000000 /dev/zero"


def _socket() -> tuple[int, int]:
    ends = socket.socketpair()
    return ends[0].detach(), ends[1].detach()


Start = Callable[..., "subprocess.Popen[bytes]"]
READERS: dict[str, Callable[[], tuple[int, int]]] = {"pipe": os.pipe, "terminal": pty.openpty, "socket": _socket}


@pytest.fixture(params=READERS)
def unread(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Return what starts lucid with a standard error that nobody reads."""
    reading, writing = READERS[request.param]()
    started: list[subprocess.Popen[bytes]] = []

    def start(lucid: Lucid, *args: str) -> "subprocess.Popen[bytes]":
        started.append(
            subprocess.Popen(
                [LUCID, *args],
                cwd=lucid.directory,
                env={**lucid._env(), "TERM": "xterm"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=writing,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    os.close(reading)
    os.close(writing)


def test_the_time_limit_holds_although_nobody_reads(unread: Start, lucid: Lucid) -> None:
    """The command is not held up, ends at its limit, and lucid after it."""
    begin = time.monotonic()
    process = unread(lucid, *RUN, "-v", "--timeout", "1", "--", "sh", "-c", f"{FLOOD}; touch passed; sleep 60")
    assert process.wait(LIMIT_S) == 8
    assert time.monotonic() - begin < 30
    assert (lucid.directory / "passed").exists()
    assert '"status":"timeout"' in lucid.report.read_text()
    assert '"stdout_bytes":3000000' in lucid.report.read_text()


def test_the_second_ctrl_c_is_hard_although_nobody_reads(unread: Start, lucid: Lucid) -> None:
    """The report is closed as interrupted."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        script = f"trap 'touch heard' INT; {FLOOD}; touch begun; while :; do sleep 0.05; done"
        process = unread(lucid, *RUN, "-v", "--", "sh", "-c", script)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for(lucid.directory / "begun")
    process.send_signal(signal.SIGINT)
    wait_for(lucid.directory / "heard")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    assert '"status":"interrupted"' in lucid.report.read_text().splitlines()[-1]


def test_lucids_own_lines_wait_for_nobody(unread: Start, lucid: Lucid) -> None:
    """Lines of runs that have ended, and the last lines of those that failed, without -v."""
    script = "import sys; print(chr(10).join('x' * 20000 for _ in range(30))); sys.exit(3)"
    process = unread(lucid, *RUN, "--pairs", "3", "--keep-going", "--", sys.executable, "-c", script)
    assert process.wait(LIMIT_S) == 8
    assert '"status":"failed"' in lucid.report.read_text().splitlines()[-1]


def test_a_slow_reader_is_told_how_much_it_was_not_shown(lucid: Lucid) -> None:
    """What it is shown and what it is told of add up, in lines of their own where the gaps are."""
    process = lucid.start(*RUN, "-v", "--", "sh", "-c", FLOOD)
    assert process.stderr is not None
    shown = b""
    while data := os.read(process.stderr.fileno(), 20_000):
        shown += data
        time.sleep(0.01)
    process.communicate(timeout=LIMIT_S)
    told = re.findall(rb"^Warning: ([0-9]+) bytes are not shown: standard error was not read", shown, re.MULTILINE)
    assert told
    assert shown.count(b"\0") + sum(map(int, told)) == 2 * 3_000_000
    assert shown.count(b"\nrun ") == 2


def test_a_reader_that_keeps_up_is_shown_everything(lucid: Lucid) -> None:
    """More than may wait, in pieces of which each is more than a pipe holds and is read before the next is written."""
    pieces = 'for k in 1 2 3 4 5 6; do seq 1 70000; echo "read $$ $k"; until [ -e $$.$k ]; do sleep 0.01; done; done'
    process = lucid.start(*RUN, "-v", "--", "sh", "-c", pieces)
    assert process.stderr is not None
    num_last = num_read = 0
    for line in process.stderr:
        num_last += line == b"70000\n"
        if line.startswith(b"read "):
            num_read += 1
            _, pid, piece = line.decode().split()
            (lucid.directory / f"{pid}.{piece}").touch()
    process.communicate(timeout=LIMIT_S)
    assert (process.returncode, num_last, num_read) == (0, 12, 12)


def test_a_pipe_that_others_share_still_blocks_for_them() -> None:
    """What lucid was given keeps its flags."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "w") as stream:
        opened = Outlet(stream)
        assert not os.get_blocking(opened.fileno())
        assert os.get_blocking(writing)
        opened.put(b"x")
        assert opened.end(0.0) is None


def test_what_waits_is_bounded_and_ends_with_lucids_own_lines() -> None:
    """A program that has filled the memory leaves room for lines of lucid's; what finds none is counted."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "w") as stream:
        opened = Outlet(stream)
        opened.put(b"x" * (2 << 20))
        for _ in range(3):
            opened.write(b"a line\n")
        tail = b"Warning: 1048576 bytes are not shown: standard error was not read fast enough\n" + 3 * b"a line\n"
        assert opened._waiting.endswith(b"x\n" + tail)
        for _ in range(100_000):
            opened.write(b"a line\n")
        assert len(opened._waiting) <= (1 << 20) + (1 << 16)
        assert re.match("[0-9]{7} bytes are not shown", opened.end(0.0) or "")


def test_lines_come_in_their_order_and_whole(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever writes them, and with one way for all of them only as long as it lasts."""
    say("before")
    with never_waiting():
        say("inside")
        current = outlet()
        assert current is not None
        current.put(b"from a program\n")
        say("after it")
    assert outlet() is None
    say("afterwards")
    assert capfd.readouterr().err.splitlines() == ["before", "inside", "from a program", "after it", "afterwards"]


def test_a_thread_that_cannot_write_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another process may take the room in a pipe that cannot be opened once more."""
    blocked, released = threading.Event(), threading.Event()

    def write(self: Outlet) -> bool:
        blocked.set()
        released.wait(LIMIT_S)
        return False

    monkeypatch.setattr(Outlet, "_write", write)
    with (tmp_path / "err").open("w") as stream, monkeypatch.context() as patched, Interrupts() as interrupts:
        patched.setattr("lucid_cli.drain._STOP_LIMIT_S", 0.1)
        patched.setattr("lucid_cli.drain.outlet", lambda: Outlet(stream))
        begin = time.monotonic()
        ended = run_child(["echo", "x"], os.environ, interrupts=interrupts, copy_output=True)
        assert blocked.is_set()
        assert time.monotonic() - begin < 10
    released.set()
    assert (ended.returncode, ended.stdout_bytes) == (0, 2)


def test_lucids_own_lines_begin_on_lines_of_their_own() -> None:
    """Whatever the program has left open; what is still the program's goes on as it is."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as stream:
        opened = Outlet(stream)
        opened.put(b"half")
        opened.write(b"own\n")
        opened.put(b"a ")
        opened.put(b"line\n")
        opened.write(b"own ")
        opened.write(b"too\n")
        assert opened.end(0.0) is None
        stream.close()
        assert reader.read() == b"half\nown\na line\nown too\n"


def test_two_threads_lose_and_repeat_nothing() -> None:
    """While one writes, the other neither takes the same bytes nor removes those that were not written."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as stream:
            found: list[bytes] = []
            taking = threading.Thread(target=lambda: found.extend(reader))
            taking.start()
            opened = Outlet(stream)

            def write(name: str) -> None:
                for number in range(2000):
                    opened.write(f"{name} {number}\n".encode())

            threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert opened.end(5.0) is None
            stream.close()
            taking.join()
    finally:
        sys.setswitchinterval(before)
    assert sorted(found) == sorted(f"{name} {number}\n".encode() for name in "ab" for number in range(2000))
