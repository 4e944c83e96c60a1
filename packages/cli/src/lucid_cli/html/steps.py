"""Step times: how they are spread in each run, and how they went."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median
from typing import Any

from lucid_cli.html.charts import Chart, View, arm_color, arm_legend, axis, rounded, span
from lucid_cli.html.markup import Html, cells, chart_text, table
from lucid_cli.html.numbers import Number, Numbers
from lucid_cli.html.section import Section, missing
from lucid_cli.html.series import Column, Series, quantile, run_name, scaled, viewed
from lucid_cli.html.thinning import Thinned, bins_for, thin
from lucid_cli.reporters.words import reason_words
from lucid_profiler.reader import Report
from lucid_profiler.records import Run

MAX_BOXES = 60
_ROW_PX = 26
_MARGIN_PX = 110
_CLIPPED_SHARE = 0.95
_CLIPPED_ROOM = 1.5
_NUM_ROWS = 12
_NUM_MIDDLES = 60
_BEHIND = 0.3
_WHOSE = "The steps are those of one optimizer, the one that stepped most often in a run's first process."

DRAWN = {
    "steps": ("begin_ns", "end_ns", "optimizer"),
    "device_steps": ("optimizer", "step_device_ns", "optimizer_device_ns"),
}
"""Columns by the kind of their series."""

__all__ = ["DRAWN", "steps_section"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantity:
    """A time that every step has, in milliseconds, by run."""

    name: str
    by_run: Mapping[int, Column]


def steps_section(report: Report, series: Series) -> Section:
    """Return the charts of step times, or why there are none."""
    quantities = _quantities(report, series)
    parts = _charts(report, quantities) if quantities else [missing(_why(report))]
    return Section(ident="steps", title="Step times", parts=parts)


def _why(report: Report) -> str:
    reasons = [run.metrics["step_time_median"].reason for run in report.runs if "step_time_median" in run.metrics]
    known = dict.fromkeys(reason_words(reason) for reason in reasons if reason)
    return f"No step was timed: {', '.join(known) or 'the report holds no steps'}."


def _quantities(report: Report, series: Series) -> list[_Quantity]:
    found: dict[str, dict[int, Column]] = {}
    for run in report.runs:
        for name, values in _of_run(series, run.run).items():
            if any(value is not None for value in values):
                found.setdefault(name, {})[run.run] = values
    return [_Quantity(name=name, by_run=by_run) for name, by_run in found.items()]


def _of_run(series: Series, run: int) -> dict[str, Column]:
    begins, ends = (series.column(run, "steps", name) for name in ("begin_ns", "end_ns"))
    main = _main(series.column(run, "steps", "optimizer"))
    whole = array("q", (place for place in main if begins[place] is not None and ends[place] is not None))
    begins, ends = (Numbers(column[place] for place in whole) for column in (begins, ends))
    device = _main(series.column(run, "device_steps", "optimizer"))
    on_device = {
        name: _milliseconds(column[place] for place in device)
        for name, column in (
            ("step on the device", series.column(run, "device_steps", "step_device_ns")),
            ("optimizer on the device", series.column(run, "device_steps", "optimizer_device_ns")),
        )
    }
    return {
        "step": _between(begins, islice(begins, 1, None)),
        "optimizer step": _between(begins, ends),
        **on_device,
    }


def _main(optimizers: Column) -> Sequence[int]:
    """Return the places of the steps of the optimizer that stepped most often, of the first one among equals."""
    places: dict[float, array[int]] = {}
    for place, optimizer in enumerate(optimizers):
        if optimizer is not None:
            places.setdefault(optimizer, array("q")).append(place)
    return max((places[one] for one in sorted(places)), key=len, default=())


def _between(befores: Iterable[Number | None], afters: Iterable[Number | None]) -> Numbers:
    pairs = zip(befores, afters, strict=False)
    return _milliseconds(None if before is None or after is None else after - before for before, after in pairs)


def _milliseconds(values_ns: Iterable[Number | None]) -> Numbers:
    return Numbers(scaled(values_ns, 1e6))


def _charts(report: Report, quantities: Sequence[_Quantity]) -> list[Html | Chart]:
    boxed = report.runs if len(report.runs) <= MAX_BOXES else viewed(report.runs)
    num_boxes = max(sum(run.run in quantity.by_run for run in boxed) for quantity in quantities)
    some = f"{len(boxed)} of {len(report.runs)} runs are drawn. " if len(boxed) < len(report.runs) else ""
    spread = Chart(
        ident="step-spread",
        title="Step times of each run",
        description="A box holds the middle half of a run's steps, its line is their median, and the whiskers reach to "
        f"the 5th and 95th percentile; all steps count. {_WHOSE} Discarded runs are paler. {some}Steps are no "
        "repetitions of each other: the runs are.",
        views=[_spread(report, boxed, quantity) for quantity in quantities],
        view_name="Time of",
        legend=arm_legend(report.header),
        height=_MARGIN_PX + _ROW_PX * num_boxes,
    )
    return [spread, _trend(report, quantities)]


def _spread(report: Report, runs: Sequence[Run], quantity: _Quantity) -> View:
    traces, rows, names = [], [], []
    for run in runs:
        ordered = sorted(value for value in quantity.by_run.get(run.run, ()) if value is not None)
        if not ordered:
            continue
        low, first, middle, third, high = (quantile(ordered, share) for share in (0.05, 0.25, 0.5, 0.75, 0.95))
        names.append(f"run {run.run}")
        traces.append(_box(report, run, rounded([low, first, middle, third, high])))
        rows.append(
            cells(
                run_name(run),
                str(len(ordered)),
                *(f"{value:.4g}" for value in (ordered[0], low, first, middle, third, high, ordered[-1])),
            )
        )
    head = ["", "steps", "least", "5 %", "25 %", "median", "75 %", "95 %", "most"]
    return View(
        label=quantity.name,
        traces=traces,
        layout={
            "xaxis": axis(f"{quantity.name}, ms"),
            "yaxis": axis(
                type="category",
                categoryorder="array",
                categoryarray=names,
                range=[len(names) - 0.5, -0.5],
                fixedrange=True,
                showgrid=False,
            ),
            "hovermode": "closest",
        },
        numbers=table(head, rows, caption=f"Time of {quantity.name} in ms by run"),
    )


def _box(report: Report, run: Run, values: Sequence[float | None]) -> dict[str, Any]:
    low, first, middle, third, high = ([value] for value in values)
    color = arm_color(report.header, run.arm)
    return {
        "type": "box",
        "orientation": "h",
        "y": [f"run {run.run}"],
        "lowerfence": low,
        "q1": first,
        "median": middle,
        "q3": third,
        "upperfence": high,
        "fillcolor": color,
        "line": {"color": "--strong", "width": 1.2},
        "opacity": 0.4 if run.discarded else 0.9,
        "name": chart_text(run_name(run)),
        "width": 0.6,
        "hoverinfo": "x+name",
    }


def _trend(report: Report, quantities: Sequence[_Quantity]) -> Chart:
    runs = viewed(report.runs)
    num_bins = bins_for(4 * sum(run.run in quantity.by_run for quantity in quantities for run in runs))
    curves = {
        (quantity.name, run.run): thin(range(1, len(values) + 1), values, num_bins)
        for quantity in quantities
        for run in runs
        if (values := quantity.by_run.get(run.run))
    }
    num_all, num_left = (sum(sizes) for sizes in zip(*((one.num, len(one.x)) for one in curves.values()), strict=True))
    notes = [f"{len(runs)} of {len(report.runs)} runs are drawn."] if len(runs) < len(report.runs) else []
    if num_left < num_all:
        notes.append(
            f"Of {num_all:,} values {num_left:,} are drawn: the smallest and largest of each of {num_bins} stretches, "
            f"pale; the strong line is the median of each of {_NUM_MIDDLES}."
        )
    return Chart(
        ident="step-trend",
        title="Step times in the order of the steps",
        description="Discarded runs are paler. Single long steps, such as the first ones, lie above the picture; the "
        "minus sign shows them.",
        views=[view for quantity in quantities for view in _trend_views(report, runs, quantity, curves=curves)],
        legend=arm_legend(report.header, "line"),
        height=380,
        can_zoom=True,
        notes=notes,
    )


def _trend_views(
    report: Report, runs: Sequence[Run], quantity: _Quantity, *, curves: Mapping[tuple[str, int], Thinned]
) -> list[View]:
    """Return a view of all runs together; of the first quantity, the step, one of each run as well."""
    chosen = [run for run in runs if (quantity.name, run.run) in curves]
    extremes = {run.run: _curve(report, run, curves[quantity.name, run.run]) for run in chosen}
    middles = {
        run.run: _middles(report, run, quantity.by_run[run.run])
        for run in chosen
        if curves[quantity.name, run.run].is_thinned
    }
    together = [(f"{quantity.name}, {len(chosen)} runs", chosen)] if chosen else []
    alone = [(f"{quantity.name}, {run_name(run)}", [run]) for run in chosen] if quantity.name == "step" else []
    return [
        View(
            label=label,
            traces=[
                *(extremes[run.run] for run in group),
                *(middles[run.run] for run in group if run.run in middles),
            ],
            layout=_trend_layout(quantity, group),
            numbers=_stretches(quantity, group),
        )
        for label, group in [*together, *alone]
    ]


def _curve(report: Report, run: Run, thinned: Thinned) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(thinned.x),
        "y": rounded(thinned.y),
        "name": chart_text(run_name(run)),
        "line": {"color": arm_color(report.header, run.arm), "width": 1.4},
        "opacity": (0.35 if run.discarded else 0.9) * (_BEHIND if thinned.is_thinned else 1.0),
        "hovertemplate": "step %{x}: %{y:.4g} ms<extra>%{fullData.name}</extra>",
    }


def _middles(report: Report, run: Run, values: Column) -> dict[str, Any]:
    """Return the median of each stretch of a run, at its middle."""
    bounds = [place * len(values) // _NUM_MIDDLES for place in range(_NUM_MIDDLES + 1)]
    stretches = [(begin, end, [one for one in values[begin:end] if one is not None]) for begin, end in pairwise(bounds)]
    points = Thinned(
        x=[(begin + end + 1) // 2 for begin, end, known in stretches if known],
        y=[median(known) for _, _, known in stretches if known],
        num=0,
    )
    curve = _curve(report, run, points)
    return {**curve, "line": {**curve["line"], "width": 2.4}}


def _trend_layout(quantity: _Quantity, runs: Sequence[Run]) -> dict[str, Any]:
    ordered = sorted(value for run in runs for value in quantity.by_run[run.run] if value is not None)
    low, high = ordered[0], ordered[-1]
    usual = quantile(ordered, _CLIPPED_SHARE)
    bound = usual + _CLIPPED_ROOM * max(usual - quantile(ordered, 0.5), 0.02 * usual)
    return {
        "xaxis": axis("step"),
        "yaxis": axis(f"{quantity.name}, ms", range=span(low, min(high, bound))),
        "hovermode": "closest",
    }


def _stretches(quantity: _Quantity, runs: Sequence[Run]) -> Html:
    """Return the medians of a dozen stretches of each run."""
    rows = []
    num = max(len(quantity.by_run[run.run]) for run in runs)
    for place in range(min(_NUM_ROWS, num)):
        begin, end = place * num // min(_NUM_ROWS, num), (place + 1) * num // min(_NUM_ROWS, num)
        row = [f"{begin + 1} to {end}"]
        for run in runs:
            known = [value for value in quantity.by_run[run.run][begin:end] if value is not None]
            row.append(f"{median(known):.4g} ({min(known):.4g} to {max(known):.4g})" if known else "-")
        rows.append(row)
    head = ["steps", *(f"run {run.run}, {run.arm}" for run in runs)]
    return table(head, rows, caption=f"Median, least and most of {quantity.name} in ms")
