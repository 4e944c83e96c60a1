"""How a GPU is set up: error correction, MIG, persistence, power cap. Only read; unknown is None with a reason.

NVML must have been opened by somebody else in this process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lucid_profiler.monitor.gpu_devices import Device
from lucid_profiler.monitor.nvml_calls import code_of, failures, reason_of

__all__ = ["Answer", "Settings", "read_driver_cuda", "read_driver_version", "read_settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A value, or None and why, as a code of `readings.REASONS`."""

    value: Any = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one GPU; `ecc` and `mig` are (now, after the next reset), powers are in mW."""

    ecc: Answer
    mig: Answer
    persistence: Answer
    power_limit_mw: Answer
    default_power_limit_mw: Answer


def read_settings(device: Device) -> Settings:
    """Ask the driver how a GPU is set up."""
    import pynvml  # noqa: PLC0415 - reports are read without it

    handle = _ask(lambda: pynvml.nvmlDeviceGetHandleByUUID(device.uuid))
    if handle.value is None:
        handle = _ask(lambda: pynvml.nvmlDeviceGetHandleByIndex(device.index))

    def answer(name: str) -> Answer:
        return handle if handle.value is None else _ask(lambda: getattr(pynvml, f"nvmlDeviceGet{name}")(handle.value))

    return Settings(
        ecc=_pair(answer("EccMode")),
        mig=_pair(answer("MigMode")),
        persistence=answer("PersistenceMode"),
        power_limit_mw=answer("EnforcedPowerLimit"),
        default_power_limit_mw=answer("PowerManagementDefaultLimit"),
    )


def read_driver_version() -> Answer:
    """Ask the driver for its version."""
    import pynvml  # noqa: PLC0415 - reports are read without it

    answer = _ask(pynvml.nvmlSystemGetDriverVersion)
    # Older bindings return bytes.
    return Answer(value=answer.value.decode("utf-8", "replace")) if isinstance(answer.value, bytes) else answer


def read_driver_cuda() -> Answer:
    """Ask the driver for the newest CUDA that it knows, as (major, minor)."""
    import pynvml  # noqa: PLC0415 - reports are read without it

    answer = _ask(pynvml.nvmlSystemGetCudaDriverVersion)
    # 1000 major + 10 minor: https://docs.nvidia.com/deploy/nvml-api/group__nvmlSystemQueries.html
    return answer if answer.value is None else Answer(value=(answer.value // 1000, answer.value % 1000 // 10))


def _pair(answer: Answer) -> Answer:
    return answer if answer.value is None else Answer(value=tuple(int(part) for part in answer.value))


def _ask(read: Callable[[], Any]) -> Answer:
    import pynvml  # noqa: PLC0415 - reports are read without it

    try:
        return Answer(value=read())
    except failures(pynvml) as error:
        return Answer(reason=reason_of(code_of(error)))
