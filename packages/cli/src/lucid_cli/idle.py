"""Who else works on the machine: processes on the GPUs that the command may use, and load on the processors."""

import os
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.gpu import Gpus
from lucid_profiler.monitor.gpu_devices import Device

MAX_SHARE = 0.25
"""Of the processors, by others: above it the machine is not idle."""
_LOOK_S = 0.5

__all__ = ["MAX_SHARE", "check_idle", "look_between_runs", "target_devices"]


def target_devices(environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the devices that a process with this environment may use; none where there is no driver."""
    gpus = _open(environ)
    try:
        return tuple(device for device in gpus.devices if device.is_target)
    finally:
        gpus.close()


def check_idle(environ: Mapping[str, str], *, with_nvml: bool) -> None:
    """Make sure that nobody else works on the machine before the first run.

    Args:
        environ: environment of the runs.
        with_nvml: whether the driver may be asked.

    Raises:
        EnvironmentUnusableError: somebody does.
    """
    busy = [*(_busy_gpus(environ) if with_nvml else ()), *_load_words()]
    if busy:
        remedy = "wait until it is, or leave --require-idle out"
        raise EnvironmentUnusableError(f"the machine is not idle: {'; '.join(busy)}; {remedy}")


def look_between_runs(environ: Mapping[str, str], *, with_nvml: bool) -> Sequence[str]:
    """Return who works on the machine now, one phrase each, nobody if it is idle; takes half a second.

    The load average is not asked here: it still holds the run before.
    """
    return [*(_busy_gpus(environ) if with_nvml else ()), *_processor_words(psutil.cpu_percent)]


def _open(environ: Mapping[str, str]) -> Gpus:
    return Gpus.open(clock=time.monotonic_ns, environ=dict(environ))


def _busy_gpus(environ: Mapping[str, str]) -> list[str]:
    gpus = _open(environ)
    try:
        sheets = gpus.read_processes(())
        return [words for uuid, (values, _) in sheets.items() if (words := _gpu_words(uuid, values))]
    finally:
        gpus.close()


def _gpu_words(uuid: str, values: Mapping[str, float | None]) -> str | None:
    num = int((values.get("num_other_processes") or 0) + (values.get("num_unknown_processes") or 0))
    return f"{num} process{'es' if num != 1 else ''} on {uuid}" if num else None


def _load_words() -> list[str]:
    try:
        load = os.getloadavg()[0]
    except OSError:
        return []
    num_cpus = os.cpu_count() or 1
    if load <= MAX_SHARE * num_cpus:
        return []
    return [f"a load of {load:.2f} on {num_cpus} processor{'s' if num_cpus != 1 else ''} in the last minute"]


def _processor_words(percent: Callable[[float], float]) -> list[str]:
    busy = percent(_LOOK_S)
    return [f"its processors are busy {busy:.0f} % of the time"] if busy > 100 * MAX_SHARE else []
