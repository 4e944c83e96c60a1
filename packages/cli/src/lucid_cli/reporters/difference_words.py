"""What a comparison of two reports comes to, in words that every form of it uses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lucid_cli.output import one_line
from lucid_cli.reporters.sentences import parity_code, parity_status, verdict_sentence, warning_sentence
from lucid_cli.reporters.table import environment_words
from lucid_cli.reporters.words import abbreviated, counted, interval, level, metric_name, percent, reason_words
from lucid_profiler.comparability import value_words
from lucid_profiler.compare import Analysis, Difference, DiffRow, IdentityDifference
from lucid_profiler.diff import Refusal
from lucid_profiler.gates import GateResult
from lucid_profiler.pairs import MAX_PAIRS_NEEDED
from lucid_profiler.reader import Report

_REASONS = {
    "interval_includes_zero": "the interval includes 0",
    "within_margin": "within the margin",
    "no_difference": "the effects are equal",
    "drift_explains": "drift explains what one of the reports shows",
    "control_differs": "a control of one of the reports differs from its base",
    "parity_incomplete": "training that is in no digest in one of the reports",
    "walls_differ": "walls that span unequal work in one of the reports",
    "appears": "from 0 to more",
    "vanishes": "from more to 0",
    "too_few_pairs": "too few pairs",
    "zero_baseline": "a base of 0",
    "not_positive": "values that are not above 0",
    "no_value": "no value",
    "non_finite": "values that are not finite",
    "other_direction": "not the same direction is better",
    "other_unit": "the units differ",
    "non_finite_amount": "amounts whose difference is beyond a double",
    "not_compared": "the reports are not compared",
    "only_in_one_report": "only one of the reports has values",
    "not_recorded": "neither report has values",
    "canary": "the base arms are further apart than --canary-limit",
    "whole_interval_within": "the whole interval is within the limit",
    "whole_interval_past": "the whole interval is past the limit",
    "interval_includes_limit": "the interval includes the limit",
    "not_shown": "the interval does not show it as a whole",
}

__all__ = [
    "Compared",
    "Outcome",
    "Refused",
    "added_words",
    "between_words",
    "canary_words",
    "decision_words",
    "gate_words",
    "identity_words",
    "limit_words",
    "lost_words",
    "needed_words",
    "parity_change",
    "parity_words",
    "refusal_words",
    "remarks_of",
    "row_words",
    "tier_word",
    "titles",
    "warnings_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A report held against the first one."""

    name: str
    """What it is called in texts: b, c, …; the first one is a."""
    a: Report
    b: Report
    difference: Difference
    gates: tuple[GateResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A report that is not held against the first one."""

    name: str
    """As that of `Compared`."""
    a: Report
    b: Report
    refusal: Refusal
    gates: tuple[GateResult, ...] = ()
    """All without a verdict."""


Outcome = Compared | Refused


def titles(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Name each report by its letter: its file, its pairs in the statistics, what it measured on, and when."""
    return {name: _title(report, analyses) for name, (report, analyses) in _reports(outcomes).items()}


def remarks_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what a reader should know of the reports: which are the same, are not whole, or leave pairs out."""
    reports = _reports(outcomes)
    first = outcomes[0].a
    same = [name for name, (report, _) in reports.items() if name != "a" and report.header.id == first.header.id]
    return [
        *(f"a and {name} are the same report" for name in same),
        *(f"{name}: {text}" for name, found in reports.items() for text in _remarks(*found)),
    ]


def _reports(outcomes: Sequence[Outcome]) -> dict[str, tuple[Report, list[Analysis]]]:
    """Return the reports by their letters, each with what its compared arms come to."""
    found: dict[str, tuple[Report, list[Analysis]]] = {"a": (outcomes[0].a, [])}
    for one in outcomes:
        _, analyses = found.setdefault(one.name.partition(" ")[0], (one.b, []))
        if isinstance(one, Compared):
            analyses.append(one.difference.analysis_b)
            if one.difference.analysis_a not in found["a"][1]:
                found["a"][1].append(one.difference.analysis_a)
    return found


def _title(report: Report, analyses: Sequence[Analysis]) -> str:
    planned = report.header.pairs
    nums = sorted({analysis.num_included for analysis in analyses})
    pairs = counted(planned, "pair" if nums else "planned pair")
    if nums not in ([], [planned]):
        pairs = f"{' to '.join(map(str, dict.fromkeys((nums[0], nums[-1]))))} of {pairs}"
    return f"{one_line(report.path)}: {pairs}, {environment_words(report)}, {report.header.created}"


def _remarks(report: Report, analyses: Sequence[Analysis]) -> list[str]:
    status = report.end.status if report.end else "without an end"
    return [
        *([] if status == "complete" else [f"the report is {status}, after {counted(len(report.runs), 'run')}"]),
        *(() if report.complete else report.warnings),
        *(
            f"pair {pair.pair} of {analysis.other} is left out: {', '.join(pair.reasons)}"
            for analysis in analyses
            for pair in analysis.excluded
        ),
    ]


def refusal_words(refused: Refused) -> str:
    """Return that a report is not compared, and what would have to be allowed."""
    keys = refused.refusal.allowable
    if not keys:
        return f"{refused.name} cannot be compared with a: {'; '.join(refused.refusal.reasons)}"
    allowing = " ".join(f"--allow {key}" for key in keys)
    return f"{refused.name} cannot be compared with a: it differs in {', '.join(keys)}; to compare anyway: {allowing}"


def lost_words(difference: Difference) -> str:
    """Name the arms and metrics of a that b lacks, empty if there are none."""
    return _listed(difference.lost_arms, difference.only_in_a)


def added_words(difference: Difference) -> str:
    """Name the arms and metrics of b that a lacks, empty if there are none."""
    return _listed(difference.added_arms, difference.only_in_b)


def _listed(arms: Sequence[str], metrics: Sequence[str]) -> str:
    return ", ".join([*(f"arm {name}" for name in arms), *map(metric_name, metrics)])


def tier_word(identity: IdentityDifference) -> str:
    """Return in a word what a difference means for the comparison."""
    return "differs" if identity.tier == "fatal" else identity.tier


def identity_words(identity: IdentityDifference, name: str) -> str:
    """Name one circumstance with what it is in both reports."""
    a, b = (
        " and ".join(abbreviated(value_words(identity.key, value)) for value in values) or "not recorded"
        for values in (identity.a, identity.b)
    )
    return f"{identity.key}: {a} in a, {b} in {name}"


def between_words(row: DiffRow) -> str:
    """Return how far apart two effects are, in percent with the interval; of counts without a ratio, in counts."""
    difference, amount = row.difference, row.amount
    if difference is None:
        return "-" if amount is None or not row.exact else f"{amount.difference:+g} [{amount.low:+g}, {amount.high:+g}]"
    if math.isinf(difference.difference):
        return "appears" if difference.difference > 0 else "vanishes"
    return f"{percent(difference.difference)} % {interval(difference.low, difference.high)}"


def row_words(row: DiffRow) -> str:
    """Return the verdict on one metric, and what would settle it or stands in its way."""
    word = row.verdict.replace("_", " ")
    if row.verdict == "inconclusive":
        return f"{word}, {needed_words(row)}"
    if row.verdict == "not_comparable" or row.reason == "within_margin":
        return f"{word}, {_reason(row.reason)}"
    return word


def needed_words(row: DiffRow) -> str:
    """Return how many pairs would settle an inconclusive row."""
    if row.reason != "interval_includes_zero":
        return _reason(row.reason)
    if row.pairs_needed is not None:
        return f"about {row.pairs_needed} pairs in each report would settle it"
    if row.difference is not None and row.difference.difference == 0:
        return "no number of pairs tells equal effects from unequal ones: state a --margin"
    return f"not even {MAX_PAIRS_NEEDED:,} pairs in each report would settle it"


def canary_words(compared: Compared) -> str | None:
    """Return whether the base arms of both reports agree, None where that is not known."""
    canary = compared.difference.canary
    if canary is None:
        return None
    welch, name = canary.interval, compared.name
    between = f"{percent(welch.difference)} % {interval(welch.low, welch.high)}"
    if canary.is_quiet:
        return f"base arm, {name} against a: {between} of {metric_name(canary.metric)}"
    withheld = f"beyond the limit of {compared.difference.canary_limit:g} %"
    if canary.is_certain:
        return (
            f"the base arms differ by {between} of {metric_name(canary.metric)}, {withheld}, so absolute values do not "
            "compare and are withheld; the paired effects are each machine's own"
        )
    return (
        f"the base arms cannot be told apart within {interval(welch.low, welch.high)} % of "
        f"{metric_name(canary.metric)}, {name} against a {percent(welch.difference)} %, {withheld}: absolute values "
        "are withheld"
    )


def parity_words(analysis: Analysis) -> str:
    """Return whether the states of a report agree, and the first place where they do not."""
    parity = analysis.parity
    text = f"{parity_status(analysis)}: {', '.join(parity.deciding) or 'no part'}"
    return text + (f"; {parity.difference.text}" if parity.difference else "")


def parity_change(difference: Difference) -> str:
    """Return how parity in b compares with that in a, as a verdict."""
    a, b = parity_code(difference.analysis_a), parity_code(difference.analysis_b)
    if {a, b} <= {"equal", "different"}:
        return "same" if a == b else "worse" if b == "different" else "better"
    return "not_comparable"


def limit_words(outcome: Outcome) -> list[tuple[GateResult, str]]:
    """Return each limit with what it comes to in words, and with the metrics that there are if its own is none."""
    difference = outcome.difference if isinstance(outcome, Compared) else None
    names = ", ".join(row.metric for row in (*difference.rows, *difference.counters)) if difference else ""
    return [
        (one, gate_words(one) + (f"; there are {names}" if names and one.reason == "not_recorded" else ""))
        for one in outcome.gates
    ]


def gate_words(result: GateResult) -> str:
    """Return a limit, whether it holds, and by which interval."""
    status = result.status.replace("_", " ")
    between = ""
    if result.low is not None and result.high is not None:
        between = f" [{result.low:+.4g}, {result.high:+.4g}] {result.gate.unit}".rstrip()
    return f"{result.gate.text}: {status}{between}: {_reason(result.reason)}"


def warnings_of(compared: Compared) -> list[str]:
    """Return a sentence for each warning of both reports: what bends one of them bends what they differ by."""
    difference = compared.difference
    both = (("a", difference.analysis_a), (compared.name, difference.analysis_b))
    return [f"{name}: {warning_sentence(one, analysis)}" for name, analysis in both for one in analysis.warnings]


def decision_words(compared: Compared) -> str:
    """Return the verdict on the primary metric, or why there is none."""
    difference, name = compared.difference, compared.name
    row = difference.primary
    if difference.decision == "withheld" or row is None or row.difference is None:
        return "; ".join(
            [
                "no verdict on the difference",
                f"a: {verdict_sentence(difference.analysis_a, alpha=compared.a.header.alpha)}",
                f"{name}: {verdict_sentence(difference.analysis_b, alpha=compared.b.header.alpha)}",
            ]
        )
    welch = row.difference
    between = f"{percent(welch.difference)} %, {level(difference.alpha)} interval {interval(welch.low, welch.high)} %"
    if math.isinf(welch.difference):
        between = f"{metric_name(row.metric)} {between_words(row)}"
    between += _other_computation(difference)
    if difference.decision == "inconclusive":
        why = f"{_reason(row.reason)}; {needed_words(row)}" if row.reason == "interval_includes_zero" else ""
        return f"inconclusive: {name} against a {between}: {why or _reason(row.reason)}"
    if difference.decision == "same":
        return f"{name} is the same as a: {between}: {_reason(row.reason)}"
    return f"{name} is {difference.decision} than a: {between}"


def _other_computation(difference: Difference) -> str:
    """Return that the compared arm is not the same computation as its base, empty if it is."""
    if not (difference.analysis_a.is_different or difference.analysis_b.is_different):
        return ""
    return f" ({difference.analysis_a.other} is not the same computation as {difference.analysis_a.base})"


def _reason(reason: str) -> str:
    return _REASONS.get(reason) or reason_words(reason)
