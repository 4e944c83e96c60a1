"""Writing a report: one line a record, each linked to the one before, each in a single write."""

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lucid_profiler import jsonio
from lucid_profiler.codec import to_plain
from lucid_profiler.file_lock import lock
from lucid_profiler.records import End, Record, Run, State, link

__all__ = ["Place", "Writer"]

_DURABLE = (Run, State, End)
# What fsync answers for pipes, terminals and some file systems: nothing there can be made durable.
_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EROFS})
_OPEN_FILES = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How many records stand before a place in a file, the link to the last of them, and their length."""

    seq: int = 0
    prev: str = ""
    num_bytes: int = 0


class Writer:
    """A report that grows by whole records.

    After a failed write the file is cut back to its last whole record where that is possible, and writing may go on;
    where it is not, every later write fails as well, so that no record ever follows half of another.

    Args:
        path: The file to create.
        overwrite: Whether to replace an existing file.
        after: Where an existing file goes on; see `append`.

    Raises:
        FileExistsError: If the file exists and is not to be replaced.
        BlockingIOError: If another process is writing the report; nothing of it is lost.
        OSError: If it cannot be created; it names the path.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False, after: Place | None = None) -> None:
        place = after or Place()
        self.path = Path(path)
        self._seq = place.seq
        self._prev = place.prev
        self._num_bytes = place.num_bytes
        self._torn = False
        self._fd = self._create(overwrite=overwrite) if after is None else os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            lock(self._fd)
            if after is None:
                self._clear()
            else:
                self._go_on()
        except OSError as error:
            self.close()
            raise type(error)(error.errno, error.strerror, str(self.path)) from error

    @classmethod
    def append(cls, path: str | os.PathLike[str], *, seq: int, prev: str, num_bytes: int) -> "Writer":
        """Open a report to write on behind some of its records; what stands behind them is cut off.

        Args:
            path: The file.
            seq: Records that stay.
            prev: Link to the last of them.
            num_bytes: Their length; the line end of the last one is added if the file ends before it.

        Raises:
            BlockingIOError: If another process is writing the report.
            OSError: If it cannot be opened or cut; it names the path.
        """
        return cls(path, after=Place(seq=seq, prev=prev, num_bytes=num_bytes))

    def _create(self, *, overwrite: bool) -> int:
        # Without O_TRUNC: until the file is locked, it may be the report of another process.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if overwrite else os.O_EXCL)
        try:
            # A pipe is not waited for until somebody reads it; from then on writing waits as it does anywhere.
            fd = os.open(self.path, flags | os.O_NONBLOCK, 0o644)
        except FileExistsError as error:
            text = "the report exists already; choose another name or ask for it to be overwritten"
            raise FileExistsError(errno.EEXIST, text, str(self.path)) from error
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise OSError(errno.ENXIO, "nobody reads what is written there", str(self.path)) from error
            raise
        os.set_blocking(fd, True)
        return fd

    def _clear(self) -> None:
        if _is_file(os.fstat(self._fd)):
            os.ftruncate(self._fd, 0)

    def _go_on(self) -> None:
        os.ftruncate(self._fd, self._num_bytes)
        if os.pread(self._fd, 1, self._num_bytes - 1) != b"\n":
            self._append(b"\n")
        self._sync()

    @property
    def num_records(self) -> int:
        """Records written so far: what `End.num_records` says when it comes next."""
        return self._seq

    def __enter__(self) -> "Writer":  # noqa: PYI034 - typing.Self is newer than the oldest Python supported
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: Record) -> None:
        """Append one record; runs, states and the end are on the disk before it returns.

        Raises:
            OSError: If the record could not be written whole; it names the path, and the record does not count.
            TypeError: If the record holds what JSON cannot; nothing is written.
            ValueError: If it is nested too deeply, or the writer is closed; nothing is written.
        """
        if self._fd < 0:
            raise ValueError(f"the report {self.path} is closed")
        fields = {"t": record.kind, "seq": self._seq, "prev": self._prev, **to_plain(record)}
        line = jsonio.dumps(fields)
        before = (self._seq, self._prev)
        # Counted before it is written: a signal's exception comes after the system call, not before it.
        self._seq, self._prev = self._seq + 1, link(line)
        try:
            self._append(line + b"\n")
        except OSError as error:
            self._seq, self._prev = before
            self._cut_back()
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if isinstance(record, _DURABLE):
            self._sync()

    def lost(self) -> str | None:
        """Return what others did to the open file; None where its name leads to it and it is as long as it was written.

        What is no file of its own, a pipe say, has no such name.
        """
        own = os.fstat(self._fd)
        if not _is_file(own):
            return None
        if own.st_size != self._num_bytes:
            return (
                "the report was truncated or written to by another program while it was being written; it is damaged: "
                f"{own.st_size} bytes where {self._num_bytes} were written"
            )
        if _leads_to(self.path, own):
            return None
        with contextlib.suppress(OSError):
            where = (_OPEN_FILES / str(self._fd)).readlink()
            if _leads_to(where, own):
                return f"the report was moved while it was being written; its records are in {where}"
        if own.st_nlink == 0:
            return "the report was deleted or replaced while it was being written; its records are lost"
        return "the report was moved or deleted while it was being written; its records are in no file of this name"

    def close(self) -> None:
        """Close the file; more than once is allowed."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _append(self, data: bytes) -> None:
        if self._torn:
            raise OSError(errno.EIO, "an earlier record was written in part")
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._num_bytes += len(data)

    def _cut_back(self) -> None:
        self._torn = True
        with contextlib.suppress(OSError):
            if _is_file(os.fstat(self._fd)):
                os.ftruncate(self._fd, self._num_bytes)
                self._torn = False

    def _sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise OSError(error.errno, error.strerror, str(self.path)) from error


def _is_file(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode)


def _leads_to(path: Path, info: os.stat_result) -> bool:
    """Tell whether a path is that of a file; where that cannot be looked up, it is taken to be."""
    try:
        return os.path.samestat(path.stat(), info)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
