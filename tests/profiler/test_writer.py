import errno
import fcntl
import os
from pathlib import Path

import pytest

from lucid_profiler.reader import read_report
from lucid_profiler.records import End, Header, Kernels, Tool, link
from lucid_profiler.writer import Writer

HEADER = Header(
    id="1", created="2026-01-02T03:04:05Z", tool=Tool(name="lucid", version="1"), command=("x",), arms=(), pairs=1
)
KERNELS = Kernels(arm="a", status="not_started", table=None, reason="no_agent")


def _written(path: Path) -> tuple[int, str, int]:
    """Write a header, and return what continues it."""
    with Writer(path) as writer:
        writer.write(HEADER)
    line = path.read_bytes()
    return 1, link(line.removesuffix(b"\n")), len(line)


@pytest.mark.parametrize("tail", [b"", b'{"t": "ru', b"\x00" * 40])
def test_a_report_goes_on_behind_its_last_whole_record(tmp_path: Path, tail: bytes) -> None:
    """Numbers and links go on, what stood behind is gone, and the reader finds one chain."""
    path = tmp_path / "report.jsonl"
    seq, prev, num_bytes = _written(path)
    with path.open("ab") as file:
        file.write(tail)
    with Writer.append(path, seq=seq, prev=prev, num_bytes=num_bytes) as writer:
        writer.write(KERNELS)
        writer.write(End(status="complete", num_records=writer.num_records))
    report = read_report(path, allow_partial=False)
    assert report.kernels == (KERNELS,)
    assert report.warnings == ()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Without a reader it is an error at once; with one it takes the records."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="nobody reads what is written there") as error:
        Writer(path, overwrite=True)
    assert error.value.filename == str(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with Writer(path, overwrite=True) as writer:
        writer.write(HEADER)
    assert os.read(reader, 1 << 16).endswith(b"\n")
    os.close(reader)


def test_a_line_end_that_is_missing_is_added(tmp_path: Path) -> None:
    """The record before it is whole and stays."""
    path = tmp_path / "report.jsonl"
    seq, prev, num_bytes = _written(path)
    os.truncate(path, num_bytes - 1)
    with Writer.append(path, seq=seq, prev=prev, num_bytes=num_bytes - 1) as writer:
        writer.write(KERNELS)
    assert read_report(path).kernels == (KERNELS,)


def test_two_writers_do_not_write_one_report(tmp_path: Path) -> None:
    """The second one is refused while the first is open, whoever made it, and cuts nothing off."""
    path = tmp_path / "report.jsonl"
    seq, prev, num_bytes = _written(path)
    with Writer.append(path, seq=seq, prev=prev, num_bytes=num_bytes) as first:
        first.write(KERNELS)
        with pytest.raises(BlockingIOError, match="another process is writing the report"):
            Writer.append(path, seq=seq, prev=prev, num_bytes=num_bytes)
    assert read_report(path).kernels == (KERNELS,)


def test_a_report_that_is_not_there_does_not_go_on(tmp_path: Path) -> None:
    """No file is made for it."""
    with pytest.raises(FileNotFoundError):
        Writer.append(tmp_path / "report.jsonl", seq=1, prev="", num_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_is_being_written_is_not_overwritten(tmp_path: Path) -> None:
    """The second writer is refused and empties nothing; once the first is closed it may."""
    path = tmp_path / "report.jsonl"
    with Writer(path) as first:
        first.write(HEADER)
        before = path.read_bytes()
        with pytest.raises(BlockingIOError, match="another process is writing the report"):
            Writer(path, overwrite=True)
        assert path.read_bytes() == before
    Writer(path, overwrite=True).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_where_there_are_no_locks_reports_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """New ones, ones that replace others, and ones that go on."""

    def flock(_fd: int, _operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "report.jsonl"
    path.write_text("mine")
    with Writer(path, overwrite=True) as writer:
        writer.write(HEADER)
    line = path.read_bytes()
    with Writer.append(path, seq=1, prev=link(line.removesuffix(b"\n")), num_bytes=len(line)) as writer:
        writer.write(KERNELS)
    assert read_report(path).kernels == (KERNELS,)


def test_several_may_write_to_a_device(tmp_path: Path) -> None:
    """Nothing of another's is lost there."""
    with Writer(os.devnull, overwrite=True) as first, Writer(os.devnull, overwrite=True) as second:
        first.write(HEADER)
        second.write(HEADER)
        assert (first.lost(), second.lost()) == (None, None)


def test_a_report_knows_that_it_was_moved_or_deleted(tmp_path: Path) -> None:
    """Under its name and under a link to it it is there; under another name it is found, and replaced it is lost."""
    path, link_to_it, elsewhere = tmp_path / "report.jsonl", tmp_path / "link.jsonl", tmp_path / "moved.jsonl"
    link_to_it.symlink_to(path)
    with Writer(link_to_it, overwrite=True) as writer:
        assert writer.lost() is None
        path.rename(elsewhere)
        assert str(writer.lost()).startswith("the report was moved while it was being written")
        path.write_text("another")
        elsewhere.unlink()
        assert writer.lost() == "the report was deleted or replaced while it was being written; its records are lost"
