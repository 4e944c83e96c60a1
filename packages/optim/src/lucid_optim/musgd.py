"""MuSGD: a fixed mix of Muon's orthogonalised update and Nesterov SGD for matrices, Nesterov SGD for the rest.

Formulas, defaults and state keys are those published as `lucid-yolo`, https://pypi.org/project/lucid-yolo/.
"""

import math
from collections.abc import Mapping
from operator import index
from typing import ClassVar, NamedTuple

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lucid_optim import foreach
from lucid_optim.checks import host_value, non_negative, positive_int, unit_interval
from lucid_optim.newton_schulz import NewtonSchulz
from lucid_optim.optimizer import RuleOptimizer
from lucid_optim.rule import Batch, Group, Hyperparameter, Rule, Scalar, Scalars, live

__all__ = ["MuSGD", "MuSGDRule", "matching_rms"]

# Brings the root mean square of an orthogonal matrix's entries to that of a typical AdamW update.
# Source: Liu et al., Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982
RMS = 0.2


def matching_rms(rows: int, cols: int) -> float:
    """Return the factor `0.2 sqrt(max(rows, cols))` of an orthogonalised `(rows, cols)` matrix."""
    return RMS * math.sqrt(max(rows, cols))


class MuSGDStructure(NamedTuple):
    """What decides the operations of MuSGD.

    Attributes:
        scheme: The orthogonalisation.
        decays: Whether matrices are decayed at all.
    """

    scheme: NewtonSchulz
    decays: bool


class MuSGDRule(Rule):
    """The update of MuSGD.

    With η = lr, μ = momentum, λ = weight_decay and NS the Newton-Schulz iteration in float32, for each parameter p with
    gradient g:

        m ← μm + g,  n = g + μm
        u = w_muon (0.2 √max(rows, cols) NS(n)) + w_sgd n + λp     (two dimensions or more, as (shape[0], rest))
        u = n                                                      (one dimension or none)
        p ← p − ηu
    """

    hyperparameters: ClassVar[Mapping[str, Hyperparameter]] = {
        "lr": Hyperparameter(check=non_negative, tensor=True),
        "momentum": Hyperparameter(check=unit_interval, tensor=True),
        "weight_decay": Hyperparameter(check=non_negative, tensor=True),
        "w_muon": Hyperparameter(check=non_negative, tensor=True),
        "w_sgd": Hyperparameter(check=non_negative, tensor=True),
        "ns_steps": Hyperparameter(check=positive_int),
    }
    is_capturable: ClassVar[bool] = True

    def buffers(self, group: Group) -> tuple[str, ...]:  # noqa: ARG002 - the same for every group
        """Return the one buffer that MuSGD keeps."""
        return ("momentum_buffer",)

    def scalars(self, group: Group) -> dict[str, Scalar]:
        """Return the four values that enter by a multiplication of their own."""
        return {name: live(group[name]) for name in ("momentum", "weight_decay", "w_muon", "w_sgd")}

    def structure(self, group: Group) -> MuSGDStructure:
        """Return the orthogonalisation and whether weight decay is skipped."""
        return MuSGDStructure(
            scheme=NewtonSchulz(steps=index(group["ns_steps"])), decays=bool(host_value(group["weight_decay"]) != 0)
        )

    def prepare(self, batch: Batch, structure: MuSGDStructure, scalars: Scalars) -> list[Tensor]:
        """Advance the momentum and return one update a parameter.

        Args:
            batch: Parameters, gradients and `momentum_buffer`s; the buffers are written.
            structure: Of the batch's group.
            scalars: `momentum`, `weight_decay`, `w_muon`, `w_sgd`.

        Returns:
            Updates of the parameters' shapes, dtypes and strides; they alias no input.
        """
        momentum = batch.state["momentum_buffer"]
        foreach.mul_(momentum, scalars["momentum"])
        foreach.add_(momentum, batch.grads)
        updates = foreach.mul(momentum, scalars["momentum"])
        foreach.add_(updates, batch.grads)

        places = [place for place, param in enumerate(batch.params) if param.ndim >= 2]
        if not places:
            return updates
        matrices = [batch.params[place] for place in places]
        nesterov = [updates[place] for place in places]
        mixed = batch.orthogonalize(nesterov, structure.scheme)
        foreach.scale_(mixed, [matching_rms(p.shape[0], p.numel() // p.shape[0]) for p in matrices])
        foreach.mul_(mixed, scalars["w_muon"])
        foreach.mul_(nesterov, scalars["w_sgd"])
        foreach.add_(mixed, nesterov)
        if structure.decays:
            foreach.add_(mixed, foreach.mul(matrices, scalars["weight_decay"]))
        for place, update in zip(places, mixed, strict=True):
            updates[place] = update
        return updates


class MuSGD(RuleOptimizer):
    """Muon and Nesterov SGD mixed, for convolutional networks; see `MuSGDRule` for the formulas.

    Every parameter with two dimensions or more is orthogonalised as a matrix `(shape[0], rest)`. It takes the place of
    `lucid_yolo.optim.MuSGD`: same arguments, defaults and state, results equal to float32 rounding.

    Args:
        params: Parameters, named parameters or group dicts.
        lr: Learning rate, a number or a one-element tensor, which is never written.
        momentum: In [0, 1).
        weight_decay: Added to the update of matrices; vectors and scalars are never decayed. 0 of either sign skips it.
        w_muon: Weight of the orthogonalised update.
        w_sgd: Weight of the Nesterov update of matrices.
        ns_steps: Newton-Schulz iterations, a positive int.
        capture_updates: Whether the preparation of updates is recorded in CUDA graphs and replayed; None reads
            LUCID_CAPTURE_UPDATES (0 or 1). `capture_report` says what came of it.
        capture_orthogonalization: Whether the orthogonalisation alone is, wherever preparation runs natively.
        strict: Whether a step that would fall back to the native path raises `CaptureError` instead.
        capture_branches: How many groups a recording prepares side by side, 1 to 8: more takes less time and more
            memory.

    Raises:
        ValueError: If a value is negative, not finite or out of range, or a parameter is complex or sparse.
        TypeError: If a value has the wrong type.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.eye(2))
        >>> optimizer = MuSGD([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> bool(weight[0, 0] < 1)
        True
    """

    rule = MuSGDRule()

    def __init__(  # noqa: PLR0913 - the published signature
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float | Tensor = 0.95,
        weight_decay: float | Tensor = 5e-4,
        w_muon: float | Tensor = 0.5,
        w_sgd: float | Tensor = 0.5,
        ns_steps: int = 5,
        *,
        capture_updates: bool | None = None,
        capture_orthogonalization: bool = False,
        strict: bool = False,
        capture_branches: int = 4,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "w_muon": w_muon,
                "w_sgd": w_sgd,
                "ns_steps": ns_steps,
            },
            capture_updates=capture_updates,
            capture_orthogonalization=capture_orthogonalization,
            strict=strict,
            capture_branches=capture_branches,
        )
