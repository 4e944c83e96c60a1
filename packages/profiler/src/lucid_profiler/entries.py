"""What the lines of an agent's journal say, as types: what a record could not hold is refused while collecting."""

from dataclasses import dataclass, field
from typing import Any

from lucid_profiler.digest import TensorDigest
from lucid_profiler.records import Phase

__all__ = [
    "ENTRY_TYPES",
    "CaptureEntry",
    "EndEntry",
    "EnvEntry",
    "FitEntry",
    "MemoryEntry",
    "NoteEntry",
    "PhasesEntry",
    "StateEntry",
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
    "phases": PhasesEntry,
    "state": StateEntry,
    "capture": CaptureEntry,
    "env": EnvEntry,
    "note": NoteEntry,
    "end": EndEntry,
}
"""By kind; lines of other kinds are for people."""
