"""From a report that had stopped to what is left of its experiment, and how the report is continued."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from lucid_cli.output import one_line, say
from lucid_cli.plan import Plan
from lucid_cli.prepare import Prepared, host_env, read_drivers, read_stdin
from lucid_cli.recorder import Recorder
from lucid_cli.resume import check_machine, check_place, cut_off_folders, remaining_slots, resume_record
from lucid_cli.sampling import Sampling
from lucid_cli.settings import Settings
from lucid_cli.unfinished import Unfinished, read_unfinished
from lucid_profiler.writer import Writer

__all__ = ["prepare_resumed"]


def prepare_resumed(words: tuple[str, ...], options: Mapping[str, Any], *, typed: Sequence[str]) -> Prepared:
    """Return what is left of the experiment of a report; nothing is written unless it will be run.

    Args:
        words: the command, which the report has already.
        options: those of `lucid profile run`.
        typed: the options that were given.

    Raises:
        UsageError: the report cannot go on, or something was given that it has already.
        ReportError: it cannot be read.
        NotComparableError: its next runs would not measure the same thing.
        CannotStartError: the command has no program.
    """
    name = options["resume"]
    _check_typed(name, words, typed)
    unfinished = read_unfinished(name)
    _check_failures(unfinished, keep_going=options["keep_going"])
    remaining = remaining_slots(unfinished.report)
    if unfinished.has_ended and not remaining.slots:
        raise click.UsageError(f"--resume {name}: nothing is left to run; start a new report with -o")
    before, header = unfinished.settings, unfinished.report.header
    saved_dir = Path(f"{name}.state").absolute()
    plan = Plan(
        command=header.command,
        arms=header.arms,
        slots=remaining.slots,
        has_places=before.has_places,
        timeout_s=options["timeout"] or before.timeout_s,
        keep_going=options["keep_going"] or before.keep_going,
        stdin=read_stdin() if options["pass_stdin"] else None,
        copy_output=options["verbose"],
        sampling=Sampling(interval_s=before.interval_s, with_nvml=before.with_nvml, with_agent=before.with_agent),
        num_kernel_steps=before.num_kernel_steps,
        saved_pair=None if before.saved_pair is None else remaining.renamed.get(before.saved_pair),
        saved_dir=saved_dir,
        locate=before.locate,
        cool_down_s=header.cool_down_s,
        require_idle=header.require_idle,
    )
    settings = Settings.of(plan, os.environ)
    check_place(unfinished, settings)
    host = host_env(settings, read_drivers(with_nvml=before.with_nvml))
    check_machine(unfinished, host, settings)
    resume = resume_record(unfinished, host, settings, slots=plan.slots)

    def open_file() -> Writer:
        for text in unfinished.what_goes():
            say(one_line(text))
        writer = unfinished.open()
        # Not before the report is ours: another lucid that writes it saves there.
        if before.saved_pair is not None:
            _remove_cut_off(cut_off_folders(unfinished.report, saved_dir))
        return writer

    def begin(writer: Writer) -> Recorder:
        recorder = Recorder.continued(writer, unfinished.report, resume)
        recorder.add_host(host)
        say(f"report: {one_line(name)}")
        return recorder

    run_s = options["expect_seconds"] or _typical_run_s(unfinished)
    return Prepared(plan=plan, header=header, settings=settings, run_s=run_s, open=open_file, begin=begin)


def _check_typed(name: str, words: tuple[str, ...], typed: Sequence[str]) -> None:
    """Refuse what a report that goes on has fixed already."""
    if words:
        raise click.UsageError(f"--resume {name}: the command is that of the report; leave {words[0]!r} out")
    if typed:
        raise click.UsageError(f"{typed[0]} does not go with --resume: the report has fixed it; leave it out")


def _check_failures(unfinished: Unfinished, *, keep_going: bool) -> None:
    failed = next((run for run in unfinished.report.runs if run.status in {"failed", "timeout"}), None)
    if failed is not None and not (keep_going or unfinished.settings.keep_going):
        words = "failed" if failed.status == "failed" else "ran into its time limit"
        raise click.UsageError(
            f"--resume {unfinished.name}: run {failed.run} {words}; start a new report with -o, or add --keep-going"
        )


def _remove_cut_off(folders: Sequence[Path]) -> None:
    """Remove what runs had saved that were cut off; what cannot be removed stays."""
    for folder in folders:
        shown = one_line(f"{folder.parent.name}/{folder.name}")
        try:
            shutil.rmtree(folder)
        except OSError as error:
            say(f"{shown}: its run was cut off, and it cannot be removed: {error.strerror}")
        else:
            say(f"{shown}: its run was cut off, and it is removed")


def _typical_run_s(unfinished: Unfinished) -> float | None:
    seconds = [run.process_ns / 1e9 for run in unfinished.report.runs if run.status == "ok"]
    return median(seconds) if seconds else None
