"""`lucid profile attach`: follow a process that runs already, to its end or to Ctrl-C."""

import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from lucid_cli.arguments import Interval
from lucid_cli.interrupts import Interrupts
from lucid_cli.output import one_line, say, warn, write_result
from lucid_cli.reporters.words import amount, counted, reason_words, scale
from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.log import Log, read_log, rotated_parts
from lucid_profiler.monitor.process import Monitor, launch
from lucid_profiler.monitor.readings import REASONS
from lucid_profiler.monitor.records import End, Event, Gap, Header, Sample, TargetExit

DEFAULT_INTERVAL_S = 0.1
_POLL_S = 0.2
_READY_LIMIT_S = 10.0  # nothing waits for it

__all__ = ["command", "following", "new_log", "summarize"]


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

    The process is only looked at: nothing is loaded into it, and it is not slowed down.
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
    write_result(summarize(read_log(path)))
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


def summarize(log: Log) -> str:
    """Return in a few lines what a log comes to."""
    header = next((record for record in log.records if isinstance(record, Header)), None)
    if header is None:
        return "nothing was recorded: the log could not be written, its disk may be full\n"
    samples = [record for record in log.records if isinstance(record, Sample)]
    lines = [_ending(header, log), *_sampling(samples, log), *_host(samples)]
    devices = _devices(header, log)
    for device in devices:
        lines += _gpu(str(device["uuid"]), device.get("name"), samples)
    if not devices and header.reason is not None:
        lines.append(f"GPUs were not read: {REASONS.get(header.reason, header.reason)}")
    return "\n".join([*lines, *_gaps(log)]) + "\n"


def _gaps(log: Log) -> list[str]:
    """Tell for how long what was not read, and why; records that could not be written are counted with the samples."""
    lengths_ns: Counter[tuple[str | None, str]] = Counter()
    for record in log.records:
        if isinstance(record, Event) and record.name == "suspend":  # the monotonic clock stands still meanwhile
            lengths_ns[None, record.name] += record.data["size_ns"]
        elif isinstance(record, Gap) and record.reason not in {"suspend", "disk_full"}:
            lengths_ns[record.device, record.reason] += record.end_ns - record.begin_ns
    return [
        f"{device or 'everything'}: not read for {length_ns / 1e9:.1f} s ({reason_words(reason)})"
        for (device, reason), length_ns in lengths_ns.items()
    ]


def _devices(header: Header, log: Log) -> Sequence[Mapping[str, Any]]:
    """Return the devices; a driver may come after the header was written."""
    later = [record.data.get("devices") for record in log.records if isinstance(record, Event)]
    return next((found for found in reversed(later) if found), header.devices)


def _ending(header: Header, log: Log) -> str:
    pid = header.target["pid"]
    exits = [record for record in log.records if isinstance(record, TargetExit)]
    if not exits and not any(isinstance(record, End) for record in log.records):
        return f"what became of process {pid} was not recorded"
    if not exits:
        return f"process {pid} still runs"
    status = exits[-1].status
    if status is None:
        return f"process {pid} has ended; how is not known"
    how = f"by {status['signal']}" if status["signal"] else f"with status {status['returncode']}"
    return f"process {pid} has ended {how}"


def _sampling(samples: list[Sample], log: Log) -> list[str]:
    end = next((record for record in reversed(log.records) if isinstance(record, End)), None)
    if end is None:
        warn("the log has no end: the monitor was killed, or its disk is full")
        return [counted(len(samples), "sample")]
    share = 100 * end.own_cpu_s / end.wall_s if end.wall_s else 0.0
    missed = f", {end.num_missed} missed" if end.num_missed else ""
    lost = f", {end.num_dropped_records} records could not be written" if end.num_dropped_records else ""
    line = (
        f"{counted(end.num_samples, 'sample')} in {end.wall_s:.1f} s{missed}{lost}; "
        f"the monitor took {share:.1f} % of a processor"
    )
    return [line]


def _host(samples: list[Sample]) -> list[str]:
    cpu = _values(samples, "cpu_time_s")
    resident, shared = _values(samples, "rss_bytes"), _values(samples, "pss_bytes")
    lines = []
    if cpu:
        num = int(max(_values(samples, "num_processes"), default=1))
        lines.append(f"CPU time {cpu[-1] - cpu[0]:.2f} s, at most {num} {'process' if num == 1 else 'processes'}")
    if resident:
        words = f"memory at most {_bytes(max(resident))} resident"
        lines.append(words + (f", {_bytes(max(shared))} with shared pages divided" if shared else ""))
    return lines


def _gpu(uuid: str, name: object, samples: list[Sample]) -> list[str]:
    def known(field: str) -> list[float]:
        values = (sample.gpus[uuid].get(field) for sample in samples if uuid in sample.gpus)
        return [value for value in values if value is not None]

    used, of_target, power = known("memory_used_bytes"), known("process_memory_bytes"), known("power_draw_mw")
    parts = [f"{_bytes(max(used))} used at most"] if used else []
    parts += [f"{_bytes(max(of_target))} of them by the process"] if of_target else []
    parts += [f"{sum(power) / len(power) / 1000:.0f} W on average"] if power else []
    return [f"{name or uuid}: {', '.join(parts)}"] if parts else []


def _values(samples: list[Sample], field: str) -> list[float]:
    values = ((sample.host or {}).get(field) for sample in samples)
    return [value for value in values if value is not None]


def _bytes(value: float) -> str:
    scaled = scale("By", value)
    return f"{amount(value, scaled)} {scaled[1]}"
