"""What is read at which tick: everything has a period, may take its share of a core, and is put off only so long.

The first reading of each tier is not charged: it meets everything for the first time, and the next must not wait for
that. How often each tier was truly read is kept, since a share that is used up makes it rarer than its period.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from lucid_profiler.monitor.schedule import Pacer

SLOW_NS = 1_000_000_000
# Shares of one processor's time. What is put off is read after its limit nevertheless: only a tree of more than about
# 130 processes takes more than its share. For a PSS the kernel walks all pages of a process, tens of ms for 2 GB, and
# the process waits for that where it asks for memory: it may be put off for longer.
_MAX_TREE_SHARE = 0.004
_MAX_SCAN_SHARE = 0.002
_MAX_PSS_SHARE = 0.001
_MAX_WAIT_NS = 2_000_000_000
_MAX_PSS_WAIT_NS = 60_000_000_000

__all__ = ["SLOW_NS", "TIERS", "Plan", "Tier"]

Tier = Literal["tree", "children", "pss", "processes"]
"""Processor time, memory and I/O of the processes; who they are; their PSS; the driver's lists of processes."""
TIERS: Mapping[Tier, tuple[int, float, int]] = MappingProxyType(
    {
        "tree": (0, _MAX_TREE_SHARE, _MAX_WAIT_NS),
        "children": (SLOW_NS, _MAX_SCAN_SHARE, _MAX_WAIT_NS),
        "pss": (SLOW_NS, _MAX_PSS_SHARE, _MAX_PSS_WAIT_NS),
        "processes": (SLOW_NS, 1.0, SLOW_NS),
    }
)
"""Shortest time between two readings (0: every tick), share of a core, and longest time that they are put off."""


class Plan:
    """Says what is due, and counts what was done.

    Args:
        begin_ns: monotonic time from which stretches without a reading are counted.
    """

    def __init__(self, begin_ns: int) -> None:
        self._pacers = {
            tier: Pacer(period_ns=period_ns, max_share=max_share, max_wait_ns=max_wait_ns)
            for tier, (period_ns, max_share, max_wait_ns) in TIERS.items()
        }
        self._latest_ns = dict.fromkeys(TIERS, begin_ns)
        self._longest_ns = dict.fromkeys(TIERS, 0)
        self._num = dict.fromkeys(TIERS, 0)

    def is_due(self, tier: Tier, deadline_ns: int) -> bool:
        """Return whether a tier is to be read at this deadline."""
        return self._pacers[tier].is_due(deadline_ns)

    def note(self, tier: Tier, deadline_ns: int, *, now_ns: int, cost_ns: int) -> None:
        """Take down that a tier was read.

        Args:
            tier: which.
            deadline_ns: the tick at which it was due.
            now_ns: when the tick was served.
            cost_ns: processor time that it took.
        """
        self._pacers[tier].spent(deadline_ns, cost_ns if self._num[tier] else 0)
        self._longest_ns[tier] = max(self._longest_ns[tier], now_ns - self._latest_ns[tier])
        self._latest_ns[tier] = now_ns
        self._num[tier] += 1

    def cadence(self, end_ns: int) -> dict[str, dict[str, int]]:
        """Return how often each tier was read and the longest time without; a tier that never was is absent."""
        return {
            tier: {"num": num, "longest_ns": max(self._longest_ns[tier], end_ns - self._latest_ns[tier])}
            for tier, num in self._num.items()
            if num
        }
