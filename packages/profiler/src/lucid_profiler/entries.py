"""What the lines of an agent's journal say, as types: what a record could not hold is refused while collecting."""

from dataclasses import dataclass, field
from typing import Any, Literal

from lucid_profiler.digest import TensorDigest
from lucid_profiler.records import Phase

__all__ = [
    "ENTRY_TYPES",
    "AllocatorEntry",
    "CaptureEntry",
    "DeviceEntry",
    "DeviceTimesEntry",
    "EndEntry",
    "EnvEntry",
    "FitEntry",
    "MemoryEntry",
    "NonfiniteEntry",
    "NoteEntry",
    "PhasesEntry",
    "StateEntry",
    "StepsEntry",
    "UncoveredEntry",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitEntry:
    """The timed interval."""

    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEntry:
    """Peaks in bytes."""

    peak_rss_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorEntry:
    """What torch's allocator said of one device; None is what this torch does not say, or what was not asked for.

    Attributes:
        mono_ns: when, on the clock of `time.monotonic_ns`.
        step: steps of all optimizers until then.
        device: index of the CUDA device, as the process numbers them.
        private_pools_bytes: reserved for the pools of CUDA graphs, and for pools that the program made.
        private_pools_allocated_bytes: what is allocated in them.
    """

    mono_ns: int
    step: int
    device: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    num_alloc_retries: int | None = None
    num_ooms: int | None = None
    private_pools_bytes: int | None = None
    private_pools_allocated_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """A CUDA device that an optimizer kept busy.

    Attributes:
        device: its index, as the process numbers devices.
        uuid: as CUDA gives it, without "GPU-" or "MIG-" before it.
        total_bytes: its memory.
    """

    device: int
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimesEntry:
    """How many steps the device's clock covers: of all, those with a result, inside captures, and too far behind."""

    num_steps: int
    num_results: int
    num_captured: int
    num_behind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteEntry:
    """What a check for NaN and infinities found; the fields are those of a `nonfinite.Finding`."""

    what: Literal["loss", "parameters"]
    optimizer: int | None = None
    name: str | None = None
    step: int | None = None
    num_checked: int = 0
    num_skipped: int = 0
    num_unjudged: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasesEntry:
    """What the script marked."""

    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """The digests of one part; the fields are those of a `State` record."""

    part: str
    digest: str
    strides_digest: str
    num_tensors: int
    num_bytes: int
    nonfinite: int
    tensors: dict[str, TensorDigest]
    values: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsEntry:
    """How many steps ended, and how often a batch was waited for, whether or not there was room to record them."""

    num_steps: int
    num_waits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UncoveredEntry:
    """What was trained and is in no digest."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureEntry:
    """What the optimizers report; each report is checked by itself, since it need not come from lucid."""

    capture: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvEntry:
    """What numbers and bytes depend on."""

    identity: dict[str, Any] = field(default_factory=dict)
    volatile: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteEntry:
    """Something that a reader of the report has to know."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEntry:
    """The last line of a process that ended with its handlers."""

    rank: int | None = None
    begin_ns: int | None = None
    num_errors: int = 0
    errors: tuple[str, ...] = ()


ENTRY_TYPES: dict[str, type] = {
    "fit": FitEntry,
    "memory": MemoryEntry,
    "allocator": AllocatorEntry,
    "device": DeviceEntry,
    "device_times": DeviceTimesEntry,
    "nonfinite": NonfiniteEntry,
    "phases": PhasesEntry,
    "state": StateEntry,
    "steps": StepsEntry,
    "capture": CaptureEntry,
    "env": EnvEntry,
    "note": NoteEntry,
    "uncovered": UncoveredEntry,
    "end": EndEntry,
}
"""By kind; lines of other kinds are for people."""
