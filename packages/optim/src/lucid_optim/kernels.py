"""Triton kernels that each run one stage of the Newton-Schulz iteration on many matrices of any shapes at once.

A program works on one tile of one matrix and finds it in a table; `grouped` makes the tables and the launches. Nothing
is summed across programs and every sum has a fixed order, so a matrix's bytes do not depend on what else is launched.
Needs triton, which torch's CUDA builds bring; nothing imports this module before a device is to run it.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

__all__ = ["add_scaled", "apply", "copy", "gram", "normalize", "polynomial", "sum_squares"]

_jit: Callable[[Callable[..., None]], Any] = triton.jit

# A table's row: offset of X / 16, offset of A / 16, short, long, tile row, tile column, tall, first partial sum.
# Rows of X have room for the next multiple of 8 after `long` elements, rows of A and B for that after `short`, so that
# every row starts at a multiple of 16 bytes. The room holds zeros, and is read: a mask that ends at a multiple of 8
# keeps wide loads.


@_jit
def sum_squares(source: tl.tensor, tiles: tl.tensor, partials: tl.tensor, CHUNK: tl.constexpr) -> None:
    """Store the sum of squares of one chunk of a matrix: `source` as the inputs lie, `partials` float32."""
    tile = tiles + tl.program_id(0) * 8
    first = source + tl.load(tile).to(tl.int64) * 16
    count = tl.load(tile + 2) * tl.load(tile + 3)
    chunk = tl.load(tile + 4)
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(first + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    tl.store(partials + tl.load(tile + 7) + chunk, tl.sum(values * values, axis=0))


@_jit
def normalize(  # noqa: PLR0913, PLR0917
    source: tl.tensor,
    tiles: tl.tensor,
    partials: tl.tensor,
    target: tl.tensor,
    added: tl.tensor,
    least: tl.tensor,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Write X = matrix / max(norm + added, least), wide and row-major; rounds where torch would in target's dtype."""
    tile = tiles + tl.program_id(0) * 8
    start = tl.load(tile).to(tl.int64) * 16
    short = tl.load(tile + 2)
    long = tl.load(tile + 3)
    rows = tl.load(tile + 4) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.load(tile + 5) * BLOCK_N + tl.arange(0, BLOCK_N)
    tall = tl.load(tile + 6)
    sums = partials + tl.load(tile + 7)
    stride = tl.cdiv(long, 8) * 8

    num_sums = tl.cdiv(short * long, CHUNK)
    places = tl.arange(0, 128)
    lanes = tl.zeros((128,), dtype=tl.float32)
    for begin in range(0, num_sums, 128):
        lanes += tl.load(sums + begin + places, mask=places < num_sums - begin, other=0.0)
    divisor = tl.sqrt_rn(tl.sum(lanes, axis=0)).to(target.dtype.element_ty).to(tl.float32) + added
    divisor = tl.where(divisor < least, least, divisor).to(target.dtype.element_ty).to(tl.float32)

    if tall != 0:
        across = (cols[:, None] < long) & (rows[None, :] < short)
        values = tl.trans(tl.load(source + start + cols[:, None] * short + rows[None, :], mask=across, other=0.0))
    else:
        inside = (rows[:, None] < short) & (cols[None, :] < long)
        values = tl.load(source + start + rows[:, None] * long + cols[None, :], mask=inside, other=0.0)
    X = tl.div_rn(values.to(tl.float32), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32) + divisor)
    room = (rows[:, None] < short) & (cols[None, :] < stride)
    tl.store(target + start + rows[:, None] * stride + cols[None, :], X.to(target.dtype.element_ty), mask=room)


@_jit
def gram(
    X: tl.tensor,
    tiles: tl.tensor,
    A: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write A = X X^T: one tile with row >= column, and its mirror."""
    tile = tiles + tl.program_id(0) * 8
    X += tl.load(tile).to(tl.int64) * 16
    A += tl.load(tile + 1).to(tl.int64) * 16
    short = tl.load(tile + 2)
    stride = tl.cdiv(tl.load(tile + 3), 8) * 8
    tile_row = tl.load(tile + 4)
    tile_col = tl.load(tile + 5)
    rows = tile_row * BLOCK + tl.arange(0, BLOCK)
    cols = tile_col * BLOCK + tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK_K)

    left = X + rows[:, None] * stride + ks[None, :]
    right = X + cols[None, :] * stride + ks[:, None]
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for begin in range(0, stride, BLOCK_K):
        inside = ks < stride - begin
        x = tl.load(left + begin, mask=(rows[:, None] < short) & inside[None, :], other=0.0)
        y = tl.load(right + begin, mask=inside[:, None] & (cols[None, :] < short), other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)

    width = tl.cdiv(short, 8) * 8
    values = total.to(A.dtype.element_ty)
    room = (rows[:, None] < short) & (cols[None, :] < width)
    tl.store(A + rows[:, None] * width + cols[None, :], values, mask=room)
    if tile_row != tile_col:
        mirror = (cols[:, None] < short) & (rows[None, :] < width)
        tl.store(A + cols[:, None] * width + rows[None, :], tl.trans(values), mask=mirror)


@_jit
def polynomial(
    A: tl.tensor,
    tiles: tl.tensor,
    B: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write B = bA + cAA: one tile with row >= column, and its mirror."""
    tile = tiles + tl.program_id(0) * 8
    start = tl.load(tile + 1).to(tl.int64) * 16
    A += start
    B += start
    short = tl.load(tile + 2)
    width = tl.cdiv(short, 8) * 8
    tile_row = tl.load(tile + 4)
    tile_col = tl.load(tile + 5)
    rows = tile_row * BLOCK + tl.arange(0, BLOCK)
    cols = tile_col * BLOCK + tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK_K)

    left = A + rows[:, None] * width + ks[None, :]
    right = A + ks[:, None] * width + cols[None, :]
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for begin in range(0, short, BLOCK_K):
        x = tl.load(left + begin, mask=(rows[:, None] < short) & (ks[None, :] < width - begin), other=0.0)
        y = tl.load(right + begin * width, mask=(ks[:, None] < short - begin) & (cols[None, :] < width), other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)

    room = (rows[:, None] < short) & (cols[None, :] < width)
    here = rows[:, None] * width + cols[None, :]
    values = (b * tl.load(A + here, mask=room, other=0.0).to(tl.float32) + c * total).to(B.dtype.element_ty)
    tl.store(B + here, values, mask=room)
    if tile_row != tile_col:
        mirror = (cols[:, None] < short) & (rows[None, :] < width)
        tl.store(B + cols[:, None] * width + rows[None, :], tl.trans(values), mask=mirror)


@_jit
def apply(  # noqa: PLR0913, PLR0917
    X: tl.tensor,
    B: tl.tensor,
    tiles: tl.tensor,
    target: tl.tensor,
    a: tl.tensor,
    LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write aX + BX into `target`: as X lies, or with LAST as the inputs lie."""
    tile = tiles + tl.program_id(0) * 8
    start = tl.load(tile).to(tl.int64) * 16
    X += start
    target += start
    B += tl.load(tile + 1).to(tl.int64) * 16
    short = tl.load(tile + 2)
    long = tl.load(tile + 3)
    width = tl.cdiv(short, 8) * 8
    stride = tl.cdiv(long, 8) * 8
    rows = tl.load(tile + 4) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.load(tile + 5) * BLOCK_N + tl.arange(0, BLOCK_N)
    tall = tl.load(tile + 6)
    ks = tl.arange(0, BLOCK_K)

    left = B + rows[:, None] * width + ks[None, :]
    right = X + ks[:, None] * stride + cols[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, short, BLOCK_K):
        x = tl.load(left + begin, mask=(rows[:, None] < short) & (ks[None, :] < width - begin), other=0.0)
        y = tl.load(right + begin * stride, mask=(ks[:, None] < short - begin) & (cols[None, :] < stride), other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)

    room = (rows[:, None] < short) & (cols[None, :] < stride)
    here = rows[:, None] * stride + cols[None, :]
    values = a * tl.load(X + here, mask=room, other=0.0).to(tl.float32) + total
    values = values.to(target.dtype.element_ty)
    if not LAST:
        tl.store(target + here, values, mask=room)
    elif tall != 0:
        across = (cols[:, None] < long) & (rows[None, :] < short)
        tl.store(target + cols[:, None] * short + rows[None, :], tl.trans(values), mask=across)
    else:
        inside = (rows[:, None] < short) & (cols[None, :] < long)
        tl.store(target + rows[:, None] * long + cols[None, :], values, mask=inside)


@_jit
def copy(sources: tl.tensor, targets: tl.tensor, spans: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Copy one span of one float32 tensor to another of the same memory layout.

    `sources` and `targets` hold addresses, `spans` rows of (tensor, first element, end).
    """
    span = spans + tl.program_id(0) * 3
    which = tl.load(span)
    places = tl.load(span + 1) + tl.arange(0, BLOCK)
    inside = places < tl.load(span + 2)
    source = tl.load(sources + which).to(tl.pointer_type(tl.float32))
    target = tl.load(targets + which).to(tl.pointer_type(tl.float32))
    tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


@_jit
def add_scaled(
    targets: tl.tensor, updates: tl.tensor, spans: tl.tensor, factors: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Add factor times update to one span of a float32 tensor, rounded once, as `_foreach_add_` with alpha does.

    `spans` has rows of (tensor, first element, end, place of the factor); a factor of 0 writes nothing.
    """
    span = spans + tl.program_id(0) * 4
    which = tl.load(span)
    factor = tl.load(factors + tl.load(span + 3))
    places = tl.load(span + 1) + tl.arange(0, BLOCK)
    inside = (places < tl.load(span + 2)) & (factor != 0)
    target = tl.load(targets + which).to(tl.pointer_type(tl.float32))
    update = tl.load(updates + which).to(tl.pointer_type(tl.float32))
    spread = tl.zeros((BLOCK,), dtype=tl.float32) + factor
    result = tl.fma(tl.load(update + places, mask=inside), spread, tl.load(target + places, mask=inside))
    tl.store(target + places, result, mask=inside)
