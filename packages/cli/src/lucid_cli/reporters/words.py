"""Codes, numbers and units in words, for every text that a person reads."""

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from lucid_profiler.monitor.readings import REASONS as MONITOR_REASONS
from lucid_profiler.records import Run

_MAX_COMMAND_CHARS = 300
_TAIL_CHARS = 80
_QUOTED = re.compile(
    r"""
    "'" |  # a quote itself, in double ones
    '[^']*'
""",
    re.VERBOSE,
)

__all__ = [
    "METRIC_NAMES",
    "abbreviated",
    "amount",
    "at_best",
    "change",
    "counted",
    "counted_reasons",
    "interval",
    "level",
    "metric_name",
    "percent",
    "reason_words",
    "run_words",
    "scale",
    "value_words",
]

METRIC_NAMES = {
    "wall": "wall",
    "step_time_median": "step",
    "optimizer_time_median": "optimizer step",
    "step_device_median": "step on the device",
    "optimizer_device_median": "optimizer on the device",
    "data_wait": "waiting for data",
    "peak_rss": "peak resident",
    "peak_allocated": "peak allocated",
    "peak_reserved": "peak reserved",
    "cpu_time": "CPU time",
    "gpu_energy": "GPU energy",
    "gpu_power": "GPU power",
    "gpu_utilization": "GPU utilisation",
    "gpu_clock_sm": "SM clock",
    "gpu_process_memory": "GPU memory",
}
_REASONS = {
    "no_agent": "no agent was loaded: not a Python program, Python with -S, -I or -E, the command replaced "
    "PYTHONPATH, or it runs as a user who cannot write the run's directory",
    "no_cuda": "no CUDA device was used",
    "no_steps": "no optimizer step was seen",
    "steps_not_recorded": "the optimizer steps could not be recorded; a note says why",
    "no_loader": "the main thread took no batch from a DataLoader of torch's",
    "waits_not_recorded": "the waits for batches could not be recorded; a note says why",
    "waits_lost": "there were more waits for batches than are kept",
    "too_few_steps": "fewer than two optimizer steps were seen",
    "not_finished": "the process ended without its exit handlers, or its agent could no longer write",
    "agent_cut_off": "the agent could not write down all that it saw; a note says why",
    "hidden_by_own_memory": "not above lucid's own memory",
    "not_requested": "capture is off",
    "overridden": "a class of the command overrides the step or its rule",
    "warming_up": "steps before a recording",
    "waiting": "recordings had not paid for themselves",
    "changed_parameters": "parameters were replaced or moved",
    "changed_state": "buffers were replaced or moved",
    "changed_gradients": "other parameters had gradients than those recorded",
    "changed_structure": "a hyperparameter that decides the operations changed",
    "changed_modes": "a numeric mode changed",
    "gradient": "gradients were not plain float32 tensors",
    "shared_memory": "written tensors share memory",
    "subclass": "parameters are of a tensor subclass",
    "several_devices": "a group lies on several devices",
    "other_device": "another group was recorded on another device",
    "dtype": "parameters are not float32",
    "layout": "parameters have gaps in memory",
    "inference_mode": "inference mode",
    "autocast": "the step ran under autocast",
    "compiling": "the step was being traced",
    "dispatch_mode": "a torch dispatch mode was active",
    "autograd": "autograd was to follow",
    "scheme": "an orthogonalisation of the command's own",
    "enclosing_capture": "the step was inside another capture",
    "recording_failed": "recording failed",
    "out_of_memory": "recording ran out of device memory",
    "held_back": "another group could not be replayed",
    "no_capture_report": "no optimizer of the command reports captures",
    "not_recorded": "not recorded",
    "run_failed": "a run failed",
    "run_timeout": "the run ran into its time limit",
    "run_interrupted": "the run was interrupted",
    "run_not_started": "the run was not started",
    "too_few_samples": "fewer than ten samples",
    "no_gpu_memory": "the driver lists no memory of the run on a GPU",
    "no_table": "the process left no table: no optimizer stepped",
    "not_marked": "no mark of the interval's ends reached the monitor in time, or none was set",
    "monitor_off": "sampling was switched off",
    "ended_first": "the run ended before the monitor was there",
    "no_monitor": "the monitor was not there in time, see the notes",
    "no_monitor_log": "the monitor left no readable log",
    "agent_off": "the agent was switched off",
    "late": "the monitor did not get its turn in time",
    "slow_driver": "calls of the driver took longer than the interval",
    "disk_full": "the monitor's disk was full",
    "non_finite": "not finite",
}
# Divisor and name, from large to small; a row takes the first that its base median reaches.
_SCALES = {
    "s": ((1.0, "s", 3), (1e-3, "ms", 3), (1e-6, "µs", 3)),
    "By": ((10 * 2.0**30, "GiB", 2), (2.0**20, "MiB", 1), (2.0**10, "KiB", 1), (1.0, "B", 0)),
}


def counted(num: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural."""
    return f"{num} {noun}{'' if num == 1 else 's'}"


def abbreviated(text: str) -> str:
    """Return a command, quoted as `shlex.join` does it, for a line: to be pasted, or without its middle if it is long.

    What a line cannot hold, control characters say, is written as in bash: $'...'. What is long has more than 300
    characters.
    """
    text = _QUOTED.sub(_escaped, text)
    if len(text) <= _MAX_COMMAND_CHARS:
        return text
    return f"{text[: _MAX_COMMAND_CHARS - _TAIL_CHARS - 3]} … {text[-_TAIL_CHARS:]}"


def _escaped(quoted: re.Match[str]) -> str:
    """Return a part in quotes with escapes, where it holds what cannot be shown."""
    part = quoted.group()
    if part.isprintable():
        return part
    return "$'" + "".join(map(_escape, part[1:-1])) + "'"


def _escape(char: str) -> str:
    if char in "\\\n\t\r":
        return {"\\": r"\\", "\n": r"\n", "\t": r"\t", "\r": r"\r"}[char]
    if char.isprintable():
        return char
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8: https://peps.python.org/pep-0383/
        return f"\\{code - 0xDC00:03o}"
    return f"\\{code:03o}" if code < 0x80 else f"\\U{code:08x}"


def metric_name(name: str) -> str:
    """Return the name of a metric for reading."""
    return METRIC_NAMES.get(name, name.replace("_", " "))


def scale(unit: str, value: float | None) -> tuple[float, str, int]:
    """Return divisor, unit and decimals in which amounts near `value` read best."""
    scales = _SCALES.get(unit, ((1.0, "" if unit == "1" else unit, 3),))
    size, name, decimals = next((one for one in scales if value is not None and abs(value) >= one[0]), scales[-1])
    return (2.0**30 if name == "GiB" else size), name, decimals


def amount(value: float | None, scaled: tuple[float, str, int]) -> str:
    """Return a number in the given scale, without its unit."""
    if value is None:
        return "-"
    size, _, decimals = scaled
    shown = value / size
    if abs(shown) >= 1e6:
        return f"{shown:.4g}"
    return f"{shown:.{min(decimals, 1)}f}" if abs(shown) >= 1000 else f"{shown:.{decimals}f}"


def change(log_ratio: float | None) -> float | None:
    """Return the relative change that a log-ratio stands for, in percent."""
    return None if log_ratio is None else 100 * math.expm1(min(log_ratio, 700.0))


def at_best(share: float | Fraction) -> str:
    """Say by what share of itself a value is off at most, rounded up so that it holds."""
    return f"to {max(1, math.ceil(1000 * share)) / 10:.1f} % or better"


def percent(log_ratio: float | None) -> str:
    """Return a log-ratio as a signed change in percent, without the sign of percent."""
    value = change(log_ratio)
    if value is None:
        return "-"
    if abs(value) >= 1e5:
        return f"{value:+.1e}"
    return f"{value:+.0f}" if abs(value) >= 99.995 else f"{value:+.2f}"


def interval(low: float | None, high: float | None) -> str:
    """Return an interval of log-ratios as changes in percent."""
    return "-" if low is None or high is None else f"[{percent(low)}, {percent(high)}]"


def level(alpha: float) -> str:
    """Return how often intervals of a rate of false verdicts hold the true value, in percent."""
    return f"{100 * (1 - alpha):g} %"


def reason_words(reason: str) -> str:
    """Return a reason code in words."""
    words = _REASONS.get(reason) or MONITOR_REASONS.get(reason)
    return words or (reason.replace("_", " ") if reason.islower() else reason)


def counted_reasons(reasons: Mapping[str, int]) -> str:
    """Return reason codes in words, each with its count."""
    return ", ".join(f"{reason_words(reason)} ({count})" for reason, count in reasons.items())


def value_words(value: str) -> str:
    """Return a value of a state, written as Python writes it, with four digits where it is a fraction."""
    try:
        return f"{float(value):.4g}" if "." in value else value
    except ValueError:
        return value


def run_words(run: Run) -> str:
    """Say how a run ended that was not ok."""
    how = f"ended by {run.signal}" if run.signal else f"exit status {run.returncode}"
    status = "timed out" if run.status == "timeout" else run.status.replace("_", " ")
    return f"{status}, {how}"
