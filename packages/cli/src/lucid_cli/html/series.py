"""The time series of a report's runs as plain columns of seconds, watts and so on."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lucid_profiler.reader import Report
from lucid_profiler.records import Run

Number = float | int
Column = Sequence[Number | None]

MAX_RUN_VIEWS = 24
"""Runs of which each has views of its own."""

__all__ = ["MAX_RUN_VIEWS", "Column", "Line", "Series", "line", "origin_ns", "quantile", "run_name", "scaled", "viewed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Readings over time, in seconds from the run's origin; equally long."""

    seconds: Sequence[float]
    values: Column


class Series:
    """Finds the columns of a run.

    Args:
        report: whose samples they are.
    """

    def __init__(self, report: Report) -> None:
        self._chunks: dict[tuple[int, str], list[Mapping[str, Column]]] = {}
        for samples in report.samples:
            self._chunks.setdefault((samples.run, samples.series), []).append(samples.columns)

    def names(self, run: int) -> list[str]:
        """Return the series of a run."""
        return [name for number, name in self._chunks if number == run]

    def column(self, run: int, series: str, name: str) -> list[Number | None]:
        """Return a column over all records of a series; None where a record lacks it, and for what is not finite."""
        found: list[Number | None] = []
        for columns in self._chunks.get((run, series), ()):
            length = max(map(len, columns.values()), default=0)
            values = columns.get(name, ())
            found += values
            found += [None] * (length - len(values))
        return found if _are_finite(found) else [value if _are_finite([value]) else None for value in found]

    def with_column(self, run: int, prefix: str, name: str) -> str | None:
        """Return the first series of a run whose name begins so and that has such a column."""
        matching = [series for series in self.names(run) if series == prefix or series.startswith(f"{prefix}:")]
        return next((one for one in matching if any(name in chunk for chunk in self._chunks[run, one])), None)


def _are_finite(values: Column) -> bool:
    """Return whether a double can hold every value."""
    try:
        return all(map(math.isfinite, filter(None, values)))
    except OverflowError:
        return False


def scaled(values: Iterable[Number | None], divisor: float, *, origin: int = 0) -> list[float | None]:
    """Return values less an origin and divided; None for what no double holds."""
    try:
        return [None if value is None else (value - origin) / divisor for value in values]
    except OverflowError:
        return [_scaled(value, divisor, origin) for value in values]


def _scaled(value: Number | None, divisor: float, origin: int) -> float | None:
    try:
        return None if value is None else (value - origin) / divisor
    except OverflowError:
        return None


def line(times_ns: Column, values: Column, *, origin: int, divisor: float = 1.0) -> Line:
    """Return readings with their times; those without a time are left out."""
    seconds, shown = scaled(times_ns, 1e9, origin=origin), scaled(values, divisor)
    if None not in seconds and len(seconds) == len(shown) and all(map(math.isfinite, filter(None, seconds))):
        return Line(seconds=[at for at in seconds if at is not None], values=shown)
    pairs = [(at, value) for at, value in zip(seconds, shown, strict=False) if at is not None and math.isfinite(at)]
    return Line(seconds=[at for at, _ in pairs], values=[value for _, value in pairs])


def origin_ns(run: Run, times_ns: Column) -> int:
    """Return the moment that is 0 in a run's charts: the begin of its wall interval, else its first reading."""
    if run.wall is not None:
        return run.wall.begin_ns
    return next((int(at) for at in times_ns if at is not None and math.isfinite(at)), 0)


def run_name(run: Run) -> str:
    """Name a run with its arm."""
    return f"run {run.run}, {run.arm}{', discarded' if run.discarded else ''}"


def viewed(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that have views of their own: all, or as many as may be, evenly spread, measured ones first."""
    measured = [run for run in runs if not run.discarded]
    discarded = [run for run in runs if run.discarded]
    chosen = measured if len(runs) > MAX_RUN_VIEWS and measured else [*measured, *discarded]
    if len(chosen) <= MAX_RUN_VIEWS:
        return chosen
    return [chosen[place * (len(chosen) - 1) // (MAX_RUN_VIEWS - 1)] for place in range(MAX_RUN_VIEWS)]


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, in proportion between the two around it."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
