"""Where an export goes: standard output, or a file that is there whole or not at all."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import click

from lucid_cli.output import ending_quietly

__all__ = ["Sink", "check_destination", "opened"]


class Sink(Protocol):
    """Takes the bytes of an export."""

    def write(self, data: bytes, /) -> object:
        """Take some more."""


def check_destination(path: str, source: str, *, overwrite: bool) -> None:
    """Refuse a file that cannot or must not be written, before any work is done.

    Raises:
        UsageError: the file exists and is not to be replaced, is the report itself, or its directory cannot be written.
    """
    target = Path(path)
    if path == "-" or (target.exists() and not target.is_file() and not target.is_dir()):
        return
    if target.is_dir():
        raise click.UsageError(f"{path} is a directory; name a file with -o")
    if target.exists() and source != "-" and Path(source).exists() and target.samefile(source):
        raise click.UsageError(f"{path} is the report itself; name another file with -o")
    if target.exists() and not overwrite:
        raise click.UsageError(f"{path} exists already; name another file with -o, or add --overwrite")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise click.UsageError(f"{path} cannot be written: {target.parent} is no directory that can be written to")


@contextmanager
def opened(path: str) -> Iterator[Sink]:
    """Open a destination, `-` for standard output; a file appears under its name when all of it is written.

    A reader of standard output that has gone away ends the output quietly.

    Raises:
        OSError: it cannot be written; it names the file.
    """
    if path == "-":
        with _standard_output() as out:
            yield out
        return
    try:
        with _file(path) as out:
            yield out
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from error


@contextmanager
def _standard_output() -> Iterator[Sink]:
    if sys.stdout is None:
        yield _Nowhere()
        return
    with ending_quietly(sys.stdout):
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()


@contextmanager
def _file(path: str) -> Iterator[BinaryIO]:
    target = Path(path).resolve()
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        with target.open("wb") as out:
            yield out
        return
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
    try:
        with open(descriptor, "wb") as out:  # noqa: PTH123 - a descriptor
            yield out
            out.flush()
            os.fchmod(descriptor, _mode(target))
        Path(name).replace(target)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _mode(target: Path) -> int:
    """Return the permissions of the file that is replaced, or those of any new file."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


class _Nowhere:
    """Standard output that is closed."""

    def write(self, data: bytes, /) -> object:
        return len(data)
