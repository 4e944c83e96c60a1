"""The runs beside the measured ones, never timed: those that count kernels, and those that look for a difference."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from lucid_cli.plan import Observer, Plan, Purpose, Status
from lucid_cli.recorder import Recorder
from lucid_cli.relocate import Rerun, relocate
from lucid_profiler.collect_kernels import read_kernels
from lucid_profiler.compare import analyze_all
from lucid_profiler.kernel_trace import STEPS_VARIABLE
from lucid_profiler.reader import Report
from lucid_profiler.records import Arm, Kernels, Located, RunStatus

UNTIMED_VARIABLES = frozenset(
    {STEPS_VARIABLE, "LUCID_SAVE_STATE", "LUCID_SAVE_NAME", "LUCID_SAVE_STEP", "LUCID_STEP_DIGESTS"}
)
"""Each has a process do what no timed one may."""

__all__ = ["UNTIMED_VARIABLES", "run_untimed"]


def run_untimed(plan: Plan, recorder: Recorder, status: Status, *, rerun: Rerun, observer: Observer) -> None:
    """Run what the plan asks for beside the measured runs and what the report lacks; a failure there costs no report.

    Args:
        plan: what to run.
        recorder: the report so far.
        status: how the measured runs went; unless all of them took place, nothing more is run. What an interrupted
            report lacks is left to the one that takes it up.
        rerun: runs the command once.
        observer: is told about each run.

    Raises:
        OSError: the report cannot be written.
    """
    report = recorder.report()
    if plan.num_kernel_steps and status != "interrupted":
        counted = {kernels.arm for kernels in report.kernels}
        for arm in (arm for arm in plan.arms if not arm.control and arm.name not in counted):
            told = _telling(rerun, "kernels", observer)
            kernels = _traced(plan, arm, told) if status == "complete" else _untraced(arm, "run_failed")
            recorder.add(kernels)
            observer.traced(arm, kernels)
    if plan.locate and status == "complete":
        for arms in _to_locate(plan, report):
            recorder.add(_located(arms, _telling(rerun, "locate", observer)))


def _telling(rerun: Rerun, purpose: Purpose, observer: Observer) -> Rerun:
    def told(arm: Arm, run_dir: Path, variables: Mapping[str, str]) -> RunStatus:
        observer.rerun(arm, purpose)
        return rerun(arm, run_dir, variables)

    return told


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


def _to_locate(plan: Plan, report: Report) -> Iterator[tuple[Arm, Arm]]:
    """Yield the base with each arm whose states differ from its and should not."""
    found = {located.arms for located in report.located}
    arms = {arm.name: arm for arm in plan.arms}
    for analysis in analyze_all(report):
        base, other = arms[analysis.base], arms[analysis.other]
        is_asked = not (other.control or other.different)
        if is_asked and analysis.parity.status == "different" and (base.name, other.name) not in found:
            yield base, other


def _located(arms: tuple[Arm, Arm], rerun: Rerun) -> Located:
    try:
        return relocate(arms, rerun)
    except OSError as error:
        text = f"no directory can be made for more runs: {error.strerror}"
        return Located(arms=(arms[0].name, arms[1].name), text=text)
