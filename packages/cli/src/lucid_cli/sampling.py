"""The monitor beside one run: started once the command runs, stopped after it, and read into the report."""

import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lucid_profiler.collect import Observation
from lucid_profiler.collect_monitor import Monitored, observe_monitor, unmonitored
from lucid_profiler.context import Measured
from lucid_profiler.monitor.address import MAX_SOCKET_PATH_BYTES, socket_path
from lucid_profiler.monitor.process import Monitor, launch

__all__ = ["Beside", "Sampling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What is recorded beside the commands.

    Attributes:
        interval_s: time between two samples; 0 for none.
        with_nvml: whether the driver is asked.
        with_agent: whether there is an agent inside the process.
    """

    interval_s: float = 0.1
    with_nvml: bool = True
    with_agent: bool = True

    @property
    def reads_memory(self) -> bool:
        """Whether all sides of a device's memory are read, so that they can be set against each other."""
        return bool(self.interval_s) and self.with_nvml and self.with_agent


class Beside:
    """Samples one run; however the block is left, the monitor is ended.

    The monitor listens in the run's directory, where the agent finds it.

    Args:
        sampling: whether and how often.
        run_dir: private directory of the run.
    """

    def __init__(self, sampling: Sampling, run_dir: Path) -> None:
        self._sampling = sampling
        self._run_dir = run_dir
        self._launching: threading.Thread | None = None
        self._monitor: Monitor | None = None
        self._ready_ns = 0

    def start(self, pid: int) -> None:
        """Begin to follow a process, without waiting for the monitor to be there."""
        if self._sampling.interval_s:
            self._launching = threading.Thread(target=self._launch, args=(pid,), daemon=True)
            self._launching.start()

    def pids(self) -> Collection[int]:
        """Return the numbers of lucid's own children that this has made."""
        monitor = self._launched()
        return () if monitor is None or monitor.pid is None else (monitor.pid,)

    def _launch(self, pid: int) -> None:
        can_listen = len(os.fsencode(socket_path(self._run_dir))) <= MAX_SOCKET_PATH_BYTES
        self._monitor = launch(
            target_pid=pid,
            output=self._log,
            interval_s=self._sampling.interval_s,
            with_nvml=self._sampling.with_nvml,
            directory=self._run_dir if can_listen else None,
        )
        self._ready_ns = time.monotonic_ns()

    def _launched(self) -> Monitor | None:
        """Return the monitor once it is there, or was found not to come."""
        if self._launching is not None:
            self._launching.join()
        return self._monitor

    def observe(self, seen: Observation, *, run: int, end_ns: int, context: Measured | None) -> Monitored:
        """Stop the monitor and return what it saw.

        Args:
            seen: what the agents saw of the run.
            run: its number.
            end_ns: when the command ended.
            context: what an empty CUDA context takes.
        """
        monitor = self._launched()
        if monitor is None:
            return unmonitored("monitor_off" if not self._sampling.interval_s else "no_monitor")
        monitor.stop()
        if monitor.reason is not None and end_ns < self._ready_ns:
            return unmonitored("ended_first")
        if monitor.reason is not None:
            return unmonitored("no_monitor", detail=monitor.reason)
        return observe_monitor(self._log, run=run, wall=seen.wall, inside=seen.devices, context=context)

    @property
    def _log(self) -> Path:
        return self._run_dir / "monitor.jsonl"

    def __enter__(self) -> "Beside":  # noqa: PYI034 - typing.Self is newer than the oldest Python supported
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        monitor = self._launched()
        if monitor is not None:
            monitor.stop()
