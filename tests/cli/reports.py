"""Small reports with known numbers, written as the command writes them."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from lucid_cli.experiment import ARMS, RULES, plan_slots
from lucid_cli.recorder import Recorder, make_env
from lucid_profiler.collect import Observation
from lucid_profiler.collect_device import Inside
from lucid_profiler.digest import digest_state
from lucid_profiler.reader import Report
from lucid_profiler.records import (
    AgentHealth,
    Arm,
    CaptureGroup,
    CaptureReport,
    Header,
    Metric,
    Phase,
    Run,
    RunStatus,
    Slot,
    State,
    Tool,
    Wall,
)
from lucid_profiler.writer import Writer

CREATED = "2026-01-02T03:04:05.000Z"
MIB = 1 << 20
# Ten complete fits of a published measurement: seconds and MiB, native and captured.
WALLS = ((120.850, 108.750), (120.542, 108.123), (122.793, 110.967), (120.700, 108.600), (121.000, 109.100))
MODEL = {"stem.weight": [0.5, -1.25], "head.bias": [0.0]}
FLIPPED = {**MODEL, "stem.weight": [0.5, -1.2500000000000002]}


def write_report(
    path: Path,
    walls: Sequence[tuple[float, float]] = WALLS,
    *,
    identity: Mapping[str, Any] | None = None,
    states: Mapping[int, Any] | None = None,
    statuses: Mapping[int, RunStatus] | None = None,
    reasons: Mapping[str, dict[str, int]] | None = None,
    command: tuple[str, ...] = ("python", "train.py"),
    notes: tuple[str, ...] = (),
    overridden: bool = False,
    num_processes: int = 1,
    phases: Mapping[str, Sequence[tuple[str, float]]] | None = None,
) -> Report:
    """Write a report and return it.

    Args:
        path: file to write.
        walls: seconds of native and captured run, a pair an entry.
        identity: what the host is.
        states: by run, the model that it ended with; `MODEL` where nothing is said, None for no state.
        statuses: by run, where it is not ok.
        reasons: by arm, why it replayed nothing; without an entry the captured arm replays, the native one does not.
        command: the measured command.
        notes: of each run.
        overridden: whether the arm won over an explicit argument of the script, in each run.
        num_processes: that recorded in each run.
        phases: by arm, name and share of the wall of one phase after the other.
    """
    slots = plan_slots(len(walls), 0)
    header = Header(
        id=str(uuid.uuid5(uuid.NAMESPACE_URL, path.name)),
        created=CREATED,
        tool=Tool(name="lucid", version="0.1.0"),
        command=command,
        arms=ARMS,
        pairs=len(walls),
        discarded_pairs=0,
        slots=slots,
        rules=RULES,
    )
    with Writer(path, overwrite=True) as writer:
        recorder = Recorder(writer, header)
        recorder.add_host(make_env("host", dict(identity or {"gpu_name": "NVIDIA L4", "driver_major": "580"}), {}))
        for slot in slots:
            seconds = walls[slot.pair][slot.arm == "captured"]
            status = (statuses or {}).get(slot.slot, "ok")
            wall = Wall(source="fit", begin_ns=0, end_ns=round(seconds * 1e9))
            run = Run(
                run=slot.slot,
                pair=slot.pair,
                arm=slot.arm,
                status=status,
                returncode=0 if status == "ok" else 3,
                started=CREATED,
                process_ns=wall.end_ns,
                wall=wall,
                metrics={
                    "wall": Metric(value=seconds, unit="s"),
                    "peak_rss": Metric(value=(900 if slot.arm == "captured" else 850) * MIB, unit="By"),
                    "peak_allocated": Metric(value=None, unit="By", reason="no_cuda"),
                },
                capture=(replace(_capture(slot.arm, (reasons or {}).get(slot.arm)), overridden=overridden),),
                agent=AgentHealth(loaded=True, num_processes=num_processes, num_steps=640),
                phases=_phases((phases or {}).get(slot.arm, ()), wall),
                notes=notes,
            )
            recorder.add_run(run, _observation(run, (states or {}).get(slot.slot, MODEL)))
        return recorder.finish("failed" if statuses else "complete")


def write_arms(
    path: Path,
    arms: Sequence[Arm],
    pairs: Sequence[tuple[str, float, float]],
    *,
    header: Mapping[str, Any] | None = None,
    states: Mapping[int, Any] | None = None,
    taints: Mapping[int, tuple[str, ...]] | None = None,
) -> Report:
    """Write a report of several arms, the base first in each pair, and return it.

    Args:
        path: file to write.
        arms: of the header, the base first.
        pairs: name of the other arm, seconds of the base's run, seconds of the other's.
        header: what it says otherwise.
        states: by run, the model that it ended with; `MODEL` where nothing is said, None for no state.
        taints: by run, what bent it.
    """
    slots = arm_slots(arms, pairs)
    made = replace(make_arms_header(path, arms, slots), **(header or {}))
    with Writer(path, overwrite=True) as writer:
        recorder = Recorder(writer, made)
        add_runs(recorder, slots, [wall for _, *walls in pairs for wall in walls], states=states, taints=taints)
        return recorder.finish("complete")


def arm_slots(
    arms: Sequence[Arm], pairs: Sequence[tuple[str, float, float]], *, slot: int = 0, pair: int = 0
) -> tuple[Slot, ...]:
    """Return the slots of pairs with the base first, numbered on from the given ones."""
    names = [name for other, *_ in pairs for name in (arms[0].name, other)]
    return tuple(Slot(slot=slot + at, pair=pair + at // 2, arm=name) for at, name in enumerate(names))


def make_arms_header(path: Path, arms: Sequence[Arm], slots: tuple[Slot, ...]) -> Header:
    """Return the header of a report of several arms."""
    measured = {slot.pair for slot in slots if slot.arm == arms[1].name}
    return Header(
        id=str(uuid.uuid5(uuid.NAMESPACE_URL, path.name)),
        created=CREATED,
        tool=Tool(name="lucid", version="0.1.0"),
        command=("python", "train.py"),
        arms=tuple(arms),
        pairs=len(measured),
        discarded_pairs=0,
        slots=slots,
    )


def add_runs(
    recorder: Recorder,
    slots: Sequence[Slot],
    walls: Sequence[float],
    *,
    states: Mapping[int, Any] | None = None,
    taints: Mapping[int, tuple[str, ...]] | None = None,
    identities: Sequence[Mapping[str, Any]] | None = None,
    statuses: Mapping[int, RunStatus] | None = None,
) -> None:
    """Record a run for each of the slots that has a wall, in seconds."""
    for place, (slot, seconds) in enumerate(zip(slots, walls, strict=False)):
        wall = Wall(source="fit", begin_ns=0, end_ns=round(seconds * 1e9))
        run = Run(
            run=slot.slot,
            pair=slot.pair,
            arm=slot.arm,
            discarded=slot.discarded,
            status=(statuses or {}).get(slot.slot, "ok"),
            returncode=0,
            started=CREATED,
            process_ns=wall.end_ns,
            wall=wall,
            metrics={"wall": Metric(value=seconds, unit="s")},
            agent=AgentHealth(loaded=True, num_processes=1, num_steps=640),
            taints=(taints or {}).get(slot.slot, ()),
        )
        observation = _observation(run, (states or {}).get(slot.slot, MODEL))
        if identities is not None:
            observation = replace(observation, identity=dict(identities[place]))
        recorder.add_run(run, observation)


def _phases(shares: Sequence[tuple[str, float]], wall: Wall) -> tuple[Phase, ...]:
    begins = [0, *accumulate(round(share * wall.end_ns) for _, share in shares)]
    return tuple(
        Phase(name=name, begin_ns=begin, end_ns=end)
        for (name, _), (begin, end) in zip(shares, pairwise(begins), strict=True)
    )


def _capture(arm: str, reasons: dict[str, int] | None) -> CaptureReport:
    replays = 638 if arm == "captured" and reasons is None else 0
    group = CaptureGroup(
        captured=replays > 0,
        recordings=int(replays > 0),
        replays=replays,
        reasons=reasons or ({"warmup": 2} if replays else {"not_requested": 640}),
    )
    return CaptureReport(optimizer="MuSGD", requested=arm == "captured", groups=(group,))


def _observation(run: Run, model: Any) -> Observation:
    digest = None if model is None else digest_state(model)
    states = (
        ()
        if digest is None
        else (
            State(
                run=run.run,
                part="model",
                digest=digest.digest,
                num_tensors=digest.num_tensors,
                num_bytes=digest.num_bytes,
                strides_digest=digest.strides_digest,
                tensors=digest.tensors,
                values=digest.values,
                nonfinite=digest.nonfinite,
            ),
        )
    )
    assert run.wall is not None
    return Observation(
        wall=run.wall,
        metrics=run.metrics,
        capture=run.capture,
        devices=Inside(),
        agent=run.agent,
        phases=(),
        states=states,
        samples=(),
        identity={"torch": "2.9.1+cu129", "python": "3.11.7"},
        volatile={},
        notes=run.notes,
    )
