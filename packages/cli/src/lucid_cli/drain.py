"""Keeps a process's two output pipes empty, counts their bytes, and remembers only the end of what they said."""

import os
import selectors
import sys
import threading
from contextlib import suppress
from typing import IO

TAIL_BYTES = 4096
_CHUNK_BYTES = 1 << 16
_POLL_S = 0.1

__all__ = ["TAIL_BYTES", "Drain"]


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
        self._tail = bytearray()
        self._pipes = {"stdout": stdout, "stderr": stderr}
        self._copy_to = sys.stderr.fileno() if copy_output and sys.stderr is not None else None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until both pipes have ended; return whether they have."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stop reading, although somebody still holds a pipe open."""
        self._stopping.set()
        self._thread.join()

    def tail(self) -> str:
        """Return the last 4 KiB of both streams as they came in, undecodable bytes replaced."""
        return self._tail.decode("utf-8", "replace")

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
        self._tail += data
        del self._tail[:-TAIL_BYTES]
        if self._copy_to is not None:
            with suppress(OSError):
                os.write(self._copy_to, data)
