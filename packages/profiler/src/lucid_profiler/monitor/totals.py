"""Sums over processes of what only grows, such as processor time; what a process used does not go with it.

Linux adds what a process used to the parent that asks for its status, before the process leaves /proc. A parent that
ignores the signal of its children never asks, and a process outside the tree asks in vain for us.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ["Part", "Total"]


class Part(NamedTuple):
    """What one process contributes: its amount, and the counter to which the amounts of its children are added."""

    parent: int
    amount: int
    inherited: int


class Total:
    """A sum over all processes that ever were.

    Of a process that is gone, the last known amount is kept unless its parent has gained as much. Where the counter of
    the parent holds more than its children's amounts, as that of I/O does, what it did itself meanwhile hides a loss.

    Args:
        inherited: reads that counter of a process now, by its number; None where it is gone.
    """

    def __init__(self, inherited: Callable[[int], int | None]) -> None:
        self._inherited = inherited
        self._latest: dict[int, Part] = {}
        self._lost = 0
        self._total = 0

    def update(self, living: Mapping[int, Part]) -> int:
        """Take in the processes that are there, parents read before their children; return the sum over all."""
        gone = self._latest.keys() - living.keys()
        left: Counter[int | None] = Counter()
        for pid in gone:
            left[self._heir(pid, living)] += self._latest[pid].amount
        self._lost += sum(max(0, amount - self._gained(heir, living)) for heir, amount in left.items())
        self._latest = dict(living)
        # A parent may have been read before it asked: its gain shows at the next look, and a total does not fall.
        self._total = max(self._total, self._lost + sum(part.amount for part in living.values()))
        return self._total

    def _heir(self, pid: int, living: Mapping[int, Part]) -> int | None:
        """Return the nearest ancestor that is there; None where there is none."""
        seen: set[int] = set()
        while pid in self._latest and pid not in living and pid not in seen:
            seen.add(pid)
            pid = self._latest[pid].parent
        return pid if pid in living else None

    def _gained(self, heir: int | None, living: Mapping[int, Part]) -> int:
        if heir is None:
            return 0
        before = self._latest[heir].inherited if heir in self._latest else 0
        now = self._inherited(heir)
        return (living[heir].inherited if now is None else now) - before
