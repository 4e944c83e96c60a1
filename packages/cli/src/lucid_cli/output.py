"""Writing to the terminal or a pipe: no character is too much for its encoding, and a closed pipe is no error."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, TextIO

# What to print where the encoding of the output lacks a character.
_PLAIN = str.maketrans({"…": "...", "µ": "u"})

__all__ = ["ending_quietly", "flush", "one_line", "printable", "say", "warn", "write_result", "write_whole"]


def printable(text: str, encoding: str | None) -> str:
    """Return `text` in characters that `encoding` has, without control characters other than tab and newline."""
    kept = "".join(char if char.isprintable() or char in "\t\n" else "?" for char in text)
    name = encoding or "utf-8"
    try:
        kept.encode(name)
    except UnicodeEncodeError:
        return kept.translate(_PLAIN).encode(name, "replace").decode(name)
    return kept


def one_line(text: str) -> str:
    r"""Return `text` with an escape for each line end and control character, such as `\n`: names of files hold any."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def write_result(text: str) -> None:
    """Write `text` to standard output. A reader that has gone away ends the output quietly.

    Raises:
        OSError: standard output cannot be written, for instance because a disk is full.
    """
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding
    with ending_quietly(sys.stdout):
        sys.stdout.flush()
        write_whole(sys.stdout.buffer, printable(text, encoding).encode(encoding))
        sys.stdout.buffer.flush()


def write_whole(stream: BinaryIO, data: bytes) -> None:
    """Write all of `data`: standard output without a buffer (PYTHONUNBUFFERED) may take a part and say nothing.

    Raises:
        OSError: it cannot be written.
    """
    rest = memoryview(data)
    while rest:
        taken: int | None = stream.write(rest)
        if taken is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        rest = rest[taken:]


@contextmanager
def ending_quietly(stdout: TextIO) -> Iterator[None]:
    """Let the writing inside end where the reader of standard output has gone away, and name it in any other error.

    Raises:
        OSError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        _discard(stdout)
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "standard output") from error


def say(text: str) -> None:
    """Write one line to standard error; where nobody reads it, nothing happens."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(printable(f"{text}\n", sys.stderr.encoding))
        sys.stderr.flush()
    except (OSError, ValueError):
        _discard(sys.stderr)


def warn(text: str, *, kind: str = "Warning") -> None:
    """Write one line with its kind to standard error, whatever names it holds; where nobody reads it, nothing."""
    say(f"{kind}: {one_line(text)}")


def flush() -> None:
    """Write out what others have left in the buffers; what cannot be written is dropped."""
    _flush(sys.stdout)
    _flush(sys.stderr)


def _flush(stream: TextIO | None) -> None:
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        _discard(stream)


def _discard(stream: TextIO) -> None:
    """Let a stream end in nothing: what it still holds must not fail once more when the interpreter ends."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
