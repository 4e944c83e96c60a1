"""What short runs say about capturing: times, shares, bounds, and one sentence. What is not known is `-` and why."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lucid_cli.reporters.layout import columns, labelled
from lucid_cli.reporters.words import abbreviated, amount, counted, reason_words, scale
from lucid_profiler.estimate import MIN_STEPS, WORTH, Capture, Gain, Judgement, Known, Spread, StepShare, speedup
from lucid_profiler.records import Kernels, Metric

_DECISIONS = {"worth_it": "worth it", "not_worth_it": "not worth it", "cannot_say": "cannot say"}
_LIMITS = {
    "steps": "as many steps as asked for",
    "seconds": "as many seconds as asked for",
    "timeout": "the time limit",
}
_KERNELS = {
    "kernels_off": "not counted; --kernels counts them",
    "no_cuda": "a program without a CUDA device launches none",
    "not_traced": "no run was traced",
}
# By the first word of its module and its name, what takes the place of an optimizer with the same update.
_REPLACEMENTS = {("lucid_yolo", "MuSGD"): "lucid_optim.MuSGD", ("torch", "Muon"): "lucid_optim.Muon"}

__all__ = ["Part", "Shown", "part_words", "render_estimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the short runs.

    Attributes:
        name: `native`, `captured` or `traced`.
        status: `ended` where lucid ended it; `ok` where it came to an end of its own, with status 0.
        limit: why lucid interrupted it, in words; None where it did not.
        was_killed: whether it had to be, so that its exit handlers did not run.
    """

    name: str
    status: Literal["ok", "ended", "failed"]
    limit: str | None = None
    was_killed: bool = False
    returncode: int | None = None
    signal: str | None = None
    seconds: float
    num_steps: int
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """All that an estimate shows."""

    command: tuple[str, ...]
    parts: tuple[Part, ...]
    known: Known
    host: StepShare | None
    device: StepShare | None
    judgement: Judgement
    optimizer: Mapping[str, Any] | None
    """Name and module of its class; None where that is not known."""
    num_optimizers: int
    kernels: Kernels | None
    kernels_reason: str
    data_wait: Metric
    """What the native run waited for batches, within `wall_s`."""
    wall_s: float
    notes: tuple[str, ...] = ()


def part_words(part: Part) -> str:
    """Say how a run ended."""
    head = f"{part.seconds:.2f} s, {counted(part.num_steps, 'optimizer step')}"
    if part.num_processes > 1:
        head += f" in {part.num_processes} processes"
    if part.status == "failed":
        how = f"ended by {part.signal}" if part.signal else f"exit status {part.returncode}"
        return f"{head}, failed: {how}"
    if part.status == "ok":
        asked = "" if part.limit is None else f" with status 0; lucid had interrupted it {part.limit}"
        return f"{head}, ran to its end{asked}"
    text = f"{head}, ended by lucid {part.limit}"
    return f"{text}; it did not end when it was interrupted, and was killed" if part.was_killed else text


def render_estimate(shown: Shown) -> str:
    """Return an estimate as lines of at most 100 columns, the verdict last."""
    capture = shown.known.captured
    lines = labelled("command", abbreviated(shlex.join(shown.command)))
    for part in shown.parts:
        lines += labelled(part.name, part_words(part))
    lines += labelled("optimizer", _optimizer(shown))
    lines += ["", *columns(_times(shown)), *_missing(shown), ""]
    lines += labelled("data", _data(shown))
    lines += labelled("launches", _launches(shown))
    lines += labelled("capture", _capture(shown))
    lines += labelled("set-up", _setup(capture))
    lines += labelled("at most", _at_most(shown))
    lines += labelled("replayed", _replayed(shown))
    for note in shown.notes:
        lines += labelled("note", note)
    verdict = f"{_DECISIONS[shown.judgement.decision]}: {_sentence(shown)}"
    return "\n".join([*lines, "", *labelled("verdict", verdict)]) + "\n"


def _optimizer(shown: Shown) -> str:
    if shown.optimizer is None:
        name = shown.known.native.optimizer if shown.known.native is not None else ""
        text = name or f"- ({reason_words(shown.known.share_reason if shown.known.share is None else 'not_finished')})"
    else:
        text = f"{shown.optimizer.get('name')} of {shown.optimizer.get('module')}"
    others = shown.num_optimizers - 1
    return f"{text}; {counted(others, 'other optimizer')} not looked at" if others > 0 else text


def _times(shown: Shown) -> list[list[str]]:
    sides = (shown.host, shown.device)
    rows = [["", "host", "device"]]
    rows.append(["step, median", *(_time(side.step_s if side else None) for side in sides)])
    rows.append(["optimizer, median", *(_time(side.optimizer_s if side else None) for side in sides)])
    rows.append(["share of the step, median", *(_part(side.share.median if side else None) for side in sides)])
    rows.append(["  quartiles over steps", *(_quartiles(side.share if side else None) for side in sides)])
    rows.append(["  steps", *(str(side.num_steps) if side else "-" for side in sides)])
    return rows


def _missing(shown: Shown) -> list[str]:
    """Say why a clock has no times."""
    lines = []
    if shown.host is None:
        lines += labelled("host", f"- ({reason_words(shown.known.share_reason)})")
    if shown.device is None and shown.known.share is not None:
        lines += labelled("device", f"- ({_no_device(shown.known)})")
    return lines


def _no_device(known: Known) -> str:
    if known.used_cuda is False:
        return reason_words("no_cuda")
    return reason_words("not_finished") if known.used_cuda is None else "its steps were not timed there"


def _time(seconds: float | None) -> str:
    scaled = scale("s", seconds)
    return "-" if seconds is None else f"{amount(seconds, scaled)} {scaled[1]}"


def _part(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _quartiles(spread: Spread | None) -> str:
    return "-" if spread is None else f"{100 * spread.low:.1f} to {100 * spread.high:.1f} %"


def _data(shown: Shown) -> str:
    waited_s = shown.data_wait.value
    if waited_s is None:
        return f"- ({reason_words(shown.data_wait.reason or 'not_recorded')})"
    share = waited_s / shown.wall_s if shown.wall_s > 0 else 0.0
    text = f"{_part(share)} of the time is spent waiting for batches"
    return text if share < WORTH else f"{text}: what a step saves may be spent waiting there instead"


def _launches(shown: Shown) -> str:
    if shown.kernels is None:
        return f"- ({_KERNELS[shown.kernels_reason]})"
    table = shown.kernels.table
    per_step = table.launches_per_step if table is not None else None
    if table is None or per_step is None:
        reason = shown.kernels.reason if table is None else table.reason or "none were traced"
        return f"- ({reason_words(reason or 'not_recorded')})"
    counts = ", ".join(f"{value:.4g} {name}" for name, value in per_step.items())
    return f"{counts} a step, over {counted(table.num_steps, 'step')} of a traced native run"


def _capture(shown: Shown) -> str:
    capture = shown.known.captured
    if capture is None:
        return f"- ({_no_report(shown)})"
    num_groups = len(capture.groups)
    reasons = ", ".join(f"{reason_words(reason)} ({count})" for reason, count in capture.reasons.items())
    if capture.num_replays:
        text = f"certified: {capture.num_replayed_groups} of {counted(num_groups, 'group')} replayed"
        text += f", in {counted(capture.num_replays, 'step')}"
    else:
        text = f"none of {counted(num_groups, 'group')} replayed"
    return f"{text}; native group steps: {reasons}" if reasons else text


def _no_report(shown: Shown) -> str:
    """Say why nothing is known about capturing."""
    known = shown.known
    if known.share is None:
        return reason_words(known.share_reason)
    if known.used_cuda is False:
        return "no CUDA device was used, and capture does nothing without"
    if known.can_capture is False:
        return reason_words("no_capture_report")
    if known.captured_reason == "captured_failed":
        return "the captured run failed"
    if shown.parts[0].status == "failed":
        return "the native run failed"
    return reason_words("not_finished" if known.used_cuda is None else known.captured_reason)


def _setup(capture: Capture | None) -> str:
    if capture is None or not capture.setup_seconds:
        return "- (nothing was recorded)"
    text = f"{_time(capture.setup_seconds)} on the host, once; "
    if capture.break_even_steps is not None:
        return text + f"paid back after {counted(capture.break_even_steps, 'replay')}"
    if capture.never_pays:
        return text + "never paid back: a replayed step takes no less time than a native one"
    return text + "paid back after - (too few steps to time both a native and a replayed one)"


def _at_most(shown: Shown) -> str:
    share = shown.known.share
    if share is None:
        return "- (no share is known)"
    clock = "device" if shown.device is not None else "host"
    return f"{_saved(share.share.median)} by the clock of the {clock}, if the optimizer took no time at all"


def _saved(part: float) -> str:
    factor = speedup(part)
    times = "infinitely many times" if math.isinf(factor) else f"{factor:.2f} times"
    return f"{100 * part:.1f} % of a step, {times} as fast,"


def _replayed(shown: Shown) -> str:
    gain, capture = shown.judgement.gain, shown.known.captured
    if gain is None or capture is None:
        why = "no step was replayed" if capture is None or not capture.num_replays else "no replay was timed"
        return f"- ({why})"
    native, replay = _time(capture.native_seconds), _time(capture.replay_seconds)
    timed = "timed on one step each" if capture.num_timed is None else f"medians, of {capture.num_timed} replayed steps"
    return f"{_saved(gain.median)} with {replay} a replayed and {native} a native optimizer step, {timed}"


def _range(gain: Gain) -> str:
    return f"{100 * gain.low:.1f} to {100 * gain.high:.1f} %"


def _sentence(shown: Shown) -> str:
    """Return the reason of the judgement as a sentence with its numbers."""
    known, reason, gain = shown.known, shown.judgement.reason, shown.judgement.gain
    least = f"{100 * WORTH:.0f} %"
    if gain is not None:
        return _gain_sentence(reason, gain, shown, least=least)
    if reason == "small_share" and known.share is not None:
        return (
            f"a quarter of the steps at most spends more than {_part(known.share.share.high)} in the optimizer, so "
            f"less than the {least} that count could be gained, whatever is done to it"
        )
    if reason == "not_certified" and known.captured is not None:
        names = [name for name in known.captured.reasons if name not in {"warming_up", "held_back"}]
        return (
            f"capture would leave every step native: {', '.join(map(reason_words, names))}; docs/capture.md says what "
            "to do about each reason"
        )
    sentences = {
        "program_failed": "the program failed before the end of its short run; what it printed last is above",
        "captured_failed": "the program failed with capture on; what it printed last is above",
        "no_capture_report": _replacement(shown),
        "no_cuda": "no CUDA device was used, and without one capture does nothing; run this where the training will "
        "run, since shares of a processor say nothing about those of a GPU",
        "too_few_steps": f"fewer than {MIN_STEPS} whole steps were seen; let the program take more, with --steps or "
        "--seconds",
        "native_replayed": "the native run replayed recordings, so it is no native run; leave capture to the "
        "environment",
        "warming_up": "no step was replayed before the run was ended; let it take more, with --steps",
        "not_requested": "the optimizer did not turn capture on; leave LUCID_CAPTURE_UPDATES alone in the program",
        "no_replay_time": "steps were replayed, but too few to time one; let the program take more, with --steps",
        "not_recorded": "the captured run reported nothing about this optimizer",
        "not_finished": "the program did not come to its exit handlers, which write down what capture did",
    }
    return sentences.get(reason, reason_words(reason))


def _replacement(shown: Shown) -> str:
    """Say what it would take to capture a program whose optimizer cannot."""
    optimizer = shown.optimizer or {}
    key = (str(optimizer.get("module")).partition(".")[0], str(optimizer.get("name")))
    text = "no optimizer of the program can capture. "
    if key in _REPLACEMENTS:
        text += f"{_REPLACEMENTS[key]} takes the place of {key[1]}, with the same update"
    else:
        text += (
            "It would take one of lucid_optim (MuSGD, Muon), which is another computation unless the update is theirs"
        )
    return f"{text}; at most {_part(shown.known.share.share.median if shown.known.share else None)} of a step is there"


def _gain_sentence(reason: str, gain: Gain, shown: Shown, *, least: str) -> str:
    if reason == "no_gain":
        return "a replayed optimizer step takes no less time than a native one here"
    saved = f"about {_part(gain.median)} of a step ({_range(gain)})"
    if reason == "small_gain":
        return f"replays would gain {saved}, less than the {least} that count"
    if reason == "spread":
        return (
            f"replays would gain {saved}, on both sides of the {least} that count: measure it in pairs with "
            "lucid profile run"
        )
    capture = shown.known.captured
    steps = capture.break_even_steps if capture is not None else None
    paid = f", paid back after {counted(steps, 'replay')}" if steps is not None else ""
    return f"replays would gain {saved}{paid}; confirm it, and that no bit changes, with lucid profile run"
