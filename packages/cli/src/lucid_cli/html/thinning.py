"""Fewer points of a long series, the same ones each time: of every bin its smallest and its largest value stay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lucid_cli.html.numbers import Number

MAX_POINTS = 30_000
"""Of all charts of a page together, so that a page stays small whatever the report holds."""
_MAX_BINS = 800
_MIN_BINS = 4

__all__ = ["MAX_POINTS", "Thinned", "bins_for", "kept", "thin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinned:
    """What is left of a series.

    Attributes:
        x: places.
        y: values; None breaks the line.
        num: readings of the whole series.
    """

    x: Sequence[Number | None]
    y: Sequence[Number | None]
    num: int

    @property
    def is_thinned(self) -> bool:
        """Whether points were left out."""
        return len(self.x) < self.num


def bins_for(num_series: int) -> int:
    """Return into how many bins each of so many series is divided."""
    return max(_MIN_BINS, min(_MAX_BINS, MAX_POINTS // (2 * max(num_series, 1))))


def kept(values: Sequence[Number | None], num_bins: int) -> list[int]:
    """Return the places that stay, in order: all of few, else the first, the last, and two of each bin."""
    num = len(values)
    if num <= 2 * num_bins:
        return list(range(num))
    places = {0, num - 1}
    for place in range(num_bins):
        begin, end = place * num // num_bins, (place + 1) * num // num_bins
        values_in = values[begin:end]
        known = _known(values_in)
        if known:
            places.add(begin + values_in.index(min(known)))
            places.add(begin + values_in.index(max(known)))
        else:
            places.add(begin)
    return sorted(places)


def _known(values: Sequence[Number | None]) -> Sequence[Number]:
    return [value for value in values if value is not None and math.isfinite(value)]


def thin(x: Sequence[Number | None], y: Sequence[Number | None], num_bins: int) -> Thinned:
    """Return a series with at most two points of each of `num_bins` bins, and its ends."""
    places = kept(y, num_bins)
    whole = Thinned(x=x, y=y, num=len(y))
    return replace(whole, x=[x[place] for place in places], y=[_finite(y[place]) for place in places])


def _finite(value: Number | None) -> Number | None:
    return value if value is not None and math.isfinite(value) else None
