"""What a report says of a monitor's log: metrics of the wall, series, the account of the memory."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lucid_profiler import jsonio
from lucid_profiler.codec import from_plain, to_plain
from lucid_profiler.collect_device import Inside
from lucid_profiler.collect_monitor import Monitored, observe_monitor, unmonitored
from lucid_profiler.context import Measured
from lucid_profiler.entries import AllocatorEntry
from lucid_profiler.memory_account import memory_account
from lucid_profiler.monitor.log import LogWriter
from lucid_profiler.monitor.records import End, Event, Header, Mark, ReasonsChanged, Record, Sample
from lucid_profiler.monitor.records import Gap as LoggedGap
from lucid_profiler.monitor_mark import FIT_MARKS
from lucid_profiler.monitored import Gap, MemoryAccount, MonitorReport
from lucid_profiler.records import Samples, Wall

S = 1_000_000_000
MIB = 2**20
GPU = "GPU-1"
WALL = Wall(source="fit", begin_ns=10 * S, end_ns=20 * S)


def header(**fields: Any) -> Header:
    """Return the header of a log with one GPU."""
    known: dict[str, Any] = {
        "target": {"pid": 1, "start_ticks": 2, "argv": ["train"]},
        "started": "2026-01-01T00:00:00Z",
        "anchor": {"mono_ns": 0, "wall_ns": 0, "boot_ns": 0, "uncertainty_ns": 0},
        "interval_ns": S,
        "tiers": {"fast_ns": S, "slow_ns": S},
        "devices": ({"uuid": GPU, "name": "H200", "memory_total_bytes": 141 * 2**30, "is_target": True},),
        "memory_api": "v2",
        "reason": None,
        "versions": {},
    }
    return Header(**{**known, **fields})


def sample(at_s: float, *, host: dict[str, Any] | None = None, **gpu: Any) -> Sample:
    """Return a sample of the one GPU."""
    return Sample(mono_ns=int(at_s * S), late_ns=1000, host=host or {}, gpus={GPU: gpu} if gpu else {})


def end(**fields: Any) -> End:
    """Return the last record of a log."""
    known: dict[str, Any] = {
        "mono_ns": 21 * S,
        "num_samples": 1,
        "num_missed": 2,
        "late_ns": {"median": 1000, "p99": 2000, "max": 3000},
        "gaps": (),
        "num_gaps": 0,
        "distinct": {},
        "own_cpu_s": 0.1,
        "wall_s": 20.0,
        "nvml_s": 0.01,
        "nvml_calls": {},
        "num_dropped_records": 0,
        "status": "target_exit",
    }
    return End(**{**known, **fields})


def observed(
    folder: Path, *records: Record, head: Header | None = None, wall: Wall = WALL, inside: Inside | None = None
) -> Monitored:
    """Write a log and return what is made of it."""
    path = folder / "monitor.jsonl"
    writer = LogWriter(path, header=lambda _: head or header(), mono_ns=lambda: 0)
    for record in records:
        assert writer.write(record)
    writer.close()
    return observe_monitor(path, run=3, wall=wall, inside=inside)


def every_second(**gpu: Any) -> list[Sample]:
    """Return samples from 8 s to 22 s that read the same."""
    return [sample(at, host={"cpu_time_s": float(at)}, **gpu) for at in range(8, 23)]


def test_means_are_of_the_wall_and_of_readings_that_exist(tmp_path: Path) -> None:
    """Samples outside the wall and nulls inside it count on neither side."""
    inside = [sample(10 + at, power_draw_mw=100_000 * (1 + at % 2), utilization_gpu_percent=50) for at in range(10)]
    samples = [
        sample(9, power_draw_mw=900_000, utilization_gpu_percent=100),
        *inside,
        sample(15.5, power_draw_mw=None, utilization_gpu_percent=None),
        sample(21, power_draw_mw=900_000, utilization_gpu_percent=100),
    ]
    metrics = observed(tmp_path, *samples, end()).metrics
    assert metrics["gpu_power"].value == pytest.approx(150.0)
    assert metrics["gpu_utilization"].value == pytest.approx(0.5)


def test_a_mean_over_half_the_wall_is_none_of_the_wall(tmp_path: Path) -> None:
    """The monitor was held up in the middle: what was read before says nothing of the rest."""
    samples = [sample(at, power_draw_mw=100_000) for at in (8, 9, 10, 11, 12, 13, 18, 19, 20, 21, 22)]
    metric = observed(tmp_path, *samples, end()).metrics["gpu_power"]
    assert (metric.value, metric.reason) == (None, "gap")


def test_cpu_time_is_the_growth_in_the_wall(tmp_path: Path) -> None:
    """At each end it lies between the samples around it."""
    assert observed(tmp_path, *every_second(power_draw_mw=1), end()).metrics["cpu_time"].value == 10.0
    (tmp_path / "monitor.jsonl").unlink()
    wall = Wall(source="fit", begin_ns=8 * S + S // 4, end_ns=20 * S + S // 2)
    assert observed(tmp_path, *every_second(a=1), end(), wall=wall).metrics["cpu_time"].value == pytest.approx(12.25)


@pytest.mark.parametrize("kept", [range(8, 15), range(13, 23)], ids=["died early", "came late"])
def test_cpu_time_of_half_the_wall_is_none_of_it(tmp_path: Path, kept: range) -> None:
    """A monitor that was killed, or was late, has not seen what the process used."""
    samples = [sample(at, host={"cpu_time_s": float(at)}) for at in kept]
    metric = observed(tmp_path, *samples).metrics["cpu_time"]
    assert (metric.value, metric.reason) == (None, "gap")


def rarely(*at_s: float, until_s: float = 22) -> list[Sample]:
    """Return a sample every tenth of a second from 8 s on, of which these have the processor time, two cores' worth."""
    ticks = [round(8 + 0.1 * tick, 1) for tick in range(round((until_s - 8) * 10) + 1)]
    return [sample(at, host={"cpu_time_s": 2 * (at - 8)} if at in at_s else {"rss_bytes": 1}) for at in ticks]


TENTHS = header(interval_ns=S // 10)


def test_processor_time_read_at_the_marks_stands_for_the_walls_ends(tmp_path: Path) -> None:
    """A tree of many processes is read rarely; at the ends of `fit()` it is read all the same."""
    marks = [
        Mark(mono_ns=round(at * S), name=name, energy_mj={}, read_ns=round(at * S), cpu_time_s=2 * (at - 8))
        for name, at in zip(FIT_MARKS, (9.99, 14.01), strict=True)
    ]
    wall = Wall(source="fit", begin_ns=10 * S, end_ns=14 * S)
    seen = observed(tmp_path, *marks, *rarely(8.5, 11.5, 13.0, 15.9), end(), head=TENTHS, wall=wall)
    assert seen.metrics["cpu_time"].value == pytest.approx(8.0)


def test_without_marks_a_tree_that_was_read_too_rarely_says_so(tmp_path: Path) -> None:
    """It is no gap: the monitor was there."""
    wall = Wall(source="steps", begin_ns=10 * S, end_ns=14 * S)
    metric = observed(tmp_path, *rarely(8.5, 11.5, 13.0, 15.9), end(), head=TENTHS, wall=wall).metrics["cpu_time"]
    assert (metric.value, metric.reason) == (None, "read_too_rarely")


@pytest.mark.parametrize(("last_s", "value"), [(19.5, 23.0), (19.3, None)])
def test_the_last_reading_of_a_process_may_lie_a_twentieth_of_its_wall_before_its_end(
    tmp_path: Path, last_s: float, value: float | None
) -> None:
    """Of ten seconds and more that is half a second."""
    wall = Wall(source="process", begin_ns=8 * S, end_ns=20 * S)
    samples = rarely(8.5, 11.5, 14.0, last_s, until_s=20)
    metric = observed(tmp_path, *samples, end(), head=TENTHS, wall=wall).metrics["cpu_time"]
    assert metric.value == (None if value is None else pytest.approx(value))
    assert metric.reason == (None if value is not None else "read_too_rarely")


def test_the_counter_has_no_bound_where_power_was_read_too_rarely(tmp_path: Path) -> None:
    """Nobody knows how large it was in the tenth of a second that the counter may be off by."""
    marks = [
        Mark(mono_ns=at * S, name=name, energy_mj={GPU: 400_000 * at}, read_ns=at * S)
        for name, at in zip(FIT_MARKS, (10, 20), strict=True)
    ]
    samples = every_second(power_draw_mw=400_000)
    (rare,) = observed(tmp_path, *marks, *samples, end(), head=header(interval_ns=5 * S)).report.energy
    assert (rare.source, rare.value_j, rare.bound_j) == ("counter", 4000.0, None)
    (tmp_path / "monitor.jsonl").unlink()
    (often,) = observed(tmp_path, *marks, *samples, end()).report.energy
    assert often.bound_j == pytest.approx(40)


def test_cpu_time_of_a_whole_process_begins_at_nothing(tmp_path: Path) -> None:
    """The first sample comes after the process began."""
    wall = Wall(source="process", begin_ns=5 * S, end_ns=20 * S)
    assert observed(tmp_path, *every_second(a=1), end(), wall=wall).metrics["cpu_time"].value == 20.0


def test_cpu_time_of_a_few_samples_is_below_the_resolution(tmp_path: Path) -> None:
    """A difference of one sample's width would be a large share of it."""
    wall = Wall(source="fit", begin_ns=10 * S, end_ns=15 * S)
    assert observed(tmp_path, *every_second(a=1), end(), wall=wall).metrics["cpu_time"].reason == "too_few_samples"


def test_an_unreadable_field_keeps_its_reason(tmp_path: Path) -> None:
    """Also for the metric that is made of it; nothing becomes 0."""
    why = ReasonsChanged(mono_ns=S, fields={f"gpu:{GPU}.power_draw_mw": "not_supported"})
    seen = observed(tmp_path, why, *every_second(power_draw_mw=None), end())
    assert (seen.metrics["gpu_power"].value, seen.metrics["gpu_power"].reason) == (None, "not_supported")
    assert seen.metrics["gpu_energy"].value is None
    assert seen.report.reasons == {f"gpu:{GPU}.power_draw_mw": "not_supported"}


def test_a_run_shorter_than_the_readings_window_has_no_mean(tmp_path: Path) -> None:
    """One reading of power may cover a whole second."""
    wall = Wall(source="fit", begin_ns=10 * S, end_ns=10 * S + S // 3)
    metrics = observed(tmp_path, *every_second(power_draw_mw=1, utilization_gpu_percent=1), end(), wall=wall).metrics
    assert {metrics[name].reason for name in ("gpu_power", "gpu_utilization")} == {"below_resolution"}


def test_energy_is_the_counters_where_the_ends_were_marked(tmp_path: Path) -> None:
    """Else it comes from the power readings, and the report says which, with its bound."""
    marks = [
        Mark(mono_ns=10 * S, name=FIT_MARKS[0], energy_mj={GPU: 1_000_000}, read_ns=10 * S),
        Mark(mono_ns=20 * S, name=FIT_MARKS[1], energy_mj={GPU: 4_000_000}, read_ns=20 * S),
    ]
    samples = every_second(power_draw_mw=300_000)
    counted = observed(tmp_path, *marks, *samples, end())
    (tmp_path / "monitor.jsonl").unlink()
    held = observed(tmp_path, *samples, end())
    assert [one.source for one in counted.report.energy] == ["counter"]
    assert counted.metrics["gpu_energy"].value == pytest.approx(3000.0)
    assert [one.source for one in held.report.energy] == ["power_held"]
    assert held.metrics["gpu_energy"].value == pytest.approx(3000.0)
    (note,) = held.notes
    assert f"the energy counter of {GPU} was not used: the monitor was not there, or did not answer in time" in note
    (tmp_path / "monitor.jsonl").unlink()
    assert observed(tmp_path, *samples, end(), wall=dataclasses.replace(WALL, source="steps")).notes == ()
    assert counted.report.energy[0].bound_j == pytest.approx(30.0)


def _counted(watts: float, begin: tuple[float, float], end: tuple[float, float], *, uuid: str = GPU) -> list[Mark]:
    """Return the marks of a wall whose counters of a steady power are read late in the calls with these ends."""
    marks = []
    for name, wall_ns, (before_s, after_s) in zip(FIT_MARKS, (WALL.begin_ns, WALL.end_ns), (begin, end), strict=True):
        energy = {uuid: round(watts * after_s * 1e3)}
        window = {uuid: (int(before_s * S), int(after_s * S))}
        marks.append(
            Mark(mono_ns=wall_ns - S // 3, name=name, energy_mj=energy, read_ns=wall_ns + S // 3, energy_ns=window)
        )
    return marks


def test_each_device_s_counter_has_a_window_of_its_own(tmp_path: Path) -> None:
    """Another device was read before it; its energy is scaled to the wall, and what that may be off by is said."""
    marks = _counted(400, (9.70, 9.90), (20.20, 20.40))
    seen = observed(tmp_path, *marks, *every_second(power_draw_mw=400_000), end())
    (energy,) = seen.report.energy
    assert energy.source == "counter"
    assert energy.value_j == pytest.approx(4_000)
    # A step of the counter, half of both calls, and the time in which the window reaches beyond the wall.
    watts = 400 * (0.1 + 0.1 + 0.1 + 0.2 + 0.3)
    assert energy.bound_j == pytest.approx(watts)


def test_marks_without_a_window_of_each_device_have_that_of_the_mark(tmp_path: Path) -> None:
    """Logs of before it was written are read all the same."""
    marks = [
        Mark(mono_ns=int(at * S), name=name, energy_mj={GPU: round(400_000 * (at + 0.3))}, read_ns=int((at + 0.4) * S))
        for name, at in zip(FIT_MARKS, (9.6, 20.0), strict=True)
    ]
    (energy,) = observed(tmp_path, *marks, *every_second(power_draw_mw=400_000), end()).report.energy
    assert energy.value_j == pytest.approx(4_000)
    assert energy.bound_j == pytest.approx(400 * (0.1 + 0.2 + 0.2 + 0.2 + 0.2))


def test_the_bound_is_of_the_largest_power_that_was_read(tmp_path: Path) -> None:
    """What lies at the ends may be far above the mean."""
    marks = _counted(100, (9.9, 9.9), (20.1, 20.1))
    samples = [sample(at, power_draw_mw=700_000 if at == 20 else 100_000) for at in range(8, 23)]
    (energy,) = observed(tmp_path, *marks, *samples, end()).report.energy
    assert energy.bound_j == pytest.approx(700 * (0.1 + 0.2))


def test_power_that_is_read_more_rarely_than_every_second_is_held(tmp_path: Path) -> None:
    """Every reading until the next one is due."""
    samples = [sample(6 + 1.5 * at, power_draw_mw=400_000) for at in range(12)]
    (energy,) = observed(tmp_path, *samples, end(), head=header(interval_ns=3 * S // 2)).report.energy
    assert (energy.source, energy.coverage) == ("power_held", 1.0)
    assert energy.value_j == pytest.approx(4_000)


def test_two_energies_that_disagree_are_a_note(tmp_path: Path) -> None:
    """The counter says ten times what the power readings say."""
    marks = [
        Mark(mono_ns=10 * S, name=FIT_MARKS[0], energy_mj={GPU: 0}, read_ns=10 * S),
        Mark(mono_ns=20 * S, name=FIT_MARKS[1], energy_mj={GPU: 30_000_000}, read_ns=20 * S),
    ]
    seen = observed(tmp_path, *marks, *every_second(power_draw_mw=300_000), end())
    assert any("30000.0 J" in note and "3000.0 J" in note for note in seen.notes)
    (energy,) = seen.report.energy
    assert (energy.value_j, energy.bound_j) == (30_000, None)  # a bound that does not hold is none


def test_of_several_devices_those_count_in_which_the_run_has_memory(tmp_path: Path) -> None:
    """And where nobody can say which, the metric is null rather than the sum of the machine."""
    devices = tuple({"uuid": uuid, "is_target": True} for uuid in (GPU, "GPU-2"))
    why = ReasonsChanged(mono_ns=S, fields={f"gpu:{GPU}.process_memory_bytes": "pid_namespace"})
    both = [
        Sample(mono_ns=at * S, late_ns=0, host={}, gpus={GPU: {"power_draw_mw": 100}, "GPU-2": {"power_draw_mw": 7}})
        for at in range(8, 23)
    ]
    hidden = observed(tmp_path, why, *both, end(), head=header(devices=devices)).metrics["gpu_power"]
    (tmp_path / "monitor.jsonl").unlink()
    unused = observed(tmp_path, *both, end(), head=header(devices=devices)).metrics["gpu_power"]
    (tmp_path / "monitor.jsonl").unlink()
    assert (hidden.reason, unused.reason) == ("pid_namespace", "no_gpu_memory")
    mine = sample(11, process_memory_bytes=5 * MIB)
    metrics = observed(tmp_path, *both, mine, end(), head=header(devices=devices)).metrics
    (tmp_path / "monitor.jsonl").unlink()
    named = observed(tmp_path, *both, end(), head=header(devices=devices), inside=Inside(uuids=("2",)))
    assert named.metrics["gpu_power"].value == pytest.approx(0.007)
    assert metrics["gpu_power"].value == pytest.approx(0.1)
    assert metrics["gpu_process_memory"].value == 5 * MIB


def test_series_are_split_by_how_often_a_field_is_read(tmp_path: Path) -> None:
    """Columns are equally long, none has a null where nothing was asked."""
    samples = [sample(10, a=1), sample(11, a=None, slow=5), sample(12, a=3)]
    series = {one.series: one for one in observed(tmp_path, *samples, end()).samples if one.series.startswith("gpu")}
    assert series[f"gpu:{GPU}"].columns["a"] == (1, None, 3)
    assert series[f"gpu:{GPU}:slow"].columns == {"mono_ns": (11 * S,), "late_ns": (1000,), "slow": (5,)}
    assert all(one.run == 3 for one in series.values())


def test_fields_that_are_read_at_other_times_have_series_of_their_own(tmp_path: Path) -> None:
    """None loses the moments at which another one was left out."""
    samples = [sample(10, a=1, b=1), sample(11, a=2, c=2), sample(12, a=3, b=3), sample(13, a=4)]
    series = {one.series: one for one in observed(tmp_path, *samples, end()).samples if one.series.startswith("gpu")}
    assert series[f"gpu:{GPU}:slow"].columns["b"] == (1, 3)
    assert series[f"gpu:{GPU}:slow2"].columns["c"] == (2,)


def test_a_driver_that_comes_later_is_there(tmp_path: Path) -> None:
    """The header was written before it; its devices are in an event."""
    devices = Event(mono_ns=S, name="devices", data={"devices": [{"uuid": GPU, "is_target": True}], "reason": None})
    head = header(devices=(), reason="no_driver")
    seen = observed(tmp_path, devices, *every_second(power_draw_mw=100_000), end(), head=head)
    assert seen.metrics["gpu_power"].value == pytest.approx(100.0)
    assert seen.report.nvml_reason is None


def test_a_counter_that_went_back_is_said(tmp_path: Path) -> None:
    """The power readings take its place, and the reader is told."""
    marks = [
        Mark(mono_ns=10 * S, name=FIT_MARKS[0], energy_mj={GPU: 9_000_000}, read_ns=10 * S),
        Mark(mono_ns=20 * S, name=FIT_MARKS[1], energy_mj={GPU: 1_000}, read_ns=20 * S),
    ]
    seen = observed(tmp_path, *marks, *every_second(power_draw_mw=300_000), end())
    assert seen.report.energy[0].source == "power_held"
    assert any("counter went backwards" in note for note in seen.notes)


def test_a_mark_of_another_moment_does_not_count(tmp_path: Path) -> None:
    """Another process of the run marked its own interval, two seconds before."""
    marks = [
        Mark(mono_ns=8 * S, name=FIT_MARKS[0], energy_mj={GPU: 0}, read_ns=8 * S),
        Mark(mono_ns=20 * S, name=FIT_MARKS[1], energy_mj={GPU: 9_000_000}, read_ns=20 * S),
    ]
    seen = observed(tmp_path, *marks, *every_second(power_draw_mw=300_000), end())
    assert seen.report.energy[0].source == "power_held"


def test_an_account_is_of_the_device_that_the_process_names(tmp_path: Path) -> None:
    """What torch holds on one device is put on no other, and a device of which nothing is said has no account."""
    devices = tuple({"uuid": uuid, "is_target": True} for uuid in (GPU, "GPU-2"))
    memory = {"memory_total_bytes": 100, "memory_reserved_bytes": 0, "memory_used_bytes": 60, "memory_free_bytes": 40}
    both = [
        Sample(mono_ns=at * S, late_ns=0, host={}, gpus={GPU: {**memory}, "GPU-2": {**memory}}) for at in range(8, 23)
    ]
    lines = [
        AllocatorEntry(mono_ns=at * S, step=1, device=0, reserved_bytes=7, allocated_bytes=5) for at in range(8, 23)
    ]
    inside = Inside(uuids=("1", "2"), allocator={"1": lines})
    seen = observed(tmp_path, *both, end(), head=header(devices=devices), inside=inside)
    assert [account.uuid for account in seen.report.memory] == [GPU]
    (tmp_path / "monitor.jsonl").unlink()
    assert not observed(tmp_path, *both, end(), head=header(devices=devices)).report.memory


def test_long_series_are_cut_into_records(tmp_path: Path) -> None:
    """None holds more rows than the format allows, and none is lost."""
    samples = [sample(1 + at / 1000, a=at) for at in range(Samples.MAX_ROWS + 5)]
    parts = [one for one in observed(tmp_path, *samples, end()).samples if one.series == f"gpu:{GPU}"]
    assert [len(part.columns["a"]) for part in parts] == [Samples.MAX_ROWS, 5]


def test_the_log_s_own_account_is_in_the_report(tmp_path: Path) -> None:
    """Missed deadlines, gaps, events, and what sampling cost."""
    gap = LoggedGap(begin_ns=S, end_ns=2 * S, reason="lost")
    event = Event(mono_ns=S, name="wall_step", data={})
    last = end(gaps=({"begin_ns": S, "end_ns": 2 * S, "reason": "lost"},), num_gaps=1)
    report = observed(tmp_path, gap, event, *every_second(a=1), last).report
    assert (report.num_samples, report.num_missed, report.own_cpu_s, report.nvml_s) == (15, 2, 0.1, 0.01)
    assert [one.reason for one in report.gaps] == ["lost"]
    assert report.events == {"wall_step": 1}
    assert (report.late_median_ns, report.late_max_ns) == (1000, 1000)


def test_the_gap_of_one_device_is_not_one_of_everything(tmp_path: Path) -> None:
    """While it was lost the rest was sampled."""
    gaps = [
        {"begin_ns": S, "end_ns": 2 * S, "reason": "lost", "device": GPU, "num_records": None},
        {"begin_ns": S, "end_ns": 2 * S, "reason": "late", "device": None, "num_records": None},
    ]
    report = observed(tmp_path, *every_second(a=1), end(gaps=tuple(gaps), num_gaps=2)).report
    assert [(gap.reason, gap.device) for gap in report.gaps] == [("lost", GPU), ("late", None)]


def test_how_often_things_were_read_is_in_the_report(tmp_path: Path) -> None:
    """And how often the driver did not answer."""
    cadence = {"tree": {"num": 7, "longest_ns": 2 * S}}
    report = observed(tmp_path, *every_second(a=1), end(cadence=cadence, num_nvml_errors=3)).report
    assert (report.cadence, report.num_nvml_errors) == (cadence, 3)


def test_a_last_record_of_before_says_nothing_of_what_it_did_not_count(tmp_path: Path) -> None:
    """Not that there were no errors."""
    report = observed(tmp_path, *every_second(a=1), end()).report
    assert (report.cadence, report.num_nvml_errors) == ({}, None)


def test_a_log_without_its_end_is_read_and_said(tmp_path: Path) -> None:
    """A monitor that was killed leaves its samples."""
    seen = observed(tmp_path, *every_second(power_draw_mw=1))
    report = seen.report
    assert report.num_samples == 15
    assert report.num_missed is None
    assert any("without its last record" in note for note in seen.notes)


def test_a_monitor_that_did_not_end_is_not_said_to_have_lost_nothing(tmp_path: Path) -> None:
    """Its gaps are those that it wrote as they ended; how much was lost after them nobody counted."""
    gaps = [
        LoggedGap(begin_ns=S, end_ns=2 * S, reason="disk_full", num_records=500),
        LoggedGap(begin_ns=2 * S, end_ns=9 * S, reason="lost", device=GPU),
    ]
    report = observed(tmp_path, *gaps, *every_second(power_draw_mw=1)).report
    assert [(gap.begin_ns, gap.reason, gap.device) for gap in report.gaps] == [
        (S, "disk_full", None),
        (2 * S, "lost", GPU),
    ]
    assert report.num_dropped_records is None
    assert (report.cadence, report.num_nvml_errors) == ({}, None)


def test_what_reports_have_not_had_from_the_begin_is_left_out_where_it_says_nothing() -> None:
    """So older readers see what they know, and reports of before are read."""
    report = MonitorReport(gaps=(Gap(begin_ns=1, end_ns=2, reason="late"),))
    plain = to_plain(report)
    assert not {"cadence", "num_nvml_errors"} & plain.keys()
    assert plain["gaps"] == [{"begin_ns": 1, "end_ns": 2, "reason": "late"}]
    assert from_plain(MonitorReport, plain, Counter()) == report


def test_all_that_reports_say_now_comes_back() -> None:
    """As it was written."""
    report = MonitorReport(
        gaps=(Gap(begin_ns=1, end_ns=2, reason="lost", device=GPU),),
        num_dropped_records=None,
        cadence={"pss": {"num": 3, "longest_ns": S}},
        num_nvml_errors=2,
        memory=(MemoryAccount(uuid=GPU, mono_ns=1, rows=(), unread_peak_bytes=5, unread_peak_ns=4),),
    )
    unknown: Counter[str] = Counter()
    assert from_plain(MonitorReport, jsonio.loads(jsonio.dumps(to_plain(report))), unknown) == report
    assert not unknown


@pytest.mark.parametrize("content", [None, b"", b"not a log\n{}\n"])
def test_a_log_that_cannot_be_read_raises_nothing(tmp_path: Path, content: bytes | None) -> None:
    """The run counts all the same, its metrics are null with the reason."""
    path = tmp_path / "monitor.jsonl"
    if content is not None:
        path.write_bytes(content)
    seen = observe_monitor(path, run=0, wall=WALL)
    assert seen.report == unmonitored("no_monitor_log").report
    assert len(seen.notes) == 1
    assert {metric.reason for metric in seen.metrics.values()} == {"no_monitor_log"}


def test_without_a_driver_the_same_metrics_are_null(tmp_path: Path) -> None:
    """The schema does not depend on the machine."""
    host = [sample(at, host={"cpu_time_s": float(at)}) for at in range(8, 23)]
    seen = observed(tmp_path, *host, end(), head=header(devices=(), reason="no_driver", memory_api=None))
    assert seen.metrics.keys() == unmonitored("x").metrics.keys()
    assert seen.metrics["cpu_time"].value == 10.0
    assert {metric.reason for name, metric in seen.metrics.items() if name != "cpu_time"} == {"no_driver"}


@pytest.mark.parametrize(
    ("first", "later", "reported"),
    [(None, ["v2"], "v2"), ("v2", ["v1", "v2"], "v1"), ("v2", [], "v2"), (None, [], None), ("v2", [None], "v2")],
)
def test_the_memory_api_is_the_oldest_that_answered(
    tmp_path: Path, first: str | None, later: list[str | None], reported: str | None
) -> None:
    """Also one that came after the header; the older one counts the driver's own memory as used."""
    events = [
        Event(mono_ns=9 * S, name="devices", data={"devices": [{"uuid": GPU}], "reason": None, "memory_api": version})
        for version in later
    ]
    seen = observed(tmp_path, *events, end(), head=header(memory_api=first))
    assert seen.report.memory_api == reported


def _account(samples: Sequence[Sample], *, context: Measured | None, pools: int | None = 0) -> dict[str, int | None]:
    entries = [
        AllocatorEntry(
            mono_ns=at * S,
            step=at,
            device=0,
            allocated_bytes=300 * MIB,
            reserved_bytes=400 * MIB,
            private_pools_bytes=pools,
            private_pools_allocated_bytes=pools,
        )
        for at in range(8, 23)
    ]
    accounted = memory_account(GPU, samples, allocator=entries, context=context, reasons={})
    assert accounted is not None
    return {row.name: row.value_bytes for row in accounted.account.rows}


def _memory(at_s: float, used_mib: int) -> Sample:
    total, reserved = 10_000 * MIB, 500 * MIB
    used = used_mib * MIB
    return sample(
        at_s,
        memory_total_bytes=total,
        memory_reserved_bytes=reserved,
        memory_used_bytes=used,
        memory_free_bytes=total - reserved - used,
        process_memory_bytes=900 * MIB,
        others_memory_bytes=50 * MIB,
    )


def test_the_account_is_of_the_largest_moment_and_adds_up() -> None:
    """Each level is the sum of the next one."""
    rows = _account([_memory(9, 900), _memory(10, 960), _memory(11, 930)], context=Measured(bytes=490 * MIB))
    assert rows["used on the device"] == (960 + 500) * MIB
    assert rows["used on the device"] == sum(
        rows[name] or 0 for name in ("reserved by the driver", "other processes", "this run", "residue of the device")
    )
    assert rows["residue of the run"] == (900 - 490 - 400) * MIB
    assert rows["cached"] == 100 * MIB


def test_the_account_is_made_over_the_whole_run() -> None:
    """Each time adds up by itself, and those with a large residue are counted."""
    samples = [_memory(9, 900), _memory(10, 960), _memory(11, 1400)]
    entries = [AllocatorEntry(mono_ns=8 * S + at * S, step=1, device=0, reserved_bytes=400 * MIB) for at in range(8)]
    accounted = memory_account(GPU, samples, allocator=entries, context=Measured(bytes=490 * MIB), reasons={})
    assert accounted is not None
    columns = accounted.columns
    assert columns["mono_ns"] == (9 * S, 10 * S, 11 * S)
    for at in range(3):
        parts = (columns[f"{name}_bytes"][at] for name in ("driver_reserved", "others", "target", "device_residue"))
        assert columns["device_used_bytes"][at] == sum(part or 0 for part in parts)
    assert (accounted.account.num_times, accounted.account.num_times_warned) == (3, 2)


def test_what_was_not_measured_is_null_in_the_account() -> None:
    """An unknown context leaves the residue unknown, and does not make it larger."""
    rows = _account([_memory(10, 960)], context=None, pools=None)
    assert rows["residue of the run"] is None
    assert rows["cached"] is None
    assert rows["reserved by torch"] == 400 * MIB


def test_figures_that_are_too_old_do_not_count() -> None:
    """The allocator's last line was eight seconds before the sample."""
    rows = _account([_memory(30, 960)], context=Measured(bytes=1))
    assert rows["reserved by torch"] is None
