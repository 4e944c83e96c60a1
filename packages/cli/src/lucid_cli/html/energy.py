"""By how much the energy of an arm may be off, and what it was read from."""

import math
from collections.abc import Sequence
from fractions import Fraction

from lucid_cli.reporters.words import at_best
from lucid_profiler.monitored import DeviceEnergy
from lucid_profiler.records import Run

METRIC = "gpu_energy"
_SOURCES = {"counter": "counter", "power_held": "power readings"}

__all__ = ["METRIC", "energy_words"]


def energy_words(runs: Sequence[Run]) -> str:
    """Return to how much the energies of runs, and so their median, are right, rounded up; nothing without any."""
    by_run = [run.monitor.energy for run in runs if run.monitor is not None and _is_known(run)]
    sources = dict.fromkeys(_SOURCES[one.source] for energies in by_run for one in energies)
    if not sources:
        return ""
    shares = [_share(energies) for energies in by_run]
    known = [share for share in shares if share is not None]
    if len(known) < len(shares):
        return f"no bound ({' and '.join(sources)})"
    return f"{at_best(max(known))} ({' and '.join(sources)})"


def _is_known(run: Run) -> bool:
    metric = run.metrics.get(METRIC)
    return metric is not None and metric.value is not None


def _share(energies: Sequence[DeviceEnergy]) -> Fraction | None:
    """Return the bound of a run's energy as a share of it, exactly; None where there is none."""
    bounds = [one.bound_j for one in energies if one.bound_j is not None and math.isfinite(one.bound_j)]
    values = [one.value_j for one in energies if one.value_j is not None and math.isfinite(one.value_j)]
    total = sum(map(Fraction, values), Fraction())
    if len(bounds) < len(energies) or len(values) < len(energies) or total <= 0:
        return None
    return sum(map(Fraction, bounds), Fraction()) / total
