"""Turns what the agents of one run left in its directory into the fields and records of a report.

Reads after the processes have ended, so it also works for those that were killed: their steps are there, their
digests are not. Nothing is invented: a number that is not known is None with its reason.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from lucid_profiler.awaited import FORKED_SUFFIX, LOADED_SUFFIX
from lucid_profiler.codec import from_plain
from lucid_profiler.collect_device import Inside, device_metrics, device_notes, device_samples, devices_inside
from lucid_profiler.entries import (
    CaptureEntry,
    EndEntry,
    EnvEntry,
    FitEntry,
    MemoryEntry,
    NoteEntry,
    PhasesEntry,
    StepsEntry,
    UncoveredEntry,
)
from lucid_profiler.loader_waits import waited_ns
from lucid_profiler.records import (
    AgentHealth,
    CaptureReport,
    Metric,
    Phase,
    Samples,
    State,
    Wall,
)
from lucid_profiler.ring import StepRecord
from lucid_profiler.session import AUTOMATIC_PARTS
from lucid_profiler.traces import ProcessTrace, canonical_order, have_ranks, read_traces, start_order

__all__ = ["NO_ROOM", "Observation", "observe"]

NO_ROOM = "it could not write into the run's directory, and so not what went wrong either: is the disk of TMPDIR full?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the agents saw of one run; times and device peaks are those of the first process."""

    wall: Wall
    metrics: dict[str, Metric]
    capture: tuple[CaptureReport, ...] | None
    agent: AgentHealth
    phases: tuple[Phase, ...]
    states: tuple[State, ...]
    samples: tuple[Samples, ...]
    devices: Inside
    identity: dict[str, Any]
    volatile: dict[str, Any]
    notes: tuple[str, ...]


def observe(
    run_dir: Path, *, run: int, process: Wall, max_rss_bytes: int | None, with_agent: bool = True
) -> Observation:
    """Read the directory of one run.

    Args:
        run_dir: where the agents wrote.
        run: number of the run, for the records.
        process: the interval from the start of the process to its exit.
        max_rss_bytes: the kernel's peak for the process, used where no agent has read it; None if it says nothing.
        with_agent: whether there was to be an agent.
    """
    loaded = any(run_dir.glob(f"agent-*{LOADED_SUFFIX}"))
    no_agent = "no_agent" if with_agent else "agent_off"
    traces = sorted(read_traces(run_dir), key=start_order)
    first = traces[0] if traces else ProcessTrace()
    wall = _wall(first, process)
    capture, faults = _capture(traces)
    start_faults = _start_faults(run_dir)
    faults += [*start_faults, *(fault for trace in traces for fault in trace.faults)]
    uncovered = tuple(_uncovered(traces, run_dir))
    phases, env = first.last(PhasesEntry), first.last(EnvEntry) or EnvEntry()
    return Observation(
        wall=wall,
        metrics=_metrics(
            traces,
            wall,
            no_agent=None if loaded else no_agent,
            is_cut_off=(run_dir / f"agent-{first.name}.error").exists() if traces else bool(start_faults),
            max_rss_bytes=max_rss_bytes,
        ),
        capture=capture,
        agent=AgentHealth(
            loaded=loaded,
            reason=None if loaded else (start_faults[0] if start_faults else no_agent),
            num_processes=len(traces),
            num_steps=sum(map(_num_steps, traces)),
            num_dropped=sum(map(_num_dropped, traces)),
            num_errors=sum(end.num_errors for trace in traces if (end := trace.last(EndEntry))) + len(faults),
            uncovered=uncovered,
        ),
        phases=phases.phases if phases else (),
        states=tuple(_states(traces, run)),
        samples=(*_samples(first.steps.records, run), *device_samples(first, run)),
        devices=devices_inside(traces),
        identity=dict(env.identity),
        volatile=dict(env.volatile),
        notes=(*device_notes(traces), *_notes(traces, faults), *(f"in no digest: {text}" for text in uncovered)),
    )


def _start_faults(run_dir: Path) -> list[str]:
    """Return what agents could write down only outside of their journals."""
    paths = sorted(run_dir.glob("agent-*.error"))
    return [path.read_text(encoding="utf-8", errors="replace")[:500] or NO_ROOM for path in paths]


def _num_steps(trace: ProcessTrace) -> int:
    """Return the steps of a process, also where its disk had no room for their records."""
    told = trace.last(StepsEntry)
    return max(trace.steps.num_written, told.num_steps if told else 0)


def _uncovered(traces: Sequence[ProcessTrace], run_dir: Path) -> Iterator[str]:
    """Yield in words what was trained and is in no digest."""
    trained = [trace for trace in traces if _num_steps(trace)]
    for part in AUTOMATIC_PARTS:
        if num_silent := sum(part not in trace.states for trace in trained):
            yield f"{num_silent} of {len(trained)} processes that trained left no digest of {part}"
    if num_forked := sum(1 for _ in run_dir.glob(f"*{FORKED_SUFFIX}")):
        yield (
            f"{num_forked} forked {'process' if num_forked == 1 else 'processes'} trained without an agent: start "
            "processes that train by spawn, or as commands"
        )
    yield from dict.fromkeys(entry.text for trace in traces for entry in trace.all(UncoveredEntry))


def _num_dropped(trace: ProcessTrace) -> int:
    unwritten = _num_steps(trace) - trace.steps.num_written
    return unwritten + trace.steps.num_overwritten + trace.steps.num_torn


def _wall(first: ProcessTrace, process: Wall) -> Wall:
    fits = first.all(FitEntry)
    if fits:
        return Wall(source="fit", begin_ns=fits[0].begin_ns, end_ns=fits[0].end_ns)
    steps = first.steps
    if steps.records and steps.first_begin_ns is not None:
        return Wall(source="steps", begin_ns=steps.first_begin_ns, end_ns=max(step.end_ns for step in steps.records))
    return process


def _metrics(
    traces: Sequence[ProcessTrace], wall: Wall, *, no_agent: str | None, is_cut_off: bool, max_rss_bytes: int | None
) -> dict[str, Metric]:
    first = traces[0] if traces else ProcessTrace()
    steps = _main_steps(first.steps.records)
    main = steps[0].optimizer if steps else None
    step_times_ns = [after.begin_ns - before.begin_ns for before, after in pairwise(steps)]
    memory = first.last(MemoryEntry)
    not_seen = "steps_not_recorded" if _num_steps(first) else "no_steps"
    unfinished = "not_finished" if first.steps.records else not_seen
    unknown = no_agent or ("agent_cut_off" if is_cut_off else unfinished)
    too_few = unknown if not steps else "too_few_steps"
    no_cuda = "no_cuda" if memory else unknown
    return {
        "wall": Metric(value=(wall.end_ns - wall.begin_ns) / 1e9, unit="s"),
        "step_time_median": _seconds(step_times_ns, too_few),
        "optimizer_time_median": _seconds([step.end_ns - step.begin_ns for step in steps], unknown),
        **device_metrics(first, optimizer=main, reason=no_cuda),
        "data_wait": _data_wait(first, wall, no_agent=no_agent),
        "peak_rss": _bytes(_peak_rss(traces, max_rss_bytes), "hidden_by_own_memory"),
        "peak_allocated": _bytes(memory.peak_allocated_bytes if memory else None, no_cuda),
        "peak_reserved": _bytes(memory.peak_reserved_bytes if memory else None, no_cuda),
    }


def _data_wait(first: ProcessTrace, wall: Wall, *, no_agent: str | None) -> Metric:
    """Return how long the process waited for batches within the wall."""
    told = first.last(StepsEntry)
    if no_agent:
        reason = no_agent
    elif told and told.num_waits > first.waits.num_waits:
        reason = "waits_not_recorded"
    elif not first.waits.num_waits:
        reason = "no_loader"
    else:
        found = waited_ns(first.waits, wall.begin_ns, wall.end_ns)
        if found is not None:
            return Metric(value=found / 1e9, unit="s")
        reason = "waits_lost"
    return Metric(value=None, unit="s", reason=reason)


def _peak_rss(traces: Sequence[ProcessTrace], max_rss_bytes: int | None) -> int | None:
    """Return the peak of the process, of the largest one where several recorded."""
    peaks = [memory.peak_rss_bytes for trace in traces if (memory := trace.last(MemoryEntry))]
    known = [peak for peak in peaks if peak]
    # The kernel's peak of a process and its children is that of the largest one too.
    if max_rss_bytes and (len(traces) > 1 or not known):
        known.append(max_rss_bytes)
    return max(known, default=None)


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


def _capture(traces: Sequence[ProcessTrace]) -> tuple[tuple[CaptureReport, ...] | None, list[str]]:
    """Return the reports of all optimizers, and what was wrong with those that were dropped."""
    entries = [entry for trace in traces if (entry := trace.last(CaptureEntry))]
    results = [_capture_report(report) for entry in entries for report in entry.capture or ()]
    reports = tuple(result for result in results if isinstance(result, CaptureReport))
    return reports or None, [result for result in results if isinstance(result, str)]


def _capture_report(report: Any) -> CaptureReport | str:
    """Return the report of an optimizer, or what is wrong with it."""
    dropped = "the capture report of an optimizer was dropped"
    if not isinstance(report, dict):
        return f"{dropped}: it is of type {type(report).__name__}"
    try:
        return from_plain(CaptureReport, report, Counter())
    except ValueError as error:
        return f"{dropped}: {error}"[:500]


def _states(traces: Sequence[ProcessTrace], run: int) -> list[State]:
    ordered = canonical_order(traces)
    are_ranked = have_ranks(traces)
    return [
        State(
            run=run,
            process=(trace.rank or 0) if are_ranked else place,
            rank=trace.rank if are_ranked else None,
            part=entry.part,
            digest=entry.digest,
            strides_digest=entry.strides_digest,
            num_tensors=entry.num_tensors,
            num_bytes=entry.num_bytes,
            nonfinite=entry.nonfinite,
            tensors=entry.tensors,
            values=entry.values,
        )
        for place, trace in enumerate(ordered)
        for entry in trace.states.values()
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


def _notes(traces: Sequence[ProcessTrace], faults: Sequence[str]) -> list[str]:
    notes = [entry.text for trace in traces for entry in trace.all(NoteEntry)]
    if len(traces) > 1:
        notes.append(
            f"{len(traces)} processes recorded: times and device peaks are those of the first, "
            "peak resident is that of the largest"
        )
    ends = [end for trace in traces if (end := trace.last(EndEntry))]
    notes += [f"agent: {fault}" for fault in (*(error for end in ends for error in end.errors), *faults)]
    return list(dict.fromkeys(notes))
