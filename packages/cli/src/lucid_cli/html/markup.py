"""HTML that is safe by construction: what is not `Html` already is escaped wherever it is put in.

Text of a report may hold anything; here it loses its control characters, and inside scripts every character that could
end one.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from lucid_profiler import jsonio

_VOID = frozenset({"meta", "link", "br", "hr", "input"})
_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_MAX_CHART_CHARS = 60

Child = str | Iterable["Child"]
"""Text, which is escaped, or `Html`, which is not, or several of them."""

__all__ = [
    "Child",
    "Html",
    "cells",
    "chart_text",
    "details",
    "json_data",
    "listed",
    "table",
    "tag",
    "template_text",
    "text",
]


class Html(str):
    """Markup that is put into others as it is."""

    __slots__ = ()


def text(value: str) -> Html:
    """Return text as markup, with a question mark for each character that cannot be printed."""
    return Html(escape("".join(char if char.isprintable() or char in "\t\n" else "?" for char in value)))


def chart_text(value: str) -> str:
    """Return at most 60 characters for the charts' library, which reads some tags and entities of its own."""
    kept = "".join(char if char.isprintable() else "?" for char in value)
    shown = kept if len(kept) <= _MAX_CHART_CHARS else f"{kept[: _MAX_CHART_CHARS - 1]}…"
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")


def template_text(value: str) -> str:
    """Return a text for a template of the charts' library, which puts values where `%{` stands."""
    return chart_text(value).replace("%", "&#37;")


def tag(name: str, /, *children: Child, **attributes: str | bool | None) -> Html:
    """Return an element.

    Args:
        name: of the element.
        children: what is in it, in order.
        attributes: without those that are None or False; a `_` at the end is dropped, others become `-`.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{''.join(_joined(child) for child in children)}</{name}>")


def _joined(child: Child) -> str:
    if isinstance(child, Html):
        return child
    return text(child) if isinstance(child, str) else "".join(_joined(one) for one in child)


def cells(*values: str) -> tuple[str, ...]:
    """Return a row of a table, with a dash for what is empty."""
    return tuple(value or "-" for value in values)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, num_text: int = 1) -> Html:
    """Return a table that scrolls by itself where it is too wide, also with the keyboard.

    Args:
        head: its first row.
        rows: the others; the first cell of each names it.
        caption: what it shows, read out but not drawn.
        num_text: columns, from the left, that hold text; others hold numbers.
    """
    kinds = ["text" if place < num_text else "number" for place in range(len(head))]
    top = tag("tr", [tag("th", cell, scope="col", class_=kind) for cell, kind in zip(head, kinds, strict=True)])
    body = [tag("tr", tag("th", row[0], scope="row"), _data(row[1:], kinds[1:])) for row in rows]
    whole = tag("table", tag("caption", caption, class_="hidden"), tag("thead", top), tag("tbody", body))
    return tag("div", whole, class_="scroll", role="region", aria_label=caption, tabindex="0")


def _data(row: Sequence[str], kinds: Sequence[str]) -> list[Html]:
    return [tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)]


def details(summary: str, *children: Child) -> Html:
    """Return what opens on demand."""
    return tag("details", tag("summary", summary), *children)


def listed(items: Iterable[str]) -> Html:
    """Return an unordered list; nothing for no items."""
    found = [tag("li", item) for item in items]
    return tag("ul", found) if found else Html("")


def json_data(value: Any) -> Html:
    """Return plain data as JSON that may stand inside a script element."""
    written = jsonio.dumps(value).decode()
    for char, replacement in _IN_SCRIPT.items():
        written = written.replace(char, replacement)
    return Html(written)
