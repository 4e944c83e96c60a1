"""Plain text within 100 columns: aligned tables, and labelled lines that wrap."""

import textwrap
from collections.abc import Sequence

WIDTH = 100
LABEL_WIDTH = 10

__all__ = ["LABEL_WIDTH", "WIDTH", "columns", "fits", "followed", "labelled", "stacked"]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the cells of rows in columns, two spaces apart, or one where the line would be too long.

    Nothing is cut: where lines would still be too long, the rows are stacked.
    """
    widths = _widths(rows)
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    if not fits(rows):
        return stacked(rows)
    return [gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def fits(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether columns, at least one space apart, have room in a line."""
    widths = _widths(rows)
    return sum(widths) + len(widths) - 1 <= WIDTH


def followed(lines: Sequence[str], remarks: Sequence[str]) -> list[str]:
    """Return each line with its remark behind it, in a column, or where that is too long on lines of its own."""
    width = max(map(len, lines), default=0) + 2
    shown = []
    for line, remark in zip(lines, remarks, strict=True):
        if width + len(remark) <= WIDTH:
            shown.append(f"{line:<{width}}{remark}".rstrip())
        else:
            shown += [line, *_wrapped(remark, " " * LABEL_WIDTH, LABEL_WIDTH)]
    return shown


def stacked(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row below its first cell, a line a further cell that is not empty, after the head of its column."""
    heads = list(rows[0])
    width = min(max(map(len, heads)), WIDTH // 2)
    lines = []
    for label, *cells in rows[1:] or rows:
        lines += _wrapped(label, "") if label else []
        for head, cell in zip(heads[1:], cells, strict=True):
            if not cell:
                continue
            if len(head) > width:
                lines += _wrapped(head, "  ")
            lines += _wrapped(f"{head if len(head) <= width else '':<{width}}  {cell}", "  ", width + 4)
    return lines


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]


def _wrapped(text: str, indent: str, rest: int = 2) -> list[str]:
    """Break a line at its spaces, and within a word only where that is longer than a line."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * rest,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
        expand_tabs=False,
    )


def labelled(label: str, text: str) -> list[str]:
    """Return a paragraph whose first line begins with a label."""
    indent = " " * LABEL_WIDTH
    if len(label) >= LABEL_WIDTH:
        return _wrapped(f"{label}  {text}".replace("\n", " "), "", LABEL_WIDTH)
    lines = textwrap.wrap(
        text.replace("\n", " "), WIDTH - LABEL_WIDTH, break_long_words=True, break_on_hyphens=False
    ) or [""]
    return [f"{label:<{LABEL_WIDTH}}{lines[0]}".rstrip(), *(indent + line for line in lines[1:])]
