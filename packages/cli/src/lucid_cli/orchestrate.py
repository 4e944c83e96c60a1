"""Runs an experiment: one fresh process a slot, each in a directory of its own, until the plan is done or must stop."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Literal, Protocol

import lucid_profiler
from lucid_cli.child import Ended, run_child
from lucid_cli.command import cannot_start
from lucid_cli.interrupts import Interrupts
from lucid_cli.recorder import Recorder
from lucid_profiler.collect import Observation, observe
from lucid_profiler.records import Arm, Run, RunStatus, Slot, Wall

STARTUP_DIR = Path(lucid_profiler.__file__).parent / "_startup"

__all__ = ["Observer", "Plan", "Status", "child_env", "run_experiment", "utc_now"]

Status = Literal["complete", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be run, and how.

    Attributes:
        command: program and arguments as typed.
        arms: the arms, the base first.
        slots: the runs in their order.
        timeout_s: limit of one run; None for none.
        keep_going: whether the remaining runs take place after one has failed.
        stdin: what each run reads from its standard input; None for nothing.
        copy_output: whether its output is shown while it runs.
    """

    command: tuple[str, ...]
    arms: tuple[Arm, ...]
    slots: tuple[Slot, ...]
    timeout_s: float | None = None
    keep_going: bool = False
    stdin: IO[bytes] | None = None
    copy_output: bool = False


class Observer(Protocol):
    """Is told about every run that has ended."""

    def ended(self, slot: Slot, run: Run) -> None:
        """Take note of a run."""


def run_experiment(plan: Plan, recorder: Recorder, *, interrupts: Interrupts, observer: Observer) -> Status:
    """Fill the slots one after the other; stop at a signal, and at a failed run unless the plan keeps going.

    Raises:
        CannotStartError: the first run could not be started.
        OSError: the report cannot be written, or no directory can be made for a run.
    """
    arms = {arm.name: arm for arm in plan.arms}
    status: Status = "complete"
    for slot in plan.slots:
        if interrupts.first is not None:
            return "interrupted"
        run_dir = Path(tempfile.mkdtemp(prefix="lucid-"))
        try:
            run, observation = _run_slot(plan, slot, arms[slot.arm], run_dir=run_dir, interrupts=interrupts)
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)
        recorder.add_run(run, observation)
        observer.ended(slot, run)
        if run.status == "interrupted":
            return "interrupted"
        if run.status != "ok":
            status = "failed"
            if not plan.keep_going:
                return status
    return status


def _run_slot(plan: Plan, slot: Slot, arm: Arm, *, run_dir: Path, interrupts: Interrupts) -> tuple[Run, Observation]:
    started = utc_now()
    try:
        ended = run_child(
            plan.command,
            child_env(os.environ, arm, run_dir),
            interrupts=interrupts,
            timeout_s=plan.timeout_s,
            stdin=plan.stdin,
            copy_output=plan.copy_output,
        )
    except OSError as error:
        raise cannot_start(plan.command[0], error) from error
    process = Wall(source="process", begin_ns=ended.begin_ns, end_ns=ended.end_ns)
    observation = observe(run_dir, run=slot.slot, process=process, max_rss_bytes=ended.max_rss_bytes)
    return _run_record(slot, ended, observation, started=started), observation


def _run_record(slot: Slot, ended: Ended, observation: Observation, *, started: str) -> Run:
    return Run(
        run=slot.slot,
        pair=slot.pair,
        arm=slot.arm,
        discarded=slot.discarded,
        status=_status(ended),
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


def _status(ended: Ended) -> RunStatus:
    if ended.ending != "by_itself":
        return ended.ending
    return "ok" if ended.returncode == 0 else "failed"


def _process_notes(ended: Ended) -> Sequence[str]:
    if ended.left_processes:
        return ("processes that the command had started kept its output open after its end and were killed",)
    return ()


def child_env(base: Mapping[str, str], arm: Arm, run_dir: Path) -> dict[str, str]:
    """Return the environment of a run: the user's own, the arm's, and what starts the agent.

    The directory that starts the agent comes first in PYTHONPATH. An unset or empty PYTHONPATH leaves no empty entry
    behind it, since that would put the working directory on the path.
    """
    startup = str(STARTUP_DIR)
    before = base.get("PYTHONPATH", "")
    others = [entry for entry in before.split(os.pathsep) if entry != startup] if before else []
    return {
        **base,
        **arm.env,
        "LUCID_PROFILE_ARM": arm.name,
        "LUCID_RUN_DIR": str(run_dir),
        "PYTHONPATH": os.pathsep.join([startup, *others]),
    }


def utc_now() -> str:
    """Return the time as RFC 3339 text in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
