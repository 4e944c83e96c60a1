"""The time series of a report's runs as plain columns of seconds, watts and so on."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lucid_cli.html.numbers import Number, Numbers
from lucid_profiler.records import Record, Run, Samples

Column = Sequence[Number | None]

MAX_RUN_VIEWS = 24
"""Runs of which each has views of its own."""

__all__ = ["MAX_RUN_VIEWS", "Column", "Line", "Series", "line", "origin_ns", "quantile", "run_name", "scaled", "viewed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Readings over time, in seconds from the run's origin; equally long."""

    seconds: Column
    values: Column


class Series:
    """Takes the samples of a report as they are read, and keeps the columns that are drawn.

    Args:
        drawn: names of these columns, by the kind of their series: what its name begins with, up to a colon.
    """

    def __init__(self, drawn: Mapping[str, Collection[str]]) -> None:
        self._drawn = drawn
        self._columns: dict[tuple[int, str], dict[str, Numbers]] = {}
        self._num_rows: dict[tuple[int, str], int] = {}

    def add(self, record: Record) -> None:
        """Keep what is drawn of one record of the report."""
        if not isinstance(record, Samples):
            return
        drawn = self._drawn.get(record.series.partition(":")[0], ())
        key = (record.run, record.series)
        columns = self._columns.setdefault(key, {})
        num_before = self._num_rows.get(key, 0)
        for name in drawn:
            if name in record.columns:
                column = columns.setdefault(name, Numbers())
                column.pad(num_before)
                column.extend(record.columns[name])
        self._num_rows[key] = num_before + max(map(len, record.columns.values()), default=0)

    def names(self, run: int) -> list[str]:
        """Return the series of a run."""
        return [name for number, name in self._columns if number == run]

    def column(self, run: int, series: str, name: str) -> Numbers:
        """Return a column over all records of a series; None where a record lacks it."""
        found = self._columns.get((run, series), {}).get(name, Numbers())
        found.pad(self._num_rows.get((run, series), 0))
        return found

    def with_column(self, run: int, prefix: str, name: str) -> str | None:
        """Return the first series of a run whose name begins so and that has such a column."""
        matching = [series for series in self.names(run) if series == prefix or series.startswith(f"{prefix}:")]
        return next((one for one in matching if name in self._columns[run, one]), None)


def scaled(values: Iterable[Number | None], divisor: float, *, origin: int = 0) -> Iterator[float | None]:
    """Yield values less an origin and divided; None for what no double holds."""
    return (_scaled(value, divisor, origin) for value in values)


def _scaled(value: Number | None, divisor: float, origin: int) -> float | None:
    try:
        return None if value is None else (value - origin) / divisor
    except OverflowError:
        return None


def line(times_ns: Column, values: Column, *, origin: int, divisor: float = 1.0) -> Line:
    """Return readings with their times; those without a time are left out."""
    seconds, shown = Numbers(scaled(times_ns, 1e9, origin=origin)), Numbers(scaled(values, divisor))
    if seconds.is_known() and len(seconds) == len(shown):
        return Line(seconds=seconds, values=shown)
    timed = [place for place, (at, _) in enumerate(zip(seconds, shown, strict=False)) if at is not None]
    return Line(seconds=Numbers(seconds[place] for place in timed), values=Numbers(shown[place] for place in timed))


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
