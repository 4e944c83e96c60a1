"""Ends the monitor's process where its loop does not come to its end, since a call of the driver does not return.

Such a call cannot be cut short: this waits in a thread of its own, which costs nothing until something has ended.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

LIMIT_S = 1.5  # of the 2 s in which a monitor is gone after its target

__all__ = ["LIMIT_S", "Watchdog"]


class Watchdog:
    """Waits for what ends the monitor, and then for the monitor.

    Args:
        causes: descriptors that become readable when the monitor has to end, and why it does then.
        last_words: called with that and when it was, monotonic ns, in the place of the loop before the process ends.
        limit_s: how long the loop may take to end, in seconds.
    """

    def __init__(
        self, causes: Mapping[int, str], *, last_words: Callable[[str, int], None], limit_s: float = LIMIT_S
    ) -> None:
        self._causes = dict(causes)
        self._last_words = last_words
        self._limit_s = limit_s
        self._has_ended = threading.Event()
        self._receiver, self._sender = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Let the time begin in which the monitor has to end, also where no descriptor says so."""
        os.write(self._sender, b"\0")

    def close(self) -> None:
        """Say that the loop has ended."""
        self._has_ended.set()
        self.hurry()
        self._thread.join()
        os.close(self._sender)
        os.close(self._receiver)

    def _watch(self) -> None:
        poll = select.poll()
        for fd in (*self._causes, self._receiver):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll()]
        since_ns = time.monotonic_ns()
        if self._has_ended.wait(self._limit_s):
            return
        with suppress(Exception):  # whatever the loop was in the middle of, the process ends
            self._last_words(next((self._causes[fd] for fd in ready if fd in self._causes), "stopped"), since_ns)
        os._exit(1)
