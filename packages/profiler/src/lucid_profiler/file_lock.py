"""Keeps two programs from writing in one file; a file system without locks goes without."""

import fcntl
import os
import stat

__all__ = ["lock"]


def lock(fd: int) -> None:
    """Keep others from writing in a file until it is closed; where that cannot be done, nothing happens.

    What is no file, a terminal or a pipe, is not locked: several may write there.

    Raises:
        BlockingIOError: If another process holds the lock.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "another process is writing the report") from error
    except OSError:
        return  # the file system has no locks
