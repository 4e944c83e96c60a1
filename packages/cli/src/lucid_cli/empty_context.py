"""Measures what an empty CUDA context of the command's own interpreter takes, before the first run."""

import re
import time
from collections.abc import Mapping
from pathlib import Path

from lucid_profiler.context import Measured, measure_context
from lucid_profiler.monitor.gpu import Gpus

_PYTHON = re.compile(r"python[\d.]*$")

__all__ = ["measure_empty_context"]


def measure_empty_context(program: str, environ: Mapping[str, str]) -> Measured:
    """Return the bytes of an empty context on the first device that the command would use, or why they are not known.

    Args:
        program: path of the program that the command runs; only an interpreter of Python can be asked.
        environ: environment of the runs.
    """
    if not _PYTHON.match(Path(program).name):
        return Measured(reason="no_interpreter", detail=f"{program} is no Python")
    gpus = Gpus.open(clock=time.monotonic_ns, environ=dict(environ))
    try:
        uuids = [device.uuid for device in gpus.devices if device.is_target]
        if not uuids:
            return Measured(reason=gpus.reason or "no_devices")

        def used(uuid: str) -> int | None:
            return _whole(gpus.read_fast()[uuid][0].get("memory_used_bytes"))

        def of_process(uuid: str, pid: int) -> int | None:
            return _whole(gpus.read_processes({pid})[uuid][0].get("process_memory_bytes"))

        return measure_context(program, uuids, read_used=used, read_process=of_process, environ=environ)
    finally:
        gpus.close()


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
