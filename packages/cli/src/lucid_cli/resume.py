"""What of a report is still to come when it goes on, and where that may be run."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import click

from lucid_cli.experiment import pairs_of, renumber
from lucid_cli.orchestrate import utc_now
from lucid_cli.settings import Settings
from lucid_cli.unfinished import CannotResumeError, Unfinished
from lucid_profiler.reader import Report
from lucid_profiler.records import Env, Resume, Slot
from lucid_profiler.saved_state import run_folder_name

_MUST_AGREE = {
    "system": "the system",
    "machine": "the kind of machine",
    "cpu_model": "the processor",
    "num_cpus": "the number of processors",
    "driver_major": "the driver's major version",
}
_OF_DEVICES = frozenset({"gpu_name", "gpu_uuid", "cuda_visible_devices"})

__all__ = ["Remaining", "check_machine", "check_place", "cut_off_folders", "remaining_slots", "resume_record"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What of a report is still to come.

    Attributes:
        slots: the runs.
        renamed: by the number that a pair had in the plan before, its new one; for those that the file lacks.
    """

    slots: tuple[Slot, ...]
    renamed: Mapping[int, int]


def remaining_slots(report: Report) -> Remaining:
    """Return the runs that are still to come, numbered on after all that were ever planned.

    A pair counts if it is in the file whole and both its runs went well; the others are run again from their first run
    on, in their order. Where a measured pair is left, the discarded ones come first once more: the machine
    has cooled down.
    """
    plans = _plans(report)
    done = {pair.pair for pair in report.pairs} - {run.pair for run in report.runs if run.status != "ok"}
    left = [pair for pair in pairs_of(plans[-1]) if pair[0].pair not in done and not pair[0].discarded]
    warm_up = [pair for pair in pairs_of(plans[-1]) if pair[0].discarded] if left else []
    planned = [*chain.from_iterable(plans)]
    first_pair = max(slot.pair for slot in planned) + 1
    again = [*warm_up, *left]
    return Remaining(
        slots=renumber(again, first_slot=max(slot.slot for slot in planned) + 1, first_pair=first_pair),
        renamed={pair[0].pair: first_pair + place for place, pair in enumerate(again) if pair[0].pair not in done},
    )


def cut_off_folders(report: Report, saved_dir: Path) -> list[Path]:
    """Return the folders of values whose runs were planned and are not in the report, which cannot confirm them."""
    done = {run.run for run in report.runs}
    names = [run_folder_name(slot.slot, slot.arm) for slot in chain(*_plans(report)) if slot.slot not in done]
    folders = [saved_dir / name for name in names]
    return [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]


def _plans(report: Report) -> tuple[tuple[Slot, ...], ...]:
    """Return the runs that were planned, of each block."""
    return (report.header.slots, *(resume.slots for resume in report.resumes))


def check_place(unfinished: Unfinished, settings: Settings) -> None:
    """Make sure that the command is run where it was, from the same program, on the same input.

    Args:
        unfinished: the report.
        settings: how runs would be made now.

    Raises:
        UsageError: it would be another one.
    """
    before = unfinished.settings
    problem = None
    if before.directory != settings.directory:
        problem = f"its command was run in {before.directory}; go there, so that it is the same command"
    elif before.programs != settings.programs:
        arm = next(name for name, path in before.programs.items() if settings.programs.get(name) != path)
        problem = f"the program was {before.programs[arm]} and is {settings.programs.get(arm)}; set PATH as it was"
    elif before.stdin is not None and settings.stdin is None:
        problem = "its runs read standard input; add --stdin, and give them the same"
    elif before.stdin != settings.stdin:
        problem = "its runs had another standard input; give them the same" + (
            "" if before.stdin else ": leave --stdin out"
        )
    if problem is not None:
        raise click.UsageError(f"--resume {unfinished.name}: {problem}")


def check_machine(unfinished: Unfinished, host: Env, settings: Settings) -> None:
    """Make sure that runs of this machine may stand beside those of the report.

    Args:
        unfinished: the report.
        host: the facts of this machine.
        settings: how runs would be made now.

    Raises:
        CannotResumeError: the machine is another one, or has other GPUs.
    """
    before, now = unfinished.host.identity, host.identity
    reasons = [
        f"{words} was {before.get(key)} and is {now.get(key)}"
        for key, words in _MUST_AGREE.items()
        if before.get(key) != now.get(key)
    ]
    if sorted(settings.gpu_names) != sorted(unfinished.settings.gpu_names):
        models = [", ".join(names) or "none" for names in (unfinished.settings.gpu_names, settings.gpu_names)]
        reasons.insert(0, f"the GPUs were {models[0]} and are {models[1]}")
    if reasons:
        raise CannotResumeError(unfinished.name, reasons)


def resume_record(unfinished: Unfinished, host: Env, settings: Settings, *, slots: tuple[Slot, ...]) -> Resume:
    """Return the record that begins the next block."""
    before, now = unfinished.host.identity, host.identity
    return Resume(
        block=len(unfinished.report.resumes) + 1,
        created=utc_now(),
        slots=slots,
        gpu_uuids=settings.gpu_uuids,
        same_devices=sorted(settings.gpu_uuids) == sorted(unfinished.settings.gpu_uuids),
        host_changed=any(before.get(key) != now.get(key) for key in (before.keys() | now.keys()) - _OF_DEVICES),
    )
