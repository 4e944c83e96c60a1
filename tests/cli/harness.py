"""The installed `lucid` command as the tests drive it: a subprocess in a directory of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 60.0  # against tests that hang; a busy machine may need much of it
LUCID = Path(sys.executable).parent / "lucid"
"""The console script beside the interpreter that runs the tests."""


def is_running(pid: int) -> bool:
    """Return whether a process is alive, a zombie not counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> None:
    """Wait until the kernel has taken down a process that was killed."""
    deadline = time.monotonic() + LIMIT_S
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for(path: Path) -> str:
    """Wait until a child has written a file, and return its text."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text()


@dataclass(frozen=True)
class Ran:
    """One run of the command: its status, its output as text, and the report it was asked to write."""

    code: int
    out: str
    err: str
    report: Path

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the report's records of one kind, read without lucid."""
        lines = [json.loads(line) for line in self.report.read_bytes().splitlines()]
        return [line for line in lines if line["t"] == kind]


class Lucid:
    """Runs the installed command in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.report = directory / "report.jsonl"

    def __call__(self, *args: str | bytes, env: dict[str, str] | None = None, **settings: Any) -> Ran:
        """Run `lucid` with these arguments and return what came of it."""
        done = subprocess.run(
            [LUCID, *args],
            cwd=self.directory,
            env={**self._env(), **(env or {})},
            check=False,
            **{
                "timeout": 3 * LIMIT_S,
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                **settings,
            },
        )
        out, err = (b"" if data is None else data for data in (done.stdout, done.stderr))
        return Ran(done.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), self.report)

    def profile(self, *command: str | bytes, options: tuple[str, ...] = (), **settings: Any) -> Ran:
        """Measure one pair of runs of `command`, without a discarded one, into `report.jsonl`."""
        fixed = ("--pairs", "1", "--discard-pairs", "0", "-o", str(self.report), "--overwrite")
        return self("profile", "run", *fixed, *options, "--", *command, **settings)

    def script(self, text: str, name: str = "child.py") -> str:
        """Write a child script and return its name."""
        (self.directory / name).write_text(text)
        return name

    def start(
        self, *args: str, sigint: signal.Handlers = signal.SIG_DFL, env: dict[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start `lucid` with SIGINT as told: a shell ignores it for what it starts in the background."""
        before = signal.signal(signal.SIGINT, sigint)
        try:
            return subprocess.Popen(
                [LUCID, *args],
                cwd=self.directory,
                env={**self._env(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        finally:
            signal.signal(signal.SIGINT, before)

    def _env(self) -> dict[str, str]:
        """Return an environment in which `python` is the tests' own, and nothing is left outside the directory."""
        path = f"{LUCID.parent}:{os.environ['PATH']}"
        # Unbuffered output would hide in which order, and whether, a program's last words are written.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        return {**kept, "PATH": path, "TMPDIR": str(self.directory)}
