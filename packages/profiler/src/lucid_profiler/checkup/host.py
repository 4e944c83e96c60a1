"""The processors and the memory of the machine: who else works there, and how their clocks are driven."""

import os
from pathlib import Path

import psutil

from lucid_profiler.checkup.container import memory_limits
from lucid_profiler.checkup.files import read_text
from lucid_profiler.checkup.finding import Finding, Level, size_words, unknown

__all__ = ["look_at_host"]

MAX_LOAD = 0.25
"""Running threads a processor, one minute's mean, above which others are said to work."""
MIN_FREE_BYTES = 2 * 2**30
_SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"})


def look_at_host(root: Path = Path("/")) -> list[Finding]:
    """Return the findings about processors and memory.

    Args:
        root: Where /proc and /sys are.
    """
    return [_governor(root), _load(), _clock_source(root), _memory(root)]


def _governor(root: Path) -> Finding:
    names = [
        text
        for cpu in _usable_cpus()
        if (text := read_text(root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor").text)
    ]
    if not names:
        return unknown(
            "cpu_governor", "not_supported", "the system shows no governor, as in most virtual machines and containers"
        )
    found = sorted(set(names))
    level: Level = "ok" if found == ["performance"] else "warning"
    return Finding(code="cpu_governor", level=level, found=" and ".join(found), value=found)


def _usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _load() -> Finding:
    num_cpus = os.cpu_count() or 1
    try:
        load = os.getloadavg()[0]
    except OSError:
        return unknown("cpu_load", "not_supported", "the system tells no load")
    level: Level = "warning" if load > MAX_LOAD * num_cpus else "ok"
    words = f"{load:.2f} running threads on {num_cpus} processor{'s' if num_cpus != 1 else ''}, mean of one minute"
    return Finding(code="cpu_load", level=level, found=words, value={"load_1min": load, "num_cpus": num_cpus})


def _clock_source(root: Path) -> Finding:
    read = read_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not read.text:
        return unknown("clock_source", read.reason or "not_supported", "the system does not name its clock source")
    return Finding(
        code="clock_source", level="warning" if read.text in _SLOW_CLOCKS else "ok", found=read.text, value=read.text
    )


def _memory(root: Path) -> Finding:
    """Judge by what is left on the machine or, where that is less, below the container's limit."""
    machine = psutil.virtual_memory().available
    rooms = [limit.bytes - limit.used_bytes for limit in memory_limits(root) if limit.used_bytes is not None]
    available = max(0, min([machine, *rooms]))
    where = "on the machine" if available == machine else "below the container's limit"
    return Finding(
        code="memory_free",
        level="warning" if available < MIN_FREE_BYTES else "ok",
        found=f"{size_words(available)} available {where}",
        value=available,
    )
