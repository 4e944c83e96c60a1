"""The errors of lucid_profiler.

LucidError
├── ReportError               a report cannot be read, is damaged, or is too new
├── NotComparableError        two reports do not measure the same thing
└── EnvironmentUnusableError  this machine cannot do what was asked
"""

from collections.abc import Sequence

__all__ = ["EnvironmentUnusableError", "LucidError", "NotComparableError", "ReportError"]


class LucidError(Exception):
    """Whatever lucid itself refuses; catch it to catch all of its errors."""


class ReportError(LucidError):
    """A report that cannot be read.

    Args:
        path: The file as the user named it, `-` for standard input.
        line: Line number from 1, or None when no single line is to blame.
        message: What is wrong and, where there is one, the remedy.
    """

    def __init__(self, path: str, line: int | None, message: str) -> None:
        super().__init__(path, line, message)
        self.path = path
        self.line = line
        self.message = message

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}: line {self.line}"
        return f"{where}: {self.message}"


class NotComparableError(LucidError):
    """Two reports that cannot be compared.

    Args:
        reasons: Every obstacle, one sentence each, most important first.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__(tuple(reasons))
        self.reasons = tuple(reasons)

    def __str__(self) -> str:
        return "the reports cannot be compared: " + "; ".join(self.reasons)


class EnvironmentUnusableError(LucidError):
    """A machine, driver or permission that does not allow what was asked; the message says which and what to do."""
