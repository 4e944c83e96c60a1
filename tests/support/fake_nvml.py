"""The fake NVML library for tests, in this process and in others.

`scenario(device(power_usage={"error": 3}))` is a machine with one H200 that cannot tell its power. What a scenario may
hold is described in `tools/fake_nvml/scenario.py`.
"""

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tools.fake_nvml import scenario as scenarios

__all__ = ["H200", "UUID", "advance", "device", "environment", "install", "library", "num_calls", "scenario"]

GIB = 2**30
UUID = "GPU-11111111-2222-3333-4444-555555555555"
_UNINITIALIZED = 1
_numbers = itertools.count()

_CALLS: dict[str, Any] = {
    "memory": [141 * GIB, 100 * GIB, 41 * GIB],
    "memory_v2": [141 * GIB, 1 * GIB, 100 * GIB, 40 * GIB],
    "bar1": [256 * GIB, 255 * GIB, 1 * GIB],
    "utilization": [87, 41],
    "power_usage": 412_345,
    "enforced_power_limit": 700_000,
    "energy": {"ramp": [5_000_000_000, 412_345], "quantum": 0.1},
    "clock_graphics": 1_965,
    "clock_sm": 1_980,
    "clock_memory": 3_201,
    "clock_video": 1_545,
    "reasons": 4,
    "temperature": 54,
    "performance_state": 0,
    "persistence_mode": 1,
    "compute_processes": [],
    "graphics_processes": [],
    "process_utilization": [],
    "field:83": {"ramp": [5_000_000_000, 412_345], "quantum": 0.1},
    "field:186": {"value": 412_345, "type": "unsigned_int"},
    "ecc_mode": [1, 1],
    "mig_mode": [0, 0],
}


def device(
    *,
    uuid: str = UUID,
    name: str = "NVIDIA H200",
    pci: str = "00000000:01:00.0",
    mig: Sequence[Mapping[str, Any]] | None = None,
    **calls: Any,
) -> dict[str, Any]:
    """Return a plausible H200 whose calls are varied; `None` takes one away, which then answers Not Supported."""
    listed = {call: steps for call, steps in {**_CALLS, **calls}.items() if steps is not None}
    entry: dict[str, Any] = {"uuid": uuid, "name": name, "pci": pci, "calls": listed}
    if mig is not None:
        listed["mig_mode"] = [1, 1]
        entry["mig"] = list(mig)
    return entry


def scenario(*devices: Mapping[str, Any], **entries: Any) -> dict[str, Any]:
    """Return a machine with these devices; `entries` are those of a scenario, such as `init` or `clock`."""
    return {"driver": "580.159.04", "nvml": "13.580.159.04", "cuda": 13_000, "devices": list(devices), **entries}


H200 = scenario(device())


@cache
def library() -> Path:
    """Return the compiled library, built once for its source and kept among the system's temporary files."""
    return scenarios.cached_library()


def install(played: Mapping[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pynvml in this process use the fake and begin the scenario at its first call and second 0.

    Args:
        played: the scenario.
        folder: where its text goes, such as `tmp_path`.
        monkeypatch: undoes it; the library stays loaded.
    """
    fake = _loaded()
    for shut in (*([pynvml.nvmlLib.nvmlShutdown] if pynvml.nvmlLib else []), fake.nvmlShutdown):
        while shut() != _UNINITIALIZED:
            pass
    monkeypatch.setenv(scenarios.VARIABLE, str(_write(played, folder)))
    monkeypatch.setattr(pynvml, "nvmlLib", fake)
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


def environment(played: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the whole environment of a process that is to find the fake."""
    return scenarios.environment(_write(played, folder), library())


def advance(seconds: float) -> None:
    """Let the installed scenario's seconds jump forward; with `clock="manual"` nothing else moves them."""
    _loaded().lucid_fake_advance(ctypes.c_double(seconds))


def num_calls(uuid: str, call: str) -> int:
    """Return how often a listed call was made on a device (on the system with an empty uuid) in this process."""
    count = _loaded().lucid_fake_num_calls
    count.restype = ctypes.c_int64
    return int(count(uuid.encode(), call.encode()))


def _loaded() -> ctypes.CDLL:
    return ctypes.CDLL(str(library()))


def _write(played: Mapping[str, Any], folder: Path) -> Path:
    # The library goes on where it was as long as the path is the same, so each scenario gets one of its own.
    path = folder / f"fake-nvml-{next(_numbers)}.txt"
    path.write_text(scenarios.compile_text(played), encoding="utf-8")
    return path
