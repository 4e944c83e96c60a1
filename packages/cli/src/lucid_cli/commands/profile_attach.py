"""`lucid profile attach`: follow a process that runs already, to its end or to Ctrl-C."""

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from lucid_cli.arguments import Interval
from lucid_cli.interrupts import Interrupts
from lucid_cli.output import one_line, say, warn, write_result
from lucid_cli.reporters.words import amount, counted, reason_words, scale
from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.log import LogReader, rotated_parts
from lucid_profiler.monitor.process import Monitor, launch
from lucid_profiler.monitor.readings import Values
from lucid_profiler.monitor.records import End, Event, Gap, Header, ReasonsChanged, Record, Sample, TargetExit

DEFAULT_INTERVAL_S = 0.1
_POLL_S = 0.2
_READY_LIMIT_S = 10.0  # nothing waits for it
_NOTHING = "nothing was recorded: the log could not be written, its disk may be full"
_SHARE_FROM_S = 1.0  # in a shorter time the monitor's start is most of it
_HOST_FIELDS = ("cpu_time_s", "rss_bytes", "pss_bytes", "num_processes")
_GPU_FIELDS = ("memory_used_bytes", "process_memory_bytes", "power_draw_mw")

__all__ = ["Summary", "command", "following", "new_log", "summarize"]


_FOLLOWING = (
    click.argument("pid", type=click.IntRange(min=1)),
    click.option(
        "-o",
        "--output",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Log to write.  [default: lucid-monitor-<UTC>-<pid>.jsonl]",
    ),
    click.option(
        "--interval",
        type=Interval(),
        default=DEFAULT_INTERVAL_S,
        show_default=True,
        metavar="SECONDS",
        help="Time between two samples.",
    ),
    click.option("--no-nvml", is_flag=True, help="Do not read the GPUs."),
)


def following(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command what every command takes that follows a process."""
    for option in reversed(_FOLLOWING):
        function = option(function)
    return function


@click.command("attach")
@following
def command(pid: int, *, output: str | None, interval: float, no_nvml: bool) -> int:
    """Follow the process PID and its descendants, until it ends or Ctrl-C; then show what they used.

    The process is only looked at: nothing is loaded into it, and it is not slowed down. Exits 9 where the monitor
    failed, after showing what it had read until then.
    """
    path = new_log(output, pid)
    with Interrupts() as interrupts:
        monitor = launch(
            target_pid=pid, output=path, interval_s=interval, with_nvml=not no_nvml, timeout_s=_READY_LIMIT_S
        )
        if monitor.reason is not None:
            raise EnvironmentUnusableError(monitor.reason)
        say(f"log: {one_line(str(path))}")
        _follow(monitor, interrupts)
        first = interrupts.first
    summary = summarize(LogReader(path))
    write_result(summary.text)
    if summary.fault is not None:
        raise EnvironmentUnusableError(f"the monitor failed, so the log ends early: {summary.fault}")
    return 0 if first in {None, signal.SIGINT} else 128 + int(first or 0)


def new_log(output: str | None, pid: int) -> Path:
    """Return the name of a log that does not exist yet.

    Raises:
        UsageError: the file that the user named exists or cannot be made; nothing is left of the attempt.
    """
    if output is None:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        return Path(f"lucid-monitor-{stamp}-{pid}.jsonl")
    if not output:
        raise click.UsageError("-o: the name of the log is empty")
    path = Path(output)
    if parts := rotated_parts(path):
        raise click.UsageError(f"{parts[0][1]} is a part of an older log {output}; name another file with -o")
    try:
        path.open("xb").close()
        path.unlink()
    except FileExistsError as error:
        raise click.UsageError(f"{output} exists already; name another file with -o") from error
    except OSError as error:
        raise click.UsageError(f"the log {output} cannot be written: {error.strerror}") from error
    return path


def _follow(monitor: Monitor, interrupts: Interrupts) -> None:
    try:
        while interrupts.first is None and not monitor.wait(_POLL_S):
            pass
    finally:
        monitor.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a log comes to.

    Attributes:
        text: in a few lines.
        fault: the last line of the monitor's own traceback; None where it did not fail.
    """

    text: str
    fault: str | None


def summarize(records: Iterable[Record]) -> Summary:
    """Return in a few lines what the records of a log come to; they are taken in one pass and not kept."""
    tally = _Tally()
    for record in records:
        tally.take(record)
    lines = _lines(tally.header, tally) if tally.header is not None else [_NOTHING]
    return Summary(text="\n".join(lines) + "\n", fault=tally.fault)


class _Known:
    """What is needed of the values of one field, as far as they are known."""

    __slots__ = ("first", "highest", "last", "num", "total")

    def __init__(self, value: float) -> None:
        self.first = self.last = self.highest = self.total = value
        self.num = 1

    def add(self, value: float) -> None:
        self.last = value
        self.highest = max(self.highest, value)
        self.total += value
        self.num += 1


class _Tally:
    """What is needed of a log, gathered record by record; it does not grow with their number.

    Attributes:
        devices: a driver may come after the header was written.
        known: by field, named as in `ReasonsChanged`.
        reasons: by field, why it was last null.
        gaps_ns: by device and reason; what could not be written is counted with the samples.
    """

    def __init__(self) -> None:
        self.header: Header | None = None
        self.exit: TargetExit | None = None
        self.end: End | None = None
        self.devices: Sequence[Mapping[str, Any]] = ()
        self.num_samples = 0
        self.known: dict[str, _Known] = {}
        self.reasons: dict[str, str] = {}
        self.gaps_ns: Counter[tuple[str | None, str]] = Counter()
        self._last_words: str | None = None

    @property
    def fault(self) -> str | None:
        """The last line of the monitor's own traceback; None where it did not fail."""
        has_failed = self._last_words is not None or (self.end is not None and self.end.status == "fault")
        return (self._last_words or "why was not recorded") if has_failed else None

    def why(self, *fields: str) -> str:
        """Return in words why nothing is known of these fields."""
        reasons = dict.fromkeys(self.reasons[field] for field in fields if field in self.reasons)
        return ", ".join(map(reason_words, reasons or ["not_recorded"]))

    def take(self, record: Record) -> None:
        """Take in the next record."""
        match record:
            case Sample():
                self._take_sample(record)
            case Header() if self.header is None:
                self.header, self.devices = record, record.devices
            case ReasonsChanged():
                self.reasons.update(record.fields)
            case Event():
                self._take_event(record)
            case Gap() if record.reason not in {"suspend", "disk_full"}:
                self.gaps_ns[record.device, record.reason] += record.end_ns - record.begin_ns
            case TargetExit():
                self.exit = record
            case End():
                self.end = record

    def _take_sample(self, sample: Sample) -> None:
        self.num_samples += 1
        self._take_values("host.", sample.host or {}, _HOST_FIELDS)
        for uuid, values in sample.gpus.items():
            self._take_values(f"gpu:{uuid}.", values, _GPU_FIELDS)

    def _take_values(self, prefix: str, values: Values, fields: Iterable[str]) -> None:
        for field in fields:
            value = values.get(field)
            if value is None:
                continue
            known = self.known.get(prefix + field)
            if known is None:
                self.known[prefix + field] = _Known(value)
            else:
                known.add(value)

    def _take_event(self, event: Event) -> None:
        self.devices = event.data.get("devices") or self.devices
        if event.name == "suspend":  # the monotonic clock stands still meanwhile
            self.gaps_ns[None, event.name] += event.data["size_ns"]
        elif event.name == "fault":
            self._last_words = str(event.data.get("text") or "").rstrip().rpartition("\n")[2].strip()


def _lines(header: Header, tally: _Tally) -> list[str]:
    lines = [_ending(header, tally)]
    if tally.fault is not None:
        lines.append(f"the monitor failed: {tally.fault}")
    lines += [_sampling(tally), *_host(tally)]
    labels = _labels(tally.devices)
    for device in tally.devices:
        lines += _gpu(device, tally, label=labels[str(device["uuid"])])
    if not tally.devices and header.reason is not None:
        lines.append(f"GPUs were not read: {reason_words(header.reason)}")
    return [*lines, *_gaps(tally, labels if len(labels) > 1 else {})]


def _labels(devices: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return by UUID how a device is named: where there is no other, its model is enough."""
    names = {str(device["uuid"]): device.get("name") for device in devices}
    return {uuid: f"{name} ({uuid})" if name and len(names) > 1 else str(name or uuid) for uuid, name in names.items()}


def _gaps(tally: _Tally, labels: Mapping[str, str]) -> list[str]:
    """Tell for how long what was not read, and why."""
    return [
        f"{labels.get(device, device) if device else 'everything'}: "
        f"not read for {length_ns / 1e9:.1f} s ({reason_words(reason)})"
        for (device, reason), length_ns in tally.gaps_ns.items()
    ]


def _ending(header: Header, tally: _Tally) -> str:
    pid = header.target["pid"]
    if tally.exit is None and (tally.end is None or tally.fault is not None):
        return f"what became of process {pid} was not recorded"
    if tally.exit is None:
        return f"process {pid} still runs"
    status = tally.exit.status
    if status is None:
        return f"process {pid} has ended; how is not known"
    how = f"by {status['signal']}" if status["signal"] else f"with status {status['returncode']}"
    return f"process {pid} has ended {how}"


def _sampling(tally: _Tally) -> str:
    end = tally.end
    if end is None:
        if tally.fault is None:
            warn("the log has no end: the monitor was killed, or its disk is full")
        return counted(tally.num_samples, "sample")
    missed = f", {end.num_missed} missed" if end.num_missed else ""
    lost = f", {end.num_dropped_records} records could not be written" if end.num_dropped_records else ""
    share = f" ({100 * end.own_cpu_s / end.wall_s:.1f} %)" if end.wall_s >= _SHARE_FROM_S else ""
    return (
        f"{counted(end.num_samples, 'sample')} in {end.wall_s:.1f} s{missed}{lost}; "
        f"the monitor used {end.own_cpu_s:.2f} s of processor time, its start included{share}"
    )


def _host(tally: _Tally) -> list[str]:
    if not tally.num_samples:
        return []
    cpu, resident, shared, processes = (tally.known.get(f"host.{field}") for field in _HOST_FIELDS)
    if cpu is None:
        lines = [f"CPU time was not read: {tally.why('host.cpu_time_s')}"]
    else:
        num = 1 if processes is None else int(processes.highest)
        lines = [f"CPU time {cpu.last - cpu.first:.2f} s, at most {num} {'process' if num == 1 else 'processes'}"]
    if resident is None:
        return [*lines, f"memory was not read: {tally.why('host.rss_bytes')}"]
    divided = f", {_bytes(shared.highest)} with shared pages divided" if shared else ""
    return [*lines, f"memory at most {_bytes(resident.highest)} resident{divided}"]


def _gpu(device: Mapping[str, Any], tally: _Tally, *, label: str) -> list[str]:
    """Tell what is known of a device; nothing is to be told of one that the process may not use."""
    fields = [f"gpu:{device['uuid']}.{field}" for field in _GPU_FIELDS]
    used, of_target, power = map(tally.known.get, fields)
    parts = [f"{_bytes(used.highest)} used at most"] if used else []
    parts += [f"{_bytes(of_target.highest)} of them by the process"] if of_target else []
    parts += [f"{power.total / power.num / 1000:.0f} W on average"] if power else []
    if parts:
        return [f"{label}: {', '.join(parts)}"]
    is_expected = tally.num_samples and device.get("is_target", True)
    return [f"{label}: memory and power were not read: {tally.why(*fields)}"] if is_expected else []


def _bytes(value: float) -> str:
    scaled = scale("By", value)
    return f"{amount(value, scaled)} {scaled[1]}"
