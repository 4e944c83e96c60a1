"""The comparison of reports as tables: one a comparison for markdown, one of all numbers for CSV."""

import math
from collections.abc import Sequence

from lucid_cli.reporters.difference import arm_cells
from lucid_cli.reporters.difference_words import (
    Compared,
    Outcome,
    Refused,
    added_words,
    between_words,
    canary_words,
    decision_words,
    identity_words,
    limit_words,
    lost_words,
    parity_change,
    parity_words,
    refusal_words,
    remarks_of,
    row_words,
    tier_word,
    titles,
    warnings_of,
)
from lucid_cli.reporters.sentences import parity_code
from lucid_cli.reporters.tabular import Cell, Table
from lucid_cli.reporters.words import change, level, metric_name
from lucid_profiler.compare import DiffRow, MetricAnalysis

_SIDE = (
    *(f"{arm}_{value}" for arm in ("base", "other") for value in ("n", "median", "min", "max")),
    "paired_percent",
    "paired_low_percent",
    "paired_high_percent",
)
_CSV_COLUMNS = (
    "a",
    "b",
    "base",
    "other",
    "metric",
    "unit",
    "better",
    "verdict",
    "reason",
    "difference_percent",
    "difference_low_percent",
    "difference_high_percent",
    "amount",
    "amount_low",
    "amount_high",
    "pairs_needed",
    *(f"{side}_{name}" for side in ("a", "b") for name in _SIDE),
)

__all__ = ["csv_table", "markdown_tables"]


def markdown_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Return a table a comparison, its verdict as the title and everything else as notes."""
    return [_readable(one) if isinstance(one, Compared) else _refused(one) for one in outcomes]


def csv_table(outcomes: Sequence[Outcome]) -> Table:
    """Return one row a comparison and metric: numbers with all their digits, amounts in the metric's own unit."""
    rows = [
        row for one in outcomes for row in (_number_rows(one) if isinstance(one, Compared) else [_refused_row(one)])
    ]
    return Table(columns=_CSV_COLUMNS, rows=tuple(rows))


def _readable(compared: Compared) -> Table:
    difference, name = compared.difference, compared.name
    arms = difference.analysis_a.base, difference.analysis_a.other
    heads = [f"{side}: {what}" for side in ("a", name) for what in (*arms, f"paired % [{level(difference.alpha)}]")]
    rows: list[tuple[Cell, ...]] = [
        (
            metric_name(row.metric),
            f"{between_words(row)}",
            row_words(row),
            *(cell for side in (row.a, row.b) for cell in arm_cells(side, is_hidden=is_hidden)),
        )
        for rows_of, is_hidden in ((difference.rows, difference.hides_absolute), (difference.counters, False))
        for row in rows_of
    ]
    return Table(
        title=decision_words(compared),
        columns=("metric", f"{name} against a", "verdict", *heads),
        rows=tuple(rows),
        notes=tuple(_notes(compared)),
    )


def _refused(refused: Refused) -> Table:
    """Return what differs in the circumstances, which is all there is to say."""
    return Table(
        title=refusal_words(refused),
        columns=("", f"circumstances of a and {refused.name}"),
        rows=tuple((tier_word(one), identity_words(one, refused.name)) for one in refused.refusal.identities),
        notes=tuple(_heading_notes(refused)),
    )


def _heading_notes(outcome: Outcome) -> list[str]:
    return [
        *(f"{result.gate.kind} {words}" for result, words in limit_words(outcome)),
        *(f"{name}: {words}" for name, words in titles([outcome]).items()),
        *(f"remark: {text}" for text in remarks_of([outcome])),
    ]


def _notes(compared: Compared) -> list[str]:
    difference, name = compared.difference, compared.name
    canary = canary_words(compared)
    lost, added = lost_words(difference), added_words(difference)
    return [
        *_heading_notes(compared),
        *(f"{one.tier}: {identity_words(one, name)}" for one in difference.identities),
        *([f"lost: {lost}"] if lost else []),
        *([f"added: {added}"] if added else []),
        *([f"canary: {canary}"] if canary else []),
        f"parity a: {parity_words(difference.analysis_a)}",
        f"parity {name}: {parity_words(difference.analysis_b)}",
        *(f"warning: {text}" for text in warnings_of(compared)),
    ]


def _refused_row(refused: Refused) -> tuple[Cell, ...]:
    empty = dict.fromkeys(_CSV_COLUMNS)
    found = {"a": refused.a.path, "b": refused.b.path, "verdict": "refused"}
    return tuple((empty | found | {"reason": "; ".join(refused.refusal.reasons)}).values())


def _number_rows(compared: Compared) -> list[tuple[Cell, ...]]:
    difference = compared.difference
    head = (compared.a.path, compared.b.path, difference.analysis_a.base, difference.analysis_a.other)
    parity: tuple[Cell, ...] = ("parity", None, None, parity_change(difference))
    statuses = f"a {parity_code(difference.analysis_a)}, b {parity_code(difference.analysis_b)}"
    empty = (None,) * (len(_CSV_COLUMNS) - len(head) - len(parity) - 1)
    return [
        *((*head, *_numbers(row, is_hidden=difference.hides_absolute)) for row in difference.rows),
        *((*head, *_numbers(row, is_hidden=False)) for row in difference.counters),
        (*head, *parity, statuses, *empty),
    ]


def _numbers(row: DiffRow, *, is_hidden: bool) -> tuple[Cell, ...]:
    welch, amount = row.difference, row.amount
    return (
        row.metric,
        row.unit,
        row.better,
        row.verdict,
        row.reason,
        *(_percents(welch.difference, welch.low, welch.high) if welch else (None,) * 3),
        *((amount.difference, amount.low, amount.high) if amount and not is_hidden else (None,) * 3),
        row.pairs_needed,
        *_side_numbers(row.a, is_hidden=is_hidden),
        *_side_numbers(row.b, is_hidden=is_hidden),
    )


def _side_numbers(metric: MetricAnalysis, *, is_hidden: bool) -> tuple[Cell, ...]:
    arms: list[Cell] = []
    for arm in (metric.base, metric.other):
        arms += [arm.n, *((None,) * 3 if is_hidden else (arm.median, arm.min, arm.max))]
    effect = metric.effect
    return (*arms, *(_percents(effect.median, effect.t_low, effect.t_high) if effect else (None,) * 3))


def _percents(*logs: float | None) -> tuple[Cell, ...]:
    return tuple(log if log is None or math.isinf(log) else change(log) for log in logs)
