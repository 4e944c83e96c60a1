"""Where the time of a run goes: the phases that the script marked, summed by name and cut to the wall interval."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from lucid_profiler.records import Phase, Run

__all__ = ["PhaseTime", "phase_times", "within_wall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase over the runs of one arm; a run that never was in it counts with 0."""

    name: str | None
    """As marked; None for what lies in no phase."""
    seconds: float
    """Median over the runs of the phase's time within the wall, all of its intervals together."""
    share: float
    """Median over the runs of that time's share of the wall, 0 to 1."""


def within_wall(run: Run) -> tuple[Phase, ...]:
    """Return the phases of a run as every sum takes them: cut to its wall interval, of no length where outside of it.

    They keep their order and number; those of a run without a wall are as they were marked.
    """
    if run.wall is None:
        return run.phases
    first_ns, last_ns = run.wall.begin_ns, run.wall.end_ns
    found = []
    for phase in run.phases:
        begin_ns = min(max(phase.begin_ns, first_ns), last_ns)
        found.append(replace(phase, begin_ns=begin_ns, end_ns=max(min(phase.end_ns, last_ns), begin_ns)))
    return tuple(found)


def phase_times(runs: Sequence[Run]) -> tuple[PhaseTime, ...]:
    """Return the phases of runs of one arm in the order of their first mark, and last what lies in none.

    What comes to no time, such as a phase outside of the wall, is left out.
    Runs without a wall are passed over; without a mark there is nothing to return.
    """
    times = [(_times_ns(run), run.wall.end_ns - run.wall.begin_ns) for run in runs if run.wall is not None]
    names = dict.fromkeys(name for by_name, _ in times for name in by_name)
    if not any(name is not None for name in names):
        return ()
    phases = [_phase(name, times) for name in [*(name for name in names if name is not None), None]]
    return tuple(phase for phase in phases if phase.seconds > 0)


def _times_ns(run: Run) -> dict[str | None, int]:
    """Return the time of each phase of a run within its wall."""
    if run.wall is None:
        return {}
    found: dict[str | None, int] = {}
    for phase in within_wall(run):
        found[phase.name] = found.get(phase.name, 0) + phase.end_ns - phase.begin_ns
    found[None] = run.wall.end_ns - run.wall.begin_ns - sum(found.values())
    return found


def _phase(name: str | None, times: Sequence[tuple[dict[str | None, int], int]]) -> PhaseTime:
    return PhaseTime(
        name=name,
        seconds=median(by_name.get(name, 0) for by_name, _ in times) / 1e9,
        share=median(by_name.get(name, 0) / wall_ns if wall_ns > 0 else 0.0 for by_name, wall_ns in times),
    )
