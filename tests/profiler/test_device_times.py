from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid_profiler.device_times import MAX_PENDING, DeviceRecord, DeviceTimes, DeviceTrace, read_device_times
from lucid_profiler.ring import RingWriter, read_ring

MS = 1_000_000


@dataclass
class Device:
    """A device that passes events when the test says so, and refuses what CUDA refuses."""

    is_capturing: bool = False
    now_ns: int = 0
    num_events: int = 0
    passed_ns: int = -1
    recorded: list[int] = field(default_factory=list)

    def make_event(self) -> "Event":
        """Make an event of this device."""
        self.num_events += 1
        return Event(self)

    def pass_all(self) -> None:
        """Do everything that has been recorded."""
        self.passed_ns = self.now_ns


class Event:
    """An event on a `Device`: it is passed once the device has come to the time of its last record."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_ns: int | None = None

    def record(self) -> None:
        assert not self.device.is_capturing
        self.at_ns = self.device.now_ns
        self.device.recorded.append(self.at_ns)

    def query(self) -> bool:
        assert not self.device.is_capturing
        assert self.at_ns is not None
        return self.at_ns <= self.device.passed_ns

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.query()
        assert end_event.query()
        assert self.at_ns is not None
        assert end_event.at_ns is not None
        return (end_event.at_ns - self.at_ns) / MS


def _times(path: Path, device: Device, **options: int) -> DeviceTimes:
    return DeviceTimes(
        path / "device.ring", make_event=device.make_event, is_capturing=lambda: device.is_capturing, **options
    )


def _step(
    times: DeviceTimes, device: Device, number: int, *, optimizer: int = 0, forward_ns: int = 3 * MS, step_ns: int = MS
) -> None:
    device.now_ns += forward_ns
    times.begin(optimizer, device=0)
    begin_ns = 1000 + device.now_ns
    device.now_ns += step_ns
    times.end(optimizer, device=0, step=number, begin_ns=begin_ns)


def _read(path: Path) -> DeviceTrace:
    return read_device_times(path / "device.ring")


def test_a_result_is_written_once_the_device_has_passed_it(tmp_path: Path) -> None:
    """Nothing is written before, and the step after writes it; no event is waited for."""
    device = Device()
    times = _times(tmp_path, device)
    _step(times, device, 1)
    assert not (tmp_path / "device.ring").exists()
    device.pass_all()
    _step(times, device, 2)
    assert [record.step for record in _read(tmp_path).records] == [1]


def test_the_time_of_a_step_lasts_from_the_last_ones_end(tmp_path: Path) -> None:
    """It covers the work between two steps; the first has none."""
    device = Device()
    times = _times(tmp_path, device)
    for number in (1, 2):
        _step(times, device, number, forward_ns=5 * MS, step_ns=2 * MS)
    device.pass_all()
    times.settle()
    assert _read(tmp_path).records == (
        DeviceRecord(begin_ns=1000 + 5 * MS, optimizer=0, step=1, optimizer_ns=2 * MS, step_ns=None),
        DeviceRecord(begin_ns=1000 + 12 * MS, optimizer=0, step=2, optimizer_ns=2 * MS, step_ns=7 * MS),
    )


def test_a_step_inside_a_capture_is_counted_and_nothing_is_asked(tmp_path: Path) -> None:
    """Neither event nor query, and the step after it has no step time."""
    device = Device()
    times = _times(tmp_path, device)
    _step(times, device, 1)
    device.pass_all()
    device.is_capturing = True
    _step(times, device, 2)
    device.is_capturing = False
    _step(times, device, 3)
    device.pass_all()
    times.settle()
    assert times.num_captured == 1
    assert [(record.step, record.step_ns) for record in _read(tmp_path).records] == [(1, None), (3, None)]


@pytest.mark.parametrize("is_captured_at", ["begin", "end"])
def test_a_step_with_one_end_inside_a_capture_is_counted(tmp_path: Path, is_captured_at: str) -> None:
    """Half a step has no time."""
    device = Device()
    times = _times(tmp_path, device)
    device.is_capturing = is_captured_at == "begin"
    times.begin(0, device=0)
    device.is_capturing = is_captured_at == "end"
    times.end(0, device=0, step=1, begin_ns=1)
    device.is_capturing = False
    device.pass_all()
    times.settle()
    assert (times.num_steps, times.num_captured, times.num_results) == (1, 1, 0)


def test_events_are_used_again(tmp_path: Path) -> None:
    """With a device three steps behind, a thousand steps need no more events than a few."""
    device = Device()
    times = _times(tmp_path, device)
    for number in range(1, 1001):
        _step(times, device, number)
        device.passed_ns = device.now_ns - 12 * MS
    device.pass_all()
    times.settle()
    assert times.num_results == 1000
    assert device.num_events <= 12
    assert all(record.optimizer_ns == MS for record in _read(tmp_path).records)


def test_a_device_too_far_behind_costs_results_not_memory(tmp_path: Path) -> None:
    """Beyond the limit steps are counted, not measured; when the device catches up, measuring goes on."""
    device = Device()
    times = _times(tmp_path, device)
    for number in range(1, MAX_PENDING + 6):
        _step(times, device, number)
    assert (times.num_behind, times.num_captured) == (5, 0)
    assert device.num_events == 2 * MAX_PENDING
    device.pass_all()
    times.settle()
    _step(times, device, MAX_PENDING + 6)
    device.pass_all()
    times.settle()
    assert _read(tmp_path).records[-1].step == MAX_PENDING + 6
    assert _read(tmp_path).records[-1].step_ns is None
    assert (times.num_steps, times.num_results) == (MAX_PENDING + 6, MAX_PENDING + 1)


def test_a_backlog_is_read_a_few_results_a_step(tmp_path: Path) -> None:
    """Catching up does not make one step long."""
    device = Device()
    times = _times(tmp_path, device)
    for number in range(1, 51):
        _step(times, device, number)
    device.pass_all()
    _step(times, device, 51)
    assert times.num_results == 2


def test_each_optimizer_has_steps_of_its_own(tmp_path: Path) -> None:
    """The time of a step is that between two steps of one optimizer."""
    device = Device()
    times = _times(tmp_path, device)
    for number in (1, 2):
        for optimizer in (0, 1):
            _step(times, device, number, optimizer=optimizer, forward_ns=MS, step_ns=MS)
    device.pass_all()
    times.settle()
    times_ns = {(record.optimizer, record.step): record.step_ns for record in _read(tmp_path).records}
    assert times_ns == {(0, 1): None, (1, 1): None, (0, 2): 4 * MS, (1, 2): 4 * MS}


def test_events_stay_on_their_device(tmp_path: Path) -> None:
    """An event that one device has used is never recorded on another."""
    devices = (Device(), Device())
    current = devices[0]

    def make_event() -> Event:
        return current.make_event()

    times = DeviceTimes(tmp_path / "device.ring", make_event=make_event, is_capturing=lambda: False)
    for number in range(1, 4):
        for index, device in enumerate(devices):
            current = device
            device.now_ns += MS
            times.begin(index, device=index)
            device.now_ns += MS
            times.end(index, device=index, step=number, begin_ns=1)
            device.pass_all()
    assert all(len(device.recorded) == 6 for device in devices)
    assert times.devices() == [0, 1]


def test_a_step_that_raised_leaves_no_result(tmp_path: Path) -> None:
    """A begin without an end is replaced by the next begin, with the same event."""
    device = Device()
    times = _times(tmp_path, device)
    times.begin(0, device=0)
    _step(times, device, 1)
    device.pass_all()
    times.settle()
    assert [record.optimizer_ns for record in _read(tmp_path).records] == [MS]
    assert device.num_events == 2


def test_a_step_whose_begin_was_not_seen_is_left_alone(tmp_path: Path) -> None:
    """An optimizer that comes to a device within a step has no time for that step."""
    times = _times(tmp_path, Device())
    times.end(0, device=0, step=1, begin_ns=1)
    assert (times.num_steps, times.num_captured, times.num_behind, times.num_results) == (1, 0, 0, 0)


def test_ends_on_streams_that_do_not_follow_each_other_give_no_time(tmp_path: Path) -> None:
    """A begin that the device passed after the end is not a time of less than nothing."""
    device = Device(now_ns=10 * MS)
    times = _times(tmp_path, device)
    times.begin(0, device=0)
    device.now_ns = 5 * MS
    times.end(0, device=0, step=1, begin_ns=1)
    device.passed_ns = 10 * MS
    times.settle()
    assert [record.optimizer_ns for record in _read(tmp_path).records] == [None]


def test_the_file_is_bounded_and_overwritten_results_are_counted(tmp_path: Path) -> None:
    """The newest results stay."""
    device = Device()
    times = _times(tmp_path, device, capacity=4)
    for number in range(1, 11):
        _step(times, device, number)
    device.pass_all()
    times.settle()
    trace = _read(tmp_path)
    assert [record.step for record in trace.records] == [7, 8, 9, 10]
    assert (trace.num_written, trace.num_overwritten, trace.num_torn) == (10, 6, 0)


@pytest.mark.parametrize(
    ("read", "name"), [(read_ring, "device.ring"), (read_device_times, "steps.ring")], ids=["steps", "device"]
)
def test_a_ring_of_another_kind_is_refused(tmp_path: Path, read: Callable[[Path], object], name: str) -> None:
    """Steps are not read as device times, nor the other way round."""
    device = Device()
    times = _times(tmp_path, device)
    _step(times, device, 1)
    device.pass_all()
    times.settle()
    RingWriter(tmp_path / "steps.ring").close()
    with pytest.raises(ValueError, match="is not a ring of"):
        read(tmp_path / name)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 5), st.integers(1, 4), st.booleans()), max_size=30
    )
)
def test_every_step_is_measured_or_counted(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool, int, int, bool]]
) -> None:
    """Whatever is captured, and however far the device is behind, each result is the truth and none is lost."""
    device, path = Device(), tmp_path_factory.mktemp("times")
    times = _times(path, device)
    ends_ns: dict[int, int | None] = {}
    expected = []
    for number, (optimizer, is_captured, forward, length, has_passed) in enumerate(steps, start=1):
        device.is_capturing = is_captured
        _step(times, device, number, optimizer=optimizer, forward_ns=forward * MS, step_ns=length * MS)
        device.is_capturing = False
        if not is_captured:
            before_ns = ends_ns.get(optimizer)
            expected.append((number, length * MS, None if before_ns is None else device.now_ns - before_ns))
        ends_ns[optimizer] = None if is_captured else device.now_ns
        if has_passed:
            device.pass_all()
    device.pass_all()
    times.settle()
    records = _read(path).records if expected else ()
    assert sorted((one.step, one.optimizer_ns, one.step_ns) for one in records) == expected
    assert times.num_steps == len(steps) == times.num_results + times.num_captured
