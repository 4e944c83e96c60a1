"""The agent's journal on a disk that is full: lines are lost and counted, never glued together."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
