"""Runs an experiment: one fresh process a slot, each in a directory of its own, until the plan is done or must stop."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Literal, Protocol

import lucid_profiler
from lucid_cli.child import Ended, run_child
from lucid_cli.descendants import adopting_orphans
from lucid_cli.interrupts import Interrupts
from lucid_cli.recorder import Recorder
from lucid_cli.relocate import Rerun, relocate
from lucid_cli.sampling import Beside, Sampling
from lucid_profiler.collect import Observation, observe
from lucid_profiler.collect_kernels import read_kernels
from lucid_profiler.compare import analyze
from lucid_profiler.context import Measured
from lucid_profiler.kernel_trace import STEPS_VARIABLE
from lucid_profiler.records import Arm, Kernels, Located, Run, RunStatus, Slot, Wall
from lucid_profiler.saved_state import run_folder_name

# Each has a process do what no timed one may.
_UNTIMED = frozenset({STEPS_VARIABLE, "LUCID_SAVE_STATE", "LUCID_SAVE_NAME", "LUCID_SAVE_STEP", "LUCID_STEP_DIGESTS"})
_UNTIMED_LIMIT = 10  # times the limit of a run: tracing and hashing every step are slow
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
        sampling: what is recorded beside each run.
        num_kernel_steps: steps of which one more process of each arm, which is never timed, counts the kernels; 0 for
            no such process.
        context: what an empty CUDA context takes; None where that was not measured.
        saved_pair: number of the pair whose values are kept; None for none.
        saved_dir: where they are kept.
        locate: whether more runs look for the first difference where parity has failed.
    """

    command: tuple[str, ...]
    arms: tuple[Arm, ...]
    slots: tuple[Slot, ...]
    timeout_s: float | None = None
    keep_going: bool = False
    stdin: IO[bytes] | None = None
    copy_output: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    num_kernel_steps: int = 0
    context: Measured | None = None
    saved_pair: int | None = None
    saved_dir: Path | None = None
    locate: bool = False


class Observer(Protocol):
    """Is told about every run that has ended."""

    def ended(self, slot: Slot, run: Run) -> None:
        """Take note of a run."""

    def traced(self, arm: Arm, kernels: Kernels) -> None:
        """Take note of a traced process."""

    def rerun(self, arm: Arm) -> None:
        """Take note of a run that begins and is not timed."""


def run_experiment(
    plan: Plan, begin: Callable[[], Recorder], *, interrupts: Interrupts, observer: Observer
) -> tuple[Status, Recorder | None]:
    """Fill the slots one after the other; stop at a signal, and at a failed run unless the plan keeps going.

    Args:
        plan: what to run.
        begin: opens the report; called when the first run has started, so that a command that cannot be started
            costs no report.
        interrupts: signals to lucid.
        observer: is told about each run.

    Returns:
        How it went, and what wrote the report; None if a signal came before the first run.

    Raises:
        CannotStartError: a run could not be started.
        OSError: the report cannot be written, or no directory can be made for a run.
    """
    with adopting_orphans():
        status, recorder = _fill_slots(plan, _Beginning(begin), interrupts=interrupts, observer=observer)
        if recorder is not None:
            status = _untimed(plan, recorder, status, interrupts=interrupts, observer=observer)
    return status, recorder


class _Beginning:
    """Opens the report at the first call."""

    def __init__(self, begin: Callable[[], Recorder]) -> None:
        self._begin = begin
        self.recorder: Recorder | None = None

    def __call__(self) -> None:
        if self.recorder is None:
            self.recorder = self._begin()


def _fill_slots(
    plan: Plan, beginning: _Beginning, *, interrupts: Interrupts, observer: Observer
) -> tuple[Status, Recorder | None]:
    arms = {arm.name: arm for arm in plan.arms}
    status: Status = "complete"
    for slot in plan.slots:
        if interrupts.first is not None:
            return "interrupted", beginning.recorder
        run_dir = Path(tempfile.mkdtemp(prefix="lucid-"))
        try:
            run, observation = _run_slot(
                plan, slot, arms[slot.arm], run_dir=run_dir, interrupts=interrupts, on_start=beginning
            )
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)
        if beginning.recorder is not None:
            beginning.recorder.add_run(run, observation)
        observer.ended(slot, run)
        if run.status == "interrupted":
            status = "interrupted"
            break
        if run.status != "ok":
            status = "failed"
            if not plan.keep_going:
                break
    return status, beginning.recorder


def _run_slot(
    plan: Plan,
    slot: Slot,
    arm: Arm,
    *,
    run_dir: Path,
    interrupts: Interrupts,
    on_start: Callable[[], None],
) -> tuple[Run, Observation]:
    started = utc_now()
    if _saving(plan, slot) and plan.saved_dir is not None:
        plan.saved_dir.mkdir(mode=0o700, exist_ok=True)
    with Beside(plan.sampling, run_dir) as beside:

        def begin(pid: int) -> None:
            on_start()
            beside.start(pid)

        ended = run_child(
            plan.command,
            {**child_env(os.environ, arm, run_dir if plan.sampling.with_agent else None), **_saving(plan, slot)},
            interrupts=interrupts,
            timeout_s=plan.timeout_s,
            stdin=plan.stdin,
            copy_output=plan.copy_output,
            on_start=begin,
            spared=beside.pids,
        )
        process = Wall(source="process", begin_ns=ended.begin_ns, end_ns=ended.end_ns)
        observation = observe(
            run_dir,
            run=slot.slot,
            process=process,
            max_rss_bytes=ended.max_rss_bytes,
            with_agent=plan.sampling.with_agent,
        )
        monitored = beside.observe(observation, run=slot.slot, end_ns=ended.end_ns, context=plan.context)
    observation = replace(
        observation,
        metrics={**observation.metrics, **monitored.metrics},
        samples=(*observation.samples, *monitored.samples),
    )
    run = _run_record(slot, ended, observation, started=started)
    notes = [*run.notes, *(f"monitor: {note}" for note in monitored.notes)]
    if _has_saved(plan, slot):
        longer = ", and its wall is longer for it" if observation.wall.source == "process" else ""
        notes.append(f"the values behind its digests were kept{longer}")
    return replace(run, monitor=monitored.report, notes=tuple(notes)), observation


def _saving(plan: Plan, slot: Slot) -> dict[str, str]:
    """Return the variables that have a run keep the values behind its digests."""
    if plan.saved_dir is None or slot.pair != plan.saved_pair:
        return {}
    return {"LUCID_SAVE_STATE": str(plan.saved_dir), "LUCID_SAVE_NAME": run_folder_name(slot.slot, slot.arm)}


def _has_saved(plan: Plan, slot: Slot) -> bool:
    """Tell whether a run has kept values; a directory in which nothing is goes away."""
    if not _saving(plan, slot) or plan.saved_dir is None:
        return False
    with suppress(OSError):
        plan.saved_dir.rmdir()
    return any((plan.saved_dir / run_folder_name(slot.slot, slot.arm)).rglob("*.state"))


def _untimed(plan: Plan, recorder: Recorder, status: Status, *, interrupts: Interrupts, observer: Observer) -> Status:
    """Run what is asked for beside the measured runs; return how it went. What goes wrong there costs no report."""

    def rerun(arm: Arm, run_dir: Path, variables: Mapping[str, str]) -> RunStatus:
        observer.rerun(arm)
        return _rerun(plan, arm, run_dir, variables, interrupts=interrupts)

    if plan.num_kernel_steps:
        for arm in plan.arms:
            kernels = _traced(plan, arm, rerun) if status == "complete" else _untraced(arm, "run_failed")
            recorder.add(kernels)
            observer.traced(arm, kernels)
    if plan.locate and status == "complete" and analyze(recorder.report()).parity.status == "different":
        recorder.add(_located(plan, rerun))
    return "interrupted" if interrupts.first is not None else status


def _rerun(plan: Plan, arm: Arm, run_dir: Path, variables: Mapping[str, str], *, interrupts: Interrupts) -> RunStatus:
    """Run the command once more in an arm; nothing of it is timed, and much of it is slower."""
    if interrupts.first is not None:
        return "interrupted"
    ended = run_child(
        plan.command,
        {**child_env(os.environ, arm, run_dir), **variables},
        interrupts=interrupts,
        timeout_s=None if plan.timeout_s is None else _UNTIMED_LIMIT * plan.timeout_s,
        stdin=plan.stdin,
        copy_output=plan.copy_output,
    )
    return _status(ended)


def _traced(plan: Plan, arm: Arm, rerun: Rerun) -> Kernels:
    """Return what one traced process of an arm showed."""
    try:
        with tempfile.TemporaryDirectory(prefix="lucid-", ignore_cleanup_errors=True) as folder:
            status = rerun(arm, Path(folder), {STEPS_VARIABLE: str(plan.num_kernel_steps)})
            return read_kernels(Path(folder), arm=arm.name, status=status)
    except OSError as error:
        return _untraced(arm, f"no directory can be made for it: {error.strerror}")


def _untraced(arm: Arm, reason: str) -> Kernels:
    return Kernels(arm=arm.name, status="not_started", table=None, reason=reason)


def _located(plan: Plan, rerun: Rerun) -> Located:
    arms = plan.arms[:2]
    try:
        return relocate(arms, rerun)
    except OSError as error:
        text = f"no directory can be made for more runs: {error.strerror}"
        return Located(arms=(arms[0].name, arms[1].name), text=text)


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
    notes = []
    if ended.outlived:
        notes.append(f"{_counted(ended.outlived)} outlived the command and {_was(ended.outlived)} ended")
    if ended.unended:
        notes.append(f"{_counted(ended.unended)} outlived the command and could not be ended")
    if ended.held_output and not notes:
        notes.append("its output was kept open after its end; the rest of its process group was killed")
    return notes


def _counted(names: Sequence[str]) -> str:
    noun = "process" if len(names) == 1 else "processes"
    by_name = [f"{num} {name}" if num > 1 else name for name, num in Counter(names).items()]
    return f"{len(names)} {noun} ({', '.join(by_name)})"


def _was(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"


def child_env(base: Mapping[str, str], arm: Arm, run_dir: Path | None) -> dict[str, str]:
    """Return the environment of a run: the user's own, the arm's, and what starts the agent, where it has a directory.

    The directory that starts the agent comes first in PYTHONPATH. An unset or empty PYTHONPATH leaves no empty entry
    behind it, since that would put the working directory on the path.
    """
    # Whoever has a variable from elsewhere, or runs lucid under lucid, must not get a process that does more.
    base = {name: value for name, value in base.items() if name not in _UNTIMED}
    if run_dir is None:
        return {**base, **arm.env, "LUCID_PROFILE_ARM": arm.name}
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
