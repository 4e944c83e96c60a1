"""Reports for pages, written record by record: one with everything, and what hostile writers would put into one."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lucid_profiler.compare import pair_record
from lucid_profiler.kernels import KernelRow, KernelTable, Launches
from lucid_profiler.monitored import MemoryAccount, MemoryRow, MonitoredDevice, MonitorReport
from lucid_profiler.reader import Report
from lucid_profiler.records import (
    AgentHealth,
    Arm,
    CaptureGroup,
    CaptureReport,
    End,
    Env,
    Header,
    Kernels,
    Metric,
    Phase,
    Record,
    Run,
    Samples,
    Slot,
    State,
    Tool,
    Wall,
)
from lucid_profiler.writer import Writer

Columns = dict[str, tuple[int | float | None, ...]]

CREATED = "2026-01-02T03:04:05.000Z"
UUID = "GPU-00000000-0000-0000-0000-000000000001"
MIB = 1 << 20
POWER_CAP = 0x4
HOSTILE = "</script><script>window.hacked=1</script>\"'><img src=x onerror=window.hacked=1>\u2028%{y}<b>$x$"


def header(arms: Sequence[Arm], *, pairs: int, command: tuple[str, ...] = ("python", "train.py")) -> Header:
    """Return a header with its slots: pairs of the base and each other arm in turn."""
    others = [arm.name for arm in arms[1:]]
    slots = []
    for pair in range(pairs * len(others)):
        names = (arms[0].name, others[pair % len(others)])
        slots += [Slot(slot=2 * pair + side, pair=pair, arm=name) for side, name in enumerate(names)]
    return Header(
        id="00000000-0000-0000-0000-000000000001",
        created=CREATED,
        tool=Tool(name="lucid", version="0.1.0"),
        command=command,
        arms=tuple(arms),
        pairs=pairs,
        discarded_pairs=0,
        slots=tuple(slots),
    )


def run_of(slot: Slot, *, seconds: float, notes: tuple[str, ...] = ()) -> Run:
    """Return a run on a GPU, with phases and a monitor."""
    end_ns = round(seconds * 1e9)
    third = end_ns // 3
    return Run(
        run=slot.slot,
        pair=slot.pair,
        arm=slot.arm,
        status="ok",
        returncode=0,
        started=CREATED,
        process_ns=end_ns,
        wall=Wall(source="fit", begin_ns=0, end_ns=end_ns),
        metrics={
            "wall": Metric(value=seconds, unit="s"),
            "step_time_median": Metric(value=0.05, unit="s"),
            "peak_allocated": Metric(value=700 * MIB, unit="By", exact=True),
            "gpu_energy": Metric(value=100 * seconds, unit="J"),
        },
        capture=(
            CaptureReport(
                optimizer="MuSGD",
                requested=slot.arm != "native",
                groups=(CaptureGroup(captured=slot.arm != "native", recordings=1, replays=9 * (slot.arm != "native")),),
            ),
        ),
        agent=AgentHealth(loaded=True, num_processes=1, num_steps=100),
        phases=(
            Phase(name="train", begin_ns=0, end_ns=third),
            Phase(name="validate", begin_ns=third, end_ns=end_ns),
        ),
        notes=notes,
        monitor=MonitorReport(
            interval_ns=100_000_000,
            num_samples=100,
            devices=(MonitoredDevice(uuid=UUID, name="NVIDIA L4"),),
            memory=(
                MemoryAccount(
                    uuid=UUID,
                    mono_ns=0,
                    rows=(
                        MemoryRow(name="used on the device", value_bytes=2000 * MIB),
                        MemoryRow(name="this run", value_bytes=None, reason="not_read", level=1),
                    ),
                ),
            ),
        ),
    )


def samples_of(run: Run, *, num: int = 100) -> list[Samples]:
    """Return steps, readings of a GPU that is held down for a while, its memory's account, and the host's."""
    assert run.wall is not None
    times = tuple(place * run.wall.end_ns // num for place in range(num))
    held = range(num // 4, num // 2)
    steps: Columns = {"begin_ns": times, "end_ns": tuple(at + 2_000_000 for at in times), "optimizer": (0,) * num}
    gpu: Columns = {
        "mono_ns": times,
        "power_draw_mw": tuple(70_000 + 1000 * math.sin(place) for place in range(num)),
        "clock_sm_mhz": tuple(1500 if place in held else 1980 for place in range(num)),
        "temperature_c": tuple(40 + place // 10 for place in range(num)),
        "utilization_gpu_percent": (None,) * num,
        "clocks_event_reasons": tuple(POWER_CAP if place in held else 0 for place in range(num)),
    }
    memory: Columns = {
        "mono_ns": times,
        **{f"{name}_bytes": (size * MIB,) * num for name, size in _ACCOUNT.items()},
    }
    host: Columns = {"mono_ns": times, "rss_bytes": tuple((500 + place) * MIB for place in range(num))}
    by_name = {"steps": steps, f"gpu:{UUID}": gpu, f"memory:{UUID}": memory, "host": host}
    return [
        Samples(
            run=run.run,
            series=name,
            columns={key: column[at : at + Samples.MAX_ROWS] for key, column in columns.items()},
        )
        for name, columns in by_name.items()
        for at in range(0, num, Samples.MAX_ROWS)
    ]


_ACCOUNT = {
    "device_used": 2000,
    "driver_reserved": 600,
    "others": 0,
    "target": 1400,
    "context": 600,
    "torch_reserved": 750,
    "allocated": 700,
    "graph_pools": 20,
    "cached": 30,
    "target_residue": 50,
    "device_residue": 0,
}


def kernels_of(arm: str, name: str = "gram") -> Kernels:
    """Return a traced process of an arm."""
    row = KernelRow(
        name=name,
        kind="kernel",
        count=100,
        total_ns=3_400_000,
        median_ns=34_000,
        count_per_step=5.0,
        ns_per_step=170_000.0,
    )
    table = KernelTable(
        pid=1, device="cuda", num_warmup_steps=8, num_steps=20, rows=(row,), launches=Launches(kernels=2000, graphs=20)
    )
    return Kernels(arm=arm, status="ok", table=table)


def states_of(run: Run, *, part: str = "model", digest: str = "0" * 64) -> State:
    """Return the state of one run."""
    return State(run=run.run, part=part, digest=digest, num_tensors=2, num_bytes=12, strides_digest="1" * 64)


def write_rich_report(
    path: Path,
    *,
    arms: Sequence[Arm] = (Arm(name="native", env={"LUCID_CAPTURE_UPDATES": "0"}), Arm(name="captured")),
    pairs: int = 3,
    num_samples: int = 100,
    hostile: str = "",
) -> None:
    """Write a whole report.

    Args:
        path: file to write.
        arms: the first one is the base.
        pairs: of each other arm.
        num_samples: of each series of each run.
        hostile: text that takes the place of every name where one may stand.
    """
    command = ("python", hostile) if hostile else ("python", "train.py")
    head = header(arms, pairs=pairs, command=command)
    runs = [
        run_of(
            slot,
            seconds=(10 if slot.arm == arms[0].name else 9) + 0.1 * math.cos(slot.slot),
            notes=(hostile,) * bool(hostile),
        )
        for slot in head.slots
    ]
    if hostile:
        runs = [
            replace(run, phases=(Phase(name=hostile, begin_ns=0, end_ns=10**9),), output_tail=hostile) for run in runs
        ]
        runs = [replace(run, metrics={**run.metrics, hostile: Metric(value=1.5, unit=hostile)}) for run in runs]
    states = [states_of(run, part=hostile or "model") for run in runs]
    report = Report(path=str(path), header=head, runs=tuple(runs), states=tuple(states))
    couples = list(zip(runs[::2], runs[1::2], strict=True))
    records: list[Record] = [
        head,
        Env(scope="host", identity={"gpu_name": hostile or "NVIDIA L4", "driver_major": "580"}),
        Env(scope="process", run=0, identity={"torch": "2.9.1"}),
        Env(scope="process", run=3, identity={"torch": hostile or "2.9.2"}),
        *runs,
        *states,
        *(samples for run in runs for samples in samples_of(run, num=num_samples)),
        *(kernels_of(arm.name, hostile or "gram") for arm in arms),
        *(pair_record(report, *couple) for couple in couples),
    ]
    with Writer(path, overwrite=True) as writer:
        for record in records:
            writer.write(record)
        writer.write(End(status="complete", num_records=len(records)))
