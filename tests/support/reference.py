"""Independent references: one parameter at a time, float64, written from the published formulas."""

import math
import pickle
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def pickled(value: Any) -> Any:
    """Return what comes back from pickling a value, as it goes to another process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.4 and 2.5 unpickle tensors through torch.load
        return pickle.loads(pickle.dumps(value))


def bits(tensor: Tensor) -> bytes:
    """Return a tensor's values as row-major bytes, so that -0.0 differs from 0.0 and a NaN equals itself."""
    if tensor.numel() == 0:
        return b""
    row_major = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    row_major.view(tensor.shape).copy_(tensor.detach())
    return row_major.view(torch.uint8).numpy().tobytes()


def orthogonalized(matrix: Tensor, steps: int, *, clamp: bool = False) -> Tensor:
    """Return the quintic Newton-Schulz iterate of a float64 `(rows, cols)` matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    norm = math.sqrt(float((wide * wide).sum()))
    x = wide / (max(norm, 1e-7) if clamp else norm + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


@dataclass
class MuSGDReference:
    """MuSGD of one parameter in float64."""

    value: Tensor
    momentum_buffer: Tensor = field(init=False)
    travelled: float = 0.0
    """Sum of the lengths of all steps, which do not cancel as their vectors may."""

    def __post_init__(self) -> None:
        self.value = self.value.detach().double().contiguous().clone()
        self.momentum_buffer = torch.zeros_like(self.value)

    def step(
        self,
        gradient: Tensor | None,
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 5e-4,
        w_muon: float = 0.5,
        w_sgd: float = 0.5,
        ns_steps: int = 5,
    ) -> None:
        """Advance by one step; no gradient, no change."""
        if gradient is None or self.value.numel() == 0:
            return
        g = gradient.detach().double()
        self.momentum_buffer = momentum * self.momentum_buffer + g
        nesterov = g + momentum * self.momentum_buffer
        if self.value.ndim < 2:
            self.value = self.value - lr * nesterov
            self.travelled += lr * float(nesterov.norm())
            return
        matrix = nesterov.reshape(nesterov.shape[0], -1)
        muon = 0.2 * math.sqrt(max(matrix.shape)) * orthogonalized(matrix, ns_steps)
        update = w_muon * muon.reshape(self.value.shape) + w_sgd * nesterov + weight_decay * self.value
        self.value = self.value - lr * update
        self.travelled += lr * float(update.norm())


def relative_error(actual: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Return the distance of two tensors over the norm of `scale`, 0 where they are equal."""
    distance = float((actual.detach().double() - expected).norm())
    return 0.0 if distance == 0 else distance / max(float(scale.norm()), 1e-30)
