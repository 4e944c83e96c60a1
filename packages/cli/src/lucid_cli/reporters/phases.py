"""Where the time of each arm goes, as a table: a row a phase that the script marked."""

from lucid_cli.reporters.layout import columns
from lucid_cli.reporters.words import amount, scale
from lucid_profiler.analysis import Analysis, included_pairs
from lucid_profiler.phases import PhaseTime, phase_times
from lucid_profiler.reader import Report

MAX_PHASES = 12
_MAX_NAME_CHARS = 30
_SMALLEST_REST = 0.0005

__all__ = ["MAX_PHASES", "render_phases"]


def render_phases(report: Report, analysis: Analysis) -> list[str]:
    """Return a table of the runs in the statistics, no line if they marked nothing; of many phases the longest."""
    pairs = included_pairs(report, analysis.other or None)
    arms = [{phase.name: phase for phase in phase_times([pair[side] for pair in pairs])} for side in (0, 1)]
    names = [name for name in dict.fromkeys(name for arm in arms for name in arm) if _is_shown(arms, name)]
    if not names:
        return []
    longest = sorted(names, key=lambda name: _longest(arms, name), reverse=True)[:MAX_PHASES]
    scaled = scale("s", _longest(arms, longest[0]))
    rows = [["phase", analysis.base, "of wall", analysis.other, "of wall"]]
    rows += [
        [_shown(name), *(cell for arm in arms for cell in _cells(arm.get(name), scaled))]
        for name in names
        if name in longest
    ]
    num_left_out = len(names) - len(longest)
    return columns([*rows, *([[f"and {num_left_out} shorter", "", "", "", ""]] if num_left_out else [])])


def _is_shown(arms: list[dict[str | None, PhaseTime]], name: str | None) -> bool:
    """Return whether a row says something: the rest between marks is often less than a digit of its share."""
    return name is not None or any(arm[name].share >= _SMALLEST_REST for arm in arms if name in arm)


def _longest(arms: list[dict[str | None, PhaseTime]], name: str | None) -> float:
    return max(arm[name].seconds for arm in arms if name in arm)


def _shown(name: str | None) -> str:
    if name is None:
        return "(not marked)"
    return name if len(name) <= _MAX_NAME_CHARS else name[: _MAX_NAME_CHARS - 1] + "…"


def _cells(phase: PhaseTime | None, scaled: tuple[float, str, int]) -> tuple[str, str]:
    if phase is None:
        return "-", "-"
    return f"{amount(phase.seconds, scaled)} {scaled[1]}", f"{100 * phase.share:.1f} %"
