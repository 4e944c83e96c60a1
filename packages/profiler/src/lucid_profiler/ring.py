"""Step records in a memory-mapped file: one writer inside the training process, any reader, also after a crash.

A slot's sequence number is cleared before its payload changes and written after it, so that a process which dies in
the middle of a record leaves a slot that the reader can tell apart.
"""

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass
from itertools import count
from pathlib import Path

MAGIC = b"LUCIDRNG"
CAPACITY = 65_536  # records in 2 MiB: almost two hours at ten steps a second

_HEADER = struct.Struct("<8sIIq")  # magic, slot bytes, capacity, begin of the first record
_FIRST_BEGIN = struct.Struct("<q")
_FIRST_BEGIN_OFFSET = 16
_SLOTS_OFFSET = 64
_SLOT = struct.Struct("<qqIIQ")  # begin, end, optimizer, step, sequence number from 1; packed in this order
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_OFFSET = _SLOT.size - _SEQUENCE.size
_pack_slot = _SLOT.pack_into

__all__ = ["CAPACITY", "RingWriter", "StepRecord", "StepTrace", "read_ring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, on the clock of `time.monotonic_ns`."""

    optimizer: int
    step: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What a ring file holds: its readable records in order, and how many are missing and why.

    Attributes:
        records: the readable records, oldest first.
        num_written: records written in all.
        num_overwritten: records that newer ones replaced.
        num_torn: records that were being written when the process ended.
        first_begin_ns: begin of the very first record, kept when the record itself is overwritten.
    """

    records: tuple[StepRecord, ...]
    num_written: int
    num_overwritten: int
    num_torn: int
    first_begin_ns: int | None


def read_ring(path: Path) -> StepTrace:
    """Read every whole record of a ring file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a ring file.
    """
    data = path.read_bytes()
    if len(data) < _SLOTS_OFFSET or not data.startswith(MAGIC):
        raise ValueError(f"{path} is not a ring of step records")
    _, slot_bytes, capacity, first_begin_ns = _HEADER.unpack_from(data)
    if slot_bytes != _SLOT.size or len(data) < _SLOTS_OFFSET + slot_bytes * capacity:
        raise ValueError(f"{path} holds {len(data)} bytes, too few for {capacity} slots of {slot_bytes} bytes")
    slots = list(_SLOT.iter_unpack(memoryview(data)[_SLOTS_OFFSET : _SLOTS_OFFSET + slot_bytes * capacity]))
    num_written = max(sequence for *_, sequence in slots)
    oldest = max(1, num_written - capacity + 1)
    whole = [slot for index, slot in enumerate(slots) if _is_whole(slot[-1], index, capacity, oldest=oldest)]
    whole.sort(key=lambda slot: slot[-1])
    num_started = sum(sequence == 0 and begin_ns != 0 for begin_ns, *_, sequence in slots)
    num_expected = num_written - oldest + 1 if num_written else 0
    return StepTrace(
        records=tuple(
            StepRecord(optimizer=optimizer, step=step, begin_ns=begin_ns, end_ns=end_ns)
            for begin_ns, end_ns, optimizer, step, _ in whole
        ),
        num_written=num_written,
        num_overwritten=num_written - num_expected,
        num_torn=max(num_started, num_expected - len(whole)),
        first_begin_ns=first_begin_ns or None,
    )


def _is_whole(sequence: int, index: int, capacity: int, *, oldest: int) -> bool:
    return sequence >= oldest and (sequence - 1) % capacity == index


class RingWriter:
    """The writing end: a file of fixed slots, mapped into memory; a record costs one or two microseconds.

    Space is allocated when the file is made, because a full disk would otherwise end the process at some later store.

    Args:
        path: file to create.
        capacity: number of slots; older records are overwritten.

    Raises:
        OSError: the file cannot be created, or its space cannot be had.
    """

    def __init__(self, path: Path, *, capacity: int = CAPACITY) -> None:
        size = _SLOTS_OFFSET + _SLOT.size * capacity
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)
            os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(fd)
        self._capacity = capacity
        self._indices = count()  # its next() is one step of the interpreter: threads never get the same slot
        _HEADER.pack_into(self._map, 0, MAGIC, _SLOT.size, capacity, 0)

    def write(self, begin_ns: int, end_ns: int, optimizer: int, *, step: int) -> None:
        """Append one record; `optimizer` and `step` wrap at 2**32."""
        index = next(self._indices)
        if index < self._capacity:
            offset = _SLOTS_OFFSET + _SLOT.size * index
            if index == 0:
                _FIRST_BEGIN.pack_into(self._map, _FIRST_BEGIN_OFFSET, begin_ns)
        else:
            offset = _SLOTS_OFFSET + _SLOT.size * (index % self._capacity)
            _SEQUENCE.pack_into(self._map, offset + _SEQUENCE_OFFSET, 0)
        _pack_slot(self._map, offset, begin_ns, end_ns, optimizer & 0xFFFFFFFF, step & 0xFFFFFFFF, index + 1)

    def close(self) -> None:
        """Unmap the file; the records stay readable."""
        self._map.close()
