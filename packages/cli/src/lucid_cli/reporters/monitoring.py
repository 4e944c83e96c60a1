"""What sampling beside the runs came to: how it went, what it cost, the energy's bounds, the memory's account."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from lucid_cli.reporters.layout import columns, labelled
from lucid_cli.reporters.words import amount, counted, reason_words, scale
from lucid_profiler.monitored import MemoryAccount, MonitorReport
from lucid_profiler.reader import Report
from lucid_profiler.records import Run

__all__ = ["render_memory", "render_monitoring"]


def render_monitoring(report: Report) -> list[str]:
    """Return the lines about sampling; none for a report that was written without it."""
    monitors = [run.monitor for run in report.runs if run.monitor is not None]
    if not monitors:
        return []
    sampled = [monitor for monitor in monitors if monitor.num_samples]
    reasons = Counter(monitor.reason for monitor in monitors if monitor.reason)
    lines = labelled("sampled", "; ".join([*_quality(sampled), *_missing(reasons)])) if sampled or reasons else []
    return [*lines, *_energy(report.runs)]


def _quality(monitors: Sequence[MonitorReport]) -> list[str]:
    if not monitors:
        return []
    num = sum(monitor.num_samples for monitor in monitors)
    known = [monitor.num_missed for monitor in monitors if monitor.num_missed is not None]
    missed = f"{sum(known)} missed" if len(known) == len(monitors) else "how many were missed is not known"
    words = [f"{counted(num, 'sample')} in {counted(len(monitors), 'run')}, {missed}"]
    late = [monitor.late_median_ns for monitor in monitors if monitor.late_median_ns is not None]
    latest = [monitor.late_max_ns for monitor in monitors if monitor.late_max_ns is not None]
    if late and latest:
        words[0] += f", late by {median(late) / 1e6:.2f} ms (median), {max(latest) / 1e6:.1f} ms (most)"
    shares = [one.own_cpu_s / one.wall_s for one in monitors if one.own_cpu_s is not None and one.wall_s]
    if shares:
        words.append(f"its own CPU share {median(shares):.1%}")
    nvml = [one.nvml_s / one.wall_s for one in monitors if one.devices and one.nvml_s and one.wall_s]
    if nvml:
        words.append(f"inside NVML {median(nvml):.2%} of the time")
    gaps = Counter(gap.reason for one in monitors for gap in one.gaps)
    events = sum((Counter(one.events) for one in monitors), Counter[str]())
    words += [f"{counted(count, 'gap')} ({reason_words(reason)})" for reason, count in gaps.items()]
    words += [f"{counted(count, 'event')} {name}" for name, count in events.items()]
    dropped = sum(one.num_dropped_records for one in monitors)
    return words + ([f"{counted(dropped, 'record')} lost"] if dropped else [])


def _missing(reasons: Counter[str]) -> list[str]:
    return [f"nothing in {counted(count, 'run')} ({reason_words(reason)})" for reason, count in reasons.items()]


def _energy(runs: Sequence[Run]) -> list[str]:
    known = [
        energy
        for run in runs
        if run.monitor is not None and not run.discarded
        for energy in run.monitor.energy
        if energy.value_j is not None
    ]
    if not known:
        return []
    bounds = [
        energy.bound_j / energy.value_j
        for energy in known
        if energy.source == "counter" and energy.bound_j is not None and energy.value_j
    ]
    sources = {
        "counter": "the driver's energy counter",
        "power_held": "power readings, each held until the next, which are means over about a second",
    }
    text = f"from {' and '.join(sorted({sources[energy.source] for energy in known}))}"
    bound = f", the counter to {max(bounds):.1%} or better" if bounds else ""
    return labelled("energy", text + bound)


def render_memory(report: Report) -> list[str]:
    """Return the account of the device memory of the run of each arm that came last."""
    lines: list[str] = []
    for arm in report.header.arms:
        runs = [run for run in report.runs if run.arm == arm.name and run.monitor is not None and run.monitor.memory]
        for account in runs[-1].monitor.memory if runs and runs[-1].monitor is not None else ():
            lines += _account(arm.name, account)
    return lines


def _why(reason: str) -> str:
    """Return a reason, of a term or of one that it follows from, in words."""
    term, colon, code = reason.rpartition(": ")
    return f"{term.replace('_', ' ')}{colon}{reason_words(code)}"


def _account(arm: str, account: MemoryAccount) -> list[str]:
    rows = []
    for row in account.rows:
        scaled = scale("By", row.value_bytes)
        value = f"{amount(row.value_bytes, scaled)} {scaled[1]}" if row.value_bytes is not None else "-"
        why = "estimated: " if row.is_estimate else ""
        why += _why(row.reason) if row.reason else "from other terms" if row.is_estimate else ""
        rows.append(["  " * (row.level + 1) + row.name, value, why])
    head = labelled("memory", f"{arm}, {account.uuid}, where the device's used memory was largest")
    lines = [*head, *columns(rows)]
    if account.warning:
        lines += labelled("warning", account.warning)
    if account.num_times_warned:
        share = f"{account.num_times_warned} of {counted(account.num_times, 'time')}"
        lines += labelled("", f"over the run a residue was above 2 % at {share}")
    return lines
