import errno
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid_profiler.ring import RingTail, RingWriter, StepRecord, read_ring

SLOTS_OFFSET = 64
SLOT_BYTES = 32


def _record(number: int) -> StepRecord:
    return StepRecord(optimizer=number % 3, step=number, begin_ns=1000 * number + 1, end_ns=1000 * number + 500)


def _write(ring: RingWriter, record: StepRecord) -> None:
    ring.write(record.begin_ns, record.end_ns, record.optimizer, step=record.step)


@given(num=st.integers(0, 40), capacity=st.integers(1, 12))
def test_the_last_records_come_back_and_the_lost_ones_are_counted(
    tmp_path_factory: pytest.TempPathFactory, num: int, capacity: int
) -> None:
    """Whatever the number of records, the newest `capacity` of them are read in order."""
    path = tmp_path_factory.mktemp("ring") / "steps.ring"
    ring = RingWriter(path, capacity=capacity)
    for number in range(num):
        _write(ring, _record(number))
    trace = read_ring(path)
    assert trace.records == tuple(_record(number) for number in range(max(0, num - capacity), num))
    assert (trace.num_written, trace.num_overwritten, trace.num_torn) == (num, max(0, num - capacity), 0)
    assert trace.first_begin_ns == (1 if num else None)


@given(nums=st.lists(st.integers(0, 30), max_size=6), capacity=st.integers(1, 12))
def test_each_look_has_the_newest_steps(
    tmp_path_factory: pytest.TempPathFactory, nums: list[int], capacity: int
) -> None:
    """Of each optimizer that has stepped since the last one, wherever the file ends, unless newer ones replaced it."""
    path = tmp_path_factory.mktemp("ring") / "steps.ring"
    ring = RingWriter(path, capacity=capacity)
    tail = RingTail(path)
    num_written = 0
    for num in nums:
        new = [_record(number) for number in range(num_written, num_written + num)]
        for record in new:
            _write(ring, record)
        num_written += num
        assert tail.newest_steps() == {record.optimizer: record.step for record in new[-capacity:]}
        whole = [_record(number) for number in range(max(0, num_written - capacity), num_written)]
        assert tail.read(3) == whole[-3:]
        assert tail.first_begin_ns == (1 if num_written else None)


def test_a_record_cut_short_while_it_replaces_another_is_counted_as_torn(tmp_path: Path) -> None:
    """A slot whose sequence number was cleared is not taken for a record."""
    path = tmp_path / "steps.ring"
    ring = RingWriter(path, capacity=4)
    for number in range(6):
        _write(ring, _record(number))
    ring.close()
    data = bytearray(path.read_bytes())
    third = SLOTS_OFFSET + 2 * SLOT_BYTES
    struct.pack_into("<Q", data, third + SLOT_BYTES - 8, 0)
    path.write_bytes(data)
    trace = read_ring(path)
    assert trace.num_torn == 1
    assert [record.step for record in trace.records] == [3, 4, 5]


def test_a_first_record_cut_short_is_counted_as_torn(tmp_path: Path) -> None:
    """A slot that holds a begin but no sequence number is a torn record."""
    path = tmp_path / "steps.ring"
    RingWriter(path, capacity=4).close()
    data = bytearray(path.read_bytes())
    struct.pack_into("<q", data, SLOTS_OFFSET, 77)
    path.write_bytes(data)
    trace = read_ring(path)
    assert (trace.records, trace.num_written, trace.num_torn) == ((), 0, 1)


def test_the_ring_is_readable_while_it_is_being_written(tmp_path: Path) -> None:
    """A reader needs no close of the writer."""
    ring = RingWriter(tmp_path / "steps.ring", capacity=4)
    _write(ring, _record(0))
    assert read_ring(tmp_path / "steps.ring").records == (_record(0),)


@pytest.mark.parametrize("data", [b"", b"LUCIDRNG", b"x" * 4096])
def test_other_files_are_refused_by_name(tmp_path: Path, data: bytes) -> None:
    """A file that is no ring gives a ValueError that names it."""
    path = tmp_path / "other.ring"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"other\.ring"):
        read_ring(path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    """A ring that lacks slots is refused, not read as far as it goes."""
    path = tmp_path / "steps.ring"
    RingWriter(path, capacity=8).close()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="too few for 8 slots"):
        read_ring(path)


def test_a_full_disk_is_noticed_when_the_ring_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space that cannot be had is an error at once, and no file is left."""

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        RingWriter(tmp_path / "steps.ring")
    assert not list(tmp_path.iterdir())
