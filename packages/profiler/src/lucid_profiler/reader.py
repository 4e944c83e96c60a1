"""Reading a report into its records.

Half a last line, or no `end`, is what a killed run leaves: a `Report` is still given, with warnings. Damage before the
last line is a `ReportError` that names it.
"""

import os
import re
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from lucid_profiler.chain import Line, read_lines
from lucid_profiler.codec import from_plain
from lucid_profiler.errors import ReportError
from lucid_profiler.records import (
    KNOWN_METHODS,
    METHOD,
    RECORD_TYPES,
    SCHEMA,
    End,
    Env,
    Header,
    Kernels,
    Located,
    Pair,
    Record,
    Run,
    Samples,
    State,
    Summary,
)

__all__ = ["Report", "read_report"]

R = TypeVar("R", bound=Record)

_SCHEMA = re.compile(r"lucid\.report/(\d{1,9})\.(\d{1,9})", re.ASCII)
_MIN_ALPHA = 1e-9
_LINE_KEYS = frozenset({"t", "seq", "prev"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report as read, or as it stands while it is being written."""

    path: str
    """The file as the user named it, `-` for standard input."""
    header: Header
    envs: tuple[Env, ...] = ()
    runs: tuple[Run, ...] = ()
    states: tuple[State, ...] = ()
    samples: tuple[Samples, ...] = ()
    kernels: tuple[Kernels, ...] = ()
    located: tuple[Located, ...] = ()
    pairs: tuple[Pair, ...] = ()
    summary: Summary | None = None
    end: End | None = None
    warnings: tuple[str, ...] = ()
    """What a reader should be told, one sentence each."""
    torn_line: int | None = None
    """Number of the last line if it is not whole; its record counts if only the line end is missing."""
    complete: bool = False
    """Whether the `end` record is there and no line is torn."""
    unknown: tuple[tuple[str, int], ...] = ()
    """Record kinds and keys that this version does not know, with their counts."""


def read_report(path: str | os.PathLike[str], *, allow_partial: bool = True) -> Report:
    """Read a report and check its chain.

    Args:
        path: A file, or `-` for standard input.
        allow_partial: Whether a torn last line or a missing `end` is a warning; else it is an error.

    Raises:
        ReportError: If the file cannot be read, is empty, is no report, is of another major version, is damaged
            before its last line, or is partial where that is not allowed.
    """
    name = os.fspath(path)
    try:
        with _opened(name) as stream:
            report = _Reading(name).read(stream)
    except OSError as error:
        raise ReportError(name, None, f"the file cannot be read: {error.strerror or error}") from error
    if not allow_partial and not report.complete:
        why = "the report is not whole: its last line is torn" if report.torn_line else "the report has no end record"
        raise ReportError(name, report.torn_line, f"{why}; --allow-partial uses what is there")
    return report


def _opened(path: str) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb")


def _check_schema(schema: Any) -> str | None:
    """Return a warning for a newer minor version; raise ValueError for anything that cannot be read."""
    match = _SCHEMA.fullmatch(schema) if isinstance(schema, str) else None
    ours = _SCHEMA.fullmatch(SCHEMA)
    if match is None or ours is None:
        raise ValueError(f"the schema is {schema!r}, expected {SCHEMA}: this is no report of lucid")
    (major, minor), (our_major, our_minor) = map(int, match.groups()), map(int, ours.groups())
    if major > our_major:
        raise ValueError(f"the report is written in {schema}, this lucid reads {SCHEMA}: upgrade lucid to read it")
    if major < our_major:
        raise ValueError(f"the report is written in {schema}, older than {SCHEMA}, which is no longer read")
    return f"the report is written in the newer {schema}; what {SCHEMA} lacks is ignored" if minor > our_minor else None


def _check_header(header: Header) -> None:
    names = [arm.name for arm in header.arms]
    if len(set(names)) < len(names):
        raise ValueError(f"header.arms has a name twice: {', '.join(names)}")
    if not _MIN_ALPHA <= header.alpha < 1:
        raise ValueError(f"header.alpha is {header.alpha}, expected at least {_MIN_ALPHA} and below 1")


class _Reading:
    """The records of one file while they are being collected."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._records: list[Record] = []
        self._unknown: Counter[str] = Counter()
        self._warnings: list[str] = []
        self._seen: set[tuple[object, ...]] = set()
        self._torn_line: int | None = None
        self._problem: str | None = None

    def read(self, stream: BinaryIO) -> Report:
        for line in read_lines(self._path, stream):
            if line.problem is not None:
                self._torn_line, self._problem = line.number, line.problem
                self._warnings.append(f"line {line.number} is the last one and not whole: {line.problem}")
            if line.fields is not None:
                try:
                    self._add(line, line.fields)
                except ValueError as error:
                    raise ReportError(self._path, line.number, str(error)) from error
        return self._report()

    def _add(self, line: Line, fields: dict[str, Any]) -> None:
        kind = fields["t"]
        if line.number == 1:
            self._check_first(kind, fields)
        elif kind == Header.kind:
            raise ValueError("a second header: two reports were joined")
        if self._records and isinstance(self._records[-1], End):
            raise ValueError("a record after the end of the report")
        if kind not in RECORD_TYPES:
            self._unknown[f"record {kind}"] += 1
            return
        body = {key: value for key, value in fields.items() if key not in _LINE_KEYS}
        record = from_plain(RECORD_TYPES[kind], body, self._unknown)
        self._check_unique(record)
        if isinstance(record, Header):
            _check_header(record)
        if isinstance(record, End) and record.num_records != line.number - 1:
            raise ValueError(f"the end counts {record.num_records} records, there are {line.number - 1}")
        self._records.append(record)

    def _check_first(self, kind: Any, fields: dict[str, Any]) -> None:
        if kind != Header.kind:
            raise ValueError(f"the first record is {kind!r}, not a header")
        if warning := _check_schema(fields.get("schema")):
            self._warnings.append(warning)
        if fields.get("method") not in KNOWN_METHODS:
            self._warnings.append(f"the report follows the method {fields.get('method')!r}, this lucid {METHOD!r}")

    def _check_unique(self, record: Record) -> None:
        if isinstance(record, Run):
            key: tuple[object, ...] = ("run", record.run)
        elif isinstance(record, Pair):
            key = ("pair", record.pair, *record.runs)
        elif isinstance(record, Summary):
            key = ("summary",)
        else:
            return
        if key in self._seen:
            raise ValueError(f"{' '.join(map(str, key))} appears a second time")
        self._seen.add(key)

    def _all(self, kind: type[R]) -> tuple[R, ...]:
        return tuple(record for record in self._records if isinstance(record, kind))

    def _one(self, kind: type[R]) -> R | None:
        return next((record for record in reversed(self._records) if isinstance(record, kind)), None)

    def _report(self) -> Report:
        header, end = self._one(Header), self._one(End)
        if header is None:
            raise ReportError(self._path, 1, f"there is no whole header: {self._problem}")
        if end is None:
            self._warnings.append("the report has no end record: its writer was stopped")
        if self._unknown:
            names = ", ".join(f"{name} ({count})" for name, count in sorted(self._unknown.items()))
            self._warnings.append(f"ignored what this version does not know: {names}")
        return Report(
            path=self._path,
            header=header,
            envs=self._all(Env),
            runs=self._all(Run),
            states=self._all(State),
            samples=self._all(Samples),
            kernels=self._all(Kernels),
            located=self._all(Located),
            pairs=self._all(Pair),
            summary=self._one(Summary),
            end=end,
            warnings=tuple(self._warnings),
            torn_line=self._torn_line,
            complete=end is not None and self._torn_line is None,
            unknown=tuple(sorted(self._unknown.items())),
        )
