"""Runs an experiment: one fresh process a slot, each in a directory of its own, until the plan is done or must stop."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import lucid_profiler
from lucid_cli.child import run_child
from lucid_cli.descendants import adopting_orphans
from lucid_cli.idle import look_between_runs
from lucid_cli.interrupts import Interrupts
from lucid_cli.pauses import Pauses
from lucid_cli.plan import Observer, Plan, Status
from lucid_cli.recorder import Recorder
from lucid_cli.run_record import run_record, status_of
from lucid_cli.sampling import Beside
from lucid_cli.untimed import UNTIMED_VARIABLES, run_untimed
from lucid_profiler.collect import Observation, observe
from lucid_profiler.records import Arm, Run, RunStatus, Slot, Wall
from lucid_profiler.saved_state import run_folder_name
from lucid_profiler.taints import find_taints

_UNTIMED_LIMIT = 10  # times the limit of a run: tracing and hashing every step are slow
STARTUP_DIR = Path(lucid_profiler.__file__).parent / "_startup"

__all__ = ["child_env", "run_experiment", "utc_now"]


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
            rerun = partial(_rerun, plan, interrupts=interrupts, observer=observer)
            run_untimed(plan, recorder, status, rerun=rerun, observer=observer)
            status = "interrupted" if interrupts.first is not None else status
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
    def on_start() -> None:
        beginning()
        observer.started()

    pauses = _pauses(plan, interrupts=interrupts, observer=observer)
    status: Status = "complete"
    if not plan.slots:
        beginning()
    for place, slot in enumerate(plan.slots):
        notes = pauses.take() if place else ()
        if interrupts.first is not None:
            return "interrupted", beginning.recorder
        run_dir = Path(tempfile.mkdtemp(prefix="lucid-"))
        try:
            observer.began(slot, run_dir)
            run, observation = _run_slot(plan, slot, run_dir=run_dir, interrupts=interrupts, on_start=on_start)
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)
        run = replace(run, notes=(*run.notes, *notes))
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


def _pauses(plan: Plan, *, interrupts: Interrupts, observer: Observer) -> Pauses:
    look = partial(look_between_runs, os.environ, with_nvml=plan.sampling.with_nvml) if plan.require_idle else None
    return Pauses(cool_down_s=plan.cool_down_s, look=look, interrupts=interrupts, observer=observer)


def _run_slot(
    plan: Plan,
    slot: Slot,
    *,
    run_dir: Path,
    interrupts: Interrupts,
    on_start: Callable[[], None],
) -> tuple[Run, Observation]:
    started, arm = utc_now(), plan.played(slot.arm)
    if _saving(plan, slot) and plan.saved_dir is not None:
        plan.saved_dir.mkdir(mode=0o700, exist_ok=True)
    with Beside(plan.sampling, run_dir) as beside:

        def begin(pid: int) -> None:
            on_start()
            beside.start(pid)

        ended = run_child(
            plan.command_of(arm),
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
    run = run_record(slot, ended, observation, started=started)
    taints, taint_notes = find_taints(monitored, wall=observation.wall, was_unwatched=ended.was_unwatched)
    notes = [*run.notes, *(f"monitor: {note}" for note in monitored.notes), *taint_notes]
    if _has_saved(plan, slot):
        longer = ", and its wall is longer for it" if observation.wall.source == "process" else ""
        notes.append(f"the values behind its digests were kept{longer}")
    return replace(run, monitor=monitored.report, notes=tuple(notes), taints=taints), observation


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


def _rerun(
    plan: Plan,
    arm: Arm,
    run_dir: Path,
    variables: Mapping[str, str],
    *,
    interrupts: Interrupts,
    observer: Observer,
) -> RunStatus:
    """Run the command once more in an arm; nothing of it is timed, and much of it is slower."""
    if interrupts.first is not None:
        return "interrupted"
    ended = run_child(
        plan.command_of(arm),
        {**child_env(os.environ, arm, run_dir), **variables},
        interrupts=interrupts,
        timeout_s=None if plan.timeout_s is None else _UNTIMED_LIMIT * plan.timeout_s,
        stdin=plan.stdin,
        copy_output=plan.copy_output,
        on_start=lambda _: observer.started(),
    )
    return status_of(ended)


def child_env(base: Mapping[str, str], arm: Arm, run_dir: Path | None) -> dict[str, str]:
    """Return the environment of a run: the user's own, the arm's, and what starts the agent, where it has a directory.

    The directory that starts the agent comes first in PYTHONPATH. An unset or empty PYTHONPATH leaves no empty entry
    behind it, since that would put the working directory on the path.
    """
    # Whoever has a variable from elsewhere, or runs lucid under lucid, must not get a process that does more.
    base = {name: value for name, value in base.items() if name not in UNTIMED_VARIABLES}
    whole = {**base, **arm.env, "LUCID_PROFILE_ARM": arm.name}
    if run_dir is None:
        return whole
    startup = str(STARTUP_DIR)
    before = whole.get("PYTHONPATH", "")
    others = [entry for entry in before.split(os.pathsep) if entry != startup] if before else []
    return {**whole, "LUCID_RUN_DIR": str(run_dir), "PYTHONPATH": os.pathsep.join([startup, *others])}


def utc_now() -> str:
    """Return the time as RFC 3339 text in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
