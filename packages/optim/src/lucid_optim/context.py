"""What surrounds a step: modes that forbid a recording, and modes that decide which bytes a kernel gives."""

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from lucid_optim import grouped
from lucid_optim.private import has_dispatch_mode

__all__ = ["forbidding_mode", "needs_graph", "numeric_modes"]


def forbidding_mode(device: torch.device) -> str | None:
    """Return the key of `REASONS` for a mode under which a step must run natively, or None.

    Under each of them either other operations would run than those that were recorded, or somebody else watches or
    records the operations themselves.
    """
    if torch.is_inference_mode_enabled():
        return "inference_mode"
    if torch.is_autocast_enabled(device.type):
        return "autocast"
    if torch.compiler.is_compiling():
        return "compiling"
    if has_dispatch_mode():
        return "dispatch_mode"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "enclosing_capture"
    return None


def needs_graph(tensors: Iterable[Tensor]) -> bool:
    """Tell whether autograd would follow operations on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def numeric_modes() -> tuple[object, ...]:
    """Return the process-wide settings on which the bytes of a matrix product or a reduction may depend."""
    matmul = torch.backends.cuda.matmul
    return (
        _float32_precision(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        getattr(matmul, "allow_fp16_accumulation", None),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.preferred_blas_library(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        grouped.is_requested(),
    )


def _float32_precision() -> object:
    """Return how float32 products are rounded, through the interface that never raises.

    Once `fp32_precision` has been set, reading `allow_tf32` raises; older versions have only the latter.
    """
    matmul = torch.backends.cuda.matmul
    if hasattr(torch.backends, "fp32_precision"):
        return torch.backends.fp32_precision, matmul.fp32_precision
    return matmul.allow_tf32
