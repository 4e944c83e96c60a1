"""Why a metric of the sampling is null: the reason is of the run's interval and device, and is true."""

from pathlib import Path
from typing import Any

import pytest

from lucid_profiler.collect_device import Inside
from lucid_profiler.collect_monitor import Monitored, observe_monitor
from lucid_profiler.monitor.log import LogWriter
from lucid_profiler.monitor.records import Event, Gap, Header, Mark, ReasonsChanged, Record, Sample
from lucid_profiler.monitor_mark import FIT_MARKS
from lucid_profiler.records import Wall

S = 1_000_000_000
GPU, OTHER = "GPU-1", "GPU-2"
WALL = Wall(source="fit", begin_ns=10 * S, end_ns=20 * S)


def header(*uuids: str, targets: tuple[str, ...] | None = None, reason: str | None = None) -> Header:
    """Return the header of a log of these devices, sampled every second."""
    allowed = uuids if targets is None else targets
    return Header(
        target={"pid": 1, "start_ticks": 2, "argv": ["train"]},
        started="2026-01-01T00:00:00Z",
        anchor={"mono_ns": 0, "wall_ns": 0, "boot_ns": 0, "uncertainty_ns": 0},
        interval_ns=S,
        tiers={"fast_ns": S, "slow_ns": S},
        devices=tuple({"uuid": uuid, "is_target": uuid in allowed} for uuid in uuids),
        memory_api="v2",
        reason=reason,
        versions={},
    )


def samples(*, uuid: str = GPU, **fields: Any) -> list[Sample]:
    """Return a sample every second from 8 s to 22 s; a field's value, or a function of the time in s."""
    return [
        Sample(
            mono_ns=at * S,
            late_ns=0,
            host=None,
            gpus={uuid: {name: of(at) if callable(of) else of for name, of in fields.items()}},
        )
        for at in range(8, 23)
    ]


def why(at_s: float, **reasons: str) -> ReasonsChanged:
    """Return the reasons that the fields of the first device have from a moment on."""
    return ReasonsChanged(mono_ns=round(at_s * S), fields={f"gpu:{GPU}.{name}": of for name, of in reasons.items()})


def mark(at_s: int, name: str, energy_mj: float | None) -> Mark:
    """Return a mark at which the first device's counter said this."""
    return Mark(mono_ns=at_s * S, name=name, energy_mj={GPU: energy_mj}, read_ns=at_s * S)


def marks(begin_mj: float | None, end_mj: float | None) -> tuple[Mark, Mark]:
    """Return the marks of the interval's ends."""
    return mark(10, FIT_MARKS[0], begin_mj), mark(20, FIT_MARKS[1], end_mj)


def observed(
    folder: Path, *records: Record, head: Header | None = None, used: tuple[str, ...] = (), wall: Wall = WALL
) -> Monitored:
    """Write a log in the order of its times and return what is made of it."""
    path = folder / "monitor.jsonl"
    writer = LogWriter(path, header=lambda _: head or header(GPU), mono_ns=lambda: 0)
    for record in sorted(records, key=_time):
        assert writer.write(record)
    writer.close()
    return observe_monitor(path, run=0, wall=wall, inside=Inside(uuids=used))


def _time(record: Record) -> tuple[int, bool]:
    at_ns = record.end_ns if isinstance(record, Gap) else 0 if isinstance(record, Header) else record.mono_ns
    return at_ns, isinstance(record, Sample)


def known(seen: Monitored, name: str) -> tuple[float | None, str | None]:
    """Return the value of a metric and its reason."""
    return seen.metrics[name].value, seen.metrics[name].reason


LOST = Gap(begin_ns=12 * S, end_ns=14 * S, reason="lost", device=GPU)


def test_a_counter_of_a_device_that_was_lost_in_between_tells_nothing(tmp_path: Path) -> None:
    """It began anew and has passed its first reading: 300 J were used, the difference is 100 J."""
    read = samples(power_draw_mw=lambda at: None if at in {13, 14} else 30_000)
    seen = observed(tmp_path, LOST, why(13, power_draw_mw="lost"), *marks(10_000, 110_000), *read)
    (energy,) = seen.report.energy
    assert (energy.value_j, energy.bound_j, energy.reason) == (None, None, "lost")
    assert known(seen, "gpu_energy") == (None, "lost")
    assert any(f"the energy counter of {GPU} was not used: the GPU has fallen off" in note for note in seen.notes)


def test_power_that_was_read_stands_for_a_counter_of_a_device_that_was_lost(tmp_path: Path) -> None:
    """Where enough of it was."""
    away = Gap(begin_ns=12 * S, end_ns=12 * S + S // 10, reason="lost", device=GPU)
    seen = observed(tmp_path, away, *marks(10_000, 110_000), *samples(power_draw_mw=30_000))
    (energy,) = seen.report.energy
    assert (energy.source, energy.value_j) == ("power_held", 300)


@pytest.mark.parametrize(
    "gap",
    [
        Gap(begin_ns=4 * S, end_ns=9 * S, reason="lost", device=GPU),
        Gap(begin_ns=21 * S, end_ns=22 * S, reason="lost", device=GPU),
        Gap(begin_ns=12 * S, end_ns=14 * S, reason="lost", device=OTHER),
        Gap(begin_ns=12 * S, end_ns=14 * S, reason="late"),
    ],
    ids=["before", "after", "another device", "nothing was sampled"],
)
def test_a_counter_counts_through_what_did_not_befall_its_device(tmp_path: Path, gap: Gap) -> None:
    """Neither outside of the marks, nor while only the monitor was held up."""
    (energy,) = observed(tmp_path, gap, *marks(0, 300_000), *samples(power_draw_mw=30_000)).report.energy
    assert (energy.source, energy.value_j, energy.bound_j) == ("counter", 300, 3)


def test_a_counter_that_leaps_is_no_energy(tmp_path: Path) -> None:
    """By what no GPU can draw: the power readings take its place, and the reader is told."""
    seen = observed(tmp_path, *marks(100_000, 2**40), *samples(power_draw_mw=300_000))
    (energy,) = seen.report.energy
    assert (energy.source, energy.value_j) == ("power_held", 3_000)
    assert any("was not used: the driver gave a value that cannot be true" in note for note in seen.notes)


def test_marking_is_not_asked_for_where_it_would_not_help(tmp_path: Path) -> None:
    """The device has no counter, as the monitor's own marks say."""
    own = mark(8, "begin", None), mark(22, "end", None)
    reasons = why(8, energy_mj="not_supported", power_draw_mw="not_supported")
    seen = observed(tmp_path, reasons, *own, *samples(power_draw_mw=None))
    assert known(seen, "gpu_energy") == (None, "not_supported")


def test_marking_is_asked_for_where_there_is_a_counter(tmp_path: Path) -> None:
    """It was read when the monitor came and went."""
    own = mark(8, "begin", 1), mark(22, "end", 2)
    seen = observed(tmp_path, why(8, power_draw_mw="not_supported"), *own, *samples(power_draw_mw=None))
    assert known(seen, "gpu_energy") == (None, "not_marked")


def test_without_a_counter_the_energy_says_why_power_was_not_read(tmp_path: Path) -> None:
    """The device offers that."""
    read = samples(power_draw_mw=lambda at: None if at > 12 else 30_000)
    reasons = (why(8, energy_mj="not_supported"), why(13, energy_mj="not_supported", power_draw_mw="lost"))
    seen = observed(tmp_path, *reasons, *marks(None, None), *read)
    assert known(seen, "gpu_energy") == (None, "lost")


def test_a_driver_that_was_away_at_the_mark_is_why_there_is_no_energy(tmp_path: Path) -> None:
    """It came later; nobody knows yet what the device offers."""
    come = Event(mono_ns=11 * S, name="devices", data={"devices": header(GPU).devices, "reason": None})
    away = Mark(mono_ns=10 * S, name=FIT_MARKS[0], energy_mj={}, read_ns=10 * S)
    read = [one for one in samples(power_draw_mw=30_000) if one.mono_ns > come.mono_ns]
    empty = [Sample(mono_ns=at * S, late_ns=0, host=None, gpus={}) for at in range(8, 12)]
    head = header(reason="no_driver")
    seen = observed(tmp_path, come, away, mark(20, FIT_MARKS[1], 5), *empty, *read, head=head)
    assert known(seen, "gpu_energy") == (None, "no_driver")


def test_a_device_that_was_not_watched_says_so(tmp_path: Path) -> None:
    """The process began with an environment that hides it, and uses it all the same."""
    head = header(GPU, OTHER, targets=(GPU,))
    seen = observed(tmp_path, *marks(0, 300_000), *samples(power_draw_mw=30_000), head=head, used=("2",))
    assert {seen.metrics[name].reason for name in seen.metrics if name.startswith("gpu_")} == {"not_target"}
    assert [energy.reason for energy in seen.report.energy] == ["not_target"]


@pytest.mark.parametrize("reason", ["not_supported", "no_permission", "lost"])
def test_a_field_that_was_read_for_half_of_the_time_says_what_the_other_half_was(tmp_path: Path, reason: str) -> None:
    """Also where it could be read at last."""
    read = samples(clock_sm_mhz=lambda at: None if 13 <= at < 18 else 1_980)
    seen = observed(tmp_path, why(13, clock_sm_mhz=reason), why(18), *read)
    assert known(seen, "gpu_clock_sm") == (None, reason)


def test_the_commonest_reason_is_that_of_the_metric(tmp_path: Path) -> None:
    """Samples that were not taken are "gap"."""
    read = [one for one in samples(clock_sm_mhz=None) if one.mono_ns <= 13 * S or one.mono_ns >= 18 * S]
    assert known(observed(tmp_path, why(10, clock_sm_mhz="lost"), why(19), *read), "gpu_clock_sm") == (None, "lost")
    (tmp_path / "monitor.jsonl").unlink()
    read = [one for one in samples(clock_sm_mhz=1) if one.mono_ns <= 13 * S or one.mono_ns >= 18 * S]
    lost = Sample(mono_ns=13 * S, late_ns=0, host=None, gpus={GPU: {"clock_sm_mhz": None}})
    read = [lost if one.mono_ns == lost.mono_ns else one for one in read if one.mono_ns != 12 * S]
    assert known(observed(tmp_path, why(13, clock_sm_mhz="lost"), why(18), *read), "gpu_clock_sm") == (None, "gap")


@pytest.mark.parametrize("uuids", [(GPU,), (GPU, OTHER)], ids=["one device", "two devices"])
def test_why_memory_is_null_is_of_the_interval(tmp_path: Path, uuids: tuple[str, ...]) -> None:
    """A process of another namespace was there; after the interval it is gone, and the list says nothing."""
    hidden, gone = why(8, process_memory_bytes="pid_namespace"), why(21, process_memory_bytes="not_found")
    seen = observed(tmp_path, hidden, gone, *samples(process_memory_bytes=None), head=header(*uuids))
    assert known(seen, "gpu_process_memory") == (None, "pid_namespace")
    assert seen.report.reasons == {f"gpu:{GPU}.process_memory_bytes": "not_found"}


def test_sums_over_devices_of_which_one_is_not_known_are_null(tmp_path: Path) -> None:
    """The driver did not list the second one: what the first used is not what the run used."""
    read = samples(power_draw_mw=30_000, clock_sm_mhz=1, utilization_gpu_percent=1, process_memory_bytes=1)
    seen = observed(tmp_path, *marks(0, 300_000), *read, used=("1", "2"))
    assert {known(seen, name) for name in seen.metrics if name.startswith("gpu_")} == {(None, "not_found")}
    assert [(energy.uuid, energy.value_j) for energy in seen.report.energy] == [(GPU, 300)]


def _host(*at_s: float) -> list[Sample]:
    return [Sample(mono_ns=round(at * S), late_ns=0, host={"cpu_time_s": at}, gpus={}) for at in at_s]


def test_a_program_that_begins_before_the_monitor_is_there_was_not_read_at_that_time(tmp_path: Path) -> None:
    """Be it by less than an interval: one process is not read too rarely."""
    wall = Wall(source="fit", begin_ns=10 * S - S // 12, end_ns=20 * S)
    seen = observed(tmp_path, *_host(*range(10, 23)), wall=wall)
    assert known(seen, "cpu_time") == (None, "gap")


def test_the_mark_before_the_first_sample_stands_for_the_begin(tmp_path: Path) -> None:
    """Of the end alone is said that it was read too rarely."""
    begin = Mark(mono_ns=10 * S, name=FIT_MARKS[0], energy_mj={}, read_ns=10 * S, cpu_time_s=10.0)
    bare = [Sample(mono_ns=at * S, late_ns=0, host={}, gpus={}) for at in range(13, 25)]
    seen = observed(tmp_path, begin, *_host(11, 12), *bare, *_host(25))
    assert known(seen, "cpu_time") == (None, "read_too_rarely")


def test_a_monitor_that_died_before_its_first_sample_is_read(tmp_path: Path) -> None:
    """Its mark is no reading of the end."""
    begin = Mark(mono_ns=9 * S, name="begin", energy_mj={}, read_ns=9 * S, cpu_time_s=1.0)
    assert known(observed(tmp_path, begin), "cpu_time") == (None, "gap")
