"""How often the comparison of two reports is right: pairs drawn with a known truth, judged as the package judges them.

    python tools/bench/simulated_differences.py

prints the table of docs/statistics.md, the same at every call.
"""

import math
import random
from dataclasses import dataclass

from lucid_profiler.between import judged, margin_logs, measured_interval
from lucid_profiler.pairs import WelchInterval

ALPHA = 0.05
MARGIN = 1.0
"""Percent within which effects are called the same."""
EFFECT = math.log(0.9)
"""Of the first report."""

__all__ = ["SETTINGS", "Rates", "Setting", "rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Two reports: pairs in each, and the standard deviation of their pairs' effects."""

    num_pairs: tuple[int, int]
    sd: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Shares of simulated comparisons."""

    false: float
    """Better or worse although the effects are equal."""
    covered: float
    """The interval holds the true difference."""
    false_same: float
    """The same within the margin although the true difference is the margin."""
    false_failure: float
    """A gate fails although the true difference is its limit."""
    same: float
    """The same within the margin where the effects are equal."""


_SD = 0.003 * math.sqrt(2)
SETTINGS = (
    Setting(num_pairs=(6, 6), sd=(_SD, _SD)),
    Setting(num_pairs=(3, 3), sd=(_SD, _SD)),
    Setting(num_pairs=(10, 10), sd=(_SD, _SD)),
    Setting(num_pairs=(3, 10), sd=(_SD, _SD)),
    Setting(num_pairs=(6, 6), sd=(_SD, 4 * _SD)),
    Setting(num_pairs=(10, 3), sd=(_SD, 4 * _SD)),
)


def rates(setting: Setting, num_comparisons: int) -> Rates:
    """Simulate comparisons; the same setting gives the same ones."""
    rng = random.Random(repr(setting))
    _, high = margin_logs(MARGIN)
    false = covered = false_same = false_failure = same = 0
    for _ in range(num_comparisons):
        equal = _interval(setting, rng, 0.0)
        false += judged(equal, "lower").verdict in {"better", "worse"}
        covered += equal.low <= 0.0 <= equal.high
        same += judged(equal, "lower", MARGIN).verdict == "same"
        at_limit = _interval(setting, rng, high)
        false_same += judged(at_limit, "lower", MARGIN).verdict == "same"
        false_failure += at_limit.low > high
    return Rates(
        false=false / num_comparisons,
        covered=covered / num_comparisons,
        false_same=false_same / num_comparisons,
        false_failure=false_failure / num_comparisons,
        same=same / num_comparisons,
    )


def _interval(setting: Setting, rng: random.Random, difference: float) -> WelchInterval:
    sides = [
        [rng.gauss(mean, sd) for _ in range(num)]
        for num, sd, mean in zip(setting.num_pairs, setting.sd, (EFFECT, EFFECT + difference), strict=True)
    ]
    interval = measured_interval(sides[0], sides[1], alpha=ALPHA)
    if interval is None:
        raise ValueError("each report needs two pairs")
    return interval


def main() -> None:
    """Print the table."""
    columns = ("pairs", "noise of the pairs %", "false", "interval holds truth", "false same", "false failure", "same")
    print("|", " | ".join(columns), "|")
    print("|", " | ".join("---" for _ in columns), "|")
    for setting in SETTINGS:
        found = rates(setting, 20_000)
        pairs, noise = (
            " and ".join(f"{value:.2g}" for value in both) for both in (setting.num_pairs, _percents(setting))
        )
        shares = (found.false, found.covered, found.false_same, found.false_failure, found.same)
        print("|", " | ".join([pairs, noise, *(f"{100 * share:.1f}" for share in shares)]), "|")


def _percents(setting: Setting) -> tuple[float, ...]:
    return tuple(100 * sd for sd in setting.sd)


if __name__ == "__main__":
    main()
