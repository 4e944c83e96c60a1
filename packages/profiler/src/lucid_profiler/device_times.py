"""How long the device worked on each optimizer step: pairs of CUDA events that nobody ever waits for.

An event is recorded before and after the step on the stream that is current there; the result is read some steps
later, when the device has passed both, and goes into a ring file. The time of a step lasts from the end of the same
optimizer's step before it to its own end, so that it covers the forward and backward work behind it; the first one,
and one after a step that was not measured, has none. What streams do meanwhile is in it, waiting for the host included.
"""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lucid_profiler.ring import CAPACITY, Layout, SlotWriter, read_slots

MAX_PENDING = 256
"""Steps an optimizer's host may be ahead of the device; further ones are not measured, and counted."""

_LAYOUT = Layout(b"LUCIDDEV", "qqqII", name="device times")  # host begin, optimizer, step, index and step of optimizer
_NO_TIME = -1
_MAX_RESULTS = 2  # read after a step: one keeps up, two catch up

__all__ = ["MAX_PENDING", "DeviceRecord", "DeviceTimes", "DeviceTrace", "TimingEvent", "read_device_times"]


class TimingEvent(Protocol):
    """What is needed of `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark this place in the current stream."""

    def query(self) -> bool:
        """Return whether the device has passed the place."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to another; both have been passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """What the device took for one optimizer step.

    Attributes:
        begin_ns: begin of the step on the host, as in the step's own record, on the clock of `time.monotonic_ns`.
        optimizer: index of the optimizer.
        step: number of its step, from 1.
        optimizer_ns: device time from the begin of `step()` to its end; None where the two were on streams that do not
            follow each other.
        step_ns: device time from the end of the step before to the end of this one; None where that was not measured.
    """

    begin_ns: int
    optimizer: int
    step: int
    optimizer_ns: int | None
    step_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTrace:
    """The readable records of a file, oldest first, and how many are missing and why, as for steps."""

    records: tuple[DeviceRecord, ...] = ()
    num_written: int = 0
    num_overwritten: int = 0
    num_torn: int = 0


def read_device_times(path: Path) -> DeviceTrace:
    """Read every whole record of a file of device times.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file.
    """
    trace = read_slots(path, _LAYOUT)
    return DeviceTrace(
        records=tuple(
            DeviceRecord(
                begin_ns=begin_ns,
                optimizer=optimizer,
                step=step,
                optimizer_ns=None if optimizer_ns < 0 else optimizer_ns,
                step_ns=None if step_ns < 0 else step_ns,
            )
            for begin_ns, optimizer_ns, step_ns, optimizer, step in trace.rows
        ),
        num_written=trace.num_written,
        num_overwritten=trace.num_overwritten,
        num_torn=trace.num_torn,
    )


class _Step:
    """A step whose events the device may not have passed yet."""

    __slots__ = ("before", "begin", "begin_ns", "end", "number")

    def __init__(
        self, number: int, begin_ns: int, *, begin: TimingEvent, end: TimingEvent, before: TimingEvent | None
    ) -> None:
        self.number = number
        self.begin_ns = begin_ns
        self.begin = begin
        self.end = end
        self.before = before


class _Chain:
    """The steps of one optimizer on one device: the one under way, those that wait for results, the last one's end."""

    __slots__ = ("begin", "last_end", "waiting")

    def __init__(self) -> None:
        self.begin: TimingEvent | None = None
        self.last_end: TimingEvent | None = None
        self.waiting: deque[_Step] = deque()


class DeviceTimes:
    """Measures steps; the caller makes the device current whose stream does the work.

    Args:
        path: ring file to create at the first result.
        make_event: makes an event that can be timed.
        is_capturing: says whether the current stream is being captured; then nothing is recorded or asked.
        capacity: records in the file.

    Attributes:
        num_steps: steps that ended.
        num_results: steps whose result was written.
        num_captured: steps of which at least one end was inside a capture.
        num_behind: steps that were not measured because the device was too far behind.
    """

    def __init__(
        self,
        path: Path,
        *,
        make_event: Callable[[], TimingEvent] | None = None,
        is_capturing: Callable[[], bool] | None = None,
        capacity: int = CAPACITY,
    ) -> None:
        self.num_steps = 0
        self.num_results = 0
        self.num_captured = 0
        self.num_behind = 0
        self._path = path
        self._capacity = capacity
        self._make_event = make_event or _make_cuda_event
        self._is_capturing = is_capturing or _is_capturing
        self._ring: SlotWriter | None = None
        self._chains: dict[tuple[int, int], _Chain] = {}
        self._spare: dict[int, list[TimingEvent]] = {}  # by device, to which an event belongs

    def begin(self, optimizer: int, *, device: int) -> None:
        """Mark the begin of a step; one that never ended is forgotten."""
        chain = self._chains.get((optimizer, device))
        if chain is None:
            chain = self._chains[optimizer, device] = _Chain()
        begin, chain.begin = chain.begin, None
        if self._is_capturing() or len(chain.waiting) >= MAX_PENDING:
            return
        if begin is None:
            begin = self._event(device)
        begin.record()
        chain.begin = begin

    def end(self, optimizer: int, *, device: int, step: int, begin_ns: int) -> None:
        """Mark the end of a step, and write what the device has finished meanwhile.

        Args:
            optimizer: index of the optimizer.
            device: index of the device.
            step: number of the step.
            begin_ns: begin of the step on the host, not 0.

        Raises:
            OSError: the file cannot be created.
            RuntimeError: CUDA reports an error.
        """
        self.num_steps += 1
        chain = self._chains.get((optimizer, device))
        if chain is None:
            return
        if self._is_capturing():
            self.num_captured += 1
            chain.begin = chain.last_end = None
            return
        begin, before = chain.begin, chain.last_end
        chain.begin = chain.last_end = None
        if begin is not None:
            end = self._event(device)
            end.record()
            chain.last_end = end
            chain.waiting.append(_Step(step, begin_ns, begin=begin, end=end, before=before))
        elif len(chain.waiting) >= MAX_PENDING:
            self.num_behind += 1
        else:
            self.num_captured += 1
        self._read_results(optimizer, device, chain, limit=_MAX_RESULTS)

    def settle(self) -> None:
        """Write everything that the device has finished; for after a synchronisation of the caller's.

        Raises:
            OSError: the file cannot be created.
            RuntimeError: CUDA reports an error.
        """
        for (optimizer, device), chain in self._chains.items():
            self._read_results(optimizer, device, chain, limit=MAX_PENDING)

    def devices(self) -> list[int]:
        """Return the devices on which steps were measured."""
        return sorted({device for _, device in self._chains})

    def _event(self, device: int) -> TimingEvent:
        spare = self._spare.setdefault(device, [])
        return spare.pop() if spare else self._make_event()

    def _read_results(self, optimizer: int, device: int, chain: _Chain, *, limit: int) -> None:
        waiting, spare = chain.waiting, self._spare.setdefault(device, [])
        while limit and waiting and waiting[0].end.query() and waiting[0].begin.query():
            limit -= 1
            step = waiting.popleft()
            self._write(step, optimizer)
            spare.append(step.begin)
            if step.before is not None:
                spare.append(step.before)

    def _write(self, step: _Step, optimizer: int) -> None:
        if self._ring is None:
            self._ring = SlotWriter(self._path, _LAYOUT, capacity=self._capacity)
        optimizer_ns = _elapsed_ns(step.begin, step.end)
        step_ns = _NO_TIME if step.before is None else _elapsed_ns(step.before, step.end)
        self._ring.append(step.begin_ns, optimizer_ns, step_ns, optimizer & 0xFFFFFFFF, step.number & 0xFFFFFFFF)
        self.num_results += 1


def _elapsed_ns(begin: TimingEvent, end: TimingEvent) -> int:
    return max(_NO_TIME, round(begin.elapsed_time(end) * 1e6))


def _make_cuda_event() -> TimingEvent:
    event: TimingEvent = sys.modules["torch"].cuda.Event(enable_timing=True)
    return event


def _is_capturing() -> bool:
    return bool(sys.modules["torch"].cuda.is_current_stream_capturing())
