"""Turns ticks into records: reads what the plan says is due, and writes it with reasons, gaps and what it all cost."""

import dataclasses
import platform
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import lucid_profiler
from lucid_profiler.monitor import tree as proc
from lucid_profiler.monitor.book import Book
from lucid_profiler.monitor.clocks import Anchor, Clock, ClockWatch
from lucid_profiler.monitor.gpu_reader import GpuReader, Sheets
from lucid_profiler.monitor.log import LogWriter
from lucid_profiler.monitor.plan import SLOW_NS, Plan, Tier
from lucid_profiler.monitor.readings import Reasons, Values
from lucid_profiler.monitor.records import AnchorTaken, End, Event, Gap, Header, Mark, Sample, TargetExit
from lucid_profiler.monitor.schedule import Distribution, Schedule, Tick
from lucid_profiler.monitor.target import Target

MAX_NAME_CHARS = 200
_MAX_FAULT_CHARS = 4000
_TURN_LIMIT_S = 0.2

__all__ = ["MAX_NAME_CHARS", "Sampler"]

_Found = TypeVar("_Found")


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
        self._schedule = Schedule(clock.mono_ns(), interval_ns=interval_ns)
        self._tree = proc.Tree(target.pid, start_ticks=target.start_ticks, why_hidden=target.why_hidden)
        self._plan = Plan(clock.mono_ns())
        self._late = Distribution()
        self._last_ns: int | None = None
        self._last_nvml_ns = 0  # of the last tick
        self._num_notes = 0
        self._memory_api = gpus.memory_api
        self._has_exit = self._has_end = False
        self._log = LogWriter(path, header=self._header, mono_ns=clock.mono_ns, on_gap=self._remember)
        self._book = Book(self._log)

    @property
    def next_ns(self) -> int:
        """When the next tick is due, on the monotonic clock."""
        return self._schedule.next_ns

    def use(self, gpus: GpuReader) -> None:
        """Take these devices from now on; for before the first record, since its header names them."""
        self._gpus = gpus
        self._devices, self._memory_api = gpus.devices, gpus.memory_api

    def begin(self) -> None:
        """Write the first records, and let the first tick be due now."""
        self.mark("begin")
        self._schedule = Schedule(self._clock.mono_ns(), interval_ns=self._schedule.interval_ns)
        self._plan = Plan(self._clock.mono_ns())

    def tick(self) -> None:
        """Take a sample if one is due."""
        now_ns = self._clock.mono_ns()
        tick = self._schedule.take(now_ns)
        if tick is None:
            return
        self._check_clocks()
        if tick.num_missed and self._last_ns is not None:
            self._add_late(self._last_ns, now_ns)
        nvml_ns = self._nvml_ns()
        host = self._read_host(tick)
        gpus = self._read_gpus(tick)
        self._note_devices(now_ns)
        self._write_notes()
        self._book.observe(now_ns, host, gpus, why_missing=self._gpus.why_missing)
        self._log.write(
            Sample(
                mono_ns=now_ns,
                late_ns=tick.late_ns,
                host=host[0],
                gpus={uuid: values for uuid, (values, _) in gpus.items()},
            )
        )
        self._late.add(tick.late_ns)
        self._last_ns, self._last_nvml_ns = now_ns, self._nvml_ns() - nvml_ns
        self.num_samples += 1
        self._log.sync(is_due_only=True)

    def mark(self, name: str) -> dict[str, Any]:
        """Record a moment with the processor time and the energy counters; return its record's fields."""
        now_ns = self._clock.mono_ns()
        cpu_time_s = self._tree.read()[0]["cpu_time_s"]
        sheets, times = self._gpus.read_energy()
        energy = {uuid: values.get("energy_mj") for uuid, (values, _) in sheets.items()}
        read_ns = self._clock.mono_ns()
        mark = Mark(
            mono_ns=now_ns,
            name=name[:MAX_NAME_CHARS],
            energy_mj=energy,
            read_ns=read_ns,
            energy_ns=times,
            cpu_time_s=cpu_time_s,
        )
        self._book.explain(now_ns, sheets)
        self._log.write(mark)
        self._log.sync()
        return {"mono_ns": mark.mono_ns, "read_ns": mark.read_ns, "energy_mj": energy}

    def flush(self) -> None:
        """Have everything written reach the disk."""
        self._log.sync()

    def note_exit(self) -> None:
        """Record that the target has ended."""
        self._has_exit = True
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
        self._end_schedule(self._clock.mono_ns())
        self._check_clocks()
        self.mark("end")
        self._book.close_gaps(self._clock.mono_ns())
        self._gpus.close()
        self._write_end(status)
        self._log.close()

    def abandon(self, status: str, *, since_ns: int) -> None:
        """Write the last records in the place of a thread that is held up, and let it write none after them.

        Args:
            status: why it ends, as in `records.End`.
            since_ns: when it should have begun to end.
        """
        if not self._log.turn.acquire(timeout=_TURN_LIMIT_S) or self._has_end:
            return  # the disk does not answer either, or all is written
        self._end_schedule(since_ns)
        if status == "target_exit" and not self._has_exit:
            self.note_exit()
        self._note("the driver or the disk did not answer when the monitor had to end: its last readings are missing")
        self._book.close_gaps(self._clock.mono_ns())
        self._write_end(status)

    def status(self) -> dict[str, Any]:
        """Return what there is to say so far."""
        return {
            "target": dict(self._target.brief()),
            "num_samples": self.num_samples,
            "num_missed": self._schedule.num_missed,
            "late_ns": self._late.summary(),
            "num_dropped_records": self._log.num_dropped,
            "is_log_removed": self._log.is_removed(),
            "num_devices": len(self._gpus.devices),
            "reason": self._gpus.reason,
            "own_cpu_s": self._own_cpu_s(),
            "wall_s": self._wall_s(),
        }

    def _read_host(self, tick: Tick) -> tuple[Values, Reasons]:
        self._read_tier("children", tick, self._tree.scan)
        values: Values = {}
        reasons: Reasons = {}
        for found in (
            self._read_tier("tree", tick, self._tree.read),
            self._read_tier("pss", tick, self._tree.read_pss),
        ):
            if found is not None:
                values.update(found[0])
                reasons.update(found[1])
        values["memory_available_bytes"] = proc.read_available_bytes()
        if values["memory_available_bytes"] is None:
            reasons["memory_available_bytes"] = "not_supported"
        return values, reasons

    def _read_gpus(self, tick: Tick) -> dict[str, tuple[Values, Reasons]]:
        self._gpus.reopen_if_due()
        sheets = {uuid: (dict(values), dict(reasons)) for uuid, (values, reasons) in self._gpus.read_fast().items()}
        more = self._read_tier("processes", tick, self._read_processes) if sheets else None
        for uuid, (values, reasons) in (more or {}).items():
            sheet = sheets.setdefault(uuid, ({}, {}))
            sheet[0].update(values)
            sheet[1].update(reasons)
        return sheets

    def _read_processes(self) -> Sheets:
        return self._gpus.read_processes(self._tree.pids, is_member=self._tree.owns)

    def _read_tier(self, tier: Tier, tick: Tick, read: Callable[[], _Found]) -> _Found | None:
        """Return what is read of a tier; None where it is not due."""
        if not self._plan.is_due(tier, tick.deadline_ns):
            return None
        begin_ns = self._clock.cpu_ns()
        found = read()
        cost_ns = self._clock.cpu_ns() - begin_ns
        self._plan.note(tier, tick.deadline_ns, now_ns=tick.deadline_ns + tick.late_ns, cost_ns=cost_ns)
        return found

    def _check_clocks(self) -> None:
        anchor, jumps = self._watch.check()
        for jump in jumps:
            self._log.write(Event(mono_ns=jump.end_ns, name=jump.name, data=dataclasses.asdict(jump)))
            if jump.name == "suspend":
                self._book.add_gap(Gap(begin_ns=jump.begin_ns, end_ns=jump.end_ns, reason="suspend"))
        if anchor is not None:
            self._log.write(AnchorTaken(**dataclasses.asdict(anchor)))

    def _note_devices(self, now_ns: int) -> None:
        """Record the devices anew where the driver has come back with others, or answers in another version."""
        gpus = self._gpus
        if gpus.devices != self._devices or gpus.memory_api != self._memory_api:
            self._devices, self._memory_api = gpus.devices, gpus.memory_api
            data = {"devices": _describe(gpus.devices), "reason": gpus.reason, "memory_api": gpus.memory_api}
            self._log.write(Event(mono_ns=now_ns, name="devices", data=data))

    def _write_notes(self) -> None:
        for text in self._gpus.notes[self._num_notes :]:
            self._num_notes += 1
            self._note(text)

    def _note(self, text: str) -> None:
        self._log.write(Event(mono_ns=self._clock.mono_ns(), name="note", data={"text": text}))

    def _remember(self, gap: Gap) -> None:
        self._book.remember(gap)

    def _end_schedule(self, end_ns: int) -> None:
        if self._schedule.end(end_ns):
            begin_ns = self._first.mono_ns if self._last_ns is None else self._last_ns
            self._add_late(begin_ns, end_ns)

    def _add_late(self, last_ns: int, now_ns: int) -> None:
        """Write that deadlines passed since the last tick: the driver took most of that time, or no turn came."""
        reason = "slow_driver" if 2 * self._last_nvml_ns > now_ns - last_ns else "late"
        self._book.add_gap(Gap(begin_ns=last_ns, end_ns=now_ns, reason=reason))

    def _nvml_ns(self) -> int:
        return sum(self._gpus.nvml_ns.values())

    def _write_end(self, status: str) -> None:
        with self._log.turn:
            self._has_end = True
            self._log.write(self._end(status))

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
        now_ns = self._clock.mono_ns()
        return End(
            mono_ns=now_ns,
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
            cadence=self._plan.cadence(now_ns),
            num_nvml_errors=sum(self._gpus.num_errors.values()),
        )

    def _own_cpu_s(self) -> float:
        return self._clock.cpu_ns() / 1e9  # since this process was started: opening the driver is part of the cost

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
