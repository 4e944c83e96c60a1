import csv
import io
import math
from pathlib import Path

import pytest

from lucid_cli.documents import MAX_SUMMARY_BYTES, append_step_summary, shortened
from lucid_cli.reporters.tabular import Cell, Table, csv_text, markdown, markdown_escaped, text


def table(*rows: tuple[Cell, ...], title: str = "", notes: tuple[str, ...] = ()) -> Table:
    """Return a table of two columns."""
    return Table(title=title, columns=("metric", "value"), rows=rows, notes=notes)


def test_text_aligns_columns_between_title_and_notes() -> None:
    """Title, header and rows, notes: a blank line between them, and a newline at the end."""
    shown = text(table(("wall", "1.5 s"), ("peak allocated", None), title="Metrics", notes=("Medians.",)))
    assert shown == "Metrics\n\nmetric          value\nwall            1.5 s\npeak allocated\n\n          Medians.\n"


def test_markdown_is_a_heading_a_table_and_a_list() -> None:
    """GitHub's markdown, with a newline at the end."""
    shown = markdown([table(("wall", 1.5), ("peak_rss", None), title="Metrics", notes=("Medians.", "Two."))])
    assert shown == (
        "### Metrics\n\n| metric | value |\n| --- | --- |\n| wall | 1.5 |\n| peak_rss |  |\n\n- Medians.\n- Two.\n"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("a|b", r"a\|b"),
        ("two\nlines\r\nand\ttabs", "two lines and tabs"),
        ("`code`", r"\`code\`"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("&lt; &amp;", "&amp;lt; &amp;amp;"),
        ("**bold** ~~gone~~ $x$", r"\*\*bold\*\* \~\~gone\~\~ \$x\$"),
        (r"a\|b", r"a\\\|b"),
        ("peak_reserved _emphasis_", r"peak_reserved \_emphasis\_"),
        ("[-2.5, +1.0]", "[-2.5, +1.0]"),
        ("![x](http://e.org) [a][b] [c]: d", r"![x\](http://e.org) [a\][b] [c\]: d"),
        ("\x1b[31mred\x07", "?[31mred?"),
        ("right\u202eleft \ud800", "right?left ?"),
    ],
)
def test_markdown_shows_what_a_cell_says(words: str, expected: str) -> None:
    """Nothing in a cell is markup, HTML, a second line or a control character."""
    assert markdown_escaped(words) == expected
    assert f"| {expected} |  |" in markdown([table((words, None))]).splitlines()


@pytest.mark.parametrize(
    ("note", "expected"), [("# a", r"\# a"), ("1. a", r"1\. a"), ("- a", r"\- a"), ("-3 %", r"\-3 %")]
)
def test_a_note_is_one_item_and_nothing_in_it(note: str, expected: str) -> None:
    """A note that looks like a heading or a list is neither."""
    assert markdown([table(notes=(note,))]).splitlines()[-1] == f"- {expected}"


@pytest.mark.parametrize("words", ['say "x"', "a,b", "two\nlines", "", " spaces ", "µ …", "'already"])
def test_csv_gives_texts_back(words: str) -> None:
    """What a reader of RFC 4180 finds is what was written."""
    written = csv_text(table((words, "next")))
    assert list(csv.reader(io.StringIO(written, newline=""), strict=True)) == [["metric", "value"], [words, "next"]]
    assert written.startswith("metric,value\r\n")
    assert written.endswith("\r\n")


@pytest.mark.parametrize("words", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1"])
def test_csv_holds_no_formula(words: str) -> None:
    """A text that a spreadsheet would compute gets an apostrophe."""
    first = next(csv.reader(io.StringIO(csv_text(Table(columns=(words,), rows=())), newline="")))[0]
    assert first.startswith("'")


@pytest.mark.parametrize("number", [-1.5, 0.1 + 0.2, -(2**60), -0.0, 5e-324, math.inf])
def test_csv_keeps_every_digit_of_a_number(number: float) -> None:
    """Numbers have no apostrophe, negative ones too, and come back as they were."""
    cell = csv_text(table(("x", number))).split("\r\n")[1].split(",")[1]
    assert repr(type(number)(cell)) == repr(number)


def test_csv_has_no_control_characters() -> None:
    """An escape sequence of a terminal reaches nobody's terminal."""
    assert csv_text(table(("\x1b[31m\x00", 1))).split("\r\n")[1] == "?[31m?,1"


@pytest.mark.parametrize("columns", [(), ("a", "b")])
def test_a_row_that_does_not_fit_its_columns_is_refused(columns: tuple[str, ...]) -> None:
    """A table is whole or is not made."""
    with pytest.raises(ValueError, match="the table 'T' needs rows of"):
        Table(title="T", columns=columns, rows=(("1",),))


def test_without_rows_there_are_no_columns() -> None:
    """A head over nothing tells nobody anything; title and notes stay. CSV keeps its header."""
    empty = table(title="refused", notes=("why",))
    assert markdown([empty]) == "### refused\n\n- why\n"
    assert "metric" not in text(empty)
    assert csv_text(empty) == "metric,value\r\n"


def test_a_step_summary_is_appended_to(tmp_path: Path) -> None:
    """What other steps wrote stays, and a blank line comes before ours."""
    path = tmp_path / "summary.md"
    append_step_summary(str(path), "| a |\n")
    assert path.read_text() == "| a |\n"
    path.write_text("before")
    append_step_summary(str(path), "| a |\n")
    assert path.read_text() == "before\n\n| a |\n"


def test_a_step_summary_never_outgrows_the_limit(tmp_path: Path) -> None:
    """What does not fit is cut after a whole line and says so; what is there stays byte for byte."""
    path = tmp_path / "summary.md"
    before = "x" * (MAX_SUMMARY_BYTES - 1000) + "\n"
    path.write_text(before)
    append_step_summary(str(path), "a line with an é\n" * 1000)
    content = path.read_bytes()
    assert len(content) <= MAX_SUMMARY_BYTES
    assert content.startswith(before.encode())
    added = content[len(before) :].decode()
    assert added.startswith("\na line with an é\n")
    assert "a line with an é\n\nShortened: " in added


def test_a_full_step_summary_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where nothing fits, nothing is written, and a warning says so."""
    path = tmp_path / "summary.md"
    path.write_text("x" * MAX_SUMMARY_BYTES)
    append_step_summary(str(path), "| a |\n")
    assert path.read_text() == "x" * MAX_SUMMARY_BYTES
    assert "no room" in capfd.readouterr().err


@pytest.mark.parametrize("max_bytes", [-5, 0, 10, 60])
def test_nothing_is_better_than_half_a_line(max_bytes: int) -> None:
    """Without room for one line there is no remark either."""
    assert shortened("a line that is rather long, longer than what is left\n", max_bytes) in {
        b"",
        b"a line that is rather long, longer than what is left\n",
    }
