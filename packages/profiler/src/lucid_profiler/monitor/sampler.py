"""Turns ticks into records: which fields are read when, why some are None, what is missing, and what it all cost."""

import dataclasses
import platform
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import lucid_profiler
from lucid_profiler.monitor import tree as proc
from lucid_profiler.monitor.book import Book
from lucid_profiler.monitor.clocks import Anchor, Clock, ClockWatch
from lucid_profiler.monitor.log import LogWriter
from lucid_profiler.monitor.readings import Reasons, Values
from lucid_profiler.monitor.records import AnchorTaken, End, Event, Gap, Header, Mark, Sample, TargetExit
from lucid_profiler.monitor.schedule import Distribution, Pacer, Schedule, Tick
from lucid_profiler.monitor.target import Target

SLOW_NS = 1_000_000_000
MAX_NAME_CHARS = 200
_MAX_FAULT_CHARS = 4000
# Shares of one processor's time; a tree of many processes is read less often rather than at a higher cost.
_MAX_TREE_SHARE = 0.004
_MAX_SCAN_SHARE = 0.002
_MAX_PSS_SHARE = 0.002

__all__ = ["MAX_NAME_CHARS", "SLOW_NS", "GpuReader", "NoGpus", "Sampler"]

Sheets = Mapping[str, tuple[Values, Reasons]]
"""By UUID: fields, and the reasons of those that are None."""


class GpuReader(Protocol):
    """What the sampler asks of the devices."""

    @property
    def reason(self) -> str | None:
        """Why there are no devices."""

    @property
    def devices(self) -> Sequence[Any]:
        """The identity of each device."""

    @property
    def memory_api(self) -> str | None:
        """Which version of the memory query is used."""

    @property
    def notes(self) -> Sequence[str]:
        """What a reader should know, each said once."""

    @property
    def nvml_ns(self) -> Mapping[str, int]:
        """Time spent in each call of the driver, in ns."""

    @property
    def num_calls(self) -> Mapping[str, int]:
        """How often each was called."""

    def read_fast(self) -> Sheets:
        """Read what is cheap."""

    def read_processes(self, pids: Collection[int]) -> Sheets:
        """Read the memory of processes."""

    def read_energy(self) -> Sheets:
        """Read the energy counters."""

    def reopen_if_due(self) -> object:
        """Try again to reach a driver that went away."""

    def close(self) -> None:
        """Let go of the driver."""


class NoGpus:
    """No devices, and why.

    Args:
        reason: a code of `readings.REASONS`.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.devices: tuple[Any, ...] = ()
        self.memory_api: str | None = None
        self.notes: list[str] = []
        self.nvml_ns: dict[str, int] = {}
        self.num_calls: dict[str, int] = {}

    def read_fast(self) -> Sheets:
        """Return nothing."""
        return {}

    def read_processes(self, pids: Collection[int]) -> Sheets:  # noqa: ARG002 - the interface of devices
        """Return nothing."""
        return {}

    def read_energy(self) -> Sheets:
        """Return nothing."""
        return {}

    def reopen_if_due(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Sampler:
    """Follows one process into one log.

    Args:
        target: the process.
        path: the log; an existing one is continued.
        gpus: the devices.
        clock: the clocks of the machine.
        interval_ns: time between two ticks.

    Attributes:
        num_samples: how many were taken.

    Raises:
        OSError: the log cannot be opened.
    """

    def __init__(self, target: Target, path: Path, *, gpus: GpuReader, clock: Clock, interval_ns: int) -> None:
        self.num_samples = 0
        self._target = target
        self._gpus = gpus
        self._devices = gpus.devices
        self._clock = clock
        self._watch = ClockWatch(clock)
        self._first = self._watch.anchor
        self._begin_cpu_ns = clock.cpu_ns()
        self._schedule = Schedule(clock.mono_ns(), interval_ns=interval_ns)
        self._tree = proc.Tree(target.pid, start_ticks=target.start_ticks)
        self._tree_pacer = Pacer(period_ns=0, max_share=_MAX_TREE_SHARE)
        self._scan_pacer = Pacer(period_ns=SLOW_NS, max_share=_MAX_SCAN_SHARE)
        self._pss_pacer = Pacer(period_ns=SLOW_NS, max_share=_MAX_PSS_SHARE)
        self._slow_pacer = Pacer(period_ns=SLOW_NS, max_share=1.0)
        self._late = Distribution()
        self._last_ns: int | None = None
        self._num_notes = 0
        self._log = LogWriter(path, header=self._header, mono_ns=clock.mono_ns)
        self._book = Book(self._log)

    @property
    def next_ns(self) -> int:
        """When the next tick is due, on the monotonic clock."""
        return self._schedule.next_ns

    def use(self, gpus: GpuReader) -> None:
        """Take these devices from now on; for before the first record, since its header names them."""
        self._gpus = gpus
        self._devices = gpus.devices

    def begin(self) -> None:
        """Write the first records, and let the first tick be due now."""
        self.mark("begin")
        self._schedule = Schedule(self._clock.mono_ns(), interval_ns=self._schedule.interval_ns)

    def tick(self) -> None:
        """Take a sample if one is due."""
        now_ns = self._clock.mono_ns()
        tick = self._schedule.take(now_ns)
        if tick is None:
            return
        self._check_clocks()
        if tick.num_missed and self._last_ns is not None:
            self._book.add_gap(Gap(begin_ns=self._last_ns, end_ns=now_ns, reason="late"))
        host = self._read_host(tick)
        gpus = self._read_gpus(tick)
        self._check_devices(now_ns)
        self._book.observe(now_ns, host, gpus)
        self._log.write(
            Sample(
                mono_ns=now_ns,
                late_ns=tick.late_ns,
                host=host[0],
                gpus={uuid: values for uuid, (values, _) in gpus.items()},
            )
        )
        self._late.add(tick.late_ns)
        self._last_ns = now_ns
        self.num_samples += 1
        self._log.sync(is_due_only=True)

    def mark(self, name: str) -> dict[str, Any]:
        """Record a moment with the energy counters; return its record's fields."""
        now_ns = self._clock.mono_ns()
        sheets = self._gpus.read_energy()
        energy = {uuid: values.get("energy_mj") for uuid, (values, _) in sheets.items()}
        mark = Mark(mono_ns=now_ns, name=name[:MAX_NAME_CHARS], energy_mj=energy, read_ns=self._clock.mono_ns())
        self._book.explain(now_ns, sheets)
        self._log.write(mark)
        self._log.sync()
        return {"mono_ns": mark.mono_ns, "read_ns": mark.read_ns, "energy_mj": energy}

    def flush(self) -> None:
        """Have everything written reach the disk."""
        self._log.sync()

    def note_exit(self) -> None:
        """Record that the target has ended."""
        status = self._target.exit_status()
        fields = None if status is None else dataclasses.asdict(status)
        self._log.write(TargetExit(mono_ns=self._clock.mono_ns(), pid=self._target.pid, status=fields))

    def note_fault(self, text: str) -> None:
        """Record a fault of the monitor itself."""
        self._log.write(Event(mono_ns=self._clock.mono_ns(), name="fault", data={"text": text[-_MAX_FAULT_CHARS:]}))

    def finish(self, status: str) -> None:
        """Write the last records and let go of log and devices.

        Args:
            status: why it ends, as in `records.End`.
        """
        self._check_clocks()
        self.mark("end")
        self._book.close_gaps(self._clock.mono_ns())
        self._gpus.close()
        self._log.write(self._end(status))
        self._log.close()

    def status(self) -> dict[str, Any]:
        """Return what there is to say so far."""
        return {
            "target": dict(self._target.describe()),
            "num_samples": self.num_samples,
            "num_missed": self._schedule.num_missed,
            "late_ns": self._late.summary(),
            "num_dropped_records": self._log.num_dropped,
            "num_devices": len(self._gpus.devices),
            "reason": self._gpus.reason,
            "own_cpu_s": self._own_cpu_s(),
            "wall_s": self._wall_s(),
        }

    def _read_host(self, tick: Tick) -> tuple[Values, Reasons]:
        begin_ns = self._clock.cpu_ns()
        if self._scan_pacer.is_due(tick.deadline_ns):
            self._tree.scan()
            self._scan_pacer.spent(tick.deadline_ns, self._clock.cpu_ns() - begin_ns)
        values: Values = {}
        reasons: Reasons = {}
        for pacer, read in ((self._tree_pacer, self._tree.read), (self._pss_pacer, self._tree.read_pss)):
            begin_ns = self._clock.cpu_ns()
            if pacer.is_due(tick.deadline_ns):
                more, why = read()
                values.update(more)
                reasons.update(why)
                pacer.spent(tick.deadline_ns, self._clock.cpu_ns() - begin_ns)
        values["memory_available_bytes"] = proc.read_available_bytes()
        if values["memory_available_bytes"] is None:
            reasons["memory_available_bytes"] = "not_supported"
        return values, reasons

    def _read_gpus(self, tick: Tick) -> dict[str, tuple[Values, Reasons]]:
        self._gpus.reopen_if_due()
        sheets = {uuid: (dict(values), dict(reasons)) for uuid, (values, reasons) in self._gpus.read_fast().items()}
        if self._slow_pacer.is_due(tick.deadline_ns):
            self._slow_pacer.spent(tick.deadline_ns, 0)
            for uuid, (values, reasons) in self._gpus.read_processes(self._tree.pids).items():
                sheet = sheets.setdefault(uuid, ({}, {}))
                sheet[0].update(values)
                sheet[1].update(reasons)
        return sheets

    def _check_clocks(self) -> None:
        anchor, jumps = self._watch.check()
        for jump in jumps:
            self._log.write(Event(mono_ns=jump.end_ns, name=jump.name, data=dataclasses.asdict(jump)))
            if jump.name == "suspend":
                self._book.add_gap(Gap(begin_ns=jump.begin_ns, end_ns=jump.end_ns, reason="suspend"))
        if anchor is not None:
            self._log.write(AnchorTaken(**dataclasses.asdict(anchor)))

    def _check_devices(self, now_ns: int) -> None:
        """Record the devices anew where the driver has come back with others, and what there is to say about them."""
        if self._gpus.devices != self._devices:
            self._devices = self._gpus.devices
            data = {"devices": _describe(self._devices), "reason": self._gpus.reason}
            self._log.write(Event(mono_ns=now_ns, name="devices", data=data))
        for text in self._gpus.notes[self._num_notes :]:
            self._num_notes += 1
            self._log.write(Event(mono_ns=now_ns, name="note", data={"text": text}))

    def _header(self, part: int) -> Header:
        return Header(
            target=self._target.describe(),
            started=_rfc3339(self._first),
            anchor=dataclasses.asdict(self._watch.anchor),
            interval_ns=self._schedule.interval_ns,
            tiers={"fast_ns": self._schedule.interval_ns, "slow_ns": max(SLOW_NS, self._schedule.interval_ns)},
            devices=_describe(self._gpus.devices),
            memory_api=self._gpus.memory_api,
            reason=self._gpus.reason,
            versions=_versions(),
            part=part,
        )

    def _end(self, status: str) -> End:
        calls = self._gpus.num_calls
        nvml_ns = self._gpus.nvml_ns
        return End(
            mono_ns=self._clock.mono_ns(),
            num_samples=self.num_samples,
            num_missed=self._schedule.num_missed,
            late_ns=self._late.summary(),
            gaps=self._book.gaps(),
            num_gaps=self._book.num_gaps,
            distinct=self._book.distinct(),
            own_cpu_s=self._own_cpu_s(),
            wall_s=self._wall_s(),
            nvml_s=sum(nvml_ns.values()) / 1e9,
            nvml_calls={call: {"num": num, "total_ns": nvml_ns.get(call, 0)} for call, num in calls.items()},
            num_dropped_records=self._log.num_dropped,
            status=status,
            max_rss_bytes=proc.read_own_peak_bytes(),
        )

    def _own_cpu_s(self) -> float:
        return (self._clock.cpu_ns() - self._begin_cpu_ns) / 1e9

    def _wall_s(self) -> float:
        return (self._clock.mono_ns() - self._first.mono_ns) / 1e9


def _describe(devices: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    return tuple(dataclasses.asdict(device) for device in devices)


def _rfc3339(anchor: Anchor) -> str:
    moment = datetime.fromtimestamp(anchor.wall_ns / 1e9, tz=timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _versions() -> dict[str, str | None]:
    return {
        "lucid_profiler": lucid_profiler.__version__,
        "python": platform.python_version(),
        "nvidia-ml-py": _version_of("nvidia-ml-py"),
    }


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
