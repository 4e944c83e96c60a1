"""What a step may rely on: whether capture was asked for, why it is not eligible, and which tensors share memory."""

import functools
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from torch import Tensor

__all__ = ["byte_range", "native_reason", "requested_capture", "shares_memory"]


def requested_capture(explicit: bool | None, environment: Mapping[str, str] = os.environ) -> tuple[bool, bool]:
    """Decide whether capture is on.

    `LUCID_CAPTURE_UPDATES` (0 or 1) is the default where nothing explicit was said, and wins over an explicit argument
    inside an arm of `lucid profile run`, which sets `LUCID_PROFILE_ARM`.

    Args:
        explicit: The constructor's argument.
        environment: Where the variables are looked up.

    Returns:
        The decision, and whether it went against `explicit`.

    Raises:
        TypeError: If `explicit` is not a bool or None.
        ValueError: If `LUCID_CAPTURE_UPDATES` is set to anything but 0 or 1.
    """
    if explicit is not None and not isinstance(explicit, bool):
        raise TypeError(f"capture_updates must be True, False or None, got {explicit!r}")
    text = environment.get("LUCID_CAPTURE_UPDATES", "")
    if text not in {"", "0", "1"}:
        raise ValueError(f"LUCID_CAPTURE_UPDATES must be 0 or 1, got {text!r}")
    inside_arm = bool(environment.get("LUCID_PROFILE_ARM"))
    if explicit is not None and not (inside_arm and text):
        return explicit, False
    decision = text == "1"
    return decision, explicit is not None and explicit != decision


def native_reason(parameters: Sequence[Tensor], *, requested: bool) -> str:
    """Return the key of `REASONS` that says why these parameters' step runs natively."""
    if not requested:
        return "not_requested"
    if not parameters or not all(parameter.is_cuda for parameter in parameters):
        return "no_cuda"
    return "not_implemented"


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses `[begin, end)` between a tensor's first and last byte; empty for an empty tensor."""
    begin = tensor.data_ptr()
    return begin, begin + _extent(tensor.shape, tensor.stride()) * tensor.element_size()


@functools.lru_cache(maxsize=8192)
def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements between the first and the last one, both counted; 0 without elements."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def shares_memory(written: Iterable[Tensor], read: Iterable[Tensor]) -> bool:
    """Tell whether a written tensor's byte range meets another written one's, or a read one's.

    Ranges are compared, not elements: interleaved slices of one base count as shared. Read tensors may share memory
    among themselves.
    """
    ranges = sorted(span for span in map(byte_range, written) if span[0] < span[1])
    if any(first[1] > second[0] for first, second in pairwise(ranges)):
        return True
    begins = [begin for begin, _ in ranges]
    for tensor in read:
        begin, end = byte_range(tensor)
        position = bisect_right(begins, end - 1)
        if position and begin < end and ranges[position - 1][1] > begin:
            return True
    return False
