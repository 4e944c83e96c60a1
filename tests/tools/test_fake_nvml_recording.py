import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tools.fake_nvml import from_recording
from tools.fake_nvml import scenario as scenarios

from lucid_profiler import jsonio
from lucid_profiler.monitor.gpu import Gpus, Sheets
from support.clock import ManualClock
from support.fake_nvml import GIB, UUID, advance, device, install, scenario

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


def _sample(second: float, values: dict[str, Any]) -> dict[str, Any]:
    return _record("sample", second, late_ns=0, host=None, gpus={UUID: values})


def _log(**entries: Any) -> list[dict[str, Any]]:
    gpu = {"uuid": UUID, "name": "NVIDIA H200", "pci_bus_id": "00000000:01:00.0", "index": 0, "parent_uuid": None}
    header = {
        "kind": "header",
        "target": {"pid": 4321},
        "started": "2026-01-02T03:04:05.000Z",
        "anchor": {},
        "interval_ns": 125_000_000,
        "tiers": {},
        "devices": [gpu],
        "memory_api": "v2",
        "reason": None,
        "versions": {"driver": "580.1"},
    }
    shares = {"process_memory_bytes": 60, "others_memory_bytes": 30, "num_other_processes": 1}
    return [
        {**header, **entries},
        _record("mark", 0, read_ns=0, name="begin", energy_mj={UUID: 1000}),
        _sample(0, {**FIELDS, **shares}),
        _sample(0.125, FIELDS),
        _record("reasons", 0.25, fields={f"gpu:{UUID}.power_draw_mw": "lost"}),
        _sample(0.25, {**FIELDS, "power_draw_mw": None, "clock_sm_mhz": 900}),
        _record("reasons", 0.5, fields={}),
        _sample(0.5, {**FIELDS, "power_draw_mw": 99}),
        _record("mark", 0.75, read_ns=0, name="end", energy_mj={UUID: 1500}),
        _record("event", 0.75, name="fault", data={}),
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


def _convert(log: Path) -> dict[str, Any]:
    script = ROOT / "tools" / "fake_nvml" / "from_recording.py"
    done = subprocess.run([sys.executable, str(script), str(log)], capture_output=True, text=True, check=True)
    made: dict[str, Any] = json.loads(done.stdout)
    return made


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


PID = 4242


class Machine:
    """Records what the devices of a scenario answer, with processes that the test names."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        for pid in (1, PID):
            (folder / "proc" / str(pid)).mkdir(parents=True)

    def read(self, played: Mapping[str, Any]) -> Sheets:
        """Return all fields of a scenario's devices."""
        install(played, self._folder, self._monkeypatch)
        gpus = Gpus.open(clock=ManualClock().mono_ns, proc=self._folder / "proc")
        fast, shares, (energy, _) = gpus.read_fast(), gpus.read_processes([PID]), gpus.read_energy()
        gpus.close()
        return {
            uuid: (values | shares[uuid][0] | energy[uuid][0], reasons | shares[uuid][1] | energy[uuid][1])
            for uuid, (values, reasons) in fast.items()
        }

    def play_back(self, sheets: Sheets, **entries: Any) -> Sheets:
        """Return the fields of the devices of a recording that holds these."""
        header, *_ = _log()
        (gpu,) = header["devices"]
        gpus = [{**gpu, "uuid": uuid, "pci_bus_id": f"0:{bus}:0.0"} for bus, uuid in enumerate(sheets, start=1)]
        reasons = {f"gpu:{uuid}.{name}": reason for uuid, (_, why) in sheets.items() for name, reason in why.items()}
        samples = {uuid: values for uuid, (values, _) in sheets.items()}
        records = [
            {**header, "devices": gpus, "target": {"pid": PID}, **entries},
            _record("reasons", 0, fields=reasons),
            _record("mark", 0, energy_mj={uuid: values["energy_mj"] for uuid, values in samples.items()}),
            _record("sample", 0, gpus=samples),
        ]
        return self.read(from_recording.to_scenario(records))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Give a machine on which there are the target and process 1."""
    return Machine(tmp_path, monkeypatch)


V1: dict[str, Any] = {"memory_v2": {"error": 13}}
ONES = 2**64 - 1


@pytest.mark.parametrize(
    ("field", "reason", "calls"),
    [
        ("others_memory_bytes", "unknown_error", {"compute_processes": {"error": 999}}),
        ("others_memory_bytes", "not_supported", {"compute_processes": {"error": 3}}),
        ("others_memory_bytes", "no_permission", {"compute_processes": {"error": 4}}),
        ("others_memory_bytes", "not_found", {"compute_processes": {"error": 6}}),
        ("others_memory_bytes", "no_driver", {"compute_processes": {"error": 9}}),
        ("others_memory_bytes", "lost", {"compute_processes": {"error": 15}}),
        ("others_memory_bytes", "driver_mismatch", {"compute_processes": {"error": 18}}),
        ("others_memory_bytes", "abi_suspect", {"compute_processes": [[2**32 - 1, GIB]]}),
        ("others_memory_bytes", "implausible", {"compute_processes": [[1, 190 * GIB]]}),
        ("others_memory_bytes", "pid_namespace", {"compute_processes": [[99, 19 * GIB]]}),
        ("others_memory_bytes", "pid_namespace", {"compute_processes": [[98, GIB], [1, GIB], [99, GIB]]}),
        ("others_memory_bytes", "not_supported", {"compute_processes": [[PID, GIB], [1, None], [1, 7]]}),
        ("others_memory_bytes", "not_supported", {"compute_processes": [[PID, GIB], [99, None]]}),
        ("others_memory_bytes", "not_supported", {"compute_processes": [[1, None]]}),
        ("process_memory_bytes", "not_supported", {"compute_processes": [[PID, None], [1, 7]]}),
        ("process_memory_bytes", "implausible", {"compute_processes": [[PID, 0]]}),
        ("process_memory_bytes", "not_found", {"compute_processes": []}),
        ("process_memory_bytes", "not_found", {"compute_processes": [[1, 5], [1, 7]]}),
        (None, None, {"compute_processes": [[PID, GIB], [98, 5], [1, 7], [99, 0]]}),
        (None, None, {"compute_processes": [[PID, GIB], [99, 5]]}),
        ("memory_total_bytes", "implausible", {"memory_v2": [ONES, ONES, ONES, ONES]}),
        ("memory_total_bytes", "implausible", {**V1, "memory": [ONES, ONES, ONES]}),
        ("memory_total_bytes", "not_supported", {**V1, "memory": {"error": 13}}),
        ("memory_total_bytes", "no_permission", {"memory_v2": {"error": 4}}),
        ("memory_reserved_bytes", "not_supported", V1),
        ("utilization_gpu_percent", "implausible", {"utilization": [101, 7]}),
        ("utilization_memory_percent", "implausible", {"utilization": [7, 101]}),
        ("power_draw_mw", "implausible", {"power_usage": 0}),
        ("clock_sm_mhz", "implausible", {"clock_sm": 2**32 - 1}),
        ("clock_memory_mhz", "implausible", {"clock_memory": 2**32 - 1}),
        ("clocks_event_reasons", "implausible", {"reasons": ONES}),
        ("temperature_c", "implausible", {"temperature": 251}),
        ("temperature_c", "unknown_error", {"temperature": {"error": 10}}),
        ("energy_mj", "implausible", {"energy": ONES}),
    ],
)
def test_what_was_null_is_null_again_and_the_rest_is_as_it_was(
    machine: Machine, field: str | None, reason: str | None, calls: dict[str, Any]
) -> None:
    """Each field of the device comes back as it was recorded, and each null with its reason."""
    recorded = machine.read(scenario(device(**{"energy": 77, **calls})))
    assert recorded[UUID][1].get(field or "") == reason
    assert machine.play_back(recorded) == recorded


@pytest.mark.parametrize("reason", ["gap", "no_devices", "forked"])
def test_a_reason_that_no_device_gives_is_an_unknown_error(machine: Machine, reason: str) -> None:
    """What was null stays null, though its reason cannot be played."""
    recorded = machine.read(scenario(device(energy=77, compute_processes={"error": 999})))
    values, reasons = recorded[UUID]
    assert machine.play_back({UUID: (values, dict.fromkeys(reasons, reason))}) == recorded


@pytest.mark.parametrize("memory_api", [None, "v1", "v2"])
def test_each_device_plays_the_memory_query_that_it_had(machine: Machine, memory_api: str | None) -> None:
    """Readings tell the version: the header's is that of its moment, and of the oldest device."""
    other: dict[str, Any] = {"uuid": f"{UUID}-other", "pci": "00000000:02:00.0"}
    for devices in ([device(energy=77, **V1)], [device(energy=77), device(energy=77, **other, **V1)]):
        recorded = machine.read(scenario(*devices))
        assert machine.play_back(recorded, memory_api=memory_api) == recorded


def test_a_recording_with_the_first_memory_call_plays_that_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the first version was there, the second stays missing, also while nothing could be read."""
    fields: dict[str, int | None] = {**FIELDS, "memory_reserved_bytes": None}
    why = {f"gpu:{UUID}.{name}": "implausible" for name in FIELDS if name.startswith("memory")}
    log = [
        *_log(memory_api=None)[:1],
        _record("reasons", 0, fields=why),
        _sample(0, {**fields, **dict.fromkeys(name for name in FIELDS if name.startswith("memory"))}),
        _record("reasons", 1, fields={f"gpu:{UUID}.memory_reserved_bytes": "not_supported"}),
        _sample(1, fields),
    ]
    install({**from_recording.to_scenario(log), "clock": "manual"}, tmp_path, monkeypatch)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for used in (None, FIELDS["memory_used_bytes"]):
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        assert used in {None, pynvml.nvmlDeviceGetMemoryInfo(handle).used}
        advance(1)


def test_a_rotated_log_is_played_from_its_first_part(tmp_path: Path) -> None:
    """All parts make one scenario, a later one by itself is played from its own begin."""
    header, *records = _log()
    source = tmp_path / "log.jsonl"
    parts = [[header, *records[:3]], [header, *records[3:5]], [header, *records[5:]]]
    names = ["log.jsonl.9", "log.jsonl.10", "log.jsonl"]
    for name, part in zip(names, parts, strict=True):
        source.with_name(name).write_bytes(b"".join(jsonio.dumps(record) + b"\n" for record in part))
    assert _convert(source) == from_recording.to_scenario(_log())
    assert _convert(source.with_name("log.jsonl.10")) == from_recording.to_scenario(parts[1])


def test_a_torn_log_is_turned_into_a_scenario(tmp_path: Path) -> None:
    """The script prints a scenario that compiles, from a log whose last line is not whole."""
    source = tmp_path / "log.jsonl"
    source.write_bytes(b"".join(jsonio.dumps(record) + b"\n" for record in _log()) + b'{"kind":"sam')
    assert scenarios.compile_text(_convert(source)) == scenarios.compile_text(from_recording.to_scenario(_log()))


def test_a_log_without_a_header_is_refused() -> None:
    """There is nothing to play without devices."""
    with pytest.raises(ValueError, match="no header"):
        from_recording.to_scenario([])


def test_a_damaged_log_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is played from what cannot be read."""
    source = tmp_path / "log.jsonl"
    source.write_bytes(b'{"kind":1}\n{}\n')
    with pytest.raises(SystemExit):
        from_recording.main([str(source)])
    assert f"{source}: line 1: is damaged" in capsys.readouterr().err
