import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tools.fake_nvml import scenario as scenarios

from support import fake_nvml
from support.fake_nvml import UUID, advance, device, install, num_calls, scenario

ROOT = Path(__file__).resolve().parents[2]
OTHER = "GPU-99999999-2222-3333-4444-555555555555"
Play = Callable[..., Any]

# Every value differs from every other, so that none can take another's place.
VALUES: dict[str, Any] = {
    "memory": [1001, 1002, 1003],
    "memory_v2": [2001, 2002, 2003, 2004],
    "bar1": [3001, 3002, 3003],
    "utilization": [41, 42],
    "power_usage": 5001,
    "enforced_power_limit": 5002,
    "energy": 2**40 + 1,
    "clock_graphics": 6001,
    "clock_sm": 6002,
    "clock_memory": 6003,
    "clock_video": 6004,
    "reasons": 2**33 + 4,
    "temperature": 71,
    "performance_state": 8,
    "persistence_mode": 1,
    "compute_processes": [[101, 7001], [102, 7002, 3, 4]],
    "graphics_processes": [[103, 7003]],
    "process_utilization": [[104, 51, 52, 53, 54, 8001]],
    "field:83": 2**41 + 7,
    "field:186": {"value": 9001, "type": "unsigned_int"},
    "field:185": {"value": -9002, "type": "signed_long_long"},
    "field:82": 0.25,
    "ecc_mode": [1, 0],
    "mig_mode": [0, 1],
}


def _processes(rows: list[Any]) -> list[tuple[int, ...]]:
    return [(row.pid, row.usedGpuMemory, row.gpuInstanceId, row.computeInstanceId) for row in rows]


def _samples(handle: Any) -> list[tuple[int, ...]]:
    rows = pynvml.nvmlDeviceGetProcessUtilization(handle, 0)
    return [(row.pid, row.smUtil, row.memUtil, row.encUtil, row.decUtil, row.timeStamp) for row in rows]


def _names(value: Any, *names: str) -> list[int]:
    return [getattr(value, name) for name in names]


def _memory_v2(handle: Any) -> list[int]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return _names(memory, "total", "reserved", "free", "used")


READS: dict[str, tuple[str, Callable[[Any], Any], Any]] = {
    "memory": (
        "memory",
        lambda handle: _names(pynvml.nvmlDeviceGetMemoryInfo(handle), "total", "free", "used"),
        [1001, 1002, 1003],
    ),
    "memory_v2": ("memory_v2", _memory_v2, [2001, 2002, 2003, 2004]),
    "bar1": (
        "bar1",
        lambda handle: _names(pynvml.nvmlDeviceGetBAR1MemoryInfo(handle), "bar1Total", "bar1Free", "bar1Used"),
        [3001, 3002, 3003],
    ),
    "utilization": (
        "utilization",
        lambda handle: _names(pynvml.nvmlDeviceGetUtilizationRates(handle), "gpu", "memory"),
        [41, 42],
    ),
    "power_usage": ("power_usage", pynvml.nvmlDeviceGetPowerUsage, 5001),
    "enforced_power_limit": ("enforced_power_limit", pynvml.nvmlDeviceGetEnforcedPowerLimit, 5002),
    "energy": ("energy", pynvml.nvmlDeviceGetTotalEnergyConsumption, 2**40 + 1),
    "clock_graphics": (
        "clock_graphics",
        lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_GRAPHICS),
        6001,
    ),
    "clock_sm": ("clock_sm", lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM), 6002),
    "clock_memory": ("clock_memory", lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM), 6003),
    "clock_video": ("clock_video", lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_VIDEO), 6004),
    "reasons": ("reasons", pynvml.nvmlDeviceGetCurrentClocksEventReasons, 2**33 + 4),
    "throttle_reasons": ("reasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, 2**33 + 4),
    "temperature": (
        "temperature",
        lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        71,
    ),
    "temperature_v": (
        "temperature",
        lambda handle: pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU),
        71,
    ),
    "performance_state": ("performance_state", pynvml.nvmlDeviceGetPerformanceState, 8),
    "persistence_mode": ("persistence_mode", pynvml.nvmlDeviceGetPersistenceMode, 1),
    "compute_processes": (
        "compute_processes",
        lambda handle: _processes(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)),
        [(101, 7001, 2**32 - 1, 2**32 - 1), (102, 7002, 3, 4)],
    ),
    "graphics_processes": (
        "graphics_processes",
        lambda handle: _processes(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle)),
        [(103, 7003, 2**32 - 1, 2**32 - 1)],
    ),
    "process_utilization": ("process_utilization", _samples, [(104, 51, 52, 53, 54, 8001)]),
    "ecc_mode": ("ecc_mode", pynvml.nvmlDeviceGetEccMode, [1, 0]),
    "mig_mode": ("mig_mode", pynvml.nvmlDeviceGetMigMode, [0, 1]),
}
CODES = (*range(1, 31), 999)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Install a machine, begin, and return the handle of its first device."""

    def begin(*devices: dict[str, Any], **entries: Any) -> Any:
        install(scenario(*devices, **entries), tmp_path, monkeypatch)
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(0) if devices else None

    return begin


def _code(read: Callable[..., Any], *arguments: Any) -> int:
    with pytest.raises(pynvml.NVMLError) as caught:
        read(*arguments)
    return int(caught.value.value)


@pytest.mark.parametrize("name", READS)
def test_each_function_gives_its_own_values_in_their_places(name: str, play: Play) -> None:
    """Through the real binding each function gives the values of its own call, each in its own field."""
    _, read, expected = READS[name]
    assert read(play(device(**VALUES))) == expected


@pytest.mark.parametrize("name", READS)
def test_every_error_reaches_the_caller(name: str, play: Play) -> None:
    """Each function can fail with each of NVML's codes, and only it does; a list that says 7 is only too short."""
    call, read, _ = READS[name]
    is_list = call.endswith("processes") or call == "process_utilization"
    codes = [code for code in CODES if not (is_list and code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE)]
    calls: dict[str, Any] = {call: [{"error": code, "from_call": number} for number, code in enumerate(codes)]}
    handle = play(device(**calls))
    assert [_code(read, handle) for _ in codes] == codes
    assert num_calls(UUID, call) == len(codes)


def test_every_error_has_a_text(play: Play) -> None:
    """The binding can print each code."""
    play(device())
    assert all(pynvml.nvmlErrorString(code) for code in (0, *CODES, 12_345, -1))
    assert pynvml.nvmlErrorString(pynvml.NVML_ERROR_GPU_IS_LOST) == "GPU is lost"


def test_fields_have_values_types_and_errors_of_their_own(play: Play) -> None:
    """A batch of fields gives each its value, its type and its error."""
    calls: dict[str, Any] = {**VALUES, "field:84": {"error": 15}}
    handle = play(device(**calls))
    fields = pynvml.nvmlDeviceGetFieldValues(handle, [83, 186, (185, 0), 82, 84, 77])
    assert [field.nvmlReturn for field in fields] == [0, 0, 0, 0, 15, 3]
    assert [field.valueType for field in fields[:4]] == [3, 1, 4, 0]
    assert (fields[0].value.ullVal, fields[1].value.uiVal, fields[2].value.sllVal) == (2**41 + 7, 9001, -9002)
    assert fields[3].value.dVal == 0.25


def test_a_batch_of_fields_can_fail_as_a_whole(play: Play) -> None:
    """An error of `field_values` is that of the call, not of an entry."""
    assert _code(pynvml.nvmlDeviceGetFieldValues, play(device(field_values={"error": 999})), [83]) == 999


def test_what_is_not_listed_is_not_supported(play: Play) -> None:
    """A call without steps answers Not Supported, a call whose first step is still to come as well."""
    handle = play(device(power_usage=None, energy=[{"value": 5, "from_call": 1}]))
    assert _code(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert _code(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) == 5


def test_the_memory_of_a_process_can_be_unknown(play: Play) -> None:
    """Null stands for all ones, which the binding gives back as None."""
    (row,) = pynvml.nvmlDeviceGetComputeRunningProcesses(play(device(compute_processes=[[7, None]])))
    assert (row.pid, row.usedGpuMemory) == (7, None)


def test_an_empty_list_of_processes_is_a_success(play: Play) -> None:
    """No processes is an empty list; for samples of utilisation the binding turns that success into an error 0."""
    handle = play(device(compute_processes=[], process_utilization=[]))
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle) == []
    assert _code(pynvml.nvmlDeviceGetProcessUtilization, handle, 0) == 0


def test_a_list_counts_as_one_call(play: Play) -> None:
    """Asking for the number of rows first is no call of its own."""
    steps = [{"value": [[1, 1]]}, {"value": [[2, 2], [3, 3]], "from_call": 1}, {"error": 15, "from_call": 2}]
    handle = play(device(compute_processes=steps))
    pids = [[row.pid for row in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)] for _ in range(2)]
    assert pids == [[1], [2, 3]]
    assert _code(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle) == 15


def test_a_missing_function_is_a_mismatch_of_the_library(play: Play) -> None:
    """The error 13 of a versioned list becomes the binding's exception that is no NVMLError."""
    handle = play(device(compute_processes={"error": 13}, memory_v2={"error": 13}))
    with pytest.raises(pynvml.NVMLLibraryMismatchError):
        pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert _code(_memory_v2, handle) == 13


def test_the_version_of_a_structure_is_checked(play: Play) -> None:
    """A plain 2 instead of the encoded version is refused."""
    handle = play(device())
    assert _code(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=2)) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert _memory_v2(handle)[0] == sum(_memory_v2(handle)[1:])


def test_steps_by_call_number(play: Play) -> None:
    """The last step whose call number is reached counts, for each device and call alone."""
    steps = [{"value": 1}, {"error": 999, "from_call": 2}, {"value": 3, "from_call": 3}]
    first = play(device(power_usage=steps, energy=steps), device(uuid=OTHER, pci="0:2:0", power_usage=steps))
    second = pynvml.nvmlDeviceGetHandleByIndex(1)
    assert [pynvml.nvmlDeviceGetPowerUsage(first) for _ in range(2)] == [1, 1]
    assert pynvml.nvmlDeviceGetPowerUsage(second) == 1
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(first) == 1
    assert _code(pynvml.nvmlDeviceGetPowerUsage, first) == 999
    assert [pynvml.nvmlDeviceGetPowerUsage(first) for _ in range(2)] == [3, 3]


def test_steps_by_time(play: Play) -> None:
    """A step begins at its second; the manual clock moves only when it is told to."""
    steps = [{"value": 1}, {"error": 15, "from_s": 0.3}, {"value": 2, "from_s": 50}]
    handle = play(device(power_usage=steps), clock="manual")
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 1
    for _ in range(3):
        advance(0.1)
    assert _code(pynvml.nvmlDeviceGetPowerUsage, handle) == 15
    advance(49.7)
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 2


def test_seconds_pass_by_themselves(play: Play) -> None:
    """With the real clock a step comes without being told."""
    handle = play(device(power_usage=[{"value": 1}, {"value": 2, "from_s": 0.05}]))
    threading.Event().wait(0.06)
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 2


def test_the_order_of_steps_may_mix_calls_and_seconds(play: Play) -> None:
    """A later step wins over an earlier one although its kind of condition is another."""
    steps = [{"value": 1}, {"value": 2, "from_call": 100}, {"value": 3, "from_s": 1}]
    handle = play(device(power_usage=steps), clock="manual")
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 1
    advance(1)
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 3


def test_a_ramp_moves_by_its_quantum(play: Play) -> None:
    """A value grows from its step's begin, in jumps of the quantum; one without grows evenly; it may fall."""
    ramp = {"ramp": [1000, 500], "quantum": 0.1}
    restart = {"value": {"ramp": [7, 1000]}, "from_s": 10}
    handle = play(
        device(
            energy=[{"value": ramp}, restart],
            power_usage={"ramp": [100, -10]},
            memory=[9, {"ramp": [0, 8]}, 1],
            compute_processes=[[5, {"ramp": [50, 2]}]],
        ),
        clock="manual",
    )
    energy = pynvml.nvmlDeviceGetTotalEnergyConsumption
    read = [energy(handle)]
    for _ in range(5):
        advance(0.05)
        read.append(energy(handle))
    assert read == [1000, 1000, 1050, 1050, 1100, 1100]
    advance(1.75)
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 80
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).free == 16
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle)[0].usedGpuMemory == 54
    advance(9)
    assert energy(handle) == 1007


def test_a_call_takes_its_latency_and_holds_up_no_other(play: Play) -> None:
    """While one call takes its time, another thread is answered."""
    handle = play(device(energy={"value": 5, "latency_us": 2_000_000}))
    began = time.monotonic()
    thread = threading.Thread(target=pynvml.nvmlDeviceGetTotalEnergyConsumption, args=(handle,))
    thread.start()
    while num_calls(UUID, "energy") == 0:
        pynvml.nvmlDeviceGetPowerUsage(handle)
    assert pynvml.nvmlDeviceGetPowerUsage(handle)
    assert thread.is_alive()
    thread.join()
    assert time.monotonic() - began >= 2


def test_many_threads_lose_no_call(play: Play) -> None:
    """Calls from several threads are all counted."""
    handle = play(device())

    def read() -> None:
        for _ in range(500):
            pynvml.nvmlDeviceGetPowerUsage(handle)
            pynvml.nvmlDeviceGetComputeRunningProcesses(handle)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_calls(UUID, "power_usage") == num_calls(UUID, "compute_processes") == 2000


def test_an_error_of_any_comes_before_all_others(play: Play) -> None:
    """A lost device fails in every call, its neighbour does not."""
    lost = device(any=[{"value": None}, {"error": 15, "from_s": 1}])
    handle = play(lost, device(uuid=OTHER, pci="00000000:02:00.0"), clock="manual")
    other = pynvml.nvmlDeviceGetHandleByIndex(1)
    pynvml.nvmlDeviceGetPowerUsage(handle)
    advance(1)
    for read in (pynvml.nvmlDeviceGetPowerUsage, pynvml.nvmlDeviceGetName, _memory_v2, pynvml.nvmlDeviceGetMigMode):
        assert _code(read, handle) == 15
    assert _code(pynvml.nvmlDeviceGetHandleByUUID, UUID) == 15
    assert pynvml.nvmlDeviceGetName(other) == "NVIDIA H200"


def test_devices_are_found_by_index_uuid_and_address(play: Play) -> None:
    """Each of two devices is found in three ways and says who it is."""
    play(device(pci="00000000:00:04.0"), device(uuid=OTHER, name="NVIDIA L4", pci="00000001:C1:00.0"))
    assert pynvml.nvmlDeviceGetCount() == 2
    for handle in (
        pynvml.nvmlDeviceGetHandleByIndex(1),
        pynvml.nvmlDeviceGetHandleByUUID(OTHER),
        pynvml.nvmlDeviceGetHandleByPciBusId("0001:c1:00.0"),
    ):
        assert (pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)) == (OTHER, "NVIDIA L4")
        assert pynvml.nvmlDeviceGetIndex(handle) == 1
        pci = pynvml.nvmlDeviceGetPciInfo(handle)
        assert (pci.busId, pci.busIdLegacy, pci.domain, pci.bus) == ("00000001:C1:00.0", "0001:C1:00.0", 1, 0xC1)
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByPciBusId("00000000:00:04.0")) == 0
    assert _code(pynvml.nvmlDeviceGetHandleByIndex, 2) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert _code(pynvml.nvmlDeviceGetHandleByUUID, "GPU-1") == pynvml.NVML_ERROR_NOT_FOUND


def test_versions_reach_the_caller(play: Play) -> None:
    """The versions of driver, library and CUDA are the scenario's, and can fail."""
    play(calls={"nvml_version": {"error": 999}}, cuda=12_080)
    assert pynvml.nvmlSystemGetDriverVersion() == "580.159.04"
    assert pynvml.nvmlSystemGetCudaDriverVersion() == pynvml.nvmlSystemGetCudaDriverVersion_v2() == 12_080
    assert _code(pynvml.nvmlSystemGetNVMLVersion) == 999
    assert pynvml.nvmlDeviceGetCount() == 0


def test_mig_instances_are_devices_of_their_own(play: Play) -> None:
    """An instance has its own identity and calls; what it does not list is not supported."""
    mig = [
        {"uuid": f"MIG-{number}", "gi": 7 + number, "ci": number, "calls": {"memory": [number, 0, 0]}}
        for number in (1, 2)
    ]
    whole = play(device(), device(uuid=OTHER, pci="0:2:0", mig=mig), device(uuid="GPU-3", pci="0:3:0"))
    gpu = pynvml.nvmlDeviceGetHandleByIndex(1)
    assert (pynvml.nvmlDeviceGetCount(), pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)) == (3, 7)
    assert (pynvml.nvmlDeviceGetMaxMigDeviceCount(whole), pynvml.nvmlDeviceGetMigMode(gpu)) == (0, [1, 1])
    instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1)
    assert (pynvml.nvmlDeviceGetUUID(instance), pynvml.nvmlDeviceGetName(instance)) == ("MIG-2", "NVIDIA H200 MIG")
    assert (pynvml.nvmlDeviceGetGpuInstanceId(instance), pynvml.nvmlDeviceGetComputeInstanceId(instance)) == (9, 2)
    assert pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID("MIG-1")).total == 1
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)) == OTHER
    assert [pynvml.nvmlDeviceIsMigDeviceHandle(handle).value for handle in (gpu, instance)] == [0, 1]
    for read in (pynvml.nvmlDeviceGetPowerUsage, pynvml.nvmlDeviceGetTotalEnergyConsumption):
        assert _code(read, instance) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert _code(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 2) == pynvml.NVML_ERROR_NOT_FOUND
    assert _code(pynvml.nvmlDeviceGetGpuInstanceId, gpu) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_a_driver_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts to begin are counted on, and so are calls, when the driver was away in between."""
    init = [{"error": 9}, {"error": 18, "from_call": 1}, {"value": None, "from_call": 2}]
    power = [{"value": 1}, {"value": 2, "from_call": 1}]
    install(scenario(device(power_usage=power), init=init), tmp_path, monkeypatch)
    assert [_code(pynvml.nvmlInit) for _ in range(2)] == [9, 18]
    assert _code(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    read = []
    for _ in range(2):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        read.append(pynvml.nvmlDeviceGetPowerUsage(handle))
        pynvml.nvmlShutdown()
        assert _code(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_UNINITIALIZED
    assert read == [1, 2]


def test_installing_begins_anew(play: Play) -> None:
    """A second scenario in the same process replaces the first, though that was begun twice; so does the same one."""
    once = device(power_usage=[{"value": 1}, {"value": 2, "from_call": 1}])
    for _ in range(2):
        handle = play(once)
        pynvml.nvmlInit()
        assert [pynvml.nvmlDeviceGetPowerUsage(handle) for _ in range(2)] == [1, 2]
    assert pynvml.nvmlDeviceGetPowerUsage(play(device(power_usage=77))) == 77


def test_bad_handles_are_refused(play: Play) -> None:
    """No handle, one into the middle of a device, and one of nothing are invalid arguments."""
    handle = play(device())
    address = ctypes.cast(handle, ctypes.c_void_p).value or 0
    for bad in (None, address + 8, 12_345, 2**64 - 1):
        assert _code(pynvml.nvmlDeviceGetPowerUsage, ctypes.c_void_p(bad)) == pynvml.NVML_ERROR_INVALID_ARGUMENT
        assert _code(pynvml.nvmlDeviceGetName, ctypes.c_void_p(bad)) == pynvml.NVML_ERROR_INVALID_ARGUMENT


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 100,
        b"{}\n",
        b"lucid-fake-nvml 1 a b 1\n",
        b"lucid-fake-nvml 1 a b 1 0\nstep 0 0 0 0 0\n",
        b"lucid-fake-nvml 1 a b 1 0\ncall energy\nstep 0 0 0 0\n",
        b"lucid-fake-nvml 1 a b 1 0\ncall energy\nstep 0 0 0 0 3 1:2\n",
        b"lucid-fake-nvml 1 a b 1 0\ncall energy\nstep 0 0 4294967295 0 3 1:0:0\n",
        b"lucid-fake-nvml 1 a b 1 0\ndevice GPU-1 7 0 0 0 0:1:0 x\n",
        b"lucid-fake-nvml 1 a b 1 0\n" + b"device GPU-1 0 0 0 0 0:1:0 x\n" * 500,
        b"lucid-fake-nvml 1 a b 1 0\ncall " + b"x" * 100_000,
        b"lucid-fake-nvml 1 a b 1 0\ncall energy\nstep 0 0 0 0 3" + b" 1:0:0" * 5000,
    ],
)
def test_a_broken_file_is_an_unknown_error(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file that the compiler did not write makes the beginning fail, never the process."""
    install(fake_nvml.H200, tmp_path, monkeypatch)
    broken = tmp_path / "broken.txt"
    broken.write_bytes(content)
    monkeypatch.setenv(scenarios.VARIABLE, str(broken))
    assert _code(pynvml.nvmlInit) == pynvml.NVML_ERROR_UNKNOWN
    assert "is not what scenario.py writes" in capfd.readouterr().err or not content


@pytest.mark.parametrize("path", ["", "missing.txt", "/"])
def test_no_file_is_a_driver_that_is_not_loaded(path: str, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a scenario there is no driver."""
    play()
    pynvml.nvmlShutdown()
    monkeypatch.setenv(scenarios.VARIABLE, path)
    assert _code(pynvml.nvmlInit) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED


WRONG: list[tuple[dict[str, Any], str]] = [
    (scenario(device(clock_smm=1)), "unknown call 'clock_smm'"),
    (scenario({**device(), "calls": {"field:x": 1}}), "unknown call 'field:x'"),
    (scenario(device(memory=[1, 2])), r"takes \[total, free, used\]"),
    (scenario(device(memory_v2=[1, 2, 3])), r"takes \[total, reserved, free, used\]"),
    (scenario(device(power_usage=[1])), "takes an integer"),
    (scenario(device(power_usage=2**64)), "takes an integer"),
    (scenario(device(power_usage=True)), "takes an integer"),
    (scenario(device(power_usage=1.5)), "takes an integer"),
    (scenario(device(compute_processes=[[1]])), r"row 0 is \[1\]; it takes \[pid, bytes\]"),
    (scenario(device(compute_processes=[[1, 2]] * 300)), "the library holds 256"),
    (scenario(device(energy={"ramp": [1]})), r"takes \[start, per_second\]"),
    (scenario(device(energy={"ramp": [1, 2], "quantum": -1})), "quantum is -1"),
    (scenario(device(energy={"ramp": [1, 2], "step": 1})), "unknown key 'step'"),
    (scenario(device(energy=[{"value": 1}, {"from_call": 2}])), 'step 1 has neither "value" nor "error"'),
    (scenario(device(energy={"value": 1, "error": 2})), 'both "value" and "error"'),
    (scenario(device(energy={"error": 0})), "error is 0"),
    (scenario(device(energy={"value": 1, "from_s": -1})), "from_s is -1"),
    (scenario(device(energy={"value": 1, "from_s": float("nan")})), "finite number"),
    (scenario(device(energy={"value": 1, "from_calls": 1})), "unknown key 'from_calls'"),
    (scenario(device(energy={"value": 1, "type": "double"})), "fields have one of"),
    (scenario({**device(), "calls": {"name": "x"}}), "takes errors"),
    (scenario(device(), device(pci="0:2:0")), "appears twice"),
    (scenario(device(), device(uuid=OTHER, pci="0000:01:00.0")), "address '00000000:01:00.0' appears twice"),
    (scenario(device(mig=[{"uuid": UUID, "gi": 0, "ci": 0}])), "appears twice"),
    (scenario(device(mig=[{"uuid": "MIG-1", "gi": 0}])), r"mig\[0\].ci is None"),
    (scenario(device(uuid="GPU 1")), "takes no blanks"),
    (scenario(device(pci="1")), "takes an address"),
    (scenario(device(), clock="fast"), "clock is 'fast'"),
    (scenario(device(), init={"value": 3}), "takes errors"),
    (scenario(device(), inits=[]), "unknown key 'inits'"),
    ({"devices": [{"uuid": "GPU-1", "pci": "0:1:0"}]}, r"devices\[0\].name is None"),
    ({"devices": 3}, "takes a list"),
    ({"devices": [3]}, "takes an object"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_wrong_scenario_is_refused(wrong: dict[str, Any], message: str) -> None:
    """Mistakes are named with their place before anything runs."""
    with pytest.raises(ValueError, match=message):
        scenarios.compile_text(wrong)


def test_the_structures_have_the_bindings_sizes() -> None:
    """The versions that the library checks are those of the binding."""
    assert ctypes.sizeof(pynvml.c_nvmlMemory_v2_t) | 2 << 24 == pynvml.nvmlMemory_v2
    assert ctypes.sizeof(pynvml.c_nvmlTemperature_v1_t) | 1 << 24 == pynvml.nvmlTemperature_v1


PRINT_POWER = """
import sys, pynvml
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetPowerUsage(pynvml.nvmlDeviceGetHandleByIndex(0)))
sys.exit(5)
"""


def test_a_command_runs_under_a_scenario(tmp_path: Path) -> None:
    """The command line compiles, runs the command with the fake in front, and passes its exit code on."""
    source = tmp_path / "scenario.json"
    source.write_text(json.dumps(scenario(device(power_usage=123_456))), encoding="utf-8")
    script = ROOT / "tools" / "fake_nvml" / "scenario.py"
    command = [sys.executable, str(script), str(source), "--", sys.executable, "-c", PRINT_POWER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("123456\n", "", 5)
    source.write_text('{"devices": 3}', encoding="utf-8")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "devices is 3; it takes a list" in done.stderr


def test_the_fake_is_gone_when_its_installation_is_undone(tmp_path: Path) -> None:
    """Left initialised, it is not what the binding finds by name afterwards: the machine's own driver, or none."""
    code = (
        "from support import fake_nvml\nimport pathlib, pynvml, pytest\nfrom lucid_profiler.nvml import read_nvml\n"
        "own, patch = read_nvml(), pytest.MonkeyPatch()\n"
        f"fake_nvml.install(fake_nvml.H200, pathlib.Path({str(tmp_path)!r}), patch)\n"
        "pynvml.nvmlInit()\nfake = read_nvml()\npatch.undo()\n"
        "print([gpu.uuid for gpu in fake.gpus] == [fake_nvml.UUID], read_nvml() == own)"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("True True\n", "", 0)


def test_another_process_finds_the_fake(tmp_path: Path) -> None:
    """The environment alone makes the real binding in another process load the fake."""
    environ = fake_nvml.environment(scenario(device(power_usage=42)), tmp_path)
    done = subprocess.run([sys.executable, "-c", PRINT_POWER], env=environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("42\n", 5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking beside a thread is what is tested
def test_a_child_that_is_forked_does_not_hang(play: Play) -> None:
    """Forking while another thread calls leaves a library that still answers."""
    handle = play(device())
    is_over = threading.Event()

    def call() -> None:
        while not is_over.is_set():
            pynvml.nvmlDeviceGetComputeRunningProcesses(handle)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for _ in range(20):
            child = _fork(handle)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        is_over.set()
        thread.join()


def _fork(handle: Any) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            code = 0 if pynvml.nvmlDeviceGetPowerUsage(handle) else 1
        finally:
            os._exit(code)
    return child
