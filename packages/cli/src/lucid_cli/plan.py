"""What an experiment will run, and what is told while it does; pure."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, Protocol

from lucid_cli.sampling import Sampling
from lucid_profiler.context import Measured
from lucid_profiler.records import Arm, Kernels, Run, Slot

_PLACE = re.compile(r"\{\{arm\}\}|\{arm\}")

__all__ = ["Observer", "Plan", "Purpose", "Status", "fill_places"]

Status = Literal["complete", "interrupted", "failed"]
Purpose = Literal["kernels", "locate"]
"""What a run is for that is never timed: to count kernels, or to look for the first difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be run, and how.

    Attributes:
        command: program and arguments as typed.
        arms: the arms, the base first.
        slots: the runs in their order.
        has_places: whether `{arm}` in the command stands for the name of the arm.
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
        cool_down_s: pause between two runs.
        require_idle: whether a run waits until nobody else works on the machine.
    """

    command: tuple[str, ...]
    arms: tuple[Arm, ...]
    slots: tuple[Slot, ...]
    has_places: bool = False
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
    cool_down_s: float = 0.0
    require_idle: bool = False

    def played(self, name: str) -> Arm:
        """Return the arm whose name and variables a run of this arm gets: a control is the base once more."""
        arm = next(arm for arm in self.arms if arm.name == name)
        return self.arms[0] if arm.control else arm

    def command_of(self, arm: Arm) -> tuple[str, ...]:
        """Return what is run in an arm."""
        return fill_places(self.command, arm.name) if self.has_places else self.command


def fill_places(command: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the command with `{arm}` replaced by the name, and `{{arm}}` by `{arm}`."""
    return tuple(_PLACE.sub(lambda found: "{arm}" if found[0] == "{{arm}}" else name, word) for word in command)


class Observer(Protocol):
    """Is told about every run."""

    def began(self, slot: Slot, run_dir: Path) -> None:
        """Take note of a run that is about to start; its agents write in the directory."""

    def started(self) -> None:
        """Take note that the process of a run is there; until then lucid should have no other thread."""

    def ended(self, slot: Slot, run: Run) -> None:
        """Take note of a run that has ended."""

    def waiting(self, text: str) -> None:
        """Take note of a pause before the next run."""

    def traced(self, arm: Arm, kernels: Kernels) -> None:
        """Take note of a traced process."""

    def rerun(self, arm: Arm, purpose: Purpose) -> None:
        """Take note of a run that begins and is not timed."""
