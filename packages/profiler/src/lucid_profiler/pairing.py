"""Which pairs two arms have, and which of them the statistics use. Pure."""

from collections.abc import Mapping, Sequence

from lucid_profiler.metrics import metric_names, run_effect
from lucid_profiler.parity import check_parity
from lucid_profiler.reader import Report
from lucid_profiler.records import Arm, Pair, PairParity, Run

__all__ = ["arm_names", "arm_of", "failures", "included_pairs", "measured_pairs", "pair_record", "pairs_of_arms"]

_SHARED = "foreign"
"""The taint that bends both runs alike where both have it."""


def arm_names(report: Report, other: str | None = None) -> tuple[str, str]:
    """Return the names of the base and of another arm, the second where none is named; empty where there is none.

    Raises:
        ValueError: If no arm but the base has that name.
    """
    base, *others = [arm.name for arm in report.header.arms] or [""]
    if other is None:
        return base, others[0] if others else ""
    if other not in others:
        raise ValueError(f"no arm of the report is named {other!r}, expected one of {', '.join(others) or 'none'}")
    return base, other


def arm_of(report: Report, name: str) -> Arm:
    """Return the arm of a name, a plain one where the header has none."""
    return next((arm for arm in report.header.arms if arm.name == name), Arm(name=name))


def pair_record(report: Report, base: Run, other: Run) -> Pair:
    """Return the record of the pair that two runs make; the report need only hold its header and their states."""
    runs, arms = (base.run, other.run), {base.run: base.arm, other.run: other.arm}
    failed = [f"{run.status}:{run.run}" for run in (base, other) if run.status != "ok"]
    discarded = ["discarded"] if base.discarded or other.discarded else []
    taints = [f"{taint}:{run.run}" for run in (base, other) for taint in run.taints]
    if failed or arm_of(report, other.arm).different:
        parity = PairParity(status="not_observed")
    else:
        found = check_parity(report.states, base_runs=[], pairs=[runs], arms=arms)
        parity = PairParity(status=found.status, difference=found.difference.text if found.difference else None)
    return Pair(
        pair=base.pair,
        runs=runs,
        included=not (discarded or failed or _taints_against(report, base, other)),
        flags=(*discarded, *failed, *taints),
        effects={name: run_effect(base, other, name) for name in metric_names([(base, other)])},
        parity=parity,
    )


def included_pairs(report: Report, other: str | None = None) -> list[tuple[Run, Run]]:
    """Return base and other run of every pair that the statistics use; the other arm is the second if none is named.

    Raises:
        ValueError: If no arm but the base has that name.
    """
    runs = {run.run: run for run in report.runs}
    measured = measured_pairs(report, pairs_of_arms(report, runs, arm_names(report, other)), runs)
    return [(runs[pair.runs[0]], runs[pair.runs[1]]) for pair, reasons in measured if not reasons]


def pairs_of_arms(report: Report, runs: Mapping[int, Run], arms: tuple[str, str]) -> list[Pair]:
    """Return the pairs of two arms, discarded ones too."""
    return [pair for pair in report.pairs if _joins(pair, runs, arms)]


def measured_pairs(
    report: Report, pairs: Sequence[Pair], runs: Mapping[int, Run]
) -> list[tuple[Pair, tuple[str, ...]]]:
    """Return the pairs that are not discarded, each with the reasons for leaving it out."""
    return [(pair, _exclusion(report, pair, runs)) for pair in pairs if not _is_discarded(pair, runs)]


def failures(pair: Pair, runs: Mapping[int, Run]) -> tuple[str, ...]:
    """Return the status and number of each run of a pair that did not end well, or is missing."""
    statuses = {run: runs[run].status if run in runs else "missing" for run in pair.runs}
    return tuple(f"{status}:{run}" for run, status in statuses.items() if status != "ok")


def _joins(pair: Pair, runs: Mapping[int, Run], arms: tuple[str, str]) -> bool:
    """Return whether a pair is one of these arms; a missing run leaves that open."""
    return all(run not in runs or runs[run].arm == arm for run, arm in zip(pair.runs, arms, strict=True))


def _is_discarded(pair: Pair, runs: Mapping[int, Run]) -> bool:
    return "discarded" in pair.flags or any(runs[run].discarded for run in pair.runs if run in runs)


def _exclusion(report: Report, pair: Pair, runs: Mapping[int, Run]) -> tuple[str, ...]:
    """Return why a measured pair is left out, empty if it is not."""
    both = [runs[run] for run in pair.runs if run in runs]
    tainted = _taints_against(report, both[0], both[1]) if len(both) == 2 else ()
    reasons = (*failures(pair, runs), *tainted)
    if reasons or pair.included:
        return reasons
    return pair.flags or ("not_included",)


def _taints_against(report: Report, base: Run, other: Run) -> tuple[str, ...]:
    """Return the taints that leave a pair out by the header; a neighbour that is there in both runs bends both."""
    shared = {_SHARED} & set(base.taints) & set(other.taints)
    codes = set(report.header.taints) - shared
    return tuple(f"{taint}:{run.run}" for run in (base, other) for taint in run.taints if taint in codes)
