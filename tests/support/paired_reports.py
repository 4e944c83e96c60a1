"""Reports in memory, of whatever values their pairs have, without files and without discarded pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lucid_profiler.compare import pair_record
from lucid_profiler.digest import digest_state
from lucid_profiler.reader import Report
from lucid_profiler.records import (
    AgentHealth,
    Arm,
    CaptureGroup,
    CaptureReport,
    Env,
    Header,
    Metric,
    Run,
    State,
    Tool,
    identity_digest,
)

__all__ = ["Pairs", "make_report"]

Pairs = Sequence[tuple[Any, Any]]
_ARMS = (Arm(name="native"), Arm(name="captured", env={"LUCID_CAPTURE_UPDATES": "1"}))
_STATE = {"weight": 1.0}
_DIGEST = digest_state(_STATE)
_CREATED = "2026-01-02T03:04:05Z"


def make_report(
    metrics: Mapping[str, tuple[Metric, Pairs]],
    *,
    header: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    volatile: Mapping[str, Any] | None = None,
    states: Mapping[int, Any] | None = None,
    parts: Mapping[str, Any] | None = None,
    replays: int = 10,
) -> Report:
    """Return a report whose pairs have these values.

    Args:
        metrics: by name, what a metric is and its values in each pair, base first; None is a value that is missing.
        header: fields of it.
        identity: of its host.
        volatile: readings of its host.
        states: by run, parameters that it ended with where they are others.
        parts: further parts of every run's state, by name.
        replays: of each run of the second arm.
    """
    num_pairs = max(len(values) for _, values in metrics.values())
    runs, found = [], []
    for run in range(2 * num_pairs):
        pair, side = divmod(run, 2)
        values = {name: replace(metric, value=series[pair][side]) for name, (metric, series) in metrics.items()}
        runs.append(_run(run, values, replays if side else 0))
        found.append(_state(run, "parameters", (states or {}).get(run, _STATE)))
        found += [_state(run, part, value) for part, value in (parts or {}).items()]
    fields: dict[str, Any] = {
        "id": "7b0c7a52-6c4e-4f0e-9d53-0a4a3b5c6d7e",
        "created": _CREATED,
        "tool": Tool(name="lucid", version="0.1.0"),
        "command": ("python", "train.py"),
        "arms": _ARMS,
        "pairs": num_pairs,
        "primary": next(iter(metrics)),
    }
    host = dict(identity or {})
    env = Env(scope="host", identity=host, volatile=dict(volatile or {}), identity_digest=identity_digest(host))
    report = Report(
        path="report.jsonl",
        header=Header(**(fields | dict(header or {}))),
        envs=(env,),
        runs=tuple(runs),
        states=tuple(found),
    )
    pairs = [pair_record(report, base, other) for base, other in zip(runs[::2], runs[1::2], strict=True)]
    return replace(report, pairs=tuple(pairs))


def _run(run: int, metrics: dict[str, Metric], replays: int) -> Run:
    group = CaptureGroup(captured=replays > 0, recordings=int(replays > 0), replays=replays, reasons={"warming_up": 2})
    return Run(
        run=run,
        pair=run // 2,
        arm=_ARMS[run % 2].name,
        status="ok",
        returncode=0,
        started=_CREATED,
        process_ns=2_000_000_000,
        metrics=metrics,
        capture=(CaptureReport(optimizer="MuSGD", requested=run % 2 == 1, groups=(group,)),),
        agent=AgentHealth(loaded=True, num_processes=1, num_steps=11),
    )


def _state(run: int, part: str, value: Any) -> State:
    found = _DIGEST if value is _STATE else digest_state(value)
    return State(
        run=run,
        part=part,
        digest=found.digest,
        num_tensors=found.num_tensors,
        num_bytes=found.num_bytes,
        strides_digest=found.strides_digest,
        tensors=found.tensors,
        values=found.values,
        nonfinite=found.nonfinite,
    )
