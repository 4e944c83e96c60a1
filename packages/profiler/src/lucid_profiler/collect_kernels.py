"""Reads what a traced process left in its directory into the record of an arm."""

from pathlib import Path

from lucid_profiler.awaited import LOADED_SUFFIX
from lucid_profiler.errors import ReportError
from lucid_profiler.kernels import KernelTable, read_table
from lucid_profiler.records import Kernels, RunStatus

__all__ = ["read_kernels"]


def read_kernels(run_dir: Path, *, arm: str, status: RunStatus) -> Kernels:
    """Return the table of the process with the most counted steps, or why there is none; raises nothing.

    Args:
        run_dir: where the agents wrote.
        arm: name of the arm.
        status: how the process ended.
    """
    results = [_read(path) for path in sorted(run_dir.glob("kernels-*.json"))]
    tables = [result for result in results if isinstance(result, KernelTable)]
    faults = [result for result in results if isinstance(result, str)]
    best = max(tables, key=lambda table: table.num_steps, default=None)
    if status != "ok" and (best is None or not best.num_steps):
        return Kernels(arm=arm, status=status, table=None, reason=f"run_{status}")
    if best is not None:
        return Kernels(arm=arm, status=status, table=best)
    loaded = any(run_dir.glob(f"agent-*{LOADED_SUFFIX}"))
    return Kernels(
        arm=arm, status=status, table=None, reason=faults[0] if faults else "no_table" if loaded else "no_agent"
    )


def _read(path: Path) -> KernelTable | str:
    """Return a table, or what is wrong with it."""
    try:
        return read_table(path)
    except (OSError, ReportError) as error:
        return str(error)[:200]
