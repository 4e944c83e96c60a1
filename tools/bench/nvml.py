"""Times single NVML calls on every GPU, and finds out how often their readings change.

Calls are made in turn, so that all meet the same state of the driver. The device is left as it is: nothing is set.
"""

import argparse
import datetime as dt
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, only this file's folder is on the path

from tools.bench import environment  # noqa: E402

# Instant and average power, energy, memory temperature, four counters of throttled time.
# Source: NVML_FI_* of https://docs.nvidia.com/deploy/nvml-api/group__nvmlFieldValueEnums.html
FIELDS = (186, 185, 83, 82, 74, 269, 270, 271)
# Field 186 is the power of the moment, field 83 the energy since the driver was loaded.
CHANGING: dict[str, Callable[[Any], Any]] = {
    "power_usage": pynvml.nvmlDeviceGetPowerUsage,
    "total_energy_consumption": pynvml.nvmlDeviceGetTotalEnergyConsumption,
    "utilization_rates": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "memory_info v2": lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2),
    "memory_info v1": pynvml.nvmlDeviceGetMemoryInfo,
    "utilization_rates": pynvml.nvmlDeviceGetUtilizationRates,
    "power_usage": pynvml.nvmlDeviceGetPowerUsage,
    "clock_info sm": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    "clock_info memory": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
    "clocks_event_reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons,
    "temperature": lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    "compute_running_processes": pynvml.nvmlDeviceGetComputeRunningProcesses,
    "process_utilization": lambda handle: pynvml.nvmlDeviceGetProcessUtilization(handle, 0),
    "total_energy_consumption": pynvml.nvmlDeviceGetTotalEnergyConsumption,
    f"field_values x{len(FIELDS)}": lambda handle: pynvml.nvmlDeviceGetFieldValues(handle, list(FIELDS)),
}

__all__ = ["cost_of_calls", "intervals_of_change", "main"]


def cost_of_calls(handle: Any, *, rounds: int) -> list[dict[str, Any]]:
    """Return the microseconds of every call that succeeds, and the error of every other one.

    Args:
        handle: Of the device.
        rounds: How often each call is made, the first time apart.
    """
    found: dict[str, list[float]] = {name: [] for name in CALLS}
    errors: dict[str, str] = {}
    for number in range(rounds + 1):
        for name, call in CALLS.items():
            if name in errors:
                continue
            begin = time.perf_counter_ns()
            try:
                call(handle)
            except pynvml.NVMLError as error:
                # Success without anything to tell is an error of the binding's.
                if error.value not in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND):
                    errors[name] = f"{error.value}: {error}"
                    continue
            if number:
                found[name].append((time.perf_counter_ns() - begin) / 1e3)
    return [
        {"kind": "call", "call": name, "microseconds": times or None, "error": errors.get(name)}
        for name, times in found.items()
    ]


def intervals_of_change(handle: Any, *, seconds: float) -> list[dict[str, Any]]:
    """Return the milliseconds between changes of the readings that are averages or counters; polls without a pause."""
    records: list[dict[str, Any]] = []
    for name, call in CHANGING.items():
        changes: list[float] = []
        try:
            last, begin = call(handle), time.perf_counter()
            while (now := time.perf_counter()) - begin < seconds:
                if (value := call(handle)) != last:
                    last = value
                    changes.append(now)
        except pynvml.NVMLError as error:
            records.append(
                {"kind": "change", "reading": name, "milliseconds": None, "error": f"{error.value}: {error}"}
            )
            continue
        gaps = [(after - before) * 1e3 for before, after in itertools.pairwise(changes)]
        records.append({"kind": "change", "reading": name, "milliseconds": gaps or None, "error": None})
    return records


def _lines(record: dict[str, Any]) -> list[str]:
    key, values = ("call", "microseconds") if record["kind"] == "call" else ("reading", "milliseconds")
    if record["error"] or not record[values]:
        return [f"  {record[key]:28} {record['error'] or 'no change seen'}"]
    times = sorted(record[values])
    worst = times[min(len(times) - 1, int(0.99 * len(times)))]
    unit = "us a call" if key == "call" else "ms between changes"
    return [f"  {record[key]:28} {statistics.median(times):10.1f} {worst:10.1f}  {unit}"]


def main(arguments: list[str] | None = None) -> None:
    """Measure every device, and print one line a call."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=300, help="calls of each kind (default: 300)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long changes are watched (default: 3)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every sample to FILE as JSON lines")
    options = parser.parse_args(arguments)
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
        parser.error(f"NVML cannot be used: {error}")
    records: list[dict[str, Any]] = [
        {
            "kind": "header",
            "command": environment.typed_command(sys.orig_argv, Path.cwd()),
            "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "nvml": _text(pynvml.nvmlSystemGetNVMLVersion()),
            "processor": environment.processor(),
            "rounds": options.rounds,
            "seconds": options.seconds,
        }
    ]
    print(f"driver {records[0]['driver']}, {records[0]['processor']}; median and 99th percentile")
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = _text(pynvml.nvmlDeviceGetName(handle))
        print(f"device {index}: {name}")
        found = cost_of_calls(handle, rounds=options.rounds) + intervals_of_change(handle, seconds=options.seconds)
        records += [{**record, "device": index, "device_model": name} for record in found]
        for record in found:
            print("\n".join(_lines(record)))
    pynvml.nvmlShutdown()
    if options.output is not None:
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        options.output.write_text(text, encoding="utf-8")


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    main()
