"""Reads what each process of a run left, line by line; a line that does not fit is dropped, counted and noted."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lucid_profiler import jsonio
from lucid_profiler.codec import from_plain
from lucid_profiler.device_times import DeviceTrace, read_device_times
from lucid_profiler.entries import ENTRY_TYPES, EndEntry, FitEntry, StateEntry
from lucid_profiler.loader_waits import WaitTrace, read_waits
from lucid_profiler.ring import StepTrace, read_ring

_MAX_STATE_BYTES = 16 * 2**20
"""Of a state's journal line. With more, single tensors are not named: a line of a report has a limit of its own."""
_NO_STEPS = StepTrace(records=(), num_written=0, num_overwritten=0, num_torn=0, first_begin_ns=None)
_NO_DEVICE_TIMES = DeviceTrace()
_NO_WAITS = WaitTrace()

E = TypeVar("E")

__all__ = ["ProcessTrace", "canonical_order", "have_ranks", "read_traces", "start_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTrace:
    """What one process left: its journal entries by type, in order, its steps with the device's times, its waits."""

    name: str = ""
    """Of its files: the pid, with a count where several had it."""
    entries: Mapping[type, Sequence[Any]] = field(default_factory=dict)
    steps: StepTrace = _NO_STEPS
    device_times: DeviceTrace = _NO_DEVICE_TIMES
    waits: WaitTrace = _NO_WAITS
    faults: tuple[str, ...] = ()
    """What could not be read, each counted as an error of the agent."""

    def all(self, kind: type[E]) -> Sequence[E]:
        """Return all entries of a type."""
        return self.entries.get(kind, ())

    def last(self, kind: type[E]) -> E | None:
        """Return the last entry of a type, if there is one."""
        found = self.all(kind)
        return found[-1] if found else None

    @property
    def rank(self) -> int | None:
        """The rank that torchrun gave."""
        end = self.last(EndEntry)
        return end.rank if end else None

    @property
    def states(self) -> dict[str, StateEntry]:
        """The last state of each part."""
        return {entry.part: entry for entry in self.all(StateEntry)}


def read_traces(run_dir: Path) -> list[ProcessTrace]:
    """Read the journals and rings of a run's directory, a process each.

    Their names end with the pid, and a count where several processes had it or one was executed anew.
    """
    names = {
        path.stem.partition("-")[2] for pattern in ("agent-*.jsonl", "steps-*.ring") for path in run_dir.glob(pattern)
    }
    return [_read_trace(run_dir, name) for name in sorted(names)]


def have_ranks(traces: Sequence[ProcessTrace]) -> bool:
    """Return whether every process has a rank, and no two the same."""
    ranks = [trace.rank for trace in traces]
    return None not in ranks and len(set(ranks)) == len(ranks)


def start_order(trace: ProcessTrace) -> tuple[int, int]:
    """Sort key: the rank, then the time of the start, of the first step or of the interval; last what left no time."""
    end, fits = trace.last(EndEntry), trace.all(FitEntry)
    fit_ns = fits[0].begin_ns if fits else None
    begin_ns = (end.begin_ns if end else None) or trace.steps.first_begin_ns or fit_ns or sys.maxsize
    return (-1 if trace.rank is None else trace.rank, begin_ns)


def canonical_order(traces: Sequence[ProcessTrace]) -> list[ProcessTrace]:
    """Order the processes of a run the same way in every run: by rank, else by their states.

    Who starts first is a race, so it says nothing about which process of another run is the same.
    """
    if have_ranks(traces):
        return sorted(traces, key=lambda trace: trace.rank or 0)
    return sorted(traces, key=lambda trace: (not trace.states, sorted(_digests(trace)), start_order(trace)))


def _digests(trace: ProcessTrace) -> list[tuple[str, str]]:
    return [(part, entry.digest) for part, entry in trace.states.items()]


def _read_trace(run_dir: Path, name: str) -> ProcessTrace:
    entries: dict[type, list[Any]] = {}
    faults: list[str] = []
    journal = run_dir / f"agent-{name}.jsonl"
    # The last piece is empty, or a line that was being written when the process ended.
    for line in journal.read_bytes().split(b"\n")[:-1] if journal.exists() else ():
        entry = _entry(line)
        if isinstance(entry, str):
            faults.append(entry)
        else:
            entries.setdefault(type(entry), []).append(entry)
    steps = _read_file(run_dir / f"steps-{name}.ring", read_ring, faults)
    device_times = _read_file(run_dir / f"device-{name}.ring", read_device_times, faults)
    waits = _read_file(run_dir / f"waits-{name}.ring", read_waits, faults)
    return ProcessTrace(
        name=name,
        entries=entries,
        steps=steps or _NO_STEPS,
        device_times=device_times or _NO_DEVICE_TIMES,
        waits=waits or _NO_WAITS,
        faults=tuple(faults),
    )


def _read_file(path: Path, read: Callable[[Path], E], faults: list[str]) -> E | None:
    """Return what a file holds, None if there is none or it cannot be read; the fault is added."""
    if path.exists():
        try:
            return read(path)
        except (OSError, ValueError) as error:
            faults.append(str(error))
    return None


def _entry(line: bytes) -> Any:
    """Return the entry of a line, None if its kind is only for people, or in words why it was dropped."""
    try:
        return _parse(line)
    except ValueError as error:
        return f"a line of its journal was dropped: {error}"[:500]


def _parse(line: bytes) -> Any:
    fields = jsonio.loads(line)
    if not isinstance(fields, dict) or not isinstance(kind := fields.pop("kind", None), str):
        raise ValueError("it has no kind")  # noqa: TRY004 - as loads does
    if kind not in ENTRY_TYPES:
        return None
    if kind == "state" and len(line) > _MAX_STATE_BYTES:
        fields |= {"tensors": {}, "values": {}}
    return from_plain(ENTRY_TYPES[kind], fields, Counter())
