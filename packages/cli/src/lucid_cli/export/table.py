"""A report as one long CSV table: a row a number, whatever it is of and whenever it was read."""

import csv
import io
from collections.abc import Iterable, Iterator

from lucid_cli.export.destination import Sink, in_pieces
from lucid_cli.export.tracks import time_column
from lucid_profiler.phases import within_wall
from lucid_profiler.reader import Report
from lucid_profiler.records import Record, Run, Samples

COLUMNS = ("run", "arm", "pair", "discarded", "series", "row", "mono_ns", "column", "value")
_FORMULA_BEGINS = tuple("=+-@\t\r\n")

__all__ = ["COLUMNS", "LongTable"]

_Row = tuple[str, int | str, int | str, str, int | float | None]


class LongTable:
    """Writes runs and samples as they come.

    Each number keeps all of its digits and the unit that its column's name says; what could not be read is empty. A
    run's metrics are rows of the series `metrics`, in base units, its phases rows of `phases`, in nanoseconds, cut to
    the wall interval as in every sum.

    Args:
        sink: takes the table, in pieces.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._runs: dict[int, tuple[int, str, int, int]] = {}
        self._num_rows: dict[tuple[int, str], int] = {}
        self._write([COLUMNS])

    def add(self, line: int, record: Record) -> None:
        """Write one record of the report.

        Raises:
            ValueError: samples come before their run, or their columns are not equally long.
        """
        del line
        if isinstance(record, Run):
            self._runs[record.run] = (record.run, _guarded(record.arm), record.pair, int(record.discarded))
            self._add(record.run, _run_rows(record))
        elif isinstance(record, Samples):
            if record.run not in self._runs:
                raise ValueError(f"samples of run {record.run} come before the run")
            start = self._num_rows.get((record.run, record.series), 0)
            length = row_count(record)
            self._num_rows[record.run, record.series] = start + length
            self._add(record.run, _sample_rows(record, start, length))

    def finish(self, report: Report) -> None:
        """Write what follows the last record: nothing."""

    def _add(self, run: int, rows: Iterator[_Row]) -> None:
        lead = self._runs[run]
        self._write((*lead, *row) for row in rows)

    def _write(self, rows: Iterable[tuple[object, ...]]) -> None:
        for piece in in_pieces(rows):
            out = io.StringIO()
            csv.writer(out, lineterminator="\r\n").writerows(piece)
            self._sink.write(out.getvalue().encode("utf-8", "replace"))


def row_count(samples: Samples) -> int:
    """Return the number of rows of a record of samples.

    Raises:
        ValueError: its columns are not equally long.
    """
    lengths = {len(values) for values in samples.columns.values()}
    if len(lengths) > 1:
        shown = ", ".join(map(str, sorted(lengths)[:5]))
        raise ValueError(f"samples of {samples.series}: columns have {shown} rows")
    return next(iter(lengths), 0)


def _run_rows(run: Run) -> Iterator[_Row]:
    for name, metric in run.metrics.items():
        yield "metrics", "", "", _guarded(name), metric.value
    for index, phase in enumerate(within_wall(run)):
        yield "phases", index, phase.begin_ns, _guarded(phase.name), phase.end_ns - phase.begin_ns


def _sample_rows(samples: Samples, start: int, length: int) -> Iterator[_Row]:
    time = time_column(samples.columns)
    times = samples.columns[time] if time else ("",) * length
    series = _guarded(samples.series)
    columns = [(_guarded(name), values) for name, values in samples.columns.items() if name != time]
    for index in range(length):
        at_ns = times[index]
        for name, values in columns:
            yield series, start + index, "" if at_ns is None else str(at_ns), name, values[index]


def _guarded(text: str) -> str:
    """Keep a spreadsheet from taking a text for a formula."""
    return f"'{text}" if text.startswith(_FORMULA_BEGINS) else text
