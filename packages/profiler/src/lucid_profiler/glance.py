"""What a run shows of itself while it goes on: its newest step and its GPU memory, from the ends of its files.

Nobody is asked and nothing is locked: a look opens two files, reads a few KiB that the page cache holds, and writes
nothing, so that neither the run nor its monitor notices. What is not known is None.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lucid_profiler import jsonio
from lucid_profiler.monitor.records import Event, Header, Record, Sample, from_fields
from lucid_profiler.ring import RingTail, StepRecord

_NUM_RECORDS = 16  # that are looked at: more than a program has optimizers that take turns
_MAX_READ_BYTES = 64 << 10  # of the monitor's log at one look, some ten seconds of a GPU
_TELLING = (b'"process_memory_bytes":', b'"devices":')
_STALE_NS = 5_000_000_000

__all__ = ["Glance", "Glancer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """One look at a run.

    Attributes:
        step: number of the newest step of its first optimizer, from 1.
        step_ns: from the begin of the step before to the begin of that one.
        memory_bytes: GPU memory of the run; of several devices, on the one where it has most.
        used_bytes: memory of its only device that anybody uses, where the driver does not tell whose it is.
    """

    step: int | None = None
    step_ns: int | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None


class Glancer:
    """Looks at a run that goes on.

    Args:
        run_dir: directory in which its agents and its monitor write.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._steps: RingTail | None = None
        self._path: Path | None = None  # of its steps
        self._log = _LogEnd(run_dir / "monitor.jsonl")

    def look(self) -> Glance:
        """Return what is known now; what cannot be read is None."""
        step = step_ns = None
        with suppress(OSError, ValueError):
            path = _followed(self._run_dir, self._path)
            if path is not None and path != self._path:
                self._path, self._steps = path, RingTail(path)
            if self._steps is not None:
                step, step_ns = _newest_step(self._steps.read(_NUM_RECORDS))
        with suppress(OSError):
            self._log.read_on()
        own, used = self._log.memory_bytes(time.monotonic_ns())
        return Glance(step=step, step_ns=step_ns, memory_bytes=own, used_bytes=used)


def _followed(run_dir: Path, path: Path | None) -> Path | None:
    """Return the steps to look at: of the process that `path` is of, those of what it executed last.

    Of several processes, the ranks of a job, one speaks for all: they take their steps together.
    """
    by_pid: dict[str, list[tuple[int, Path]]] = {}
    for each in run_dir.glob("steps-*.ring"):
        pid, count = _pid_and_count(each)
        by_pid.setdefault(pid, []).append((count, each))
    followed = min(by_pid, default=None) if path is None else _pid_and_count(path)[0]
    return max(by_pid[followed])[1] if followed in by_pid else path


def _pid_and_count(path: Path) -> tuple[str, int]:
    pid, _, count = path.stem.partition("-")[2].partition(".")
    return pid, int(count) if count.isdecimal() else 0


def _newest_step(records: Sequence[StepRecord]) -> tuple[int | None, int | None]:
    """Return the number of the newest step of the first optimizer, and the time from the step before to that one."""
    first = min((record.optimizer for record in records), default=None)
    own = [record for record in records if record.optimizer == first]
    if not own:
        return None, None
    step_ns = own[-1].begin_ns - own[-2].begin_ns if len(own) > 1 else 0
    return own[-1].step, step_ns if step_ns > 0 else None


class _LogEnd:
    """Follows a monitor's log: each look reads the lines that came since the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._devices: tuple[str, ...] = ()  # that the run may use
        self._own: dict[str, tuple[int, int | None]] = {}  # by device: when, and how much of it is the run's
        self._used: dict[str, tuple[int, int | None]] = {}

    def read_on(self) -> None:
        """Take in what is new.

        Raises:
            OSError: the log cannot be read.
        """
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < self._offset:
                self._offset = 0  # it was set aside, and another one begun
            begin = max(self._offset, size - _MAX_READ_BYTES)
            data = os.pread(fd, size - begin, begin)
        finally:
            os.close(fd)
        lines = data.split(b"\n")
        self._offset = begin + len(data) - len(lines.pop())  # the last one may still be written
        for line in lines:
            # The run's memory is in every tenth sample; of what all samples have, the newest will do.
            if line is lines[-1] or any(name in line for name in _TELLING):
                with suppress(ValueError):  # where it was not read from its begin
                    self._take(from_fields(jsonio.loads(line)))

    def memory_bytes(self, now_ns: int) -> tuple[int | None, int | None]:
        """Return the memory of the run, or if that is not known the used memory of its only device."""
        own = [_fresh(self._own.get(uuid), now_ns) for uuid in self._devices]
        known = [value for value in own if value is not None]
        if known:
            return max(known), None
        return None, _fresh(self._used.get(self._devices[0]), now_ns) if len(self._devices) == 1 else None

    def _take(self, record: Record | None) -> None:
        if isinstance(record, Header):
            self._find_devices(record.devices)
        elif isinstance(record, Event) and record.name == "devices":
            self._find_devices(record.data.get("devices") or ())
        elif isinstance(record, Sample):
            for uuid, values in record.gpus.items():
                for field, found in (("process_memory_bytes", self._own), ("memory_used_bytes", self._used)):
                    if field in values:
                        value = values[field]
                        found[uuid] = (record.mono_ns, None if value is None else int(value))

    def _find_devices(self, devices: "tuple[Mapping[str, Any], ...] | list[Mapping[str, Any]]") -> None:
        self._devices = tuple(str(device["uuid"]) for device in devices if device.get("is_target", True))


def _fresh(reading: tuple[int, int | None] | None, now_ns: int) -> int | None:
    """Return a reading unless it is old: a monitor that died says nothing of now."""
    return reading[1] if reading is not None and now_ns - reading[0] <= _STALE_NS else None
