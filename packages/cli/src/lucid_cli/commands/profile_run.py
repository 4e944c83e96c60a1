"""`lucid profile run`: measure a command natively and captured, write a report, and show what it comes to."""

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from lucid_cli import experiment
from lucid_cli.arguments import Interval, Seconds
from lucid_cli.dry_run import render_plan
from lucid_cli.empty_context import measure_empty_context
from lucid_cli.idle import check_idle
from lucid_cli.interrupts import Interrupts
from lucid_cli.orchestrate import run_experiment
from lucid_cli.output import warn, write_result
from lucid_cli.plan import Plan, Status
from lucid_cli.prepare import Prepared, prepare
from lucid_cli.prepare_resumed import prepare_resumed
from lucid_cli.progress import Progress
from lucid_cli.recorder import Recorder
from lucid_cli.reporters.table import render_report
from lucid_cli.settings import Settings
from lucid_profiler.compare import Analysis, analyze_all
from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.reader import Report
from lucid_profiler.records import TAINTS, Run, Slot
from lucid_profiler.writer import Writer

PARITY_FAILED = 4
CHILD_FAILED = 8
MAX_PAIRS = 10_000
_GO_WITH_RESUME = frozenset({"resume", "timeout", "keep_going", "pass_stdin", "verbose", "dry_run", "expect_seconds"})

__all__ = ["command"]


@click.command("run", context_settings={"allow_interspersed_args": False, "max_content_width": 100})
@click.option(
    "--pairs",
    type=click.IntRange(min=1, max=MAX_PAIRS),
    metavar="N",
    help="Measured pairs; an even number lets a slow drift cancel.  "
    f"[default: {experiment.DEFAULT_PAIRS}; {experiment.CPU_FIT_PAIRS} for the built-in fit without a GPU]",
)
@click.option(
    "--discard-pairs",
    type=click.IntRange(min=0, max=MAX_PAIRS),
    default=experiment.DISCARDED_PAIRS,
    show_default=True,
    metavar="N",
    help="Pairs run first and kept in the report, but not in the statistics.",
)
@click.option(
    "--arm",
    multiple=True,
    metavar="NAME[:KEY=VALUE,...]",
    help="An arm with the environment variables that it sets, instead of native and captured; the first is the base, "
    "and each further one is compared with it. A comma inside a value is typed '\\,'. {arm} in COMMAND is replaced by "
    "the name, and {{arm}} by {arm}.",
)
@click.option(
    "--different",
    multiple=True,
    metavar="NAME",
    help="This arm computes something else: parity is not asked of it, and it is never called the same.",
)
@click.option(
    "--control",
    type=click.IntRange(min=0, max=MAX_PAIRS),
    default=0,
    show_default=True,
    metavar="N",
    help="Also measure N pairs of the base with itself, spread over the others: what they differ by is noise.",
)
@click.option(
    "--order",
    type=click.Choice(["abba", "random"]),
    default="abba",
    show_default=True,
    help="Which run of a pair comes first: either in turn, or as a coin says.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**63 - 1),
    metavar="N",
    help="Of the coin.  [default: drawn, and recorded]",
)
@click.option(
    "--cool-down", type=Seconds(is_open=False), default=0.0, metavar="SECONDS", help="Pause between two runs."
)
@click.option(
    "--require-idle",
    is_flag=True,
    help="Begin only if nobody else uses the GPUs and the processors; before each further run wait up to a minute for "
    "that, and note it if it does not come.",
)
@click.option(
    "--leave-out",
    multiple=True,
    type=click.Choice([*TAINTS, "none"]),
    help="Leave a pair out of the statistics if one of its runs was throttled by heat or power supply, shared its GPU "
    "with a foreign process that the other run did not have, was suspended with the machine, or had other versions "
    "or flags. Fixed before the first run; may be given several times.  [default: all of them]",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the runs in their order, what each arm sets and the time that all take; start and write nothing.",
)
@click.option("--expect-seconds", type=Seconds(), metavar="SECONDS", help="How long one run takes, for --dry-run.")
@click.option(
    "--resume",
    metavar="FILE",
    help="Go on with a report whose lucid was killed or interrupted: a pair that was cut off is run again whole, after "
    "the discarded ones. COMMAND and plan are those of the report; only --timeout, --keep-going, --stdin, --dry-run, "
    "--expect-seconds and -v go with it.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Report to write.  [default: lucid-<UTC>-<id>.jsonl]",
)
@click.option("--overwrite", is_flag=True, help="Replace the report if it exists.")
@click.option("--keep-going", is_flag=True, help="Run the remaining pairs although a run has failed.")
@click.option("--timeout", type=Seconds(), metavar="SECONDS", help="Time limit of a single run.")
@click.option("--stdin", "pass_stdin", is_flag=True, help="Give each run what standard input holds; else it is empty.")
@click.option(
    "--interval",
    type=Interval(or_none=True),
    default=0.1,
    show_default=True,
    metavar="SECONDS",
    help="Time between two samples of GPU and host; 0 samples nothing.",
)
@click.option(
    "--kernels",
    is_flag=True,
    help="Run one more process of each arm, traced and never timed, and count its kernels and launches.",
)
@click.option(
    "--save-state",
    type=click.IntRange(min=0),
    metavar="PAIR",
    help="Keep the values behind the digests of the runs of this pair, in FILE.state beside the report.",
)
@click.option("--locate", is_flag=True, help="If parity fails, run more to name the first step, tensor and element.")
@click.option("--no-nvml", is_flag=True, help="Leave the NVIDIA driver alone: sample the host only.")
@click.option("--no-agent", is_flag=True, help="Leave the process alone: no steps, no digests, no parity.")
@click.option("-v", "--verbose", is_flag=True, help="Copy the command's output to standard error.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[[--] COMMAND [ARGS]...]")
@click.pass_context
def command(ctx: click.Context, /, words: tuple[str, ...], **options: Any) -> int:
    """Run COMMAND natively and captured, in pairs of fresh processes.

    COMMAND is run exactly as typed, without a shell. The options of lucid end at its first word; everything after
    that belongs to COMMAND. Without a COMMAND the built-in fit is measured: it trains a small detector on handwritten
    digits (python -m lucid_cli.workloads.detection --help). The result goes to standard output, progress to standard
    error.
    """
    if options["resume"] is None:
        prepared = prepare(words, options)
    else:
        prepared = prepare_resumed(words, options, typed=_typed(ctx))
    if options["dry_run"]:
        write_result(render_plan(prepared.plan, prepared.header, environ=os.environ, run_s=prepared.run_s))
        return 0
    if prepared.plan.require_idle:
        check_idle(os.environ, with_nvml=prepared.plan.sampling.with_nvml)
    plan = _with_context(prepared.plan, prepared.settings)
    with Interrupts() as interrupts:
        status, report, lost = _measure(plan, prepared, interrupts)
    analyses = () if report is None else analyze_all(report)
    if report is not None:
        write_result(render_report(report, analyses[0]))
    if lost is not None:
        raise EnvironmentUnusableError(lost)
    return _exit_code(status, analyses, interrupts)


class _Watching(Progress):
    """Progress that also says, once and where runs are still to come, that the report is not as it was written."""

    writer: Writer | None = None
    _has_told = False

    def lost(self) -> str | None:
        """Return what became of the report; None while it is where it was put, and as it was written."""
        lost = None if self.writer is None else self.writer.lost()
        return None if self.writer is None or lost is None else f"{self.writer.path}: {lost}"

    def ended(self, slot: Slot, run: Run) -> None:
        """Print the line of one run."""
        super().ended(slot, run)
        lost = self.lost() if self._num_ended < self._num_slots else None
        if lost is not None and not self._has_told:
            self._has_told = True
            warn(lost)


def _typed(ctx: click.Context) -> list[str]:
    """Return the options on the command line that a report which goes on has fixed."""
    return [
        param.opts[-1]
        for param in ctx.command.params
        if isinstance(param, click.Option)
        and param.name is not None
        and param.name not in _GO_WITH_RESUME
        and ctx.get_parameter_source(param.name) is not ParameterSource.DEFAULT
    ]


def _measure(plan: Plan, prepared: Prepared, interrupts: Interrupts) -> tuple[Status, Report | None, str | None]:
    """Run the experiment; return how it went, the report if one was begun, and what became of a file that is lost."""
    observer = _Watching(len(plan.slots), cool_down_s=plan.cool_down_s, copies_output=plan.copy_output)
    with ExitStack() as stack:
        stack.enter_context(observer)

        def begin() -> Recorder:
            observer.writer = stack.enter_context(prepared.open())
            return prepared.begin(observer.writer)

        status, recorder = run_experiment(plan, begin, interrupts=interrupts, observer=observer)
        if recorder is None:
            return status, None, None
        status = _over_all(status, recorder)
        report = recorder.finish(recorder.ending(status))
        return status, report, observer.lost()


def _with_context(plan: Plan, settings: Settings) -> Plan:
    """Return the plan with what an empty CUDA context takes, where that can be set against something."""
    if not (settings.gpu_uuids and plan.slots and plan.sampling.reads_memory):
        return plan
    program = settings.programs[plan.arms[0].name]
    return replace(plan, context=measure_empty_context(program, os.environ))


def _over_all(status: Status, recorder: Recorder) -> Status:
    """Return how all runs of the report went, those before a resume too."""
    has_failed = any(run.status in {"failed", "timeout"} for run in recorder.report().runs)
    return "failed" if status == "complete" and has_failed else status


def _exit_code(status: Status, analyses: tuple[Analysis, ...], interrupts: Interrupts) -> int:
    if status == "interrupted" and interrupts.first is not None:
        return 128 + interrupts.first
    if status == "failed":
        return CHILD_FAILED
    is_broken = any(one.parity.status == "different" and not one.is_different for one in analyses)
    return PARITY_FAILED if is_broken else 0
