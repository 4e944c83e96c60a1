"""The metrics of one comparison as a table: a row a metric, what its columns are, and what is unknown."""

from collections.abc import Sequence

from lucid_cli.reporters.layout import columns, fits, labelled, stacked
from lucid_cli.reporters.words import (
    METRIC_NAMES,
    amount,
    counted,
    counted_reasons,
    interval,
    level,
    metric_name,
    percent,
    reason_words,
    scale,
)
from lucid_profiler.analysis import included_pairs
from lucid_profiler.compare import Analysis, MetricAnalysis
from lucid_profiler.pairs import PairedEffect
from lucid_profiler.reader import Report
from lucid_profiler.records import Run

__all__ = ["missing_words", "render_metrics"]


def render_metrics(report: Report, analysis: Analysis) -> list[str]:
    """Return the rows, their legend, and the metrics without a value; no line if no run records any."""
    runs = [run for pair in included_pairs(report, analysis.other or None) for run in pair]
    names = sorted(analysis.metrics, key=lambda name: (*METRIC_NAMES, name).index(name))
    known = [name for name in names if analysis.metrics[name].base.n]
    lines = []
    if known:
        rows = [
            ["", analysis.base, analysis.other, "ratio", "paired %", "range %", f"{level(report.header.alpha)} t %"]
        ]
        for name in known:
            label = _wall_label(runs) if name == "wall" else metric_name(name)
            rows += _metric_rows(label, analysis.metrics[name])
        shown = columns(rows) if fits(rows) else _stacked(rows)
        lines += [*shown, *_legend(runs, analysis, known, ranges="below" if fits(rows) else "in brackets")]
    return [*lines, *_unknown(analysis, [name for name in names if name not in known])]


def _wall_label(runs: Sequence[Run]) -> str:
    sources = sorted({run.wall.source for run in runs if run.wall is not None})
    return f"wall ({'/'.join(sources)})"


def _metric_rows(label: str, metric: MetricAnalysis) -> list[list[str]]:
    scaled = scale(metric.unit, metric.base.median or metric.other.median)
    effect = metric.effect
    arms = (metric.base, metric.other)
    ratio = metric.ratio_of_medians
    rows = [
        [
            label,
            *(f"{amount(arm.median, scaled)} {scaled[1]}".rstrip() for arm in arms),
            "-" if ratio is None else f"{ratio:.4f}" if ratio < 100 else f"{ratio:.3g}",
            percent(effect.median if effect else None),
            _range(effect) if effect else reason_words(metric.effect_reason or "-"),
            interval(effect.t_low, effect.t_high) if effect else "-",
        ],
    ]
    if max(arm.n for arm in arms) > 1:
        rows.append(["", *(f"{amount(arm.min, scaled)}-{amount(arm.max, scaled)}" for arm in arms), "", "", "", ""])
    return rows


def _stacked(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows one below the other, each arm's range behind its median instead of below it."""
    joined: list[list[str]] = []
    for row in rows:
        if row[0] or not joined:
            joined.append(list(row))
        else:
            joined[-1] = [
                f"{first} ({below})" if below else first for first, below in zip(joined[-1], row, strict=True)
            ]
    return stacked(joined)


def _range(effect: PairedEffect) -> str:
    """Return the smallest and largest pair; one pair alone spans nothing."""
    return interval(effect.low, effect.high) if effect.n > 1 else "-"


def _legend(runs: Sequence[Run], analysis: Analysis, known: list[str], *, ranges: str) -> list[str]:
    num = analysis.num_included
    if not num:
        return []
    change = f"change of {analysis.other} against {analysis.base}"
    if num == 1:
        text = f"The values of 1 pair. paired: {change}."
    else:
        text = (
            f"Medians, with smallest-largest {ranges}. paired: median {change} within {num} pairs; range: smallest and "
            f"largest pair, which hold the true median with {100 * (1 - 2.0 ** (1 - num)):.4g} %; t: interval of the "
            "mean change."
        )
    if "peak_rss" in known and any(run.agent.num_processes > 1 for run in runs):
        text += f" {metric_name('peak_rss')}: of the largest single process."
    missing = [f"{words}, so its range covers less." for words in missing_words(analysis, known)]
    return ["", *labelled("", " ".join([text, *missing]))]


def missing_words(analysis: Analysis, names: Sequence[str]) -> list[str]:
    """Say of each of these metrics that has no value in some pairs how many those are, and why."""
    return [
        f"{metric_name(name)}: {metric.num_missing} of {counted(analysis.num_included, 'pair')} without a value "
        f"({counted_reasons(metric.reasons)})"
        for name in names
        if (metric := analysis.metrics[name]).num_missing
    ]


def _unknown(analysis: Analysis, names: list[str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name in names:
        by_reason.setdefault(", ".join(map(reason_words, analysis.metrics[name].reasons)), []).append(metric_name(name))
    return [
        line
        for reason, unknown in by_reason.items()
        for line in labelled("unknown", f"{', '.join(unknown)}: {reason or 'no value'}")
    ]
