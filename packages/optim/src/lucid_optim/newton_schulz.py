"""The Newton-Schulz iteration that replaces a matrix by a nearby orthogonal one.

For `X = U S V^T` the iteration returns `U S' V^T` with the singular values in `S'` driven towards 1: with the quintic
coefficients below they end in about [0.5, 1.5] rather than at 1, which costs fewer steps and trains as well.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lucid_optim import buckets
from lucid_optim.checks import non_negative, positive_int, three_numbers

__all__ = ["QUINTIC", "NewtonSchulz", "orthogonalize"]

# (a, b, c) of X <- aX + (bA + cA^2)X, A = XX^T, chosen to maximise the slope at 0.
# Source: K. Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/
QUINTIC = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewtonSchulz:
    """One way to orthogonalise, as a value that a recording can depend on.

    Attributes:
        steps: Number of iterations, at least 1.
        coefficients: `(a, b, c)` of `X <- aX + (bA + cA^2)X` with `A = XX^T`.
        eps: Guards the division by the Frobenius norm.
        norm: `add_eps` divides by `norm + eps`, `clamp_eps` by `max(norm, eps)`.
        dtype: The iteration's dtype, whatever the input's.
    """

    steps: int = 5
    coefficients: tuple[float, float, float] = QUINTIC
    eps: float = 1e-7
    norm: Literal["add_eps", "clamp_eps"] = "add_eps"
    dtype: torch.dtype = torch.float32

    def __call__(self, matrices: Tensor) -> Tensor:
        """Orthogonalise a batch of wide matrices.

        Args:
            matrices: `(batch, rows, cols)` with `rows <= cols`, any floating dtype; read only.

        Returns:
            `(batch, rows, cols)` of dtype `self.dtype`, contiguous, sharing no memory with the input. A matrix of zeros
            stays zeros; a matrix that holds a NaN or an infinity becomes all NaN and leaves its neighbours alone.

        Raises:
            TypeError: If `steps` is not an integer.
        """
        if matrices.device.type != "meta" and torch.is_autocast_enabled(matrices.device.type):
            with torch.autocast(matrices.device.type, enabled=False):
                return self._iterate(matrices)
        return self._iterate(matrices)

    def _iterate(self, matrices: Tensor) -> Tensor:
        a, b, c = self.coefficients
        X = matrices.to(self.dtype)
        norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True)
        X = X / (norm + self.eps if self.norm == "add_eps" else norm.clamp(min=self.eps))
        for _ in range(self.steps):
            A = torch.bmm(X, X.mT)
            B = torch.baddbmm(A, A, A, beta=b, alpha=c)
            X = torch.baddbmm(X, B, X, beta=a)
        return X


@torch.no_grad()
def orthogonalize(
    update: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
) -> Tensor:
    """Orthogonalise one update, viewed as a matrix `(shape[0], rest)`, in float32.

    Inputs with a Frobenius norm far above `eps` lose their scale altogether; below about 1e-5 the result shrinks with
    the input and below 1e-7 it is no longer orthogonal.

    Args:
        update: `(rows, ...)` with at least two dimensions, floating point, any strides; read only.
        steps: Number of iterations.
        coefficients: `(a, b, c)` of the iteration.
        eps: Added to the Frobenius norm.

    Returns:
        A tensor of the update's shape, dtype and, where it is dense, strides; it never aliases `update`.

    Raises:
        ValueError: If `update` has fewer than two dimensions or is not dense floating point, `steps` is not a positive
            int, or `eps` or `coefficients` are not finite numbers.

    Example:
        >>> update = orthogonalize(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        >>> bool((torch.linalg.svdvals(update) > 0.5).all())
        True
    """
    if update.ndim < 2 or not update.is_floating_point() or update.layout != torch.strided:
        raise ValueError(
            f"orthogonalize takes a dense floating-point tensor with at least two dimensions, "
            f"got {update.dtype} of layout {update.layout} and shape {tuple(update.shape)}"
        )
    if positive_int(steps):
        raise ValueError(f"steps must be a positive int, got {steps!r}")
    if non_negative(eps):
        raise ValueError(f"eps {non_negative(eps)}, got {eps!r}")
    if three_numbers(coefficients):
        raise ValueError(f"coefficients {three_numbers(coefficients)}, got {coefficients!r}")
    if update.numel() == 0:
        return torch.empty_like(update)
    scheme = NewtonSchulz(steps=int(steps), coefficients=coefficients, eps=eps)
    return buckets.orthogonalize_all([update], scheme)[0]
