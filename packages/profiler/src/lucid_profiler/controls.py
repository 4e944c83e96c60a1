"""What pairs of the base with itself say: how far apart two runs are that do the same."""

from collections.abc import Sequence

from lucid_profiler.drift import RESOLUTION, WARNING_WORDS, AnalysisWarning
from lucid_profiler.metrics import MetricAnalysis
from lucid_profiler.pairs import MIN_PAIRS

__all__ = ["control_warning"]


def control_warning(metric: MetricAnalysis, warnings: Sequence[AnalysisWarning]) -> AnalysisWarning | None:
    """Warn if the base differs from itself: the t interval of at least three control pairs excludes 0.

    Of an exact metric any difference is one, since equal runs give equal numbers. A difference that the drift rule
    explains by the order of the control pairs says nothing about other pairs, and is not warned of.

    Args:
        metric: The primary metric over the control pairs.
        warnings: Of those pairs.
    """
    if any(warning.code == "drift_explains" for warning in warnings) or not _differs(metric):
        return None
    effect = metric.effect
    numbers: dict[str, float] = {"num_pairs": metric.base.n}
    if effect is not None and effect.t_low is not None and effect.t_high is not None:
        numbers |= {"effect": effect.mean, "low": effect.t_low, "high": effect.t_high}
    return AnalysisWarning(code="control_differs", words=WARNING_WORDS["control_differs"], numbers=numbers)


def _differs(metric: MetricAnalysis) -> bool:
    if metric.exact:
        return metric.change not in {"no_change", "unknown"}
    if metric.effect is None or metric.effect.n < MIN_PAIRS or abs(metric.effect.mean) <= RESOLUTION:
        return False
    return metric.change not in {"no_change", "inconclusive", "unknown"}
