"""What the agent writes down besides steps: one JSON line an entry, one write a line, and a count of its own faults."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from lucid_profiler.whole_lines import WholeLines

__all__ = ["LOADED_SUFFIX", "Guard", "Journal"]

LOADED_SUFFIX = ".loaded"  # of the empty file that says that a process has an agent
_MAX_FAULTS_NAMED = 16


class Guard:
    """A context in which the agent may fail: the fault is counted and named, and the program goes on."""

    def __init__(self) -> None:
        self.num_errors = 0
        self.errors: list[str] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.note(error)
        return True

    def note(self, error: Exception) -> None:
        """Count `error`, and keep its words if they are new and among the first."""
        self.num_errors += 1
        text = f"{type(error).__name__}: {error}"[:500]
        if len(self.errors) < _MAX_FAULTS_NAMED and text not in self.errors:
            self.errors.append(text)


class Journal:
    """Lines of one process, created at the first one.

    Args:
        path: file to create.

    Attributes:
        complete: whether the last line written is the one of kind `end`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._lines: WholeLines | None = None
        self.complete = False

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line.

        Raises:
            OSError: the line cannot be written; the lines after it are whole all the same.
            TypeError: a field holds something that JSON lines cannot carry.
        """
        from lucid_profiler import jsonio  # noqa: PLC0415 - a program that records nothing never loads orjson

        line = jsonio.dumps({"kind": kind, **fields}) + b"\n"
        self._opened().append(line)
        self.complete = kind == "end"

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = self._lines = None

    def _opened(self) -> WholeLines:
        if self._lines is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._lines = WholeLines(self._fd)
        return self._lines
