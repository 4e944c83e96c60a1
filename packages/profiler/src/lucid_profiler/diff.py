"""Comparing two reports: first whether they may be, then how the effect of the one differs from that of the other.

What is compared are the paired effects, ratios of ratios: each report's base arm stands for its own machine and day.
The base arms of both, held against each other, are only the canary that tells whether machine and day were the same.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lucid_profiler.analysis import Analysis, analyze, included_pairs
from lucid_profiler.comparability import IdentityDifference, described, identity_differences, lost_metric
from lucid_profiler.counters import counter_names, counter_pairs, counters_beside
from lucid_profiler.diff_rows import Canary, DiffRow, compare_values
from lucid_profiler.errors import NotComparableError
from lucid_profiler.metrics import analyze_metric, paired_values
from lucid_profiler.pairs import MIN_PAIRS
from lucid_profiler.reader import Report
from lucid_profiler.records import Run

__all__ = [
    "CANARY_LIMIT",
    "Canary",
    "DiffRow",
    "Difference",
    "IdentityDifference",
    "Refusal",
    "diff",
    "refused",
    "try_each",
]

CANARY_LIMIT = 2.0
"""Percent by which the base arms may differ before absolute values are no longer compared."""
# Why a report has no verdict of its own that speaks of its primary metric alone, or of nothing but its size.
_OF_ONE_METRIC = frozenset({"too_few_pairs", "zero_baseline", "not_positive", "no_value", "no_direction"})
_TAKE_BACK = frozenset({"drift_explains", "control_differs"})
_NON_FINITE = frozenset({"nan", "inf", "-inf", "beyond_double"})

_Pairs = Sequence[tuple[Run, Run]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that two reports differ in."""

    identities: tuple[IdentityDifference, ...]
    """What was allowed by name, before what is only noted."""
    only_in_a: tuple[str, ...]
    """Metrics without a value in b: lost."""
    only_in_b: tuple[str, ...]
    """Metrics without a value in a: added."""
    lost_arms: tuple[str, ...]
    """Arms of a that b lacks, controls aside: they are in no comparison."""
    added_arms: tuple[str, ...]
    """Arms of b that a lacks, controls aside."""
    rows: tuple[DiffRow, ...]
    """The metrics that have values in both, the primary one first."""
    counters: tuple[DiffRow, ...]
    """What optimizers say of their captures, and launches, where both reports have them. Facts without a direction."""
    canary: Canary | None
    """Of the primary metric."""
    canary_limit: float
    """In percent."""
    decision: Literal["better", "worse", "same", "inconclusive", "withheld"]
    """On the primary metric; withheld where either report has no verdict of its own."""
    reason: str
    alpha: float
    """Two-sided rate of false verdicts of the intervals."""
    analysis_a: Analysis
    analysis_b: Analysis

    @property
    def hides_absolute(self) -> bool:
        """Whether the base arms are so far apart that absolute values say nothing across the reports."""
        return self.canary is not None and not self.canary.is_quiet

    @property
    def primary(self) -> DiffRow | None:
        """The row on which the decision rests."""
        return next((row for row in self.rows if row.metric == self.analysis_a.verdict.metric), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a report is not compared with the first one."""

    reasons: tuple[str, ...]
    """Every obstacle, one sentence each."""
    identities: tuple[IdentityDifference, ...] = ()
    """All that differs in the circumstances, what stands in the way first."""
    allowable: tuple[str, ...] = ()
    """The keys that would have to be allowed; empty where no permission makes the reports comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    allow: Collection[str] = ()
    margins: Mapping[str, float] = field(default_factory=dict)
    canary_limit: float = CANARY_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One report with what follows from it."""

    report: Report
    analysis: Analysis
    pairs: _Pairs

    @property
    def alpha(self) -> float:
        return self.report.header.alpha

    @property
    def metrics(self) -> list[str]:
        """The metrics with values, also with such as are not finite: those were measured, and say nothing."""
        return [
            name
            for name, metric in self.analysis.metrics.items()
            if metric.base.n or _NON_FINITE & metric.reasons.keys()
        ]


def diff(
    a: Report,
    b: Report,
    allow: Collection[str] = (),
    *,
    margins: Mapping[str, float] | None = None,
    canary_limit: float = CANARY_LIMIT,
) -> Difference:
    """Compare two reports, in the first further arm of a that is no control.

    Args:
        a: The report that is compared with.
        b: The report that is compared.
        allow: Keys of `IdentityDifference` that may differ, such as `torch`, `gpu_name` or `metric:peak_rss`.
        margins: By metric, how many percent are no difference worth a name.
        canary_limit: Percent by which the base arms may differ before absolute values are withheld.

    Raises:
        NotComparableError: If a report has no usable runs, if no arm or no metric with values is in both, or if they
            differ in what is not allowed; the reasons list everything.
        ValueError: If a margin is not above 0 and below 100.
    """
    ((_, found), *_) = _try_each(a, [b], _Options(allow=allow, margins=margins or {}, canary_limit=canary_limit))
    if isinstance(found, Refusal):
        raise NotComparableError(found.reasons)
    return found


def try_each(
    first: Report,
    others: Sequence[Report],
    allow: Collection[str] = (),
    *,
    margins: Mapping[str, float] | None = None,
    canary_limit: float = CANARY_LIMIT,
) -> tuple[tuple[Report, Difference | Refusal], ...]:
    """Compare each of several reports with the first one, in every arm but the controls.

    Arguments are those of `diff`; each difference comes with the report that is compared, and so does the refusal of
    what cannot be. A report that is refused in all of its arms for the same reasons is refused once.

    Raises:
        ValueError: As `diff` does.
    """
    return _try_each(first, others, _Options(allow=allow, margins=margins or {}, canary_limit=canary_limit))


def refused(
    tried: Sequence[tuple[Report, Difference | Refusal]], *, has_paths: bool = False
) -> NotComparableError | None:
    """Return all refusals as one error, None if there is none; with `has_paths` the reasons name the files."""
    reasons = [
        f"{report.path}: {reason}" if has_paths else reason
        for report, found in tried
        if isinstance(found, Refusal)
        for reason in found.reasons
    ]
    return NotComparableError(list(dict.fromkeys(reasons))) if reasons else None


def _try_each(
    first: Report, others: Sequence[Report], options: _Options
) -> tuple[tuple[Report, Difference | Refusal], ...]:
    sides = [_side(first, arm or None) for arm in _compared_arms(first)]
    return tuple((other, found) for other in others for found in _try_arms(sides, other, options))


def _try_arms(sides: Sequence[_Side], other: Report, options: _Options) -> list[Difference | Refusal]:
    """Compare one report in every arm that it has by the same name."""
    first = sides[0].report
    identities = identity_differences(first, other, options.allow)
    if (swapped := _swapped_base(first, other)) is not None:
        return [Refusal(reasons=(swapped,), identities=_sorted(identities))]
    fatal = [difference for difference in identities if difference.tier == "fatal"]
    shared = [side for side in sides if side.analysis.other in _compared_arms(other)]
    if not shared:
        listed = f"{_listed(side.analysis.other for side in sides)} against {_listed(_compared_arms(other))}"
        reasons = (*map(described, fatal), f"no arm beside the base is in both: {listed}")
        return [Refusal(reasons=reasons, identities=_sorted(identities))]
    found = [_diff(side, _side(other, side.analysis.other or None), options) for side in shared]
    return [one for place, one in enumerate(found) if isinstance(one, Difference) or one not in found[:place]]


def _swapped_base(a: Report, b: Report) -> str | None:
    """Return that the base of one report is another arm of the other, which no permission makes comparable."""
    bases = [report.header.arms[0].name if report.header.arms else "" for report in (a, b)]
    further = {arm.name for report in (a, b) for arm in report.header.arms[1:]}
    if bases[0] == bases[1] or not further & {*bases}:
        return None
    return f"arms: the base is {bases[0]} in the first report and {bases[1]} in the second"


def _further_arms(report: Report) -> list[str]:
    return [arm.name for arm in report.header.arms[1:] if not arm.control]


def _compared_arms(report: Report) -> list[str]:
    """Return the arms that a report is compared in: a control only where there is no other, an empty name for none."""
    return _further_arms(report) or [arm.name for arm in report.header.arms[1:2]] or [""]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(filter(None, names)) or "none"


def _sorted(identities: Sequence[IdentityDifference]) -> tuple[IdentityDifference, ...]:
    """Return what stands in the way first, then what was allowed, then what is only noted."""
    return tuple(sorted(identities, key=lambda one: ("fatal", "allowed", "noted").index(one.tier)))


def _side(report: Report, arm: str | None) -> _Side:
    """Return a report with the analysis of one arm."""
    return _Side(report=report, analysis=analyze(report, arm), pairs=included_pairs(report, arm))


def _diff(a: _Side, b: _Side, options: _Options) -> Difference | Refusal:
    if empty := [reason for name, side in (("first", a), ("second", b)) if (reason := _emptiness(name, side))]:
        return Refusal(reasons=tuple(empty[:1]))
    identities = identity_differences(a.report, b.report, options.allow)
    common = [name for name in a.metrics if name in b.metrics]
    if not common:
        listed = f"{_listed(a.metrics)} against {_listed(b.metrics)}"
        return Refusal(reasons=(f"no metric has values in both: {listed}",), identities=_sorted(identities))
    only_in_a, only_in_b = (tuple(name for name in side.metrics if name not in common) for side in (a, b))
    identities += [lost_metric(name, options.allow) for name in only_in_a]
    if fatal := [difference for difference in identities if difference.tier == "fatal"]:
        keys = tuple(difference.key for difference in fatal)
        return Refusal(reasons=tuple(map(described, fatal)), identities=_sorted(identities), allowable=keys)
    primary = a.report.header.primary
    withheld = _withheld(a.analysis, b.analysis)
    rows = tuple(
        _metric_row(name, a, b, options=options, withheld=withheld)
        for name in sorted(common, key=lambda name: name != primary)
    )
    decision, reason = _decide(primary, rows, withheld)
    counted_a, counted_b = _counted(a), _counted(b)
    arms_a, arms_b = _further_arms(a.report), _further_arms(b.report)
    return Difference(
        identities=_sorted(identities),
        only_in_a=(*only_in_a, *counters_beside(counted_a, counted_b)),
        only_in_b=(*only_in_b, *counters_beside(counted_b, counted_a)),
        lost_arms=tuple(name for name in arms_a if name not in arms_b),
        added_arms=tuple(name for name in arms_b if name not in arms_a),
        rows=rows,
        counters=_counter_rows(counted_a, counted_b, alpha=_alpha(a, b), canary_limit=options.canary_limit),
        canary=next((row.canary for row in rows if row.metric == primary), None),
        canary_limit=options.canary_limit,
        decision=decision,
        reason=reason,
        alpha=_alpha(a, b),
        analysis_a=a.analysis,
        analysis_b=b.analysis,
    )


def _alpha(a: _Side, b: _Side) -> float:
    """Return the stricter of both rates, which differ only where that was allowed."""
    return min(a.alpha, b.alpha)


def _emptiness(name: str, side: _Side) -> str | None:
    num_runs = len(side.report.runs)
    if not num_runs:
        return f"the {name} report has no runs"
    if not side.analysis.num_included:
        return f"the {name} report has {num_runs} runs and no pair in its statistics"
    return None


def _withheld(a: Analysis, b: Analysis) -> tuple[str, str] | None:
    """Return the code and the sentence for a report that has no verdict of its own, the first one first."""
    for name, verdict in (("first", a.verdict), ("second", b.verdict)):
        if verdict.decision not in {"better", "worse", "inconclusive"}:
            return verdict.reason, f"the {name} report has no verdict: {verdict.reason}"
    return None


def _metric_row(name: str, a: _Side, b: _Side, *, options: _Options, withheld: tuple[str, str] | None) -> DiffRow:
    return compare_values(
        name,
        (a.analysis.metrics[name], b.analysis.metrics[name]),
        (paired_values(name, a.pairs), paired_values(name, b.pairs)),
        alpha=_alpha(a, b),
        canary_limit=options.canary_limit,
        margin=options.margins.get(name),
        obstacle=_obstacle(name, a.analysis, b.analysis, withheld=withheld),
        bent_by=_bent_by(a, b) if name == a.report.header.primary else None,
    )


def _bent_by(a: _Side, b: _Side) -> str | None:
    """Return the code of what took back the verdict of a report, and so takes back that on the difference."""
    return next((side.analysis.verdict.reason for side in (a, b) if side.analysis.verdict.reason in _TAKE_BACK), None)


def _obstacle(name: str, a: Analysis, b: Analysis, *, withheld: tuple[str, str] | None) -> str | None:
    """Return why the effects of one metric give no word, whatever its interval says."""
    metric_a, metric_b = a.metrics[name], b.metrics[name]
    if withheld is not None and withheld[0] not in _OF_ONE_METRIC:
        return withheld[0]
    if metric_a.unit != metric_b.unit:
        return "other_unit"
    if metric_a.better != metric_b.better:
        return "other_direction"
    if _NON_FINITE & {*metric_a.reasons, *metric_b.reasons}:
        return "non_finite"
    if not metric_b.exact and min(metric_a.base.n, metric_b.base.n) < MIN_PAIRS:
        return "too_few_pairs"
    return None


def _counted(side: _Side) -> dict[str, list[tuple[Run, Run]]]:
    return counter_pairs(side.report, side.pairs, arms=(side.analysis.base, side.analysis.other))


def _counter_rows(
    a: Mapping[str, _Pairs], b: Mapping[str, _Pairs], *, alpha: float, canary_limit: float
) -> tuple[DiffRow, ...]:
    rows = []
    for name in counter_names(a, b):
        metrics = (analyze_metric(name, a[name], alpha=alpha), analyze_metric(name, b[name], alpha=alpha))
        values = (paired_values(name, a[name]), paired_values(name, b[name]))
        if all(values):
            rows.append(compare_values(name, metrics, values, alpha=alpha, canary_limit=canary_limit))
    return tuple(rows)


def _decide(
    primary: str, rows: Sequence[DiffRow], withheld: tuple[str, str] | None
) -> tuple[Literal["better", "worse", "same", "inconclusive", "withheld"], str]:
    if withheld is not None:
        return "withheld", withheld[1]
    row = next((row for row in rows if row.metric == primary), None)
    if row is None or row.verdict in {"not_comparable", "lower", "higher"}:
        return "withheld", "the primary metric has no comparable effect"
    if row.verdict == "better":
        return "better", row.reason
    if row.verdict == "worse":
        return "worse", row.reason
    return ("same" if row.verdict == "same" else "inconclusive"), row.reason
