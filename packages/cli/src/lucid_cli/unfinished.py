"""A report that had stopped: whether it can go on, what of its file stays, and how it is opened for more."""

import os
import stat
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import click

from lucid_cli.settings import Settings, settings_of
from lucid_profiler import jsonio
from lucid_profiler.errors import NotComparableError
from lucid_profiler.file_lock import lock
from lucid_profiler.reader import Report, read_report
from lucid_profiler.records import METHOD, End, Env, Summary, link
from lucid_profiler.writer import Writer

_DERIVED = frozenset({Summary.kind, End.kind})
_MAX_DROPPED = 3  # summary, end, and half a line
_BOM = b"\xef\xbb\xbf"
# https://www.rfc-editor.org/rfc/rfc1952#section-2.3.1, https://www.rfc-editor.org/rfc/rfc8878#section-3.1.1
_UNPACKERS = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd"}

__all__ = ["CannotResumeError", "Tail", "Unfinished", "read_unfinished"]


class CannotResumeError(NotComparableError):
    """A report whose next runs would not measure the same thing.

    Args:
        name: the report as the user named it.
        reasons: every obstacle, one sentence each.
    """

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        super().__init__(reasons)
        self.name = name

    def __str__(self) -> str:
        return f"--resume {self.name}: {'; '.join(self.reasons)}; start a new report with -o"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Where the records end that stay.

    Attributes:
        seq: how many there are.
        prev: link to the last of them.
        num_bytes: their length.
        size: of the whole file.
        is_torn: whether half a line stands behind them.
        has_derived: whether summary or end stand behind them, which are derived anew.
    """

    seq: int
    prev: str
    num_bytes: int
    size: int
    is_torn: bool
    has_derived: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A report that can go on.

    Attributes:
        name: its file as the user named it.
        path: its file, which is no link.
        report: its records, without summary and end.
        settings: how its runs were made.
        host: the last facts of the machine.
        tail: where the file is continued.
        has_ended: whether it had an end, though not a good one.
    """

    name: str
    path: Path
    report: Report
    settings: Settings
    host: Env
    tail: Tail
    has_ended: bool = False

    def what_goes(self) -> list[str]:
        """Return in words what is cut off of the file when it is opened."""
        gone = [f"{self.name}: its last line is torn and is cut off"] if self.tail.is_torn else []
        return gone + ([f"{self.name}: its summary and its end are written anew"] if self.tail.has_derived else [])

    def open(self) -> Writer:
        """Open the file behind its records; a torn line, a summary and an end are cut off.

        Raises:
            OSError: it cannot be opened, is being written by another process, or was changed since it was read.
        """
        if self.path.stat().st_size != self.tail.size:
            raise OSError(None, "the report was changed since it was read; start again", str(self.path))
        return Writer.append(self.path, seq=self.tail.seq, prev=self.tail.prev, num_bytes=self.tail.num_bytes)


def read_unfinished(name: str) -> Unfinished:
    """Read a report that is to go on.

    Raises:
        UsageError: it is no file of its own, is packed, is being written, is whole, has no run, or does not say how
            its runs were made.
        CannotResumeError: it follows another method.
        ReportError: it cannot be read.
    """
    path = _checked(name)
    report = read_report(path)
    if report.end is not None and report.end.status == "complete" and report.complete:
        raise click.UsageError(f"--resume {name}: the report is whole, nothing is left to run; start a new one with -o")
    if report.header.method != METHOD:
        raise CannotResumeError(name, [f"it follows the method {report.header.method}, this lucid {METHOD}"])
    host = next((env for env in reversed(report.envs) if env.scope == "host"), None)
    if host is None and not report.runs:
        raise click.UsageError(f"--resume {name}: the report stopped before its first run; start a new one with -o")
    settings = None if host is None else settings_of(host)
    if host is None or settings is None or not report.header.slots:
        raise click.UsageError(
            f"--resume {name}: the report does not say how its runs were made, as those of older versions; "
            "start a new one with -o"
        )
    tail = _tail(path, report.torn_line)
    return Unfinished(
        name=name,
        path=path,
        report=replace(report, summary=None, end=None, complete=False),
        settings=settings,
        host=host,
        tail=tail,
        has_ended=report.end is not None,
    )


def _tail(path: Path, torn_line: int | None) -> Tail:
    """Return where the records end that stay."""
    last: deque[tuple[int, int, bytes]] = deque(maxlen=_MAX_DROPPED + 1)
    num_bytes = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            num_bytes += len(raw)
            last.append((number, num_bytes, raw))
    is_torn, has_derived = torn_line is not None and _kind(last[-1][2]) is None, False
    if is_torn:
        last.pop()
    while _kind(last[-1][2]) in _DERIVED:
        has_derived = True
        last.pop()
    number, end, raw = last[-1]
    text = raw.removesuffix(b"\n").removesuffix(b"\r").removeprefix(_BOM if number == 1 else b"")
    return Tail(seq=number, prev=link(text), num_bytes=end, size=num_bytes, is_torn=is_torn, has_derived=has_derived)


def _kind(raw: bytes) -> str | None:
    """Return the kind of a record; None for half of one."""
    with suppress(ValueError):
        fields = jsonio.loads(raw.removeprefix(_BOM).strip())
        return fields.get("t") if isinstance(fields, dict) else None
    return None


def _checked(name: str) -> Path:
    """Return the file of a report, which must be one that can be written on.

    Raises:
        UsageError: it is not.
    """
    try:
        path = Path(name).resolve(strict=True)
        if not stat.S_ISREG(path.stat().st_mode):
            raise click.UsageError(f"--resume {name}: only a report in a file can go on")
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise click.UsageError(f"--resume {name}: the report cannot be opened: {error.strerror}") from error
    try:
        _check_unpacked(name, fd)
        lock(fd)
    except BlockingIOError as error:
        raise click.UsageError(
            f"--resume {name}: another lucid is writing the report; wait until it has ended"
        ) from error
    finally:
        os.close(fd)
    return path


def _check_unpacked(name: str, fd: int) -> None:
    first = os.pread(fd, max(map(len, _UNPACKERS)), 0)
    unpacker = next((word for start, word in _UNPACKERS.items() if first.startswith(start)), None)
    if unpacker is not None:
        raise click.UsageError(f"--resume {name}: the report is packed; unpack it first ({unpacker})")
