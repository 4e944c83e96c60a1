"""The comparison of two reports as text: what differs in the circumstances first, then the metrics."""

import textwrap
from collections.abc import Sequence

from lucid_cli.reporters.difference_words import (
    Compared,
    Outcome,
    added_words,
    between_words,
    canary_words,
    decision_words,
    identity_words,
    limit_words,
    lost_words,
    parity_words,
    refusal_words,
    remarks_of,
    row_words,
    tier_word,
    titles,
    warnings_of,
)
from lucid_cli.reporters.layout import LABEL_WIDTH, WIDTH, columns, fits, labelled, stacked
from lucid_cli.reporters.words import amount, interval, level, metric_name, percent, scale
from lucid_profiler.compare import Difference, DiffRow, IdentityDifference, MetricAnalysis
from lucid_profiler.reader import Report

NOT_FINITE = frozenset({"nan", "inf", "-inf", "beyond_double"})

__all__ = ["arm_cells", "render_compared", "render_difference"]


def render_difference(difference: Difference, a: Report, b: Report) -> str:
    """Return the whole text of one comparison, ending in a newline."""
    return render_compared([Compared(name="b", a=a, b=b, difference=difference)])


def render_compared(outcomes: Sequence[Outcome]) -> str:
    """Return the whole text of comparisons with the same first report, ending in a newline."""
    blocks = [_titles(outcomes), *(block for one in outcomes for block in _blocks(one))]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def arm_cells(metric: MetricAnalysis, *, is_hidden: bool) -> list[str]:
    """Return both arms' medians with their ranges, and the paired change with its interval; hidden arms as dashes."""
    # In the scale in which the report by itself is shown.
    scaled = _scale(metric)
    arms = []
    for arm in (metric.base, metric.other):
        median = f"{amount(arm.median, scaled)} {scaled[1]}".rstrip()
        spread = f" ({amount(arm.min, scaled)}-{amount(arm.max, scaled)})" if arm.min != arm.max else ""
        unknown = "not finite" if metric.effect_reason == "no_value" and NOT_FINITE & metric.reasons.keys() else None
        arms.append("-" if is_hidden else unknown or median + spread)
    effect = metric.effect
    paired = percent(effect.median if effect else None)
    return [*arms, f"{paired} {interval(effect.t_low, effect.t_high)}" if effect and effect.n > 1 else paired]


def _scale(metric: MetricAnalysis) -> tuple[float, str, int]:
    values = (metric.base.median, metric.other.median)
    if metric.unit == "1" and metric.exact and all(value is not None and value % 1 == 0 for value in values):
        return 1.0, "", 0
    return scale(metric.unit, values[0] or values[1])


def _titles(outcomes: Sequence[Outcome]) -> list[str]:
    return [
        *(line for name, words in titles(outcomes).items() for line in labelled(name, words)),
        *(line for text in remarks_of(outcomes) for line in labelled("remark", text)),
    ]


def _blocks(compared: Outcome) -> list[list[str]]:
    if not isinstance(compared, Compared):
        return [
            _identities(compared.refusal.identities, compared.name),
            _limits(compared),
            labelled("refused", refusal_words(compared)),
        ]
    difference = compared.difference
    words = canary_words(compared)
    return [
        _identities(difference.identities, compared.name),
        _rows(compared),
        [
            *_if_any("lost", lost_words(difference)),
            *_if_any("added", added_words(difference)),
            *(labelled("canary", words) if words else []),
            *labelled("parity a", parity_words(difference.analysis_a)),
            *labelled(f"parity {compared.name[:2].strip()}", parity_words(difference.analysis_b)),
        ],
        [line for text in warnings_of(compared) for line in labelled("warning", text)],
        _limits(compared),
        labelled("verdict", decision_words(compared)),
    ]


def _identities(identities: Sequence[IdentityDifference], name: str) -> list[str]:
    return [line for one in identities for line in labelled(tier_word(one), identity_words(one, name))]


def _limits(outcome: Outcome) -> list[str]:
    return [line for result, words in limit_words(outcome) for line in labelled(result.gate.kind, words)]


def _rows(compared: Compared) -> list[str]:
    difference = compared.difference
    base, other = difference.analysis_a.base, difference.analysis_a.other
    rows = [*difference.rows, *difference.counters]
    cells = [["", base, other, f"paired % [{level(difference.alpha)}]"]]
    for row in rows:
        for name, metric in (("a", row.a), (compared.name, row.b)):
            cells.append([f"  {name}", *arm_cells(metric, is_hidden=_is_hidden(row, difference))])
    head, *lines = columns(cells) if fits(cells) else [""]
    shown = [head] if head else []
    for index, row in enumerate(rows):
        both = slice(2 * index, 2 * index + 2)
        below = lines[both] if head else stacked([cells[0], *cells[1:][both]])
        shown += [*_headline(row, compared.name), *below]
    legend = (
        f"Medians (smallest-largest run); paired: median change of {other} against {base} within pairs, with "
        f"Student's interval for the mean; {compared.name} against a: ratio of the reports' mean paired ratios, as a "
        "change, with Welch's interval."
    )
    return [*shown, "", *labelled("", legend)]


def _is_hidden(row: DiffRow, difference: Difference) -> bool:
    return difference.hides_absolute and row not in difference.counters


def _headline(row: DiffRow, name: str) -> list[str]:
    text = f"{metric_name(row.metric)}: {name} against a {between_words(row)}: {row_words(row)}"
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * LABEL_WIDTH, break_on_hyphens=False)


def _if_any(label: str, names: str) -> list[str]:
    return labelled(label, names) if names else []
