"""Whether a report says what follows from its own records: its pairs, its end and its summary computed again."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lucid_profiler import jsonio
from lucid_profiler.analysis import WITHOUT_WARNINGS, analyze_all, plain_analysis
from lucid_profiler.blocks import counted_runs, planned_slots
from lucid_profiler.pairing import pair_record
from lucid_profiler.reader import Report
from lucid_profiler.records import Summary

__all__ = ["verify_summary"]

_REL_TOL = 1e-9
"""Logarithms of another machine's libm may differ in the last digits."""


def verify_summary(report: Report) -> list[str]:
    """Return every place where pairs and summary do not follow from the other records; none is well."""
    runs = {run.run: run for run in report.runs}
    found = []
    for pair in report.pairs:
        if pair.runs[0] in runs and pair.runs[1] in runs:
            expected = pair_record(report, runs[pair.runs[0]], runs[pair.runs[1]])
            found += _differences(_as_read(asdict(expected)), _as_read(asdict(pair)), f"pair {pair.pair}")
        else:
            found.append(f"pair {pair.pair}: one of its runs {pair.runs[0]} and {pair.runs[1]} is missing")
    states = sorted({state.run for state in report.states} - runs.keys())
    found += [f"state of run {run}: there is no such run" for run in states]
    found += _check_end(report)
    if report.summary is not None:
        found += _check_summary(report, report.summary)
    elif report.complete:
        found.append("summary: missing")
    return found


def _check_summary(report: Report, summary: Summary) -> list[str]:
    first, *further = [_as_read(plain_analysis(analysis)) for analysis in analyze_all(report)]
    if report.header.method in WITHOUT_WARNINGS and "warnings" not in summary.analysis:
        del first["warnings"]
    found = _differences(first, _without_defaults(summary.analysis), "summary")
    if len(further) != len(summary.further):
        return [*found, f"summary.further: holds {len(summary.further)} comparisons, the runs give {len(further)}"]
    others = [_without_defaults(analysis) for analysis in summary.further]
    return found + _differences(further, others, "summary.further")


def _without_defaults(analysis: dict[str, Any]) -> dict[str, Any]:
    """Return an analysis without the facts that go unsaid where they do not hold."""
    return {name: value for name, value in analysis.items() if not (name.startswith("is_") and value is False)}


def _check_end(report: Report) -> list[str]:
    """Return what the end says that the runs do not bear out: complete is every planned run, and each of them ok."""
    if report.end is None:
        return []
    status, num_failed = report.end.status, sum(run.status != "ok" for run in counted_runs(report))
    planned = planned_slots(report)
    missing = {slot.slot for slot in planned} - {run.run for run in report.runs}
    if status == "complete" and (num_failed or missing):
        counted = f"{len(missing)} planned runs are missing" if missing else f"{num_failed} runs are not ok"
        return [f"end.status: says 'complete', but {counted}"]
    if status == "failed" and not num_failed:
        return ["end.status: says 'failed', but every run is ok"]
    if status == "interrupted" and planned and not (num_failed or missing):
        return ["end.status: says 'interrupted', but every planned run is there and ok"]
    return []


def _as_read(fields: dict[str, Any]) -> Any:
    return jsonio.loads(jsonio.dumps(fields))


def _differences(expected: Any, found: Any, path: str) -> list[str]:
    """Return the paths at which two values of plain data differ by more than rounding."""
    if isinstance(expected, dict) and isinstance(found, dict):
        names = sorted(expected.keys() | found.keys())
        return _all_differences([(expected.get(name), found.get(name), f"{path}.{name}") for name in names])
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return _all_differences(
            [(*both, f"{path}[{index}]") for index, both in enumerate(zip(expected, found, strict=True))]
        )
    if isinstance(expected, float) and isinstance(found, float):
        equal = math.isclose(expected, found, rel_tol=_REL_TOL, abs_tol=1e-12)
    else:
        equal = type(expected) is type(found) and expected == found
    return [] if equal else [f"{path}: says {found!r}, the runs give {expected!r}"]


def _all_differences(triples: Sequence[tuple[Any, Any, str]]) -> list[str]:
    return [text for expected, found, path in triples for text in _differences(expected, found, path)]
