"""What the agent writes down besides steps: one JSON line an entry, one write a line, and a count of its own faults."""

import os
import signal
from functools import partial
from inspect import CO_VARARGS
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from lucid_profiler.whole_lines import WholeLines

__all__ = ["Guard", "Journal", "is_of_a_signal"]

_MAX_FAULTS_NAMED = 16


def is_of_a_signal(error: BaseException) -> bool:
    """Return whether a handler of the program's raised `error` while lucid's own code happened to be running.

    The interpreter hands a handler the frame that it interrupts, and that is the one below the handler's own. One that
    has dropped its arguments is known by its code, as long as it is the handler.
    """
    handlers = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_back is not None and _is_given(frame, frame.f_back):
            return True
        handlers = _codes_of_handlers() if handlers is None else handlers
        if frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _codes_of_handlers() -> set[CodeType]:
    """Return the code of each function that handles a signal."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        function = getattr(handler, "__func__", handler)
        code = getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
    return found


def _is_given(frame: FrameType, value: object) -> bool:
    """Return whether `value` is an argument of the function that runs in `frame`, or among its `*arguments`."""
    code = frame.f_code
    has_stars = bool(code.co_flags & CO_VARARGS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + has_stars]
    for name in names:
        found = frame.f_locals.get(name)
        if found is value or (type(found) is tuple and any(one is value for one in found)):
            return True
    return False


class Guard:
    """A context in which the agent may fail: the fault is counted and named, and the program goes on.

    What a signal's handler raises in it is not the agent's, and goes on to the program.
    """

    def __init__(self) -> None:
        self.num_errors = 0
        self.errors: list[str] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return isinstance(error, Exception) and self.takes(error)

    def takes(self, error: Exception) -> bool:
        """Count `error`, and keep its words if they are new and among the first; return False for a handler's."""
        if is_of_a_signal(error):
            return False
        self.num_errors += 1
        text = f"{type(error).__name__}: {error}"[:500]
        if len(self.errors) < _MAX_FAULTS_NAMED and text not in self.errors:
            self.errors.append(text)
        return True


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
        self._file: tuple[int, int] | None = None
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
        if self._fd is not None and self._is_own(self._fd):
            os.close(self._fd)
        self._fd = self._lines = None

    def _opened(self) -> WholeLines:
        if self._lines is None or self._fd is None or not self._is_own(self._fd):
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._file = _identity(self._fd)
            self._lines = WholeLines(self._fd)
        return self._lines

    def _is_own(self, fd: int) -> bool:
        """Return whether `fd` is still that of the journal: a program may close descriptors that it did not open."""
        try:
            return _identity(fd) == self._file
        except OSError:
            return False


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
