"""Learning rate and momentum as YOLO trainers move them: both warm up, then the learning rate decays.

Over the warm-up the learning rate of matrices rises from 0 and that of vectors (biases and norms) falls from
`warmup_bias_lr`, both to the decayed value; momentum rises from `warmup_momentum`. Everything is a function of the step
alone, so that a resumed run needs no state but the step.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.optim import Optimizer

__all__ = ["Role", "Schedule", "StepValues"]

Role = Literal["matrices", "vectors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """What a param group holds during one step."""

    lr: float
    momentum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Settings of the warm-up and the decay.

    Attributes:
        lr: Learning rate that the warm-up ends at.
        final: Share of `lr` that is left after the last step.
        momentum: Momentum after the warm-up.
        warmup_momentum: Momentum of the first step.
        warmup_bias_lr: Learning rate of vectors in the first step.
        warmup_steps: Length of the warm-up in optimizer steps; 0 for none.
        total_steps: Length of the run in optimizer steps.
    """

    lr: float
    final: float
    momentum: float
    warmup_momentum: float
    warmup_bias_lr: float
    warmup_steps: int
    total_steps: int

    def decayed_lr(self, step: int) -> float:
        """Return the learning rate of a step without warm-up: half a cosine from `lr` to `lr * final`."""
        progress = min(step / max(self.total_steps - 1, 1), 1.0)
        share = self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
        return self.lr * share

    def at(self, step: int, role: Role) -> StepValues:
        """Return the values of a step, counted from 0."""
        lr = self.decayed_lr(step)
        if step >= self.warmup_steps:
            return StepValues(lr=lr, momentum=self.momentum)
        progress = step / self.warmup_steps
        start = self.warmup_bias_lr if role == "vectors" else 0.0
        momentum = self.warmup_momentum + progress * (self.momentum - self.warmup_momentum)
        return StepValues(lr=start + progress * (lr - start), momentum=momentum)

    def apply(self, optimizer: Optimizer, step: int) -> None:
        """Write the values of a step into the optimizer's groups, whose `role` says what they hold."""
        for group in optimizer.param_groups:
            values = self.at(step, group["role"])
            group["lr"], group["momentum"] = values.lr, values.momentum

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return settings and step as plain numbers."""
        return {**asdict(self), "step": step}
