"""What a name stands for that is no file, and whether output can go there."""

import os
import stat
from contextlib import suppress
from pathlib import Path

_OPEN_FILES = Path("/dev/fd")
_PIPE = "a named pipe, where nothing happens until somebody reads it"
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISFIFO, _PIPE),
)

__all__ = ["unwritable_kind"]


def unwritable_kind(path: str) -> str | None:
    """Return what stands under a name that is no place for output; None where there is nothing, or what takes it.

    Files take output, and so do terminals, `/dev/null` and other character devices, and a pipe that this process was
    handed, as `/dev/stdout` or by a shell's `>(COMMAND)`: it is open already. A pipe with a name would have to be
    opened, which waits for a reader.
    """
    try:
        info = Path(path).stat()
    except OSError:
        return None  # whoever opens it is told why
    kind = next((words for is_kind, words in _KINDS if is_kind(info.st_mode)), None)
    return None if kind == _PIPE and _is_open(info) else kind


def _is_open(info: os.stat_result) -> bool:
    """Return whether this process has a file open."""
    with suppress(OSError):
        for name in os.listdir(_OPEN_FILES):  # noqa: PTH208 - names alone: one of them is that of the listing itself
            with suppress(OSError):
                if os.path.samestat(info, os.fstat(int(name))):
                    return True
    return False
