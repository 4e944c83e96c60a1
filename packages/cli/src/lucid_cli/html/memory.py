"""The account of the device's memory over each run, and the memory of the process on the host."""

from collections.abc import Mapping, Sequence
from typing import Any

from lucid_cli.html.charts import Chart, LegendItem, View, arm_color, axis, rounded
from lucid_cli.html.markup import Html, chart_text, table, tag
from lucid_cli.html.section import Section, missing
from lucid_cli.html.series import Column, Line, Series, line, origin_ns, quantile, run_name, scaled, viewed
from lucid_cli.html.thinning import bins_for, kept, thin
from lucid_cli.reporters.monitoring import last_accounts, unread_peak_words
from lucid_cli.reporters.words import amount, counted, reason_words, scale
from lucid_profiler.monitored import MemoryAccount
from lucid_profiler.reader import Report
from lucid_profiler.records import Run

_MIB = 2.0**20
_PREFIX = "memory:"
# From the bottom of the stack, each with the whole that is drawn where it is not known.
_PARTS: Mapping[str, tuple[str, str | None]] = {
    "driver_reserved": ("reserved by the driver", None),
    "others": ("other processes", None),
    "context": ("CUDA context and libraries", "target"),
    "allocated": ("allocated", "torch_reserved"),
    "graph_pools": ("private pools of graphs", "torch_reserved"),
    "cached": ("cached", "torch_reserved"),
    "torch_reserved": ("reserved by torch, not split", "target"),
    "target_residue": ("residue of the run", "target"),
    "target": ("this run, not split", None),
    "device_residue": ("residue of the device", None),
}
_COLORS = {name: f"--cat-{place % 8}" for place, name in enumerate(_PARTS)}
_COLORS |= {"device_residue": "--muted", "target": "--cat-2", "context": "--cat-4", "cached": "--cat-5"}

DRAWN = {
    "memory": ("mono_ns", "device_used_bytes", *(f"{name}_bytes" for name in _PARTS)),
    "host": ("mono_ns", "rss_bytes"),
}
"""Columns by the kind of their series."""

__all__ = ["DRAWN", "memory_section"]


def memory_section(report: Report, series: Series) -> Section:
    """Return the charts of memory, or why there are none."""
    parts: list[Html | Chart] = []
    if account := _account_chart(report, series):
        parts += [account, *_peaks(report)]
    else:
        parts.append(missing(_why(report)))
    if resident := _resident(report, series):
        parts.append(resident)
    return Section(ident="memory", title="Memory", parts=parts)


def _why(report: Report) -> str:
    reasons = dict.fromkeys(
        reason
        for run in report.runs
        for reason in (
            *(run.metrics[name].reason for name in ("peak_allocated", "gpu_process_memory") if name in run.metrics),
            run.monitor.nvml_reason if run.monitor else "monitor_off",
        )
        if reason
    )
    known = "; ".join(map(reason_words, reasons)) or "the report holds no readings of it"
    return f"There is no account of a GPU's memory over time: {known}."


def _account_chart(report: Report, series: Series) -> Chart | None:
    found = [
        (run, name[len(_PREFIX) :])
        for run in viewed(report.runs)
        for name in series.names(run.run)
        if name.startswith(_PREFIX)
    ]
    num_bins = bins_for(len(found) * len(_PARTS) * 4)
    views = [
        view
        for run, uuid in found
        if (view := _view(series, run, uuid, num_bins=num_bins, several=_several(found, run)))
    ]
    if not views:
        return None
    drawn = dict.fromkeys(str(trace["name"]) for view in views for trace in view.traces)
    items = [LegendItem(label=label, color=_COLORS[name]) for name, (label, _) in _PARTS.items() if label in drawn]
    return Chart(
        ident="memory-account",
        title="Where the GPU's memory was",
        description="The areas add up to what the driver calls used, the line on top. Time is from the begin of the "
        "run's wall interval. A residue is what no term explains; a negative one is not drawn, the table has it.",
        views=views,
        view_name="Run",
        legend=[*items, LegendItem(label="used on the device", color="--strong", shape="line")],
        height=400,
        can_zoom=True,
        notes=_notes(report, found, series, num_bins=num_bins),
    )


def _several(found: Sequence[tuple[Run, str]], run: Run) -> bool:
    return sum(one.run == run.run for one, _ in found) > 1


def _notes(report: Report, found: Sequence[tuple[Run, str]], series: Series, *, num_bins: int) -> list[str]:
    num_runs, num_shown = len(report.runs), len({run.run for run, _ in found})
    longest = max(len(series.column(run.run, _PREFIX + uuid, "mono_ns")) for run, uuid in found)
    notes = [f"{num_shown} of {num_runs} runs are here."] if num_shown < num_runs else []
    if longest > 2 * num_bins:
        notes.append(f"Of up to {longest:,} times those with the least and most use in {num_bins} stretches are drawn.")
    return notes


def _view(series: Series, run: Run, uuid: str, *, num_bins: int, several: bool) -> View | None:
    times = series.column(run.run, _PREFIX + uuid, "mono_ns")
    origin = origin_ns(run, times)
    names = ("device_used", *_PARTS)
    columns = {name: series.column(run.run, _PREFIX + uuid, f"{name}_bytes") for name in names}
    places = kept(columns["device_used"], num_bins)
    lines = {
        name: line([times[place] for place in places], [column[place] for place in places], origin=origin, divisor=_MIB)
        for name, column in columns.items()
    }
    used = lines["device_used"]
    if not any(value is not None for value in used.values):
        return None
    areas = [_area(name, used.seconds, _drawn(name, lines)) for name in _PARTS]
    top = {**_curve("used on the device", used, "--strong"), "line": {"color": "--strong", "width": 1.8, "shape": "hv"}}
    label = run_name(run) + (f", {uuid}" if several else "")
    return View(
        label=label,
        traces=[*(area for area in areas if any(area["y"])), top],
        layout={
            "xaxis": axis("seconds"),
            "yaxis": axis("MiB", rangemode="tozero"),
            "hovermode": "x unified",
        },
        numbers=_summaries(columns, label),
    )


def _drawn(name: str, lines: Mapping[str, Line]) -> list[float]:
    """Return the height of an area at each time: 0 where it is not known, negative, or where its parts are drawn."""
    values = [value if value is not None and value > 0 else 0.0 for value in lines[name].values]
    if name == "torch_reserved":
        return _unless(lines["allocated"].values, values)
    if name == "target":
        return _unless(lines["torch_reserved"].values, values)
    if _PARTS[name][1] == "target":
        return _where(lines["torch_reserved"].values, values)
    return values


def _unless(known: Column, values: Sequence[float]) -> list[float]:
    return [0.0 if one is not None else value for one, value in zip(known, values, strict=True)]


def _where(known: Column, values: Sequence[float]) -> list[float]:
    return [value if one is not None else 0.0 for one, value in zip(known, values, strict=True)]


def _area(name: str, seconds: Column, values: Sequence[float]) -> dict[str, Any]:
    label, _ = _PARTS[name]
    return {
        "type": "scatter",
        "mode": "lines",
        "stackgroup": "memory",
        "x": rounded(seconds),
        "y": rounded(values),
        "name": label,
        "line": {"width": 0, "color": _COLORS[name], "shape": "hv"},
        "fillcolor": _COLORS[name],
        "hovertemplate": "%{y:,.0f} MiB",
    }


def _curve(name: str, values: Line, color: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": rounded(values.seconds),
        "y": rounded(values.values),
        "name": name,
        "line": {"color": color, "width": 1.6},
        "hovertemplate": "%{y:,.0f} MiB",
    }


def _summaries(columns: Mapping[str, Column], label: str) -> Html:
    """Return the table of all times, also of those that are not drawn."""
    rows = []
    for name, values in columns.items():
        title = "used on the device" if name == "device_used" else _PARTS[name][0]
        known = sorted(value for value in scaled(values, _MIB) if value is not None)
        row = [f"{value:,.1f}" for value in (known[0], quantile(known, 0.5), known[-1])] if known else ["-"] * 3
        rows.append([title, *row, f"{len(known)} of {len(values)}"])
    return table(["MiB", "least", "median", "most", "times known"], rows, caption=f"Memory of {label}")


def _peaks(report: Report) -> list[Html]:
    """Return the account at the moment of the largest use, of one run of each arm."""
    return [part for run, account in last_accounts(report) for part in _peak(run_name(run), account)]


def _peak(name: str, account: MemoryAccount) -> list[Html]:
    rows = []
    for row in account.rows:
        scaled = scale("By", row.value_bytes)
        value = f"{amount(row.value_bytes, scaled)} {scaled[1]}" if row.value_bytes is not None else "-"
        term, colon, code = (row.reason or "").rpartition(": ")
        why = f"{term.replace('_', ' ')}{colon}{reason_words(code)}" if code else ""
        name_cell = tag("span", row.name, class_=f"level-{min(row.level, 4)}")
        rows.append([name_cell, f"estimated {why}".strip() if row.is_estimate else why, value])
    title = f"{name}: where most was used, {account.uuid}"
    warned = [account.warning] if account.warning else []
    if account.unread_peak_bytes is not None:
        warned.append(unread_peak_words(account.unread_peak_bytes))
    if account.num_times_warned:
        times = counted(account.num_times, "time")
        warned.append(f"over the run a residue was above 2 % at {account.num_times_warned} of {times}")
    return [
        tag("h3", title),
        table(["term", "why it is not known", "memory"], rows, caption=title, num_text=2),
        *(tag("p", one, class_="note") for one in warned),
    ]


def _resident(report: Report, series: Series) -> Chart | None:
    found = [(run, name) for run in viewed(report.runs) if (name := series.with_column(run.run, "host", "rss_bytes"))]
    if not found:
        return None
    num_bins = bins_for(len(found) * 8)
    traces, rows, is_thinned = [], [], False
    for run, name in found:
        times = series.column(run.run, name, "mono_ns")
        whole = line(times, series.column(run.run, name, "rss_bytes"), origin=origin_ns(run, times), divisor=_MIB)
        known = sorted(value for value in whole.values if value is not None)
        if not known:
            continue
        thinned = thin(whole.seconds, whole.values, num_bins)
        is_thinned |= thinned.is_thinned
        curve = _curve(
            chart_text(run_name(run)), Line(seconds=thinned.x, values=thinned.y), arm_color(report.header, run.arm)
        )
        traces.append({**curve, "opacity": 0.4 if run.discarded else 0.9})
        rows.append([run_name(run), *(f"{value:,.1f}" for value in (known[0], quantile(known, 0.5), known[-1]))])
    numbers = table(["MiB", "least", "median", "most"], rows, caption="Resident memory by run")
    layout = {"xaxis": axis("seconds"), "yaxis": axis("MiB", rangemode="tozero"), "hovermode": "closest"}
    view = View(label="all runs", traces=traces, layout=layout, numbers=numbers)
    if not traces:
        return None
    return Chart(
        ident="memory-resident",
        title="Resident memory of the run's processes",
        description="All processes of a run added up, so that what they share counts more than once. Time is from the "
        "begin of the run's wall interval.",
        views=[view],
        legend=[
            LegendItem(label=a.name, color=arm_color(report.header, a.name), shape="line") for a in report.header.arms
        ],
        height=320,
        can_zoom=True,
        notes=[f"Of longer series the least and most of {num_bins} stretches are drawn."] if is_thinned else [],
    )
