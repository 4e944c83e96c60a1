"""One report as tables: one a comparison for markdown, one of all numbers for CSV."""

import shlex
from collections.abc import Sequence

from lucid_cli.reporters.metrics import missing_words
from lucid_cli.reporters.sentences import parity_status, verdict_sentence, warning_sentence
from lucid_cli.reporters.table import environment_words
from lucid_cli.reporters.tabular import Cell, Table
from lucid_cli.reporters.words import (
    METRIC_NAMES,
    abbreviated,
    amount,
    change,
    counted,
    interval,
    level,
    metric_name,
    percent,
    reason_words,
    scale,
)
from lucid_profiler.compare import Analysis, ArmSummary, MetricAnalysis
from lucid_profiler.reader import Report

MAX_ROWS = 200
_ARM = ("n", "median", "min", "max")
_CSV_COLUMNS = (
    "base",
    "other",
    "metric",
    "unit",
    "better",
    "change",
    *(f"{arm}_{value}" for arm in ("base", "other") for value in _ARM),
    "ratio_of_medians",
    "paired_n",
    "paired_percent",
    "paired_low_percent",
    "paired_high_percent",
    "range_low_percent",
    "range_high_percent",
    "num_missing",
    "reason",
)

__all__ = ["MAX_ROWS", "csv_table", "markdown_tables"]


def markdown_tables(report: Report, analyses: Sequence[Analysis]) -> list[Table]:
    """Return a table a comparison, its verdict as the title; what concerns the whole report is in the first's notes."""
    return [_readable(report, one, is_first=not index) for index, one in enumerate(analyses)]


def csv_table(analyses: Sequence[Analysis]) -> Table:
    """Return one row a comparison and metric: numbers with all their digits, amounts in the metric's own unit."""
    rows = [(one.base, one.other, name, *_numbers(metric)) for one in analyses for name, metric in one.metrics.items()]
    return Table(columns=_CSV_COLUMNS, rows=tuple(rows))


def _readable(report: Report, analysis: Analysis, *, is_first: bool) -> Table:
    names = sorted(analysis.metrics, key=lambda name: (*METRIC_NAMES, name).index(name))
    left_out = [f"{counted(len(names) - MAX_ROWS, 'further metric')} not shown"] if len(names) > MAX_ROWS else []
    return Table(
        title=f"{analysis.other} against {analysis.base}: {verdict_sentence(analysis, alpha=report.header.alpha)}",
        columns=(
            "metric",
            analysis.base,
            analysis.other,
            "ratio",
            "paired %",
            "range %",
            f"{level(report.header.alpha)} t %",
        ),
        rows=tuple(_cells(name, analysis.metrics[name]) for name in names[:MAX_ROWS]),
        notes=(*left_out, *_missing(analysis, names[:MAX_ROWS]), *_notes(report, analysis, is_first=is_first)),
    )


def _missing(analysis: Analysis, names: Sequence[str]) -> list[str]:
    """Say which of the shown values are of fewer pairs than the others."""
    return missing_words(analysis, [name for name in names if analysis.metrics[name].base.n])


def _cells(name: str, metric: MetricAnalysis) -> tuple[Cell, ...]:
    scaled = scale(metric.unit, metric.base.median or metric.other.median)
    effect, ratio = metric.effect, metric.ratio_of_medians
    if metric.base.n == metric.other.n == 0:
        why = ", ".join(map(reason_words, metric.reasons)) or "no value"
        return metric_name(name), None, None, None, why, None, None
    return (
        metric_name(name),
        *(_arm(arm, scaled) for arm in (metric.base, metric.other)),
        None if ratio is None else f"{ratio:.4g}",
        percent(effect.median) if effect else reason_words(metric.effect_reason or "-"),
        interval(effect.low, effect.high) if effect and effect.n > 1 else None,
        interval(effect.t_low, effect.t_high) if effect else None,
    )


def _arm(arm: ArmSummary, scaled: tuple[float, str, int]) -> str:
    median = f"{amount(arm.median, scaled)} {scaled[1]}".rstrip()
    return median if arm.n < 2 else f"{median} ({amount(arm.min, scaled)} to {amount(arm.max, scaled)})"


def _notes(report: Report, analysis: Analysis, *, is_first: bool) -> list[str]:
    parity = analysis.parity
    what = f": {', '.join(parity.deciding)}" if parity.deciding else ""
    first = f"; first difference: {parity.difference.text}" if parity.difference else ""
    counts = f"{analysis.num_included} in the statistics, {analysis.num_discarded} discarded"
    counts += f", {len(analysis.excluded)} left out" if analysis.excluded else ""
    notes = [
        f"pairs: {counts}",
        f"parity: {parity_status(analysis)}{what}{first}",
        *(f"warning: {warning_sentence(one, analysis)}" for one in analysis.warnings),
    ]
    if not is_first:
        return notes
    status = report.end.status if report.end else "without an end"
    return [
        f"command: {abbreviated(shlex.join(report.header.command))}",
        f"where: {environment_words(report)}",
        *([] if status == "complete" else [f"status: {status}"]),
        *notes,
        *(f"file: {text}" for text in report.warnings),
    ]


def _numbers(metric: MetricAnalysis) -> tuple[Cell, ...]:
    effect = metric.effect
    logs = (effect.median, effect.t_low, effect.t_high, effect.low, effect.high) if effect else (None,) * 5
    reasons = [metric.effect_reason] if metric.effect_reason else []
    return (
        metric.unit,
        metric.better,
        metric.change,
        *(getattr(arm, value) for arm in (metric.base, metric.other) for value in _ARM),
        metric.ratio_of_medians,
        effect.n if effect else 0,
        *map(change, logs),
        metric.num_missing,
        "; ".join([*reasons, *metric.reasons]) or None,
    )
