"""What a run shows of itself while it goes on, read from the ends of a ring and of a monitor's log."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from lucid_profiler import jsonio
from lucid_profiler.glance import Glance, Glancer
from lucid_profiler.monitor.records import Header, Record, Sample, to_fields
from lucid_profiler.ring import RingWriter

MS = 1_000_000
GIB = 2**30


def header(*uuids: str) -> Header:
    """Return the first record of a log with these devices, all of which the run may use."""
    return Header(
        target={"pid": 1},
        started="2026-01-01T00:00:00Z",
        anchor={},
        interval_ns=100 * MS,
        tiers={},
        devices=tuple({"uuid": uuid, "is_target": True} for uuid in uuids),
        memory_api="v2",
        reason=None,
        versions={},
    )


def sample(mono_ns: int | None = None, **gpus: dict[str, Any]) -> Sample:
    """Return a sample of devices, taken now."""
    return Sample(mono_ns=mono_ns or time.monotonic_ns(), late_ns=0, host=None, gpus=gpus)


def write(run_dir: Path, *records: Record) -> None:
    """Append records to the log of a run's monitor."""
    with (run_dir / "monitor.jsonl").open("ab") as file:
        file.writelines(jsonio.dumps(to_fields(record)) + b"\n" for record in records)


def test_nothing_is_known_before_there_is_a_file(tmp_path: Path) -> None:
    """Of a run that has just begun, or has no agent and no monitor, nothing is made up."""
    assert Glancer(tmp_path).look() == Glance()
    assert Glancer(tmp_path / "gone").look() == Glance()


@pytest.mark.parametrize("capacity", [5, 64, 65_536])
def test_the_newest_step_is_found_at_every_length(tmp_path: Path, capacity: int) -> None:
    """Also after the ring has begun to overwrite itself, however many steps came between two looks."""
    ring = RingWriter(tmp_path / "steps-7.ring", capacity=capacity)
    glancer = Glancer(tmp_path)
    step = 0
    for num in (1, 1, 2, 3, 17, 64, 1, 200):
        for _ in range(num):
            step += 1
            ring.write(step * 10 * MS + step * step, step * 10 * MS + 5 * MS, 0, step=step)
        seen = glancer.look()
        assert seen.step == step
        # The oldest slot of a ring that has just begun again lies alone.
        expected = 10 * MS + 2 * step - 1
        assert seen.step_ns == (expected if (step - 1) % capacity and step > 1 else None)
    assert Glancer(tmp_path).look().step == step
    ring.close()


def test_of_several_optimizers_the_first_one_s_steps_are_told(tmp_path: Path) -> None:
    """A step lasts until the same optimizer begins another."""
    ring = RingWriter(tmp_path / "steps-7.ring", capacity=64)
    for step in range(1, 6):
        ring.write(step * 30 * MS, step * 30 * MS + MS, 0, step=step)
        ring.write(step * 30 * MS + 7 * MS, step * 30 * MS + 8 * MS, 1, step=step)
    assert Glancer(tmp_path).look() == Glance(step=5, step_ns=30 * MS)
    ring.close()


def test_the_steps_are_those_of_what_the_process_executed_last(tmp_path: Path) -> None:
    """A process that executed itself anew goes on in a file of its own, and others are not looked at meanwhile."""
    glancer = Glancer(tmp_path)
    for name, step in (("7", 5), ("7.2", 1), ("7.10", 2)):
        ring = RingWriter(tmp_path / f"steps-{name}.ring", capacity=64)
        ring.write(step * MS, step * MS + 1, 0, step=step)
        ring.close()
        assert glancer.look().step == step
        RingWriter(tmp_path / f"steps-6.{step}.ring", capacity=64).close()


def test_a_look_leaves_the_ring_as_it_is(tmp_path: Path) -> None:
    """It is opened for reading; the writer and the report get what they would have got without it."""
    path = tmp_path / "steps-7.ring"
    ring = RingWriter(path, capacity=64)
    ring.write(MS, 2 * MS, 0, step=1)
    path.chmod(0o400)
    before = path.read_bytes(), path.stat().st_mtime_ns
    Glancer(tmp_path).look()
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    ring.close()


@pytest.mark.parametrize("data", [b"", b"LUCIDRNG", b"\0" * 4096, b"LUCIDRNG" + b"\0" * 4096])
def test_a_file_that_is_no_ring_yet_tells_nothing(tmp_path: Path, data: bytes) -> None:
    """As in the moment in which it is made."""
    (tmp_path / "steps-7.ring").write_bytes(data)
    assert Glancer(tmp_path).look() == Glance()


def test_the_run_s_own_memory_comes_before_what_all_use(tmp_path: Path) -> None:
    """The driver lists it once a second; in the samples between it holds."""
    write(tmp_path, header("A"), sample(A={"memory_used_bytes": 9 * GIB, "process_memory_bytes": 2 * GIB}))
    write(tmp_path, sample(A={"memory_used_bytes": 9 * GIB}))
    assert Glancer(tmp_path).look() == Glance(memory_bytes=2 * GIB)


def test_where_the_driver_hides_whose_memory_it_is_the_device_s_is_told(tmp_path: Path) -> None:
    """Under a name of its own, and only if there is one device that it can be about."""
    sheet = {"memory_used_bytes": 9 * GIB, "process_memory_bytes": None}
    write(tmp_path, header("A"), sample(A=sheet))
    assert Glancer(tmp_path).look() == Glance(used_bytes=9 * GIB)
    write(tmp_path, header("A", "B"), sample(A=sheet, B=sheet))
    assert Glancer(tmp_path).look() == Glance()


def test_of_several_devices_the_fullest_counts(tmp_path: Path) -> None:
    """It is the one that runs out first."""
    write(tmp_path, header("A", "B"), sample(A={"process_memory_bytes": 2 * GIB}, B={"process_memory_bytes": 3 * GIB}))
    assert Glancer(tmp_path).look().memory_bytes == 3 * GIB


def test_memory_of_long_ago_is_not_known(tmp_path: Path) -> None:
    """A monitor that died says nothing of now."""
    old_ns = time.monotonic_ns() - 6_000 * MS
    write(tmp_path, header("A"), sample(old_ns, A={"memory_used_bytes": 9 * GIB, "process_memory_bytes": 2 * GIB}))
    assert Glancer(tmp_path).look() == Glance()


def test_the_log_is_read_on_from_where_the_last_look_ended(tmp_path: Path) -> None:
    """A line that is being written is taken when it is whole, and a log that was set aside is begun again."""
    log = tmp_path / "monitor.jsonl"
    write(tmp_path, header("A"), sample(A={"process_memory_bytes": GIB}))
    glancer = Glancer(tmp_path)
    assert glancer.look().memory_bytes == GIB
    line = jsonio.dumps(to_fields(sample(A={"process_memory_bytes": 2 * GIB}))) + b"\n"
    with log.open("ab", buffering=0) as file:
        file.write(line[:20])
        assert glancer.look().memory_bytes == GIB
        file.write(line[20:])
    assert glancer.look().memory_bytes == 2 * GIB
    os.replace(log, tmp_path / "monitor.jsonl.0")  # noqa: PTH105 - as the writer does
    write(tmp_path, header("A"), sample(A={"process_memory_bytes": 3 * GIB}))
    assert glancer.look().memory_bytes == 3 * GIB


def test_a_log_that_grew_long_is_read_at_its_end_only(tmp_path: Path) -> None:
    """What was skipped may be cut in the middle of a line."""
    write(tmp_path, header("A"))
    glancer = Glancer(tmp_path)
    glancer.look()
    write(tmp_path, *[sample(A={"process_memory_bytes": num * GIB}) for num in range(1, 2001)])
    assert glancer.look().memory_bytes == 2000 * GIB
