"""The file that a report goes to: tried before anything runs, begun only when the first run has started."""

import errno
import os
import stat
from pathlib import Path

import click

from lucid_cli.special_files import unwritable_kind
from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.file_lock import lock
from lucid_profiler.writer import Writer

__all__ = ["ReportFile", "refuse_taken"]

_PACKERS = {".gz": "gzip", ".zst": "zstd"}
_STANDARD = {1: "standard output, where the table goes", 2: "standard error, where the progress goes"}


def _exists(path: str) -> click.UsageError:
    return click.UsageError(f"{path} exists already; name another file with -o, or add --overwrite")


def _busy(path: str) -> click.UsageError:
    words = "another lucid is writing this report; wait until it has ended, or name another file with -o"
    return click.UsageError(f"{path}: {words}")


def _is_null(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == Path(os.devnull).stat().st_rdev


def _refuse_standard(path: str, info: os.stat_result) -> None:
    for number, words in _STANDARD.items():
        try:
            is_same = os.path.samestat(info, os.fstat(number))
        except OSError:
            continue
        if is_same:
            raise click.UsageError(f"the report cannot go to {path}: it is {words}")


def _try_lock(path: Path) -> None:
    """Make sure that a file can be written, and that nobody else does."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        lock(fd)
    finally:
        os.close(fd)


def refuse_taken(path: str, *, overwrite: bool) -> None:
    """Refuse what can be seen to be no name for a report, without touching it.

    Raises:
        UsageError: it is standard output, the name of a packed file, no place for output, or a file that is not to be
            replaced.
    """
    if path == "-":
        raise click.UsageError("-o -: the report needs a file, since the table goes to standard output")
    packer = _PACKERS.get(Path(path).suffix.lower())
    if packer is not None:
        plain = Path(path).with_suffix("")
        words = f"a report is written unpacked; write {plain}, and pack it afterwards with {packer}"
        raise click.UsageError(f"-o {path}: {words}")
    if (kind := unwritable_kind(path)) is not None:
        raise click.UsageError(f"the report cannot go to {path}, {kind}; name a file with -o")
    if Path(path).is_file() and not overwrite:
        raise _exists(path)


class ReportFile:
    """A report that can be written, as far as that can be known without touching what is there.

    A device, or a pipe that is open already, is opened at once, since that loses nothing.

    Args:
        path: where it goes.
        overwrite: whether to replace a file.
        is_named: whether the user chose the name, so that another may be wanted where it cannot be written.

    Raises:
        UsageError: it cannot be written, another lucid is writing it, or it exists and is not to be replaced.
        EnvironmentUnusableError: it cannot be written, and the user has not named it.
    """

    def __init__(self, path: str, *, overwrite: bool, is_named: bool = True) -> None:
        refuse_taken(path, overwrite=overwrite)
        self.path = path
        self._overwrite = overwrite
        self._writer: Writer | None = None
        try:
            self._try()
        except FileExistsError as error:
            raise _exists(path) from error
        except BlockingIOError as error:
            raise _busy(path) from error
        except OSError as error:
            words = f"the report {path} cannot be written: {error.strerror}"
            if is_named:
                raise click.UsageError(words) from error
            raise EnvironmentUnusableError(f"{words}; name a file elsewhere with -o") from error

    def open(self) -> Writer:
        """Begin the report; what the file held before is lost.

        Raises:
            UsageError: the file has come to exist meanwhile, or to be written by another lucid.
            OSError: it can no longer be written.
        """
        if self._writer is not None:
            return self._writer
        try:
            return Writer(self.path, overwrite=self._overwrite)
        except FileExistsError as error:
            raise _exists(self.path) from error
        except BlockingIOError as error:
            raise _busy(self.path) from error

    def _try(self) -> None:
        path = Path(self.path)
        if not path.exists():
            target = path.resolve() if self._overwrite else path
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            target.unlink()
            return
        info = path.stat()
        if not _is_null(info):
            _refuse_standard(self.path, info)
        if stat.S_ISCHR(info.st_mode) or stat.S_ISFIFO(info.st_mode):
            self._writer = Writer(self.path, overwrite=True)
        elif not self._overwrite:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
        else:
            _try_lock(path)
