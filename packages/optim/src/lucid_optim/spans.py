"""One launch for many tensors whose addresses are known: the copies into a recording and the writes after it.

A multi-tensor kernel is handed its addresses anew at every launch, about a hundred tensors at a time, which costs more
on the host than a small net's whole update on the device. Where addresses are certified, they can stay on the device.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lucid_optim import grouped
from lucid_optim.private import bump_versions

__all__ = ["Copies", "Writes", "are_served", "load"]

# Elements that one program moves.
BLOCK = 2048


def are_served(device: torch.device) -> bool:
    """Tell whether a device runs these kernels; asked for the first time inside a capture, it does not."""
    return device.type == "cuda" and grouped.is_requested() and grouped.is_available(device)


def _spans(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return rows of (tensor, first element, end)."""
    return [(which, begin, count) for which, count in enumerate(counts) for begin in range(0, count, BLOCK)]


def _pinned(rows: object) -> Tensor:
    """Return numbers as an int64 tensor in pinned memory, new each time, so that nobody waits for its upload."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").pin_memory()


def _uploaded(rows: object, device: torch.device) -> Tensor:
    return _pinned(rows).to(device, non_blocking=True)


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    return _uploaded([tensor.data_ptr() for tensor in tensors], tensors[0].device)


def _kernels() -> Any:
    return importlib.import_module("lucid_optim.kernels")


@functools.cache
def load(device: torch.device) -> None:
    """Load the kernels of a device that runs them, outside any recording and before one is timed."""
    if are_served(device):
        with torch.cuda.device(device):  # where kernels are launched and memory is pinned
            cells = [torch.zeros(1, dtype=torch.float32, device=device) for _ in range(3)]
            Copies(cells[:1])
            Writes(cells[:1], cells[1:2], [0], cells[2]).submit()


class Copies:
    """Copies from wherever the sources lie at a step to owned tensors.

    Args:
        targets: Dense float32 tensors of one device.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self._to = _addresses(targets)
        self._from = self._to.clone()
        spans = _spans([target.numel() for target in targets])
        self._spans = _uploaded(spans, self._to.device)
        self._last = [target.data_ptr() for target in targets]
        self.submit()  # loads the kernel; every tensor is copied to itself

    def point(self, sources: list[int]) -> None:
        """Bring the sources' addresses to the device if they have changed; each lies in memory as its target does."""
        if sources != self._last:
            self._from.copy_(_pinned(sources), non_blocking=True)
            self._last = sources

    def submit(self) -> None:
        """Launch the copies; recorded, they read the addresses of the time of the replay."""
        _kernels().copy[(len(self._spans),)](self._from, self._to, self._spans, BLOCK)


class Writes:
    """Writes `params <- params + factor * updates` with the bytes of `_foreach_add_`.

    Args:
        params: Dense float32 tensors of one device.
        updates: As many, each with its parameter's strides.
        places: For each parameter, the place of its factor.
        factors: float32 on the device; the values at the time of the launch count, and 0 leaves every byte as it is.
    """

    def __init__(
        self, params: Sequence[Tensor], updates: Sequence[Tensor], places: Sequence[int], factors: Tensor
    ) -> None:
        self._params = list(params)
        self._factors = factors
        self._to, self._from = _addresses(params), _addresses(updates)
        spans = [(*span, places[span[0]]) for span in _spans([param.numel() for param in params])]
        self._spans = _uploaded(spans, self._to.device)

    def submit(self) -> None:
        """Launch the writes."""
        _kernels().add_scaled[(len(self._spans),)](self._to, self._from, self._spans, self._factors, BLOCK)
        bump_versions(self._params)
