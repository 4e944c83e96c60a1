"""What optimizers count of their captures, and what a traced run counts of its launches, in the form of metrics.

They are facts: equal runs give equal numbers, and neither more nor less of them is better by itself.
"""

from collections.abc import Container, Sequence
from dataclasses import replace

from lucid_profiler.reader import Report
from lucid_profiler.records import Metric, Run

__all__ = ["COUNTERS", "counter_names", "counter_pairs", "counters_beside"]

COUNTERS = ("capture_recordings", "capture_replays", "capture_native_steps", "launches_per_step")
"""In the order in which they are shown; the last is of one traced process of each arm, which is no run."""

_Pairs = list[tuple[Run, Run]]


def counter_pairs(report: Report, pairs: Sequence[tuple[Run, Run]], *, arms: tuple[str, str]) -> dict[str, _Pairs]:
    """Return, by counter, pairs of runs that have it as their only metric; without any that nobody counted.

    Args:
        report: whose traced processes are used.
        pairs: the report's pairs in the statistics.
        arms: names of base and other arm.
    """
    counted: dict[str, _Pairs] = {}
    for base, other in pairs:
        found = _captures(base), _captures(other)
        for name in found[0].keys() & found[1].keys():
            counted.setdefault(name, []).append((_with(base, name, found[0][name]), _with(other, name, found[1][name])))
    launches = _launches(report, arms)
    if pairs and launches is not None:
        name = COUNTERS[-1]
        base, other = pairs[0]
        counted[name] = [(_with(base, name, launches[0]), _with(other, name, launches[1]))]
    return counted


def counter_names(a: Container[str], b: Container[str]) -> list[str]:
    """Return the counters that both reports have."""
    return [name for name in COUNTERS if name in a and name in b]


def counters_beside(a: Container[str], b: Container[str]) -> list[str]:
    """Return the counters that the report `a` has and `b` has not."""
    return [name for name in COUNTERS if name in a and name not in b]


def _captures(run: Run) -> dict[str, int]:
    """Return what a run's optimizers count, empty if none of them reports captures."""
    groups = [group for report in run.capture or () for group in report.groups]
    if not groups:
        return {}
    return {
        "capture_recordings": sum(group.recordings for group in groups),
        "capture_replays": sum(group.replays for group in groups),
        "capture_native_steps": sum(sum(group.reasons.values()) for group in groups),
    }


def _launches(report: Report, arms: tuple[str, str]) -> tuple[float, float] | None:
    """Return the launches a step of base and other arm."""
    by_arm = {kernels.arm: kernels.table.launches_per_step for kernels in report.kernels if kernels.table is not None}
    base, other = (by_arm.get(arm) for arm in arms)
    return None if base is None or other is None else (sum(base.values()), sum(other.values()))


def _with(run: Run, name: str, value: float) -> Run:
    return replace(run, metrics={name: Metric(value=value, unit="1", better="none", exact=True)})
