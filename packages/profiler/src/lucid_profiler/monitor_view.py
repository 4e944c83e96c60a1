"""The readings of one run's wall interval: of which devices they are, what they come to, and when they say nothing.

A mean over readings of half an interval is no mean of the interval, and a counter that was last read long before the
end has not been read there: both are None with the reason.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lucid_profiler.collect_device import bare_uuid
from lucid_profiler.monitor.readings import is_too_short
from lucid_profiler.monitor.records import Gap, Mark, Sample
from lucid_profiler.monitor_reasons import WhyNull
from lucid_profiler.records import Wall

MIN_COVERAGE = 0.8  # of the samples that the interval should hold
MIN_SAMPLES = 10  # in the interval, for a counter that is read with them
MARK_SLACK_NS = 500_000_000
"""A mark farther from the end of the interval that it stands for is of another moment."""

Number = float | int
Known = tuple[Number | None, str | None]
"""A value, or None with its reason."""

__all__ = ["Known", "Number", "View", "mean"]


def mean(values: Iterable[Number]) -> float:
    """Return the mean of one or more numbers."""
    numbers = list(values)
    return sum(numbers) / len(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The samples of a run with its wall interval.

    Attributes:
        samples: all of the log.
        devices: what the log says of each device.
        no_gpu: why there are none.
        reasons: why fields were null, and when.
        wall: the interval.
        interval_ns: time between two samples.
        used: UUIDs, without their kind, of the devices that the run's processes named; empty where none did.
        gaps: times in which a device, or everything, was not read.
    """

    samples: Sequence[Sample]
    devices: Sequence[Mapping[str, Any]]
    no_gpu: str | None
    reasons: WhyNull
    wall: Wall
    interval_ns: int
    used: Sequence[str] = ()
    gaps: Sequence[Gap] = ()

    @property
    def uuids(self) -> list[str]:
        """The devices that the run used: as its processes say, else in which it has memory, else its only one.

        Of those that its processes say only the ones that the log knows; `why_unknown` says that others are missing.
        """
        if self.used:
            return [uuid for uuid in self._all if bare_uuid(uuid) in self.used]
        targets = self._targets
        return [uuid for uuid in targets if self._has_memory(uuid)] or (targets if len(targets) == 1 else [])

    @property
    def why_unknown(self) -> str | None:
        """Why it is not known of all devices of the run which they are; None where it is."""
        if self.no_gpu or not self._all:
            return self.no_gpu or "no_devices"
        if self.used:
            return None if set(self.used) <= {bare_uuid(uuid) for uuid in self._all} else "not_found"
        if self.uuids:
            return None
        if not self._targets:
            return "not_target"
        names = [f"gpu:{uuid}.process_memory_bytes" for uuid in self._targets]
        given = {why for name in names for why in self.reasons.during(name, self.wall.begin_ns, self.wall.end_ns)}
        return "pid_namespace" if "pid_namespace" in given else "no_gpu_memory"

    def why_null(self, uuid: str, field: str, at_ns: int) -> str:
        """Return why a field of a device was null at a moment."""
        unread = "gap" if uuid in self._targets else "not_target"
        return self.reasons.at(f"gpu:{uuid}.{field}", at_ns) or unread

    def why_mostly_null(self, uuid: str, field: str, *, is_slow: bool = False) -> str:
        """Return the commonest reason for which a field of a device was not read in the interval; see `combined`.

        Samples that were not taken count as "gap", as many as are missing from what the interval should hold.
        """
        inside = list(self._inside())
        nulls = (one.mono_ns for one in inside if one.gpus.get(uuid, {field: None}).get(field, 0) is None)
        reasons = Counter(self.why_null(uuid, field, at_ns) for at_ns in nulls)
        num_missing = self._num_expected(is_slow=is_slow) - len(inside)
        if num_missing > 0:
            reasons["gap"] += num_missing
        return reasons.most_common(1)[0][0] if reasons else self.why_null(uuid, field, self.wall.end_ns)

    @property
    def _slack_ns(self) -> int:
        return (self.wall.end_ns - self.wall.begin_ns) // 20

    @property
    def _all(self) -> list[str]:
        return [str(device["uuid"]) for device in self.devices]

    @property
    def _targets(self) -> list[str]:
        return [str(device["uuid"]) for device in self.devices if device.get("is_target", True)]

    def _has_memory(self, uuid: str) -> bool:
        return any(sample.gpus.get(uuid, {}).get("process_memory_bytes") for sample in self.samples)

    def combined(
        self,
        field: str,
        over_time: Callable[[Sequence[Number]], Number],
        over_devices: Callable[[Sequence[Number]], Number],
        *,
        scale: float | None = None,
        is_slow: bool = False,
    ) -> Known:
        """Return one number for a field of the devices that the run used.

        Args:
            field: its name.
            over_time: makes one number of the readings of a device.
            over_devices: makes one of those.
            scale: factor of the result.
            is_slow: whether the field is read more rarely than every sample.
        """
        why_unknown = self.why_unknown
        if why_unknown is not None:
            return None, why_unknown
        if is_too_short(field, self.wall.end_ns - self.wall.begin_ns):
            return None, "below_resolution"
        values = []
        for uuid in self.uuids:
            readings = self._readings(uuid, field)
            if len(readings) < max(1, self._num_expected(is_slow=is_slow)):
                return None, self.why_mostly_null(uuid, field, is_slow=is_slow)
            values.append(over_time(readings))
        value = over_devices(values)
        return value if scale is None else value * scale, None

    def _readings(self, uuid: str, field: str) -> list[Number]:
        values = (sample.gpus.get(uuid, {}).get(field) for sample in self._inside())
        return [value for value in values if value is not None]

    def _inside(self) -> Iterator[Sample]:
        return (one for one in self.samples if self.wall.begin_ns <= one.mono_ns <= self.wall.end_ns)

    def _num_expected(self, *, is_slow: bool) -> int:
        """Return of how many samples at least the interval needs a value."""
        return 1 if is_slow else int(MIN_COVERAGE * (self.wall.end_ns - self.wall.begin_ns) / self.interval_ns)

    def growth(self, field: str, *, marked: Iterable[tuple[int, Number]] = ()) -> Known:
        """Return by how much a cumulative field of the host grew in the interval.

        At each end it lies between the readings around it, in proportion; where the process ended with the interval,
        the last reading stands for its end if it is not farther away than an interval or a twentieth of the wall.

        Args:
            field: its name.
            marked: times and readings that are in no sample.
        """
        begin_ns, end_ns = self.wall.begin_ns, self.wall.end_ns
        if end_ns - begin_ns < MIN_SAMPLES * self.interval_ns:
            return None, "too_few_samples"
        rows = [(one.mono_ns, one.host.get(field)) for one in self.samples if one.host is not None]
        known = sorted([*((at_ns, value) for at_ns, value in rows if value is not None), *marked])
        begin = self._between(known, begin_ns)
        if begin is None and self.wall.source == "process":
            begin = 0  # nothing was used before the process began
        end = self._between(known, end_ns)
        last_ns, last = known[-1] if known else (begin_ns, None)
        if end is None and last is not None and end_ns - max(self.interval_ns, self._slack_ns) <= last_ns <= end_ns:
            end = last
        if begin is None or end is None:
            if not known:
                return None, self.reasons.at(f"host.{field}", end_ns) or "gap"
            is_sampled = self._is_sampled(begin=begin is None, end=end is None)
            return None, "read_too_rarely" if is_sampled else "gap"
        return end - begin, None

    def _is_sampled(self, *, begin: bool, end: bool) -> bool:
        """Return whether samples, though not of everything, were taken at these ends of the interval."""
        times = [one.mono_ns for one in self.samples]
        is_begun = not begin or min(times, default=self.wall.end_ns) <= self.wall.begin_ns
        return is_begun and (not end or max(times, default=0) >= self.wall.end_ns - self.interval_ns)

    def _between(self, known: Sequence[tuple[int, Number]], at_ns: int) -> Number | None:
        """Return what a field was at a moment between two samples.

        None if they are farther apart than three intervals and a twentieth of the wall, and neither is within an
        interval of it: where a busy machine skips some, what lies between is still small beside the whole.
        """
        place = bisect_right(known, at_ns, key=lambda reading: reading[0])
        if place and known[place - 1][0] == at_ns:
            return known[place - 1][1]
        if not 0 < place < len(known):
            return None
        (before_ns, before), (after_ns, after) = known[place - 1], known[place]
        is_near = min(at_ns - before_ns, after_ns - at_ns) <= self.interval_ns
        if not is_near and after_ns - before_ns > max(3 * self.interval_ns, self._slack_ns):
            return None
        return before + (after - before) * (at_ns - before_ns) / (after_ns - before_ns)

    def mark(self, marks: Sequence[Mark], name: str, at_ns: int) -> Mark | None:
        """Return the mark of that name at a moment; one of another moment, as of another process, does not count."""
        named = [mark for mark in marks if mark.name == name and abs(mark.mono_ns - at_ns) <= MARK_SLACK_NS]
        return min(named, key=lambda mark: abs(mark.mono_ns - at_ns), default=None)
