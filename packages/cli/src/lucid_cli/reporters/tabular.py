"""Tables before they have a form: a title, columns, rows and notes, and how they look as text, markdown and CSV.

A number in a cell stays one: CSV writes all of its digits. Who wants it rounded, or with a unit, writes it into a text.
`lucid_cli.documents` takes what these functions return to standard output or into a GitHub step summary.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lucid_cli.reporters.layout import columns, labelled

__all__ = ["Cell", "Table", "csv_text", "markdown", "markdown_escaped", "text"]

Cell = str | int | float | None
"""What a cell holds; None is empty."""

# What spreadsheets take for the beginning of a formula, in both widths: https://owasp.org/www-community/attacks/CSV_Injection
_FORMULA_BEGINS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
# What markdown reads as markup anywhere in a line; an underscore only beside something that is no letter or digit.
_MARKUP = re.compile(r"[\\`*~$|]|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])")
# What markdown reads as markup at the beginning of a line.
_BLOCK_MARKUP = re.compile(r"^(\d*)([-+#=.)])")
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under columns, whatever they will look like."""

    title: str = ""
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    """Each as long as `columns`."""
    notes: tuple[str, ...] = ()
    """What a reader should know of the rows, a sentence each; CSV has no place for them."""

    def __post_init__(self) -> None:
        """Hold the rows against the columns.

        Raises:
            ValueError: If there is no column, or a row has more or fewer cells than there are columns.
        """
        if not self.columns or any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"the table {self.title!r} needs rows of {len(self.columns) or 'at least one'} cells")


def text(table: Table) -> str:
    """Return a table as aligned text within the width of all texts, ending in a newline; without rows no columns."""
    rows = [[_one_line(cell) for cell in row] for row in (table.columns, *table.rows)] if table.rows else []
    notes = [line for note in table.notes for line in labelled("", _one_line(note))]
    blocks = [[_one_line(table.title)] if table.title else [], columns(rows) if rows else [], notes]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def markdown(tables: Sequence[Table]) -> str:
    """Return tables as GitHub's markdown, each under a heading, ending in a newline; one without rows is its heading.

    What cells say is never markup.
    """
    return "\n\n".join(block for table in tables for block in _markdown_blocks(table)) + "\n"


def markdown_escaped(words: str) -> str:
    """Return a text as markdown that shows exactly these words on one line."""
    one_line = _one_line(words)
    return _MARKUP.sub(r"\\\g<0>", one_line).translate(_HTML)


def csv_text(table: Table) -> str:
    r"""Return a table as CSV after RFC 4180: a header line, CRLF after every line, quotes where they are needed.

    A text that a spreadsheet would take for a formula gets an apostrophe before it; a number never does, and control
    characters other than newlines become question marks.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    for row in (table.columns, *table.rows):
        writer.writerow([_csv_cell(cell) for cell in row])
    return out.getvalue()


def _markdown_blocks(table: Table) -> list[str]:
    rows = [[markdown_escaped(_cell_text(cell)) for cell in row] for row in (table.columns, *table.rows)]
    rows.insert(1, ["---"] * len(table.columns))
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows) if table.rows else ""
    notes = "\n".join(f"- {_BLOCK_MARKUP.sub(_escape_block, markdown_escaped(note))}" for note in table.notes)
    title = markdown_escaped(table.title)
    return [block for block in (f"### {title}" if title else "", lines, notes) if block]


def _escape_block(match: re.Match[str]) -> str:
    return f"{match[1]}\\{match[2]}"


def _cell_text(cell: Cell) -> str:
    return "" if cell is None else str(cell)


def _one_line(cell: Cell) -> str:
    """Return a cell without line ends and control characters."""
    return _printable(" ".join(_cell_text(cell).split()))


def _csv_cell(cell: Cell) -> Cell:
    if not isinstance(cell, str):
        return cell
    guarded = f"'{cell}" if cell.startswith(_FORMULA_BEGINS) else cell
    return "\n".join(map(_printable, guarded.replace("\r\n", "\n").split("\n")))


def _printable(line: str) -> str:
    return line if line.isprintable() else "".join(char if char.isprintable() else "?" for char in line)
