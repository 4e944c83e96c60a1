"""Muon: the update of torch.optim.Muon, batched, for parameters of two dimensions or more.

Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html
"""

import math
from collections.abc import Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lucid_optim import foreach
from lucid_optim.buckets import orthogonalize_all
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


class MuonRule(Rule):
    """The update of torch.optim.Muon.

    With η = lr, β = momentum, λ = weight_decay and NS the Newton-Schulz iteration in bfloat16, for each parameter p
    with gradient g, viewed as (rows, cols) = (shape[0], rest):

        m ← βm + (1 − β)g,  n = (1 − β)g + βm (nesterov) or m
        p ← p − η(adjust(rows, cols) NS(n) + λp)
    """

    @property
    def hyperparameters(self) -> Mapping[str, Hyperparameter]:
        """The keys of a Muon param group."""
        return {
            "lr": Hyperparameter(check=non_negative, tensor=True),
            "weight_decay": Hyperparameter(check=non_negative, tensor=True),
            "momentum": Hyperparameter(check=non_negative, tensor=True),
            "nesterov": Hyperparameter(check=flag),
            "ns_coefficients": Hyperparameter(check=three_numbers),
            "eps": Hyperparameter(check=non_negative),
            "ns_steps": Hyperparameter(check=positive_int),
            "adjust_lr_fn": Hyperparameter(check=_adjustment),
        }

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

    def structure(self, group: Group) -> tuple[object, ...]:
        """Return what the iteration runs with, the flags, and whether weight decay is skipped."""
        no_decay = host_value(group["weight_decay"]) == 0
        return self._scheme(group), bool(group["nesterov"]), group["adjust_lr_fn"], no_decay

    def prepare(self, batch: Batch, group: Group, scalars: Scalars) -> list[Tensor]:
        """Advance the momentum and return one update a parameter.

        Args:
            batch: Parameters, gradients and `momentum_buffer`s; the buffers are written.
            group: Names the iteration, the flags and the adjustment.
            scalars: `momentum`, `complement`, `weight_decay`.

        Returns:
            Updates of the parameters' shapes, dtypes and strides; they alias no input.
        """
        mean = batch.state["momentum_buffer"]
        fresh = foreach.mul(batch.grads, scalars["complement"])
        foreach.mul_(mean, scalars["momentum"])
        foreach.add_(mean, fresh)
        if group["nesterov"]:
            mean = foreach.mul(mean, scalars["momentum"])
            foreach.add_(mean, fresh)
        updates = orthogonalize_all(mean, self._scheme(group))
        adjust = ADJUSTMENTS[group["adjust_lr_fn"]]
        foreach.scale_(updates, [adjust(len(p), p.numel() // len(p)) for p in batch.params])
        if host_value(group["weight_decay"]) != 0:
            foreach.add_(updates, foreach.mul(batch.params, scalars["weight_decay"]))
        return updates

    def _scheme(self, group: Group) -> NewtonSchulz:
        a, b, c = group["ns_coefficients"]
        return NewtonSchulz(
            steps=index(group["ns_steps"]),
            coefficients=(a, b, c),
            eps=group["eps"],
            norm="clamp_eps",
            dtype=torch.bfloat16,
        )


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
        capture_orthogonalization: Whether the orthogonalisation alone is.

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
        )
