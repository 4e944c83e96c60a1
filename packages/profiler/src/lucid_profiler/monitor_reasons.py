"""Why fields of a monitor's log were null, at any moment of it."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from lucid_profiler.monitor.records import ReasonsChanged

__all__ = ["WhyNull"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNull:
    """The reasons of a log, each for as long as it held; fields are `host.<field>` or `gpu:<uuid>.<field>`.

    Attributes:
        changes: in the order of their times; each has all the reasons from then on.
        no_gpu: why there were no devices at first.
        came_ns: when there were; None where that has not come.
    """

    changes: Sequence[ReasonsChanged]
    no_gpu: str | None = None
    came_ns: int | None = None

    @property
    def latest(self) -> dict[str, str]:
        """The last reason of each field that was ever null."""
        return {name: reason for change in self.changes for name, reason in change.fields.items()}

    def at(self, name: str, at_ns: int) -> str | None:
        """Return why a field was null at a moment; None where the log does not say."""
        place = bisect_right(self.changes, at_ns, key=_time)
        reason = self.changes[place - 1].fields.get(name) if place else None
        is_before = name.startswith("gpu:") and (self.came_ns is None or at_ns < self.came_ns)
        return reason or (self.no_gpu if is_before else None)

    def during(self, name: str, begin_ns: int, end_ns: int) -> set[str]:
        """Return all the reasons that a field had in an interval, those that held at its begin included."""
        first = max(bisect_right(self.changes, begin_ns, key=_time) - 1, 0)
        last = bisect_left(self.changes, end_ns, key=_time)
        return {change.fields[name] for change in self.changes[first:last] if name in change.fields}


def _time(change: ReasonsChanged) -> int:
    return change.mono_ns
