"""Muon: the update of torch.optim.Muon, batched, for parameters of two dimensions or more.

Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html
"""

import math
from collections.abc import Mapping
from operator import index
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lucid_optim import foreach
from lucid_optim.checks import flag, host_value, non_negative, positive_int, three_numbers
from lucid_optim.musgd import matching_rms
from lucid_optim.newton_schulz import QUINTIC, NewtonSchulz
from lucid_optim.optimizer import RuleOptimizer
from lucid_optim.rule import Batch, Group, Hyperparameter, Rule, Scalar, Scalars, live

__all__ = ["Muon", "MuonRule"]


def _original(rows: int, cols: int) -> float:
    return math.sqrt(max(1, rows / cols))


# Factor of an orthogonalised (rows, cols) matrix under each `adjust_lr_fn`.
ADJUSTMENTS = {None: _original, "original": _original, "match_rms_adamw": matching_rms}


def _adjustment(value: Any) -> str | None:
    names = " or ".join(map(repr, ADJUSTMENTS))
    return None if value is None or (isinstance(value, str) and value in ADJUSTMENTS) else f"must be {names}"


class MuonStructure(NamedTuple):
    """What decides the operations of Muon.

    Attributes:
        scheme: The orthogonalisation.
        nesterov: Whether the update looks ahead.
        adjust_lr_fn: A key of `ADJUSTMENTS`.
        decays: Whether parameters are decayed at all.
    """

    scheme: NewtonSchulz
    nesterov: bool
    adjust_lr_fn: str | None
    decays: bool


class MuonRule(Rule):
    """The update of torch.optim.Muon.

    With η = lr, β = momentum, λ = weight_decay and NS the Newton-Schulz iteration in bfloat16, for each parameter p
    with gradient g, viewed as (rows, cols) = (shape[0], rest):

        m ← βm + (1 − β)g,  n = (1 − β)g + βm (nesterov) or m
        p ← p − η(adjust(rows, cols) NS(n) + λp)
    """

    hyperparameters: ClassVar[Mapping[str, Hyperparameter]] = {
        "lr": Hyperparameter(check=non_negative, tensor=True),
        "weight_decay": Hyperparameter(check=non_negative, tensor=True),
        "momentum": Hyperparameter(check=non_negative, tensor=True),
        "nesterov": Hyperparameter(check=flag),
        "ns_coefficients": Hyperparameter(check=three_numbers),
        "eps": Hyperparameter(check=non_negative),
        "ns_steps": Hyperparameter(check=positive_int),
        "adjust_lr_fn": Hyperparameter(check=_adjustment),
    }
    is_capturable: ClassVar[bool] = True

    def refuses(self, parameter: Tensor, group: Group) -> str | None:  # noqa: ARG002 - the same for every group
        """Refuse vectors and scalars, which another optimizer has to take."""
        return "has fewer than two dimensions; give it to another optimizer" if parameter.ndim < 2 else None

    def buffers(self, group: Group) -> tuple[str, ...]:  # noqa: ARG002 - the same for every group
        """Return the one buffer that Muon keeps."""
        return ("momentum_buffer",)

    def scalars(self, group: Group) -> dict[str, Scalar]:
        """Return momentum, its complement and the decay."""
        momentum = live(group["momentum"])
        return {"momentum": momentum, "complement": 1 - momentum, "weight_decay": live(group["weight_decay"])}

    def structure(self, group: Group) -> MuonStructure:
        """Return what the iteration runs with, the flags, and whether weight decay is skipped."""
        a, b, c = map(float, group["ns_coefficients"])
        scheme = NewtonSchulz(
            steps=index(group["ns_steps"]),
            coefficients=(a, b, c),
            eps=float(group["eps"]),
            norm="clamp_eps",
            dtype=torch.bfloat16,
        )
        return MuonStructure(
            scheme=scheme,
            nesterov=bool(group["nesterov"]),
            adjust_lr_fn=group["adjust_lr_fn"],
            decays=bool(host_value(group["weight_decay"]) != 0),
        )

    def prepare(self, batch: Batch, structure: MuonStructure, scalars: Scalars) -> list[Tensor]:
        """Advance the momentum and return one update a parameter.

        Args:
            batch: Parameters, gradients and `momentum_buffer`s; the buffers are written.
            structure: Of the batch's group.
            scalars: `momentum`, `complement`, `weight_decay`.

        Returns:
            Updates of the parameters' shapes, dtypes and strides; they alias no input.
        """
        mean = batch.state["momentum_buffer"]
        fresh = foreach.mul(batch.grads, scalars["complement"])
        foreach.mul_(mean, scalars["momentum"])
        foreach.add_(mean, fresh)
        if structure.nesterov:
            mean = foreach.mul(mean, scalars["momentum"])
            foreach.add_(mean, fresh)
        updates = batch.orthogonalize(mean, structure.scheme)
        adjust = ADJUSTMENTS[structure.adjust_lr_fn]
        foreach.scale_(updates, [adjust(p.shape[0], p.numel() // p.shape[0]) for p in batch.params])
        if structure.decays:
            foreach.add_(updates, foreach.mul(batch.params, scalars["weight_decay"]))
        return updates


class Muon(RuleOptimizer):
    """Muon with torch.optim.Muon's arguments and, within the rounding of its bfloat16 iteration, its results.

    Unlike there, a parameter may have more than two dimensions: it is a matrix `(shape[0], rest)`.

    Args:
        params: Parameters, named parameters or group dicts; each with two dimensions or more.
        lr: Learning rate, a number or a one-element tensor, which is never written.
        weight_decay: Decoupled from the gradient, scaled by `lr`. 0 of either sign skips it.
        momentum: Weight of the past in the running mean of gradients.
        nesterov: Whether the update looks ahead.
        ns_coefficients: `(a, b, c)` of the Newton-Schulz iteration.
        eps: Least Frobenius norm that is divided by.
        ns_steps: Newton-Schulz iterations, a positive int.
        adjust_lr_fn: `original` (also None) scales by `sqrt(max(1, rows / cols))`, `match_rms_adamw` by
            `0.2 sqrt(max(rows, cols))`.
        capture_updates: Whether the preparation of updates is recorded in CUDA graphs and replayed; None reads
            LUCID_CAPTURE_UPDATES (0 or 1). `capture_report` says what came of it.
        capture_orthogonalization: Whether the orthogonalisation alone is, wherever preparation runs natively.
        strict: Whether a step that would fall back to the native path raises `CaptureError` instead.
        capture_branches: How many groups a recording prepares side by side, 1 to 8: more takes less time and more
            memory.

    Raises:
        ValueError: If a value is negative, not finite or out of range, or a parameter cannot be updated.
        TypeError: If a value has the wrong type.
    """

    rule = MuonRule()

    def __init__(  # noqa: PLR0913, PLR0917 - torch.optim.Muon's signature
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        momentum: float | Tensor = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
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
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
            },
            capture_updates=capture_updates,
            capture_orthogonalization=capture_orthogonalization,
            strict=strict,
            capture_branches=capture_branches,
        )
