"""The agent's journal, on a full disk too, and what it does with faults that are not its own."""

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from lucid_profiler.entries import EndEntry, FitEntry, NoteEntry
from lucid_profiler.hooks import TorchHooks
from lucid_profiler.journal import Guard, Journal
from lucid_profiler.session import ProcessSession
from lucid_profiler.traces import ProcessTrace, read_traces


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes: the kernel writes what fits and then refuses, as on a full disk."""
    limits, compiles = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # half a compiled module would stay for the tests after this one
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = compiles


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give the name of a journal."""
    return tmp_path / "agent-7.jsonl"


def read(path: Path) -> ProcessTrace:
    """Return what a reader makes of a journal."""
    (trace,) = read_traces(path.parent)
    return trace


def test_a_line_that_does_not_fit_takes_no_other_with_it(path: Path) -> None:
    """What was written of it is cut off, so that the lines after it are read."""
    journal = Journal(path)
    journal.write("note", text="one")
    with room_for(path.stat().st_size + 20), pytest.raises(OSError, match="No space left"):
        journal.write("note", text="two" * 20)
    journal.write("fit", begin_ns=1, end_ns=2)
    journal.close()
    trace = read(path)
    assert trace.faults == ()
    assert [note.text for note in trace.all(NoteEntry)] == ["one"]
    assert trace.all(FitEntry) == [FitEntry(begin_ns=1, end_ns=2)]


def test_a_piece_that_cannot_be_cut_off_at_once_goes_before_the_next_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems refuse to cut while they are full."""
    journal = Journal(path)
    journal.write("note", text="one")
    with room_for(path.stat().st_size + 20), monkeypatch.context() as full:
        full.setattr(os, "ftruncate", _refuse)
        with pytest.raises(OSError, match="No space left"):
            journal.write("note", text="two" * 20)
    journal.write("fit", begin_ns=1, end_ns=2)
    journal.close()
    assert read(path).faults == ()
    assert read(path).all(FitEntry) == [FitEntry(begin_ns=1, end_ns=2)]


def _refuse(_fd: int, _length: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_entry_is_one_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed leaves whole lines."""
    sizes: list[int] = []
    write = os.write

    def count(fd: int, line: bytes) -> int:
        sizes.append(len(line))
        return write(fd, line)

    monkeypatch.setattr(os, "write", count)
    journal = Journal(path)
    journal.write("note", text="a" * 1_000_000)
    journal.close()
    assert sizes == [path.stat().st_size]


def test_a_full_disk_reaches_no_program_and_is_counted(tmp_path: Path) -> None:
    """The end says how many lines are missing."""
    guard = Guard()
    hooks = TorchHooks(tmp_path / "steps-7.ring", guard=guard)
    session = ProcessSession(tmp_path, hooks=hooks, guard=guard, environ={})
    with room_for(0):
        session.note("lost")
        with session.fit():
            pass
    session.finish()
    (trace,) = read_traces(tmp_path)
    end = trace.last(EndEntry)
    assert end is not None
    assert (end.num_errors, [error[:7] for error in end.errors]) == (2, ["OSError"])
    assert trace.faults == ()


def test_a_journal_that_writes_nothing_loads_no_json() -> None:
    """A program that records nothing pays for nothing."""
    script = (
        "import sys, pathlib; from lucid_profiler.journal import Journal; Journal(pathlib.Path('x')).close(); "
        "assert not {'orjson', 'json', 'lucid_profiler.jsonio'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_descriptor_that_is_the_program_s_by_now_is_not_written_to(path: Path, tmp_path: Path) -> None:
    """A program may close what it did not open, as one that becomes a daemon does, and open files of its own."""
    journal = Journal(path)
    journal.write("fit", begin_ns=1, end_ns=2)
    fd = journal._fd
    assert fd is not None
    os.close(fd)
    own = os.open(tmp_path / "own.txt", os.O_WRONLY | os.O_CREAT)
    assert own == fd
    try:
        os.write(own, b"mine")
        journal.write("note", text="one")
        assert (tmp_path / "own.txt").read_bytes() == b"mine"
        assert os.fstat(own).st_size == 4  # and it is open
    finally:
        os.close(own)
    journal.write("note", text="two")
    journal.close()
    trace = read(path)
    assert trace.all(FitEntry) == [FitEntry(begin_ns=1, end_ns=2)]
    assert [note.text for note in trace.all(NoteEntry)] == ["one", "two"]


def test_a_closed_journal_closes_nobody_else_s_descriptor(path: Path, tmp_path: Path) -> None:
    """The number may have been given to another file."""
    journal = Journal(path)
    journal.write("note", text="one")
    assert journal._fd is not None
    os.close(journal._fd)
    with (tmp_path / "own.txt").open("wb") as own:
        assert own.fileno() == journal._fd
        journal.close()
        own.write(b"mine")
    assert (tmp_path / "own.txt").read_bytes() == b"mine"


class Preempted(Exception):  # noqa: N818 - it is no error
    """What a handler raises to end what the program is doing."""


def _plainly(_number: int, _frame: FrameType | None) -> None:
    raise Preempted


def _by_stars(*_: object) -> None:
    raise Preempted


class _Handler:
    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.end()

    def end(self) -> None:
        raise Preempted


def _without_arguments(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise Preempted


def _from_elsewhere(_number: int, frame: FrameType | None) -> None:
    while frame is not None:
        frame = frame.f_back
    raise Preempted


@pytest.mark.parametrize(
    "handler",
    [
        _plainly,
        _by_stars,
        _without_arguments,
        _from_elsewhere,
        partial(_without_arguments),
        _Handler(),
        _Handler().__call__,
        partial(_plainly),
        lambda number, frame: _plainly(7, None),
    ],
    ids=["function", "stars", "dropped", "walked", "dropped by a partial", "object", "method", "partial", "lambda"],
)
def test_what_a_signal_s_handler_raises_goes_to_the_program(handler: Any) -> None:
    """It only happens to run while the agent works; the fault is not the agent's."""
    guard = Guard()
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Preempted), guard:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (guard.num_errors, guard.errors) == (0, [])


def test_a_fault_below_a_handler_s_interruption_is_the_agent_s(path: Path) -> None:
    """A handler that returns leaves no trace in what fails afterwards."""
    guard = Guard()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with guard:
            signal.raise_signal(signal.SIGUSR1)
            raise ValueError(path.name)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert guard.errors == ["ValueError: agent-7.jsonl"]


def test_a_frame_among_the_variables_of_a_function_makes_no_handler_of_it() -> None:
    """Only one among its arguments does."""

    def fail() -> None:
        below = sys._getframe(1)
        raise ValueError(below.f_code.co_name)

    guard = Guard()
    with guard:
        fail()
    assert guard.num_errors == 1


@pytest.mark.parametrize("hook", ["before", "after"])
def test_a_handler_may_end_a_step_within_the_agent_s_hooks(path: Path, hook: str) -> None:
    """The exception comes out of the step, as it does where no agent is."""
    guard = Guard()
    hooks = TorchHooks(path.with_suffix(".ring"), guard=guard)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    (hooks.watch_begin if hook == "before" else hooks.watch)(interrupted)
    before = signal.signal(signal.SIGUSR1, _plainly)
    try:
        if hook == "after":
            hooks._before_step(optimizer, (optimizer,), {})
        with pytest.raises(Preempted):
            (hooks._before_step if hook == "before" else hooks._after_step)(optimizer, (optimizer,), {})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert guard.num_errors == 0


def test_a_handler_may_end_a_digest(path: Path) -> None:
    """Also with an exception of a kind that a digest knows as its own."""
    guard = Guard()
    session = ProcessSession(path.parent, hooks=TorchHooks(path.with_suffix(".ring"), guard=guard), guard=guard)

    class Interrupted:
        def state_dict(self) -> None:
            signal.raise_signal(signal.SIGUSR1)

    def preempt(_number: int, _frame: FrameType | None) -> None:
        raise RuntimeError("preempted")

    before = signal.signal(signal.SIGUSR1, preempt)
    try:
        with pytest.raises(RuntimeError, match="preempted"):
            session.state("model", Interrupted())
        with pytest.raises(RuntimeError, match="preempted"):
            session.loss(_Losing())
    finally:
        signal.signal(signal.SIGUSR1, before)
    session.deactivate()


class _Losing:
    def __float__(self) -> float:
        signal.raise_signal(signal.SIGUSR1)
        return 0.0
