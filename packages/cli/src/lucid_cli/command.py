"""Finds the program that a command would run, and says what a shell would say when there is none."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

NOT_EXECUTABLE = 126
NOT_FOUND = 127

__all__ = ["NOT_EXECUTABLE", "NOT_FOUND", "CannotStartError", "cannot_start", "resolve_program"]


class CannotStartError(Exception):
    """A command that cannot be started.

    Args:
        message: one line that names the cause.
        exit_code: 127 where the program is not found, 126 where it cannot be executed.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def resolve_program(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the path of the program that the command runs: its first word, looked up in PATH if it has no slash.

    Raises:
        CannotStartError: there is no such program, or it cannot be executed.
    """
    program = command[0]
    if not program:
        raise CannotStartError("the command is an empty word", NOT_FOUND)
    directories = [""] if os.sep in program else os.get_exec_path(dict(env))
    candidates = [Path(directory, program) for directory in directories]
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            _check_interpreter(path, program)
            return str(path)
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        where = "no such file" if os.sep in program else "not found in PATH"
        raise CannotStartError(f"{program}: {where}", NOT_FOUND)
    raise CannotStartError(f"{found}: {_why_not(found)}", NOT_EXECUTABLE)


def cannot_start(program: str, error: OSError) -> CannotStartError:
    """Return what the system's refusal to execute `program` means."""
    exit_code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    return CannotStartError(f"{program}: {error.strerror or error}", exit_code)


def _why_not(path: Path) -> str:
    return "is a directory" if path.is_dir() else "is not executable"


def _check_interpreter(path: Path, program: str) -> None:
    """Look at a script's first line: the system reports a missing interpreter as if the script were missing."""
    try:
        with path.open("rb") as file:
            first = file.readline(256)
    except OSError:
        return
    words = first[2:].split() if first.startswith(b"#!") else []
    if words and not os.path.exists(words[0]):  # noqa: PTH110 - the path is bytes
        interpreter = os.fsdecode(words[0])
        raise CannotStartError(f"{program}: its interpreter {interpreter} does not exist", NOT_FOUND)
