"""What a traced run says: the events of its trace, the table made of them, and the file that it leaves.

`kernel_trace` makes the events, `kernel_counts` the table. A process that was traced is never a timed one:
`was_traced` says so from what it left behind.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from lucid_profiler import jsonio
from lucid_profiler.codec import from_plain, to_plain
from lucid_profiler.errors import ReportError

SCHEMA = "lucid.kernels/1"
TRACED_SUFFIX = ".traced"  # of the empty file that is there before the profiler starts, whatever happens then

EventKind = Literal[
    "kernel",
    "memcpy",
    "memset",
    "launch_kernel",
    "launch_graph",
    "launch_memcpy",
    "launch_memset",
    "operator",
    "step",
]
RowKind = Literal["kernel", "memcpy", "memset", "operator"]

__all__ = [
    "SCHEMA",
    "TRACED_SUFFIX",
    "Event",
    "EventKind",
    "GraphCount",
    "KernelRow",
    "KernelTable",
    "Launches",
    "RowKind",
    "cupti_loaded",
    "read_table",
    "was_traced",
    "write_table",
]


class Event(NamedTuple):
    """One event of a trace: a record of the device, a call that launches something, an operator, or a step."""

    kind: EventKind
    name: str
    correlation: int
    """Of a record: the launch that it belongs to. Of a launch: its own. Else of no meaning."""
    begin_ns: int
    duration_ns: int
    thread: int = 0
    graph: int = 0
    """Of a record inside a replay: the graph's identity where the tracer tells it, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All events of one kind and name; of an operator the times are its own, without the operators that it calls."""

    name: str
    kind: RowKind
    count: int
    total_ns: int
    median_ns: int
    count_per_step: float
    ns_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Calls of the host in all counted steps."""

    kernels: int = 0
    graphs: int = 0
    memcpys: int = 0
    memsets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCount:
    """One graph: its replays in the counted steps, and the records that its first replay left."""

    num_replays: int
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """The counted steps of one process.

    `rows` are what was launched one by one, or on a CPU the operators; None with `reason` where nothing was traced.
    `replay_rows` are what ran inside graph replays; None with `replay_reason` where their records contradict each
    other. `launches` are None on a CPU.
    """

    schema: str = SCHEMA
    pid: int
    device: Literal["cuda", "cpu"]
    num_warmup_steps: int
    num_steps: int = 0
    rows: tuple[KernelRow, ...] | None = None
    reason: str | None = None
    replay_rows: tuple[KernelRow, ...] | None = None
    replay_reason: str | None = None
    launches: Launches | None = None
    graphs: tuple[GraphCount, ...] = ()
    num_records: int = 0
    """Records of the device in the counted steps, and those that no known launch owns."""
    num_unowned: int = 0
    """Records that no known launch owns; they are in no row."""
    num_without_record: int = 0
    """Launches of a single kernel that left no record."""
    num_events: int = 0
    num_dropped_events: int = 0
    cupti_loaded: bool | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def launches_per_step(self) -> dict[str, float] | None:
        """Launches divided by steps; None where there are none to count."""
        if self.launches is None or not self.num_steps:
            return None
        return {name: value / self.num_steps for name, value in to_plain(self.launches).items()}


def was_traced(run_dir: Path) -> bool:
    """Return whether a process of this run was traced; then none of its times may be compared with others.

    Tracing slows a process down until it ends, not only while the tracer is on.
    """
    return any(run_dir.glob(f"kernels-*{TRACED_SUFFIX}"))


def cupti_loaded(maps: Path = Path("/proc/self/maps")) -> bool | None:
    """Return whether this process has CUPTI's library mapped; None where the system does not say.

    torch for CUDA is linked to it: only `was_traced` says that it was in use.
    """
    try:
        return b"libcupti" in maps.read_bytes()
    except OSError:
        return None


def write_table(table: KernelTable, path: Path) -> None:
    """Write a table as one JSON file, whole or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    draft = path.with_suffix(".part")
    draft.write_bytes(jsonio.dumps(to_plain(table)) + b"\n")
    os.replace(draft, path)  # noqa: PTH105 - as the journal, without a second Path


def read_table(path: Path) -> KernelTable:
    """Read what `write_table` wrote.

    Raises:
        OSError: The file cannot be read.
        ReportError: It is damaged or of another version.
    """
    try:
        data = jsonio.loads(path.read_bytes())
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema == SCHEMA:
            return from_plain(KernelTable, data, Counter())
    except ValueError as error:
        raise ReportError(str(path), None, f"it is no table of kernels: {error}") from error
    raise ReportError(str(path), None, f"it has the schema {schema!r:.80}, this version reads {SCHEMA!r}")
