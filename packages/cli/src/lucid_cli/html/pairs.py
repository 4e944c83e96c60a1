"""The pairs of a comparison: what each run of a pair took, and the pairs' effects with their interval."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lucid_cli.html.charts import Chart, LegendItem, View, arm_color, axis, rounded
from lucid_cli.html.markup import Html, cells, chart_text, table, template_text
from lucid_cli.html.section import missing
from lucid_cli.reporters.words import METRIC_NAMES, amount, change, counted, metric_name, percent, scale
from lucid_profiler.compare import Analysis, MetricAnalysis
from lucid_profiler.metrics import run_effect
from lucid_profiler.pairs import PairedEffect
from lucid_profiler.reader import Report
from lucid_profiler.records import Metric, Pair, Run

MAX_METRICS = 16
MAX_PAIRS = 60
_ROW_PX = 26
_MARGIN_PX = 110
_MEAN = "all pairs"

Couple = tuple[Pair, Run, Run]

__all__ = ["pair_charts"]


def pair_charts(report: Report, analysis: Analysis, *, place: int = 0) -> list[Html | Chart]:
    """Return two charts with a view a metric, or why there are none.

    Args:
        report: that holds the pairs.
        analysis: of the two arms.
        place: number of the comparison, for the charts' names.
    """
    couples = _couples(report, analysis)
    names = [name for name in _ordered(report, analysis) if analysis.metrics[name].effect is not None][:MAX_METRICS]
    if not couples:
        return [missing("No pair of runs is in the report, so there is nothing to compare.")]
    if not names:
        return [missing("No metric has a value in both runs of a pair that is in the statistics.")]
    shown = couples[:MAX_PAIRS]
    more = [f"The first {MAX_PAIRS} of {len(couples)} pairs are drawn."] if len(couples) > MAX_PAIRS else []
    height = _MARGIN_PX + _ROW_PX * (len(shown) + 2)
    rings = LegendItem(label="not in the statistics", color="--muted", shape="ring")
    level = f"{100 * (1 - report.header.alpha):g} %"
    effects = Chart(
        ident=f"effects-{place}",
        title=f"Change of {analysis.other} against {analysis.base}",
        description=f"A dot is a pair, as the change of {analysis.other} against {analysis.base}; left of 0 is less. "
        f"The bar is the {level} t interval of the mean change, the diamond the median pair.",
        views=[_effects(analysis, shown, name) for name in names],
        view_name="Metric",
        legend=[
            LegendItem(label="pair", color="--accent", shape="dot"),
            LegendItem(label=f"{level} interval", color="--interval"),
            *([rings] if any(not pair.included for pair, *_ in shown) else []),
        ],
        height=height,
        notes=more,
    )
    runs = Chart(
        ident=f"values-{place}",
        title="Both runs of each pair",
        description="A line joins the two runs of a pair, which ran next to each other.",
        views=[_values(report, analysis, shown, name=name) for name in names],
        view_name="Metric",
        legend=[
            LegendItem(label=arm, color=arm_color(report.header, arm), shape="dot")
            for arm in (analysis.base, analysis.other)
        ],
        height=height,
        notes=more,
    )
    return [effects, runs]


def _couples(report: Report, analysis: Analysis) -> list[Couple]:
    runs = {run.run: run for run in report.runs}
    found = [(pair, runs[pair.runs[0]], runs[pair.runs[1]]) for pair in report.pairs if runs.keys() >= {*pair.runs}]
    return [one for one in found if (one[1].arm, one[2].arm) == (analysis.base, analysis.other)]


def _ordered(report: Report, analysis: Analysis) -> list[str]:
    known = (report.header.primary, *METRIC_NAMES)
    return sorted(analysis.metrics, key=lambda name: (known.index(name) if name in known else len(known), name))


def _row(pair: Pair) -> str:
    return f"pair {pair.pair}"


def _why(pair: Pair) -> str:
    return "" if pair.included else ", ".join(pair.flags) or "left out"


def _use(pair: Pair, value: float | None) -> str:
    """Say whether a pair is in the statistics of a metric."""
    return _why(pair) or ("no value" if value is None else "yes")


def _effects(analysis: Analysis, couples: Sequence[Couple], name: str) -> View:
    effect = analysis.metrics[name].effect
    found = [(pair, run_effect(base, other, name)) for pair, base, other in couples]
    known = [(pair, change(value)) for pair, value in found if value is not None]
    groups = [
        _dots([(pair, value) for pair, value in known if pair.included], "--accent", "circle"),
        _dots([(pair, value) for pair, value in known if not pair.included], "--muted", "circle-open"),
    ]
    shapes = [_line(0.0)]
    traces = [trace for trace in groups if trace["x"]]
    if effect is not None:
        traces.append(_summary(effect))
        shapes += _band(effect)
    rows = [cells(_row(pair), percent(value), _use(pair, value)) for pair, value in found]
    return View(
        label=metric_name(name),
        traces=traces,
        layout={
            "xaxis": axis(f"{chart_text(metric_name(name))}, change in %", ticksuffix=" %"),
            "yaxis": _rows_axis([pair for pair, *_ in couples], with_mean=True),
            "shapes": shapes,
            "hovermode": "closest",
        },
        numbers=table(
            ["", "change, %", "in the statistics"],
            [*rows, *_summary_rows(effect)],
            caption=f"Change of {metric_name(name)} by pair",
        ),
    )


def _summary_rows(effect: PairedEffect | None) -> list[tuple[str, ...]]:
    if effect is None:
        return []
    return [
        ("median", percent(effect.median), counted(effect.n, "pair")),
        ("mean", percent(effect.mean), ""),
        ("t interval, low", percent(effect.t_low), ""),
        ("t interval, high", percent(effect.t_high), ""),
    ]


def _dots(known: Sequence[tuple[Pair, float | None]], color: str, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": rounded([value for _, value in known]),
        "y": [_row(pair) for pair, _ in known],
        "marker": {"size": 11, "color": color, "symbol": symbol, "line": {"width": 2, "color": color}},
        "hovertemplate": "%{y}: %{x:+.3f} %<extra></extra>",
    }


def _summary(effect: PairedEffect) -> dict[str, Any]:
    center = change(effect.median)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "x": rounded([center]),
        "y": [_MEAN],
        "marker": {"size": 14, "color": "--strong", "symbol": "diamond"},
        "hovertemplate": "median: %{x:+.3f} %<extra></extra>",
    }
    low, high = change(effect.t_low), change(effect.t_high)
    if low is not None and high is not None and center is not None:
        trace["error_x"] = {
            "type": "data",
            "symmetric": False,
            "array": rounded([high - center]),
            "arrayminus": rounded([center - low]),
            "color": "--strong",
            "thickness": 2.5,
            "width": 8,
        }
    return trace


def _band(effect: PairedEffect) -> list[dict[str, Any]]:
    low, high = change(effect.t_low), change(effect.t_high)
    if low is None or high is None:
        return []
    where = {"xref": "x", "yref": "paper", "x0": low, "x1": high, "y0": 0, "y1": 1}
    return [
        {"type": "rect", **where, "fillcolor": "--interval", "opacity": 0.35, "line": {"width": 0}, "layer": "below"}
    ]


def _line(x: float) -> dict[str, Any]:
    where = {"xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1}
    return {"type": "line", **where, "line": {"color": "--strong", "width": 1.5, "dash": "dot"}, "layer": "below"}


def _rows_axis(pairs: Sequence[Pair], *, with_mean: bool) -> dict[str, Any]:
    names = [*map(_row, pairs), *([_MEAN] if with_mean else [])]
    return axis(
        type="category",
        categoryorder="array",
        categoryarray=names,
        range=[len(names) - 0.5, -0.5],
        fixedrange=True,
        showgrid=False,
    )


def _values(report: Report, analysis: Analysis, couples: Sequence[Couple], *, name: str) -> View:
    metric = analysis.metrics[name]
    scaled = scale(metric.unit, metric.base.median or metric.other.median)
    rows = [_row(pair) for pair, *_ in couples]
    sides = [
        [_value(run, name, scaled[0]) for run in runs]
        for runs in ([one[1] for one in couples], [one[2] for one in couples])
    ]
    traces: list[Mapping[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [x for base, other in zip(*sides, strict=True) for x in (base, other, None)],
            "y": [y for row in rows for y in (row, row, None)],
            "line": {"color": "--axis", "width": 3},
            "hoverinfo": "skip",
        }
    ]
    symbols = ["circle" if pair.included else "circle-open" for pair, *_ in couples]
    for arm, values in zip((analysis.base, analysis.other), sides, strict=True):
        color = arm_color(report.header, arm)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": values,
                "y": rows,
                "marker": {"size": 11, "color": color, "symbol": symbols, "line": {"width": 2, "color": color}},
                "hovertemplate": f"%{{y}}, {template_text(arm)}: %{{x}} {template_text(scaled[1])}<extra></extra>",
            }
        )
    return View(
        label=metric_name(name),
        traces=traces,
        layout={
            "xaxis": axis(f"{chart_text(metric_name(name))}, {scaled[1]}".rstrip(", ")),
            "yaxis": _rows_axis([pair for pair, *_ in couples], with_mean=False),
            "hovermode": "closest",
        },
        numbers=_value_table(analysis, metric, couples, name=name),
    )


def _value(run: Run, name: str, divisor: float) -> float | None:
    metric = run.metrics.get(name)
    value = _finite(metric)
    return None if value is None else rounded([value / divisor])[0]


def _finite(metric: Metric | None) -> float | int | None:
    value = None if metric is None else metric.value
    return value if value is not None and abs(value) <= sys.float_info.max else None


def _value_table(analysis: Analysis, metric: MetricAnalysis, couples: Sequence[Couple], *, name: str) -> Html:
    scaled = scale(metric.unit, metric.base.median or metric.other.median)
    rows = [
        cells(
            _row(pair),
            *(amount(_finite(run.metrics.get(name)), scaled) for run in (base, other)),
        )
        for pair, base, other in couples
    ]
    unit = f", {scaled[1]}" if scaled[1] else ""
    return table(
        ["", f"{analysis.base}{unit}", f"{analysis.other}{unit}"], rows, caption=f"{metric_name(name)} of each run"
    )
