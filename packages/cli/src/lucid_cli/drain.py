"""Keeps a process's two output pipes empty, counts their bytes, and remembers the end of what each said."""

import os
import selectors
import threading
from contextlib import suppress
from typing import IO

from lucid_cli.output import outlet

TAIL_BYTES = 4096
_STDERR_BYTES = 3072  # the reason of a failure stands there; either stream may use what the other leaves
_CHUNK_BYTES = 1 << 16
_POLL_S = 0.1
_STOP_LIMIT_S = 2.0

_HEADINGS = ("--- standard output ---\n", "--- standard error ---\n")

__all__ = ["TAIL_BYTES", "Drain"]


def _end(data: bytes, size: int) -> str:
    """Return as much of the end of `data` as fits into `size` bytes of UTF-8."""
    text = data.decode("utf-8", "backslashreplace").encode()
    return text[max(0, len(text) - size) :].decode("utf-8", "ignore")


class Drain:
    """A thread that reads both pipes until they end or `stop` is called; it closes them.

    Args:
        stdout: the reading end of standard output.
        stderr: the reading end of standard error.
        copy_output: copy everything to lucid's standard error as it comes, as far as that is read: see `Outlet`.
    """

    def __init__(self, stdout: IO[bytes] | None, stderr: IO[bytes] | None, *, copy_output: bool) -> None:
        self.stdout_bytes = 0
        self.stderr_bytes = 0
        self._tails = {"stdout": bytearray(), "stderr": bytearray()}
        self._pipes = {"stdout": stdout, "stderr": stderr}
        self._copy_to = outlet() if copy_output else None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Drain":  # noqa: PYI034 - typing.Self is newer than the oldest Python supported
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait until both pipes have ended; return whether they have."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stop reading, although somebody still holds a pipe open; a thread that cannot go on is left behind."""
        self._stopping.set()
        self._thread.join(_STOP_LIMIT_S)

    def tail(self) -> str:
        """Return the end of what was printed: at most 4 KiB of UTF-8, other bytes as hexadecimal escapes.

        If both streams said something, each has a line with its name above it, and standard error is the last.
        """
        stdout, stderr = (bytes(tail) for tail in self._tails.values())
        if not stdout or not stderr:
            return _end(stdout or stderr, TAIL_BYTES)
        room = TAIL_BYTES - len(_HEADINGS[0] + _HEADINGS[1]) - 1
        out = _end(stdout, max(room - _STDERR_BYTES, room - len(_end(stderr, room).encode())))
        out += "" if out.endswith("\n") else "\n"
        return _HEADINGS[0] + out + _HEADINGS[1] + _end(stderr, room + 1 - len(out.encode()))

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for name, pipe in self._pipes.items():
                if pipe is not None:
                    selector.register(pipe, selectors.EVENT_READ, name)
            num_open = len(selector.get_map())
            while num_open and not self._stopping.is_set():
                self._watch_reader(selector)
                for key, events in selector.select(_POLL_S):
                    if events & selectors.EVENT_READ and not self._read(key):
                        selector.unregister(key.fileobj)
                        num_open -= 1
        for pipe in self._pipes.values():
            if pipe is not None:
                pipe.close()

    def _watch_reader(self, selector: selectors.BaseSelector) -> None:
        """Pass on what is taken, and have the selector return when more is, as long as something waits."""
        if self._copy_to is None:
            return
        self._copy_to.send()
        is_watched = self._copy_to in selector.get_map()
        if is_watched and not self._copy_to.is_waiting:
            selector.unregister(self._copy_to)
        elif self._copy_to.is_waiting and not is_watched:
            with suppress(OSError):  # of a file it cannot tell
                selector.register(self._copy_to, selectors.EVENT_WRITE)

    def _read(self, key: selectors.SelectorKey) -> bool:
        """Read what is there; return whether more may come. Once reading has been stopped the pipes may be others'."""
        data = b"" if self._stopping.is_set() else os.read(key.fd, _CHUNK_BYTES)
        if data:
            self._take(key.data, data)
        return bool(data)

    def _take(self, name: str, data: bytes) -> None:
        if name == "stdout":
            self.stdout_bytes += len(data)
        else:
            self.stderr_bytes += len(data)
        self._tails[name] += data
        del self._tails[name][:-TAIL_BYTES]
        if self._copy_to is not None:
            self._copy_to.put(data)
