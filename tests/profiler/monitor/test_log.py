import errno
import fcntl
import os
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lucid_profiler import jsonio
from lucid_profiler.errors import ReportError
from lucid_profiler.monitor.log import SYNC_PERIOD_NS, LogReader, LogWriter, read_log, rotated_parts
from lucid_profiler.monitor.records import (
    AnchorTaken,
    End,
    Event,
    Gap,
    Header,
    Mark,
    ReasonsChanged,
    Record,
    Sample,
    TargetExit,
    from_fields,
    to_fields,
)
from lucid_profiler.whole_lines import WholeLines
from support.clock import ManualClock
from support.memory import peak_bytes

UUID = "GPU-1"
WALL_NS = 1_700_000_000_000_000_001  # beyond 2**53


def make_header(part: int = 0) -> Header:
    """Return a header with everything that is hard to write down."""
    return Header(
        target={"pid": 7, "start_ticks": 2**60, "argv": ["python", "caf\udce9.py"]},
        started="2026-01-02T03:04:05.000Z",
        anchor={"mono_ns": 1, "wall_ns": WALL_NS, "boot_ns": 2, "uncertainty_ns": 3},
        interval_ns=100_000_000,
        tiers={"fast_ns": 100_000_000, "slow_ns": 1_000_000_000},
        devices=({"uuid": UUID, "name": "NVIDIA H200"},),
        memory_api="v2",
        reason=None,
        versions={"python": "3.12.1", "nvidia-ml-py": None},
        part=part,
    )


def make_sample(mono_ns: int) -> Sample:
    """Return a small sample of that time."""
    return Sample(
        mono_ns=mono_ns, late_ns=5, host={"rss_bytes": 1, "pss_bytes": None}, gpus={UUID: {"power_draw_mw": 2}}
    )


RECORDS: tuple[Record, ...] = (
    make_sample(10),
    ReasonsChanged(mono_ns=11, fields={"host.pss_bytes": "no_permission"}),
    Gap(begin_ns=1, end_ns=2, reason="late"),
    Gap(begin_ns=1, end_ns=2, reason="lost", device=UUID),
    AnchorTaken(mono_ns=12, wall_ns=WALL_NS, boot_ns=13, uncertainty_ns=1),
    Event(mono_ns=14, name="wall_step", data={"size_ns": -5}),
    Mark(mono_ns=15, name="fit\nbegin", energy_mj={UUID: None}, read_ns=16),
    Mark(mono_ns=15, name="fit end", energy_mj={UUID: 4}, read_ns=16, energy_ns={UUID: (15, 16)}),
    TargetExit(mono_ns=17, pid=7, status={"returncode": None, "signal": "SIGKILL"}),
    TargetExit(mono_ns=17, pid=7, status=None),
    End(
        mono_ns=18,
        num_samples=1,
        num_missed=0,
        late_ns={"median": 5, "p99": 5, "max": 5},
        gaps=({"begin_ns": 1, "end_ns": 2, "reason": "late"},),
        num_gaps=1,
        distinct={"host.rss_bytes": 1},
        own_cpu_s=0.25,
        wall_s=1.5,
        nvml_s=0.0,
        nvml_calls={"power_usage": {"num": 1, "total_ns": 2}},
        num_dropped_records=0,
        status="stopped",
        cadence={"tree": {"num": 3, "longest_ns": 7}},
        num_nvml_errors=2,
    ),
)


def open_log(path: Path, clock: ManualClock | None = None, **settings: Any) -> LogWriter:
    """Return a writer on a clock of its own."""
    return LogWriter(path, header=make_header, mono_ns=(clock or ManualClock()).mono_ns, **settings)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give the name of a log."""
    return tmp_path / "monitor.jsonl"


@pytest.fixture
def whole(path: Path) -> bytes:
    """Return the bytes of a log with one record of every kind."""
    log = open_log(path)
    written = [log.write(record) for record in RECORDS]
    assert all(written)
    log.close()
    return path.read_bytes()


def test_every_record_comes_back_as_it_was(path: Path, whole: bytes) -> None:
    """The log begins with a header, and each record is one line."""
    log = read_log(path)
    assert log.records == (make_header(), *RECORDS)
    assert (log.num_torn, log.num_unknown) == (0, 0)
    assert whole.count(b"\n") == len(RECORDS) + 1
    assert whole.endswith(b"\n")


def test_a_log_may_be_cut_anywhere(path: Path, whole: bytes) -> None:
    """Cut at every byte of its last four records, the whole ones are read and the torn one is counted."""
    lines = whole.splitlines(keepends=True)
    kept = len(b"".join(lines[:-4]))
    for size in range(kept, len(whole)):
        path.write_bytes(whole[:size])
        log = read_log(path)
        num_whole = whole[: size + 1].count(b"\n")  # a last line that lacks only its newline is whole
        assert log.records == (make_header(), *RECORDS)[:num_whole]
        is_between = whole[:size].endswith(b"\n") or whole[size : size + 1] == b"\n"
        assert log.num_torn == (not is_between)


def test_a_cut_log_is_continued_after_its_last_whole_line(path: Path, whole: bytes) -> None:
    """Whatever byte it was cut at, what is appended can be read."""
    last = len(whole.splitlines(keepends=True)[-1])
    for size in range(len(whole) - last, len(whole) + 1):
        path.write_bytes(whole[:size])
        log = open_log(path)
        log.write(make_sample(99))
        log.close()
        read = read_log(path)
        assert read.num_torn == 0
        assert read.records[-2:] == (make_header(), make_sample(99))
        assert len(read.records) == whole[:size].count(b"\n") + 2


def test_damage_before_the_last_line_is_an_error(path: Path, whole: bytes) -> None:
    """A reader that went on would give a wrong answer; the error names the line."""
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[3][: len(lines[3]) // 2] + b"\n", *lines[4:]]))
    with pytest.raises(ReportError, match=r"line 4: is damaged"):
        read_log(path)


def test_records_of_a_newer_version_are_counted(path: Path, whole: bytes) -> None:
    """A kind that this version does not know is left out, and fields that it does not know are too."""
    path.write_bytes(
        whole + b'{"kind":"weather","mono_ns":1}\n{"kind":"gap","begin_ns":1,"end_ns":2,"reason":"x","y":1}\n'
    )
    log = read_log(path)
    assert log.num_unknown == 1
    assert log.records[-1] == Gap(begin_ns=1, end_ns=2, reason="x")


@pytest.mark.parametrize(
    "fields", [None, [], {}, {"kind": 1}, {"kind": "gap"}, {"kind": "header", "schema": "other/9"}]
)
def test_what_is_no_record_is_refused(fields: Any) -> None:
    """A record without its fields, or of another schema, is not guessed at."""
    with pytest.raises(ValueError, match=r"object|missing|schema"):
        from_fields(fields)


def test_a_field_that_is_null_is_written() -> None:
    """Null says that something could not be read; it is not the same as absent."""
    assert to_fields(TargetExit(mono_ns=1, pid=2, status=None)) == {
        "kind": "target_exit",
        "mono_ns": 1,
        "pid": 2,
        "status": None,
    }


def write_parts(path: Path, num: int) -> None:
    """Write a log of so many samples in several parts."""
    log = open_log(path, max_part_bytes=50_000)
    for mono_ns in range(num):
        log.write(make_sample(mono_ns))
    log.close()


def test_a_reader_keeps_no_records(tmp_path: Path) -> None:
    """A log ten times as long is gone through in the same memory, and comes to the same records as when read whole."""
    short, long = tmp_path / "short.jsonl", tmp_path / "long.jsonl"
    write_parts(short, 2_000)
    write_parts(long, 20_000)
    assert len(rotated_parts(long)) > 10
    assert tuple(LogReader(long)) == read_log(long).records
    assert (
        peak_bytes(lambda: deque(LogReader(long), maxlen=0))
        < peak_bytes(lambda: deque(LogReader(short), maxlen=0)) + 16_384
        < 200_000
    )


def test_a_reader_gives_what_stands_before_damage(path: Path, whole: bytes) -> None:
    """Records come one by one; the error names the part and the line in it as that line is reached."""
    part = path.with_name("monitor.jsonl.0")
    lines = whole.splitlines(keepends=True)
    part.write_bytes(b"".join([*lines[:3], b"\n", lines[3][:9] + b"\n", *lines[4:]]))
    reader = iter(LogReader(path))
    assert [next(reader) for _ in range(3)] == [make_header(), *RECORDS[:2]]
    with pytest.raises(ReportError, match=r"monitor\.jsonl\.0: line 5: is damaged"):
        next(reader)


def test_a_torn_line_before_the_last_part_is_damage(path: Path, whole: bytes) -> None:
    """Only the file that was written last may end in the middle of a line."""
    path.with_name("monitor.jsonl.0").write_bytes(whole[:-5])
    path.write_bytes(whole)
    with pytest.raises(ReportError, match=rf"monitor\.jsonl\.0: line {len(RECORDS) + 1}: is damaged"):
        list(LogReader(path))


def test_a_reader_ends_at_a_line_that_is_being_written(path: Path, whole: bytes) -> None:
    """A log that grows meanwhile is not damaged: what has no newline when it is reached is the last line."""
    path.write_bytes(whole[:-1])
    reader = LogReader(path)
    records = iter(reader)
    assert [next(records) for _ in range(len(RECORDS) + 1)] == [make_header(), *RECORDS]
    with path.open("ab") as file:
        file.write(b"\n" + whole)
    assert list(records) == []
    assert len(list(reader)) == 2 * len(RECORDS) + 2
    assert reader.num_torn == 0


def test_no_log_at_all_is_an_error(path: Path) -> None:
    """The name of the file is in the message."""
    with pytest.raises(ReportError, match=r"monitor\.jsonl: cannot be read: No such file"):
        read_log(path)


def test_parts_are_set_aside_by_size_and_read_in_order(path: Path) -> None:
    """Each part begins with a header of its own and can be read alone."""
    log = open_log(path, max_part_bytes=2000)
    for index in range(100):
        assert log.write(make_sample(index))
    log.close()
    records = read_log(path).records
    assert [record.mono_ns for record in records if isinstance(record, Sample)] == list(range(100))
    parts = [record.part for record in records if isinstance(record, Header)]
    assert parts == list(range(len(parts)))
    assert len(parts) > 2
    assert (path.parent / "monitor.jsonl.0").stat().st_size < 2500
    assert isinstance(read_log(path.parent / "monitor.jsonl.0").records[0], Header)


def test_each_part_begins_with_the_reasons_that_hold(path: Path) -> None:
    """Read alone, a part says why its nulls are null; reasons are repeated with the time that they had, once a part."""
    log = open_log(path, max_part_bytes=2000)
    held = [ReasonsChanged(mono_ns=40 * time, fields={"host.pss_bytes": f"reason {time}"}) for time in range(3)]
    for mono_ns in range(100):
        assert mono_ns % 40 or log.write(held[mono_ns // 40])
        assert log.write(make_sample(mono_ns))
    log.close()
    parts = [read_log(part).records for _, part in rotated_parts(path)]
    parts.append(read_log(path).records[sum(map(len, parts)) :])
    assert len(parts) > 5
    for records in parts:
        assert isinstance(records[0], Header)
        assert isinstance(records[1], ReasonsChanged)
        holding = None
        for record in records[1:]:
            holding = record if isinstance(record, ReasonsChanged) else holding
            assert not isinstance(record, Sample) or holding == held[record.mono_ns // 40]
    changes = [record for records in parts for record in records if isinstance(record, ReasonsChanged)]
    assert len(changes) <= len(parts) + len(held)
    assert changes == sorted(changes, key=lambda change: change.mono_ns)


def test_a_part_begins_with_the_reasons_once_the_disk_takes_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full after the new part's header costs the records until then, not the reasons."""
    log = open_log(path, max_part_bytes=len(jsonio.dumps(to_fields(make_header()))) + 10)
    why = ReasonsChanged(mono_ns=1, fields={"host.pss_bytes": "no_permission"})
    assert log.write(why)
    append, log_ns = WholeLines.append, ManualClock().mono_ns()

    def refuse_all_but_headers(lines: WholeLines, line: bytes) -> None:
        if b'"header"' not in line:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(lines, line)

    with monkeypatch.context() as full:
        full.setattr(WholeLines, "append", refuse_all_but_headers)
        assert not log.write(make_sample(2))
    assert log.write(make_sample(3))
    log.close()
    gap = Gap(begin_ns=log_ns, end_ns=log_ns, reason="disk_full", num_records=1)
    assert read_log(path.with_name("monitor.jsonl.1")).records == (make_header(1), why, gap, make_sample(3))


def test_a_log_whose_writer_died_between_two_parts_is_read(path: Path, whole: bytes) -> None:
    """The full part was set aside and the next one not begun: all that was written is there, and it is continued."""
    path.rename(path.with_name("monitor.jsonl.0"))
    assert read_log(path).records == (make_header(), *RECORDS)
    log = open_log(path)
    log.write(make_sample(99))
    log.close()
    assert read_log(path).records == (make_header(), *RECORDS, make_header(1), make_sample(99))
    assert path.with_name("monitor.jsonl.0").read_bytes() == whole


def test_the_oldest_parts_are_removed_and_counted(path: Path) -> None:
    """A log has an end; what was removed is not silently missing."""
    log = open_log(path, max_part_bytes=2000, max_parts=3)
    for index in range(200):
        log.write(make_sample(index))
    log.close()
    assert len(list(path.parent.iterdir())) == 3
    records = read_log(path).records
    num_headers = records[-1 - [isinstance(record, Header) for record in reversed(records)].index(True)]
    assert isinstance(num_headers, Header)
    assert log.num_dropped == 200 + num_headers.part + 1 - len(records)
    assert records[-1] == make_sample(199)


def test_two_monitors_do_not_write_one_log(path: Path) -> None:
    """The second is refused; it would cut what the first has not finished."""
    log = open_log(path)
    with pytest.raises(OSError, match="another monitor writes to it"):
        open_log(path)
    log.close()
    open_log(path).close()


@pytest.mark.parametrize("name", ["20240101", "00", "x", "1x", "٣"])
def test_a_file_of_somebody_else_is_no_part(path: Path, name: str) -> None:
    """It is neither read nor removed, whatever its name ends in."""
    other = path.with_name(f"{path.name}.{name}")
    other.write_text("keep")
    log = open_log(path, max_part_bytes=2000, max_parts=2)
    for index in range(100):
        log.write(make_sample(index))
    log.close()
    assert other.read_text() == "keep"
    assert read_log(path).records[-1] == make_sample(99)


def test_a_file_system_without_locks_takes_a_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There two monitors are not told apart; none would be worse."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    log = open_log(path)
    assert log.write(make_sample(1))
    log.close()
    assert read_log(path).records[-1] == make_sample(1)


def test_a_log_that_was_deleted_is_noticed(path: Path) -> None:
    """What is written to it is nowhere."""
    log = open_log(path)
    assert not log.is_removed()
    path.unlink()
    assert log.is_removed()
    log.close()
    assert not log.is_removed()


@pytest.mark.parametrize("name", ["missing/monitor.jsonl", "."])
def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path, name: str) -> None:
    """Whoever asks for a monitor learns at once that there is no log."""
    with pytest.raises(OSError, match=r"No such file|Is a directory"):
        open_log(tmp_path / name)


def test_what_was_written_reaches_the_disk_every_five_seconds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing at every record would cost more than the records."""
    clock = ManualClock()
    log = open_log(path, clock)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for _ in range(100):
        clock.pass_ns(SYNC_PERIOD_NS // 10)
        log.sync(is_due_only=True)
    assert len(synced) == 10


def test_a_device_that_takes_nothing_costs_only_records() -> None:
    """Without any room, not even for the header, every record is counted."""
    log = open_log(Path("/dev/full"))
    for index in range(10):
        assert not log.write(make_sample(index))
    log.close()
    assert log.num_dropped == 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 KiB, where that is allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_records_and_comes_back(small_disk: Path) -> None:
    """While there is no room records are dropped and counted; afterwards a gap says how many, and all can be read."""
    clock = ManualClock()
    told: list[Gap] = []
    log = open_log(small_disk / "monitor.jsonl", clock, on_gap=told.append)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 40_000)
    written = []
    for index in range(1000):
        clock.pass_s(0.1)
        if log.write(make_sample(index)):
            written.append(index)
    assert 0 < len(written) < 1000
    assert written == list(range(len(written)))
    assert log.num_dropped == 1000 - len(written)
    ballast.unlink()
    assert log.write(make_sample(1000))
    log.close()
    read = read_log(small_disk / "monitor.jsonl")
    assert read.num_torn == 0
    assert [record.mono_ns for record in read.records if isinstance(record, Sample)] == [*written, 1000]
    gaps = [record for record in read.records if isinstance(record, Gap)]
    assert {gap.reason for gap in gaps} == {"disk_full"}
    assert sum(gap.num_records or 0 for gap in gaps) == 1000 - len(written)
    assert told == gaps


def test_a_limit_of_file_size_is_like_a_full_disk(path: Path) -> None:
    """EFBIG does not end the monitor either, and the half line that fitted is taken back."""
    script = textwrap.dedent(
        """
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from profiler.monitor.test_log import make_sample, open_log
        sys.dont_write_bytecode = True  # half a compiled module would stay for the tests after this one
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        log = open_log(Path(sys.argv[1]))
        num = sum(log.write(make_sample(index)) for index in range(100))
        full = num, log.num_dropped
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.write(make_sample(100))
        log.close()
        print(*full)
        """
    )
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(tests)], capture_output=True, text=True, check=True
    )
    num_written, num_dropped = map(int, done.stdout.split())
    assert num_written + num_dropped == 100
    assert num_written > 0
    assert num_dropped > 0
    read = read_log(path)
    assert read.num_torn == 0
    assert read.records[-1] == make_sample(100)
    assert read.records[-2] == Gap(begin_ns=5 * 10**9, end_ns=5 * 10**9, reason="disk_full", num_records=num_dropped)
