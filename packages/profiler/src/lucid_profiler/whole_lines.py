"""Appends whole lines to a file: a disk that is full costs a line, and no piece of it is glued to the next one."""

import errno
import os

__all__ = ["WholeLines"]


class WholeLines:
    """Writes each line with one call, and cuts off what was written of one that did not fit.

    Args:
        fd: file opened for appending, which nobody else writes to; the caller closes it.
    """

    __slots__ = ("_cut_to", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._cut_to: int | None = None

    def append(self, line: bytes) -> None:
        """Append a line, which ends with a newline.

        Raises:
            OSError: it is not in the file. A piece of it that could not be cut off either goes before the next line.
        """
        self._cut()
        num_written = os.write(self._fd, line)
        if num_written != len(line):
            self._cut_to = os.fstat(self._fd).st_size - num_written
            self._cut()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _cut(self) -> None:
        if self._cut_to is not None:
            os.ftruncate(self._fd, self._cut_to)
            self._cut_to = None
