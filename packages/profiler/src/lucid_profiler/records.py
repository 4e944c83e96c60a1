"""The records of a report, schema lucid.report/1.0: what each line may say, in which unit.

A report is JSON lines. `lucid_profiler.writer.Writer` adds to every line its kind `t`, its number `seq` and `prev`,
the link to the line before; `lucid_profiler.reader.read_report` checks them and gives a `Report` of these records.
Sequences are tuples and become JSON arrays; times named `_ns` are `time.monotonic_ns` of one machine.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from lucid_profiler import jsonio
from lucid_profiler.digest import TensorDigest
from lucid_profiler.kernels import KernelTable
from lucid_profiler.monitored import MonitorReport

__all__ = [
    "KNOWN_METHODS",
    "METHOD",
    "RECORD_TYPES",
    "SCHEMA",
    "TAINTS",
    "AgentHealth",
    "Arm",
    "Better",
    "CaptureGroup",
    "CaptureReport",
    "End",
    "Env",
    "Header",
    "Kernels",
    "Located",
    "Metric",
    "Pair",
    "PairParity",
    "ParityStatus",
    "Phase",
    "Record",
    "Resume",
    "Run",
    "RunStatus",
    "Samples",
    "Slot",
    "State",
    "Summary",
    "Tool",
    "Wall",
    "identity_digest",
    "link",
]

SCHEMA = "lucid.report/1.0"
# Controls, taints, `different` arms and resumes came later and need no new method: each of their rules asks for a field
# or record that a file must hold first, so no file of before comes to another verdict. Walls that do not span the same
# work have none since; what they had before was never one.
METHOD = "paired/2"
KNOWN_METHODS = ("paired/1", METHOD)
TAINTS = ("throttled", "foreign", "suspended", "changed")
"""What can have bent a run from outside: the driver held its clocks back, another process used its GPU, the machine
slept, lucid was stopped, or versions or flags were not those of its arm's first good run."""

Better = Literal["lower", "higher", "none"]
RunStatus = Literal["ok", "failed", "timeout", "interrupted", "not_started"]
ParityStatus = Literal["equal", "different", "undecidable", "not_observed"]

_NUM_LINK_DIGITS = 16
_OPTIONAL = {"optional": True}  # not written while it is empty: added to schema 1.0 after its first files


def link(line: bytes) -> str:
    """Return the digest by which the next line names this one, which is given without its newline."""
    return hashlib.sha256(line).hexdigest()[:_NUM_LINK_DIGITS]


def identity_digest(identity: dict[str, Any]) -> str:
    """Return the digest of an environment's identity, the same for equal identities in any order."""
    return link(jsonio.dumps(identity))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """The program that wrote the report."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One of the things compared; the first arm of a header is the base."""

    name: str
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables that are set in this arm and not otherwise."""
    control: bool = field(default=False, metadata=_OPTIONAL)
    """Whether it is another name for the base: its runs repeat the base, so what they differ by is noise."""
    different: bool = field(default=False, metadata=_OPTIONAL)
    """Whether it computes something else, so that parity is not asked of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One planned run: its place in the order, fixed before the first run starts."""

    slot: int
    """Place in the order, from 0; also the number of the run that fills it."""
    pair: int
    """Number of the pair, from 0, discarded pairs included."""
    arm: str
    discarded: bool = False
    """Whether the run only warms the machine up: kept in the file, never in the statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What was going to be measured, written before anything is."""

    kind: ClassVar[str] = "header"

    schema: str = SCHEMA
    method: str = METHOD
    """Version of the estimator and its rules, apart from that of the file."""
    id: str
    """UUID of the report."""
    created: str
    """RFC 3339, UTC."""
    tool: Tool
    command: tuple[str, ...]
    """The measured program and its arguments."""
    arms: tuple[Arm, ...]
    order: str = "abba"
    """`abba`, or `random` with the seed that it was drawn from."""
    pairs: int
    """Measured pairs of each arm that is no control, without the discarded ones."""
    discarded_pairs: int = 1
    slots: tuple[Slot, ...] = ()
    primary: str = "wall"
    """Name of the metric that carries the verdict."""
    alpha: float = 0.05
    """Two-sided rate of false verdicts that was accepted beforehand."""
    rules: tuple[str, ...] = ()
    """Why a pair may be left out of the statistics, fixed beforehand, one sentence each."""
    seed: int | None = field(default=None, metadata=_OPTIONAL)
    """Of a drawn order."""
    taints: tuple[str, ...] = field(default=(), metadata=_OPTIONAL)
    """Those of `TAINTS` that leave a pair out; a run that is not ok always does and is not listed."""
    cool_down_s: float = field(default=0.0, metadata=_OPTIONAL)
    """Wait between two runs."""
    require_idle: bool = field(default=False, metadata=_OPTIONAL)
    """Whether the machine had to be idle before the first run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    """Where the runs took place; written once a scope, and again only when it changed."""

    kind: ClassVar[str] = "env"

    scope: Literal["host", "process"]
    run: int | None = None
    """The first run that saw it; None for the host."""
    identity: dict[str, Any] = field(default_factory=dict)
    """What makes results comparable: GPU name, driver, torch, flags."""
    volatile: dict[str, Any] = field(default_factory=dict)
    """What may change from run to run: load, free memory, temperature."""
    identity_digest: str = ""
    """`identity_digest` of `identity`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """The interval that counts as a run's wall time."""

    source: Literal["fit", "steps", "process"]
    """`fit`: marked by the script; `steps`: first optimizer step's begin to the last one's end; else the process."""
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of a run, or the reason why there is none."""

    value: float | int | None
    unit: str
    """`s`, `By` (bytes), `J` or `1` (a count or ratio)."""
    better: Better = "lower"
    exact: bool = False
    """Whether equal runs give equal numbers, so that any difference is one."""
    reason: str | None = None
    """Why `value` is None: `no_cuda`, `no_agent`, `no_steps`, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureGroup:
    """What became of one param group's recording."""

    captured: bool
    recordings: int = 0
    replays: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Steps that ran native, counted by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What one optimizer says about its capture at the end of a run."""

    optimizer: str
    """Class name."""
    requested: bool
    overridden: bool = False
    """Whether the arm's setting won over an explicit argument of the script."""
    groups: tuple[CaptureGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHealth:
    """How the recording inside the measured process went."""

    loaded: bool
    reason: str | None = None
    """Why it is not loaded."""
    num_processes: int = 0
    num_steps: int = 0
    num_dropped: int = 0
    """Step records that were overwritten before they could be read."""
    num_errors: int = 0
    uncovered: tuple[str, ...] = field(default=(), metadata=_OPTIONAL)
    """What was trained and is in no digest, each in words; with any, equal digests do not say that all is equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A named interval that the script marked."""

    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One fresh process of one arm, successful or not."""

    kind: ClassVar[str] = "run"

    run: int
    """Number of its slot; unique in the report."""
    pair: int
    arm: str
    discarded: bool = False
    status: RunStatus
    returncode: int | None = None
    """Exit status of the process; None when it never ended by itself or never started."""
    signal: str | None = None
    """Name of the signal that ended it, such as `SIGSEGV`."""
    started: str
    """RFC 3339, UTC."""
    process_ns: int
    """From process start to exit."""
    wall: Wall | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)
    capture: tuple[CaptureReport, ...] | None = None
    """None when no optimizer of the run reports captures."""
    agent: AgentHealth
    phases: tuple[Phase, ...] = ()
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    output_tail: str = ""
    """The end of what it printed, at most 4 KiB; bytes that are no UTF-8 as hexadecimal escapes."""
    notes: tuple[str, ...] = ()
    monitor: MonitorReport | None = field(default=None, metadata=_OPTIONAL)
    """How the sampling beside it went; None in files that were written before there was any."""
    taints: tuple[str, ...] = field(default=(), metadata=_OPTIONAL)
    """Those of `TAINTS` that were found: by what watched the run, or by holding it against those before it."""
    identity_digest: str = field(default="", metadata=_OPTIONAL)
    """Of the process's `Env`, which may stand with an earlier run; empty where nothing was seen of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The digests of one part of one process's final state."""

    kind: ClassVar[str] = "state"

    run: int
    process: int = 0
    """Rank, or else the place in an order that only the states decide; 0 where there is one process."""
    rank: int | None = field(default=None, metadata=_OPTIONAL)
    """What torchrun gave, where all processes of the run have ranks of their own; parity compares equal ranks."""
    part: str
    """`parameters` and `optimizer_state` by themselves; others as the script names them."""
    digest: str
    """SHA-256, 64 hex digits, over names, dtypes, shapes and values."""
    num_tensors: int
    num_bytes: int
    strides_digest: str
    """SHA-256, 64 hex digits, over the memory layout alone."""
    tensors: dict[str, TensorDigest] = field(default_factory=dict)
    """By name: digest (16 hex digits), dtype, shape."""
    values: dict[str, str] = field(default_factory=dict, metadata=_OPTIONAL)
    """By name, for numbers, texts and None beside the tensors: the value in at most 60 characters."""
    nonfinite: int = 0
    """Tensors and numbers that hold a NaN or an infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A stretch of a run's time series, by column."""

    kind: ClassVar[str] = "samples"

    MAX_ROWS: ClassVar[int] = 4096
    """Rows that one record may hold."""

    run: int
    series: str
    """`steps`: one row an optimizer step; `device_steps`: the same on the device; `allocator`: one row a reading of
    torch's allocator; `host`, `gpu:<uuid>`: one row a sample of the monitor, `:slow` what it reads more rarely;
    `memory:<uuid>`: the account of a device's memory over time."""
    columns: dict[str, tuple[int | float | None, ...]]
    """Equally long; a value that could not be read is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What a traced process of one arm showed; it is no run, and none of its times is compared with others."""

    kind: ClassVar[str] = "kernels"

    arm: str
    status: RunStatus
    table: KernelTable | None
    reason: str | None = None
    """Why there is no table: `no_agent`, `no_optimizer`, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where two arms begin to differ, as two more pairs of runs show that are never timed."""

    kind: ClassVar[str] = "located"

    arms: tuple[str, str]
    text: str
    """All of it in words, or why nothing was found."""
    num_equal_steps: int = 0
    step: int | None = None
    when: Literal["before", "after"] | None = None
    """`before` the step, as its gradients are, or `after` it."""
    part: str | None = None
    tensor: str | None = None
    index: tuple[int, ...] | None = None
    values: tuple[str, str] | None = None
    bits: tuple[str, str] | None = None
    """As hexadecimal numbers."""
    ulps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairParity:
    """Whether the two runs of a pair ended in the same state."""

    status: ParityStatus
    """`not_observed` also where it is not asked: of a `different` arm."""
    difference: str | None = None
    """The first difference, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs, one of the base and one of another arm, measured next to each other."""

    kind: ClassVar[str] = "pair"

    pair: int
    runs: tuple[int, int]
    """Base run and other run, whichever came first."""
    included: bool
    """Whether the statistics use it."""
    flags: tuple[str, ...] = ()
    """Why not, or what to know: `discarded`, `failed:3`, `throttled:7`, …"""
    effects: dict[str, float | None] = field(default_factory=dict)
    """By metric: ln(other / base), None where it has no meaning."""
    parity: PairParity


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a report that had stopped was taken up again; the runs after it are a block of their own."""

    kind: ClassVar[str] = "resume"

    block: int
    """Number of the block that begins here: the runs before the first resume are block 0."""
    created: str
    """RFC 3339, UTC."""
    slots: tuple[Slot, ...] = ()
    """The runs that were still to come, their slots and pairs numbered on after all earlier ones."""
    gpu_uuids: tuple[str, ...] = ()
    """The devices of this block."""
    same_devices: bool = True
    """Whether they are those of before; else they are others of the same model."""
    host_changed: bool = False
    """Whether the machine's own facts differ from those of before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the report comes to; `compare.analyze` gives it again from the other records."""

    kind: ClassVar[str] = "summary"

    analysis: dict[str, Any]
    """`compare.plain_analysis` of the first comparison's `compare.Analysis`."""
    further: tuple[dict[str, Any], ...] = field(default=(), metadata=_OPTIONAL)
    """The same of each further arm, in the header's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last line; without it the report is incomplete."""

    kind: ClassVar[str] = "end"

    status: Literal["complete", "interrupted", "failed"]
    num_records: int
    """Lines before this one."""


Record = Header | Env | Run | State | Samples | Kernels | Located | Pair | Resume | Summary | End

_ALL = (Header, Env, Run, State, Samples, Kernels, Located, Pair, Resume, Summary, End)
RECORD_TYPES: dict[str, type[Record]] = {record_type.kind: record_type for record_type in _ALL}
