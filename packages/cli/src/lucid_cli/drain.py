"""Keeps a process's two output pipes empty, counts their bytes, and remembers the end of what each said."""

import os
import selectors
import sys
import threading
from contextlib import suppress
from typing import IO

TAIL_BYTES = 4096
_STDERR_BYTES = 3072  # the reason of a failure stands there; either stream may use what the other leaves
_CHUNK_BYTES = 1 << 16
_POLL_S = 0.1

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
        copy_output: copy everything to lucid's standard error as it comes.
    """

    def __init__(self, stdout: IO[bytes] | None, stderr: IO[bytes] | None, *, copy_output: bool) -> None:
        self.stdout_bytes = 0
        self.stderr_bytes = 0
        self._tails = {"stdout": bytearray(), "stderr": bytearray()}
        self._pipes = {"stdout": stdout, "stderr": stderr}
        self._copy_to = sys.stderr.fileno() if copy_output and sys.stderr is not None else None
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
        """Stop reading, although somebody still holds a pipe open."""
        self._stopping.set()
        self._thread.join()

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
            while selector.get_map() and not self._stopping.is_set():
                for key, _ in selector.select(_POLL_S):
                    data = os.read(key.fd, _CHUNK_BYTES)
                    if data:
                        self._take(key.data, data)
                    else:
                        selector.unregister(key.fileobj)
        for pipe in self._pipes.values():
            if pipe is not None:
                pipe.close()

    def _take(self, name: str, data: bytes) -> None:
        if name == "stdout":
            self.stdout_bytes += len(data)
        else:
            self.stderr_bytes += len(data)
        self._tails[name] += data
        del self._tails[name][:-TAIL_BYTES]
        if self._copy_to is not None:
            with suppress(OSError):
                os.write(self._copy_to, data)
