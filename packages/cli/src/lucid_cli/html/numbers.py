"""Long columns of numbers in eight bytes each, where Python's own numbers take four times as much."""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, cast, overload

Number = float | int

_UNKNOWN = -(2**63)
_BLOCK = 4096

__all__ = ["Number", "Numbers"]


class Numbers(Sequence[Number | None]):
    """A column; None for what is not known, is not finite, or is beyond a double.

    Whole numbers of 64 bits keep all of their digits as long as the column has no others; then they are doubles.

    Args:
        values: what it holds at first.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[Number | None] = ()) -> None:
        self._values: array[Any] = array("q")
        self.extend(values)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Number | None]:
        return map(self._read, self._values)

    @overload
    def __getitem__(self, place: int) -> Number | None: ...

    @overload
    def __getitem__(self, place: slice) -> list[Number | None]: ...

    def __getitem__(self, place: int | slice) -> Number | list[Number | None] | None:
        if isinstance(place, slice):
            return list(map(self._read, self._values[place]))
        return self._read(self._values[place])

    def extend(self, values: Iterable[Number | None]) -> None:
        """Add numbers."""
        rest = iter(values)
        while block := list(islice(rest, _BLOCK)):
            self._add(block)

    def pad(self, length: int) -> None:
        """Add what is not known until the column is so long."""
        missing: Number = _UNKNOWN if self._values.typecode == "q" else math.nan
        self._values.extend(array(self._values.typecode, [missing]) * (length - len(self._values)))

    def is_known(self) -> bool:
        """Return whether every number is."""
        if self._values.typecode == "q":
            return _UNKNOWN not in self._values
        return not any(map(math.isnan, self._values))

    @property
    def _read(self) -> Callable[[Number], Number | None]:
        return _of_whole if self._values.typecode == "q" else _of_double

    def _add(self, block: Sequence[Number | None]) -> None:
        if self._values.typecode == "q":
            whole = _whole(block)
            if whole is not None:
                self._values.extend(whole)
                return
            self._values = array("d", [math.nan if value == _UNKNOWN else value for value in self._values])
        self._values.extend(_doubles(block))


def _of_whole(value: Number) -> Number | None:
    return None if value == _UNKNOWN else value


def _of_double(value: Number) -> Number | None:
    return None if math.isnan(value) else value


def _whole(block: Sequence[Number | None]) -> "array[Any] | None":
    """Return whole numbers; None where one is not, or does not fit beside what stands for unknown."""
    try:
        found = array("q", [_UNKNOWN if value is None else value for value in block])
    except (TypeError, OverflowError):
        return None
    return found if found.count(_UNKNOWN) == block.count(None) else None


def _doubles(block: Sequence[Number | None]) -> "array[Any]":
    with suppress(TypeError, OverflowError):  # most blocks hold nothing that a double does not
        found = array("d", cast("Sequence[float]", block))
        if all(map(math.isfinite, found)):
            return found
    return array("d", map(_double, block))


def _double(value: Number | None) -> float:
    """Return a double, NaN for what is none."""
    try:
        return float(value) if value is not None and math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan
