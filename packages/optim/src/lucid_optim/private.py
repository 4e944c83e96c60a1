"""Everything of torch's that is used here and has no public name, each with what happens where it is missing."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

__all__ = ["abandon_pool", "are_at", "bump_versions", "has_dispatch_mode", "tensor_guards"]


def tensor_guards(tensors: Sequence[Tensor]) -> Any:
    """Return torch.compile's own comparison of tensors with later ones, or None where this torch has it not.

    It looks at more than layouts (dispatch keys, strides of size-1 dimensions), so it may say no where nothing of
    interest has changed, never yes where something has.
    """
    guards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
    if guards is None or not tensors:
        return None
    try:
        return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (TypeError, RuntimeError, AssertionError):
        return None


_compare_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def are_at(tensors: list[Tensor], addresses: list[int], places: list[int]) -> bool:
    """Tell whether every tensor begins at its address; CUDA builds of torch have this in one call.

    Args:
        tensors: With storage.
        addresses: As many.
        places: `[0, 1, ...]`, as many.
    """
    if _compare_addresses is not None:
        return bool(_compare_addresses(tensors, addresses, places))
    return list(map(Tensor.data_ptr, tensors)) == addresses


def bump_versions(tensors: list[Tensor]) -> None:
    """Tell autograd that tensors were written by a kernel that it does not know; older torch takes one at a time."""
    try:
        increment_version(tensors)
    except (TypeError, RuntimeError):
        for tensor in tensors:
            increment_version(tensor)


def has_dispatch_mode() -> bool:
    """Tell whether somebody's TorchDispatchMode sees every operation; False where torch does not say."""
    count = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return bool(count()) if count is not None else False


def abandon_pool(index: int, pool: Any) -> None:
    """Make the allocator end a capture into a pool whose end raised, and let go of the pool.

    A torch that has done so itself refuses, which is what is wanted.
    """
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):
        end = getattr(torch._C, name, None)
        if end is not None:
            with contextlib.suppress(RuntimeError):
                end(index, pool)
            break
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_releasePool(index, pool)
