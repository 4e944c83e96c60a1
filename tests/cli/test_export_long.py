import csv
import io
from pathlib import Path
from typing import Any

import pytest

from lucid_cli.export.chrome import ChromeTrace
from lucid_cli.export.destination import PIECE
from lucid_cli.export.table import LongTable
from lucid_profiler import jsonio
from lucid_profiler.reader import read_report
from reports.good import BEGIN_NS, good_report, relinked
from reports.trace_rules import checked_trace

NUM_ROWS = 3 * PIECE + 1


class Pieces:
    """A sink that remembers what it was given."""

    def __init__(self) -> None:
        self.found: list[bytes] = []

    def write(self, data: bytes, /) -> None:
        """Keep the next piece."""
        self.found.append(data)


def exported(form: type[ChromeTrace] | type[LongTable], records: list[dict[str, Any]], path: Path) -> list[bytes]:
    """Return the pieces in which records are written."""
    path.write_bytes(relinked(records))
    sink = Pieces()
    writer = form(sink)
    writer.finish(read_report(path, with_samples=False, each=writer.add))
    return sink.found


@pytest.fixture
def head(tmp_path: Path) -> list[dict[str, Any]]:
    """Return the first records of a report, a run the last of them."""
    return [jsonio.loads(line) for line in good_report(tmp_path / "good.jsonl").splitlines()[:3]]


@pytest.mark.parametrize("form", [ChromeTrace, LongTable])
def test_a_long_record_is_written_in_pieces(
    form: type[ChromeTrace] | type[LongTable], tmp_path: Path, head: list[dict[str, Any]]
) -> None:
    """No more rows than a piece has are put into words at once, and none is missing."""
    columns = {"mono_ns": list(range(NUM_ROWS)), "rss_bytes": list(range(NUM_ROWS))}
    samples = {"t": "samples", "run": 0, "series": "host", "columns": columns}
    pieces = exported(form, [*head, samples], tmp_path / "long.jsonl")
    assert max(piece.count(b"\n") for piece in pieces) <= PIECE
    whole = b"".join(pieces)
    if form is LongTable:
        rows = list(csv.DictReader(io.StringIO(whole.decode(), newline="")))
        values = [row["value"] for row in rows if row["column"] == "rss_bytes"]
    else:
        events = checked_trace(whole)["traceEvents"]
        values = [str(event["args"]["bytes"]) for event in events if event["name"] == "host memory rss"]
    assert values == list(map(str, range(NUM_ROWS)))


def test_phases_of_the_table_are_cut_to_the_wall(tmp_path: Path, head: list[dict[str, Any]]) -> None:
    """Their rows are summed: each says when it began within the interval, and how long it was in it."""
    end_ns = head[2]["wall"]["end_ns"]
    head[2]["phases"] = [
        {"name": "load", "begin_ns": BEGIN_NS - 5, "end_ns": BEGIN_NS + 7},
        {"name": "save", "begin_ns": end_ns - 11, "end_ns": end_ns + 100},
        {"name": "exit", "begin_ns": end_ns + 100, "end_ns": end_ns + 200},
    ]
    table = b"".join(exported(LongTable, head, tmp_path / "cut.jsonl")).decode()
    rows = [tuple(row) for row in csv.reader(io.StringIO(table, newline="")) if row[4] == "phases"]
    lead = ("0", "native", "0", "0", "phases")
    assert rows == [
        (*lead, "0", str(BEGIN_NS), "load", "7"),
        (*lead, "1", str(end_ns - 11), "save", "11"),
        (*lead, "2", str(end_ns), "exit", "0"),
    ]


def test_phases_of_the_timeline_are_as_marked_and_say_what_lies_in_the_wall(
    tmp_path: Path, head: list[dict[str, Any]]
) -> None:
    """The slice runs on; its arguments have the part that counts."""
    end_ns = head[2]["wall"]["end_ns"]
    head[2]["phases"] = [{"name": "save", "begin_ns": end_ns - 11, "end_ns": end_ns + 100}]
    events = checked_trace(b"".join(exported(ChromeTrace, head, tmp_path / "cut.jsonl")))["traceEvents"]
    (save,) = [event["args"] for event in events if event["name"] == "save"]
    assert save == {"begin_ns": end_ns - 11, "end_ns": end_ns + 100, "in_wall_ns": 11}
