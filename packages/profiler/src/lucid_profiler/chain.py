"""The lines of a report: split, parsed and checked against their numbers and links.

Two lines are held in memory at a time. A line that is damaged is named; only the last one may be unreadable.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from lucid_profiler import jsonio
from lucid_profiler.errors import ReportError
from lucid_profiler.records import link

__all__ = ["MAX_LINE_BYTES", "Line", "read_lines"]

MAX_LINE_BYTES = 64 * 2**20
_BOM = b"\xef\xbb\xbf"
_GZIP_START = b"\x1f\x8b"
_UTF16_STARTS = (b"\xff\xfe", b"\xfe\xff", b"{\x00", b"\x00{")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a report."""

    number: int
    """From 1."""
    text: bytes
    """Without its line end."""
    fields: dict[str, Any] | None
    """None for a last line that cannot be read."""
    problem: str | None = None
    """What a last line lacks to be whole."""


def read_lines(path: str, stream: BinaryIO) -> Iterator[Line]:
    """Yield the lines of a report, each checked to follow the one before.

    Args:
        path: What to call the file in errors.
        stream: Its bytes; a leading byte-order mark and CRLF line ends are accepted.

    Raises:
        ReportError: If the file is empty, compressed or UTF-16, if a line is too long, if a line before the last
            cannot be read, or if a line was edited, repeated, moved or taken away.
    """
    lines = _parse_lines(path, stream)
    previous: Line | None = None
    for line in lines:
        if line.fields is not None and (problem := _check_number(previous, line)):
            raise ReportError(path, line.number, problem)
        if line.fields is not None and not _follows(previous, line):
            raise _link_error(path, line, next(lines, None))
        yield line
        previous = line


def _parse_lines(path: str, stream: BinaryIO) -> Iterator[Line]:
    number = 1
    raw = _read_raw(path, 1, stream)
    if not raw:
        raise ReportError(path, None, "the file is empty")
    if raw.startswith(_UTF16_STARTS):
        raise ReportError(path, 1, "the file is UTF-16, reports are UTF-8; it was rewritten by another program")
    if raw.startswith(_GZIP_START):
        raise ReportError(path, None, "the file is compressed with gzip; decompress it first, with gunzip or zcat")
    raw = raw.removeprefix(_BOM)
    while raw:
        following = _read_raw(path, number + 1, stream)
        yield _parse(path, number, raw, is_last=not following)
        number, raw = number + 1, following


def _read_raw(path: str, number: int, stream: BinaryIO) -> bytes:
    raw = stream.readline(MAX_LINE_BYTES + 1)
    if len(raw) > MAX_LINE_BYTES:
        raise ReportError(path, number, f"the line is longer than {MAX_LINE_BYTES} bytes; this is no report")
    return raw


def _parse(path: str, number: int, raw: bytes, *, is_last: bool) -> Line:
    text = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        fields = jsonio.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"a record is an object, this is {type(fields).__name__}")  # noqa: TRY004, TRY301 - as loads
    except ValueError as error:
        problem = _describe(text, error)
        if is_last:
            return Line(number=number, text=text, fields=None, problem=problem)
        raise ReportError(path, number, problem) from error
    return Line(number=number, text=text, fields=fields, problem=None if raw.endswith(b"\n") else "it has no line end")


def _describe(text: bytes, error: ValueError) -> str:
    if not text:
        return "the line is empty"
    if text.startswith(_BOM):
        return "a byte-order mark in the middle: two files were joined"
    if b"\x00" in text:
        return "the line holds NUL bytes, as a crash of the machine leaves them"
    if b"\r" in text:
        return "the line holds a carriage return: line ends must be LF or CRLF"
    if isinstance(error, UnicodeDecodeError):
        return f"the line is not UTF-8 at byte {error.start}"
    return f"the line cannot be read: {error}"


def _check_number(previous: Line | None, line: Line) -> str | None:
    fields = line.fields or {}
    seq = fields.get("seq")
    if type(seq) is not int or "prev" not in fields or not isinstance(fields.get("t"), str):
        return "the line lacks t, seq or prev: it is no record of a report"
    if seq == line.number - 1:
        return None
    if previous is None:
        return f"the first record is number {seq}: the beginning of the report is missing"
    return _explain_number(previous, line, seq)


def _explain_number(previous: Line, line: Line, seq: int) -> str:
    expected = line.number - 1
    if line.text == previous.text:
        return f"the line repeats line {previous.number}"
    if _follows(previous, line):
        return f"the line was edited: its number is {seq} instead of {expected}"
    if seq > expected:
        return f"{seq - expected} record(s) before this line are missing"
    return f"record {seq} appears again: lines were repeated or moved, or two reports were joined"


def _follows(previous: Line | None, line: Line) -> bool:
    expected = "" if previous is None else link(previous.text)
    return line.fields is not None and line.fields["prev"] == expected


def _link_error(path: str, line: Line, following: Line | None) -> ReportError:
    """Blame the line itself if the next one does not know it either, else the line before."""
    edited_itself = following is not None and following.fields is not None and not _follows(line, following)
    if edited_itself or line.number == 1:
        return ReportError(path, line.number, "the line was edited: its link to the line before is wrong")
    doubt = " (or the link of the line after it)" if following is None else ""
    return ReportError(path, line.number - 1, f"the line was edited: the next line knows it otherwise{doubt}")
