"""Asks the interpreter of a program about its torch, in a process of its own that tells what it finds step by step.

Each step is one line, so what was told before a crash or a time-out is known.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from lucid_profiler import jsonio
from lucid_profiler.standalone import standalone_command

__all__ = ["TIMEOUT_S", "Told", "ask_interpreter"]

TIMEOUT_S = 120.0
_DRAIN_S = 2.0
_KIND = "lucid.checkup"
_MAX_WORDS = 500
_OWN_VARIABLES = frozenset({"LUCID_RUN_DIR", "LUCID_KERNELS", "LUCID_PROFILE_ARM", "LUCID_CAPTURE_UPDATES"})
_CHANGES_NOTHING = {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What an interpreter told.

    Attributes:
        steps: Name of a step (python, torch, settings, optimizer, capture): what it came to.
        reason: Why it told no more: not_started, timeout, child_failed; None where it came to its end.
        detail: The words behind the reason.
    """

    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reason: str | None = None
    detail: str = ""


def ask_interpreter(
    python: str, *, optimizer: str, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S, device: str = "cuda"
) -> Told:
    """Return what an interpreter tells; what goes wrong is a reason, and nothing is raised.

    Args:
        python: The interpreter, a path or a name in PATH.
        optimizer: Class of the optimizer that captures, `module:name`, as that interpreter imports it.
        environ: Environment of the program; lucid's own variables are taken out of it.
        timeout_s: For all of it.
        device: Kind of device on which the capture is tried.
    """
    command = standalone_command(python, "lucid_profiler.checkup.probe", "--optimizer", optimizer, "--device", device)
    kept = {name: value for name, value in environ.items() if name not in _OWN_VARIABLES}
    try:
        with _process(command, kept | _CHANGES_NOTHING) as process:
            return _listen(process, timeout_s)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        words = error.strerror if isinstance(error, OSError) else None
        return Told(reason="not_started", detail=words or str(error))


@contextmanager
def _process(command: list[str], environ: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process in a session of its own; however the block is left, all of it is ended."""
    process = subprocess.Popen(  # noqa: S603 - the interpreter is the one that the user names
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait()


def _end(process: "subprocess.Popen[bytes]") -> None:
    # Its children, of which a wrapper script has one, are in its session.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _listen(process: "subprocess.Popen[bytes]", timeout_s: float) -> Told:
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        output, errors = _rest(process)
        return Told(steps=_steps(output), reason="timeout", detail=f"no end within {timeout_s:g} s")
    steps = _steps(output)
    if "end" in steps:
        return Told(steps=steps)
    return Told(steps=steps, reason="child_failed", detail=_how(process.returncode, errors))


def _rest(process: "subprocess.Popen[bytes]") -> tuple[bytes, bytes]:
    """Return what a killed process has left in its pipes, unless somebody who has left its session holds them."""
    try:
        return process.communicate(timeout=_DRAIN_S)
    except subprocess.TimeoutExpired as expired:
        return expired.output or b"", expired.stderr or b""


def _how(returncode: int, errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    last = lines[-1][:_MAX_WORDS] if lines else ""
    if returncode >= 0:
        return last or f"it ended with status {returncode} and said nothing"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"it was ended by {name}" + (f": {last}" if last else "")


def _steps(output: bytes) -> dict[str, dict[str, Any]]:
    """Return the steps that were told; other lines, which startup files may print, are passed over."""
    steps: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        try:
            said = jsonio.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and said.get("kind") == _KIND and isinstance(said.get("told"), dict):
            steps[str(said.get("step"))] = said["told"]
    return steps
