"""`lucid profile run`: measure a command natively and captured, write a report, and show what it comes to."""

import os
import shutil
import sys
import tempfile
import uuid
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import click

from lucid_cli import __version__, experiment
from lucid_cli.arguments import Interval, Seconds
from lucid_cli.built_in import built_in_command
from lucid_cli.command import resolve_program
from lucid_cli.empty_context import measure_empty_context
from lucid_cli.interrupts import Interrupts
from lucid_cli.orchestrate import Plan, Status, run_experiment, utc_now
from lucid_cli.output import say, write_result
from lucid_cli.progress import Progress
from lucid_cli.recorder import Recorder, make_env
from lucid_cli.report_file import ReportFile
from lucid_cli.reporters.table import render_report
from lucid_cli.sampling import Sampling
from lucid_profiler.compare import Analysis, analyze
from lucid_profiler.host import host_identity, host_volatile
from lucid_profiler.kernel_trace import NUM_STEPS
from lucid_profiler.nvml import NvmlReading, read_nvml
from lucid_profiler.records import Env, Header, Tool

PARITY_FAILED = 4
CHILD_FAILED = 8

__all__ = ["command"]


@click.command("run", context_settings={"allow_interspersed_args": False, "max_content_width": 100})
@click.option(
    "--pairs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Measured pairs; an even number lets a slow drift cancel.  "
    f"[default: {experiment.DEFAULT_PAIRS}; {experiment.CPU_FIT_PAIRS} for the built-in fit without a GPU]",
)
@click.option(
    "--discard-pairs",
    type=click.IntRange(min=0),
    default=experiment.DISCARDED_PAIRS,
    show_default=True,
    metavar="N",
    help="Pairs run first and kept in the report, but not in the statistics.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
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
def command(words: tuple[str, ...], **options: Any) -> int:
    """Run COMMAND natively and captured, in pairs of fresh processes.

    COMMAND is run exactly as typed, without a shell. The options of lucid end at its first word; everything after
    that belongs to COMMAND. Without a COMMAND the built-in fit is measured: it trains a small detector on handwritten
    digits (python -m lucid_cli.workloads.detection --help). The result goes to standard output, progress to standard
    error.
    """
    _check_agent(options)
    nvml = NvmlReading(driver_version=None, gpus=(), reason="nvml_off") if options["no_nvml"] else read_nvml()
    pairs = options["pairs"] or experiment.default_pairs(is_built_in=not words, has_gpu=bool(nvml.gpus))
    plan = Plan(
        command=words or built_in_command(),
        arms=experiment.ARMS,
        slots=experiment.plan_slots(pairs, options["discard_pairs"]),
        timeout_s=options["timeout"],
        keep_going=options["keep_going"],
        stdin=_read_stdin() if options["pass_stdin"] else None,
        copy_output=options["verbose"],
        sampling=Sampling(
            interval_s=options["interval"], with_nvml=not options["no_nvml"], with_agent=not options["no_agent"]
        ),
        num_kernel_steps=NUM_STEPS if options["kernels"] else 0,
        saved_pair=options["save_state"],
        locate=options["locate"],
    )
    program = resolve_program(plan.command, os.environ)
    header = _header(plan, pairs=pairs, discarded=options["discard_pairs"])
    file = ReportFile(options["output"] or _default_name(header), overwrite=options["overwrite"])
    if options["save_state"] is not None:
        plan = replace(plan, saved_dir=_saved_dir(file.path, options["save_state"], plan))
    host = _host_env(program, nvml)
    if nvml.gpus and plan.sampling.reads_memory:
        plan = replace(plan, context=measure_empty_context(program, os.environ))
    with Interrupts() as interrupts, ExitStack() as stack:

        def begin() -> Recorder:
            recorder = Recorder(stack.enter_context(file.open()), header)
            recorder.add_host(host)
            say(f"report: {file.path}")
            return recorder

        status, recorder = run_experiment(plan, begin, interrupts=interrupts, observer=Progress(len(plan.slots)))
        report = recorder.finish(recorder.ending(status)) if recorder is not None else None
    if report is None:
        return _exit_code(status, None, interrupts)
    analysis = analyze(report)
    write_result(render_report(report, analysis))
    return _exit_code(status, analysis, interrupts)


def _check_agent(options: dict[str, Any]) -> None:
    """Refuse what only the agent can do where there is to be none."""
    wanted = {"--kernels": options["kernels"], "--locate": options["locate"]}
    wanted["--save-state"] = options["save_state"] is not None
    name = next((name for name, is_wanted in wanted.items() if is_wanted), None)
    if options["no_agent"] and name is not None:
        raise click.UsageError(f"{name} needs the agent inside the process; leave --no-agent out")


def _saved_dir(report: str, pair: int, plan: Plan) -> Path:
    """Return the directory for the values of a pair, which is made when there are some.

    Raises:
        UsageError: there is no such pair, or something has that name.
    """
    last = max(slot.pair for slot in plan.slots)
    if pair > last:
        raise click.UsageError(f"--save-state {pair}: pairs go from 0 to {last}, discarded ones first")
    directory = Path(f"{report}.state").absolute()
    if directory.exists():
        raise click.UsageError(f"{directory.name} exists already; remove it, or name another report with -o")
    return directory


def _read_stdin() -> IO[bytes]:
    """Return standard input: a terminal as it is, anything else in a file that each run reads from its beginning."""
    if sys.stdin is None:
        raise click.UsageError("--stdin: standard input is closed")
    if sys.stdin.isatty():
        return sys.stdin.buffer
    spool = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the runs
    shutil.copyfileobj(sys.stdin.buffer, spool)
    return spool


def _header(plan: Plan, *, pairs: int, discarded: int) -> Header:
    return Header(
        id=str(uuid.uuid4()),
        created=utc_now(),
        tool=Tool(name="lucid", version=__version__),
        command=plan.command,
        arms=plan.arms,
        pairs=pairs,
        discarded_pairs=discarded,
        slots=plan.slots,
        rules=experiment.RULES,
    )


def _default_name(header: Header) -> str:
    stamp = header.created[:19].replace("-", "").replace(":", "")
    return f"lucid-{stamp}Z-{header.id[:8]}.jsonl"


def _host_env(program: str, nvml: NvmlReading) -> Env:
    return make_env("host", host_identity(nvml), {**host_volatile(nvml), "program": program})


def _exit_code(status: Status, analysis: Analysis | None, interrupts: Interrupts) -> int:
    if status == "interrupted" and interrupts.first is not None:
        return 128 + interrupts.first
    if status == "failed":
        return CHILD_FAILED
    return PARITY_FAILED if analysis is not None and analysis.parity.status == "different" else 0
