"""Blocks of a report: the runs up to the first resume, and those from each resume on. Pure."""

from dataclasses import dataclass

from lucid_profiler.reader import Report
from lucid_profiler.records import Resume, Run, Slot

__all__ = ["Block", "blocks", "counted_runs", "planned_slots", "unpaired_runs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Runs that were measured without a break of the report."""

    resume: Resume | None
    """What began it; None for the first."""
    runs: tuple[Run, ...]


def blocks(report: Report) -> tuple[Block, ...]:
    """Return the runs by block, in order; one block for a report that was never resumed."""
    begins = [_first_slot(resume) for resume in report.resumes]
    numbers = [sum(run.run >= begin for begin in begins) for run in report.runs]
    return tuple(
        Block(
            resume=resume, runs=tuple(run for run, number in zip(report.runs, numbers, strict=True) if number == index)
        )
        for index, resume in enumerate((None, *report.resumes))
    )


def planned_slots(report: Report) -> tuple[Slot, ...]:
    """Return what makes the report whole: the runs of earlier blocks that took place, and all of the last one."""
    *earlier, last = (report.header.slots, *(resume.slots for resume in report.resumes))
    done = {run.run for run in report.runs}
    return (*(slot for slots in earlier for slot in slots if slot.slot in done), *last)


def unpaired_runs(report: Report) -> tuple[Run, ...]:
    """Return the runs of earlier blocks that are in no pair: the report was cut off before their pair was whole.

    What they left may be cut off as well, so nothing is derived from them.
    """
    paired = {run for pair in report.pairs for run in pair.runs}
    return tuple(run for block in blocks(report)[:-1] for run in block.runs if run.run not in paired)


def counted_runs(report: Report) -> tuple[Run, ...]:
    """Return the runs that decide how the report ended: all but those of earlier blocks that lucid itself broke off."""
    broken_off = {run.run for block in blocks(report)[:-1] for run in block.runs if run.status == "interrupted"}
    return tuple(run for run in report.runs if run.run not in broken_off)


def _first_slot(resume: Resume) -> float:
    return min((slot.slot for slot in resume.slots), default=float("inf"))
