"""torch's multi-tensor kernels, under public names and with one promise: a scalar is never rounded to half precision.

On a CPU the multi-tensor multiplication rounds its scalar to the tensors' dtype, which turns a momentum of 0.99 into
0.98828 for bfloat16; everywhere else it multiplies in float32. There the tensors are multiplied one by one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lucid_optim.rule import Scalar

__all__ = ["add_", "mul", "mul_", "scale_"]

_HALF = (torch.float16, torch.bfloat16)


def _rounds_scalars(tensors: Sequence[Tensor]) -> bool:
    # A batch lies on one device.
    return bool(tensors) and tensors[0].device.type == "cpu" and any(tensor.dtype in _HALF for tensor in tensors)


def mul(tensors: list[Tensor], factor: Scalar) -> list[Tensor]:
    """Return each tensor times one number; the results have the tensors' strides and alias nothing."""
    if _rounds_scalars(tensors):
        return [tensor * factor for tensor in tensors]
    return list(torch._foreach_mul(tensors, factor))


def mul_(tensors: list[Tensor], factor: Scalar) -> None:
    """Multiply each tensor by one number, in place."""
    if _rounds_scalars(tensors):
        for tensor in tensors:
            tensor.mul_(factor)
    else:
        torch._foreach_mul_(tensors, factor)


def scale_(tensors: list[Tensor], factors: Sequence[float]) -> None:
    """Multiply each tensor by a number of its own, in place."""
    if _rounds_scalars(tensors):
        for tensor, factor in zip(tensors, factors, strict=True):
            tensor.mul_(factor)
    else:
        torch._foreach_mul_(tensors, list(factors))


def add_(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Add tensors pairwise, in place; a scalar never enters here."""
    torch._foreach_add_(tensors, others)
