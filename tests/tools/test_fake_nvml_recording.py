import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tools.fake_nvml import from_recording
from tools.fake_nvml import scenario as scenarios

from lucid_profiler import jsonio
from support.fake_nvml import UUID, advance, install

ROOT = Path(__file__).resolve().parents[2]


def _record(kind: str, second: float, **entries: Any) -> dict[str, Any]:
    return {"kind": kind, "mono_ns": 77_000_000_000 + int(second * 1e9), **entries}


FIELDS: dict[str, int] = {
    "memory_total_bytes": 1000,
    "memory_reserved_bytes": 10,
    "memory_used_bytes": 90,
    "memory_free_bytes": 900,
    "utilization_gpu_percent": 33,
    "utilization_memory_percent": 12,
    "power_draw_mw": 250_000,
    "clock_sm_mhz": 1700,
    "clock_memory_mhz": 2600,
    "clocks_event_reasons": 4,
    "temperature_c": 40,
}


def _log(**entries: Any) -> list[dict[str, Any]]:
    gpu = {"uuid": UUID, "name": "NVIDIA H200", "pci_bus_id": "00000000:01:00.0", "index": 0, "parent_uuid": None}
    header = {
        "kind": "header",
        "target": {"pid": 4321},
        "devices": [gpu],
        "memory_api": "v2",
        "versions": {"driver": "580.1"},
    }
    shares = {"process_memory_bytes": 60, "others_memory_bytes": 30, "num_other_processes": 1}
    return [
        {**header, **entries},
        _record("mark", 0, name="begin", energy_mj={UUID: 1000}),
        _record("sample", 0, gpus={UUID: {**FIELDS, **shares}}),
        _record("sample", 0.125, gpus={UUID: FIELDS}),
        _record("reasons", 0.25, fields={f"gpu:{UUID}.power_draw_mw": "lost"}),
        _record("sample", 0.25, gpus={UUID: {**FIELDS, "power_draw_mw": None, "clock_sm_mhz": 900}}),
        _record("reasons", 0.5, fields={}),
        _record("sample", 0.5, gpus={UUID: {**FIELDS, "power_draw_mw": 99}}),
        _record("mark", 0.75, name="end", energy_mj={UUID: 1500}),
        _record("end", 0.75),
    ]


def _read(handle: Any) -> dict[str, Any]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    try:
        power = pynvml.nvmlDeviceGetPowerUsage(handle)
    except pynvml.NVMLError_GpuIsLost:
        power = None
    return {
        "memory_total_bytes": memory.total,
        "memory_reserved_bytes": memory.reserved,
        "memory_free_bytes": memory.free,
        "memory_used_bytes": memory.used,
        "utilization_gpu_percent": rates.gpu,
        "utilization_memory_percent": rates.memory,
        "power_draw_mw": power,
        "clock_sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "clock_memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "clocks_event_reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    }


def test_a_recording_is_played_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample's values, nulls, marks and the target's memory come back at their times."""
    log = _log()
    install({**from_recording.to_scenario(log, pid=99), "clock": "manual"}, tmp_path, monkeypatch)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(UUID)
    samples = [record for record in log if record["kind"] == "sample"]
    played = []
    for record, following in zip(samples, [*samples[1:], log[-1]], strict=True):
        assert _read(handle) == {name: record["gpus"][UUID][name] for name in FIELDS}
        played.append(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        advance((following["mono_ns"] - record["mono_ns"]) / 1e9)
    assert [*played, pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)] == [1000] * 4 + [1500]
    rows = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert [(row.pid, row.usedGpuMemory) for row in rows] == [(99, 60), (1, 30)]


def test_a_recording_with_the_first_memory_call_plays_that_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the first version was there, the second stays missing."""
    install(from_recording.to_scenario(_log(memory_api="v1")), tmp_path, monkeypatch)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError_FunctionNotFound):
        pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == FIELDS["memory_used_bytes"]


def test_a_torn_log_is_turned_into_a_scenario(tmp_path: Path) -> None:
    """The script prints a scenario that compiles, from a log whose last line is not whole."""
    source = tmp_path / "log.jsonl"
    source.write_bytes(b"".join(jsonio.dumps(record) + b"\n" for record in _log()) + b'{"kind":"sam')
    script = ROOT / "tools" / "fake_nvml" / "from_recording.py"
    done = subprocess.run([sys.executable, str(script), str(source)], capture_output=True, text=True, check=True)
    assert scenarios.compile_text(json.loads(done.stdout)) == scenarios.compile_text(from_recording.to_scenario(_log()))


def test_a_log_without_a_header_is_refused() -> None:
    """There is nothing to play without devices."""
    with pytest.raises(ValueError, match="no header"):
        from_recording.to_scenario([])
