"""Which taints a run has, from what its monitor reports of it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lucid_profiler.collect_monitor import Monitored, unmonitored
from lucid_profiler.monitored import DeviceEnergy, MonitoredDevice, MonitorReport
from lucid_profiler.records import Metric, Samples, Wall
from lucid_profiler.taints import find_taints

WALL = Wall(source="fit", begin_ns=10, end_ns=20)
GPU, NEIGHBOUR = "GPU-1", "GPU-2"
Number = int | float | None


def _monitored(
    *samples: Samples,
    used: Sequence[str] = (GPU,),
    devices: Sequence[MonitoredDevice] = (),
    events: dict[str, int] | None = None,
) -> Monitored:
    energy = tuple(DeviceEnergy(uuid=uuid, value_j=None, source="power_held") for uuid in used)
    report = MonitorReport(num_samples=1, devices=tuple(devices), energy=energy, events=events or {})
    return Monitored(report=report, metrics={}, samples=samples)


def _reasons(*masks: tuple[int, Number], uuid: str = GPU) -> Samples:
    times, values = zip(*masks, strict=True)
    return Samples(run=3, series=f"gpu:{uuid}", columns={"mono_ns": times, "clocks_event_reasons": values})


def _processes(*looks: tuple[int, Number, Number, Number], uuid: str = GPU) -> Samples:
    """Make the series of looks: time, other processes, processes without a name here, memory of the run's own."""
    times, others, unknown, own = zip(*looks, strict=True)
    columns = {"num_other_processes": others, "num_unknown_processes": unknown, "process_memory_bytes": own}
    return Samples(run=3, series=f"gpu:{uuid}:slow", columns={"mono_ns": times, **columns})


def _taints(monitored: Monitored) -> tuple[str, ...]:
    return find_taints(monitored, wall=WALL)[0]


@pytest.mark.parametrize("bit", [0x8, 0x20, 0x40, 0x80])
def test_heat_and_power_supply_throttle(bit: int) -> None:
    """One sample of the wall is enough, whatever else held the clocks back."""
    assert _taints(_monitored(_reasons((12, 0), (14, bit | 0x4), (16, 0)))) == ("throttled",)


@pytest.mark.parametrize("mask", [0, 0x1, 0x2, 0x4, 0x10, 0x100, 0x117])
def test_idling_chosen_clocks_and_the_power_cap_are_no_taint(mask: int) -> None:
    """The power cap is a note: a busy GPU meets it all the time."""
    taints, notes = find_taints(_monitored(_reasons((12, mask), (14, None))), wall=WALL)
    assert taints == ()
    assert notes == (("the power cap held the clocks of its GPU back",) if mask & 0x4 else ())


def test_only_the_wall_counts() -> None:
    """What came before or after it has bent no time."""
    assert _taints(_monitored(_reasons((9, 0x40), (21, 0x40)), _processes((9, 1, 0, 5), (21, 1, 0, 5)))) == ()
    assert _taints(_monitored(_reasons((10, 0x40)))) == ("throttled",)


def test_another_process_on_a_gpu_of_the_run_is_foreign() -> None:
    """Once seen is enough; looks without an answer say nothing."""
    assert _taints(_monitored(_processes((11, 0, 0, 5), (13, None, None, None), (15, 1, 0, 5)))) == ("foreign",)
    assert _taints(_monitored(_processes((11, 0, 0, 5), (13, None, None, None)))) == ()


def test_an_entry_without_a_name_is_foreign_only_beside_the_runs_own() -> None:
    """Where the run was not recognised, the entry may be the run itself, as its container hides it."""
    assert _taints(_monitored(_processes((11, 0, 1, 5)))) == ("foreign",)
    assert _taints(_monitored(_processes((11, 0, 1, None)))) == ()


def test_a_gpu_that_the_run_did_not_use_taints_nothing() -> None:
    """Neighbours on other GPUs are their own business."""
    others = _reasons((12, 0x40), uuid=NEIGHBOUR), _processes((12, 3, 0, 0), uuid=NEIGHBOUR)
    assert _taints(_monitored(*others, used=(GPU,))) == ()
    assert _taints(_monitored(*others, used=())) == ()
    assert _taints(_monitored(*others, used=(GPU, NEIGHBOUR))) == ("throttled", "foreign")


def test_the_clocks_of_an_instance_are_its_gpus() -> None:
    """The reasons are read of the whole GPU only."""
    instance = MonitoredDevice(uuid="MIG-1", parent_uuid=GPU)
    devices = (MonitoredDevice(uuid=GPU), instance)
    assert _taints(_monitored(_reasons((12, 0x8)), used=("MIG-1",), devices=devices)) == ("throttled",)


def test_a_machine_that_slept_is_suspended() -> None:
    """At any time of the run; a step of the wall clock is no sleep."""
    assert _taints(_monitored(events={"suspend": 1})) == ("suspended",)
    assert _taints(_monitored(events={"wall_step": 2})) == ()


def test_where_nothing_was_sampled_there_is_no_taint() -> None:
    """What was not seen is not said."""
    assert find_taints(unmonitored("monitor_off"), wall=WALL) == ((), ())


@pytest.mark.parametrize(
    ("used", "reason", "is_noted"),
    [
        ((), "pid_namespace", True),
        ((), "no_gpu_memory", False),
        ((), "not_target", False),
        ((), "no_devices", False),
        ((GPU,), "pid_namespace", False),
    ],
)
def test_gpus_that_could_not_be_told_from_one_another_are_noted(
    used: tuple[str, ...], reason: str, *, is_noted: bool
) -> None:
    """Only where the driver hides whose its processes are, and nobody else said which GPUs the run used."""
    monitored = replace(
        _monitored(_reasons((12, 0x40)), used=used),
        metrics={"gpu_energy": Metric(value=None, unit="J", better="lower", reason=reason)},
    )
    notes = find_taints(monitored, wall=WALL)[1]
    text = "not known which of the GPUs the run used, so throttling and other processes were not looked for"
    assert (text in notes) == is_noted
