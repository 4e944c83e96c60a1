"""Tells the monitor beside a run of a moment, from inside the process, so that it reads the energy counters then."""

from contextlib import suppress
from pathlib import Path

LIMIT_S = 0.5  # the driver's energy counter takes milliseconds; a monitor that is stuck must not hold the program up

__all__ = ["FIT_MARKS", "LIMIT_S", "mark_monitor"]

FIT_MARKS = ("fit begin", "fit end")


def mark_monitor(run_dir: Path, name: str) -> bool:
    """Have the monitor of a run read the energy counters now; return whether it did.

    It raises nothing: without a monitor, or with one that does not answer in time, the mark is missing in its log.
    """
    from lucid_profiler.errors import LucidError  # noqa: PLC0415 - see the next line
    from lucid_profiler.monitor.client import connect  # noqa: PLC0415 - a program that marks nothing needs no socket
    from lucid_profiler.monitor.protocol import ProtocolError  # noqa: PLC0415

    with suppress(OSError, ProtocolError, LucidError):
        client = connect(run_dir, timeout_s=LIMIT_S)
        if client is not None:
            try:
                client.request("mark", name=name, timeout_s=LIMIT_S)
            finally:
                client.close()
            return True
    return False
