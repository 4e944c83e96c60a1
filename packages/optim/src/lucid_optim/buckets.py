"""Which matrices are orthogonalised together, and the copies in and out of those batches.

All of them at once where the device has `grouped`'s kernels; elsewhere, and with any other scheme, in batches.
Matrices share a batch when they have the same shape up to transposition: the wide ones lie first, the tall ones follow
as transposes. Nothing is padded, so a batch does no work that its matrices would not do alone.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lucid_optim import grouped
from lucid_optim.layout import MemoryMatrix, memory_matrix

__all__ = ["Bucket", "in_buckets", "orthogonalize_all", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Matrices of one shape up to transposition.

    Attributes:
        short: Rows of every matrix in the batch.
        long: Columns of every matrix in the batch, at least `short`.
        wide: Positions of the matrices that memory holds as `(short, long)`.
        tall: Positions of those that memory holds as `(long, short)`.
    """

    short: int
    long: int
    wide: tuple[int, ...]
    tall: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def plan(shapes: tuple[tuple[int, int], ...]) -> tuple[Bucket, ...]:
    """Assign each `(rows, cols)` matrix to a bucket, buckets in the order of their first matrix."""
    members: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for position, (rows, cols) in enumerate(shapes):
        wide, tall = members.setdefault((min(rows, cols), max(rows, cols)), ([], []))
        (wide if rows <= cols else tall).append(position)
    return tuple(
        Bucket(short=short, long=long, wide=tuple(wide), tall=tuple(tall))
        for (short, long), (wide, tall) in members.items()
    )


def _matrix(update: Tensor, memory: MemoryMatrix | None) -> Tensor:
    """View the update as the matrix that memory holds, or copy it into logical order where there is none."""
    if memory is None:
        return update.reshape(update.shape[0], -1)
    return update.as_strided((memory.rows, memory.cols), (memory.cols, 1))


def _like(matrix: Tensor, update: Tensor, memory: MemoryMatrix | None) -> Tensor:
    """View a contiguous matrix with the shape and strides of the update that it came from, or copy it there."""
    if memory is None:
        return torch.empty_like(update).copy_(matrix.view(update.shape))
    return matrix.as_strided(update.shape, update.stride())


def _stack(matrices: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Copy a bucket's matrices into one `(batch, short, long)` tensor, wide ones first."""
    parts = []
    if bucket.wide:
        parts.append(torch.stack([matrices[position] for position in bucket.wide]))
    if bucket.tall:
        parts.append(torch.stack([matrices[position] for position in bucket.tall]).mT)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_buckets(matrices: Sequence[Tensor], scheme: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Orthogonalise each `(rows, cols)` matrix in a batch of its shape."""
    results = list(matrices)
    for bucket in plan(tuple((matrix.shape[0], matrix.shape[1]) for matrix in matrices)):
        batch = scheme(_stack(matrices, bucket)).to(matrices[0].dtype)
        wide, tall = batch[: len(bucket.wide)], batch[len(bucket.wide) :].mT.contiguous()
        for positions, part in ((bucket.wide, wide), (bucket.tall, tall)):
            for position, matrix in zip(positions, part.unbind(), strict=True):
                results[position] = matrix
    return results


def orthogonalize_all(updates: Sequence[Tensor], scheme: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Orthogonalise updates, all at once or in batches of equal shape.

    The number of kernels grows at most with the number of distinct shapes, not with the number of updates, as long as
    each update is dense with its first dimension outermost or innermost in memory (row-major, channels_last,
    transposed).

    Args:
        updates: Tensors of shape `(rows, ...)`, two dimensions or more, none empty, one device and dtype; read only.
        scheme: Orthogonalises a `(batch, short, long)` tensor, such as a `NewtonSchulz`.

    Returns:
        One tensor an update, of its shape, strides and dtype. Results share storage with one another, never with
        `updates`.

    Raises:
        ValueError: If `LUCID_GROUPED`, which 0 switches the kernels off with, is neither 0 nor 1.
    """
    memories = [memory_matrix(update.shape, update.stride()) for update in updates]
    matrices = [_matrix(update, memory) for update, memory in zip(updates, memories, strict=True)]
    if grouped.supports(scheme, matrices):
        results = grouped.orthogonalize(matrices, scheme, dtype=updates[0].dtype)
    else:
        results = in_buckets(matrices, scheme)
    return [_like(result, update, memory) for result, update, memory in zip(results, updates, memories, strict=True)]
