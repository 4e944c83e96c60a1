"""When to sample: absolute deadlines that never pile up, work paced by its cost, and lateness in bounded memory."""

from collections import Counter
from dataclasses import dataclass

CREDIT_NS = 1_000_000_000  # whose share may be kept for one dear reading, so that it does not put off the next one
_BUCKET_BITS = 6  # 32 buckets an octave: a quantile is off by at most 1.6 %

__all__ = ["CREDIT_NS", "Distribution", "Pacer", "Schedule", "Tick"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One deadline that has come; `num_missed` before it were skipped, since they passed unnoticed."""

    deadline_ns: int
    late_ns: int
    num_missed: int


class Schedule:
    """Deadlines at `begin_ns` and every `interval_ns` after it, on the monotonic clock.

    Args:
        begin_ns: the first deadline.
        interval_ns: time between two deadlines.

    Raises:
        ValueError: the interval is not above 0.
    """

    def __init__(self, begin_ns: int, *, interval_ns: int) -> None:
        if interval_ns <= 0:
            raise ValueError(f"the interval is {interval_ns} ns; it must be above 0")
        self.interval_ns = interval_ns
        self.next_ns = begin_ns
        self.num_missed = 0

    def take(self, now_ns: int) -> Tick | None:
        """Return the latest deadline that has come, None if none has come since the last call."""
        if now_ns < self.next_ns:
            return None
        num_missed = (now_ns - self.next_ns) // self.interval_ns
        deadline_ns = self.next_ns + num_missed * self.interval_ns
        self.next_ns = deadline_ns + self.interval_ns
        self.num_missed += num_missed
        return Tick(deadline_ns=deadline_ns, late_ns=now_ns - deadline_ns, num_missed=num_missed)

    def end(self, end_ns: int) -> int:
        """Count what nobody serves any more: the deadlines that passed an interval and more before the end.

        Returns:
            How many these are.
        """
        num_missed = max(0, end_ns - self.next_ns) // self.interval_ns
        self.next_ns += num_missed * self.interval_ns
        self.num_missed += num_missed
        return num_missed


class Pacer:
    """Lets work happen once a period, and less often where it costs more than its share of time.

    The share of a second in which less was spent may be spent later.

    Args:
        period_ns: shortest time between two beginnings.
        max_share: highest part of all time that the work may take, as long as `max_wait_ns` allows.
        max_wait_ns: longest time between two beginnings, whatever the work costs.
    """

    def __init__(self, *, period_ns: int, max_share: float, max_wait_ns: int) -> None:
        self._period_ns = period_ns
        self._max_share = max_share
        self._max_wait_ns = max_wait_ns
        self._next_ns: int | None = None
        self._paid_ns: int | None = None  # when the share makes up for all that was spent

    def is_due(self, deadline_ns: int) -> bool:
        """Return whether the work may happen at this deadline."""
        return self._next_ns is None or deadline_ns >= self._next_ns

    def spent(self, deadline_ns: int, cost_ns: int) -> None:
        """Say what the work cost that was done at this deadline."""
        paid_ns = deadline_ns if self._paid_ns is None else max(self._paid_ns, deadline_ns - CREDIT_NS)
        self._paid_ns = min(paid_ns + int(cost_ns / self._max_share), deadline_ns + self._max_wait_ns)
        self._next_ns = max(deadline_ns + self._period_ns, self._paid_ns)


class Distribution:
    """Counts of durations in ns by size, in memory that does not grow with their number."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._num = 0
        self.max_ns: int | None = None

    def add(self, duration_ns: int) -> None:
        """Count one duration, 0 or above."""
        self._counts[_bucket(duration_ns)] += 1
        self._num += 1
        self.max_ns = duration_ns if self.max_ns is None else max(self.max_ns, duration_ns)

    def quantile(self, share: float) -> int | None:
        """Return the smallest duration that `share` of all do not exceed, within 1.6 %; None if there are none."""
        wanted = max(1, share * self._num)
        seen = 0
        for bucket, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return _middle(bucket)
        return None

    def summary(self) -> dict[str, int | None]:
        """Return median, 99th percentile and maximum."""
        return {"median": self.quantile(0.5), "p99": self.quantile(0.99), "max": self.max_ns}


def _shift(duration_ns: int) -> int:
    return max(0, duration_ns.bit_length() - _BUCKET_BITS)


def _bucket(duration_ns: int) -> int:
    shift = _shift(duration_ns)
    return (duration_ns >> shift) << shift


def _middle(bucket: int) -> int:
    return bucket + ((1 << _shift(bucket)) - 1) // 2
