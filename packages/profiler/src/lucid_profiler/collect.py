"""Turns what the agents of one run left in its directory into the fields and records of a report.

Reads after the processes have ended, so it also works for those that were killed: their steps are there, their
digests are not. Nothing is invented: a number that is not known is None with its reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from lucid_profiler import jsonio
from lucid_profiler.digest import TensorDigest
from lucid_profiler.journal import LOADED_SUFFIX
from lucid_profiler.records import (
    AgentHealth,
    CaptureGroup,
    CaptureReport,
    Metric,
    Phase,
    Samples,
    State,
    Wall,
)
from lucid_profiler.ring import StepRecord, StepTrace, read_ring

__all__ = ["Observation", "ProcessTrace", "observe"]

_NO_STEPS = StepTrace(records=(), num_written=0, num_overwritten=0, num_torn=0, first_begin_ns=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTrace:
    """What one process left: its journal entries by kind, in order, and its steps."""

    entries: Mapping[str, tuple[dict[str, Any], ...]]
    steps: StepTrace
    faults: tuple[str, ...]

    def last(self, kind: str) -> dict[str, Any]:
        """Return the last entry of a kind, or an empty one."""
        found = self.entries.get(kind, ())
        return found[-1] if found else {}

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the rank that torchrun gave, then the time of the first step or start."""
        end = self.last("end")
        rank = end.get("rank")
        begin_ns = end.get("begin_ns") or self.steps.first_begin_ns or 0
        return (rank if rank is not None else -1, begin_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the agents saw of one run; times and peaks are those of the first process."""

    wall: Wall
    metrics: dict[str, Metric]
    capture: tuple[CaptureReport, ...] | None
    agent: AgentHealth
    phases: tuple[Phase, ...]
    states: tuple[State, ...]
    samples: tuple[Samples, ...]
    identity: dict[str, Any]
    volatile: dict[str, Any]
    notes: tuple[str, ...]


def observe(run_dir: Path, *, run: int, process: Wall, max_rss_bytes: int | None) -> Observation:
    """Read the directory of one run.

    Args:
        run_dir: where the agents wrote.
        run: number of the run, for the records.
        process: the interval from the start of the process to its exit.
        max_rss_bytes: the kernel's peak for the process, used where no agent has read it; None if it says nothing.
    """
    loaded = any(run_dir.glob(f"agent-*{LOADED_SUFFIX}"))
    traces = sorted(_read_traces(run_dir), key=lambda trace: trace.order)
    faults = _start_faults(run_dir)
    first = traces[0] if traces else ProcessTrace(entries={}, steps=_NO_STEPS, faults=())
    wall = _wall(first, process)
    return Observation(
        wall=wall,
        metrics=_metrics(first, wall, loaded=loaded, max_rss_bytes=max_rss_bytes),
        capture=_capture(traces),
        agent=AgentHealth(
            loaded=loaded,
            reason=None if loaded else (faults[0] if faults else "no_agent"),
            num_processes=len(traces),
            num_steps=sum(trace.steps.num_written for trace in traces),
            num_dropped=sum(trace.steps.num_overwritten + trace.steps.num_torn for trace in traces),
            num_errors=sum(trace.last("end").get("num_errors", 0) + len(trace.faults) for trace in traces)
            + len(faults),
        ),
        phases=tuple(Phase(**phase) for phase in first.last("phases").get("phases", ())),
        states=tuple(state for index, trace in enumerate(traces) for state in _states(trace, run, index)),
        samples=_samples(first.steps.records, run),
        identity=dict(first.last("env").get("identity", {})),
        volatile=dict(first.last("env").get("volatile", {})),
        notes=tuple(_notes(traces, faults)),
    )


def _read_traces(run_dir: Path) -> list[ProcessTrace]:
    pids = {
        path.stem.partition("-")[2] for pattern in ("agent-*.jsonl", "steps-*.ring") for path in run_dir.glob(pattern)
    }
    return [_read_trace(run_dir, pid) for pid in sorted(pids)]


def _read_trace(run_dir: Path, pid: str) -> ProcessTrace:
    entries: dict[str, list[dict[str, Any]]] = {}
    faults = []
    journal = run_dir / f"agent-{pid}.jsonl"
    # The last piece is empty, or a line that was being written when the process ended.
    for line in journal.read_bytes().split(b"\n")[:-1] if journal.exists() else ():
        entry = _entry(line)
        entries.setdefault(entry.pop("kind"), []).append(entry)
    ring = run_dir / f"steps-{pid}.ring"
    steps = _NO_STEPS
    if ring.exists():
        try:
            steps = read_ring(ring)
        except (OSError, ValueError) as error:
            faults.append(str(error))
    return ProcessTrace(
        entries={kind: tuple(found) for kind, found in entries.items()}, steps=steps, faults=tuple(faults)
    )


def _entry(line: bytes) -> dict[str, Any]:
    try:
        entry = jsonio.loads(line)
    except ValueError as error:
        return {"kind": "note", "text": f"an entry of the agent is unreadable: {error}"}
    return entry if isinstance(entry, dict) and isinstance(entry.get("kind"), str) else {"kind": "unknown"}


def _start_faults(run_dir: Path) -> list[str]:
    paths = sorted(run_dir.glob("agent-*.error"))
    return [path.read_text(encoding="utf-8", errors="replace")[:500] for path in paths]


def _wall(first: ProcessTrace, process: Wall) -> Wall:
    fit = first.last("fit")
    if fit:
        return Wall(source="fit", begin_ns=fit["begin_ns"], end_ns=fit["end_ns"])
    steps = first.steps
    if steps.records and steps.first_begin_ns is not None:
        return Wall(source="steps", begin_ns=steps.first_begin_ns, end_ns=max(step.end_ns for step in steps.records))
    return process


def _metrics(first: ProcessTrace, wall: Wall, *, loaded: bool, max_rss_bytes: int | None) -> dict[str, Metric]:
    steps = _main_steps(first.steps.records)
    step_times_ns = [after.begin_ns - before.begin_ns for before, after in pairwise(steps)]
    memory = first.last("memory")
    unknown = "no_agent" if not loaded else "not_finished" if first.steps.records else "no_steps"
    too_few = unknown if not steps else "too_few_steps"
    peak_rss = memory.get("peak_rss_bytes") or max_rss_bytes
    no_cuda = "no_cuda" if memory else unknown
    return {
        "wall": Metric(value=(wall.end_ns - wall.begin_ns) / 1e9, unit="s"),
        "step_time_median": _seconds(step_times_ns, too_few),
        "optimizer_time_median": _seconds([step.end_ns - step.begin_ns for step in steps], unknown),
        "peak_rss": _bytes(peak_rss, "below_resolution"),
        "peak_allocated": _bytes(memory.get("peak_allocated_bytes"), no_cuda),
        "peak_reserved": _bytes(memory.get("peak_reserved_bytes"), no_cuda),
    }


def _seconds(times_ns: list[int], reason: str) -> Metric:
    value = median(times_ns) / 1e9 if times_ns else None
    return Metric(value=value, unit="s", reason=None if times_ns else reason)


def _bytes(value: int | None, reason: str) -> Metric:
    return Metric(value=value, unit="By", reason=reason if value is None else None)


def _main_steps(records: tuple[StepRecord, ...]) -> list[StepRecord]:
    """Return the steps of the optimizer that stepped most often, of the first one among equals."""
    by_optimizer: dict[int, list[StepRecord]] = {}
    for record in records:
        by_optimizer.setdefault(record.optimizer, []).append(record)
    return max((by_optimizer[index] for index in sorted(by_optimizer)), key=len, default=[])


def _capture(traces: list[ProcessTrace]) -> tuple[CaptureReport, ...] | None:
    reports = [report for trace in traces for report in trace.last("capture").get("capture") or ()]
    return (
        tuple(
            CaptureReport(
                optimizer=report["optimizer"],
                requested=report["requested"],
                overridden=report.get("overridden", False),
                groups=tuple(
                    CaptureGroup(
                        captured=group["captured"],
                        recordings=group.get("recordings", 0),
                        replays=group.get("replays", 0),
                        reasons=dict(group.get("reasons", {})),
                    )
                    for group in report.get("groups", ())
                ),
            )
            for report in reports
        )
        or None
    )


def _states(trace: ProcessTrace, run: int, process: int) -> list[State]:
    last = {entry["part"]: entry for entry in trace.entries.get("state", ())}
    return [
        State(
            run=run,
            process=process,
            part=part,
            digest=entry["digest"],
            strides_digest=entry["strides_digest"],
            num_tensors=entry["num_tensors"],
            num_bytes=entry["num_bytes"],
            nonfinite=entry["nonfinite"],
            tensors={
                name: TensorDigest(digest=short, dtype=dtype, shape=tuple(shape))
                for name, (short, dtype, shape) in entry["tensors"].items()
            },
        )
        for part, entry in last.items()
    ]


def _samples(records: tuple[StepRecord, ...], run: int) -> tuple[Samples, ...]:
    return tuple(
        Samples(
            run=run,
            series="steps",
            columns={
                "begin_ns": tuple(record.begin_ns for record in chunk),
                "end_ns": tuple(record.end_ns for record in chunk),
                "optimizer": tuple(record.optimizer for record in chunk),
            },
        )
        for start in range(0, len(records), Samples.MAX_ROWS)
        if (chunk := records[start : start + Samples.MAX_ROWS])
    )


def _notes(traces: list[ProcessTrace], faults: list[str]) -> list[str]:
    notes = [entry["text"] for trace in traces for entry in trace.entries.get("note", ())]
    if len(traces) > 1:
        notes.append(f"{len(traces)} processes recorded: times and peaks are those of the first")
    notes += [f"agent: {fault}" for trace in traces for fault in (*trace.last("end").get("errors", ()), *trace.faults)]
    notes += [f"agent: {fault}" for fault in faults]
    return list(dict.fromkeys(notes))
