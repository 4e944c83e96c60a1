"""One launch a stage for matrices of all shapes: the Newton-Schulz iteration through `kernels` where a device has them.

Owns the tables that tell a kernel's program its tile, and the question whether a device runs the kernels rightly. Both
are settled once, at the first call, which must not lie inside the capture of a CUDA graph; later calls may.
"""

import functools
import importlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

from lucid_optim import newton_schulz

__all__ = ["TILINGS", "Launch", "Tiling", "is_available", "is_requested", "orthogonalize", "supports"]

_log = logging.getLogger("lucid_optim")

# Elements of a matrix in one partial sum of squares, and (rows, cols) of a tile that is divided by the norm.
CHUNK = 4096
NORMALIZED = (32, 64)
# Matrices start at multiples of SLOT elements, rows at multiples of ROW: 16 bytes or more in either dtype.
SLOT = 16
ROW = 8
# First compute capability that copies to shared memory asynchronously and multiplies bfloat16.
CAPABILITY = (8, 0)
# Matrices of this many elements do not fit the kernels' 32-bit offsets within a matrix.
TOO_LARGE = 2**31 - 2**24
# Relative error of the test that a device must pass; its matrices end near 1e-6 and 1e-2.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
TESTED = ((3, 5), (40, 24), (70, 130), (1, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one kernel is cut into programs: `(rows, cols)` of a tile, the step along the sum, Triton's options."""

    rows: int
    cols: int
    depth: int
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How the three kernels of an iteration are launched.

    Attributes:
        gram: Of A = X X^T, square.
        polynomial: Of B = bA + cAA, square.
        apply: Of X = aX + BX.
        precision: Triton's `input_precision` of float32 products.
    """

    gram: Launch
    polynomial: Launch
    apply: Launch
    precision: Literal["ieee", "tf32x3"] = "ieee"


# The fastest of those tried on an H200, over the nano and small shapes of the step benchmark; docs/decisions.md has the
# figures. Three TF32 products for one of float32 keep float32's accuracy.
TILINGS = {
    torch.float32: Tiling(
        gram=Launch(rows=64, cols=64, depth=32),
        polynomial=Launch(rows=64, cols=64, depth=32),
        apply=Launch(rows=32, cols=64, depth=32),
        precision="tf32x3",
    ),
    torch.bfloat16: Tiling(
        gram=Launch(rows=64, cols=64, depth=64),
        polynomial=Launch(rows=64, cols=64, depth=64),
        apply=Launch(rows=64, cols=128, depth=64),
    ),
}

Shapes = tuple[tuple[int, int], ...]
Row = tuple[int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """Where a matrix lies in the arenas: `place` in those of X, `square` in those of A and B, `first` partial sum."""

    short: int
    long: int
    tall: bool
    place: int
    square: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The tables of one list of shapes, int32 on the device, and the sizes of the arenas in elements."""

    chunks: Tensor
    normalized: Tensor
    gram: Tensor
    polynomial: Tensor
    apply: Tensor
    places: tuple[int, ...]
    num_elements: int
    num_squared: int
    num_sums: int


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _laid_out(shapes: Shapes) -> list[_Matrix]:
    matrices: list[_Matrix] = []
    place = square = first = 0
    for rows, cols in shapes:
        short, long = min(rows, cols), max(rows, cols)
        matrices.append(_Matrix(short=short, long=long, tall=rows > cols, place=place, square=square, first=first))
        place += _up(short * _up(long, ROW), SLOT)
        square += _up(short * _up(short, ROW), SLOT)
        first += -(-short * long // CHUNK)
    return matrices


def _row(matrix: _Matrix, tile_row: int, tile_col: int) -> Row:
    place, square = matrix.place // SLOT, matrix.square // SLOT
    return place, square, matrix.short, matrix.long, tile_row, tile_col, int(matrix.tall), matrix.first


def _chunks(matrix: _Matrix) -> Iterator[Row]:
    return (_row(matrix, chunk, 0) for chunk in range(-(-matrix.short * matrix.long // CHUNK)))


def _tiles(matrix: _Matrix, rows: int, cols: int) -> Iterator[Row]:
    for tile_row in range(-(-matrix.short // rows)):
        for tile_col in range(-(-matrix.long // cols)):
            yield _row(matrix, tile_row, tile_col)


def _lower_tiles(matrix: _Matrix, size: int) -> Iterator[Row]:
    for tile_row in range(-(-matrix.short // size)):
        for tile_col in range(tile_row + 1):
            yield _row(matrix, tile_row, tile_col)


def _table(rows: Iterator[Row], device: torch.device) -> Tensor:
    return torch.tensor(list(rows), dtype=torch.int32, device=device)


@functools.cache
def _plan(shapes: Shapes, tiling: Tiling, device: torch.device) -> _Plan:
    """Build the tables of a list of shapes. They are kept for good: recorded graphs hold their addresses."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "these shapes are orthogonalised for the first time, and inside a CUDA graph capture; "
            "orthogonalise them once before the capture"
        )
    matrices = _laid_out(shapes)
    # The longest sums start first, so that short ones fill the gaps that they leave.
    by_long = sorted(matrices, key=lambda matrix: -matrix.long)
    by_short = sorted(matrices, key=lambda matrix: -matrix.short)
    gram, polynomial, apply = tiling.gram, tiling.polynomial, tiling.apply
    last = matrices[-1]
    with torch.inference_mode(mode=False):
        return _Plan(
            chunks=_table((row for matrix in matrices for row in _chunks(matrix)), device),
            normalized=_table((row for matrix in matrices for row in _tiles(matrix, *NORMALIZED)), device),
            gram=_table((row for matrix in by_long for row in _lower_tiles(matrix, gram.rows)), device),
            polynomial=_table((row for matrix in by_short for row in _lower_tiles(matrix, polynomial.rows)), device),
            apply=_table((row for matrix in by_short for row in _tiles(matrix, apply.rows, apply.cols)), device),
            places=tuple(matrix.place for matrix in matrices),
            num_elements=last.place + _up(last.short * _up(last.long, ROW), SLOT),
            num_squared=last.square + _up(last.short * _up(last.short, ROW), SLOT),
            num_sums=last.first + -(-last.short * last.long // CHUNK),
        )


def _views(arena: Tensor, shapes: Shapes, plan: _Plan) -> list[Tensor]:
    return [
        arena.as_strided((rows, cols), (cols, 1), place)
        for (rows, cols), place in zip(shapes, plan.places, strict=True)
    ]


def _kernels() -> Any:
    return importlib.import_module("lucid_optim.kernels")


def _launcher(kernel: Any, table: Tensor, how: Launch) -> Callable[..., object]:
    return functools.partial(kernel[(len(table),)], num_warps=how.num_warps, num_stages=how.num_stages)


def _iterate(arena: Tensor, plan: _Plan, scheme: "newton_schulz.NewtonSchulz", tiling: Tiling) -> Tensor:
    """Orthogonalise the matrices in an arena, which is written over; return the arena that holds the results."""
    kernels = _kernels()
    a, b, c = map(float, scheme.coefficients)
    added, least = (scheme.eps, 0.0) if scheme.norm == "add_eps" else (0.0, scheme.eps)
    X, target = torch.empty_like(arena), arena
    A, B = (arena.new_empty(plan.num_squared) for _ in range(2))
    sums = arena.new_empty(plan.num_sums, dtype=torch.float32)

    kernels.sum_squares[(len(plan.chunks),)](arena, plan.chunks, sums, CHUNK)
    kernels.normalize[(len(plan.normalized),)](
        arena, plan.normalized, sums, X, float(added), float(least), CHUNK, *NORMALIZED
    )
    gram = _launcher(kernels.gram, plan.gram, tiling.gram)
    polynomial = _launcher(kernels.polynomial, plan.polynomial, tiling.polynomial)
    apply = _launcher(kernels.apply, plan.apply, tiling.apply)
    tile = (tiling.apply.rows, tiling.apply.cols, tiling.apply.depth)
    for step in range(scheme.steps):
        last = step == scheme.steps - 1
        gram(X, plan.gram, A, tiling.gram.rows, tiling.gram.depth, tiling.precision)
        polynomial(A, plan.polynomial, B, b, c, tiling.polynomial.rows, tiling.polynomial.depth, tiling.precision)
        apply(X, B, plan.apply, target, a, last, *tile, tiling.precision)
        X, target = target, X
    return X


@torch.no_grad()
def orthogonalize(
    matrices: Sequence[Tensor],
    scheme: "newton_schulz.NewtonSchulz",
    *,
    dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
) -> list[Tensor]:
    """Orthogonalise matrices of any shapes, in as many launches as one would take.

    The bytes of a result depend on its matrix, the scheme, the tiling and the device's architecture alone, not on the
    other matrices. Under the capture of a CUDA graph a call is legal once the same shapes went through one before.

    Args:
        matrices: `(rows, cols)` each, none empty, row-major without gaps, wide or tall, of one dtype and one device;
            read only.
        scheme: Its dtype float32 or bfloat16. Products of float32 are never rounded to TF32, whatever torch allows.
        dtype: Of the results; None is the scheme's.
        tiling: How kernels are launched; None is that of `TILINGS`.

    Returns:
        Row-major tensors of the matrices' shapes: views of one new allocation, without shared elements. A matrix of
        zeros stays zeros; one that holds a NaN or an infinity becomes all NaN.

    Raises:
        RuntimeError: If these shapes are new and the current stream is being captured.
    """
    shapes = tuple((matrix.shape[0], matrix.shape[1]) for matrix in matrices)
    device = matrices[0].device
    tiling = TILINGS[scheme.dtype] if tiling is None else tiling
    with torch.cuda.device_of(matrices[0]):
        plan = _plan(shapes, tiling, device)
        arena = torch.empty(plan.num_elements, dtype=scheme.dtype, device=device)
        torch._foreach_copy_(_views(arena, shapes, plan), list(matrices))
        results = _iterate(arena, plan, scheme, tiling)
        return _views(results.to(dtype or scheme.dtype), shapes, plan)


def _accuracy(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative error of a few matrices against float64; infinity if a result holds a NaN."""
    # No generator is touched: a program's random numbers must not depend on this test. Squares times the golden ratio
    # fill the matrices about evenly and leave none of them near a lower rank, where rounding would be magnified.
    places = [torch.arange(rows * cols, dtype=torch.float64).view(rows, cols) for rows, cols in TESTED]
    exact = [(place.square() * ((math.sqrt(5) - 1) / 2)).remainder(1).sub(0.5) for place in places]
    exact = [matrix.to(dtype).double() for matrix in exact]
    results = orthogonalize([matrix.to(device, dtype) for matrix in exact], newton_schulz.NewtonSchulz(dtype=dtype))
    reference = newton_schulz.NewtonSchulz(dtype=torch.float64)
    errors = []
    for matrix, result in zip(exact, results, strict=True):
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
        expected = reference(wide[None])[0]
        found = result.cpu().double()
        found = found if matrix.shape[0] <= matrix.shape[1] else found.mT
        errors.append(float((found - expected).norm() / expected.norm()))
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a CUDA device cannot run the kernels, or None if a test of them gave the right result."""
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < CAPABILITY:
        return f"it needs CUDA with compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, this is {capability}"
    _kernels()
    error = _accuracy(device, dtype)
    return None if error < TOLERANCES[dtype] else f"its self-test in {dtype} has a relative error of {error:.1e}"


_verdicts: dict[tuple[torch.device, torch.dtype], bool] = {}


def _works(device: torch.device, dtype: torch.dtype) -> bool:
    # The test waits for its result, also where a program forbids itself to wait.
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0
    if mode:
        torch.cuda.set_sync_debug_mode("default")
    try:
        return _is_proven(device, dtype)
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


def _is_proven(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        reason = _obstacle(device, dtype)
    except ImportError as error:
        reason = f"triton cannot be imported: {error}"
    except Exception as error:  # noqa: BLE001 - a compiler, a driver and a C toolchain may fail in any way
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        _log.warning("matrices on %s are orthogonalised shape by shape, not all at once: %s", device, reason)
    return reason is None


@functools.cache
def _requested(text: str) -> bool:
    if text not in {"", "0", "1"}:
        raise ValueError(f"LUCID_GROUPED must be 0 or 1, got {text!r}")
    return text != "0"


def is_requested(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether `LUCID_GROUPED` leaves the kernels switched on, as they are unless it is 0.

    Raises:
        ValueError: If it is set to anything but 0 or 1.
    """
    return _requested(environment.get("LUCID_GROUPED", ""))


def is_available(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Tell whether a device runs the kernels rightly; where a CUDA device does not, the log says why, once.

    The first question about a CUDA device compiles the kernels and runs a test, which takes seconds and synchronises:
    ask before the capture of a CUDA graph, inside which the answer is no until there is another. Draws no random
    numbers and never raises.
    """
    if device.type != "cuda" or dtype not in TILINGS or not torch.cuda.is_available():
        return False
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (device, dtype)
    if key not in _verdicts:
        if torch.cuda.is_current_stream_capturing():
            return False
        _verdicts[key] = _works(device, dtype)
    return _verdicts[key]


def supports(scheme: object, matrices: Sequence[Tensor]) -> "TypeGuard[newton_schulz.NewtonSchulz]":
    """Tell whether `orthogonalize` takes these matrices, of one device and dtype, under this scheme.

    Raises:
        ValueError: If `LUCID_GROUPED` is set to anything but 0 or 1.
    """
    if not matrices or type(scheme) is not newton_schulz.NewtonSchulz or scheme.steps < 1:
        return False
    device = matrices[0].device
    if device.type != "cuda" or torch.compiler.is_compiling() or not is_requested():
        return False
    differentiated = torch.is_grad_enabled() and any(matrix.requires_grad for matrix in matrices)
    fits = all(type(matrix) is Tensor and 0 < matrix.numel() < TOO_LARGE for matrix in matrices)
    return fits and not differentiated and is_available(device, scheme.dtype)
