"""From what was typed to what will be run: the plan, what the report says of it, and how that report is opened."""

import fcntl
import os
import re
import secrets
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import click

from lucid_cli import __version__, experiment
from lucid_cli.arms import parse_arm, plan_arms
from lucid_cli.built_in import built_in_command
from lucid_cli.orchestrate import utc_now
from lucid_cli.output import one_line, say, warn
from lucid_cli.plan import Plan
from lucid_cli.recorder import Recorder, make_env
from lucid_cli.report_file import ReportFile, refuse_taken
from lucid_cli.sampling import Sampling
from lucid_cli.settings import KEY, Settings
from lucid_profiler.codec import to_plain
from lucid_profiler.host import host_identity, host_volatile
from lucid_profiler.kernel_trace import NUM_STEPS
from lucid_profiler.nvml import NvmlReading, read_nvml
from lucid_profiler.records import TAINTS, Arm, Env, Header, Tool
from lucid_profiler.writer import Writer

_MAX_SEALED_BYTES = 64 << 20
_HANDED_OVER = re.compile(r"/(?:dev|proc/self)/fd/(?!0*[0-2]$)[0-9]+")

__all__ = ["Prepared", "host_env", "prepare", "read_drivers", "read_stdin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An experiment that may begin.

    Attributes:
        plan: what is run.
        header: what the report says was going to be measured.
        settings: how the runs are made, and on which devices.
        run_s: how long a run is expected to take; None if that is not known.
        open: opens the report's file.
        begin: begins or continues the report in it.
    """

    plan: Plan
    header: Header
    settings: Settings
    run_s: float | None
    open: Callable[[], Writer]
    begin: Callable[[Writer], Recorder]


def prepare(words: tuple[str, ...], options: Mapping[str, Any]) -> Prepared:
    """Return the experiment that a command and its options describe; nothing is written unless it will be run.

    Args:
        words: the command; empty for the built-in fit.
        options: those of `lucid profile run`.

    Raises:
        UsageError: they contradict each other, or the report cannot be written.
        CannotStartError: the command has no program.
        EnvironmentUnusableError: what the built-in fit needs is missing, or no report can be made in the working
            directory.
    """
    _check_agent(options)
    _warn_of_descriptors(words)
    nvml = read_drivers(with_nvml=not options["no_nvml"])
    arms = _arms(options)
    pairs = options["pairs"] or experiment.default_pairs(is_built_in=not words, has_gpu=bool(nvml.gpus))
    seed = _seed(options)
    plan = Plan(
        command=words or built_in_command(),
        arms=arms,
        slots=experiment.plan_slots(
            pairs,
            options["discard_pairs"],
            arms=[arm.name for arm in arms if not arm.control],
            control_pairs=options["control"],
            order=options["order"],
            seed=seed,
        ),
        has_places=bool(options["arm"]),
        timeout_s=options["timeout"],
        keep_going=options["keep_going"],
        stdin=read_stdin() if options["pass_stdin"] else None,
        copy_output=options["verbose"],
        sampling=Sampling(
            interval_s=options["interval"], with_nvml=not options["no_nvml"], with_agent=not options["no_agent"]
        ),
        num_kernel_steps=NUM_STEPS if options["kernels"] else 0,
        saved_pair=options["save_state"],
        locate=options["locate"],
        cool_down_s=options["cool_down"],
        require_idle=options["require_idle"],
    )
    settings = Settings.of(plan, os.environ)
    header = _header(plan, options, pairs=pairs, seed=seed)
    name = options["output"] or _default_name(header)
    if options["dry_run"]:
        refuse_taken(name, overwrite=options["overwrite"])
        file = None
    else:
        file = ReportFile(name, overwrite=options["overwrite"], is_named=options["output"] is not None)
    saved_dir = _saved_dir(name)
    if plan.saved_pair is not None:
        _check_saved_pair(plan.saved_pair, plan)
        plan = replace(plan, saved_dir=saved_dir)
    host = host_env(settings, nvml)

    def open_file() -> Writer:
        if file is None:
            raise RuntimeError("a dry run writes no report")
        return file.open()

    def begin(writer: Writer) -> Recorder:
        recorder = Recorder(writer, header)
        recorder.add_host(host)
        say(f"report: {one_line(name)}")
        return recorder

    run_s = options["expect_seconds"]
    return Prepared(plan=plan, header=header, settings=settings, run_s=run_s, open=open_file, begin=begin)


def read_drivers(*, with_nvml: bool) -> NvmlReading:
    """Return what the driver lists, nothing where it is to be left alone."""
    return read_nvml() if with_nvml else NvmlReading(driver_version=None, gpus=(), reason="nvml_off")


def _arms(options: Mapping[str, Any]) -> tuple[Arm, ...]:
    typed = [_arm(text) for text in options["arm"]]
    try:
        return plan_arms(typed, different=options["different"], with_control=options["control"] > 0)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _arm(text: str) -> Arm:
    try:
        return parse_arm(text)
    except ValueError as error:
        raise click.UsageError(f"--arm {text}: {error}") from error


def _seed(options: Mapping[str, Any]) -> int | None:
    if options["order"] == "random":
        drawn = secrets.randbelow(2**32)
        return drawn if options["seed"] is None else int(options["seed"])
    if options["seed"] is not None:
        raise click.UsageError("--seed: only a drawn order has a seed; add --order random")
    return None


def _taints(options: Mapping[str, Any]) -> tuple[str, ...]:
    chosen = options["leave_out"]
    if "none" in chosen and len(chosen) > 1:
        raise click.UsageError("--leave-out none: nothing else goes with it; leave out one of them")
    return tuple(taint for taint in TAINTS if not chosen or taint in chosen)


def _header(plan: Plan, options: Mapping[str, Any], *, pairs: int, seed: int | None) -> Header:
    taints = _taints(options)
    return Header(
        id=str(uuid.uuid4()),
        created=utc_now(),
        tool=Tool(name="lucid", version=__version__),
        command=plan.command,
        arms=plan.arms,
        order=options["order"],
        pairs=pairs,
        discarded_pairs=options["discard_pairs"],
        slots=plan.slots,
        rules=experiment.rules(taints),
        seed=seed,
        taints=taints,
        cool_down_s=plan.cool_down_s,
        require_idle=plan.require_idle,
    )


def _check_agent(options: Mapping[str, Any]) -> None:
    """Refuse what only the agent can do where there is to be none."""
    wanted = {"--kernels": options["kernels"], "--locate": options["locate"]}
    wanted["--save-state"] = options["save_state"] is not None
    name = next((name for name, is_wanted in wanted.items() if is_wanted), None)
    if options["no_agent"] and name is not None:
        raise click.UsageError(f"{name} needs the agent inside the process; leave --no-agent out")


def _warn_of_descriptors(words: tuple[str, ...]) -> None:
    """Say that the command is not given the descriptor that a word names, as `<(...)` of a shell makes one."""
    name = next((word for word in words if _HANDED_OVER.fullmatch(word)), None)
    if name is not None:
        warn(
            f"{name} is closed in the runs, since what it holds might be read only once; name a file, or let each run "
            "have its own: -- bash -c 'COMMAND <(...)'"
        )


def _saved_dir(report: str) -> Path:
    """Return the directory for the values of a pair, which is made when there are some.

    Raises:
        UsageError: something has that name; values in it would be taken for those of this report.
    """
    directory = Path(f"{report}.state").absolute()
    if os.path.lexists(directory):
        raise click.UsageError(
            f"{directory.name} exists already, with the values of an earlier report; move or remove it, or name "
            "another report with -o"
        )
    return directory


def _check_saved_pair(pair: int, plan: Plan) -> None:
    last = max(slot.pair for slot in plan.slots)
    if pair > last:
        raise click.UsageError(f"--save-state {pair}: pairs go from 0 to {last}, discarded ones first")


def read_stdin() -> IO[bytes]:
    """Return standard input: a terminal as it is, anything else in a file that runs read and do not change."""
    if sys.stdin is None:
        raise click.UsageError("--stdin: standard input is closed")
    if sys.stdin.isatty():
        return sys.stdin.buffer
    spool = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the runs
    shutil.copyfileobj(sys.stdin.buffer, spool)
    return _unwritable(spool)


def _unwritable(spool: IO[bytes]) -> IO[bytes]:
    """Return what a file holds where it stays as it is: in sealed memory; if long, in the file, which nobody may write.

    A run may open its standard input once more by name, and permissions do not hold root.
    """
    if spool.tell() <= _MAX_SEALED_BYTES and hasattr(os, "memfd_create"):
        with suppress(OSError):
            sealed = os.fdopen(os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b")
            spool.seek(0)
            shutil.copyfileobj(spool, sealed)
            sealed.flush()
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, seals)
            spool.close()
            return sealed
    spool.flush()
    os.fchmod(spool.fileno(), 0o444)
    return spool


def _default_name(header: Header) -> str:
    stamp = header.created[:19].replace("-", "").replace(":", "")
    return f"lucid-{stamp}Z-{header.id[:8]}.jsonl"


def host_env(settings: Settings, nvml: NvmlReading) -> Env:
    """Return the facts of the machine, and how runs are made on it."""
    volatile = {**host_volatile(nvml), "program": next(iter(settings.programs.values())), KEY: to_plain(settings)}
    return make_env("host", host_identity(nvml), volatile)
