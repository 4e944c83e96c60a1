"""How much time an experiment still takes; pure."""

from statistics import mean

__all__ = ["Estimate", "duration"]


def duration(seconds: float) -> str:
    """Return a time for reading: seconds below two minutes, minutes below two hours, then hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class Estimate:
    """How long the runs to come will take, from those that succeeded.

    The first pair of a machine is slow, so discarded runs count only as long as there are no others.

    Args:
        num_runs: runs in all.
        pause_s: how long the machine cools down before each of them but the first.
    """

    def __init__(self, num_runs: int, *, pause_s: float = 0.0) -> None:
        self._num_runs = self._num_left = num_runs
        self._pause_s = pause_s
        self._discarded: list[float] = []
        self._measured: list[float] = []

    def add(self, seconds: float, *, discarded: bool, succeeded: bool) -> None:
        """Take note of a run, with the pause before it; the first has none, and stands for others that have."""
        is_first = self._num_left == self._num_runs
        self._num_left -= 1
        if succeeded:
            (self._discarded if discarded else self._measured).append(seconds + self._pause_s * is_first)

    def left_s(self, since_last_s: float = 0.0) -> float | None:
        """Return the time that remains so long after the end of the last run; None if nothing is known of it."""
        one_s = self._one_s
        if one_s is None or not self._num_left:
            return None
        # A run that takes longer than the others leaves the others to come.
        return (self._num_left - 1) * one_s + max(0.0, one_s - since_last_s)

    def done(self, since_last_s: float) -> float | None:
        """Return the share of the runs that is behind; None if nothing is known of it."""
        one_s = self._one_s
        if not one_s:
            return None
        return (self._num_runs - self._num_left + min(1.0, since_last_s / one_s)) / self._num_runs

    @property
    def _one_s(self) -> float | None:
        typical = self._measured or self._discarded
        return mean(typical) if typical else None
