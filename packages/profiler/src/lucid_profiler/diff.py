"""Comparing two reports: first whether they may be, then how the effect of the one differs from that of the other.

What is compared are the paired effects, ratios of ratios: each report's base arm stands for its own machine and day.
The base arms of both, held against each other, are only the canary that tells whether machine and day were the same.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lucid_profiler import jsonio
from lucid_profiler.analysis import Analysis, analyze, included_pairs
from lucid_profiler.errors import NotComparableError
from lucid_profiler.metrics import MetricAnalysis
from lucid_profiler.pairs import Moments, PairedEffect, WelchInterval, moments, welch_interval
from lucid_profiler.reader import Report
from lucid_profiler.records import Better, Run

__all__ = ["CANARY_LIMIT", "Canary", "DiffRow", "Difference", "IdentityDifference", "diff"]

CANARY_LIMIT = 0.02
"""The base arms may differ by this much, as a logarithm, before absolute values are no longer compared."""
# What changes neither the meaning nor, as a rule, the size of an effect: worth showing, not worth refusing.
_NOTED = frozenset(
    {"pairs", "order", "gpu_uuid", "cuda_visible_devices", "num_cpus", "num_usable_cpus", "memory_total_bytes"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityDifference:
    """One thing that is not the same in both reports."""

    key: str
    """The name by which it can be allowed."""
    a: tuple[Any, ...]
    """Its values in the first report; empty if it was not recorded."""
    b: tuple[Any, ...]
    tier: Literal["fatal", "allowed", "noted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The base arms of both reports against each other, as ln(b / a) of the primary metric."""

    metric: str
    interval: WelchInterval
    is_quiet: bool
    """Whether the difference is within `CANARY_LIMIT`."""
    is_certain: bool
    """Whether the interval excludes 0; one that is loud and not certain cannot tell the base arms apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRow:
    """One metric of both reports."""

    metric: str
    unit: str
    better: Better
    a: MetricAnalysis
    b: MetricAnalysis
    difference: WelchInterval | None
    """Of the mean effects, b - a: the logarithm of the ratio of the paired ratios. None if either has none."""
    change: Literal["better", "worse", "lower", "higher", "no_change", "inconclusive", "unknown"]
    """How the effect in b compares with that in a."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that two reports differ in."""

    identities: tuple[IdentityDifference, ...]
    """The fatal ones, all allowed by name, before the noted ones."""
    only_in_a: tuple[str, ...]
    """Metrics without a value in b: lost."""
    only_in_b: tuple[str, ...]
    """Metrics without a value in a: added."""
    rows: tuple[DiffRow, ...]
    """The metrics that have values in both, the primary one first."""
    canary: Canary | None
    decision: Literal["better", "worse", "inconclusive", "withheld"]
    """On the primary metric; withheld where either report has no verdict of its own."""
    reason: str
    analysis_a: Analysis
    analysis_b: Analysis


def diff(a: Report, b: Report, allow: Collection[str] = ()) -> Difference:
    """Compare two reports.

    Args:
        a: The report that is compared with.
        b: The report that is compared.
        allow: Keys of `IdentityDifference` that may differ, such as `torch`, `gpu_name` or `metric:peak_rss`.

    Raises:
        NotComparableError: If a report has no usable runs, if no metric has values in both, or if they differ in
            what is not allowed; the reasons list everything.
    """
    analyses = analyze(a), analyze(b)
    _refuse_empty(a, analyses[0], "the first report")
    _refuse_empty(b, analyses[1], "the second report")
    names_a, names_b = (_known_metrics(analysis) for analysis in analyses)
    common = [name for name in names_a if name in names_b]
    if not common:
        listed = f"{', '.join(names_a) or 'none'} against {', '.join(names_b) or 'none'}"
        raise NotComparableError([f"no metric has values in both: {listed}"])
    only_in_a, only_in_b = (tuple(name for name in names if name not in common) for names in (names_a, names_b))
    identities = _identity_differences(_identity(a), _identity(b), allow)
    identities += [_tiered(f"metric:{name}", (name,), (), allow=allow) for name in only_in_a]
    fatal = [difference for difference in identities if difference.tier == "fatal"]
    if fatal:
        raise NotComparableError([_describe(difference) for difference in fatal])
    primary = a.header.primary
    rows = [_row(name, *analyses, alpha=b.header.alpha) for name in sorted(common, key=lambda name: name != primary)]
    decision, reason = _decide(primary, rows, analyses)
    return Difference(
        identities=tuple(sorted(identities, key=lambda difference: difference.tier)),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        rows=tuple(rows),
        canary=_canary(a, b, primary),
        decision=decision,
        reason=reason,
        analysis_a=analyses[0],
        analysis_b=analyses[1],
    )


def _refuse_empty(report: Report, analysis: Analysis, name: str) -> None:
    if not report.runs:
        raise NotComparableError([f"{name} has no runs"])
    if not analysis.num_included:
        raise NotComparableError([f"{name} has {len(report.runs)} runs and no pair in its statistics"])


def _known_metrics(analysis: Analysis) -> list[str]:
    return [name for name, metric in analysis.metrics.items() if metric.base.n]


def _identity(report: Report) -> dict[str, tuple[Any, ...]]:
    """Return everything that should be the same in another report, by key: all values that occur, each once."""
    header = report.header
    values: dict[str, dict[bytes, Any]] = {}
    recorded = [(name, metric) for run in report.runs for name, metric in run.metrics.items()]
    arms = {arm.name: arm.env for arm in header.arms}
    facts = {"method": header.method, "command": list(header.command), "primary": header.primary, "arms": arms}
    units = [{f"unit:{name}": [metric.unit, metric.better]} for name, metric in recorded]
    others = {"pairs": header.pairs, "order": header.order}
    identities: list[dict[str, Any]] = [facts, others, *units, *(env.identity for env in report.envs)]
    for identity in identities:
        for key, value in identity.items():
            values.setdefault(key, {})[jsonio.dumps(value)] = value
    return {key: tuple(found[line] for line in sorted(found)) for key, found in values.items()}


def _identity_differences(
    a: dict[str, tuple[Any, ...]], b: dict[str, tuple[Any, ...]], allow: Collection[str]
) -> list[IdentityDifference]:
    # A unit is compared where both have the metric; a metric that one lacks is told apart from it.
    keys = [key for key in {**a, **b} if not key.startswith("unit:") or (key in a and key in b)]
    both = [_tiered(key, a.get(key, ()), b.get(key, ()), allow=allow) for key in keys]
    return [found for found in both if jsonio.dumps(found.a) != jsonio.dumps(found.b)]


def _tiered(key: str, a: tuple[Any, ...], b: tuple[Any, ...], *, allow: Collection[str]) -> IdentityDifference:
    tier: Literal["fatal", "allowed", "noted"] = "noted" if key in _NOTED else "allowed" if key in allow else "fatal"
    return IdentityDifference(key=key, a=a, b=b, tier=tier)


def _describe(difference: IdentityDifference) -> str:
    if difference.key.startswith("metric:"):
        return f"{difference.key} has values in the first report and none in the second"
    a, b = (" and ".join(map(str, values)) or "not recorded" for values in (difference.a, difference.b))
    return f"{difference.key} is {a} in the first report and {b} in the second"


def _row(name: str, a: Analysis, b: Analysis, *, alpha: float) -> DiffRow:
    metric_a, metric_b = a.metrics[name], b.metrics[name]
    difference = None
    if metric_a.effect is not None and metric_b.effect is not None:
        difference = welch_interval(_moments(metric_a.effect), _moments(metric_b.effect), alpha=alpha)
    change = _change(metric_b.better, difference)
    return DiffRow(
        metric=name,
        unit=metric_b.unit,
        better=metric_b.better,
        a=metric_a,
        b=metric_b,
        difference=difference,
        change=change,
    )


def _moments(effect: PairedEffect) -> Moments:
    return Moments(n=effect.n, mean=effect.mean, sd=effect.sd)


def _change(
    better: Better, difference: WelchInterval | None
) -> Literal["better", "worse", "lower", "higher", "no_change", "inconclusive", "unknown"]:
    if difference is None:
        return "unknown"
    if difference.low == difference.high == 0:
        return "no_change"
    if difference.low <= 0 <= difference.high:
        return "inconclusive"
    is_lower = difference.difference < 0
    if better == "none":
        return "lower" if is_lower else "higher"
    return "better" if is_lower == (better == "lower") else "worse"


def _canary(a: Report, b: Report, metric: str) -> Canary | None:
    logs_a, logs_b = _base_logs(a, metric), _base_logs(b, metric)
    if not logs_a or not logs_b:
        return None
    interval = welch_interval(moments(logs_a), moments(logs_b), alpha=b.header.alpha)
    if interval is None:
        return None
    return Canary(
        metric=metric,
        interval=interval,
        is_quiet=abs(interval.difference) <= CANARY_LIMIT,
        is_certain=not interval.low <= 0 <= interval.high,
    )


def _base_logs(report: Report, metric: str) -> list[float]:
    return [math.log(value) for base, _ in included_pairs(report) if (value := _positive(base, metric)) is not None]


def _positive(run: Run, metric: str) -> float | None:
    value = run.metrics[metric].value if metric in run.metrics else None
    return value if value is not None and 0 < value < math.inf else None


def _decide(
    primary: str, rows: Sequence[DiffRow], analyses: tuple[Analysis, Analysis]
) -> tuple[Literal["better", "worse", "inconclusive", "withheld"], str]:
    for name, analysis in zip(("first", "second"), analyses, strict=True):
        if analysis.verdict.decision not in {"better", "worse", "inconclusive"}:
            return "withheld", f"the {name} report has no verdict: {analysis.verdict.reason}"
    row = next((row for row in rows if row.metric == primary), None)
    if row is None or row.change in {"unknown", "lower", "higher"}:
        return "withheld", "the primary metric has no comparable effect"
    if row.change == "better":
        return "better", "interval_excludes_zero"
    if row.change == "worse":
        return "worse", "interval_excludes_zero"
    return "inconclusive", "no_difference" if row.change == "no_change" else "interval_includes_zero"
