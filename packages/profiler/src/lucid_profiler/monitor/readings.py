"""A value that was read, or None with the code of why it could not be; what makes a value plausible.

The driver answers "I do not know" in many ways: an error, a zero, all bits set. None of them may pass for a number.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = [
    "LIMITS",
    "REASONS",
    "WINDOWS_NS",
    "Reading",
    "Reasons",
    "Sheet",
    "Values",
    "is_plausible",
    "is_too_short",
]

Values = dict[str, int | float | None]
"""Field: its value; None has an entry in the `Reasons` beside it."""
Reasons = dict[str, str]
"""Field that is None: a code of `REASONS`."""

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "no_driver": "no NVIDIA driver is loaded; install it, or load its kernel module with `nvidia-smi`",
        "driver_mismatch": "the driver was updated under the running kernel module; reload the module or reboot",
        "no_permission": "the driver or the kernel refuses this to the current user; ask for the permission",
        "not_supported": "this device or this version of the driver does not offer it",
        "no_devices": "the driver lists no GPU; check the container's devices",
        "lost": "the GPU has fallen off the bus or needs a reset; see `dmesg` for the Xid",
        "unknown_error": "the driver failed without saying why; in a container, its devices may have been taken away",
        "gap": "nothing, or too little, was read at that time",
        "read_too_rarely": "it was read too rarely there, as with many processes",
        "suspend": "the machine slept",
        "implausible": "the driver gave a value that cannot be true",
        "abi_suspect": "the process list is scrambled: the driver and nvidia-ml-py disagree about it; update either",
        "pid_namespace": "the driver names processes that are not visible here; run in the host's pid namespace",
        "not_found": "the driver lists no such thing; it may hide it inside a container",
        "below_resolution": "too short for the rate at which the driver renews this value; measure for longer",
        "counter_reset": "the counter went backwards: the driver was loaded anew or the GPU was reset",
        "stuck_counter": "the counter did not move in a time in which it must have",
        "mig": "belongs to the other side of a MIG partition, the whole GPU or an instance; see that device",
        "no_nvml": "nvidia-ml-py is missing or another package replaced it; install `nvidia-ml-py`",
        "nvml_off": "reading the driver was switched off",
        "not_target": "not read: the watched process was started in an environment that hides this device",
        "forked": "the reader was inherited by fork; open it anew in a process of its own",
    }
)
"""Code: what it means and what to do about it."""

_BLANK_FROM = 2**63 - 2**8  # NVML's and DCGM's blanks lie at the end of a signed 64-bit integer
_MAX_BYTES = 2**50
_MAX_PROCESSES = 2**22  # https://man7.org/linux/man-pages/man5/proc_sys_kernel.5.html, PID_MAX_LIMIT
_LIMITS = {
    "memory_total_bytes": (1, _MAX_BYTES),
    "memory_reserved_bytes": (0, _MAX_BYTES),
    "memory_used_bytes": (0, _MAX_BYTES),
    "memory_free_bytes": (0, _MAX_BYTES),
    "utilization_gpu_percent": (0, 100),
    "utilization_memory_percent": (0, 100),
    "power_draw_mw": (1, 10_000_000),
    "clock_sm_mhz": (0, 100_000),
    "clock_memory_mhz": (0, 100_000),
    "clocks_event_reasons": (0, _BLANK_FROM - 1),
    "temperature_c": (0, 250),  # the call returns a signed number: all bits set are -1
    "energy_mj": (0, _BLANK_FROM - 1),
    "process_memory_bytes": (1, _MAX_BYTES),
    "others_memory_bytes": (0, _MAX_BYTES),
    "num_other_processes": (0, _MAX_PROCESSES),
    "num_unknown_processes": (0, _MAX_PROCESSES),
}
LIMITS: Mapping[str, tuple[int, int]] = MappingProxyType(_LIMITS)
"""Field: smallest and largest value that can be true, so that every sentinel (u32, u64 and i64 maxima) lies outside."""

WINDOWS_NS: Mapping[str, int] = MappingProxyType(
    {
        "utilization_gpu_percent": 1_000_000_000,
        "utilization_memory_percent": 1_000_000_000,
        "power_draw_mw": 1_000_000_000,
        "energy_mj": 100_000_000,
    }
)
"""Field: longest time that one reading of it averages over, or for which it stands still, on any product.

Source: https://docs.nvidia.com/deploy/nvml-api (utilization: 1/6 s to 1 s by product; power: 1 s from Ampere on).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One value, or None and why."""

    value: int | float | None
    reason: str | None = None
    """A code of `REASONS` where `value` is None."""


class Sheet:
    """The fields of one device at one time.

    Attributes:
        values: Field: value or None.
        reasons: Field that is None: why.
    """

    __slots__ = ("reasons", "values")

    def __init__(self) -> None:
        self.values: Values = {}
        self.reasons: Reasons = {}

    def put(self, field: str, value: float | None) -> None:
        """Write a value down; one outside its `LIMITS` becomes None, "implausible"."""
        low, high = _LIMITS[field]
        if value is not None and low <= value <= high:
            self.values[field] = value
        else:
            self.values[field] = None
            self.reasons[field] = "implausible"

    def miss(self, fields: Iterable[str], reason: str) -> None:
        """Write down that fields could not be read, and why."""
        for field in fields:
            self.values[field] = None
            self.reasons[field] = reason

    def put_reading(self, field: str, reading: Reading) -> None:
        """Write a reading down; a value outside the field's `LIMITS` becomes None, "implausible"."""
        if reading.value is None:
            self.miss((field,), reading.reason or "gap")
        else:
            self.put(field, reading.value)


def is_plausible(field: str, value: float | None) -> bool:
    """Tell whether a value of a field of `LIMITS` can be true."""
    low, high = LIMITS[field]
    return value is not None and low <= value <= high


def is_too_short(field: str, duration_ns: int) -> bool:
    """Tell whether a run is shorter than the time one reading of the field averages over: it says "below_resolution".

    >>> is_too_short("utilization_gpu_percent", 300_000_000)
    True
    """
    return duration_ns < WINDOWS_NS.get(field, 0)
