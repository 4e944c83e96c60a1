"""Plain text within 100 columns: aligned tables, and labelled lines that wrap."""

import textwrap
from collections.abc import Sequence

WIDTH = 100
LABEL_WIDTH = 10

__all__ = ["LABEL_WIDTH", "WIDTH", "columns", "labelled"]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the cells of rows in columns, two spaces apart, or one where the line would be too long.

    Lines that are still too long are cut.
    """
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    lines = [gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [_cut(line) for line in lines]


def labelled(label: str, text: str) -> list[str]:
    """Return a paragraph whose first line begins with a label."""
    indent = " " * LABEL_WIDTH
    lines = textwrap.wrap(
        text.replace("\n", " "), WIDTH - LABEL_WIDTH, break_long_words=True, break_on_hyphens=False
    ) or [""]
    return [f"{label:<{LABEL_WIDTH}}{lines[0]}".rstrip(), *(indent + line for line in lines[1:])]


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
