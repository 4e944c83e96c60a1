"""Signals to lucid itself, as events that the loop around a measured process waits for."""

import signal
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType
from typing import Any

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

__all__ = ["Interrupts"]


class Interrupts:
    """While entered, SIGINT, SIGTERM, SIGHUP and SIGQUIT become entries of `events` instead of ending lucid.

    A signal that lucid was started with ignored stays ignored, as `nohup` and background jobs expect. SIGCHLD is set
    to its default, because the kernel keeps no exit status for a parent that ignores it.

    Attributes:
        events: numbers of the signals, between whatever else is put there; its `put` may be called from a handler.
        first: the first signal, None as long as there was none.
        num_continued: how often lucid went on after it had been stopped, by Ctrl-Z say. After `first` nothing counts:
            some, like timeout(1), send SIGCONT with the signal that ends a program, which need not have been stopped.
    """

    def __init__(self) -> None:
        self.events: SimpleQueue[int | str] = SimpleQueue()
        self.first: signal.Signals | None = None
        self.num_continued = 0
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> "Interrupts":  # noqa: PYI034 - typing.Self is newer than the oldest Python supported
        for number in _FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._previous[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.num_continued += self.first is None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)
        self.events.put(number)
