"""What happens between two runs: the machine cools down, and where that is asked for, lucid waits until it is idle."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty

from lucid_cli.interrupts import Interrupts
from lucid_cli.plan import Observer

IDLE_LIMIT_S = 60.0
IDLE_POLL_S = 1.0

__all__ = ["IDLE_LIMIT_S", "Pauses"]


class Pauses:
    """The pause before a run.

    Args:
        cool_down_s: how long nothing is run.
        look: says who else works on the machine, nobody if it is idle; None where that is not asked.
        interrupts: signals to lucid, which end a pause.
        observer: is told about each pause.
        idle_limit_s: how long lucid waits for an idle machine.
        poll_s: time between two looks.
    """

    def __init__(
        self,
        *,
        cool_down_s: float,
        look: Callable[[], Sequence[str]] | None,
        interrupts: Interrupts,
        observer: Observer,
        idle_limit_s: float = IDLE_LIMIT_S,
        poll_s: float = IDLE_POLL_S,
    ) -> None:
        self._cool_down_s = cool_down_s
        self._look = look
        self._interrupts = interrupts
        self._observer = observer
        self._idle_limit_s = idle_limit_s
        self._poll_s = poll_s

    def take(self) -> tuple[str, ...]:
        """Wait as long as it takes; return what the next run should note."""
        if self._cool_down_s:
            self._observer.waiting(f"cooling down for {self._cool_down_s:g} s")
            self._sleep(self._cool_down_s)
        return () if self._look is None else self._wait_for_idle(self._look)

    def _wait_for_idle(self, look: Callable[[], Sequence[str]]) -> tuple[str, ...]:
        deadline = time.monotonic() + self._idle_limit_s
        told: Sequence[str] = ()
        while self._interrupts.first is None:
            busy = look()
            if not busy:
                return ()
            if time.monotonic() >= deadline:
                return (f"it began although the machine was not idle: {'; '.join(busy)}",)
            if busy != told:
                told = busy
                self._observer.waiting(f"waiting for an idle machine: {'; '.join(busy)}")
            self._sleep(self._poll_s)
        return ()

    def _sleep(self, seconds: float) -> None:
        """Wait, but no longer than until a signal comes."""
        deadline = time.monotonic() + seconds
        while self._interrupts.first is None and (rest := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                self._interrupts.events.get(timeout=rest)
