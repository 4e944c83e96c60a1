"""What the report comes to: the verdict of each comparison, its figures, and the runs."""

import shlex
from collections import Counter
from collections.abc import Sequence

from lucid_cli.html.charts import Chart
from lucid_cli.html.energy import METRIC as ENERGY
from lucid_cli.html.energy import energy_words
from lucid_cli.html.markup import Html, cells, details, listed, table, tag, text
from lucid_cli.html.pairs import pair_charts
from lucid_cli.html.parity import WORDS
from lucid_cli.html.section import Section, missing
from lucid_cli.reporters.sentences import parity_status, verdict_sentence, warning_sentence
from lucid_cli.reporters.words import (
    METRIC_NAMES,
    amount,
    counted,
    interval,
    metric_name,
    percent,
    reason_words,
    run_words,
    scale,
)
from lucid_profiler.analysis import included_pairs
from lucid_profiler.compare import Analysis, MetricAnalysis
from lucid_profiler.reader import Report
from lucid_profiler.records import Run

MAX_RUNS = 200
MAX_METRICS = 100
MAX_NOTES = 40
MAX_CHARS = 600
_MEDIANS = "Medians, with the smallest and the largest run below."
_ENERGY = " Below energies stands by how much they are off at most, and what they were read from."
_COUNTED_STEPS = (
    "Optimizer steps are those of all optimizers in all processes of a run together; step times are of one optimizer."
)

__all__ = ["banner", "comparison_section", "runs_section"]


def banner(report: Report, analyses: tuple[Analysis, ...]) -> Html:
    """Return the top of the page: what was measured and what came of it."""
    header = report.header
    command = shlex.join(header.command)
    facts = [
        ("command", tag("code", command if len(command) <= MAX_CHARS else f"{command[:MAX_CHARS]} …")),
        ("arms", ", ".join(arm.name for arm in header.arms)),
        ("measured", f"{header.created[:16].replace('T', ' ')} UTC, order {header.order}"),
    ]
    return tag(
        "header",
        tag("h1", "Report of paired training runs"),
        [_verdict(analysis, header.alpha, is_named=len(analyses) > 1) for analysis in analyses],
        [tag("p", warning, class_="note") for warning in _incomplete(report)],
        tag("dl", [[tag("dt", name), tag("dd", value)] for name, value in facts], class_="facts"),
    )


def _verdict(analysis: Analysis, alpha: float, *, is_named: bool) -> Html:
    decision = analysis.verdict.decision
    headline = "noise" if analysis.is_control else decision.replace("_", " ")
    sentence = verdict_sentence(analysis, alpha=alpha).removeprefix(f"{headline}: ")
    name = f"{analysis.other} against {analysis.base}: " if is_named else ""
    return tag(
        "p",
        tag("strong", f"{name}{headline}"),
        tag("span", sentence),
        class_=f"verdict {decision}",
    )


def _incomplete(report: Report) -> list[str]:
    status = report.end.status if report.end else "without an end"
    sentences = [warning[:MAX_CHARS] for warning in report.warnings]
    if status != "complete":
        planned = counted(len(report.header.slots), "run")
        sentences.append(f"The report is {status}, after {len(report.runs)} of {planned}.")
    for resume in report.resumes:
        where = "the same GPUs" if resume.same_devices else "other GPUs of the same model"
        sentences.append(f"Resumed {resume.created[:16].replace('T', ' ')} UTC on {where}: block {resume.block}.")
    return sentences


def comparison_section(report: Report, analysis: Analysis, *, place: int, is_only: bool) -> Section:
    """Return the figures and the pairs of one comparison."""
    title = "Comparison" if is_only else f"{analysis.other} against {analysis.base}"
    parts: list[Html | Chart] = []
    if analysis.is_control:
        parts.append(tag("p", f"{analysis.other} is {analysis.base} once more: what differs here is noise."))
    if analysis.is_different:
        parts.append(tag("p", f"{analysis.other} is declared to compute something else: parity is not asked of it."))
    parts.append(_tiles(analysis))
    parts += [tag("p", warning_sentence(one, analysis), class_="note") for one in analysis.warnings]
    parts += [
        tag("p", f"Left out: pair {pair.pair}, {', '.join(pair.reasons)}.", class_="note") for pair in analysis.excluded
    ]
    parts += pair_charts(report, analysis, place=place)
    parts.append(_metrics(analysis, report.header.alpha, energy=_energy(report, analysis)))
    return Section(ident=f"comparison-{place}", title=title, parts=parts)


def _tiles(analysis: Analysis) -> Html:
    primary = analysis.metrics.get(analysis.verdict.metric)
    num_measured = analysis.num_pairs - analysis.num_discarded
    found = [
        (metric_name(analysis.verdict.metric), _change(primary), _interval(primary)),
        ("parity", parity_status(analysis, WORDS), ", ".join(analysis.parity.deciding)),
        (
            "pairs in the statistics",
            f"{analysis.num_included} of {num_measured}",
            f"and {analysis.num_discarded} discarded",
        ),
    ]
    for name in ("peak_allocated", "gpu_energy", "peak_rss"):
        metric = analysis.metrics.get(name)
        if metric is not None and metric.effect is not None and len(found) < 5:
            found.append((metric_name(name), _change(metric), _interval(metric)))
    return tag(
        "ul",
        [
            tag("li", tag("span", name, class_="quiet"), tag("strong", value), tag("span", more, class_="quiet"))
            for name, value, more in found
        ],
        class_="tiles",
    )


def _change(metric: MetricAnalysis | None) -> str:
    effect = metric.effect if metric else None
    return f"{percent(effect.median)} %" if effect else "no value"


def _interval(metric: MetricAnalysis | None) -> str:
    effect = metric.effect if metric else None
    if effect is None or effect.t_low is None:
        return "no interval"
    return f"t interval {interval(effect.t_low, effect.t_high)} %"


def _energy(report: Report, analysis: Analysis) -> list[str]:
    """Return of each arm to how much its energy is right."""
    pairs = included_pairs(report, analysis.other or None)
    return [energy_words([pair[side] for pair in pairs]) for side in (0, 1)]


def _metrics(analysis: Analysis, alpha: float, *, energy: Sequence[str]) -> Html:
    """Return the table of the metrics, with a line below the energy of each arm, and those without a value."""
    names = sorted(analysis.metrics, key=lambda name: (*METRIC_NAMES, name).index(name))
    known = [name for name in names if analysis.metrics[name].base.n][:MAX_METRICS]
    unknown = [
        f"{metric_name(name)}: {', '.join(map(reason_words, analysis.metrics[name].reasons)) or 'no value'}"
        for name in names
        if not analysis.metrics[name].base.n
    ]
    head = [
        "metric",
        "change",
        analysis.base,
        analysis.other,
        "ratio",
        "paired %",
        "range %",
        f"{100 * (1 - alpha):g} % t %",
    ]
    below = {ENERGY: energy}
    rows = [_metric(name, analysis.metrics[name], below.get(name, ("", ""))) for name in known]
    shown = table(head, rows, caption="All metrics, over the pairs in the statistics", num_text=2) if rows else Html("")
    why = details("Without a value", listed(unknown)) if unknown else Html("")
    return tag(
        "div",
        tag("h3", "All metrics"),
        tag("p", _MEDIANS + (_ENERGY if any(energy) else ""), class_="quiet") if rows else Html(""),
        shown if rows else missing("No metric has a value in a pair that is in the statistics."),
        why,
    )


def _metric(name: str, metric: MetricAnalysis, below: Sequence[str]) -> tuple[str, ...]:
    scaled = scale(metric.unit, metric.base.median or metric.other.median)
    arms = [
        Html(
            text(f"{amount(arm.median, scaled)} {scaled[1]}")
            + tag("small", f"{amount(arm.min, scaled)} to {amount(arm.max, scaled)}")
            + (tag("small", more) if more else "")
        )
        for arm, more in zip((metric.base, metric.other), below, strict=True)
    ]
    effect, ratio = metric.effect, metric.ratio_of_medians
    return cells(
        metric_name(name),
        metric.change.replace("_", " "),
        *arms,
        f"{ratio:.4f}" if ratio is not None else "",
        percent(effect.median if effect else None),
        interval(effect.low, effect.high) if effect and effect.n > 1 else reason_words(metric.effect_reason or ""),
        interval(effect.t_low, effect.t_high) if effect else "",
    )


def runs_section(report: Report) -> Section:
    """Return a table of the runs, their notes, and what the last ones printed."""
    rows = [_run(run) for run in report.runs[:MAX_RUNS]]
    head = ["run", "pair", "arm", "how it ended", "wall", "optimizer steps", "samples"]
    parts: list[Html] = []
    parts.append(table(head, rows, caption="Runs", num_text=4) if rows else missing("The report holds no run."))
    if rows:
        parts.append(tag("p", _COUNTED_STEPS, class_="quiet"))
    if len(report.runs) > MAX_RUNS:
        parts.append(tag("p", f"The first {MAX_RUNS} of {len(report.runs)} runs are listed.", class_="quiet"))
    notes = Counter(note[:MAX_CHARS] for run in report.runs for note in run.notes).most_common(MAX_NOTES)
    if notes:
        parts += [tag("h3", "Notes"), listed(f"{note} ({counted(num, 'run')})" for note, num in notes)]
    if report.runs and report.runs[-1].output_tail:
        last = report.runs[-1]
        parts.append(details(f"The end of what run {last.run} printed", tag("pre", last.output_tail, tabindex="0")))
    return Section(ident="runs", title="Runs", parts=parts)


def _run(run: Run) -> list[str]:
    scaled = scale("s", (run.wall.end_ns - run.wall.begin_ns) / 1e9 if run.wall else None)
    wall = f"{amount((run.wall.end_ns - run.wall.begin_ns) / 1e9, scaled)} {scaled[1]}" if run.wall else "-"
    ended = "ok" if run.status == "ok" else run_words(run)
    if run.taints:
        ended += f"; {', '.join(run.taints)}"
    return [
        f"{run.run}{' (discarded)' if run.discarded else ''}",
        str(run.pair),
        run.arm,
        ended,
        wall,
        str(run.agent.num_steps),
        str(run.monitor.num_samples) if run.monitor else "-",
    ]
