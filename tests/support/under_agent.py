"""Runs a script in a process with an agent, as `lucid profile run` would, and reads what that recorded."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import lucid_profiler
from lucid_profiler.entries import EndEntry
from lucid_profiler.traces import ProcessTrace, read_traces

STARTUP = Path(lucid_profiler.__file__).parent / "_startup"
PATIENCE = 240  # seconds; the first process on a machine loads the libraries


@dataclass(frozen=True)
class Ran:
    """A script that ran under the agent, and what its one process left."""

    stdout: str
    trace: ProcessTrace
    run_dir: Path


def run_under_agent(directory: Path, script: str, **env: str) -> Ran:
    """Run a script that ends well, says nothing on standard error, and is recorded without a fault."""
    path, run_dir = directory / "script.py", directory / "run"
    path.write_text(script)
    run_dir.mkdir()
    pythonpath = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
    settings = {**os.environ, "LUCID_RUN_DIR": str(run_dir), "PYTHONPATH": pythonpath, **env}
    done = subprocess.run(
        [sys.executable, str(path)],
        env=settings,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (trace,) = read_traces(run_dir)
    end = trace.last(EndEntry)
    assert end is not None
    assert (end.num_errors, end.errors, trace.faults) == (0, (), ())
    return Ran(done.stdout, trace, run_dir)
