import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lucid_profiler import nvml
from lucid_profiler.host import host_identity, host_volatile
from lucid_profiler.nvml import Gpu, NvmlReading

TWO_GPUS = NvmlReading(
    driver_version="580.178.04",
    gpus=(
        Gpu(name="NVIDIA L4", uuid="GPU-1", memory_total_bytes=24 << 30),
        Gpu(name="NVIDIA L4", uuid=None, memory_total_bytes=None),
    ),
    reason=None,
)


def test_the_identity_names_gpus_and_the_major_driver_version() -> None:
    """What makes reports comparable is read from NVML and the system."""
    identity = host_identity(TWO_GPUS)
    assert identity["gpu_name"] == "NVIDIA L4, NVIDIA L4"
    assert identity["gpu_uuid"] == "GPU-1, unknown"
    assert identity["driver_major"] == "580"
    assert identity["memory_total_bytes"] == psutil.virtual_memory().total
    assert identity["system"] == os.uname().sysname


def test_without_a_driver_the_gpu_is_none_and_the_reason_is_kept() -> None:
    """Nothing is invented where NVML is missing."""
    reading = NvmlReading(driver_version=None, gpus=(), reason="no_driver")
    identity, volatile = host_identity(reading), host_volatile(reading)
    assert (identity["gpu_name"], identity["gpu_uuid"], identity["driver_major"]) == (None, None, None)
    assert (volatile["driver_version"], volatile["nvml_reason"]) == (None, "no_driver")


def test_identity_and_volatile_facts_are_plain_data() -> None:
    """Both can be written as JSON by anybody."""
    assert json.loads(json.dumps([host_identity(TWO_GPUS), host_volatile(TWO_GPUS)]))


class _Error(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


def _binding(**changes: Any) -> SimpleNamespace:
    """Return the part of NVML's binding that is used, for a machine with one GPU."""
    functions = {
        "NVMLError": _Error,
        "NVML_ERROR_LIBRARY_NOT_FOUND": 12,
        "NVML_ERROR_DRIVER_NOT_LOADED": 9,
        "NVML_ERROR_NO_PERMISSION": 4,
        "NVML_ERROR_LIB_RM_VERSION_MISMATCH": 18,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"570.86.15",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
        "nvmlDeviceGetUUID": lambda handle: "GPU-2",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=7),
    }
    return SimpleNamespace(**{**functions, **changes})


def _raises(value: int) -> Any:
    def fail(*args: Any) -> Any:
        raise _Error(value)

    return fail


def test_bytes_of_older_bindings_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are text whatever the version of the binding."""
    monkeypatch.setitem(sys.modules, "pynvml", _binding())
    reading = nvml.read_nvml()
    assert reading.driver_version == "570.86.15"
    assert reading.gpus == (Gpu(name="NVIDIA H200", uuid="GPU-2", memory_total_bytes=7),)


def test_a_reading_that_fails_is_none_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field without permission leaves the other fields of the GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", _binding(nvmlDeviceGetUUID=_raises(4)))
    assert nvml.read_nvml().gpus == (Gpu(name="NVIDIA H200", uuid=None, memory_total_bytes=7),)


@pytest.mark.parametrize(
    ("value", "reason"), [(12, "no_driver"), (9, "no_driver"), (4, "no_permission"), (99, "nvml_error_99")]
)
def test_the_reason_of_a_failed_start_is_named(monkeypatch: pytest.MonkeyPatch, value: int, reason: str) -> None:
    """Without NVML the driver is None and the reason says why."""
    monkeypatch.setitem(sys.modules, "pynvml", _binding(nvmlInit=_raises(value)))
    assert nvml.read_nvml() == NvmlReading(driver_version=None, gpus=(), reason=reason)
