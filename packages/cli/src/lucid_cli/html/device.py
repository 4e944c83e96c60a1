"""Power, clocks and temperature over each run, with what held the clocks and the phases that the script marked."""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lucid_cli.html.charts import Chart, LegendItem, View, axis, category_color, rounded
from lucid_cli.html.markup import Html, chart_text, table, template_text
from lucid_cli.html.section import Section, missing
from lucid_cli.html.series import Line, Series, line, origin_ns, quantile, run_name, viewed
from lucid_cli.html.thinning import Thinned, bins_for, thin
from lucid_cli.reporters.words import reason_words
from lucid_profiler.checkup.gpu import EVENTS
from lucid_profiler.phases import within_wall
from lucid_profiler.reader import Report
from lucid_profiler.records import Phase, Run

MAX_BANDS = 200
MAX_PHASES = 200
MAX_TOTALS = 200
MAX_LEGEND = 12
_PREFIX = "gpu:"
_IDLE = 0x1
_HEIGHT_PX = 640
# Column, divisor, title, colour; from the top.
_PANELS = (
    ("power_draw_mw", 1e3, "power, W", "--cat-0"),
    ("clock_sm_mhz", 1.0, "SM clock, MHz", "--cat-1"),
    ("temperature_c", 1.0, "temperature, °C", "--cat-2"),
    ("utilization_gpu_percent", 1.0, "GPU busy, %", "--cat-3"),
)
_STRIPS = ("phases", "limits of the clock")

DRAWN = {"gpu": ("mono_ns", "clocks_event_reasons", *(column for column, *_ in _PANELS))}
"""Columns by the kind of their series."""

__all__ = ["DRAWN", "device_section"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """A named piece of time, in seconds from the run's origin."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """What the views of all runs share."""

    series: Series
    found: Sequence[tuple[Run, str]]
    """Each run with a series of a device."""
    colors: Mapping[str, str]
    """Of the phases, by name."""
    num_bins: int


def device_section(report: Report, series: Series) -> Section:
    """Return the chart of the devices, or why there is none."""
    found = [
        (run, name)
        for run in viewed(report.runs)
        for name in series.names(run.run)
        if name.startswith(_PREFIX) and name.count(":") == 1
    ]
    names = dict.fromkeys(phase.name for run, _ in found for phase in run.phases)
    drawing = _Drawing(
        series=series,
        found=found,
        colors={name: category_color(place + 4) for place, name in enumerate(names)},
        num_bins=bins_for(len(found) * len(_PANELS) * 2),
    )
    views = [view for run, name in found if (view := _view(drawing, run, name))]
    parts: list[Html | Chart] = [_chart(report, drawing, views) if views else missing(_why(report))]
    return Section(ident="device", title="Power, clock and temperature", parts=parts)


def _why(report: Report) -> str:
    monitors = [run.monitor for run in report.runs if run.monitor is not None]
    reasons = dict.fromkeys(reason for one in monitors for reason in (one.reason, one.nvml_reason) if reason)
    if not monitors:
        return "Nothing was sampled beside the runs, so no reading of a GPU is in the report."
    known = "; ".join(map(reason_words, reasons)) or "no GPU was found"
    return f"No GPU was sampled beside the runs: {known}."


def _chart(report: Report, drawing: _Drawing, views: Sequence[View]) -> Chart:
    phases = [LegendItem(label=f"phase {name}"[:60], color=color) for name, color in drawing.colors.items()]
    strips = {trace["name"] for view in views for trace in view.traces if trace.get("yaxis") == "y2"}
    limits = [
        LegendItem(label=f"{'held down' if _holds_down(name) else 'clock'}: {name}", color=_limit_color(name))
        for name in EVENTS.values()
        if name in strips
    ]
    num_shown = len({run.run for run, _ in drawing.found})
    longest = max(len(drawing.series.column(run.run, name, "mono_ns")) for run, name in drawing.found)
    notes = [f"{num_shown} of {len(report.runs)} runs are here."] if num_shown < len(report.runs) else []
    if longest > 2 * drawing.num_bins:
        notes.append(f"Of up to {longest:,} readings the least and most of {drawing.num_bins} stretches are drawn.")
    return Chart(
        ident="device-readings",
        title="Readings of the GPU",
        description="Bands across the panels are times in which something held the clock down; idle and chosen clocks "
        "are only in the strip of limits. Phases are drawn as the script marked them, also beyond the wall interval; "
        "their sums in the table are cut to it. Time is from the begin of that interval. Power is a mean over about a "
        "second on most devices.",
        views=views,
        view_name="Run",
        legend=[*phases[:MAX_LEGEND], *limits],
        height=_HEIGHT_PX,
        can_zoom=True,
        notes=notes,
    )


def _view(drawing: _Drawing, run: Run, name: str) -> View | None:
    series = drawing.series
    times = series.column(run.run, name, "mono_ns")
    origin = origin_ns(run, times)
    panels = [
        (title, color, line(times, series.column(run.run, name, column), origin=origin, divisor=divisor))
        for column, divisor, title, color in _PANELS
    ]
    known = [(title, color, one) for title, color, one in panels if any(value is not None for value in one.values)]
    if not known:
        return None
    phases = _phases(run, origin)
    masks = line(times, series.column(run.run, name, "clocks_event_reasons"), origin=origin)
    limits = _longest(_limits(masks), MAX_BANDS)
    rows = [label for label, stretches in zip(_STRIPS, (phases, limits), strict=True) if stretches]
    traces = _strip(phases, "y", [drawing.colors[one.name] for one in phases]) if phases else []
    if limits:
        traces += _strip(limits, "y2", [_limit_color(one.name) for one in limits])
    for place, (title, color, one) in enumerate(known):
        thinned = thin(one.seconds, one.values, drawing.num_bins)
        traces.append(_curve(title, color, thinned, at=f"y{place + 3}"))
    uuid = name[len(_PREFIX) :]
    several = sum(other.run == run.run for other, _ in drawing.found) > 1
    label = run_name(run) + (f", {uuid}" if several else "")
    return View(
        label=label,
        traces=traces,
        layout=_layout([title for title, *_ in known], rows, limits),
        numbers=Html(
            _numbers(label, known) + _phase_totals(run, label) + _totals("limit of the clock", _limits(masks), label)
        ),
    )


def _phases(run: Run, origin: int) -> list[_Stretch]:
    """Return the longest phases as they were marked."""
    return _longest(_stretches(run.phases, origin), MAX_PHASES)


def _stretches(phases: Sequence[Phase], origin: int) -> Iterator[_Stretch]:
    for phase in phases:
        yield _Stretch(name=phase.name, begin=(phase.begin_ns - origin) / 1e9, end=(phase.end_ns - origin) / 1e9)


def _longest(stretches: Iterable[_Stretch], num: int) -> list[_Stretch]:
    found = heapq.nsmallest(num, stretches, key=lambda one: (one.begin - one.end, one.begin))
    return sorted(found, key=lambda one: (one.begin, one.name))


def _limits(masks: Line) -> Iterator[_Stretch]:
    """Yield when which reason held the clock: from the reading that says so to the next one that does not."""
    for bit, name in EVENTS.items():
        for begin, end in _merged((begin, end) for mask, begin, end in _constant(masks) if mask & bit):
            yield _Stretch(name=name, begin=begin, end=end)


def _constant(masks: Line) -> Iterator[tuple[int, float, float]]:
    """Yield what holds the clock with the first reading that says so and the first that says otherwise, or the last."""
    known: tuple[int, float, float] | None = None
    for at, value in zip(masks.seconds, masks.values, strict=True):
        mask, second = int(value or 0), at or 0.0
        if known is not None and mask == known[0]:
            known = (mask, known[1], second)
            continue
        if known is not None:
            yield (*known[:2], second)
        known = (mask, second, second)
    if known is not None:
        yield known


def _merged(stretches: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    last: tuple[float, float] | None = None
    for begin, end in stretches:
        if last is not None and begin <= last[1]:
            last = (last[0], max(end, last[1]))
            continue
        if last is not None:
            yield last
        last = (begin, end)
    if last is not None:
        yield last


def _limit_color(name: str) -> str:
    return "--throttle" if _holds_down(name) else "--muted"


def _holds_down(name: str) -> bool:
    chosen = {EVENTS[bit] for bit in (_IDLE, 0x2, 0x10, 0x100)}
    return name not in chosen


def _strip(stretches: Sequence[_Stretch], at: str, colors: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row of bars; each name once, so that bars of one name are one trace."""
    traces = []
    for name in dict.fromkeys(one.name for one in stretches):
        chosen = [(one, color) for one, color in zip(stretches, colors, strict=True) if one.name == name]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "base": rounded([one.begin for one, _ in chosen]),
                "x": rounded([one.end - one.begin for one, _ in chosen]),
                "y": [0] * len(chosen),
                "yaxis": at,
                "width": 0.9,
                "marker": {"color": chosen[0][1], "line": {"width": 1, "color": "--paper"}},
                "name": chart_text(name),
                "hovertemplate": f"{template_text(name)}: %{{x:.4g}} s from %{{base:.4g}} s<extra></extra>",
            }
        )
    return traces


def _curve(title: str, color: str, thinned: Thinned, *, at: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": rounded(thinned.x),
        "y": rounded(thinned.y),
        "yaxis": at,
        "name": title,
        "line": {"color": color, "width": 1.6},
        "hovertemplate": f"{title}: %{{y:.5g}} at %{{x:.4g}} s<extra></extra>",
    }


def _layout(titles: Sequence[str], strips: Sequence[str], limits: Sequence[_Stretch]) -> dict[str, Any]:
    """Return panels below each other that share their time: strips on top, then the readings."""
    heights = [0.045] * len(strips) + [(1.0 - 0.1 * len(strips)) / len(titles) - 0.055] * len(titles)
    names = [*strips, *titles]
    keys = [f"yaxis{'' if one == _STRIPS[0] else 2}" for one in strips]
    keys += [f"yaxis{place + 3}" for place in range(len(titles))]
    layout: dict[str, Any] = {}
    annotations = []
    top = 1.0
    for name, key, height in zip(names, keys, heights, strict=True):
        top -= 0.055
        strip = {"visible": False, "range": [-0.5, 0.5]} if name in _STRIPS else {}
        layout[key] = {**axis(domain=[max(top - height, 0.0), top], anchor="x", fixedrange=True), **strip}
        annotations.append(_heading(name, top))
        top -= height
    anchor = keys[-1].replace("axis", "")
    layout["xaxis"] = axis("seconds", anchor=anchor)
    layout["annotations"] = annotations
    layout["shapes"] = [_band(one) for one in limits if _holds_down(one.name)]
    layout["barmode"] = "overlay"
    layout["hovermode"] = "closest"
    return layout


def _heading(name: str, top: float) -> dict[str, Any]:
    where = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom"}
    return {"text": name, "showarrow": False, **where}


def _band(one: _Stretch) -> dict[str, Any]:
    where = {"xref": "x", "yref": "paper", "x0": one.begin, "x1": one.end, "y0": 0, "y1": 1}
    return {"type": "rect", **where, "fillcolor": "--throttle", "opacity": 0.18, "line": {"width": 0}, "layer": "below"}


def _numbers(label: str, known: Sequence[tuple[str, str, Line]]) -> Html:
    rows = []
    for title, _, one in known:
        values = sorted(value for value in one.values if value is not None)
        rows.append(
            [title, *(f"{value:.5g}" for value in (values[0], quantile(values, 0.5), values[-1])), str(len(values))]
        )
    return table(["", "least", "median", "most", "readings"], rows, caption=f"Readings of {label}")


def _phase_totals(run: Run, label: str) -> str:
    within = [phase for phase in within_wall(run) if phase.end_ns > phase.begin_ns]
    return _totals("phase", _stretches(within, 0), f"{label}, within its wall interval" if run.wall else label)


def _totals(kind: str, stretches: Iterable[_Stretch], label: str) -> str:
    totals: dict[str, tuple[int, float]] = {}
    for one in stretches:
        num, seconds = totals.get(one.name, (0, 0.0))
        totals[one.name] = (num + 1, seconds + one.end - one.begin)
    rows = [[name, str(num), f"{seconds:.4g}"] for name, (num, seconds) in totals.items()][:MAX_TOTALS]
    return table([kind, "times", "seconds"], rows, caption=f"{kind} of {label}") if rows else ""
