"""What a report says about the sampling beside a run: how it went, on which devices, and where the memory was.

What was read is in the run's samples, and its sums are among the run's metrics.
"""

from dataclasses import dataclass, field
from typing import Literal

_OPTIONAL = {"optional": True}  # not written at its default: added after the first reports

__all__ = ["DeviceEnergy", "Gap", "MemoryAccount", "MemoryRow", "MonitorReport", "MonitoredDevice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A stretch without samples, or without those of one device, on the clock of `time.monotonic_ns`."""

    begin_ns: int
    end_ns: int
    reason: str
    device: str | None = field(default=None, metadata=_OPTIONAL)
    """UUID of the device that could not be read, while the rest was; None where nothing was sampled."""


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
    """Where a device's used memory was when it was largest: at the moment whose terms were read nearest to it."""

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
    unread_peak_bytes: int | None = field(default=None, metadata=_OPTIONAL)
    """The largest use, where it is more than 1 % above that of the rows: whose it was was not read while it lasted."""
    unread_peak_ns: int | None = field(default=None, metadata=_OPTIONAL)
    """When that was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEnergy:
    """Energy that a device used in the run's wall interval."""

    uuid: str
    value_j: float | None
    bound_j: float | None = None
    """The value is off by at most this much because of when and how coarsely the driver was read.

    Its means over a second are included. Power that lasted shorter than a reading's window counts as that reading, and
    what the sensor itself is off by is not in it. None where power was read too rarely, and where the counter and the
    power readings disagree by more than their bounds: one of them is wrong.
    """
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
    num_dropped_records: int | None = 0
    """Lines of the sampler's log that could not be written; None where the monitor did not live to say."""
    cadence: dict[str, dict[str, int]] = field(default_factory=dict, metadata=_OPTIONAL)
    """Of what is read more rarely the more it costs: how often it was (`num`), and the longest time between."""
    num_nvml_errors: int | None = field(default=None, metadata=_OPTIONAL)
    """Questions that the driver did not answer; None where that was not counted."""
    memory_api: str | None = None
    devices: tuple[MonitoredDevice, ...] = ()
    energy: tuple[DeviceEnergy, ...] = ()
    memory: tuple[MemoryAccount, ...] = ()
