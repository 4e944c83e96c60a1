"""What torch's CUDA allocator holds, read at a stated interval in the training thread.

Only counters are read: nothing is emptied, no peak is reset, and a device that the program does not use is left alone.
"""

import inspect
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

INTERVAL_S = 1.0
POOLS_INTERVAL_NS = 10_000_000_000  # a snapshot lists every block: milliseconds
MAX_LINES = 100_000
_NOT_READ: Mapping[str, int | None] = {"private_pools_bytes": None, "private_pools_allocated_bytes": None}

__all__ = ["INTERVAL_S", "MAX_LINES", "AllocatorReadings", "interval_ns", "private_pools"]


class Write(Protocol):
    """Writes a line of the journal."""

    def __call__(self, kind: str, **fields: Any) -> None:
        """Write a line of this kind."""


def interval_ns(text: str | None) -> int:
    """Return the interval that a setting in seconds names, 0 for off; the default where nothing is set.

    Raises:
        ValueError: it is no number of seconds, or a negative one.
    """
    if not text:
        return int(INTERVAL_S * 1e9)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ValueError(f"LUCID_ALLOCATOR_INTERVAL_S is {text[:40]!r}, not a number of seconds from 0 (off) on")
    return int(seconds * 1e9)


def private_pools(segments: Iterable[Mapping[str, Any]], device: int) -> dict[str, int | None]:
    """Return the bytes that the pools of CUDA graphs and users have reserved, and those of them that are allocated.

    Both are None where segments do not name their pool.
    """
    own = [segment for segment in segments if segment.get("device") == device]
    private = [segment for segment in own if tuple(segment.get("segment_pool_id", ())) != (0, 0)]
    is_known = all("segment_pool_id" in segment for segment in own)
    return {
        "private_pools_bytes": sum(int(segment["total_size"]) for segment in private) if is_known else None,
        "private_pools_allocated_bytes": sum(int(segment["allocated_size"]) for segment in private)
        if is_known
        else None,
    }


class AllocatorReadings:
    """Writes a line for each device in use whenever the interval has passed.

    Args:
        write: takes the lines.
        interval_ns: least time between two readings; 0 turns them off.
        with_private_pools: whether a snapshot is taken as well, at most every ten seconds.
        cuda: stands for `torch.cuda`.
        clock_ns: the clock of the lines.
    """

    def __init__(
        self,
        write: Write,
        *,
        interval_ns: int,
        with_private_pools: bool = False,
        cuda: Any = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._write_line = write
        self._interval_ns = interval_ns
        self._with_private_pools = with_private_pools
        self._given_cuda = cuda
        self._clock_ns = clock_ns
        self._due_ns = 0
        self._pools_due_ns = 0
        self._num_lines = 0
        self._devices: set[int] = set()

    def after_step(self, devices: Collection[int], *, step: int, now_ns: int) -> None:
        """Take a reading if one is due.

        Args:
            devices: those of the optimizer which stepped; none if it does not use CUDA.
            step: number of steps so far.
            now_ns: time of the step's end.
        """
        if not devices or not self._interval_ns:
            return
        self._devices.update(devices)
        if now_ns >= self._due_ns and not self._cuda.is_current_stream_capturing():
            self._due_ns = now_ns + self._interval_ns
            with_pools = self._with_private_pools and now_ns >= self._pools_due_ns
            if with_pools:
                self._pools_due_ns = now_ns + POOLS_INTERVAL_NS
            self._read(step, with_pools=with_pools)

    def read_now(self, *, step: int) -> None:
        """Take a reading of everything that was asked for, due or not; where no device was in use, nothing."""
        if self._devices:
            self._read(step, with_pools=self._with_private_pools)

    @property
    def _cuda(self) -> Any:
        return self._given_cuda or sys.modules["torch"].cuda

    def _read(self, step: int, *, with_pools: bool) -> None:
        segments = self._segments() if with_pools else None
        for device in sorted(self._devices):
            if self._num_lines >= MAX_LINES:
                self._write_line(
                    "note", text=f"allocator readings end after {MAX_LINES:,} lines: set a longer interval"
                )
                self._interval_ns = 0
                self._devices.clear()
                return
            self._num_lines += 1
            now_ns = self._clock_ns()
            # Nested, since flattening the names takes most of the time of memory_stats().
            stats = self._cuda.memory_stats_as_nested_dict(device)
            pools = _NOT_READ if segments is None else private_pools(segments, device)
            self._write_line("allocator", mono_ns=now_ns, step=step, device=device, **_fields(stats), **pools)

    def _segments(self) -> Any:
        snapshot = self._cuda.memory_snapshot
        # Histories of allocations, which only a program that asked for them has, make a snapshot slow.
        if "include_traces" in inspect.signature(snapshot).parameters:
            return snapshot(include_traces=False)
        return snapshot()


def _fields(stats: Mapping[str, Any]) -> dict[str, int | None]:
    allocated, reserved = (stats.get(name, {}).get("all", {}) for name in ("allocated_bytes", "reserved_bytes"))
    return {
        "allocated_bytes": allocated.get("current"),
        "reserved_bytes": reserved.get("current"),
        "peak_allocated_bytes": allocated.get("peak"),
        "peak_reserved_bytes": reserved.get("peak"),
        "num_alloc_retries": stats.get("num_alloc_retries"),
        "num_ooms": stats.get("num_ooms"),
    }
