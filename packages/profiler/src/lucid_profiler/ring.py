"""Records of one kind in a memory-mapped file: one writer inside the training process, any reader, also after a crash.

A slot's sequence number is cleared before its payload changes and written after it, so that a process which dies in
the middle of a record leaves a slot that the reader can tell apart. Steps have a file of this kind; other records say
with a `Layout` what theirs hold.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

MAGIC = b"LUCIDRNG"
CAPACITY = 65_536  # records in 2 MiB of steps: almost two hours at ten steps a second

_HEADER = struct.Struct("<8sIIq")  # magic, slot bytes, capacity, first value of the first record
_FIRST = struct.Struct("<q")
_FIRST_OFFSET = 16
_SLOTS_OFFSET = 64
_SEQUENCE = struct.Struct("<Q")
_Slot: TypeAlias = tuple[int, int, int, int, int]  # of a step, with its sequence number

__all__ = [
    "CAPACITY",
    "Layout",
    "RingTail",
    "RingWriter",
    "SlotTrace",
    "SlotWriter",
    "StepRecord",
    "StepTrace",
    "read_ring",
    "read_slots",
]


class Layout:
    """What a slot holds.

    Args:
        magic: the first 8 bytes of a file with such slots.
        values: `struct` codes of a record's values, packed in this order. The first is a `q` that is never 0.
        name: what the records are, for messages.
    """

    __slots__ = ("magic", "name", "sequence_offset", "slot")

    def __init__(self, magic: bytes, values: str, *, name: str) -> None:
        self.magic = magic
        self.name = name
        self.slot = struct.Struct(f"<{values}Q")  # at the end the sequence number, from 1
        self.sequence_offset = self.slot.size - _SEQUENCE.size


_STEPS = Layout(MAGIC, "qqII", name="step records")  # begin, end, optimizer, step


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTrace:
    """What a file of slots holds.

    Attributes:
        rows: the values of each readable record, oldest first.
        num_written: records written in all.
        num_overwritten: records that newer ones replaced.
        num_torn: records that were being written when the process ended.
        first: first value of the very first record, kept when the record itself is overwritten; None before it.
    """

    rows: tuple[tuple[Any, ...], ...]
    num_written: int
    num_overwritten: int
    num_torn: int
    first: int | None


def read_ring(path: Path) -> StepTrace:
    """Read every whole record of a file of steps.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file.
    """
    trace = read_slots(path, _STEPS)
    return StepTrace(
        records=tuple(
            StepRecord(optimizer=optimizer, step=step, begin_ns=begin_ns, end_ns=end_ns)
            for begin_ns, end_ns, optimizer, step in trace.rows
        ),
        num_written=trace.num_written,
        num_overwritten=trace.num_overwritten,
        num_torn=trace.num_torn,
        first_begin_ns=trace.first,
    )


def read_slots(path: Path, layout: Layout) -> SlotTrace:
    """Read every whole record of a file with slots of `layout`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file.
    """
    data = path.read_bytes()
    if len(data) < _SLOTS_OFFSET or not data.startswith(layout.magic):
        raise ValueError(f"{path} is not a ring of {layout.name}")
    _, slot_bytes, capacity, first = _HEADER.unpack_from(data)
    if slot_bytes != layout.slot.size or len(data) < _SLOTS_OFFSET + slot_bytes * capacity:
        raise ValueError(f"{path} holds {len(data)} bytes, too few for {capacity} slots of {slot_bytes} bytes")
    slots = list(layout.slot.iter_unpack(memoryview(data)[_SLOTS_OFFSET : _SLOTS_OFFSET + slot_bytes * capacity]))
    num_written = max(sequence for *_, sequence in slots)
    oldest = max(1, num_written - capacity + 1)
    whole = [slot for index, slot in enumerate(slots) if _is_whole(slot[-1], index, capacity, oldest=oldest)]
    whole.sort(key=lambda slot: slot[-1])
    num_started = sum(slot[-1] == 0 and slot[0] != 0 for slot in slots)
    num_expected = num_written - oldest + 1 if num_written else 0
    return SlotTrace(
        rows=tuple(slot[:-1] for slot in whole),
        num_written=num_written,
        num_overwritten=num_written - num_expected,
        num_torn=max(num_started, num_expected - len(whole)),
        first=first or None,
    )


def _is_whole(sequence: int, index: int, capacity: int, *, oldest: int) -> bool:
    return sequence >= oldest and (sequence - 1) % capacity == index


class RingTail:
    """Reads the newest steps of a file that is being written, without reading the others.

    The record with number n lies in slot n - 1 modulo the capacity, so a slot tells whether a number has been written
    yet, and doubling and halving finds the last one. A record that changes while it is read is wrong or missing for one
    look; the writer is never waited for.

    Args:
        path: the file; it is opened for each look.

    Attributes:
        first_begin_ns: begin of the very first record, as of the last look; None before it.
    """

    def __init__(self, path: Path) -> None:
        self.first_begin_ns: int | None = None
        self._path = path
        self._num_written = 0

    def read(self, most: int) -> list[StepRecord]:
        """Return up to `most` of the newest records, oldest first.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a file.
        """
        return [
            StepRecord(optimizer=optimizer, step=step, begin_ns=begin_ns, end_ns=end_ns)
            for begin_ns, end_ns, optimizer, step, _ in self._look(most)
        ]

    def newest_steps(self) -> dict[int, int]:
        """Return the number of the newest step of each optimizer that has stepped since the last look.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a file.
        """
        return {optimizer: step for _, _, optimizer, step, _ in self._look(None)}

    def _look(self, most: int | None) -> list[_Slot]:
        """Return the newest slots, up to `most` or else those since the last look, oldest first."""
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = os.pread(fd, _HEADER.size, 0)
            if len(head) < _HEADER.size:
                raise ValueError(f"{self._path} is too short for a ring of {_STEPS.name}")
            magic, slot_bytes, capacity, first = _HEADER.unpack(head)
            if magic != MAGIC or slot_bytes != _STEPS.slot.size or not capacity:
                raise ValueError(f"{self._path} is not a ring of {_STEPS.name}")
            self.first_begin_ns = first or None
            known = self._num_written
            last = self._num_written = _last_written(fd, capacity, known)
            return list(_last_slots(fd, capacity, last, most=last - known if most is None else most))
        finally:
            os.close(fd)


def _last_written(fd: int, capacity: int, known: int) -> int:
    """Return the highest number of a record, at least `known`."""
    stride = 1
    while _is_written(fd, capacity, known + stride):
        known += stride
        stride *= 2
    while stride > 1:
        stride //= 2
        if _is_written(fd, capacity, known + stride):
            known += stride
    return known


def _is_written(fd: int, capacity: int, number: int) -> bool:
    offset = _SLOTS_OFFSET + _STEPS.slot.size * ((number - 1) % capacity) + _STEPS.sequence_offset
    return int.from_bytes(os.pread(fd, _SEQUENCE.size, offset), "little") >= number


def _last_slots(fd: int, capacity: int, last: int, *, most: int) -> Iterator[_Slot]:
    slot = _STEPS.slot
    number = last - min(last, most, capacity) + 1
    while number <= last:  # at most twice: up to the end of the file, and on from its first slot
        index = (number - 1) % capacity
        num = min(last - number + 1, capacity - index)
        data = os.pread(fd, slot.size * num, _SLOTS_OFFSET + slot.size * index)
        whole = data[: len(data) // slot.size * slot.size]
        for expected, values in enumerate(slot.iter_unpack(whole), start=number):
            if values[-1] == expected and values[0] > 0:
                yield values
        number += num


class SlotWriter:
    """The writing end: a file of fixed slots, mapped into memory; a record costs one or two microseconds.

    Space is allocated when the file is made, because a full disk would otherwise end the process at some later store.

    Args:
        path: file to create.
        layout: what a slot holds.
        capacity: number of slots; older records are overwritten.

    Raises:
        OSError: the file cannot be created, or its space cannot be had.
    """

    def __init__(self, path: Path, layout: Layout, *, capacity: int = CAPACITY) -> None:
        size = _SLOTS_OFFSET + layout.slot.size * capacity
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
        self._slot_bytes = layout.slot.size
        self._pack = layout.slot.pack_into
        self._sequence_offset = layout.sequence_offset
        self._indices = count()  # its next() is one step of the interpreter: threads never get the same slot
        _HEADER.pack_into(self._map, 0, layout.magic, layout.slot.size, capacity, 0)

    def append(self, first: int, *others: int) -> None:
        """Append one record of the values that the layout names."""
        index = next(self._indices)
        if index < self._capacity:
            offset = _SLOTS_OFFSET + self._slot_bytes * index
            if index == 0:
                _FIRST.pack_into(self._map, _FIRST_OFFSET, first)
        else:
            offset = _SLOTS_OFFSET + self._slot_bytes * (index % self._capacity)
            _SEQUENCE.pack_into(self._map, offset + self._sequence_offset, 0)
        self._pack(self._map, offset, first, *others, index + 1)

    def close(self) -> None:
        """Unmap the file; the records stay readable."""
        self._map.close()


class RingWriter(SlotWriter):
    """Writes steps.

    Args:
        path: file to create.
        capacity: number of slots; older records are overwritten.

    Raises:
        OSError: the file cannot be created, or its space cannot be had.
    """

    def __init__(self, path: Path, *, capacity: int = CAPACITY) -> None:
        super().__init__(path, _STEPS, capacity=capacity)

    def write(self, begin_ns: int, end_ns: int, optimizer: int, *, step: int) -> None:
        """Append one record; `optimizer` and `step` wrap at 2**32."""
        self.append(begin_ns, end_ns, optimizer & 0xFFFFFFFF, step & 0xFFFFFFFF)
