import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lucid_profiler.monitor.energy import difference
from lucid_profiler.monitor.gpu import Gpus
from lucid_profiler.monitor.readings import REASONS, Reasons, Values
from support import fake_nvml
from support.fake_nvml import UUID, device, scenario

GIB = 2**30
MIB = 2**20
OTHER = "GPU-22222222-2222-3333-4444-555555555555"
FIRST, SECOND = "MIG-11111111-aaaa", "MIG-22222222-bbbb"
FAST_FIELDS = {
    "memory_total_bytes": 141 * GIB,
    "memory_reserved_bytes": 1 * GIB,
    "memory_used_bytes": 40 * GIB,
    "memory_free_bytes": 100 * GIB,
    "utilization_gpu_percent": 87,
    "utilization_memory_percent": 41,
    "power_draw_mw": 412_345,
    "clock_sm_mhz": 1_980,
    "clock_memory_mhz": 3_201,
    "clocks_event_reasons": 4,
    "temperature_c": 54,
}
PROCESS_FIELDS = {"process_memory_bytes", "others_memory_bytes", "num_other_processes", "num_unknown_processes"}
READINGS = (
    *("memory", "memory_v2", "utilization", "power_usage", "clock_sm", "clock_memory", "reasons", "temperature"),
    *("energy", "compute_processes"),
)
MEMORY_FIELDS = {field for field in FAST_FIELDS if field.startswith("memory_")}


class Clock:
    """A clock that stands still unless it is told otherwise."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


Open = Callable[..., Gpus]


@pytest.fixture
def clock() -> Clock:
    """Give a clock that the test moves."""
    return Clock()


@pytest.fixture
def play(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Give a function that installs a machine's devices in the fake driver and opens it."""
    opened: list[Gpus] = []

    def open_gpus(
        *devices: Mapping[str, Any],
        environ: Mapping[str, str] | None = None,
        proc: Path = tmp_path,
        **entries: Any,
    ) -> Gpus:
        fake_nvml.install(scenario(*devices, **{"clock": "manual", **entries}), tmp_path, monkeypatch)
        opened.append(Gpus.open(clock=clock, environ=environ, proc=proc))
        return opened[-1]

    yield open_gpus
    for gpus in opened:
        gpus.close()


def only(sheets: dict[str, tuple[Values, Reasons]]) -> tuple[Values, Reasons]:
    """Return the sheet of the only device, checked to say why each None is one."""
    ((values, reasons),) = sheets.values()
    assert {field for field, value in values.items() if value is None} == reasons.keys()
    assert set(reasons.values()) <= REASONS.keys()
    return values, reasons


def test_every_field_is_its_own_reading(play: Open) -> None:
    """Each value of the driver appears under its own name; the BAR1 window appears nowhere."""
    values, reasons = only(play(device()).read_fast())
    assert (values, reasons) == (FAST_FIELDS, {})
    assert len(set(FAST_FIELDS.values())) == len(FAST_FIELDS)
    assert fake_nvml.num_calls(UUID, "bar1") == 0


def test_a_device_tells_who_it_is(play: Open) -> None:
    """Identity, bus and memory are there before the first reading."""
    gpus = play(device())
    (found,) = gpus.devices
    assert (found.uuid, found.name, found.index) == (UUID, "NVIDIA H200", 0)
    assert (found.pci_bus_id, found.memory_total_bytes) == ("00000000:01:00.0", 141 * GIB)
    assert (found.parent_uuid, found.is_target, gpus.reason) == (None, True, None)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(9, "no_driver"), (18, "driver_mismatch"), (4, "no_permission"), (999, "unknown_error"), (15, "lost")],
)
def test_a_driver_that_does_not_open_is_a_reason(play: Open, code: int, reason: str) -> None:
    """Nothing is raised, there are no devices, and the reason is named."""
    gpus = play(device(), init={"error": code})
    assert (gpus.reason, gpus.devices, gpus.read_fast(), gpus.read_energy()) == (reason, (), {}, ({}, {}))
    assert gpus.read_processes([1]) == {}


def test_a_missing_library_is_no_driver(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libnvidia-ml there is no driver."""
    pynvml = pytest.importorskip("pynvml")
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", _no_library)
    assert Gpus.open(clock=clock).reason == "no_driver"


def _no_library(name: str) -> Any:
    raise OSError(name)


@pytest.mark.parametrize("stand_in", [None, os])
def test_a_missing_binding_is_a_reason(clock: Clock, monkeypatch: pytest.MonkeyPatch, stand_in: Any) -> None:
    """Neither no pynvml nor another module of that name is an error."""
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    gpus = Gpus.open(clock=clock)
    assert (gpus.reason, gpus.read_fast(), gpus.memory_api) == ("no_nvml", {}, None)
    gpus.close()


def test_a_machine_without_gpus_is_a_reason(play: Open) -> None:
    """A driver that opens and lists nothing is told from one that is away."""
    assert play().reason == "no_devices"


def test_an_unsupported_reading_leaves_the_others(play: Open) -> None:
    """On WSL one query is not supported: its fields are None and the rest is sampled; it is told and counted once."""
    gpus = play(device(utilization=None))
    values, reasons = only(gpus.read_fast())
    assert reasons == dict.fromkeys(("utilization_gpu_percent", "utilization_memory_percent"), "not_supported")
    assert values == {**FAST_FIELDS, **dict.fromkeys(reasons)}
    gpus.read_fast()
    assert gpus.num_errors == {"utilization.not_supported": 1}
    assert len(gpus.notes) == 1


def test_an_unsupported_reading_is_asked_again_after_1_2_4_to_60_seconds(play: Open, clock: Clock) -> None:
    """It costs a call now and then, and comes back when the driver can."""
    gpus = play(device(power_usage=[{"error": 3}, {"value": 70_000, "from_call": 9}]))
    times = []
    values: Values = {}
    for second in range(400):
        before = gpus.num_calls["power_usage"]
        values, _ = only(gpus.read_fast())
        times += [second] * (gpus.num_calls["power_usage"] - before)
        if values["power_draw_mw"] is not None:
            break
        clock.sleep(1)
    assert times == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert values["power_draw_mw"] == 70_000


def test_a_reading_that_ends_in_the_middle_becomes_none(play: Open) -> None:
    """Power that is not supported from the tenth sample on is there before and None after."""
    gpus = play(device(power_usage=[{"value": 70_000}, {"error": 3, "from_call": 9}]))
    powers = [only(gpus.read_fast())[0]["power_draw_mw"] for _ in range(12)]
    assert powers == [70_000] * 9 + [None] * 3


def test_no_permission_on_every_reading_leaves_the_device(play: Open) -> None:
    """In a container that may read nothing, every field says so and the device is listed."""
    refused: dict[str, Any] = {call: {"error": 4} for call in READINGS}
    gpus = play(device(**refused))
    for sheets in (gpus.read_fast(), gpus.read_energy()[0], gpus.read_processes([1])):
        assert set(only(sheets)[1].values()) == {"no_permission"}
    assert gpus.reason is None


def test_no_permission_for_any_device_is_the_reason(play: Open) -> None:
    """Where not even a handle is given there are no readings, and the reason is named."""
    assert play(device(any={"error": 4})).reason == "no_permission"


def test_a_device_that_may_not_be_opened_leaves_the_others(play: Open) -> None:
    """Of two GPUs one belongs to somebody else: the other is read, with a note."""
    gpus = play(device(handle={"error": 4}), device(uuid=OTHER, pci="00000000:02:00.0"))
    assert gpus.read_fast() == {OTHER: (FAST_FIELDS, {})}
    assert len(gpus.notes) == 1


@pytest.mark.parametrize("used", [8, 912])
def test_reserved_memory_is_kept_apart(play: Open, used: int) -> None:
    """An idle card uses 8 MiB and reserves 904, whether the driver's used includes the reserve or not."""
    gpus = play(
        device(memory=[4096 * MIB, 3184 * MIB, 912 * MIB], memory_v2=[n * MIB for n in (4096, 904, 3184, used)])
    )
    values, reasons = only(gpus.read_fast())
    assert (values["memory_used_bytes"], values["memory_reserved_bytes"]) == (8 * MIB, 904 * MIB)
    assert (reasons, gpus.memory_api) == ({}, "v2")


@pytest.mark.parametrize("code", [13, 25])
def test_without_the_second_memory_query_the_first_answers(play: Open, code: int) -> None:
    """The older query is used from then on; that is said once, and its reserve is None."""
    gpus = play(device(memory_v2={"error": code}))
    for _ in range(3):
        values, reasons = only(gpus.read_fast())
        assert values["memory_used_bytes"] == 41 * GIB
        assert reasons == {"memory_reserved_bytes": "not_supported"}
    assert gpus.memory_api == "v1"
    assert len(gpus.notes) == 1
    assert fake_nvml.num_calls(UUID, "memory_v2") == 1


@pytest.mark.parametrize("code", [13, 25, 999])
def test_a_passing_error_of_one_gpu_changes_the_version_of_none(play: Open, code: int) -> None:
    """What has answered exists: two samples of that GPU lack their memory, and no figure is of another version."""
    answer = [141 * GIB, 1 * GIB, 100 * GIB, 40 * GIB]
    memory = [{"value": answer}, {"error": code, "from_call": 3}, {"value": answer, "from_call": 5}]
    gpus = play(device(memory_v2=memory), device(uuid=OTHER, pci="00000000:02:00.0"))
    seen = []
    for _ in range(6):
        sheets = gpus.read_fast()
        seen.append(sheets[UUID])
        assert sheets[OTHER] == (FAST_FIELDS, {})
    missing = dict.fromkeys(MEMORY_FIELDS, "unknown_error")
    assert [reasons for _, reasons in seen] == [{}, {}, missing, missing, {}, {}]
    assert all(values == {**FAST_FIELDS, **dict.fromkeys(reasons)} for values, reasons in seen)
    assert (gpus.memory_api, gpus.num_errors) == ("v2", {"memory.unknown_error": 2})
    assert fake_nvml.num_calls(UUID, "memory") == 0


def test_each_gpu_is_asked_in_the_version_that_it_knows(play: Open) -> None:
    """One of two lacks the second query: its figures are of the first, a note names it, the other's are not touched."""
    gpus = play(device(memory_v2={"error": 25}), device(uuid=OTHER, pci="00000000:02:00.0"))
    for _ in range(3):
        sheets = gpus.read_fast()
        assert sheets[UUID][0]["memory_used_bytes"] == 41 * GIB
        assert sheets[UUID][1] == {"memory_reserved_bytes": "not_supported"}
        assert sheets[OTHER] == (FAST_FIELDS, {})
    assert gpus.memory_api == "v1"
    assert [note.partition(":")[0] for note in gpus.notes] == [UUID]


@pytest.mark.parametrize(
    "calls", [{"memory": None, "memory_v2": None}, {"memory": [0, 0, 0], "memory_v2": [0, 0, 0, 0]}]
)
def test_unified_memory_is_none(play: Open, calls: dict[str, Any]) -> None:
    """Machines with one memory for both answer Not Supported, or zeros: None, and nothing is divided by it."""
    gpus = play(device(**calls))
    values, reasons = only(gpus.read_fast())
    assert {field for field, reason in reasons.items() if reason == "not_supported"} == MEMORY_FIELDS
    assert values["power_draw_mw"] == 412_345
    assert gpus.devices[0].memory_total_bytes is None
    assert only(gpus.read_processes([1]))[1]["process_memory_bytes"] == "not_found"


@pytest.mark.parametrize(
    ("calls", "fields"),
    [
        ({"memory_v2": [10 * GIB, 0, 1 * GIB, 11 * GIB]}, MEMORY_FIELDS),
        ({"memory_v2": [2**64 - 1] * 4}, MEMORY_FIELDS),
        ({"utilization": [4_294_967_295, 41]}, {"utilization_gpu_percent"}),
        ({"utilization": [101, 255]}, {"utilization_gpu_percent", "utilization_memory_percent"}),
        ({"power_usage": 4_294_967_295}, {"power_draw_mw"}),
        ({"power_usage": 0}, {"power_draw_mw"}),
        ({"clock_sm": 4_294_967_295}, {"clock_sm_mhz"}),
        ({"reasons": 2**64 - 1}, {"clocks_event_reasons"}),
        ({"temperature": -1}, {"temperature_c"}),
    ],
)
def test_what_cannot_be_true_is_none_and_counted(play: Open, calls: dict[str, Any], fields: set[str]) -> None:
    """Used above total, percentages above 100 and all ones are dropped alone, and counted."""
    gpus = play(device(**calls))
    values, reasons = only(gpus.read_fast())
    assert reasons == dict.fromkeys(fields, "implausible")
    assert values == {**FAST_FIELDS, **dict.fromkeys(fields)}
    assert sum(gpus.num_errors.values()) == 1


@pytest.mark.parametrize(("call", "field"), [("temperature", "temperature_c"), ("reasons", "clocks_event_reasons")])
@pytest.mark.parametrize("code", [13, 25])
def test_an_older_driver_is_asked_as_it_knows(play: Open, call: str, field: str, code: int) -> None:
    """A function that the driver lacks gives way to the one before it, for good."""
    steps: dict[str, Any] = {call: [{"error": code}, {"value": 40, "from_call": 1}]}
    gpus = play(device(**steps))
    for _ in range(3):
        assert only(gpus.read_fast())[0][field] == 40
    assert fake_nvml.num_calls(UUID, call) == 4


def test_a_driver_without_any_version_does_not_support_it(play: Open) -> None:
    """Where no version is there the field is None; the binding's own error for that, which is no NVMLError, too."""
    gpus = play(device(temperature={"error": 13}, compute_processes={"error": 13}))
    assert only(gpus.read_fast())[1] == {"temperature_c": "not_supported"}
    assert set(only(gpus.read_processes([10]))[1].values()) == {"not_supported"}


def test_a_lost_gpu_leaves_the_other(play: Open, clock: Clock) -> None:
    """One of two GPUs falls off the bus: its fields are "lost" and the other keeps sampling."""
    lost = [{"value": [87, 41]}, {"error": 15, "from_call": 5, "from_s": 0}]
    gpus = play(device(utilization=lost), device(uuid=OTHER, pci="00000000:02:00.0"))
    for _ in range(5):
        assert gpus.read_fast()[UUID][1] == {}
    for _ in range(30):
        sheets = gpus.read_fast()
        assert sheets[OTHER] == (FAST_FIELDS, {})
        assert sheets[UUID][0]["power_draw_mw"] is None
        assert set(sheets[UUID][1].values()) == {"lost"}
        clock.sleep(0.1)
    assert gpus.reason is None


def test_a_lost_gpu_is_not_asked_at_every_sample(play: Open, clock: Clock) -> None:
    """It is tried after 1, 2, 4 s, and is back when it answers."""
    dead = [{"value": 70_000}, {"error": 15, "from_call": 1}, {"value": 71_000, "from_call": 3}]
    gpus = play(device(power_usage=dead))
    powers = []
    for _ in range(50):
        powers.append(only(gpus.read_fast())[0]["power_draw_mw"])
        clock.sleep(0.1)
    assert powers == [70_000] + [None] * 30 + [71_000] * 19
    assert gpus.num_calls["handle"] == 2


def test_a_lost_gpu_is_not_taken_for_unified_memory(play: Open) -> None:
    """Memory that is lost says so."""
    gpus = play(device(memory_v2=[{"value": [8, 0, 4, 4]}, {"error": 15, "from_call": 1}]))
    assert set(only(gpus.read_fast())[1].values()) == {"lost"}


@pytest.mark.parametrize(("code", "reason"), [(999, "unknown_error"), (9, "no_driver"), (1, "unknown_error")])
def test_a_driver_that_goes_away_comes_back(play: Open, clock: Clock, code: int, reason: str) -> None:
    """Everything fails for three samples: no invented values, and readings again within a second of its return."""
    away = [{"value": None}, {"error": code, "from_s": 2}, {"value": None, "from_s": 2.3}]
    gpus = play(device(any=away))
    seen = []
    for _ in range(50):
        values, reasons = only(gpus.read_fast())
        seen.append(values["power_draw_mw"])
        if values["power_draw_mw"] is None:
            assert set(reasons.values()) == {reason}
            assert gpus.reason == reason
        clock.sleep(0.1)
        fake_nvml.advance(0.1)
    first, num_gone = seen.index(None), seen.count(None)
    assert first in {20, 21}
    assert 3 <= num_gone <= 11
    assert seen == [412_345] * first + [None] * num_gone + [412_345] * (50 - first - num_gone)


def test_a_driver_that_comes_back_newer_is_asked_as_it_knows(play: Open, clock: Clock) -> None:
    """What a driver lacked is tried again when it is opened anew."""
    away = [{"value": None}, {"error": 9, "from_s": 1}, {"value": None, "from_s": 2}]
    memory = [{"error": 13}, {"value": [141 * GIB, 1 * GIB, 100 * GIB, 40 * GIB], "from_s": 2}]
    gpus = play(device(any=away, memory_v2=memory))
    versions = [gpus.memory_api]
    fake_nvml.advance(1)
    assert set(only(gpus.read_fast())[1].values()) == {"no_driver"}
    fake_nvml.advance(1)
    clock.sleep(1)
    assert only(gpus.read_fast()) == (FAST_FIELDS, {})
    assert [*versions, gpus.memory_api] == ["v1", "v2"]


def test_a_driver_that_stays_away_is_asked_less_and_less(play: Open, clock: Clock) -> None:
    """It is opened anew after 1, 2, 4 … 60 s, and recovered from at the first try that works."""
    gpus = play(device(), init=[{"error": 9}, {"value": None, "from_call": 8}])
    times = [0]
    for second in range(1, 400):
        clock.sleep(1)
        before = gpus.num_calls["init"]
        gpus.reopen_if_due()
        times += [second] * (gpus.num_calls["init"] - before)
        if gpus.reason is None:
            break
    assert times == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert only(gpus.read_fast()) == (FAST_FIELDS, {})


def test_a_gpu_that_answers_nothing_does_not_stop_the_other(play: Open, clock: Clock) -> None:
    """Unknown Error from one of two is that one's: the driver is not opened anew for it."""
    gpus = play(device(any=[{"value": None}, {"error": 999, "from_s": 1}]), device(uuid=OTHER, pci="00000000:02:00.0"))
    fake_nvml.advance(2)
    for _ in range(30):
        sheets = gpus.read_fast()
        assert set(sheets[UUID][1].values()) == {"unknown_error"}
        assert sheets[OTHER] == (FAST_FIELDS, {})
        clock.sleep(0.1)
    assert gpus.num_calls["init"] == 1


def test_a_gpu_that_does_not_come_back_with_the_driver_is_lost(play: Open, clock: Clock) -> None:
    """After the driver was away one of two GPUs is no longer listed: it stays among the devices, and says "lost"."""
    away = [{"value": None}, {"error": 999, "from_s": 1}, {"value": None, "from_s": 2}]
    gone = [{"value": None}, {"error": 15, "from_s": 1.5}, {"value": None, "from_s": 60}]
    gpus = play(device(any=away, handle=gone), device(uuid=OTHER, pci="00000000:02:00.0", any=away))
    fake_nvml.advance(1.6)
    assert {reason for _, reasons in gpus.read_fast().values() for reason in reasons.values()} == {"unknown_error"}
    fake_nvml.advance(1)
    clock.sleep(1)
    sheets = gpus.read_fast()
    assert set(sheets[UUID][1].values()) == {"lost"}
    assert sheets[OTHER] == (FAST_FIELDS, {})
    assert {found.uuid for found in gpus.devices} == {UUID, OTHER}
    fake_nvml.advance(60)
    clock.sleep(60)
    assert gpus.read_fast()[UUID] == (FAST_FIELDS, {})


@pytest.mark.parametrize(("code", "reason"), [(15, "lost"), (999, "unknown_error")])
def test_a_gpu_that_does_not_answer_at_first_is_tried_again(play: Open, clock: Clock, code: int, reason: str) -> None:
    """Of two GPUs one answers from the fifth second on: tried after 1, 2, 4 s, and from then on read like the other."""
    late = [{"error": code}, {"value": None, "from_s": 5}]
    gpus = play(device(handle=late), device(uuid=OTHER, pci="00000000:02:00.0"))
    tried, read, why = [0], [], []
    for second in range(12):
        before = gpus.num_calls["init"]
        sheets = gpus.read_fast()
        tried += [second] * (gpus.num_calls["init"] - before)
        assert sheets.pop(OTHER) == (FAST_FIELDS, {})
        read.append(sheets)
        why.append(gpus.why_missing)
        fake_nvml.advance(1)
        clock.sleep(1)
    assert tried == [0, 1, 3, 7]
    assert read == [{}] * 7 + [{UUID: (FAST_FIELDS, {})}] * 5
    assert why == [reason] * 7 + [None] * 5


def test_a_gpu_that_may_not_be_opened_is_not_tried_again(play: Open, clock: Clock) -> None:
    """A container lists the GPUs of others for good: the driver is not opened anew for them."""
    gpus = play(device(handle={"error": 4}), device(uuid=OTHER, pci="00000000:02:00.0"))
    for _ in range(100):
        assert gpus.read_fast() == {OTHER: (FAST_FIELDS, {})}
        clock.sleep(1)
    assert (gpus.num_calls["init"], gpus.why_missing) == (1, None)


@pytest.mark.parametrize("call", ["energy", "compute_processes"])
def test_one_failed_question_is_not_a_driver_that_is_away(play: Open, call: str) -> None:
    """Unknown Error for one question makes its fields None, is asked again at once and stops nothing."""
    steps: dict[str, Any] = {call: [{"error": 999}, {"value": 7 if call == "energy" else [], "from_call": 1}]}
    gpus = play(device(**steps))

    def read() -> dict[str, tuple[Values, Reasons]]:
        return gpus.read_energy()[0] if call == "energy" else gpus.read_processes([10])

    assert set(only(read())[1].values()) == {"unknown_error"}
    assert only(gpus.read_fast()) == (FAST_FIELDS, {})
    assert "unknown_error" not in only(read())[1].values()
    assert gpus.num_calls["init"] == 1


def test_a_flaky_fast_question_leaves_the_others(play: Open) -> None:
    """One of the fast questions fails once: that sample lacks its field and nothing else."""
    gpus = play(device(clock_sm=[{"value": 1_980}, {"error": 999, "from_call": 1}, {"value": 1_980, "from_call": 2}]))
    lacking = [set(only(gpus.read_fast())[1]) for _ in range(3)]
    assert lacking == [set(), {"clock_sm_mhz"}, set()]


TWO = (
    device(pci="00000000:02:00.0"),
    device(uuid=OTHER, pci="00000000:01:00.0"),
)


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, {UUID, OTHER}),
        ("0", {OTHER}),
        ("1", {UUID}),
        ("GPU-2", {OTHER}),
        (UUID, {UUID}),
        ("1,0", {UUID, OTHER}),
        ("", set()),
    ],
)
def test_only_what_the_process_sees_is_read(play: Open, visible: str | None, uuids: set[str]) -> None:
    """NVML's order is not CUDA's: devices are numbered by bus and told by UUID; the others are listed and not read."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    gpus = play(*TWO, environ=environ)
    assert gpus.read_fast().keys() == gpus.read_energy()[0].keys() == uuids
    assert {found.uuid for found in gpus.devices} == {UUID, OTHER}
    assert {found.uuid for found in gpus.devices if found.is_target} == uuids


SLOW_AND_FAST = (device(name="NVIDIA T400"), device(uuid=OTHER, pci="00000000:02:00.0"))


def test_a_number_among_different_gpus_is_not_guessed(play: Open) -> None:
    """CUDA numbers by speed: which card 0 is can only the process say; both are read, with a note."""
    gpus = play(*SLOW_AND_FAST, environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert gpus.read_fast().keys() == {UUID, OTHER}
    assert any("CUDA_DEVICE_ORDER" in note for note in gpus.notes)


def test_a_number_by_bus_is_known(play: Open) -> None:
    """With CUDA_DEVICE_ORDER=PCI_BUS_ID different GPUs are numbered by bus."""
    environ = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert play(*SLOW_AND_FAST, environ=environ).read_fast().keys() == {UUID}


def instance(uuid: str, number: int) -> dict[str, Any]:
    """Return an instance with `number` GiB in use."""
    memory = [n * GIB for n in (20, 0, 20 - number, number)]
    processes = [[100 + number, number * GIB]]
    return {"uuid": uuid, "gi": number, "ci": 0, "calls": {"memory_v2": memory, "compute_processes": processes}}


def test_a_divided_gpu_is_counted_once(play: Open) -> None:
    """Power, clocks and energy appear on the GPU, memory and processes on its instances, and nothing on both."""
    gpus = play(device(mig=[instance(FIRST, 1), instance(SECOND, 2)]))
    assert [(found.uuid, found.parent_uuid) for found in gpus.devices] == [(UUID, None), (FIRST, UUID), (SECOND, UUID)]
    fast, (energy, _), processes = gpus.read_fast(), gpus.read_energy(), gpus.read_processes([101])
    for field in FAST_FIELDS:
        known = {uuid for uuid, (values, _) in fast.items() if values[field] is not None}
        if field in MEMORY_FIELDS:
            assert known == {FIRST, SECOND}
            assert fast[UUID][1][field] == "mig"
        elif field.startswith("utilization"):
            assert known == set()
            assert fast[FIRST][1][field] == "not_supported"
        else:
            assert known == {UUID}
            assert fast[FIRST][1][field] == "mig"
    assert [fast[uuid][0]["memory_used_bytes"] for uuid in (FIRST, SECOND)] == [GIB, 2 * GIB]
    assert [uuid for uuid, (values, _) in energy.items() if values["energy_mj"] is not None] == [UUID]
    assert set(processes[UUID][1].values()) == {"mig"}
    assert processes[FIRST][0]["process_memory_bytes"] == GIB
    assert processes[SECOND][0]["process_memory_bytes"] is None


def test_an_instance_is_read_with_its_gpu(play: Open) -> None:
    """For a process on one instance the other is listed and not read; power comes from the GPU."""
    gpus = play(device(mig=[instance(FIRST, 1), instance(SECOND, 2)]), environ={"CUDA_VISIBLE_DEVICES": SECOND})
    sheets = gpus.read_fast()
    assert sheets.keys() == {UUID, SECOND}
    assert sheets[UUID][0]["power_draw_mw"] == 412_345
    assert sheets[SECOND][0]["memory_used_bytes"] == 2 * GIB


def test_memory_of_the_processes_is_shared_out(play: Open) -> None:
    """Ours and the others' bytes come from one list of the driver."""
    proc = Path("/proc")
    gpus = play(device(compute_processes=[[1, 30 * GIB], [os.getpid(), 9 * GIB]]), proc=proc)
    values, reasons = only(gpus.read_processes([os.getpid()]))
    assert values == {
        "process_memory_bytes": 9 * GIB,
        "others_memory_bytes": 30 * GIB,
        "num_other_processes": 1,
        "num_unknown_processes": 0,
    }
    assert (reasons, gpus.notes) == ({}, [])


def test_a_process_that_is_not_known_yet_is_asked_for(play: Open) -> None:
    """A rank that was started a moment ago is the target's before it counts as somebody else."""
    gpus = play(device(compute_processes=[[1, 30 * GIB], [os.getpid(), 9 * GIB]]), proc=Path("/proc"))
    values, _ = only(gpus.read_processes([], is_member=lambda pid: pid == os.getpid()))
    assert (values["process_memory_bytes"], values["others_memory_bytes"]) == (9 * GIB, 30 * GIB)


@pytest.mark.parametrize(
    ("processes", "reason"),
    [
        ([[645_400, 9 * GIB]], "pid_namespace"),
        ([[10, 9 * GIB], [4_294_967_295, GIB]], "abi_suspect"),
        ([[10, 200 * GIB]], "implausible"),
        ([[10, None]], "not_supported"),
        ([[10, 0]], "implausible"),
        ([[10, 0], [645_400, 9 * GIB]], "implausible"),
        ([], "not_found"),
    ],
)
def test_a_list_that_cannot_be_read_keeps_the_device(play: Open, processes: list[Any], reason: str) -> None:
    """Whatever is wrong with the list, the target's share is None with its reason and the card's total stays."""
    gpus = play(device(compute_processes=processes))
    values, reasons = only(gpus.read_processes([10]))
    assert values.keys() == PROCESS_FIELDS
    assert reasons["process_memory_bytes"] == reason
    assert only(gpus.read_fast())[0] == FAST_FIELDS


def test_memory_of_processes_that_cannot_be_true_is_none(play: Open) -> None:
    """Where one memory serves both, no total of the card tells, and the limits of the fields do."""
    listed = [[os.getpid(), 2**62], [1, 2**61]]
    gpus = play(device(memory=None, memory_v2=None, compute_processes=listed), proc=Path("/proc"))
    values, reasons = only(gpus.read_processes([os.getpid()]))
    assert reasons == dict.fromkeys(("process_memory_bytes", "others_memory_bytes"), "implausible")
    assert (values["num_other_processes"], values["num_unknown_processes"]) == (1, 0)
    assert gpus.num_errors == {"compute_processes.implausible": 1}


def test_memory_that_no_process_explains_is_noted(play: Open) -> None:
    """Managed memory is in use and in no process's share: said once."""
    gpus = play(device(compute_processes=[[10, 1 * GIB]]))
    for _ in range(3):
        assert only(gpus.read_processes([10]))[0]["process_memory_bytes"] == GIB
    assert ["managed" in note for note in gpus.notes] == [True]


def test_a_list_without_permission_is_none(play: Open) -> None:
    """An error of the list is the list's alone."""
    gpus = play(device(compute_processes={"error": 4}))
    assert set(only(gpus.read_processes([10]))[1].values()) == {"no_permission"}


def test_energy_is_what_the_counter_moved(play: Open) -> None:
    """Over 10 s of 412 W the difference is right within its bound; over 5 ms it is not told."""
    gpus = play(device())
    begin = only(gpus.read_energy()[0])[0]["energy_mj"]
    fake_nvml.advance(0.005)
    soon = only(gpus.read_energy()[0])[0]["energy_mj"]
    fake_nvml.advance(9.995)
    end = only(gpus.read_energy()[0])[0]["energy_mj"]
    assert difference(begin, soon, window_ns=5_000_000).reason == "below_resolution"
    energy = difference(begin, end, window_ns=10**10)
    assert energy.value_j is not None
    assert energy.bound_j is not None
    assert abs(energy.value_j - 4_123.45) <= energy.bound_j


def test_a_gpu_without_a_counter_has_no_energy(play: Open) -> None:
    """No counter is None, never 0."""
    sheets, times = play(device(energy=None)).read_energy()
    assert (only(sheets), times) == (({"energy_mj": None}, {"energy_mj": "not_supported"}), {})


def test_each_counter_has_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read after the one before it: the times enclose one device's call and not all of them."""
    slow = [
        device(energy={"value": 1, "latency_us": 5_000}),
        device(uuid=OTHER, pci="00000000:02:00.0", energy={"value": 2}),
    ]
    fake_nvml.install(scenario(*slow), tmp_path, monkeypatch)
    gpus = Gpus.open(clock=time.monotonic_ns)
    begin_ns = time.monotonic_ns()
    _, times = gpus.read_energy()
    end_ns = time.monotonic_ns()
    gpus.close()
    (first, second) = (times[UUID], times[OTHER])
    assert begin_ns <= first[0] < first[1] <= second[0] < second[1] <= end_ns
    assert first[1] - first[0] >= 5_000_000


def test_the_costs_of_the_calls_are_known(play: Open) -> None:
    """Every call is counted and its time added up."""
    gpus = play(device(power_usage={"value": 1_000, "latency_us": 2_000}))
    for _ in range(3):
        gpus.read_fast()
    assert gpus.num_calls["power_usage"] == 3
    assert gpus.nvml_ns["power_usage"] >= 3 * 2_000_000
    assert gpus.nvml_ns.keys() == gpus.num_calls.keys()


def test_the_costs_of_opening_are_known(play: Open) -> None:
    """Whatever is asked to list the devices is counted and timed like every other call."""
    slow = {"value": [0, 0], "latency_us": 20_000}
    gpus = play(device(mig_mode=slow), device(uuid=OTHER, pci="00000000:02:00.0"))
    assert gpus.nvml_ns["mig_mode"] >= 20_000_000
    for call in ("handle_by_index", "uuid", "name", "pci", "mig_mode", "memory"):
        assert gpus.num_calls[call] == 2, call
    gpus = play(device(mig=[instance(FIRST, 1), instance(SECOND, 2)]))
    for call in ("mig_handle", "gpu_instance", "compute_instance"):
        assert gpus.num_calls[call] >= 2, call


def test_graphics_processes_and_process_utilization_are_never_asked(play: Open) -> None:
    """They cost milliseconds under the driver's lock."""
    gpus = play(device())
    gpus.read_fast()
    gpus.read_processes([1])
    gpus.read_energy()
    for call in ("graphics_processes", "process_utilization"):
        assert fake_nvml.num_calls(UUID, call) == 0


def test_nvml_stays_open_for_others(play: Open) -> None:
    """What another part of the process opened works after ours is closed, also twice."""
    pynvml = pytest.importorskip("pynvml")
    gpus = play(device())
    pynvml.nvmlInit()
    gpus.close()
    gpus.close()
    assert pynvml.nvmlDeviceGetCount() == 1
    assert gpus.read_fast() == {}
    pynvml.nvmlShutdown()


FORK = """
import os, sys, time
from lucid_profiler.monitor.gpu import Gpus

gpus = Gpus.open(clock=time.monotonic_ns)
assert gpus.reason is None, gpus.reason
child = os.fork()
if child == 0:
    ((values, reasons),) = gpus.read_fast().values()
    inherited = set(values.values()) == {None} and set(reasons.values()) == {"forked"}
    again = Gpus.open(clock=time.monotonic_ns)
    gpus.close()
    os._exit(0 if inherited and again.reason == "forked" and again.read_fast() == {} else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
((values, reasons),) = gpus.read_fast().values()
assert not reasons
gpus.close()
child = os.fork()
if child == 0:
    fresh = Gpus.open(clock=time.monotonic_ns)
    os._exit(0 if fresh.reason is None and len(fresh.read_fast()) == 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("whole")
"""


def test_a_forked_child_reads_nothing_through_its_parents_handles(tmp_path: Path) -> None:
    """A child of fork says "forked", the parent goes on, and a child of a parent that closed may open it."""
    program = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK)],
        env=fake_nvml.environment(scenario(device()), tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert program.stdout == "whole\n", program.stderr
