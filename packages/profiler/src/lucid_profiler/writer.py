"""Writing a report: one line a record, each linked to the one before, each in a single write."""

import contextlib
import errno
import os
import stat
from pathlib import Path
from types import TracebackType

from lucid_profiler import jsonio
from lucid_profiler.codec import to_plain
from lucid_profiler.records import End, Record, Run, State, link

__all__ = ["Writer"]

_DURABLE = (Run, State, End)
# What fsync answers for pipes, terminals and some file systems: nothing there can be made durable.
_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EROFS})


class Writer:
    """A report that grows by whole records.

    After a failed write the file is cut back to its last whole record where that is possible, and writing may go on;
    where it is not, every later write fails as well, so that no record ever follows half of another.

    Args:
        path: The file to create.
        overwrite: Whether to replace an existing file.

    Raises:
        FileExistsError: If the file exists and is not to be replaced.
        OSError: If it cannot be created; it names the path.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self._seq = 0
        self._prev = ""
        self._num_bytes = 0
        self._torn = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if overwrite else os.O_EXCL)
        try:
            self._fd = os.open(self.path, flags, 0o644)
        except FileExistsError as error:
            text = "the report exists already; choose another name or ask for it to be overwritten"
            raise FileExistsError(errno.EEXIST, text, str(self.path)) from error

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
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.ftruncate(self._fd, self._num_bytes)
                self._torn = False

    def _sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
