"""Driver version and GPU identities, read through NVIDIA's own binding of NVML; unknown is None with a reason."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Gpu", "NvmlReading", "read_nvml"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device as NVML lists it; a field that could not be read is None."""

    name: str | None
    uuid: str | None
    memory_total_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReading:
    """What NVML says about this machine. `reason` tells why `driver_version` is None."""

    driver_version: str | None
    gpus: tuple[Gpu, ...]
    reason: str | None


def read_nvml() -> NvmlReading:
    """Read the driver version and every GPU's identity once; NVML is shut down again."""
    import pynvml  # noqa: PLC0415 - reports are read without it

    try:
        with _initialised(pynvml):
            gpus = tuple(_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
            return NvmlReading(driver_version=_text(pynvml.nvmlSystemGetDriverVersion()), gpus=gpus, reason=None)
    except pynvml.NVMLError as error:
        return NvmlReading(driver_version=None, gpus=(), reason=_reason(pynvml, error))


@contextmanager
def _initialised(pynvml: Any) -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(pynvml: Any, index: int) -> Gpu:
    def known(read: Callable[..., Any]) -> Any:
        try:
            return read(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError:
            return None

    total = known(pynvml.nvmlDeviceGetMemoryInfo)
    return Gpu(
        name=_text(known(pynvml.nvmlDeviceGetName)),
        uuid=_text(known(pynvml.nvmlDeviceGetUUID)),
        memory_total_bytes=None if total is None else int(total.total),
    )


def _text(value: Any) -> str | None:
    # Older bindings return bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _reason(pynvml: Any, error: Any) -> str:
    names = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no_driver",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "no_driver",
        pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver_mismatch",
    }
    return names.get(error.value, f"nvml_error_{error.value}")
