"""What happens to report files, how each command ends on it, and what it says: the table of docs/report.md as code."""

import gzip
import re
from collections.abc import Callable
from dataclasses import dataclass

from lucid_profiler import jsonio
from reports.good import relinked

__all__ = ["DAMAGES", "HARMLESS", "Damage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One way to spoil a good report."""

    name: str
    change: Callable[[bytes], bytes]
    line: int | None
    """The line that is named, from 1, from the end if negative; None where no line is to blame."""
    text: str
    """What is said of it."""
    is_partial: bool = False
    """Whether what is whole can still be used: `show` and `export` do, the others where they are told to."""


def _lines(change: Callable[[list[bytes]], object]) -> Callable[[bytes], bytes]:
    def changed(good: bytes) -> bytes:
        lines = good.splitlines(keepends=True)
        change(lines)
        return b"".join(lines)

    return changed


def _edited(good: bytes) -> bytes:
    return good.replace(b'"value":120.85', b'"value":110.85', 1)


def _in_a_character(good: bytes) -> bytes:
    """Cut within the bytes of the first letter that has two of them, which the header holds, and two lines earlier."""
    lines = good.splitlines(keepends=True)
    place = next(index for index, line in enumerate(lines) if index and "ä".encode() in line)
    return b"".join(lines[:place]) + lines[place][: lines[place].index("ä".encode()) + 1]


def _newer(schema: str) -> Callable[[bytes], bytes]:
    def changed(good: bytes) -> bytes:
        records = [jsonio.loads(line) for line in good.splitlines()]
        records[0]["schema"] = schema
        return relinked(records)

    return changed


def _run_twice(good: bytes) -> bytes:
    records = [jsonio.loads(line) for line in good.splitlines()]
    records.insert(3, records[2])
    return relinked(records)


def _flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    "as it was written": lambda good: good,
    "a byte-order mark at the beginning": lambda good: b"\xef\xbb\xbf" + good,
    "CRLF line ends": lambda good: good.replace(b"\n", b"\r\n"),
    "gzip": gzip.compress,
    "gzip in two members": lambda good: gzip.compress(good[:1000]) + gzip.compress(good[1000:]),
    "a newer minor schema": _newer("lucid.report/1.99"),
}
"""What is done to reports without harm."""

DAMAGES = (
    Damage(name="empty", change=lambda good: b"", line=None, text="the file is empty"),
    Damage(name="another file", change=lambda good: b"a,b\n1,2\n", line=1, text="the line cannot be read"),
    Damage(name="the header is torn", change=lambda good: good[:50], line=1, text="there is no whole header"),
    Damage(name="the last line end is missing", change=lambda good: good[:-1], line=-1, text="", is_partial=True),
    Damage(name="half a last line", change=lambda good: good[:-30], line=-1, text="", is_partial=True),
    Damage(name="cut inside a character", change=_in_a_character, line=-1, text="", is_partial=True),
    Damage(
        name="no end",
        change=_lines(lambda lines: lines.pop()),
        line=None,
        text="the report has no end record",
        is_partial=True,
    ),
    Damage(
        name="zeros after a crash",
        change=lambda good: b"".join(good.splitlines(keepends=True)[:-1]) + b"\x00" * 4096,
        line=-1,
        text="",
        is_partial=True,
    ),
    Damage(
        name="a digit was edited",
        change=_edited,
        line=3,
        text="the line was edited: the next line knows it otherwise",
    ),
    Damage(
        name="a number of samples was edited",
        change=lambda good: good.replace(b"312345", b"312346", 1),
        line=8,
        text="the line was edited: the next line knows it otherwise",
    ),
    Damage(
        name="a link was edited",
        change=lambda good: re.sub(rb'("prev":")[0-9a-f]{4}([0-9a-f]+","run":0,"seq":3)', rb"\g<1>ffff\2", good),
        line=4,
        text="the line was edited: its link to the line before is wrong",
    ),
    Damage(
        name="a line is missing", change=_lines(lambda lines: lines.pop(3)), line=4, text="1 record(s) before this line"
    ),
    Damage(
        name="a line is there twice",
        change=_lines(lambda lines: lines.insert(4, lines[3])),
        line=5,
        text="the line repeats line 4",
    ),
    Damage(
        name="two lines changed places",
        change=_lines(lambda lines: lines.insert(3, lines.pop(4))),
        line=4,
        text="1 record(s) before this line are missing",
    ),
    Damage(name="the same run twice", change=_run_twice, line=4, text="run 0 appears a second time"),
    Damage(
        name="a key twice in one object",
        change=lambda good: good.replace(b'"seq":1,', b'"seq":1,"seq":1,'),
        line=2,
        text="the key 'seq' appears twice",
    ),
    Damage(
        name="two reports in one file",
        change=lambda good: good + b"\xef\xbb\xbf" + good,
        line=-1,
        text="a byte-order mark in the middle: two files were joined",
    ),
    Damage(name="UTF-16", change=lambda good: good.decode().encode("utf-16"), line=1, text="the file is UTF-16"),
    Damage(
        name="lone carriage returns",
        change=lambda good: good.replace(b"\n", b"\r"),
        line=1,
        text="there is no whole header: the line holds a carriage return",
    ),
    Damage(name="an empty line", change=lambda good: good.replace(b"\n", b"\n\n", 1), line=2, text="the line is empty"),
    Damage(
        name="bytes that are no UTF-8",
        change=lambda good: good.replace("ä".encode(), b"\xe4", 1),
        line=1,
        text="the line is not UTF-8 at byte",
    ),
    Damage(
        name="a line separator of Unicode instead of a line end",
        change=lambda good: good.replace(b"\n", "\u2028".encode(), 1),
        line=1,
        text="the line cannot be read",
    ),
    Damage(name="a newer major schema", change=_newer("lucid.report/2.0"), line=1, text="upgrade lucid to read it"),
    Damage(
        name="gzip, cut off",
        change=lambda good: gzip.compress(good)[:-20],
        line=-1,
        text="the compressed data end before their end",
        is_partial=True,
    ),
    Damage(
        name="gzip without its check sum",
        change=lambda good: gzip.compress(good)[:-8],
        line=-1,
        text="the compressed data end before their end",
        is_partial=True,
    ),
    Damage(
        name="gzip with a wrong check sum",
        change=lambda good: _flipped(gzip.compress(good), -8),
        line=-1,
        text="the compressed data are damaged",
    ),
    Damage(
        name="gzip and something else",
        change=lambda good: gzip.compress(good) + b"something else",
        line=-1,
        text="the compressed data are damaged",
    ),
)
"""What spoils reports."""
