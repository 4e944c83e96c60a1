"""Signals to lucid itself, as events that the loop around a measured process waits for."""

import math
import signal
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock
from time import monotonic
from types import FrameType
from typing import Any

from lucid_cli.output import never_waiting

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.1
_SAME_REQUEST_S = 0.2  # longer than a handler may be late

__all__ = ["Interrupts"]


class _Events(SimpleQueue[int | str]):
    """A queue that hands out signals soon after they came.

    Python runs their handlers in the main thread alone, while the kernel may give a signal to any thread, a library's
    too: the main thread must not wait for long without running. A lock does the waiting, because `SimpleQueue.get` may
    wait for ever once a signal has interrupted it (CPython 3.11).
    """

    def __init__(self) -> None:
        self._waiting = Lock()  # held while nothing has come
        self._waiting.acquire()

    def put(self, item: int | str, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        with suppress(RuntimeError):
            self._waiting.release()

    def get(self, block: bool = True, timeout: float | None = None) -> int | str:
        deadline = math.inf if timeout is None else monotonic() + timeout
        while True:
            rest = deadline - monotonic()
            try:
                return self.get_nowait()
            except Empty:
                if not block or rest <= 0:
                    raise
            self._waiting.acquire(timeout=min(rest, _POLL_S))


class Interrupts:
    """While entered, SIGINT, SIGTERM, SIGHUP and SIGQUIT become entries of `events` instead of ending lucid.

    A signal that lucid was started with ignored stays ignored, as `nohup` and background jobs expect. SIGCHLD is set
    to its default, because the kernel keeps no exit status for a parent that ignores it. A signal that comes once more
    within 0.2 s is one request: timeout(1) sends its own to lucid and then to lucid's group. No signal would end a wait
    for the reader of standard error, so nothing waits for it.

    Attributes:
        events: numbers of the signals, between whatever else is put there; its `put` may be called from a handler.
        first: the first signal, None as long as there was none.
        num_continued: how often lucid went on after it had been stopped, by Ctrl-Z say. After `first` nothing counts:
            some, like timeout(1), send SIGCONT with the signal that ends a program, which need not have been stopped.
    """

    def __init__(self) -> None:
        self.events: SimpleQueue[int | str] = _Events()
        self.first: signal.Signals | None = None
        self.num_continued = 0
        self._last: int | None = None
        self._last_s = 0.0
        self._writing = never_waiting()
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> "Interrupts":  # noqa: PYI034 - typing.Self is newer than the oldest Python supported
        self._writing.__enter__()
        for number in _FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._previous[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._writing.__exit__(None, None, None)

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.num_continued += self.first is None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = monotonic()
        if number == self._last and now - self._last_s < _SAME_REQUEST_S:
            return
        self._last, self._last_s = number, now
        if self.first is None:
            self.first = signal.Signals(number)
        self.events.put(number)
