from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from lucid_profiler.allocator import MAX_LINES, AllocatorReadings, interval_ns, private_pools
from lucid_profiler.codec import from_plain
from lucid_profiler.entries import AllocatorEntry

SECOND_NS = 1_000_000_000


@dataclass
class Cuda:
    """Stands for `torch.cuda`: what the allocator says, and how often it was asked."""

    is_capturing: bool = False
    num_readings: int = 0
    num_snapshots: int = 0
    segments: list[dict[str, Any]] = field(default_factory=list)

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        self.num_readings += 1
        return {
            "allocated_bytes": {"all": {"current": 10 + device, "peak": 20}, "small_pool": {"current": 1, "peak": 2}},
            "reserved_bytes": {"all": {"current": 30, "peak": 40}},
            "num_alloc_retries": 3,
            "num_ooms": 1,
        }

    def memory_snapshot(self) -> list[dict[str, Any]]:
        self.num_snapshots += 1
        return self.segments


class NewCuda(Cuda):
    """As newer versions: a snapshot may leave out histories."""

    def memory_snapshot(self, mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
        assert not include_traces
        return super().memory_snapshot()


class Lines(list[dict[str, Any]]):
    """The lines that were written."""

    def write(self, kind: str, **fields: Any) -> None:
        self.append({"kind": kind, **fields})


def _readings(cuda: Cuda, lines: Lines, *, every_ns: int = SECOND_NS, pools: bool = False) -> AllocatorReadings:
    return AllocatorReadings(
        lines.write, interval_ns=every_ns, with_private_pools=pools, cuda=cuda, clock_ns=lambda: 7 * SECOND_NS
    )


def test_a_line_says_what_the_allocator_says() -> None:
    """All pools together, current and peak, with the device and the number of steps."""
    lines = Lines()
    _readings(Cuda(), lines).after_step([1], step=5, now_ns=SECOND_NS)
    (line,) = lines
    assert line.pop("kind") == "allocator"
    assert from_plain(AllocatorEntry, line, Counter()) == AllocatorEntry(
        mono_ns=7 * SECOND_NS,
        step=5,
        device=1,
        allocated_bytes=11,
        reserved_bytes=30,
        peak_allocated_bytes=20,
        peak_reserved_bytes=40,
        num_alloc_retries=3,
        num_ooms=1,
        private_pools_bytes=None,
    )


def test_readings_keep_their_interval() -> None:
    """A hundred steps in ten seconds are read ten times."""
    cuda, lines = Cuda(), Lines()
    readings = _readings(cuda, lines)
    for step in range(100):
        readings.after_step([0], step=step, now_ns=SECOND_NS + step * SECOND_NS // 10)
    assert [line["step"] for line in lines] == list(range(0, 100, 10))
    assert cuda.num_readings == 10


def test_an_optimizer_on_several_devices_has_a_reading_of_each() -> None:
    """At the same interval as one on a single device."""
    lines = Lines()
    readings = _readings(Cuda(), lines)
    readings.after_step([0, 1], step=1, now_ns=SECOND_NS)
    readings.after_step([0, 1], step=2, now_ns=SECOND_NS + 1)
    assert [(line["device"], line["step"]) for line in lines] == [(0, 1), (1, 1)]


@pytest.mark.parametrize(("devices", "every_ns"), [([], SECOND_NS), ([0], 0)])
def test_without_a_device_or_an_interval_cuda_is_not_asked(devices: list[int], every_ns: int) -> None:
    """Neither by a step nor at the end."""
    cuda, lines = Cuda(), Lines()
    readings = _readings(cuda, lines, every_ns=every_ns, pools=True)
    readings.after_step(devices, step=1, now_ns=SECOND_NS)
    readings.read_now(step=1)
    assert not lines
    assert (cuda.num_readings, cuda.num_snapshots) == (0, 0)


def test_a_capture_puts_a_reading_off() -> None:
    """The next step outside it is read."""
    cuda, lines = Cuda(is_capturing=True), Lines()
    readings = _readings(cuda, lines)
    readings.after_step([0], step=1, now_ns=SECOND_NS)
    cuda.is_capturing = False
    readings.after_step([0], step=2, now_ns=SECOND_NS + 1)
    assert [line["step"] for line in lines] == [2]


def test_every_device_that_steps_is_read() -> None:
    """Optimizers on two devices give two lines an interval."""
    lines = Lines()
    readings = _readings(Cuda(), lines)
    for step in range(1, 5):
        readings.after_step([step % 2], step=step, now_ns=SECOND_NS * step)
    assert [line["device"] for line in lines] == [1, 0, 1, 0, 1, 0, 1]


def test_the_end_is_read_although_nothing_is_due() -> None:
    """The last line belongs to the last step."""
    lines = Lines()
    readings = _readings(Cuda(), lines)
    readings.after_step([0], step=1, now_ns=SECOND_NS)
    readings.read_now(step=9)
    assert [line["step"] for line in lines] == [1, 9]


@pytest.mark.parametrize("kind", [Cuda, NewCuda])
def test_private_pools_are_read_seldom_and_at_the_end(kind: type[Cuda]) -> None:
    """At most every ten seconds, and only where they were asked for."""
    segments = [
        {"device": 0, "total_size": 5, "allocated_size": 1, "segment_pool_id": (0, 0)},
        {"device": 0, "total_size": 7, "allocated_size": 2, "segment_pool_id": (0, 1)},
        {"device": 1, "total_size": 9, "allocated_size": 3, "segment_pool_id": (0, 1)},
    ]
    cuda, lines = kind(segments=segments), Lines()
    readings = _readings(cuda, lines, pools=True)
    for step in range(12):
        readings.after_step([0], step=step, now_ns=SECOND_NS * (7 + step))
    readings.read_now(step=12)
    assert [line["private_pools_bytes"] for line in lines] == [7, *[None] * 9, 7, None, 7]
    assert [line["private_pools_allocated_bytes"] for line in lines] == [2, *[None] * 9, 2, None, 2]
    assert cuda.num_snapshots == 3


def test_segments_without_a_pool_are_not_taken_for_none() -> None:
    """An older torch does not say which pool a segment is of: that is not known, which is not 0."""
    unknown, none = private_pools([{"device": 0, "total_size": 5, "allocated_size": 1}], 0), private_pools([], 0)
    assert unknown == {"private_pools_bytes": None, "private_pools_allocated_bytes": None}
    assert none == {"private_pools_bytes": 0, "private_pools_allocated_bytes": 0}


def test_a_counter_that_is_not_there_is_none() -> None:
    """Another allocator may say less."""
    cuda, lines = Cuda(), Lines()
    cuda.memory_stats_as_nested_dict = lambda device: {}  # type: ignore[method-assign]
    _readings(cuda, lines).after_step([0], step=1, now_ns=SECOND_NS)
    assert {lines[0][name] for name in ("allocated_bytes", "peak_reserved_bytes", "num_ooms")} == {None}


def test_lines_are_bounded_and_a_note_says_so() -> None:
    """A short interval in a long run does not fill the disk."""
    cuda, lines = Cuda(), Lines()
    readings = _readings(cuda, lines, every_ns=1)
    for step in range(MAX_LINES + 5):
        readings.after_step([0], step=step, now_ns=step)
    readings.read_now(step=1)
    assert len(lines) == MAX_LINES + 1
    assert lines[-1] == {
        "kind": "note",
        "text": "allocator readings end after 100,000 lines: set a longer interval",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, SECOND_NS), ("", SECOND_NS), ("0", 0), ("0.25", SECOND_NS // 4), ("60", 60 * SECOND_NS)],
)
def test_the_interval_is_a_number_of_seconds(text: str | None, expected: int) -> None:
    """One second where nothing is set, 0 for off."""
    assert interval_ns(text) == expected


@pytest.mark.parametrize("text", ["fast", "-1", "nan", "inf", "1s"])
def test_another_interval_is_refused_by_name(text: str) -> None:
    """The message names the setting and the value."""
    with pytest.raises(ValueError, match=f"LUCID_ALLOCATOR_INTERVAL_S is '{text}'"):
        interval_ns(text)
