"""The write that ends a phase, shared by the native step and by replays."""

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lucid_optim.rule import Scalar

__all__ = ["Update", "write", "write_together"]


class Update(NamedTuple):
    """One write, `params <- params + factor * updates`, pairwise.

    Attributes:
        params: Parameters to write.
        updates: One tensor a parameter, of its shape; read only.
        factor: A number, or a one-element tensor.
    """

    params: list[Tensor]
    updates: list[Tensor]
    factor: Scalar


def write(update: Update) -> None:
    """Write one update; a factor that is 0 in float32 leaves every byte as it is.

    A factor on the host enters as `alpha`; one on the parameters' device by a multiplication of its own, so that
    nothing is read back.
    """
    params, updates, factor = update
    if isinstance(factor, Tensor) and factor.is_cuda and all(param.device == factor.device for param in params):
        torch._foreach_add_(params, torch._foreach_mul(updates, factor.reshape(())))
        return
    value = float(factor)
    if ctypes.c_float(value).value != 0:
        torch._foreach_add_(params, updates, alpha=value)


def write_together(updates: Iterable[Update]) -> None:
    """Write updates that share no memory; those with one host factor in as few launches as possible, same bytes."""
    lists: dict[float, Update] = {}
    for update in updates:
        if isinstance(update.factor, Tensor):
            write(update)
            continue
        factor = float(update.factor)
        together = lists.setdefault(factor, Update([], [], factor))
        together.params.extend(update.params)
        together.updates.extend(update.updates)
    for together in lists.values():
        write(together)
