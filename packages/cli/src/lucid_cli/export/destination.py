"""Where an export or a page goes: standard output, or a file that is there whole or not at all."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import click

from lucid_cli.output import ending_quietly, write_whole
from lucid_cli.special_files import unwritable_kind

PIECE = 4096
"""Rows or events that are put into words at once: what a long record comes to is many times as long as its line."""

__all__ = ["PIECE", "Sink", "check_destination", "in_pieces", "opened"]

T = TypeVar("T")


class Sink(Protocol):
    """Takes the bytes of an export."""

    def write(self, data: bytes, /) -> object:
        """Take some more."""


def in_pieces(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield items in lists of at most `PIECE`, as they come."""
    rest = iter(items)
    while piece := list(islice(rest, PIECE)):
        yield piece


def check_destination(path: str, source: str, *, overwrite: bool) -> None:
    """Refuse a file that cannot or must not be written, before any work is done.

    Raises:
        UsageError: the file exists and is not to be replaced, is the report itself or no place for output, or its
            directory cannot be written.
    """
    if path == "-":
        return
    if (kind := unwritable_kind(path)) is not None:
        raise click.UsageError(f"{path} is {kind}; name a file with -o")
    target = Path(path)
    if _is_special(target):
        return
    if target.exists() and source != "-" and Path(source).exists() and target.samefile(source):
        raise click.UsageError(f"{path} is the report itself; name another file with -o")
    if target.exists() and not overwrite:
        raise _exists(path)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise click.UsageError(f"{path} cannot be written: {target.parent} is no directory that can be written to")


@contextmanager
def opened(path: str, *, overwrite: bool) -> Iterator[Sink]:
    """Open a destination, `-` for standard output; a file appears under its name when all of it is written.

    A reader of standard output that has gone away ends the output quietly.

    Raises:
        UsageError: the file has come to exist meanwhile, and is not to be replaced.
        OSError: it cannot be written; it names the file.
    """
    if path == "-":
        with _standard_output() as out:
            yield out
        return
    try:
        with _special(path) if _is_special(Path(path)) else _file(path, overwrite=overwrite) as out:
            yield out
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from error


def _exists(path: str) -> click.UsageError:
    return click.UsageError(f"{path} exists already; name another file with -o, or add --overwrite")


def _is_special(target: Path) -> bool:
    """Return whether something has this name that is no file, a device or a pipe say."""
    return target.exists() and not target.is_file()


@contextmanager
def _standard_output() -> Iterator[Sink]:
    if sys.stdout is None:
        yield _Nowhere()
        return
    with ending_quietly(sys.stdout):
        sys.stdout.flush()
        yield _Whole(sys.stdout.buffer)
        sys.stdout.buffer.flush()


@contextmanager
def _special(path: str) -> Iterator[BinaryIO]:
    with Path(path).open("wb") as out:
        yield out


@contextmanager
def _file(path: str, *, overwrite: bool) -> Iterator[BinaryIO]:
    target = Path(path).resolve()
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:30]}.", dir=target.parent)
    try:
        with open(descriptor, "wb") as out:  # noqa: PTH123 - a descriptor
            yield out
            out.flush()
            with suppress(PermissionError):  # some file systems have permissions of their own
                os.fchmod(descriptor, _mode(target))
        _publish(Path(name), target, overwrite=overwrite)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _publish(draft: Path, target: Path, *, overwrite: bool) -> None:
    """Give a draft its name; without `overwrite` no file that has it already is replaced.

    Raises:
        FileExistsError: There is one.
        OSError: It cannot be done.
    """
    if overwrite:
        draft.replace(target)
        return
    try:
        os.link(draft, target)
    except FileExistsError:
        raise
    except OSError:  # not every file system has links
        _claim(draft, target)
    else:
        draft.unlink()


def _claim(draft: Path, target: Path) -> None:
    """Give a draft its name by replacing an empty file, which can be made only where there is none."""
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        draft.replace(target)
    except OSError:
        target.unlink()
        raise


def _mode(target: Path) -> int:
    """Return the permissions of the file that is replaced, or those of any new file."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


class _Whole:
    """Standard output, which takes all that it is given."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes, /) -> object:
        write_whole(self._stream, data)
        return len(data)


class _Nowhere:
    """Standard output that is closed."""

    def write(self, data: bytes, /) -> object:
        return len(data)
