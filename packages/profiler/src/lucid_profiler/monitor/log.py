"""The log of a monitor: one write a line, rotated by size, readable after a crash; a full disk costs records only."""

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lucid_profiler import jsonio
from lucid_profiler.errors import ReportError
from lucid_profiler.file_lock import lock
from lucid_profiler.monitor.records import Gap, Header, ReasonsChanged, Record, from_fields, to_fields
from lucid_profiler.whole_lines import WholeLines

MAX_PART_BYTES: Final = 64 << 20  # about three hours at ten samples a second
MAX_PARTS: Final = 32
SYNC_PERIOD_NS: Final = 5_000_000_000
_MAX_PART_DIGITS: Final = 6  # a name that ends in a date is somebody else's file
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC

__all__ = [
    "MAX_PARTS",
    "MAX_PART_BYTES",
    "SYNC_PERIOD_NS",
    "Log",
    "LogReader",
    "LogWriter",
    "read_log",
    "rotated_parts",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What a log holds.

    Attributes:
        records: in the order in which they were written.
        num_torn: last lines that are not whole: 1 where the monitor died in the middle of one, else 0.
        num_unknown: records of kinds that a newer version has.
    """

    records: tuple[Record, ...]
    num_torn: int
    num_unknown: int


class LogReader:
    """Gives the records of a log and its rotated parts one after the other, and keeps none of them.

    A torn last line is left out and counted.

    Args:
        path: the log; its parts lie beside it.

    Attributes:
        num_torn: as in `Log`, of what was read so far; `num_unknown` likewise.

    Raises:
        ReportError: as it is iterated, where a part cannot be read, or a line before the last one is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.num_torn = self.num_unknown = 0
        self._path = Path(path)

    def __iter__(self) -> Iterator[Record]:
        self.num_torn = self.num_unknown = 0
        files = [part for _, part in rotated_parts(self._path)]
        # A monitor may have died between setting a part aside and beginning the next.
        if not files or self._path.exists():
            files.append(self._path)
        for part in files:
            yield from self._read_part(part, may_be_torn=part == files[-1])

    def _read_part(self, part: Path, *, may_be_torn: bool) -> Iterator[Record]:
        lines = _lines(part)
        for number, line in lines:
            if not line:
                continue
            try:
                record = from_fields(jsonio.loads(line))
            except ValueError as error:
                if not may_be_torn or any(rest for _, rest in lines):
                    raise ReportError(str(part), number, f"is damaged: {error}") from error
                self.num_torn += 1
                return
            if record is None:
                self.num_unknown += 1
            else:
                yield record


def read_log(path: str | Path) -> Log:
    """Read a log with its rotated parts at once; a torn last line is left out and counted.

    Raises:
        ReportError: a part cannot be read, or a line before the last one is damaged.
    """
    reader = LogReader(path)
    records = tuple(reader)
    return Log(records=records, num_torn=reader.num_torn, num_unknown=reader.num_unknown)


def rotated_parts(path: Path) -> list[tuple[int, Path]]:
    """Return the parts that were set aside, oldest first, each with its number."""
    name = re.compile(re.escape(path.name) + rf"\.(0|[1-9][0-9]{{0,{_MAX_PART_DIGITS - 1}}})", re.ASCII)
    found = ((name.fullmatch(part.name), part) for part in path.parent.glob("*"))
    return sorted((int(match[1]), part) for match, part in found if match)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, each with its number from 1; one without its newline is the last, even if it grows.

    Raises:
        ReportError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.removesuffix(b"\n")
                if not line.endswith(b"\n"):
                    return
    except OSError as error:
        raise ReportError(str(path), None, f"cannot be read: {error.strerror}") from error


class LogWriter:
    """Appends records to a file. Nothing that a disk does reaches the caller: records are dropped and counted.

    An existing file is continued after its last whole line. Each file that follows another begins with the reasons that
    hold, so that it can be read without the one before.

    Args:
        path: the file.
        header: makes the record that each file begins with; it is given the number of the part.
        mono_ns: the monotonic clock.
        on_gap: told of each gap that is written by itself, once the file takes records again.
        max_part_bytes: size at which a file is set aside and a new one begun.
        max_parts: how many files are kept, the oldest are removed.

    Attributes:
        num_dropped: records that could not be written, and those that were removed with an old part.
        turn: held while a record is written; a thread that keeps it is the only one to write.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        header: Callable[[int], Header],
        mono_ns: Callable[[], int],
        on_gap: Callable[[Gap], None] | None = None,
        max_part_bytes: int = MAX_PART_BYTES,
        max_parts: int = MAX_PARTS,
    ) -> None:
        self.num_dropped = 0
        self.turn = threading.RLock()
        self._path = path
        self._header = header
        self._mono_ns = mono_ns
        self._on_gap = on_gap
        self._max_part_bytes = max_part_bytes
        self._max_parts = max_parts
        self._fd = _open(path)
        self._lines = WholeLines(self._fd)
        self._size = _whole_size(self._fd)
        self._part = max((number for number, _ in rotated_parts(path)), default=-1) + 1
        self._has_header = False
        self._reasons: ReasonsChanged | None = None  # that hold
        self._repeated: ReasonsChanged | None = None  # that this file has yet to begin with
        self._failed_since_ns: int | None = None
        self._num_failed = 0
        self._synced_ns = mono_ns()
        self._rotate_at = max_part_bytes

    def write(self, record: Record) -> bool:
        """Append one record; return whether it is in the file."""
        with self.turn:
            return self._write(record)

    def _write(self, record: Record) -> bool:
        is_begun = self._begin()
        if is_begun and self._failed_since_ns is not None:
            self._report_failure()
        is_written = is_begun and self._append(record)
        if not is_written:
            self._count_failure()
        elif isinstance(record, ReasonsChanged):
            self._reasons = record
        if self._size >= self._rotate_at:
            self._rotate()
        return is_written

    def _begin(self) -> bool:
        """Write what a file begins with and this one lacks; return whether it has all of it."""
        self._has_header = self._has_header or self._append(self._header(self._part))
        if self._has_header and self._repeated is not None and self._append(self._repeated):
            self._repeated = None
        return self._has_header and self._repeated is None

    def is_removed(self) -> bool:
        """Return whether somebody has deleted the file: what is written to it is lost then."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def sync(self, *, is_due_only: bool = False) -> None:
        """Have what was written reach the disk; with `is_due_only` not before five seconds since the last time."""
        now_ns = self._mono_ns()
        if is_due_only and now_ns - self._synced_ns < SYNC_PERIOD_NS:
            return
        self._synced_ns = now_ns
        # What the disk refuses here is not known by record; the records count as written.
        with suppress(OSError):
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Sync and close the file."""
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
            self._fd = -1

    def _append(self, record: Record) -> bool:
        line = jsonio.dumps(to_fields(record)) + b"\n"
        try:
            self._lines.append(line)
        except OSError:
            return False
        self._size += len(line)
        return True

    def _count_failure(self) -> None:
        self.num_dropped += 1
        self._num_failed += 1
        if self._failed_since_ns is None:
            self._failed_since_ns = self._mono_ns()

    def _report_failure(self) -> None:
        """Say how many records are missing, as soon as the file takes records again."""
        begin_ns = self._failed_since_ns
        if begin_ns is None:
            return
        gap = Gap(begin_ns=begin_ns, end_ns=self._mono_ns(), reason="disk_full", num_records=self._num_failed)
        if self._append(gap):
            self._failed_since_ns = None
            self._num_failed = 0
            if self._on_gap is not None:
                self._on_gap(gap)

    def _rotate(self) -> None:
        """Set the file aside and begin another; where that fails, go on with this one for another part's size."""
        self._rotate_at = self._size + self._max_part_bytes
        aside = self._path.with_name(f"{self._path.name}.{self._part}")
        self.sync()
        try:
            os.rename(self._path, aside)  # noqa: PTH104 - Path.rename does the same with one more object
        except OSError:
            return
        try:
            fd = os.open(self._path, _FLAGS | os.O_EXCL, 0o644)
            lock(fd)
        except OSError:
            with suppress(OSError):
                os.rename(aside, self._path)  # noqa: PTH104 - as above
            return
        os.close(self._fd)
        self._fd, self._size, self._rotate_at = fd, 0, self._max_part_bytes
        self._lines = WholeLines(fd)
        self._part += 1
        self._has_header = False
        self._repeated = self._reasons
        self._remove_old()

    def _remove_old(self) -> None:
        parts = rotated_parts(self._path)
        for _, part in parts[: max(0, len(parts) - (self._max_parts - 1))]:
            with suppress(OSError):
                self.num_dropped += _num_lines(part)
                part.unlink()


def _open(path: Path) -> int:
    fd = os.open(path, _FLAGS, 0o644)
    try:
        # Another monitor may be writing to it; what it has not finished yet must not be cut off.
        lock(fd)
        _whole_size(fd)
    except OSError as error:
        os.close(fd)
        is_taken = error.errno == errno.EWOULDBLOCK
        why = "another monitor writes to it" if is_taken else error.strerror
        raise OSError(error.errno, why, str(path)) from error
    return fd


def _num_lines(path: Path) -> int:
    with path.open("rb", buffering=0) as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _whole_size(fd: int) -> int:
    """Cut what follows the last newline, which a writer that died has left; return the size of the file."""
    size = end = os.fstat(fd).st_size
    while end > 0:
        begin = max(0, end - 65536)
        newline = os.pread(fd, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        os.ftruncate(fd, end)
    return end
