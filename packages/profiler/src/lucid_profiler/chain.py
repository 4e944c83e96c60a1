"""The lines of a report: unpacked, split, parsed and checked against their numbers and links.

Two lines are held in memory at a time. A line that is damaged is named; only the last one may be unreadable.
"""

import functools
import importlib
import io
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from lucid_profiler import jsonio
from lucid_profiler.errors import ReportError
from lucid_profiler.records import link

__all__ = ["MAX_LINE_BYTES", "MAX_UNPACKED_BYTES", "Line", "read_lines"]

MAX_LINE_BYTES = 64 * 2**20
MAX_UNPACKED_BYTES = 4 * 2**30
"""A report that is packed must not be longer: a few bytes can unpack to any length."""
_CHUNK_BYTES = 2**16
_GZIP_START = b"\x1f\x8b"
_ZSTD_START = b"\x28\xb5\x2f\xfd"  # https://www.rfc-editor.org/rfc/rfc8878#section-3.1.1
_ZSTD_MODULES = ("compression.zstd", "backports.zstd", "zstandard")
_ZSTD_SLICE_BYTES = 256  # a block of 4 bytes can stand for 128 KiB
_CUT_OFF = "the compressed data end before their end"
_BOM = b"\xef\xbb\xbf"
# A record of samples as the writer leaves it, keys sorted: its columns come first, these are the rest of the line.
_SAMPLES_BEGIN = b'{"columns":{'
_SAMPLES_END = re.compile(
    rb'\},"prev":"(?P<prev>[0-9a-f]+)","run":\d+,"seq":(?P<seq>\d{1,15}),"series":"[^"\\]*","t":"samples"\}\Z'
)
_MAX_END_BYTES = 400
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
    is_skipped: bool = False
    """Whether only kind, number and link were read of it."""


def read_lines(path: str, stream: BinaryIO, *, skip_samples: bool = False) -> Iterator[Line]:
    """Yield the lines of a report, each checked to follow the one before.

    Args:
        path: What to call the file in errors.
        stream: Its bytes, as they are or packed with gzip or Zstandard; a leading byte-order mark and CRLF line ends
            are accepted.
        skip_samples: Whether to leave the columns of samples unread; their bytes are checked against the chain.

    Raises:
        ReportError: If the file is empty or UTF-16, if it cannot be unpacked, if a line is too long, if a line before
            the last cannot be read, or if a line was edited, repeated, moved or taken away.
    """
    lines = _parse_lines(path, stream, skip_samples=skip_samples)
    previous: Line | None = None
    for line in lines:
        if line.fields is not None and (problem := _check_number(previous, line)):
            raise ReportError(path, line.number, problem)
        if line.fields is not None and not _follows(previous, line):
            raise _link_error(path, line, next(lines, None))
        yield line
        previous = line


def _parse_lines(path: str, stream: BinaryIO, *, skip_samples: bool) -> Iterator[Line]:
    unpacked = _Unpacked(stream)
    read_line = io.BufferedReader(unpacked, _CHUNK_BYTES).readline
    number = 1
    raw = _read_raw(path, 1, read_line)
    if not raw:
        raise ReportError(path, None, unpacked.ending or "the file is empty")
    if raw.startswith(_UTF16_STARTS):
        raise ReportError(path, 1, "the file is UTF-16, reports are UTF-8; it was rewritten by another program")
    raw = raw.removeprefix(_BOM)
    while raw:
        following = _read_raw(path, number + 1, read_line)
        if not following:
            yield _parse(path, number, raw, is_last=True, ending=unpacked.ending)
        else:
            yield (_skip(number, raw) if skip_samples else None) or _parse(path, number, raw)
        number, raw = number + 1, following


def _read_raw(path: str, number: int, read_line: Callable[[int], bytes]) -> bytes:
    try:
        raw = read_line(MAX_LINE_BYTES + 1)
    except _UnpackError as error:
        raise ReportError(path, number, str(error)) from error
    if len(raw) > MAX_LINE_BYTES:
        raise ReportError(path, number, f"the line is longer than {MAX_LINE_BYTES} bytes; this is no report")
    return raw


def _skip(number: int, raw: bytes) -> Line | None:
    """Return a line of samples without its columns; None if it is another one, or written otherwise."""
    if not raw.startswith(_SAMPLES_BEGIN):
        return None
    text = _without_end(raw)
    end = _SAMPLES_END.search(text, max(0, len(text) - _MAX_END_BYTES))
    if end is None:
        return None
    fields = {"t": "samples", "prev": end["prev"].decode(), "seq": int(end["seq"])}
    return Line(number=number, text=text, fields=fields, is_skipped=True)


def _without_end(raw: bytes) -> bytes:
    return raw.removesuffix(b"\n").removesuffix(b"\r")


def _parse(path: str, number: int, raw: bytes, *, is_last: bool = False, ending: str | None = None) -> Line:
    text = _without_end(raw)
    try:
        fields = jsonio.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"a record is an object, this is {type(fields).__name__}")  # noqa: TRY004, TRY301 - as loads
    except ValueError as error:
        problem = ending or _describe(text, error)
        if is_last:
            return Line(number=number, text=text, fields=None, problem=problem)
        raise ReportError(path, number, problem) from error
    missing = ending or (None if raw.endswith(b"\n") else "it has no line end")
    return Line(number=number, text=text, fields=fields, problem=missing)


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


class _UnpackError(Exception):
    """Compressed data that cannot be unpacked."""


class _Unpacker(Protocol):
    """What unpacks one stream of compressed data, as `bz2.BZ2Decompressor` does."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Unpacked(io.RawIOBase):
    """The bytes of a stream, unpacked if they are gzip or Zstandard.

    Attributes:
        ending: what is wrong where compressed data ended too early; known at the end.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.ending: str | None = None
        self._chunks = _chunks(stream)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            try:
                self._rest = memoryview(next(self._chunks))
            except StopIteration as stop:
                self.ending = self.ending or stop.value
                return 0
        length = min(len(buffer), len(self._rest))
        buffer[:length] = self._rest[:length]
        self._rest = self._rest[length:]
        return length


def _chunks(stream: BinaryIO) -> Generator[bytes, None, str | None]:
    """Yield the bytes of a stream; return what is wrong with its end."""
    first = stream.read(_CHUNK_BYTES)
    if first.startswith(_GZIP_START):
        return (yield from _unpack(first, stream, _Gzip, (zlib.error,)))
    if first.startswith(_ZSTD_START):
        return (yield from _unpack(first, stream, *_zstd()))
    while first:
        yield first
        first = stream.read(_CHUNK_BYTES)
    return None


def _unpack(
    data: bytes, stream: BinaryIO, begin: Callable[[], _Unpacker], errors: tuple[type[Exception], ...]
) -> Generator[bytes, None, str | None]:
    """Yield what compressed data hold, one stream after the other."""
    num_bytes = 0
    unpacker = begin()
    while True:
        try:
            chunk = unpacker.decompress(data, _CHUNK_BYTES)
        except errors as error:
            raise _UnpackError(f"the compressed data are damaged: {error}") from error
        num_bytes += len(chunk)
        if num_bytes > MAX_UNPACKED_BYTES:
            limit = f"{MAX_UNPACKED_BYTES} bytes"
            raise _UnpackError(f"the file unpacks to more than {limit}; if it is a report, unpack it first")
        if chunk:
            yield chunk
        if unpacker.eof:
            data = unpacker.unused_data or stream.read(_CHUNK_BYTES)
            if not data:
                return None
            unpacker = begin()
        elif unpacker.needs_input:
            data = stream.read(_CHUNK_BYTES)
            if not data:
                return _CUT_OFF
        else:
            data = b""


class _Gzip:
    """zlib's decompressor as an `_Unpacker`."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


class _Zstandard:
    """The decompressor of the package `zstandard`, which has no limit of its own, as an `_Unpacker`."""

    def __init__(self, module: Any) -> None:
        self._one = module.ZstdDecompressor().decompressobj()
        self._waiting = b""

    @property
    def eof(self) -> bool:
        return bool(self._one.eof)

    @property
    def needs_input(self) -> bool:
        return not self._waiting

    @property
    def unused_data(self) -> bytes:
        return bytes(self._one.unused_data) + self._waiting

    def decompress(self, data: bytes, max_length: int) -> bytes:
        del max_length  # the slices keep what comes out at once small
        data = self._waiting + data
        self._waiting = data[_ZSTD_SLICE_BYTES:]
        return bytes(self._one.decompress(data[:_ZSTD_SLICE_BYTES]))


def _zstd() -> tuple[Callable[[], _Unpacker], tuple[type[Exception], ...]]:
    """Return what unpacks Zstandard here, and its errors."""
    for name in _ZSTD_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        begin = functools.partial(_Zstandard, module) if name == "zstandard" else module.ZstdDecompressor
        return begin, (module.ZstdError,)
    raise _UnpackError(
        "the file is compressed with Zstandard, which Python reads from 3.14 on; before, install backports.zstd, or "
        "unpack it with unzstd"
    )
