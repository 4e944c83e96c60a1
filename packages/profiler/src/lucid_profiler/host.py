"""Facts of the machine that runs are measured on: what must agree between reports, and what varies by itself."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from lucid_profiler.nvml import NvmlReading, read_nvml

__all__ = ["host_identity", "host_volatile"]


def host_identity(nvml: NvmlReading | None = None) -> dict[str, Any]:
    """Return what makes two reports comparable: system, processor, GPU and driver; None where it cannot be read."""
    reading = read_nvml() if nvml is None else nvml
    driver = reading.driver_version
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_model": _cpu_model(),
        "num_cpus": psutil.cpu_count(logical=True),
        "num_usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_total_bytes": psutil.virtual_memory().total,
        "gpu_name": ", ".join(gpu.name or "unknown" for gpu in reading.gpus) or None,
        "gpu_uuid": ", ".join(gpu.uuid or "unknown" for gpu in reading.gpus) or None,
        "driver_major": driver.split(".")[0] if driver else None,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def host_volatile(nvml: NvmlReading | None = None) -> dict[str, Any]:
    """Return what changes from day to day: kernel, exact driver, load, free memory, clock governor."""
    reading = read_nvml() if nvml is None else nvml
    return {
        "kernel": platform.release(),
        "driver_version": reading.driver_version,
        "nvml_reason": reading.reason,
        "load_1min": _known(lambda: os.getloadavg()[0]),
        "memory_available_bytes": psutil.virtual_memory().available,
        "cpu_governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    }


def _cpu_model() -> str | None:
    text = _known(lambda: Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")) or ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"model name", "Model", "cpu model"}:
            return value.strip()
    return platform.processor() or None


def _first_line(path: str) -> str | None:
    text: str | None = _known(lambda: Path(path).read_text(encoding="utf-8", errors="replace"))
    return text.strip() if text else None


def _known(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except OSError:
        return None
