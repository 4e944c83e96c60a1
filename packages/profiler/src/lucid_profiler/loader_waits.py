"""Times how long the main thread waits for its batches: each `next()` on an iterator of torch's DataLoader.

With loader processes that is a wait for them, without any it is the loading itself. torch is never imported from here.
"""

import sys
import threading
import time
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from lucid_profiler.journal import Guard
from lucid_profiler.ring import CAPACITY, Layout, SlotWriter, read_slots

_MODULE = "torch.utils.data.dataloader"
_BASE = "_BaseDataLoaderIter"  # of all its iterators, since torch 1.2
_WAITS = Layout(b"LUCIDBAT", "qqq", name="waits for batches")  # begin, end, sum of all waits up to this end

__all__ = ["LoaderWaits", "WaitTrace", "read_waits", "waited_ns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitTrace:
    """The waits of one process, on the clock of `time.monotonic_ns`.

    Attributes:
        num_waits: how many were recorded.
        waits: begin and end of each whose record is there, oldest first.
        first_begin_ns: begin of the very first one; None without any.
        lost_ns: length of all those whose records newer ones replaced; they lie before the others.
    """

    num_waits: int = 0
    waits: tuple[tuple[int, int], ...] = ()
    first_begin_ns: int | None = None
    lost_ns: int = 0


class LoaderWaits:
    """Records the waits of this process while it is installed.

    Args:
        path: file of the records; made at the first wait.
        guard: counts the agent's faults.
        capacity: records that the file holds; newer ones replace the oldest.

    Attributes:
        num_waits: how many there were, recorded or not.
    """

    def __init__(self, path: Path, *, guard: Guard, capacity: int = CAPACITY) -> None:
        self._path = path
        self._guard = guard
        self._capacity = capacity
        self._writer: SlotWriter | None = None
        self.num_waits = 0
        self._sum_ns = 0
        self._is_within = False
        self._is_recorded = True
        self._main_thread = threading.main_thread().ident
        self._base: Any = None
        self._original: Any = None
        self._own: Any = None

    def install(self) -> None:
        """Put a clock around the iterators' `__next__`, where torch has them."""
        base: Any = getattr(sys.modules.get(_MODULE), _BASE, None)
        original = getattr(base, "__next__", None)
        if original is None:
            return
        waits = self

        @wraps(original)
        def timed(iterator: Any) -> Any:
            # One within another is part of it; a thread of the program's own may wait where the training does not.
            if waits._is_within or threading.get_ident() != waits._main_thread:
                return original(iterator)
            begin_ns = time.monotonic_ns()
            try:
                waits._is_within = True
                return original(iterator)
            finally:
                waits._record(begin_ns, time.monotonic_ns())

        base.__next__ = timed
        self._base, self._original, self._own = base, original, timed

    def remove(self) -> None:
        """Take the clock away, unless somebody has put something around it since; what it has recorded stays."""
        self._main_thread = None
        base, self._base, self._writer = self._base, None, None
        if base is not None and base.__next__ is self._own:
            base.__next__ = self._original

    def _record(self, begin_ns: int, end_ns: int) -> None:
        self._is_within = False
        if self._main_thread is None:
            return
        self._sum_ns += end_ns - begin_ns
        if self._is_recorded:
            try:
                if self._writer is None:
                    self._writer = SlotWriter(self._path, _WAITS, capacity=self._capacity)
                self._writer.append(begin_ns, end_ns, self._sum_ns)
            except Exception as error:  # as a Guard does, which cannot say whose the fault was
                if not self._guard.takes(error):
                    raise
                self._is_recorded = False
        self.num_waits += 1


def read_waits(path: Path) -> WaitTrace:
    """Read every whole record of a file of waits.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file.
    """
    trace = read_slots(path, _WAITS)
    if not trace.rows:
        return WaitTrace()
    begin_ns, end_ns, sum_ns = trace.rows[0]
    return WaitTrace(
        num_waits=trace.num_written,
        waits=tuple((begin, end) for begin, end, _ in trace.rows),
        first_begin_ns=trace.first,
        lost_ns=sum_ns - (end_ns - begin_ns),
    )


def waited_ns(trace: WaitTrace, begin_ns: int, end_ns: int) -> int | None:
    """Return how much of an interval was waited for batches; None if records of it are lost.

    Args:
        trace: the waits.
        begin_ns: begin of the interval.
        end_ns: end of the interval.
    """
    total_ns = sum(max(0, min(end, end_ns) - max(begin, begin_ns)) for begin, end in trace.waits)
    if not trace.lost_ns:
        return total_ns
    are_lost_inside = trace.first_begin_ns is not None and begin_ns <= trace.first_begin_ns
    return total_ns + trace.lost_ns if are_lost_inside and trace.waits[0][0] <= end_ns else None
