"""The comparison of two reports as text: what differs in the circumstances first, then the metrics."""

import math

from lucid_cli.reporters.layout import columns, labelled
from lucid_cli.reporters.sentences import verdict_sentence
from lucid_cli.reporters.table import environment_words
from lucid_cli.reporters.words import (
    abbreviated,
    amount,
    counted,
    interval,
    metric_name,
    percent,
    reason_words,
    scale,
)
from lucid_profiler.compare import Analysis, Canary, Difference, DiffRow, IdentityDifference, MetricAnalysis
from lucid_profiler.reader import Report

__all__ = ["render_difference"]


def render_difference(difference: Difference, a: Report, b: Report) -> str:
    """Return the whole text, ending in a newline."""
    blocks = [
        [
            *(line for name, report in (("a", a), ("b", b)) for line in labelled(name, _title(report))),
            *(labelled("remark", "a and b are the same report") if a.header.id == b.header.id else []),
        ],
        [line for identity in difference.identities for line in labelled(identity.tier, _identity(identity))],
        _rows(difference),
        [
            *_names("lost", difference.only_in_a),
            *_names("added", difference.only_in_b),
            *_canary(difference.canary),
            *labelled("parity a", _parity(difference.analysis_a)),
            *labelled("parity b", _parity(difference.analysis_b)),
        ],
        labelled("verdict", _verdict(difference)),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _title(report: Report) -> str:
    return (
        f"{report.path}: {counted(report.header.pairs, 'pair')}, {environment_words(report)}, {report.header.created}"
    )


def _identity(identity: IdentityDifference) -> str:
    a, b = (
        " and ".join(abbreviated(str(value)) for value in values) or "not recorded"
        for values in (identity.a, identity.b)
    )
    return f"{identity.key}: {a} in a, {b} in b"


def _rows(difference: Difference) -> list[str]:
    base, other = difference.analysis_a.base, difference.analysis_a.other
    rows = [["", "", base, other, "paired %", "b against a % [95 %]", ""]]
    for row in difference.rows:
        rows += _metric_rows(row, is_judged=difference.decision != "withheld")
    legend = (
        f"Medians; paired: median change of {other} against {base} within pairs; b against a: ratio of the reports' "
        "mean paired ratios, as a change, with Welch's interval."
    )
    return [*columns(rows), "", *labelled("", legend)]


def _metric_rows(row: DiffRow, *, is_judged: bool) -> list[list[str]]:
    first, second = (_medians(name, metric) for name, metric in (("a", row.a), ("b", row.b)))
    welch = row.difference
    between = "-" if welch is None else f"{percent(welch.difference)} {interval(welch.low, welch.high)}"
    word = row.change.replace("_", " ") if is_judged else ""
    return [[metric_name(row.metric), *first, between, word], ["", *second, "", ""]]


def _medians(name: str, metric: MetricAnalysis) -> list[str]:
    # In the scale in which the report by itself is shown.
    scaled = scale(metric.unit, metric.base.median or metric.other.median)
    return [
        name,
        *(f"{amount(arm.median, scaled)} {scaled[1]}".rstrip() for arm in (metric.base, metric.other)),
        percent(metric.effect.median if metric.effect else None),
    ]


def _names(label: str, names: tuple[str, ...]) -> list[str]:
    return labelled(label, ", ".join(map(metric_name, names))) if names else []


def _canary(canary: Canary | None) -> list[str]:
    if canary is None:
        return []
    welch = canary.interval
    between = f"{percent(welch.difference)} % {interval(welch.low, welch.high)}"
    if canary.is_quiet:
        text = f"base arm, b against a: {between} of {canary.metric}"
    elif canary.is_certain:
        text = f"the base arms differ by {between} of {canary.metric}, so absolute values do not compare"
    else:
        text = (
            f"the base arms cannot be told apart within {interval(welch.low, welch.high)} % of {canary.metric}, "
            f"b against a {percent(welch.difference)} %"
        )
    return labelled("canary", text)


def _parity(analysis: Analysis) -> str:
    parity = analysis.parity
    text = f"{parity.status.replace('_', ' ')}: {', '.join(parity.covered) or 'no part'}"
    return text + (f"; {parity.difference.text}" if parity.difference else "")


def _verdict(difference: Difference) -> str:
    row = next((row for row in difference.rows if row.metric == difference.analysis_a.verdict.metric), None)
    welch = row.difference if row else None
    if difference.decision == "withheld" or welch is None:
        return "; ".join(
            [
                "no verdict on the difference",
                f"a: {verdict_sentence(difference.analysis_a)}",
                f"b: {verdict_sentence(difference.analysis_b)}",
            ]
        )
    between = f"{percent(welch.difference)} %, 95 % interval {interval(welch.low, welch.high)} %"
    if difference.decision == "inconclusive":
        same = "the effects are equal" if math.isclose(welch.low, welch.high) else reason_words(difference.reason)
        return f"inconclusive: b against a {between}: {same}"
    return f"b is {difference.decision} than a: {between}"
