"""The record of one run, from how its process ended and what was seen of it; pure."""

from collections import Counter
from collections.abc import Sequence

from lucid_cli.child import Ended
from lucid_profiler.collect import Observation
from lucid_profiler.records import Run, RunStatus, Slot

__all__ = ["run_record", "status_of"]


def run_record(slot: Slot, ended: Ended, observation: Observation, *, started: str) -> Run:
    """Return the record of the run that filled a slot.

    Args:
        slot: its place.
        ended: how its process ended.
        observation: what its agents saw.
        started: when it began, RFC 3339.
    """
    return Run(
        run=slot.slot,
        pair=slot.pair,
        arm=slot.arm,
        discarded=slot.discarded,
        status=status_of(ended),
        returncode=ended.returncode,
        signal=ended.signal,
        started=started,
        process_ns=ended.end_ns - ended.begin_ns,
        wall=observation.wall,
        metrics=observation.metrics,
        capture=observation.capture,
        agent=observation.agent,
        phases=observation.phases,
        stdout_bytes=ended.stdout_bytes,
        stderr_bytes=ended.stderr_bytes,
        output_tail=ended.output_tail,
        notes=(*observation.notes, *_process_notes(ended)),
    )


def status_of(ended: Ended) -> RunStatus:
    """Return what became of a process."""
    if ended.ending != "by_itself":
        return ended.ending
    return "ok" if ended.returncode == 0 else "failed"


def _process_notes(ended: Ended) -> Sequence[str]:
    notes = []
    if ended.outlived:
        notes.append(f"{_counted(ended.outlived)} outlived the command and {_was(ended.outlived)} ended")
    if ended.unended:
        notes.append(f"{_counted(ended.unended)} outlived the command and could not be ended")
    if ended.held_output and not notes:
        notes.append("its output was kept open after its end; the rest of its process group was killed")
    if ended.was_unwatched:
        notes.append("lucid was stopped for a while during it: its end may have been seen late")
    return notes


def _counted(names: Sequence[str]) -> str:
    noun = "process" if len(names) == 1 else "processes"
    by_name = [f"{num} {name}" if num > 1 else name for name, num in Counter(names).items()]
    return f"{len(names)} {noun} ({', '.join(by_name)})"


def _was(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"
