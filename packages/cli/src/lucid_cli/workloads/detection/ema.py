"""A moving average of a model's weights, updated with two multi-tensor kernels a step."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Ema"]


class Ema:
    """The exponential moving average of a model.

    The decay grows with the number of updates, `decay * (1 - exp(-n / tau))`, so that the first steps are forgotten.

    Args:
        model: The live model; it is copied, never written.
        decay: Weight of the past after many updates, in [0, 1).
        tau: Number of updates over which the decay grows.
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.9999, tau: float = 2000.0) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self.tau = tau
        self.num_updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move every floating tensor towards the model's; take counters and other integers as they are."""
        self.num_updates += 1
        decay = self.decay * (1 - math.exp(-self.num_updates / self.tau))
        averages: list[Tensor] = []
        values: list[Tensor] = []
        for average, value in zip(self.model.state_dict().values(), model.state_dict().values(), strict=True):
            if average.is_floating_point():
                averages.append(average)
                values.append(value)
            else:
                average.copy_(value)
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, values, alpha=1 - decay)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged tensors and the number of updates."""
        return {"model": self.model.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.num_updates = int(state["num_updates"])
