"""Reports with a known truth: paired runs whose noise, drift, steps, modes and effect are given, and what they come to.

The verdict is that of the package; only the digests are taken for equal and the captures for checked.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lucid_profiler.controls import control_warning
from lucid_profiler.drift import AnalysisWarning, find_warnings
from lucid_profiler.metrics import analyze_metric, paired_logs
from lucid_profiler.pairs import PairedEffect
from lucid_profiler.parity import Parity
from lucid_profiler.records import AgentHealth, Metric, Run
from lucid_profiler.verdict import Claims, Decision, judge

__all__ = ["ALPHA", "Order", "Outcome", "Setting", "Tally", "assess", "outcomes", "simulate", "tally"]

ALPHA = 0.05
ARMS = ("base", "other")
_EQUAL = Parity(status="equal", covered=("parameters",), parts={})
_AGENT = AgentHealth(loaded=True)

Order = Literal["abba", "random", "base_first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The truth of one simulated experiment; all sizes are fractions of the wall time."""

    name: str
    effect: float = 0.0
    """The other arm takes 1 + effect times as long."""
    noise: float = 0.003
    """Standard deviation of the logarithm of each run, independent from run to run."""
    drift: float = 0.0
    """Added by each run, on a straight line."""
    step: float = 0.0
    """Added from one run on, which is drawn for each report from all but the first."""
    mode: float = 0.0
    """Added in the slow mode, which each run is in or not, independently."""
    mode_shares: tuple[float, float] = (0.5, 0.5)
    """Probability of the slow mode, by arm."""
    first: float = 0.0
    """Added to the first run of all."""
    num_pairs: int = 6
    num_discarded: int = 1
    order: Order = "abba"
    # Not in the text from which the reports are drawn: without controls they stay what they were.
    num_controls: int = field(default=0, repr=False)
    """Pairs of the base with itself, drawn as an experiment of their own beside the measured pairs."""
    bias: float = field(default=0.0, repr=False)
    """Added by the machine to whatever is no plain base run: to the other arm, and to the base's second name."""

    @property
    def truth(self) -> float:
        """Return the logarithm of the effect."""
        return math.log1p(self.effect)

    @property
    def expected_mean(self) -> float:
        """Return the mean of the pairs' logarithms, which modes of unequal shares move."""
        base, other = self.mode_shares
        return self.truth + (other - base) * math.log1p(self.mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one simulated report comes to."""

    decision: Decision
    effect: PairedEffect
    warnings: tuple[AnalysisWarning, ...]


def simulate(setting: Setting, rng: random.Random) -> list[tuple[Run, Run]]:
    """Return base and other run of each measured pair."""
    order = _order(setting, rng)
    step_at = rng.randrange(1, len(order)) if setting.step else 0
    walls = []
    for number, side in enumerate(order):
        wall = math.exp(rng.gauss(0.0, setting.noise)) * (1 + setting.drift * number)
        wall *= (1 + setting.effect * side) * (1 + setting.bias * side)
        wall *= 1 + setting.step * (number >= step_at)
        if setting.mode:
            wall *= 1 + setting.mode * (rng.random() < setting.mode_shares[side])
        walls.append(wall * (1 + setting.first * (number == 0)))
    pairs = []
    for pair in range(setting.num_discarded, len(order) // 2):
        both = sorted((2 * pair, 2 * pair + 1), key=lambda number: order[number])
        base, other = (_run(number, ARMS[order[number]], walls[number]) for number in both)
        pairs.append((base, other))
    return pairs


def simulate_controls(setting: Setting, rng: random.Random) -> list[tuple[Run, Run]]:
    """Return the two runs of each pair of the base with itself."""
    return simulate(replace(setting, effect=0.0, num_pairs=setting.num_controls, num_discarded=0), rng)


def assess(pairs: list[tuple[Run, Run]], controls: Sequence[tuple[Run, Run]] = ()) -> Outcome:
    """Return what the package says of measured pairs, beside pairs of the base with itself."""
    metric = analyze_metric("wall", pairs, alpha=ALPHA)
    if metric.effect is None:
        raise ValueError("walls must be positive")
    warnings = (*find_warnings(paired_logs("wall", pairs), metric.effect, alpha=ALPHA), *_assess_controls(controls))
    verdict = judge(
        metric, name="wall", num_included=len(pairs), claims=Claims(), parity=_EQUAL, alpha=ALPHA, warnings=warnings
    )
    return Outcome(decision=verdict.decision, effect=metric.effect, warnings=warnings)


def _assess_controls(controls: Sequence[tuple[Run, Run]]) -> tuple[AnalysisWarning, ...]:
    if not controls:
        return ()
    metric = analyze_metric("wall", controls, alpha=ALPHA)
    if metric.effect is None:
        raise ValueError("walls must be positive")
    found = control_warning(metric, find_warnings(paired_logs("wall", controls), metric.effect, alpha=ALPHA))
    return () if found is None else (found,)


def outcomes(setting: Setting, num_reports: int) -> Iterator[Outcome]:
    """Simulate reports; the same setting gives the same ones."""
    rng = random.Random(repr(setting))
    for _ in range(num_reports):
        pairs = simulate(setting, rng)
        yield assess(pairs, simulate_controls(setting, rng) if setting.num_controls else ())


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts over the reports of one setting."""

    setting: Setting
    num_reports: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    false: int = 0
    """Verdicts without an effect, or against it."""
    unwarned_false: int = 0
    """Those of them that came without any warning."""
    warned: int = 0
    taken_back: int = 0
    """Verdicts in the direction of the effect that the controls made inconclusive."""
    codes: Counter[str] = field(default_factory=Counter)
    """Reports by the codes of their warnings."""
    t_covers: int = 0
    """Reports whose t interval holds the expected mean."""
    range_covers: int = 0
    """Reports whose range holds the true effect, the median of the pairs where modes have equal shares."""

    @property
    def found(self) -> int:
        """Return the verdicts in the direction of the effect."""
        right = "better" if self.setting.effect < 0 else "worse"
        return self.decisions[right] if self.setting.effect else 0


def tally(setting: Setting, num_reports: int) -> Tally:
    """Simulate reports and count."""
    counts = Tally(setting=setting)
    for outcome in outcomes(setting, num_reports):
        _count(counts, outcome)
    return counts


def _count(counts: Tally, outcome: Outcome) -> None:
    setting, effect = counts.setting, outcome.effect
    codes = {warning.code for warning in outcome.warnings}
    right = "better" if setting.effect < 0 else "worse" if setting.effect > 0 else "inconclusive"
    is_false = outcome.decision not in {right, "inconclusive"}
    counts.num_reports += 1
    counts.decisions[outcome.decision] += 1
    counts.false += is_false
    counts.unwarned_false += is_false and not codes
    counts.warned += bool(codes)
    if "control_differs" in codes and "drift_explains" not in codes:
        counts.taken_back += _is_right(setting, effect)
    counts.codes.update(codes)
    if effect.t_low is not None and effect.t_high is not None:
        counts.t_covers += effect.t_low <= setting.expected_mean <= effect.t_high
    counts.range_covers += effect.low <= setting.truth <= effect.high


def _is_right(setting: Setting, effect: PairedEffect) -> bool:
    """Return whether the t interval alone would find the effect."""
    if not setting.effect or effect.t_low is None or effect.t_high is None:
        return False
    return effect.t_high < 0 if setting.effect < 0 else effect.t_low > 0


def _order(setting: Setting, rng: random.Random) -> list[int]:
    """Return the side of each run, 0 for the base; the first measured pair of ABBA begins with the base."""
    order: list[int] = []
    for pair in range(-setting.num_discarded, setting.num_pairs):
        starts_with = {"abba": pair % 2, "random": rng.randrange(2), "base_first": 0}[setting.order]
        order += [starts_with, 1 - starts_with]
    return order


def _run(number: int, arm: str, wall: float) -> Run:
    return Run(
        run=number,
        pair=number // 2,
        arm=arm,
        status="ok",
        started="",
        process_ns=0,
        metrics={"wall": Metric(value=wall, unit="s")},
        agent=_AGENT,
    )
