"""Which bytes tensors occupy, and whether two sets of tensors meet."""

import functools
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor

__all__ = ["WrittenRanges", "byte_range", "num_spanned_bytes", "shares_memory"]


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses `[begin, end)` between a tensor's first and last byte; empty for an empty tensor."""
    begin = tensor.data_ptr()
    return begin, begin + num_spanned_bytes(tensor)


def num_spanned_bytes(tensor: Tensor) -> int:
    """Return the number of bytes from a tensor's first to its last, both counted; 0 for an empty tensor."""
    return _extent(tensor.shape, tensor.stride()) * tensor.element_size()


@functools.lru_cache(maxsize=8192)
def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements between the first and the last one, both counted; 0 without elements."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class WrittenRanges:
    """The byte ranges of tensors that are written.

    Ranges are compared, not elements: interleaved slices of one base count as shared.

    Args:
        written: Tensors whose ranges are read now; none is kept.
    """

    def __init__(self, written: Iterable[Tensor]) -> None:
        self._ranges = sorted(span for span in map(byte_range, written) if span[0] < span[1])
        self._begins = [begin for begin, _ in self._ranges]

    def overlap(self) -> bool:
        """Tell whether two of the written ranges meet."""
        return any(first[1] > second[0] for first, second in pairwise(self._ranges))

    def meet(self, tensor: Tensor) -> bool:
        """Tell whether a tensor that is only read meets a written range."""
        return self.meet_bytes(*byte_range(tensor))

    def meet_bytes(self, begin: int, end: int) -> bool:
        """Tell whether the bytes at the addresses `[begin, end)` meet a written range."""
        position = bisect_right(self._begins, end - 1)
        # The ranges do not overlap, so the last one that begins before the end reaches furthest.
        return bool(position) and begin < end and self._ranges[position - 1][1] > begin


def shares_memory(written: Iterable[Tensor], read: Iterable[Tensor]) -> bool:
    """Tell whether a written tensor's byte range meets another written one's, or a read one's.

    Read tensors may share memory among themselves.
    """
    ranges = WrittenRanges(written)
    return ranges.overlap() or any(map(ranges.meet, read))
