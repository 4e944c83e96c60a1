"""What is asked of the driver, in NVIDIA's own binding, and how its answers and errors read.

NVML's functions have versions. Each call lists the ways to ask, newest first; one that is absent gives way to the next.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from lucid_profiler.monitor.gpu_processes import FIELDS as PROCESS_FIELDS
from lucid_profiler.monitor.gpu_processes import GpuProcess
from lucid_profiler.monitor.readings import Sheet, is_plausible

__all__ = [
    "ENERGY",
    "FAST",
    "FORKED",
    "FUNCTION_NOT_FOUND",
    "MEMORY",
    "NO_BINDING",
    "REPORTS_ABSENCE",
    "REPORTS_LOSS",
    "REPORTS_NO_ANSWER",
    "UNKNOWN",
    "Call",
    "Memory",
    "Side",
    "Way",
    "code_of",
    "failures",
    "processes",
    "reason_of",
    "ways",
]

Side = Literal["gpu", "instance"]
"""Which device of a MIG partition answers: power, clocks and energy are the GPU's, memory is each instance's."""
Way = Callable[[Any], Any]
"""Asks the device of a handle; raises what `failures` lists."""
Memory = tuple[int, int | None, int, int]
"""Bytes: total, reserved, free, used; the first version of the question has no `reserved`."""

FUNCTION_NOT_FOUND = 13
UNKNOWN = 999
REPORTS_ABSENCE = frozenset({FUNCTION_NOT_FOUND, 25})  # the other is ArgumentVersionMismatch
REPORTS_LOSS = frozenset({15, 16})  # GpuIsLost, ResetRequired
REPORTS_NO_ANSWER = frozenset({1, 9, 12, 17, 18, 20, UNKNOWN})
"""Errors that are the driver's, not a device's or a question's: Uninitialized, DriverNotLoaded, …, Unknown."""

NO_BINDING = -1
FORKED = -2
"""Codes of our own: the binding is not there; the driver was opened by a process of which this one is a copy."""

_REASONS: Mapping[int, str] = MappingProxyType(
    {
        FORKED: "forked",
        NO_BINDING: "no_nvml",
        0: "not_found",  # the binding raises "success" where a list is empty
        2: "not_supported",
        3: "not_supported",
        4: "no_permission",
        6: "not_found",
        9: "no_driver",
        12: "no_driver",
        FUNCTION_NOT_FOUND: "not_supported",
        15: "lost",
        16: "lost",
        18: "driver_mismatch",
        25: "not_supported",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One question to the driver.

    Attributes:
        name: What it is called in the costs.
        fields: The fields that its answer fills.
        side: Who answers it where there is a MIG partition; a GPU that is not divided answers all.
        store: Writes an answer down.
    """

    name: str
    fields: tuple[str, ...]
    side: Side
    store: Callable[[Any, Sheet], None]


def failures(pynvml: Any) -> tuple[type[BaseException], ...]:
    """Return what the binding raises; its report of a missing function is no NVMLError, and names may be no UTF-8."""
    mismatch = getattr(pynvml, "NVMLLibraryMismatchError", None)
    return (pynvml.NVMLError, AttributeError, UnicodeDecodeError, *([mismatch] if mismatch else []))


def code_of(error: BaseException) -> int:
    """Return the NVML code of what the binding raised; a function that either side lacks is FunctionNotFound."""
    value = getattr(error, "value", FUNCTION_NOT_FOUND)
    return value if isinstance(value, int) else UNKNOWN


def reason_of(code: int) -> str:
    """Return the code of `readings.REASONS` that an NVML error code stands for."""
    return _REASONS.get(code, "unknown_error")


def processes(store: Callable[[list[GpuProcess], Sheet], None]) -> Call:
    """Return the question for the processes of a device, tens of microseconds; `store` knows whose they are."""
    return Call(name="compute_processes", fields=PROCESS_FIELDS, side="instance", store=store)


def ways(pynvml: Any) -> dict[str, tuple[Way, ...]]:
    """Return for every call the functions of a handle that answer it, newest first."""

    def named(name: str) -> Any:
        return getattr(pynvml, name, _missing)

    memory, clock, events = named("nvmlDeviceGetMemoryInfo"), named("nvmlDeviceGetClockInfo"), "nvmlDeviceGetCurrent"
    version, clock_sm, clock_memory = getattr(pynvml, "nvmlMemory_v2", 0), pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
    sensor, celsius = pynvml.NVML_TEMPERATURE_GPU, "nvmlDeviceGetTemperature"
    celsius_v, celsius_old = named(f"{celsius}V"), named(celsius)
    return {
        "memory": (
            lambda handle: _memory_v2(memory(handle, version=version)),
            lambda handle: _memory_v1(memory(handle)),
        ),
        "utilization": (named("nvmlDeviceGetUtilizationRates"),),
        "power_usage": (named("nvmlDeviceGetPowerUsage"),),
        "clock_sm": (lambda handle: clock(handle, clock_sm),),
        "clock_memory": (lambda handle: clock(handle, clock_memory),),
        "reasons": (named(f"{events}ClocksEventReasons"), named(f"{events}ClocksThrottleReasons")),
        "temperature": (lambda handle: celsius_v(handle, sensor), lambda handle: celsius_old(handle, sensor)),
        "energy": (named("nvmlDeviceGetTotalEnergyConsumption"),),
        "compute_processes": tuple(
            _processes(named(f"nvmlDeviceGetComputeRunningProcesses{suffix}")) for suffix in ("", "_v2")
        ),
    }


def _missing(*_: Any, **__: Any) -> Any:
    raise AttributeError("the binding lacks this function")


def _memory_v2(info: Any) -> Memory:
    return info.total, info.reserved, info.free, info.used


def _memory_v1(info: Any) -> Memory:
    return info.total, None, info.free, info.used


def _processes(read: Callable[[Any], Any]) -> Callable[[Any], list[GpuProcess]]:
    def answer(handle: Any) -> list[GpuProcess]:
        return [GpuProcess(pid=entry.pid, used_bytes=entry.usedGpuMemory) for entry in read(handle)]

    return answer


def _store_memory(memory: Memory, sheet: Sheet) -> None:
    """Write the memory down so that used leaves out what the driver reserves.

    Drivers disagree on whether `used` of the second version includes `reserved`: the sum that makes the total tells.
    """
    total, reserved, free, used = memory
    if total == 0:  # machines on which the processor and the GPU share one memory
        sheet.miss(MEMORY.fields, "not_supported")
    elif used > total or free > total or (reserved or 0) > total or not is_plausible("memory_total_bytes", total):
        sheet.miss(MEMORY.fields, "implausible")
    else:
        sheet.put("memory_total_bytes", total)
        sheet.put("memory_free_bytes", free)
        if reserved is None:
            sheet.put("memory_used_bytes", used)
            sheet.miss(("memory_reserved_bytes",), "not_supported")
        else:
            is_included = used + free == total and used >= reserved
            sheet.put("memory_used_bytes", used - reserved if is_included else used)
            sheet.put("memory_reserved_bytes", reserved)


def _store_utilization(rates: Any, sheet: Sheet) -> None:
    sheet.put("utilization_gpu_percent", rates.gpu)
    sheet.put("utilization_memory_percent", rates.memory)


def _number(name: str, field: str) -> Call:
    def store(value: int, sheet: Sheet) -> None:
        sheet.put(field, value)

    return Call(name=name, fields=(field,), side="gpu", store=store)


MEMORY = Call(
    name="memory",
    fields=("memory_total_bytes", "memory_reserved_bytes", "memory_used_bytes", "memory_free_bytes"),
    side="instance",
    store=_store_memory,
)
FAST = (
    MEMORY,
    Call(
        name="utilization",
        fields=("utilization_gpu_percent", "utilization_memory_percent"),
        side="instance",
        store=_store_utilization,
    ),
    _number("power_usage", "power_draw_mw"),
    _number("clock_sm", "clock_sm_mhz"),
    _number("clock_memory", "clock_memory_mhz"),
    _number("reasons", "clocks_event_reasons"),
    _number("temperature", "temperature_c"),
)
"""Asked at every sample, microseconds each."""
ENERGY = _number("energy", "energy_mj")
"""Milliseconds on some drivers: at marks only."""
