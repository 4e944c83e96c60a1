"""How a tensor lies in memory: density, matched strides, the matrix that memory already holds.

A multi-tensor kernel stays on its fast path only while the tensors it pairs have equal strides, so updates are made
with the strides of their parameter. Strides of dimensions of size 1 say nothing about memory and are ignored.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["MemoryMatrix", "is_dense", "matched", "memory_matrix", "same_layout"]


class MemoryMatrix(NamedTuple):
    """A row-major matrix that a dense tensor of shape `(shape[0], ...)` already is in memory.

    Attributes:
        rows: Outer extent in memory.
        cols: Inner extent in memory.
        transposed: Whether memory holds the transpose of the logical `(shape[0], rest)` matrix.
    """

    rows: int
    cols: int
    transposed: bool


@functools.lru_cache(maxsize=8192)
def _memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the dimensions larger than 1 from slowest to fastest, or None where memory has gaps or overlaps."""
    order = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: stride[dim], reverse=True)
    expected = 1
    for dim in reversed(order):
        if stride[dim] != expected:
            return None
        expected *= shape[dim]
    return tuple(order)


def is_dense(tensor: Tensor) -> bool:
    """Tell whether the elements fill one block of memory without gaps or overlaps."""
    return tensor.numel() == 0 or _memory_order(tensor.shape, tensor.stride()) is not None


@functools.lru_cache(maxsize=8192)
def _same_strides(shape: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    return all(size <= 1 or a == b for size, a, b in zip(shape, first, second, strict=True))


def same_layout(tensor: Tensor, like: Tensor) -> bool:
    """Tell whether two tensors of one shape have equal strides in every dimension larger than 1."""
    first, second = tensor.stride(), like.stride()
    return first == second or _same_strides(tensor.shape, first, second)


def matched(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor` with the dtype and the strides of the dense tensor `like`, values unchanged.

    The result is `tensor` itself, a view of it (only strides of size-1 dimensions differ), or a copy. `tensor` is never
    written; the caller must not write the result.
    """
    if tensor.dtype != like.dtype:
        tensor = tensor.to(like.dtype)
    if tensor.stride() == like.stride():
        return tensor
    if same_layout(tensor, like):
        return tensor.as_strided(like.shape, like.stride())
    return torch.empty_like(like).copy_(tensor)


@functools.lru_cache(maxsize=8192)
def memory_matrix(shape: tuple[int, ...], stride: tuple[int, ...]) -> MemoryMatrix | None:
    """Return the matrix that memory holds for a tensor viewed as `(shape[0], rest)`, or None where it takes a copy.

    The columns may be permuted against the logical order (channels_last): orthogonalisation commutes with any
    permutation of columns, since `X @ X.T` does not change.

    Args:
        shape: Shape with at least two dimensions and no zero.
        stride: Strides in elements.
    """
    order = _memory_order(shape, stride)
    if order is None:
        return None
    rows = shape[0]
    cols = 1
    for size in shape[1:]:
        cols *= size
    if rows == 1 or cols == 1 or order[0] == 0:
        return MemoryMatrix(rows, cols, transposed=False)
    if order[-1] == 0:
        return MemoryMatrix(cols, rows, transposed=True)
    return None
