"""Two more pairs of runs, never timed, that find where the arms of an experiment begin to differ."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lucid_profiler.errors import ReportError
from lucid_profiler.locate import ElementDifference, StepDifference, locate_element, locate_step
from lucid_profiler.records import Arm, Located, RunStatus

__all__ = ["Rerun", "relocate"]

Rerun = Callable[[Arm, Path, Mapping[str, str]], RunStatus]
"""Runs the command once in an arm, with a directory for its agent and more variables; tells how it ended."""

_ENDINGS: Mapping[RunStatus, str] = {
    "failed": "failed",
    "timeout": "ran into its time limit",
    "interrupted": "was interrupted",
    "not_started": "was not started",
}


def relocate(arms: Sequence[Arm], rerun: Rerun) -> Located:
    """Run both arms again with digests of every step, then once more to keep the values of the first that differs.

    Args:
        arms: the two that are compared, the base first.
        rerun: runs the command.

    Raises:
        OSError: no directory can be made.
    """
    names = (arms[0].name, arms[1].name)
    with tempfile.TemporaryDirectory(prefix="lucid-", ignore_cleanup_errors=True) as folder:
        run_dirs = [_new(Path(folder), f"digests{place}") for place in range(2)]
        for arm, run_dir in zip(arms, run_dirs, strict=True):
            status = rerun(arm, run_dir, {"LUCID_STEP_DIGESTS": "1"})
            if status != "ok":
                text = f"not known: the {arm.name} run with digests of every step {_ENDINGS[status]}"
                return Located(arms=names, text=text)
        try:
            found = locate_step(*run_dirs)
        except (OSError, ReportError) as error:
            return Located(arms=names, text=f"the digests of the steps cannot be read: {error}")
        difference = found.difference
        if difference is None:
            return Located(arms=names, num_equal_steps=found.num_steps, text=_agreement(found.num_steps))
        element, why = _element(arms, rerun, difference, Path(folder))
    return Located(
        arms=names,
        num_equal_steps=found.num_steps,
        step=difference.step,
        when=difference.when,
        part=difference.part,
        tensor=element.tensor if element else difference.tensor,
        index=element.index if element else None,
        values=element.values if element else None,
        bits=element.bits if element else None,
        ulps=element.ulps if element else None,
        text="; ".join(filter(None, [difference.text, element.text if element else why])),
    )


def _element(
    arms: Sequence[Arm], rerun: Rerun, difference: StepDifference, folder: Path
) -> tuple[ElementDifference | None, str]:
    """Return the first element that differs at that step, or None and why none is known."""
    if difference.part is None:
        return None, ""
    saved = folder / "saved"
    for arm in arms:
        run_dir = _new(folder, f"saving-{len(os.listdir(folder))}")  # noqa: PTH208 - only how many
        variables = {
            "LUCID_SAVE_STATE": str(saved),
            "LUCID_SAVE_NAME": arm.name,
            "LUCID_SAVE_STEP": str(difference.step),
        }
        status = rerun(arm, run_dir, variables)
        if status != "ok":
            return None, f"the {arm.name} run that was to keep the values of that step {_ENDINGS[status]}"
    try:
        element = locate_element(saved / arms[0].name, saved / arms[1].name, difference)
    except (OSError, ReportError) as error:
        return None, f"the values of that step cannot be read: {error}"
    return element, "" if element else "in two more runs the values of that step agree: the difference does not repeat"


def _agreement(num_steps: int) -> str:
    if not num_steps:
        return "no optimizer step was seen in the runs with digests of every step"
    return (
        f"two more runs agree in all {num_steps} steps: the difference does not repeat, or arises outside of the steps"
    )


def _new(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir(mode=0o700)
    return path
