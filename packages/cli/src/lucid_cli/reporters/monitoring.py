"""What sampling beside the runs came to: how it went, what it cost, the energy's bounds, the memory's account."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from lucid_cli.reporters.layout import columns, followed, labelled
from lucid_cli.reporters.words import amount, at_best, counted, reason_words, scale
from lucid_profiler.monitored import MemoryAccount, MonitorReport
from lucid_profiler.reader import Report
from lucid_profiler.records import Run

_TIERS = {
    "tree": "process tree",
    "children": "its children",
    "pss": "memory with shared pages divided",
    "processes": "processes on the GPU",
}

__all__ = ["last_accounts", "render_memory", "render_monitoring", "unread_peak_words"]


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
    return [*words, *_cadence(monitors), *_gaps(monitors), *_faults(monitors)]


def _faults(monitors: Sequence[MonitorReport]) -> list[str]:
    """Say what makes samples doubtful, and what of them is missing."""
    events = sum((Counter(one.events) for one in monitors), Counter[str]())
    words = [f"{counted(count, 'event')} {name}" for name, count in events.items()]
    if errors := sum(one.num_nvml_errors or 0 for one in monitors):
        words.append(f"{counted(errors, 'question')} to the driver without an answer")
    if lost := sum(one.num_dropped_records or 0 for one in monitors):
        words.append(f"{counted(lost, 'record')} lost")
    if any(one.num_dropped_records is None for one in monitors):
        words.append("how many records were lost is not known of every run")
    return words


def _cadence(monitors: Sequence[MonitorReport]) -> list[str]:
    """Say for how long at most each of the things was not read that are read more rarely the more they cost."""
    longest: dict[str, int] = {}
    for name, of in (entry for one in monitors for entry in one.cadence.items()):
        longest[name] = max(longest.get(name, 0), of.get("longest_ns", 0))
    parts = [f"{_TIERS.get(name, name)} {longest_ns / 1e9:.1f} s" for name, longest_ns in longest.items() if longest_ns]
    return [f"longest time between two readings: {', '.join(parts)}"] if parts else []


def _gaps(monitors: Sequence[MonitorReport]) -> list[str]:
    gaps = Counter((gap.device, gap.reason) for one in monitors for gap in one.gaps)
    return [
        f"{counted(count, 'gap')} {f'of {device} alone ' if device else ''}({reason_words(reason)})"
        for (device, reason), count in gaps.items()
    ]


def _missing(reasons: Counter[str]) -> list[str]:
    return [f"nothing in {counted(count, 'run')} ({reason_words(reason)})" for reason, count in reasons.items()]


def _energy(runs: Sequence[Run]) -> list[str]:
    known = [
        energy
        for run in runs
        if run.monitor is not None and not run.discarded and run.status == "ok"
        for energy in run.monitor.energy
        if energy.value_j is not None
    ]
    if not known:
        return []
    sources = {
        "counter": "the driver's energy counter",
        "power_held": "power readings, each held until the next, which are means over about a second",
    }
    words = []
    for source in sorted({energy.source for energy in known}):
        found = [one for one in known if one.source == source]
        if any(one.bound_j is None for one in found):
            words.append(f"{sources[source]}; by how much it may be off is not known")
            continue
        bounds = [one.bound_j / one.value_j for one in found if one.bound_j and one.value_j]
        words.append(sources[source] + (f", {at_best(max(bounds))}" if bounds else ""))
    return labelled("energy", f"from {'; and from '.join(words)}")


def unread_peak_words(used_bytes: int) -> str:
    """Say that more was used than in the rows of an account."""
    scaled = scale("By", used_bytes)
    used = f"{amount(used_bytes, scaled)} {scaled[1]}"
    return f"for a short time {used} were used; whose they were was not read then, so the rows are of the next largest"


def render_memory(report: Report) -> list[str]:
    """Return the account of the device memory of one run of each arm."""
    return [line for run, account in last_accounts(report) for line in _account(run.arm, account)]


def last_accounts(report: Report) -> list[tuple[Run, MemoryAccount]]:
    """Return each arm's accounts of its last run that ended well, one a device; of its last run where none did."""
    found = []
    for arm in report.header.arms:
        runs = [(run, run.monitor.memory) for run in report.runs if run.arm == arm.name and run.monitor is not None]
        known = [(run, accounts) for run, accounts in runs if accounts]
        for run, accounts in sorted(known, key=lambda one: one[0].status == "ok")[-1:]:
            found += [(run, account) for account in accounts]
    return found


def _why(reason: str) -> str:
    """Return a reason, of a term or of one that it follows from, in words."""
    terms, colon, code = reason.rpartition(": ")
    return f"{terms.rpartition(': ')[2].replace('_', ' ')}{colon}{reason_words(code)}"


def _account(arm: str, account: MemoryAccount) -> list[str]:
    rows, reasons = [], []
    for row in account.rows:
        scaled = scale("By", row.value_bytes)
        value = f"{amount(row.value_bytes, scaled)} {scaled[1]}" if row.value_bytes is not None else "-"
        why = "estimated: " if row.is_estimate else ""
        why += _why(row.reason) if row.reason else "from other terms" if row.is_estimate else ""
        rows.append(["  " * (row.level + 1) + row.name, value])
        reasons.append(why)
    head = labelled("memory", f"{arm}, {account.uuid}, where the device's used memory was largest")
    lines = [*head, *followed(columns(rows), reasons)]
    if account.warning:
        lines += labelled("warning", account.warning)
    if account.unread_peak_bytes is not None:
        lines += labelled("", unread_peak_words(account.unread_peak_bytes))
    if account.num_times_warned:
        share = f"{account.num_times_warned} of {counted(account.num_times, 'time')}"
        lines += labelled("", f"over the run a residue was above 2 % at {share}")
    return lines
