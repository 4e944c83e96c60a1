"""What capturing could gain at most, from the times of a short run: the optimizer's share of a step, and Amdahl's law.

Pure arithmetic: it measures nothing, and what is not known stays None with a reason. A share is taken step by step, so
that its spread is that of the steps; steps of one process are no replications, and the spread is no error of the mean.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, Literal

from lucid_profiler.codec import from_plain
from lucid_profiler.device_times import DeviceRecord
from lucid_profiler.records import CaptureGroup
from lucid_profiler.ring import StepRecord

MIN_STEPS = 5
"""Steps below which nothing is concluded: the first ones load kernels and make buffers."""
WORTH = 0.01
"""The least part of a step that counts as a gain; six pairs of runs with 0.3 % noise find so much."""

Decision = Literal["worth_it", "not_worth_it", "cannot_say"]

__all__ = [
    "MIN_STEPS",
    "WORTH",
    "Capture",
    "Decision",
    "Gain",
    "Judgement",
    "Known",
    "Spread",
    "StepShare",
    "device_share",
    "host_share",
    "judge",
    "main_optimizer",
    "read_capture",
    "replay_gain",
    "share_of_steps",
    "speedup",
    "with_medians",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The quartiles of a quantity over steps."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """The steps of one optimizer on one clock.

    Attributes:
        num_steps: steps whose time and optimizer time are both known.
        step_s: median seconds of a whole step.
        optimizer_s: median seconds of the optimizer in it.
        share: the optimizer's part of a step, from 0 to 1.
    """

    num_steps: int
    step_s: float
    optimizer_s: float
    share: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What an optimizer says about its capture; times in seconds, None where the optimizer does not know them."""

    optimizer: str
    index: int | None = None
    groups: tuple[CaptureGroup, ...] = ()
    setup_seconds: float | None = None
    native_seconds: float | None = None
    replay_seconds: float | None = None
    break_even_steps: int | None = None
    """Replays after which the set-up is paid back; None also where it never is."""
    first_replay_step: int | None = None
    """The step, from 1, from which on steps are replayed; None where the counts do not tell it."""
    num_timed: int | None = None
    """Replayed steps behind `replay_seconds`, which then is a median; None for one step each, as the optimizer does."""

    @property
    def num_replays(self) -> int:
        """Steps in which a group at least was replayed."""
        return max((group.replays for group in self.groups), default=0)

    @property
    def num_replayed_groups(self) -> int:
        """Groups that were replayed at least once."""
        return sum(group.replays > 0 for group in self.groups)

    @property
    def reasons(self) -> dict[str, int]:
        """Group steps that ran natively, counted by reason, most frequent first."""
        counts: Counter[str] = Counter()
        for group in self.groups:
            counts.update(group.reasons)
        return dict(counts.most_common())

    @property
    def never_pays(self) -> bool:
        """Whether a replay is known to be no faster than a native step."""
        times = (self.native_seconds, self.replay_seconds)
        return times[0] is not None and times[1] is not None and times[1] >= times[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The part of a step that replaying saves, negative where it costs; the ends are at the quartiles of the share."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the short runs have told.

    Attributes:
        share: the steps on the clock that counts; None without any.
        share_reason: why there are none.
        used_cuda: whether the program kept a CUDA device busy; None if that is not known.
        can_capture: whether an optimizer of the program reports captures; None if that is not known.
        native: what that optimizer says of the native run.
        captured: what it says of the captured run; None without one.
        captured_reason: why there is no such report.
    """

    share: StepShare | None
    share_reason: str = "no_steps"
    used_cuda: bool | None = None
    can_capture: bool | None = None
    native: Capture | None = None
    captured: Capture | None = None
    captured_reason: str = "not_recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Whether capturing is worth it, why, and what replays gain where their time is known."""

    decision: Decision
    reason: str
    gain: Gain | None = field(default=None)


def main_optimizer(steps: Sequence[StepRecord], captures: Iterable[Capture] = ()) -> int | None:
    """Return the index of the optimizer to look at: the one that stepped most often, of those that can capture if any.

    Of equals the lowest index. None without steps.
    """
    counts = Counter(step.optimizer for step in steps)
    capable = {capture.index for capture in captures}
    among = sorted(index for index in counts if index in capable) or sorted(counts)
    return max(among, key=lambda index: counts[index], default=None)


def host_share(steps: Sequence[StepRecord], optimizer: int | None) -> StepShare | None:
    """Return what the host's clock says of an optimizer: a step lasts from the begin of `step()` to the next one."""
    own = [step for step in steps if step.optimizer == optimizer]
    return share_of_steps(
        (after.begin_ns - before.begin_ns, before.end_ns - before.begin_ns) for before, after in pairwise(own)
    )


def device_share(records: Sequence[DeviceRecord], optimizer: int | None) -> StepShare | None:
    """Return what the device's clock says of an optimizer; steps without both times are left out."""
    return share_of_steps(
        (record.step_ns, record.optimizer_ns)
        for record in records
        if record.optimizer == optimizer and record.step_ns is not None and record.optimizer_ns is not None
    )


def share_of_steps(times_ns: Iterable[tuple[int, int]]) -> StepShare | None:
    """Return the medians and the share of pairs of (step, optimizer) nanoseconds; None if no step took any time."""
    known = [(step, min(optimizer, step)) for step, optimizer in times_ns if step > 0]
    if not known:
        return None
    return StepShare(
        num_steps=len(known),
        step_s=median(step for step, _ in known) / 1e9,
        optimizer_s=median(optimizer for _, optimizer in known) / 1e9,
        share=_spread([optimizer / step for step, optimizer in known]),
    )


def _spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(low=values[0], median=values[0], high=values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(low=low, median=middle, high=high)


def speedup(saved: float) -> float:
    """Return how many times as fast a step is without the part `saved` of it: Amdahl's law; infinite for 1."""
    return math.inf if saved >= 1 else 1 / (1 - saved)


def read_capture(report: Any) -> Capture | None:
    """Return the capture report that an agent wrote down, None if it is none: it need not come from lucid."""
    if not isinstance(report, Mapping):
        return None
    try:
        return from_plain(Capture, dict(report), Counter())
    except ValueError:
        return None


def with_medians(capture: Capture, native: StepShare | None, records: Sequence[DeviceRecord]) -> Capture:
    """Return the capture with medians over steps of both runs in place of the single steps that the optimizer times.

    Args:
        capture: what the optimizer says of the captured run.
        native: its steps in the native run, on the clock of the device.
        records: device times of the captured run.

    It stays as it is where it does not tell its replayed steps apart, or fewer than `MIN_STEPS` of them were timed.
    """
    first = capture.first_replay_step
    times_ns = [
        record.optimizer_ns
        for record in records
        if record.optimizer == capture.index
        and record.optimizer_ns is not None
        and first is not None
        and record.step >= first
    ]
    if native is None or len(times_ns) < MIN_STEPS:
        return capture
    replay_s = median(times_ns) / 1e9
    saved_s = native.optimizer_s - replay_s
    setup_s = capture.setup_seconds
    return replace(
        capture,
        native_seconds=native.optimizer_s,
        replay_seconds=replay_s,
        break_even_steps=math.ceil(setup_s / saved_s) if setup_s is not None and saved_s > 0 else None,
        num_timed=len(times_ns),
    )


def replay_gain(share: Spread, capture: Capture) -> Gain | None:
    """Return what replaying saves of a step: the optimizer's share times the part of its time that a replay saves.

    None where a time is not known or makes no sense.
    """
    native, replay = capture.native_seconds, capture.replay_seconds
    if native is None or replay is None or not 0 < native < math.inf or not 0 <= replay < math.inf:
        return None
    saved = 1 - replay / native
    low, high = sorted((share.low * saved, share.high * saved))
    return Gain(low=low, median=share.median * saved, high=high)


def judge(known: Known) -> Judgement:
    """Say whether capturing is worth it, or why that cannot be said.

    A gain below `WORTH` of a step does not count. Where the quartiles of the gain lie on both sides of that, a short
    run cannot tell.
    """
    if known.share is None:
        return Judgement(decision="cannot_say", reason=known.share_reason)
    if known.share.num_steps < MIN_STEPS:
        return Judgement(decision="cannot_say", reason="too_few_steps")
    if not known.used_cuda:
        return Judgement(decision="cannot_say", reason="not_finished" if known.used_cuda is None else "no_cuda")
    if known.share.share.high < WORTH:
        return Judgement(decision="not_worth_it", reason="small_share")
    return _of_capture(known, known.share.share)


def _of_capture(known: Known, share: Spread) -> Judgement:
    """Judge by what the optimizer says of its capture, where the share alone does not decide."""
    if known.can_capture is False:
        return Judgement(decision="cannot_say", reason="no_capture_report")
    if known.native is not None and known.native.num_replays:
        return Judgement(decision="cannot_say", reason="native_replayed")
    if known.captured is None:
        return Judgement(decision="cannot_say", reason=known.captured_reason)
    if not known.captured.num_replays:
        return _not_replayed(known.captured.reasons)
    return _of_gain(replay_gain(share, known.captured))


def _not_replayed(reasons: Mapping[str, int]) -> Judgement:
    """Judge a capture that was asked for and did not take place."""
    others = reasons.keys() - {"warming_up", "held_back"}
    if not others:
        return Judgement(decision="cannot_say", reason="warming_up")
    if "not_requested" in others:
        return Judgement(decision="cannot_say", reason="not_requested")
    return Judgement(decision="not_worth_it", reason="not_certified")


def _of_gain(gain: Gain | None) -> Judgement:
    if gain is None:
        return Judgement(decision="cannot_say", reason="no_replay_time")
    if gain.high < WORTH:
        return Judgement(decision="not_worth_it", reason="no_gain" if gain.median <= 0 else "small_gain", gain=gain)
    if gain.low < WORTH:
        return Judgement(decision="cannot_say", reason="spread", gain=gain)
    return Judgement(decision="worth_it", reason="gain", gain=gain)
