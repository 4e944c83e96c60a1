"""One finding: what was looked at, how good it is, its value, why it matters, and what to do."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from lucid_profiler.checkup.catalogue import CATALOGUE, Area

__all__ = ["AREAS", "LEVELS", "Area", "Finding", "Level", "size_words", "unknown"]

Level = Literal["ok", "note", "warning", "problem"]
"""`note`: to be known, or not known; `warning`: makes a measurement noisier or poorer; `problem`: prevents it."""

LEVELS: tuple[Level, ...] = get_args(Level)
"""From good to bad."""
AREAS: tuple[Area, ...] = get_args(Area)

_UNITS = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one look came to.

    Attributes:
        code: A key of `CATALOGUE`.
        level: How good it is.
        found: What was found, in words, with its value.
        value: The same as plain data; None where it is not known.
        reason: Why it is not known, a short code; None where it is.
        subject: What it is about where there are several: a device's UUID, a directory.
    """

    code: str
    level: Level
    found: str
    value: Any = None
    reason: str | None = None
    subject: str | None = None

    def __post_init__(self) -> None:
        if self.code not in CATALOGUE:
            raise ValueError(f"{self.code!r} is no code of the catalogue; add it there")

    @property
    def area(self) -> Area:
        """Return the part of the machine that it is about."""
        return CATALOGUE[self.code].area

    @property
    def why(self) -> str:
        """Return why it matters."""
        return CATALOGUE[self.code].why

    @property
    def remedy(self) -> str:
        """Return what to do where it is not good."""
        return CATALOGUE[self.code].remedy

    def plain(self) -> dict[str, Any]:
        """Return everything about it as plain data."""
        return {
            "area": self.area,
            "code": self.code,
            "level": self.level,
            "found": self.found,
            "value": self.value,
            "reason": self.reason,
            "subject": self.subject,
            "why": self.why,
            "remedy": self.remedy,
        }


def unknown(code: str, reason: str, words: str, *, level: Level = "note", subject: str | None = None) -> Finding:
    """Return the finding that something cannot be told, with the reason as a code and in words."""
    return Finding(code=code, level=level, found=f"unknown: {words}", reason=reason, subject=subject)


def size_words(num_bytes: float) -> str:
    """Return a number of bytes for reading.

    >>> size_words(3 * 2**29)
    '1.5 GiB'
    """
    for size, unit in _UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"
