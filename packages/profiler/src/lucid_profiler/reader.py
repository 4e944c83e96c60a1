"""Reading a report into its records.

Half a last line, or no `end`, is what a killed run leaves: a `Report` is still given, with warnings. Damage before the
last line is a `ReportError` that names it.
"""

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
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
    Resume,
    Run,
    Samples,
    State,
    Summary,
)
from lucid_profiler.shared_digests import StateDecoder

__all__ = ["Report", "read_report"]

R = TypeVar("R", bound=Record)

_SCHEMA = re.compile(r"lucid\.report/(\d{1,9})\.(\d{1,9})", re.ASCII)
_MIN_ALPHA = 1e-9
_LINE_KEYS = frozenset({"t", "seq", "prev"})
_SAMPLES_KEYS = {"run", "series", "columns"}
_NUMBERS = frozenset({int, float, type(None)})
_MAX_UNKNOWN = 20


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
    resumes: tuple[Resume, ...] = ()
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


def read_report(
    path: str | os.PathLike[str],
    *,
    allow_partial: bool = True,
    with_samples: bool = True,
    each: Callable[[int, Record], None] | None = None,
) -> Report:
    """Read a report and check its chain.

    Args:
        path: A file, as it is or packed with gzip or Zstandard, or `-` for standard input.
        allow_partial: Whether a torn last line or a missing `end` is a warning; else it is an error.
        with_samples: Whether to keep the samples, which may be most of the file. Without them their bytes are checked
            against the chain, and what they say is not looked at.
        each: Called with the line number and every record as it is read, samples too whether they are kept or not;
            a ValueError of it is damage of that line.

    Raises:
        ReportError: If the file cannot be read, is empty, is no report, is of another major version, is damaged
            before its last line, or is partial where that is not allowed.
    """
    name = os.fspath(path)
    reading = _Reading(name, with_samples=with_samples, each=each)
    with _uncollected(), closing(_lines(name, skip_samples=each is None and not with_samples)) as lines:
        report = reading.read(lines)
    if not allow_partial and not report.complete:
        torn = f"the report is not whole ({reading.problem}): its last line is torn"
        why = torn if report.torn_line else "the report has no end record"
        raise ReportError(name, report.torn_line, f"{why}; --allow-partial uses what is there")
    return report


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the collector from looking through records again and again while they grow; nothing of them is a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _lines(path: str, *, skip_samples: bool) -> Generator[Line, None, None]:
    try:
        with _opened(path) as stream:
            yield from read_lines(path, stream, skip_samples=skip_samples)
    except OSError as error:
        raise ReportError(path, None, f"the file cannot be read: {error.strerror or error}") from error


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


def _samples(body: dict[str, Any]) -> Samples | None:
    """Return the record of a line of samples without looking at each number by itself; None if it needs that."""
    if body.keys() != _SAMPLES_KEYS or type(body["run"]) is not int or type(body["series"]) is not str:
        return None
    columns = body["columns"]
    if not isinstance(columns, dict) or not all(
        type(values) is list and _NUMBERS.issuperset(map(type, values)) for values in columns.values()
    ):
        return None
    kept = {name: tuple(values) for name, values in columns.items()}
    return Samples(run=body["run"], series=body["series"], columns=kept)


def _check_header(header: Header) -> None:
    names = [arm.name for arm in header.arms]
    if len(set(names)) < len(names):
        raise ValueError(f"header.arms has a name twice: {', '.join(names)}")
    if not _MIN_ALPHA <= header.alpha < 1:
        raise ValueError(f"header.alpha is {header.alpha}, expected at least {_MIN_ALPHA} and below 1")


def _check_resume(resume: Resume, before: Sequence[Record]) -> None:
    earlier = [record for record in before if isinstance(record, Resume)]
    if resume.block != len(earlier) + 1:
        raise ValueError(f"resume.block is {resume.block}, expected {len(earlier) + 1}")
    planned = [slot for record in before if isinstance(record, Header | Resume) for slot in record.slots]
    last_slot = max((slot.slot for slot in planned), default=-1)
    last_pair = max((slot.pair for slot in planned), default=-1)
    if any(slot.slot <= last_slot or slot.pair <= last_pair for slot in resume.slots):
        raise ValueError(f"resume.slots holds numbers up to slot {last_slot} and pair {last_pair} a second time")


class _Reading:
    """The records of one file while they are being collected."""

    def __init__(self, path: str, *, with_samples: bool, each: Callable[[int, Record], None] | None) -> None:
        self._path = path
        self._with_samples = with_samples
        self._each = each
        self._records: list[Record] = []
        self._unknown: Counter[str] = Counter()
        self._states = StateDecoder()
        self._warnings: list[str] = []
        self._seen: set[tuple[object, ...]] = set()
        self._torn_line: int | None = None
        self.problem: str | None = None

    def read(self, lines: Iterable[Line]) -> Report:
        for line in lines:
            if line.problem is not None:
                self._torn_line, self.problem = line.number, line.problem
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
        if line.is_skipped:
            return
        body = {key: value for key, value in fields.items() if key not in _LINE_KEYS}
        record = self._decoded(kind, body)
        self._check(record, line.number)
        if self._each is not None:
            self._each(line.number, record)
        if self._with_samples or not isinstance(record, Samples):
            self._records.append(record)

    def _decoded(self, kind: str, body: dict[str, Any]) -> Record:
        if kind == State.kind:
            return self._states.decode(body, self._unknown)
        plain = _samples(body) if kind == Samples.kind else None
        return plain or from_plain(RECORD_TYPES[kind], body, self._unknown)

    def _check(self, record: Record, line_number: int) -> None:
        """Hold a record against those before it."""
        self._check_unique(record)
        if isinstance(record, Header):
            _check_header(record)
        if isinstance(record, Resume):
            _check_resume(record, self._records)
        if isinstance(record, End) and record.num_records != line_number - 1:
            raise ValueError(f"the end counts {record.num_records} records, there are {line_number - 1}")

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
            raise ReportError(self._path, 1, f"there is no whole header: {self.problem}")
        if end is None:
            self._warnings.append("the report has no end record: its writer was stopped")
        if self._unknown:
            listed = [f"{name} ({count})" for name, count in sorted(self._unknown.items())]
            more = [f"and {len(listed) - _MAX_UNKNOWN} more"] if len(listed) > _MAX_UNKNOWN else []
            names = ", ".join([*listed[:_MAX_UNKNOWN], *more])
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
            resumes=self._all(Resume),
            summary=self._one(Summary),
            end=end,
            warnings=tuple(self._warnings),
            torn_line=self._torn_line,
            complete=end is not None and self._torn_line is None,
            unknown=tuple(sorted(self._unknown.items())),
        )
