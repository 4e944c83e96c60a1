import dataclasses
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lucid_profiler.monitor.gpu import Gpus
from lucid_profiler.monitor.gpu_reader import GpuReader, NoGpus
from lucid_profiler.monitor.log import Log, read_log
from lucid_profiler.monitor.records import End, Event, Gap, Header, Mark, ReasonsChanged, Sample, TargetExit
from lucid_profiler.monitor.sampler import Sampler
from lucid_profiler.monitor.target import Target
from lucid_profiler.monitor.tree import Tree
from lucid_profiler.whole_lines import WholeLines
from support import fake_nvml
from support.clock import ManualClock

INTERVAL_NS = 100_000_000
UUID = fake_nvml.UUID
HOST = {
    "cpu_time_s",
    "rss_bytes",
    "num_processes",
    "num_threads",
    "read_bytes",
    "write_bytes",
    "memory_available_bytes",
}
FAST = {
    "memory_total_bytes",
    "memory_reserved_bytes",
    "memory_used_bytes",
    "memory_free_bytes",
    "utilization_gpu_percent",
    "utilization_memory_percent",
    "power_draw_mw",
    "clock_sm_mhz",
    "clock_memory_mhz",
    "clocks_event_reasons",
    "temperature_c",
}


class Run:
    """A sampler of one waiting process on a clock that the test moves."""

    def __init__(self, path: Path, pid: int) -> None:
        self.clock = ManualClock()
        self.path = path
        self.target = Target(pid)
        self.sampler = Sampler(self.target, path, gpus=NoGpus("nvml_off"), clock=self.clock, interval_ns=INTERVAL_NS)

    def use_gpus(self) -> None:
        self.sampler.use(Gpus.open(clock=self.clock.mono_ns))

    def ticks(self, num: int) -> None:
        for _ in range(num):
            self.sampler.tick()
            self.clock.pass_ns(INTERVAL_NS)

    def finish(self, status: str = "stopped") -> Log:
        self.sampler.finish(status)
        return read_log(self.path)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Give a sampler of a process that waits."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        made = Run(tmp_path / "monitor.jsonl", process.pid)
        yield made
        made.target.close()
        process.kill()


def samples_of(log: Log) -> list[Sample]:
    """Return the samples of a log."""
    return [record for record in log.records if isinstance(record, Sample)]


def test_without_devices_the_log_has_the_same_form(run: Run) -> None:
    """Host fields are read, devices are an empty list, and the header says why."""
    run.sampler.begin()
    run.ticks(11)
    log = run.finish()
    header, end = log.records[0], log.records[-1]
    assert isinstance(header, Header)
    assert (header.reason, header.devices, header.memory_api) == ("nvml_off", (), None)
    assert header.target["pid"] == run.target.pid
    samples = samples_of(log)
    assert [set(sample.host or {}) for sample in samples] == [HOST | {"pss_bytes"}, *[HOST] * 9, HOST | {"pss_bytes"}]
    assert all(sample.gpus == {} for sample in samples)
    assert isinstance(end, End)
    assert (end.num_samples, end.num_missed, end.num_gaps, end.status) == (11, 0, 0, "stopped")
    assert (end.nvml_s, end.nvml_calls, end.num_nvml_errors, end.num_dropped_records) == (0, {}, 0, 0)
    slow = {"num": 2, "longest_ns": 10 * INTERVAL_NS}
    assert end.cadence == {"children": slow, "tree": {"num": 11, "longest_ns": INTERVAL_NS}, "pss": slow}


def test_a_tree_that_is_read_more_rarely_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a reading takes 1.2 ms, 0.4 % of a core is one in 0.3 s: no deadline is missed, yet fields are absent."""

    def cpu_ns() -> int:
        run.clock.cpu += 1_200_000
        return run.clock.cpu

    monkeypatch.setattr(run.clock, "cpu_ns", cpu_ns)
    run.sampler.begin()
    run.ticks(11)
    log = run.finish()
    is_read = ["cpu_time_s" in (sample.host or {}) for sample in samples_of(log)]
    assert is_read == [index in {0, 1, 3, 6, 9} for index in range(11)]
    end = log.records[-1]
    assert isinstance(end, End)
    assert end.num_missed == 0
    assert end.cadence["tree"] == {"num": 5, "longest_ns": 3 * INTERVAL_NS}


def test_own_processor_time_counts_from_the_start_of_the_process(run: Run) -> None:
    """Opening the driver and importing modules come before the first sample and are part of the cost."""
    run.clock.cpu = 1_250_000_000
    run.sampler.begin()
    run.clock.cpu += 500_000_000
    assert run.sampler.status()["own_cpu_s"] == 1.75
    end = run.finish().records[-1]
    assert isinstance(end, End)
    assert end.own_cpu_s == 1.75


def test_a_mark_has_the_processor_time_of_its_moment(run: Run) -> None:
    """Whatever tier is due: at the ends of a wall it is wanted."""
    run.sampler.begin()
    run.sampler.mark("fit begin")
    marks = [record for record in run.finish().records if isinstance(record, Mark)]
    times = [mark.cpu_time_s for mark in marks if mark.cpu_time_s is not None]
    assert len(times) == 3
    assert times == sorted(times)


def test_devices_are_read_by_tier(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cheap fields at every tick, processes once a second, the energy counter at marks only."""
    fake_nvml.install(fake_nvml.H200, tmp_path, monkeypatch)
    run.use_gpus()
    run.sampler.begin()
    run.ticks(21)
    assert set(run.sampler.mark("fit begin")["energy_mj"]) == {UUID}
    log = run.finish()
    header, end = log.records[0], log.records[-1]
    assert isinstance(header, Header)
    assert isinstance(end, End)
    assert (header.reason, header.memory_api) == (None, "v2")
    assert [device["uuid"] for device in header.devices] == [UUID]
    fields = [set(sample.gpus[UUID]) for sample in samples_of(log)]
    is_slow = ["process_memory_bytes" in names for names in fields]
    assert is_slow == [index % 10 == 0 for index in range(21)]
    assert all(names >= FAST for names in fields)
    assert not any("energy_mj" in names for names in fields)
    marks = [record for record in log.records if isinstance(record, Mark)]
    assert [mark.name for mark in marks] == ["begin", "fit begin", "end"]
    assert all(mark.energy_mj[UUID] for mark in marks)
    for mark in marks:
        ((uuid, (begin_ns, end_ns)),) = mark.energy_ns.items()
        assert uuid == UUID
        assert mark.mono_ns <= begin_ns <= end_ns <= mark.read_ns
    assert end.nvml_calls["power_usage"]["num"] == 21
    assert end.cadence["processes"] == {"num": 3, "longest_ns": 10 * INTERVAL_NS}
    assert end.distinct[f"gpu:{UUID}.power_draw_mw"] == 1


def test_time_inside_the_driver_and_its_errors_are_counted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all calls, those of opening included."""
    calls: dict[str, Any] = {"power_usage": {"error": 3}, "mig_mode": {"value": [0, 0], "latency_us": 10_000}}
    fake_nvml.install(fake_nvml.scenario(fake_nvml.device(**calls)), tmp_path, monkeypatch)
    run.use_gpus()
    run.sampler.begin()
    run.ticks(2)
    end = run.finish().records[-1]
    assert isinstance(end, End)
    assert end.nvml_s >= 0.01
    assert end.nvml_s == pytest.approx(sum(one["total_ns"] for one in end.nvml_calls.values()) / 1e9)
    assert end.nvml_calls["mig_mode"]["total_ns"] >= 10_000_000
    assert end.num_nvml_errors == 1


def test_a_child_that_the_driver_lists_is_the_target_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was started since the last look at the machine's processes; from then on it is followed."""
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        run = Run(tmp_path / "monitor.jsonl", process.pid)
        listed = fake_nvml.device(compute_processes=[[child, 9 * 2**30], [os.getpid(), 2**30]])
        fake_nvml.install(fake_nvml.scenario(listed), tmp_path, monkeypatch)
        monkeypatch.setattr(Tree, "scan", lambda _: None)
        run.use_gpus()
        run.sampler.begin()
        run.ticks(2)
        log = run.finish()
        run.target.close()
        os.killpg(process.pid, signal.SIGKILL)
    first, second = samples_of(log)
    values = first.gpus[UUID]
    assert (values["process_memory_bytes"], values["others_memory_bytes"]) == (9 * 2**30, 2**30)
    assert (second.host or {})["num_processes"] == 2


def test_the_reason_of_a_null_stands_before_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader always knows why a field is None, and reasons are not repeated."""
    power = [{"value": 5000}, {"error": 3, "from_call": 3}]
    fake_nvml.install(fake_nvml.scenario(fake_nvml.device(power_usage=power)), tmp_path, monkeypatch)
    run.use_gpus()
    run.sampler.begin()
    run.ticks(8)
    log = run.finish()
    reasons: dict[str, str] = {}
    nulls = []
    for record in log.records:
        if isinstance(record, ReasonsChanged):
            reasons = dict(record.fields)
        if isinstance(record, Sample):
            names = [f"gpu:{UUID}.{field}" for field, value in record.gpus[UUID].items() if value is None]
            nulls += [(name, reasons[name]) for name in names]
    name = f"gpu:{UUID}.power_draw_mw"
    assert (name, "not_supported") in nulls
    changes = [record for record in log.records if isinstance(record, ReasonsChanged)]
    assert len({tuple(sorted(change.fields.items())) for change in changes}) == len(changes)


def test_a_device_that_is_lost_leaves_a_gap(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time without readings is a record, the values are None, and the host goes on."""
    names = ("memory_v2", "memory", "utilization", "power_usage", "clock_sm", "clock_memory", "reasons", "temperature")
    base = fake_nvml.device()["calls"]
    lost: dict[str, Any] = {
        name: [{"value": base[name]}, {"error": 15, "from_call": 5}, {"value": base[name], "from_call": 8}]
        for name in names
    }
    fake_nvml.install(fake_nvml.scenario(fake_nvml.device(**lost)), tmp_path, monkeypatch)
    run.use_gpus()
    run.sampler.begin()
    run.ticks(100)
    log = run.finish()
    gaps = [record for record in log.records if isinstance(record, Gap) and record.device == UUID]
    assert gaps
    assert {gap.reason for gap in gaps} == {"lost"}
    absent = [
        sample.mono_ns
        for sample in samples_of(log)
        if all(value is None for value in sample.gpus.get(UUID, {}).values())
    ]
    assert absent
    assert all(any(gap.begin_ns <= mono_ns <= gap.end_ns for gap in gaps) for mono_ns in absent)
    assert all((sample.host or {})["rss_bytes"] for sample in samples_of(log))


def test_a_hold_up_is_a_gap_and_is_counted(run: Run) -> None:
    """Deadlines that passed meanwhile are missed, not made up for."""
    run.sampler.begin()
    run.ticks(3)
    run.clock.pass_ns(7 * INTERVAL_NS + INTERVAL_NS // 2)
    run.ticks(3)
    log = run.finish()
    samples, end = samples_of(log), log.records[-1]
    (gap,) = (record for record in log.records if isinstance(record, Gap))
    assert (gap.begin_ns, gap.end_ns, gap.reason) == (samples[2].mono_ns, samples[3].mono_ns, "late")
    assert [sample.late_ns for sample in samples[:4]] == [0, 0, 0, INTERVAL_NS // 2]
    assert isinstance(end, End)
    assert (end.num_samples, end.num_missed, end.late_ns["max"]) == (6, 7, INTERVAL_NS // 2)
    assert [dict(one)["reason"] for one in end.gaps] == ["late"]


@pytest.mark.parametrize(("share", "reason"), [(0.9, "slow_driver"), (0.3, "late")])
def test_deadlines_that_pass_inside_the_driver_are_its_own(
    run: Run, monkeypatch: pytest.MonkeyPatch, share: float, reason: str
) -> None:
    """A gap names the driver where its calls took most of the time, and only then."""
    gpus = NoGpus("nvml_off")
    spent_ns = 5 * INTERVAL_NS

    def read_slowly() -> dict[str, Any]:
        run.clock.pass_ns(spent_ns)
        gpus.nvml_ns = {"power_usage": gpus.nvml_ns.get("power_usage", 0) + round(share * spent_ns)}
        return {}

    monkeypatch.setattr(gpus, "read_fast", read_slowly)
    run.sampler.use(gpus)
    run.sampler.begin()
    run.ticks(3)
    log = run.finish()
    assert {record.reason for record in log.records if isinstance(record, Gap)} == {reason}


def test_a_hold_up_until_the_end_is_a_gap_and_is_counted(run: Run) -> None:
    """Also where no sample follows it."""
    run.sampler.begin()
    run.ticks(3)
    run.clock.pass_ns(7 * INTERVAL_NS + INTERVAL_NS // 2)
    end_ns = run.clock.mono
    log = run.finish()
    gap = Gap(begin_ns=samples_of(log)[-1].mono_ns, end_ns=end_ns, reason="late")
    assert [record for record in log.records if isinstance(record, Gap)] == [gap]
    end = log.records[-1]
    assert isinstance(end, End)
    assert (end.num_samples, end.num_missed, end.num_gaps) == (3, 7, 1)
    assert list(end.gaps) == [dataclasses.asdict(gap)]


def test_a_disk_without_room_is_a_gap_of_the_last_record(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the log says of it by itself is in the account of the whole run, too."""

    def refuse(_lines: WholeLines, _line: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run.sampler.begin()
    run.ticks(2)
    with monkeypatch.context() as full:
        full.setattr(WholeLines, "append", refuse)
        run.ticks(3)
    run.ticks(2)
    log = run.finish()
    (gap,) = (record for record in log.records if isinstance(record, Gap))
    assert (gap.reason, gap.num_records) == ("disk_full", 3)
    end = log.records[-1]
    assert isinstance(end, End)
    assert (end.num_dropped_records, end.num_gaps, list(end.gaps)) == (3, 1, [dataclasses.asdict(gap)])


def test_a_driver_that_comes_late_was_missing_until_then(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time before is a gap of the device with the driver's reason, and the version of its memory query is told."""
    late = fake_nvml.scenario(fake_nvml.device(), init=[{"error": 9}, {"value": None, "from_call": 1}])
    fake_nvml.install(late, tmp_path, monkeypatch)
    run.use_gpus()
    run.sampler.begin()
    run.ticks(15)
    log = run.finish()
    samples = samples_of(log)
    first = next(sample for sample in samples if UUID in sample.gpus)
    assert first.mono_ns - samples[0].mono_ns == 10 * INTERVAL_NS
    gap = Gap(begin_ns=samples[0].mono_ns, end_ns=first.mono_ns, reason="no_driver", device=UUID)
    assert [record for record in log.records if isinstance(record, Gap)] == [gap]
    (event,) = (record for record in log.records if isinstance(record, Event) and record.name == "devices")
    assert (event.data["memory_api"], event.data["reason"]) == ("v2", None)


def test_another_thread_can_write_the_last_records(run: Run) -> None:
    """Where the loop does not come to it: the target's end, what was missed, a note, the end; and nothing after it."""
    run.sampler.begin()
    run.ticks(3)
    since_ns = run.clock.mono + 5 * INTERVAL_NS
    run.clock.pass_ns(20 * INTERVAL_NS)

    def abandon_twice() -> None:
        run.sampler.abandon("target_exit", since_ns=since_ns)
        run.sampler.abandon("target_exit", since_ns=since_ns)

    other = threading.Thread(target=abandon_twice, daemon=True)
    other.start()
    other.join()
    records = read_log(run.path).records
    gap, exited, note, end = records[-4:]
    assert gap == Gap(begin_ns=samples_of(read_log(run.path))[-1].mono_ns, end_ns=since_ns, reason="late")
    assert isinstance(exited, TargetExit)
    assert isinstance(note, Event)
    assert isinstance(end, End)
    assert (note.name, end.status, end.num_samples, end.num_missed) == ("note", "target_exit", 3, 5)
    assert [record for record in records if isinstance(record, End)] == [end]


def test_sleep_and_a_clock_that_is_set_are_events(run: Run) -> None:
    """Whatever spans them can be voided; durations do not change."""
    run.sampler.begin()
    run.ticks(2)
    run.clock.sleep_s(60)
    run.ticks(2)
    run.clock.wall -= 3600 * 10**9
    run.ticks(2)
    log = run.finish()
    events = {record.name: record.data["size_ns"] for record in log.records if isinstance(record, Event)}
    assert events == {"suspend": 60 * 10**9, "wall_step": -3600 * 10**9}
    assert [record.reason for record in log.records if isinstance(record, Gap)] == ["suspend"]
    times = [sample.mono_ns for sample in samples_of(log)]
    assert [after - before for before, after in pairwise(times)] == [INTERVAL_NS] * 5


def test_the_end_of_the_target_is_recorded(tmp_path: Path) -> None:
    """With the signal that ended it, before the last record."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        run = Run(tmp_path / "monitor.jsonl", process.pid)
        run.sampler.begin()
        run.ticks(1)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        run.sampler.note_exit()
        log = run.finish("target_exit")
        run.target.close()
    (found,) = (record for record in log.records if isinstance(record, TargetExit))
    assert found.status == {"returncode": None, "signal": "SIGKILL"}
    end = log.records[-1]
    assert isinstance(end, End)
    assert end.status == "target_exit"


def test_devices_satisfy_what_the_sampler_asks() -> None:
    """The readers of devices and of none are interchangeable."""
    readers: list[type[GpuReader]] = [Gpus, NoGpus]
    assert readers


def test_memory_stays_flat(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand samples more leave nothing behind."""
    fake_nvml.install(fake_nvml.H200, tmp_path, monkeypatch)
    run.use_gpus()
    run.sampler.begin()
    run.ticks(500)
    tracemalloc.start()
    try:
        run.ticks(100)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        run.ticks(2000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000
    run.finish()
