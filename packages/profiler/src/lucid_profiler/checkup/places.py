"""Where reports and temporary files go: whether they can be written, and how much room there is. Nothing is written."""

import os
from collections.abc import Mapping
from pathlib import Path

from lucid_profiler.checkup.files import reason_of
from lucid_profiler.checkup.finding import Finding, Level, size_words, unknown

__all__ = ["look_at_places", "temporary_directory"]

MIN_FREE_BYTES = 2**30
MIN_USABLE_BYTES = 16 * 2**20
_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_FALLBACKS = ("/tmp", "/var/tmp", "/usr/tmp")  # noqa: S108 - where Python itself looks


def look_at_places(directory: Path, environ: Mapping[str, str]) -> list[Finding]:
    """Return the findings about the directory of the reports and that of temporary files."""
    reports = _room("disk_reports", directory, name="the current directory", worst="warning")
    temporary = temporary_directory(environ, directory)
    if temporary is None:
        words = "no directory for temporary files can be written"
        return [reports, Finding(code="disk_temp", level="problem", found=words)]
    return [reports, _room("disk_temp", temporary, name=str(temporary), worst="problem")]


def temporary_directory(environ: Mapping[str, str], directory: Path) -> Path | None:
    """Return where Python would put temporary files: the first of its candidates that can be written.

    Python finds out by writing there; this only asks.
    """
    named = [environ[name] for name in _VARIABLES if environ.get(name)]
    candidates = [*map(Path, (*named, *_FALLBACKS)), directory]
    return next((path for path in candidates if path.is_dir() and _is_writable(path)), None)


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK | os.X_OK)


def _room(code: str, path: Path, *, name: str, worst: Level) -> Finding:
    try:
        room = os.statvfs(path)
    except OSError as error:
        return unknown(code, reason_of(error), f"{name}: {error.strerror}", level=worst, subject=str(path))
    free = room.f_bavail * room.f_frsize
    value = {"free_bytes": free, "writable": _is_writable(path)}
    if not value["writable"]:
        return Finding(code=code, level=worst, found=f"{name} cannot be written", value=value, subject=str(path))
    level: Level = worst if free < MIN_USABLE_BYTES else "warning" if free < MIN_FREE_BYTES else "ok"
    words = f"{size_words(free)} free in {name}"
    return Finding(code=code, level=level, found=words, value=value, subject=str(path))
