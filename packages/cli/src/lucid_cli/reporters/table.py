"""One report as text: a row a metric, then steps, parity, captures, what went wrong, and the verdict."""

import shlex
from collections import Counter
from collections.abc import Iterable

from lucid_cli.reporters.kernels import render_kernels
from lucid_cli.reporters.layout import columns, labelled
from lucid_cli.reporters.monitoring import render_memory, render_monitoring
from lucid_cli.reporters.phases import render_phases
from lucid_cli.reporters.sentences import verdict_sentence, warning_sentence
from lucid_cli.reporters.words import (
    METRIC_NAMES,
    abbreviated,
    amount,
    counted,
    interval,
    metric_name,
    percent,
    reason_words,
    run_words,
    scale,
    value_words,
)
from lucid_profiler.compare import Analysis, CaptureCheck, MetricAnalysis
from lucid_profiler.pairs import PairedEffect
from lucid_profiler.reader import Report
from lucid_profiler.records import Run

_MAX_NOTES = 12
_MAX_VALUES = 40
_MAX_VALUE_CHARS = 120
SETTINGS_PART = "settings"
"""The part as which a script says what it was told, and under which flags its runs repeat."""
METRICS_PART = "metrics"

__all__ = ["environment_words", "render_report"]


def render_report(report: Report, analysis: Analysis) -> str:
    """Return the whole text, ending in a newline."""
    blocks = [
        _head(report, analysis),
        _metrics(report, analysis),
        render_phases(report, analysis),
        [
            *_steps(report),
            *_parity(report, analysis),
            *(line for located in report.located for line in labelled("located", located.text)),
            *_captures(report, analysis),
            *render_monitoring(report),
            *_exceptions(report, analysis),
        ],
        render_memory(report),
        render_kernels(report),
        [line for one in analysis.warnings for line in labelled("warning", warning_sentence(one, analysis))],
        labelled("verdict", verdict_sentence(analysis)),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _head(report: Report, analysis: Analysis) -> list[str]:
    header = report.header
    arms = " and ".join(arm.name for arm in header.arms)
    num_measured = analysis.num_pairs - analysis.num_discarded
    pairs = f"{num_measured} of {counted(header.pairs, 'pair')} of {arms} runs, {analysis.num_discarded} discarded"
    if analysis.num_included < num_measured:
        pairs += f", {analysis.num_included} in the statistics"
    when = header.created[:16].replace("T", " ")
    return [
        *labelled("command", abbreviated(shlex.join(header.command))),
        *labelled("pairs", f"{pairs}; order {header.order}, {when} UTC"),
        *labelled("where", environment_words(report)),
        *_values(report, "settings", SETTINGS_PART, is_flat=True),
        *_values(report, "metrics", METRICS_PART),
    ]


def _values(report: Report, label: str, part: str, *, is_flat: bool = False) -> list[str]:
    """Name the plain values of a part, those of lists and mappings inside it only where `is_flat`.

    Where runs differ in it, nothing is named here: parity has the word.
    """
    states = [state for state in report.states if state.part == part]
    if len({state.digest for state in states}) != 1:
        return []
    values = {name: value for name, value in states[0].values.items() if is_flat or "." not in name}
    shown = [f"{name}={value_words(value)}"[:_MAX_VALUE_CHARS] for name, value in values.items()]
    more = [f"and {len(shown) - _MAX_VALUES} more"] if len(shown) > _MAX_VALUES else []
    return labelled(label, ", ".join([*shown[:_MAX_VALUES], *more])) if shown else []


def environment_words(report: Report) -> str:
    """Name the GPU or processor, the driver and torch."""
    facts = {key: value for env in report.envs for key, value in env.identity.items() if value is not None}
    names = [str(facts[key]) for key in ("gpu_name", "cpu_model") if key in facts][:1]
    if "driver_major" in facts:
        names.append(f"driver {facts['driver_major']}")
    names += [f"{key} {facts[key]}" for key in ("torch", "python") if key in facts]
    return ", ".join(names) or "not recorded"


def _metrics(report: Report, analysis: Analysis) -> list[str]:
    names = sorted(analysis.metrics, key=lambda name: (*METRIC_NAMES, name).index(name))
    known = [name for name in names if analysis.metrics[name].base.n]
    lines = []
    if known:
        rows = [["", analysis.base, analysis.other, "ratio", "paired %", "range %", "95 % t %"]]
        for name in known:
            label = _wall_label(report) if name == "wall" else metric_name(name)
            rows += _metric_rows(label, analysis.metrics[name])
        lines += [*columns(rows), *_legend(report, analysis, known)]
    return [*lines, *_unknown(analysis, [name for name in names if name not in known])]


def _wall_label(report: Report) -> str:
    sources = sorted({run.wall.source for run in report.runs if run.wall is not None})
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


def _range(effect: PairedEffect) -> str:
    """Return the smallest and largest pair; one pair alone spans nothing."""
    return interval(effect.low, effect.high) if effect.n > 1 else "-"


def _legend(report: Report, analysis: Analysis, known: list[str]) -> list[str]:
    num = analysis.num_included
    if not num:
        return []
    change = f"change of {analysis.other} against {analysis.base}"
    if num == 1:
        text = f"The values of 1 pair. paired: {change}."
    else:
        text = (
            f"Medians, with smallest-largest below. paired: median {change} within {num} pairs; range: smallest and "
            f"largest pair, which hold the true median with {100 * (1 - 2.0 ** (1 - num)):.4g} %; t: interval of the "
            "mean change."
        )
    if "peak_rss" in known and any(run.agent.num_processes > 1 for run in report.runs):
        text += f" {metric_name('peak_rss')}: of the largest single process."
    missing = [
        f"{metric_name(name)}: {analysis.metrics[name].num_missing} of {counted(num, 'pair')} without a value "
        f"({_counted(analysis.metrics[name].reasons)}), so its range covers less."
        for name in known
        if analysis.metrics[name].num_missing
    ]
    return ["", *labelled("", " ".join([text, *missing]))]


def _unknown(analysis: Analysis, names: list[str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name in names:
        by_reason.setdefault(", ".join(map(reason_words, analysis.metrics[name].reasons)), []).append(metric_name(name))
    return [
        line
        for reason, unknown in by_reason.items()
        for line in labelled("unknown", f"{', '.join(unknown)}: {reason or 'no value'}")
    ]


def _steps(report: Report) -> list[str]:
    counts = {
        arm.name: [run.agent.num_steps for run in report.runs if run.arm == arm.name] for arm in report.header.arms
    }
    text = ", ".join(f"{name} {_span(nums)}" for name, nums in counts.items() if nums)
    dropped = sum(run.agent.num_dropped for run in report.runs)
    return labelled("steps", f"{text or 'no run'} in each run" + (f"; {dropped} records lost" if dropped else ""))


def _span(nums: list[int]) -> str:
    return f"{min(nums)}" if min(nums) == max(nums) else f"{min(nums)} to {max(nums)}"


def _parity(report: Report, analysis: Analysis) -> list[str]:
    parity = analysis.parity
    if parity.status == "not_observed":
        return labelled("parity", "not observed: no run left a digest of its state")
    compared = [pair for pair in report.pairs if pair.parity.status != "not_observed"]
    num_equal = sum(pair.parity.status == "equal" for pair in compared)
    pairs = f"{num_equal} of {counted(len(compared), 'pair')} equal"
    lines = labelled("parity", f"{pairs}, {_base_runs(analysis)}: {', '.join(parity.covered)}")
    if parity.difference is not None:
        lines += labelled("", f"first difference: {parity.difference.text}")
    nonfinite = [name for name, part in parity.parts.items() if part.nonfinite]
    return lines + (labelled("", f"NaN or infinity in {', '.join(nonfinite)}") if nonfinite else [])


def _base_runs(analysis: Analysis) -> str:
    """Say whether the base runs repeat."""
    if analysis.parity.status == "undecidable":
        return f"{analysis.base} runs differ among themselves"
    if analysis.parity.num_base_runs < 2 and analysis.parity.status == "equal":
        return f"one {analysis.base} run"
    if analysis.parity.num_base_runs < 2:
        return f"one {analysis.base} run, so nothing shows whether {analysis.base} runs repeat"
    return f"{analysis.base} runs agree among themselves"


def _captures(report: Report, analysis: Analysis) -> list[str]:
    return [
        line
        for arm, check in analysis.capture.items()
        for line in labelled(arm, _capture(check) + _overridden([run for run in report.runs if run.arm == arm]))
    ]


def _overridden(runs: list[Run]) -> str:
    num = sum(any(capture.overridden for capture in run.capture or ()) for run in runs)
    return f"; the arm's setting overrode an explicit capture_updates in {counted(num, 'run')}" if num else ""


def _capture(check: CaptureCheck) -> str:
    if not check.num_runs:
        return "no run in the statistics"
    replays = f"{counted(check.replays, 'replay')} of {counted(check.recordings, 'recording')}"
    runs = counted(check.num_runs, "run")
    return f"{replays if check.replays else 'no replays'} in {runs}" + (
        f"; native: {_counted(check.reasons)}" if check.reasons else ""
    )


def _counted(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason_words(reason)} ({count})" for reason, count in reasons.items())


def _exceptions(report: Report, analysis: Analysis) -> list[str]:
    lines = []
    if report.end is None or report.end.status != "complete":
        status = report.end.status if report.end else "without an end"
        lines += labelled("status", f"{status}, after {len(report.runs)} of {counted(len(report.header.slots), 'run')}")
    for run in report.runs:
        if run.status != "ok":
            lines += labelled("failed", f"run {run.run} (pair {run.pair}, {run.arm}): {run_words(run)}")
    for pair in analysis.excluded:
        lines += labelled("left out", f"pair {pair.pair}: {', '.join(pair.reasons)}")
    return lines + _notes(report.runs)


def _notes(runs: Iterable[Run]) -> list[str]:
    notes = Counter(note for run in runs for note in run.notes)
    lines = [
        line
        for note, num in notes.most_common(_MAX_NOTES)
        for line in labelled("note", f"{note} ({counted(num, 'run')})")
    ]
    return lines + (
        labelled("", f"and {counted(len(notes) - _MAX_NOTES, 'other note')}") if len(notes) > _MAX_NOTES else []
    )
