import math
import tracemalloc
from pathlib import Path

import pytest

from lucid_cli.commands import report_html
from lucid_cli.html import drawn_series, render_page
from lucid_cli.html.numbers import Numbers
from lucid_cli.html.series import Series
from lucid_profiler.reader import Report, read_report
from lucid_profiler.records import Samples

NUM_RECORDS = 20_000


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([1, None, 2**62 + 1], [1, None, 2**62 + 1]),
        ([1, 2.5, None], [1, 2.5, None]),
        ([math.nan, math.inf, -math.inf, 10**400, 1.0], [None, None, None, None, 1.0]),
        ([-(2**63), -(2**63) + 1], [-(2.0**63), -(2.0**63)]),
        ([2**64], [2.0**64]),
        ([], []),
    ],
)
def test_numbers_come_back(values: list[float | None], kept: list[float | None]) -> None:
    """Whole ones to the last digit; what no double holds is not known."""
    assert list(Numbers(values)) == kept
    assert Numbers(values)[:] == kept
    assert [Numbers(values)[place] for place in range(len(values))] == kept


def test_a_column_that_turns_to_fractions_keeps_what_it_had() -> None:
    """Also what was not known, and what is missing at its end."""
    numbers = Numbers([1, None])
    numbers.pad(3)
    numbers.extend([0.5])
    numbers.pad(6)
    assert list(numbers) == [1, None, None, 0.5, None, None]
    assert not numbers.is_known()
    assert Numbers([1, 0.5]).is_known()


def test_records_of_a_series_are_one_column_whatever_each_of_them_holds() -> None:
    """Where a record lacks the column, or has less of it than of others, its rows are not known."""
    series = drawn_series()
    records: list[dict[str, tuple[float | None, ...]]] = [
        {"mono_ns": (1, 2)},
        {"mono_ns": (3,), "rss_bytes": (5,)},
        {"mono_ns": (4, 5), "rss_bytes": (6,)},
    ]
    for columns in records:
        series.add(Samples(run=0, series="host:slow", columns=columns))
    assert list(series.column(0, "host:slow", "mono_ns")) == [1, 2, 3, 4, 5]
    assert list(series.column(0, "host:slow", "rss_bytes")) == [None, None, 5, 6, None]
    assert series.with_column(0, "host", "rss_bytes") == "host:slow"
    assert list(series.column(0, "host", "rss_bytes")) == []


def test_of_many_records_numbers_stay_and_no_objects() -> None:
    """A row a record: of each row two numbers of eight bytes are kept, of what is not drawn nothing."""
    series = drawn_series()
    names = ("mono_ns", "rss_bytes", "cpu_time_s", "late_ns", "read_bytes")
    tracemalloc.start()
    try:
        for place in range(NUM_RECORDS):
            series.add(Samples(run=0, series="host", columns=dict.fromkeys(names, (10**12 + place,))))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(series.column(0, "host", "rss_bytes")) == NUM_RECORDS
    assert num_bytes < 2.5 * 8 * NUM_RECORDS


def test_the_command_draws_from_columns_and_keeps_no_samples(
    tmp_path: Path, rich_report: Path, rich_page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is that of a report that was read with them."""
    shown: list[Report] = []

    def render(report: Report, series: Series) -> str:
        shown.append(report)
        return render_page(report, series)

    monkeypatch.setattr(report_html, "render_page", render)
    assert report_html.command.callback is not None
    report_html.command.callback(report=str(rich_report), output=str(tmp_path / "a.html"), overwrite=False)
    assert shown[0].samples == ()
    assert read_report(rich_report).samples != ()
    assert (tmp_path / "a.html").read_bytes() == rich_page.read_bytes()
