"""Reports for the tests, built record by record."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from lucid_profiler.digest import TensorDigest, digest_state
from lucid_profiler.records import (
    AgentHealth,
    Arm,
    CaptureGroup,
    CaptureReport,
    End,
    Env,
    Header,
    Metric,
    Pair,
    PairParity,
    Phase,
    Record,
    Run,
    Samples,
    Slot,
    State,
    Summary,
    Tool,
    Wall,
    identity_digest,
)

CREATED = "2026-01-02T03:04:05Z"


def make_header(**changes: Any) -> Header:
    """Return the header of a paired run of two arms, with changes."""
    fields: dict[str, Any] = {
        "id": "7b0c7a52-6c4e-4f0e-9d53-0a4a3b5c6d7e",
        "created": CREATED,
        "tool": Tool(name="lucid", version="0.1.0"),
        "command": ("python", "train.py"),
        "arms": (Arm(name="native"), Arm(name="captured", env={"LUCID_CAPTURE_UPDATES": "1"})),
        "pairs": 6,
        "rules": ("a pair is left out when one of its runs did not end with status ok",),
    }
    return Header(**(fields | changes))


def make_run(run: int, **changes: Any) -> Run:
    """Return a successful run, native for even numbers and captured for odd ones, with changes.

    `seconds` sets its wall time; `replays` its number of replays.
    """
    arm = changes.pop("arm", ("native", "captured")[run % 2])
    seconds = changes.pop("seconds", 1.0)
    replays = changes.pop("replays", 10 if arm == "captured" else 0)
    group = CaptureGroup(captured=replays > 0, recordings=int(replays > 0), replays=replays, reasons={"warmup": 1})
    fields: dict[str, Any] = {
        "run": run,
        "pair": run // 2,
        "arm": arm,
        "status": "ok",
        "returncode": 0,
        "started": CREATED,
        "process_ns": 2_000_000_000,
        "metrics": {"wall": Metric(value=seconds, unit="s")},
        "capture": (CaptureReport(optimizer="MuSGD", requested=arm == "captured", groups=(group,)),),
        "agent": AgentHealth(loaded=True, num_processes=1, num_steps=11),
    }
    return Run(**(fields | changes))


def make_state(run: int, value: Any, *, part: str = "parameters", process: int = 0) -> State:
    """Return the digests of a value as one part of a run's final state."""
    return State(run=run, part=part, process=process, **_shallow(digest_state(value)))


def _shallow(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def make_records() -> list[Record]:
    """Return one record of every kind, holding everything that is hard to write down and read back."""
    identity = {"gpu_name": None, "torch": "2.4.0", "seed": 2**64, "bytes": 2**53 + 1}
    run = make_run(
        0,
        wall=Wall(source="fit", begin_ns=2**62, end_ns=2**62 + 5),
        metrics={
            "wall": Metric(value=-0.0, unit="s"),
            "loss": Metric(value=float("nan"), unit="1", better="none"),
            "bound": Metric(value=float("-inf"), unit="1", better="none"),
            "peak_allocated": Metric(value=None, unit="By", exact=True, reason="no_cuda"),
        },
        phases=(Phase(name="warm\u2028up", begin_ns=1, end_ns=2),),
        output_tail="line one\r\nline two\n\x1b[0m\u0085\u2028\ufeff\x00 déjà vu 🚀",
        notes=("it said nothing",),
    )
    return [
        make_header(
            method="paired/1", command=("python", "caf\udce9.py", ""), slots=(Slot(slot=0, pair=0, arm="native"),)
        ),
        Env(scope="host", identity=identity, volatile={"$load": 0.5}, identity_digest=identity_digest(identity)),
        run,
        State(
            run=0,
            part="parameters",
            digest="ab" * 32,
            num_tensors=1,
            num_bytes=8,
            strides_digest="cd" * 32,
            tensors={"weight": TensorDigest("00ff" * 4, "float32", (2, 1))},
        ),
        Samples(run=0, series="steps", columns={"begin_ns": (1, 2**60), "end_ns": (2, None)}),
        Pair(
            pair=0,
            runs=(0, 1),
            included=False,
            flags=("discarded",),
            effects={"wall": None},
            parity=PairParity(status="not_observed"),
        ),
        Summary(analysis={"metrics": {"wall": {"median": 1.5}}, "parts": ["parameters"]}),
        End(status="complete", num_records=7),
    ]


@pytest.fixture(name="make_header")
def make_header_fixture() -> Callable[..., Header]:
    """Give `make_header`."""
    return make_header


@pytest.fixture(name="make_run")
def make_run_fixture() -> Callable[..., Run]:
    """Give `make_run`."""
    return make_run


@pytest.fixture(name="make_state")
def make_state_fixture() -> Callable[..., State]:
    """Give `make_state`."""
    return make_state


@pytest.fixture
def records() -> list[Record]:
    """Give `make_records`."""
    return make_records()
