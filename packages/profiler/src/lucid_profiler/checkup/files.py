"""Small files of the kernel, read whole; what cannot be read is None with a reason."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Text", "read_text", "reason_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The text of a file without the blanks around it, or None and why."""

    text: str | None
    reason: str | None = None


def read_text(path: Path) -> Text:
    """Read a file; never raises."""
    try:
        return Text(text=path.read_text(encoding="utf-8", errors="replace").strip())
    except OSError as error:
        return Text(text=None, reason=reason_of(error))


def reason_of(error: OSError) -> str:
    """Return the code of a refusal: not_found, no_permission, or the system's own name for it."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "not_found"
    return "no_permission" if isinstance(error, PermissionError) else "unreadable"
