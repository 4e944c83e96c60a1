"""Writing to the terminal or a pipe: no character is too much for its encoding, and a closed pipe is no error.

While signals are events and not the end of lucid, nothing waits for whoever reads standard error: see `Outlet`.
"""

import errno
import io
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# What to print where the encoding of the output lacks a character.
_PLAIN = str.maketrans({"…": "...", "µ": "u"})
_MAX_WAITING_BYTES = 1 << 20
_OWN_BYTES = 1 << 16  # beyond it, for lucid's own lines
_CHUNK_BYTES = 1 << 16
_PATIENCE_S = 2.0  # with a reader that takes nothing, at the end

__all__ = [
    "Outlet",
    "ending_quietly",
    "flush",
    "never_waiting",
    "one_line",
    "outlet",
    "printable",
    "say",
    "warn",
    "write_result",
    "write_whole",
]


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
    """Write out what others have left in the buffers, and what could not be said; what cannot be written is dropped."""
    _flush(sys.stdout)
    if _unsaid:
        with never_waiting(patience_s=0.0):
            warn(_unsaid.pop())
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


class Outlet(io.RawIOBase):
    """A stream that nobody waits for: what its reader does not take at once waits in at most a mebibyte of memory.

    What finds no room there is left out and counted; where it would have been, a line says how much it was. Several
    threads may use it. What is written to it as to a file is lucid's own.

    Args:
        stream: what is written to, below its buffer.

    Raises:
        OSError, ValueError: there is no file or pipe behind the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._has_ended = False
        self._is_terminal = stream.isatty()
        self._waiting = bytearray()
        self._last = self._written = b"\n"
        self._is_line_open = False  # of what is not lucid's own
        self._num_lost = 0
        self._putting, self._writing = Lock(), Lock()
        self._descriptor, self._max_bytes = _unblocked(stream.fileno())
        self._is_reopened = self._descriptor != stream.fileno()

    def fileno(self) -> int:
        """Return the descriptor that is writable when the reader takes something."""
        return self._descriptor

    def isatty(self) -> bool:
        """Tell whether the reader is a terminal."""
        return self._is_terminal

    def writable(self) -> bool:
        """Tell that it can be written to."""
        return True

    def write(self, data: "ReadableBuffer", /) -> int:
        """Add lucid's own words to what waits, and pass on what is taken; return how many bytes they are."""
        own = bytes(data)
        self.put(own, is_own=True)
        self.send()
        return len(own)

    @property
    def is_waiting(self) -> bool:
        """Whether something waits for the reader."""
        return bool(self._waiting)

    def put(self, data: bytes, *, is_own: bool = False) -> None:
        """Add bytes to what waits, as far as there is room; lucid's own lines have some that nothing else takes."""
        with self._putting:
            room = _MAX_WAITING_BYTES + _OWN_BYTES * is_own - len(self._waiting)
            # A gap goes on until much has been taken, lest half of what is shown tells of gaps.
            if self._num_lost and room >= (_OWN_BYTES // 2 if is_own else _MAX_WAITING_BYTES // 2):
                self._tell_lost()
            if is_own and self._is_line_open and self._last != b"\n":
                data = b"\n" + data
            kept = b"" if self._num_lost else data[: max(room, 0)]
            self._num_lost += len(data) - len(kept)
            self._append(kept)
            self._is_line_open = not is_own and self._last != b"\n"

    def send(self, patience_s: float = 0.0) -> None:
        """Write what waits as far as it is taken; give up where nothing is for so many seconds."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while self._waiting and not self._has_ended and poll.poll(1000 * patience_s):
            if not self._write():
                return

    def end(self, patience_s: float) -> str | None:
        """Write what waits, with so much patience, and close; return what is to be said of the rest once it can be."""
        self.send(patience_s)
        with self._putting:
            if self._waiting:
                self._num_lost += len(self._waiting)
                self._waiting.clear()
                self._last = self._written
            lost = _lost_words(self._num_lost) if self._num_lost else None
            if lost is not None:
                self._tell_lost()
        self.send()
        untold = lost if self._waiting else None
        self._has_ended = True
        if self._is_reopened:
            os.close(self._descriptor)
        return untold

    def _tell_lost(self) -> None:
        start = b"" if self._last == b"\n" else b"\n"
        self._append(start + f"Warning: {_lost_words(self._num_lost)}\n".encode())
        self._num_lost = 0

    def _append(self, data: bytes) -> None:
        self._waiting += data
        self._last = data[-1:] or self._last

    def _write(self) -> bool:
        """Write some of what waits; return whether more may be tried."""
        if not self._writing.acquire(blocking=False):
            return False
        try:
            try:
                num = os.write(self._descriptor, bytes(self._waiting[: self._max_bytes]))
            except BlockingIOError:
                return False
            except OSError:
                num = len(self._waiting)  # the reader has gone away, or a disk is full
            with self._putting:
                self._written = bytes(self._waiting[num - 1 : num]) or self._written
                del self._waiting[:num]
        finally:
            self._writing.release()
        return True


def _lost_words(num_bytes: int) -> str:
    return f"{num_bytes} bytes are not shown: standard error was not read fast enough"


def _unblocked(descriptor: int) -> tuple[int, int]:
    """Return a descriptor on which writing so many bytes does not block once it is writable.

    A pipe or terminal is opened once more: `O_NONBLOCK` on what lucid was given would hold for all that share it. Where
    it cannot be, writing waits only if another process takes the room away between the question and the writing.
    """
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), _CHUNK_BYTES
    return descriptor, select.PIPE_BUF


_outlets: list[Outlet] = []
_unsaid: list[str] = []


def outlet() -> Outlet | None:
    """Return the outlet to standard error inside of `never_waiting`, None elsewhere."""
    return _outlets[-1] if _outlets else None


@contextmanager
def never_waiting(*, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Let nothing that is written to standard error inside wait for its reader; only the end does, for a moment.

    Args:
        patience_s: how long the end waits for a reader that takes nothing.
    """
    before, current = sys.stderr, None
    with suppress(OSError, ValueError):
        current = None if before is None else Outlet(before)
    if current is None:
        yield
        return
    _outlets.append(current)
    sys.stderr = io.TextIOWrapper(current, before.encoding, before.errors, write_through=True)
    try:
        yield
    finally:
        _outlets.remove(current)
        sys.stderr = before
        untold = current.end(patience_s)
        if untold is not None:
            _unsaid.append(untold)
