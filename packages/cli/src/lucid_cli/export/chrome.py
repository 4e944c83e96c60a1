"""A report as a timeline in the trace event format, which Perfetto and chrome://tracing open.

Each run is a process, its marked phases and optimizer steps are slices, what was sampled are counters. Times are the
microseconds of `time.monotonic_ns` with three decimals, so no nanosecond is lost. Phases are as they were marked, and
say how much of them lies within the wall interval. A counter is written when it changes and holds until its next value;
what could not be read is left out.

Source: the "Trace Event Format" document of the Chromium project,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from lucid_cli.export.destination import Sink, in_pieces
from lucid_cli.export.table import row_count
from lucid_cli.export.tracks import Track, source_of, time_column, tracks_of
from lucid_profiler.phases import within_wall
from lucid_profiler.reader import Report
from lucid_profiler.records import Record, Run, Samples

FORMAT = "lucid.trace/1.0"
MAX_LANES = 8
_TIDS_A_RUN = 1000
_RUN, _PHASES, _GAPS, _STEPS = 1, 101, 201, 301  # first thread of each kind within a run, `MAX_LANES` apart at least
_STEPS_A_OPTIMIZER = 10

__all__ = ["FORMAT", "MAX_LANES", "ChromeTrace"]

Value = int | float | None


@dataclass(slots=True)
class _RunState:
    """What has to be remembered of a run while its samples come."""

    pid: int
    lanes: dict[int, list[int]] = field(default_factory=dict)
    """By first thread of a kind: the end of the last slice on each of its lanes."""
    num_steps: dict[int, int] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)
    """By counter, what was written last."""
    cpu: dict[str, tuple[int, float]] = field(default_factory=dict)


class ChromeTrace:
    """Writes runs and samples as they come.

    Attributes:
        num_left_out: rows and slices that have no place on the timeline, such as one that ends before it begins.

    Args:
        sink: takes the trace, in pieces.
    """

    def __init__(self, sink: Sink) -> None:
        self.num_left_out = 0
        self._sink = sink
        self._runs: dict[int, _RunState] = {}
        self._separator = ""
        self._sink.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')

    def add(self, line: int, record: Record) -> None:
        """Write one record of the report.

        Raises:
            ValueError: samples come before their run, or their columns are not equally long.
        """
        del line
        if isinstance(record, Run):
            state = self._runs[record.run] = _RunState(pid=record.run + 1)
            self._write(self._run(record, state))
        elif isinstance(record, Samples):
            known = self._runs.get(record.run)
            if known is None:
                raise ValueError(f"samples of run {record.run} come before the run")
            self._write(self._samples(record, known))

    def finish(self, report: Report) -> None:
        """Write what follows the last record."""
        header = report.header
        about = {
            "clock": "ts: microseconds of CLOCK_MONOTONIC on the measured machine",
            "command": list(header.command),
            "format": FORMAT,
            "method": header.method,
            "report": header.id,
            "schema": header.schema,
        }
        self._sink.write(f'\n],"otherData":{_quoted(about)}}}\n'.encode())

    def _write(self, events: Iterator[str]) -> None:
        for piece in in_pieces(events):
            text = ",\n".join(piece)
            self._sink.write(f"{self._separator}{text}".encode())
            self._separator = ",\n"

    def _run(self, run: Run, state: _RunState) -> Iterator[str]:
        words = f"run {run.run}: {run.arm}, pair {run.pair}{', discarded' if run.discarded else ''}"
        yield _metadata("process_name", state.pid, 0, {"name": words})
        yield _metadata("process_sort_index", state.pid, 0, {"sort_index": run.run})
        if run.wall is not None:
            facts = {"arm": run.arm, "pair": run.pair, "source": run.wall.source, "status": run.status}
            yield from self._slice(state, (_RUN, "wall"), "wall", (run.wall.begin_ns, run.wall.end_ns), facts)
        cut = zip(run.phases, within_wall(run), strict=True)
        for phase, within in sorted(cut, key=lambda pair: pair[0].begin_ns):
            facts = {"in_wall_ns": within.end_ns - within.begin_ns} if run.wall else {}
            yield from self._slice(state, (_PHASES, "phases"), phase.name, (phase.begin_ns, phase.end_ns), facts)
        for gap in sorted(run.monitor.gaps if run.monitor else (), key=lambda gap: gap.begin_ns):
            name, device = (f"gap of {gap.device}", {"device": gap.device}) if gap.device else ("gap", {})
            times = (gap.begin_ns, gap.end_ns)
            yield from self._slice(state, (_GAPS, "not sampled"), name, times, {"reason": gap.reason, **device})

    def _slice(
        self, state: _RunState, thread: tuple[int, str], name: str, times: tuple[Value, Value], args: dict[str, Any]
    ) -> Iterator[str]:
        """Yield a slice, on the first lane of its thread that is free then."""
        first, label = thread
        begin_ns, end_ns = times
        if not (_is_time(begin_ns) and _is_time(end_ns) and begin_ns <= end_ns):
            self.num_left_out += 1
            return
        lanes = state.lanes.setdefault(first, [])
        lane = next((index for index, busy_until in enumerate(lanes) if busy_until <= begin_ns), len(lanes))
        if lane == MAX_LANES:
            self.num_left_out += 1
            return
        tid = state.pid * _TIDS_A_RUN + first + lane
        if lane == len(lanes):
            lanes.append(0)
            yield _metadata("thread_name", state.pid, tid, {"name": f"{label} ({lane + 1})" if lane else label})
            yield _metadata("thread_sort_index", state.pid, tid, {"sort_index": first + lane})
        lanes[lane] = end_ns
        facts = _quoted({**args, "begin_ns": begin_ns, "end_ns": end_ns})
        yield (
            f'{{"ph":"X","pid":{state.pid},"tid":{tid},"ts":{_us(begin_ns)},"dur":{_us(end_ns - begin_ns)},'
            f'"name":{_quoted(name)},"args":{facts}}}'
        )

    def _samples(self, samples: Samples, state: _RunState) -> Iterator[str]:
        length = row_count(samples)
        time = time_column(samples.columns)
        if samples.series == "steps" and {"begin_ns", "end_ns"} <= samples.columns.keys():
            yield from self._steps(samples, state, length)
        elif time is None:
            self.num_left_out += length
        else:
            yield from self._counters(samples, state, samples.columns[time])

    def _steps(self, samples: Samples, state: _RunState, length: int) -> Iterator[str]:
        begins, ends = samples.columns["begin_ns"], samples.columns["end_ns"]
        optimizers = samples.columns.get("optimizer", (0,) * length)
        for begin_ns, end_ns, optimizer in zip(begins, ends, optimizers, strict=True):
            index = optimizer if type(optimizer) is int else 0
            number = state.num_steps[index] = state.num_steps.get(index, 0) + 1
            place = _STEPS + _STEPS_A_OPTIMIZER * index
            if not _STEPS <= place < _TIDS_A_RUN - MAX_LANES:
                self.num_left_out += 1
                continue
            thread = (place, f"steps of optimizer {index}")
            yield from self._slice(state, thread, "optimizer step", (begin_ns, end_ns), {"step": number})

    def _counters(self, samples: Samples, state: _RunState, times: Sequence[Value]) -> Iterator[str]:
        columns = samples.columns
        kinds = [name for name in ("device", "optimizer") if name in columns]
        owners: Sequence[Value] = columns[kinds[0]] if kinds else (None,) * len(times)
        source = source_of(samples.series)
        plans: dict[int | None, list[Callable[[int, int], str | None]]] = {}
        for row, (at_ns, number) in enumerate(zip(times, owners, strict=True)):
            if not _is_time(at_ns):
                self.num_left_out += 1
                continue
            owner = number if type(number) is int else None
            if owner not in plans:
                whose = source if owner is None else f"{source}, {kinds[0]} {owner}"
                plans[owner] = [
                    _counter(track, column, state, columns[column])
                    for track in tracks_of(columns, whose)
                    for column, _, _ in track.columns
                ]
            for counter in plans[owner]:
                event = counter(row, at_ns)
                if event is not None:
                    yield event


def _counter(track: Track, column: str, state: _RunState, values: Sequence[Value]) -> Callable[[int, int], str | None]:
    """Return what gives a column's event for a row and its time, None where it says what the one before said.

    Each column is a counter of its own: readers take the series of a counter from its first event alone, and columns
    that are drawn together need not be known at the same times.
    """
    if column == "cpu_time_s":
        return _cpu_counter(track.name.rpartition(" cpu")[0], values, state)
    name, divisor = next((name, divisor) for known, name, divisor in track.columns if known == column)
    label, unit = _label(track, name)
    head = f'{{"ph":"C","pid":{state.pid},"name":{_quoted(label)},"ts":'
    last = state.last

    def event(row: int, at_ns: int) -> str | None:
        value = values[row]
        if not _is_known(value):
            return None
        shown = f"{unit}:{_number(value, divisor)}"
        if last.get(head) == shown:
            return None
        last[head] = shown
        return f'{head}{_us(at_ns)},"args":{{{shown}}}}}'

    return event


def _label(track: Track, name: str) -> tuple[str, str]:
    """Return the name of a counter without its unit, and the unit as JSON, `value` where there is none."""
    group, unit = track.name, "value"
    if group.endswith("]"):
        group, _, unit = group[:-1].rpartition(" [")
    return group if name == "value" else f"{group} {name}", _quoted(unit)


def _cpu_counter(source: str, values: Sequence[Value], state: _RunState) -> Callable[[int, int], str | None]:
    """Return what gives the cores that were busy since the row before: the time itself only ever grows."""
    head = f'{{"ph":"C","pid":{state.pid},"name":{_quoted(f"{source} CPU busy")},"ts":'

    def event(row: int, at_ns: int) -> str | None:
        value = values[row]
        if not _is_known(value):
            return None
        before = state.cpu.get(source)
        state.cpu[source] = (at_ns, float(value))
        if before is None or at_ns <= before[0]:
            return None
        cores = max(0.0, (float(value) - before[1]) * 1e9 / (at_ns - before[0]))
        if not math.isfinite(cores):
            return None
        return f'{head}{_us(at_ns)},"args":{{"cores":{cores:.4f}}}}}'

    return event


def _is_time(value: Value) -> TypeGuard[int]:
    """Return whether a value is one of the clock, which counts nanoseconds in 64 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def _is_known(value: Value) -> TypeGuard[float]:
    """Return whether a value is a number that JSON and a double have."""
    return value is not None and abs(value) <= sys.float_info.max


def _number(value: float, divisor: int) -> str:
    return str(value) if divisor == 1 else repr(value / divisor)


def _us(time_ns: int) -> str:
    """Return nanoseconds as microseconds, to the last digit."""
    whole, rest = divmod(time_ns, 1000)
    return f"{whole}.{rest:03d}"


def _metadata(kind: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return f'{{"ph":"M","pid":{pid},"tid":{tid},"ts":0,"name":"{kind}","args":{_quoted(args)}}}'


def _quoted(value: Any) -> str:
    """Return a value as JSON: as it is, since Perfetto shows escapes in names of counters as they stand.

    Only what UTF-8 cannot hold is escaped, lone surrogates, which a command may have.
    """
    text = json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    return text if _is_utf8(text) else json.dumps(value, separators=(",", ":"), sort_keys=True)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
