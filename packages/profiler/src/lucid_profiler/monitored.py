"""What a report says about the sampling beside a run: how it went, on which devices, and where the memory was.

What was read is in the run's samples, and its sums are among the run's metrics.
"""

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["DeviceEnergy", "Gap", "MemoryAccount", "MemoryRow", "MonitorReport", "MonitoredDevice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A stretch in which nothing was sampled, on the clock of `time.monotonic_ns`."""

    begin_ns: int
    end_ns: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoredDevice:
    """A GPU that was sampled."""

    uuid: str
    name: str | None = None
    memory_total_bytes: int | None = None
    parent_uuid: str | None = None
    """Of the whole card, where this is an instance of one (MIG)."""
    is_target: bool = True
    """Whether the run may use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One term of a device's memory."""

    name: str
    value_bytes: int | None
    reason: str | None = None
    """Why it is not known."""
    level: int = 0
    """Depth: the rows of level n + 1 after a row of level n add up to it."""
    is_estimate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """Where a device's used memory was at the moment at which it was largest."""

    uuid: str
    mono_ns: int
    rows: tuple[MemoryRow, ...]
    residue_share: float | None = None
    """What no term explains, as a share of the used memory."""
    warning: str | None = None
    num_times: int = 0
    """Times at which the account was made, about one a second; the series `memory:<uuid>` has them."""
    num_times_warned: int = 0
    """Those at which a residue was above 2 % of the used memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEnergy:
    """Energy that a device used in the run's wall interval."""

    uuid: str
    value_j: float | None
    bound_j: float | None = None
    """The value is off by at most this much because readings are discrete."""
    source: Literal["counter", "power_held"]
    """The driver's energy counter, or its power readings, each held until the next one."""
    coverage: float = 1.0
    """Share of the interval in which the power was known."""
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorReport:
    """How the sampling beside one run went."""

    reason: str | None = None
    """Why nothing was sampled; None where something was."""
    nvml_reason: str | None = None
    """Why no GPU was."""
    interval_ns: int = 0
    num_samples: int = 0
    num_missed: int | None = 0
    """Deadlines that had passed before their sample could be taken; None where the monitor did not live to say."""
    late_median_ns: int | None = None
    late_max_ns: int | None = None
    gaps: tuple[Gap, ...] = ()
    events: dict[str, int] = field(default_factory=dict)
    """Steps of the wall clock and suspensions, counted."""
    distinct: dict[str, int] = field(default_factory=dict)
    """Readings of each field that differ from the one before: a mean over a second does not change ten times in it."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a field was null, by `host.<field>` or `gpu:<uuid>.<field>`; the last reason."""
    own_cpu_s: float | None = None
    wall_s: float | None = None
    nvml_s: float | None = None
    """Time inside NVML."""
    num_dropped_records: int = 0
    """Lines of the sampler's log that could not be written."""
    memory_api: str | None = None
    devices: tuple[MonitoredDevice, ...] = ()
    energy: tuple[DeviceEnergy, ...] = ()
    memory: tuple[MemoryAccount, ...] = ()
