"""From options to the runs that will take place, in their order; pure."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from lucid_profiler.records import Arm, Slot

NATIVE = Arm(name="native", env={"LUCID_CAPTURE_UPDATES": "0"})
CAPTURED = Arm(name="captured", env={"LUCID_CAPTURE_UPDATES": "1"})
ARMS = (NATIVE, CAPTURED)
CONTROL = "control"
"""Name of the arm that is the base once more."""
DEFAULT_PAIRS = 6  # an even number: with ABBA a linear drift cancels
CPU_FIT_PAIRS = 2  # of the built-in fit where no GPU is: nothing can be captured, and parity needs no statistics
DISCARDED_PAIRS = 1
RULES = ("A pair is left out when the status of one of its runs is not ok.",)
TAINT_RULES = MappingProxyType(
    {
        "throttled": "A pair is left out when heat or the power supply held a GPU of one of its runs back.",
        "foreign": "A pair is left out when another process used a GPU of one of its runs, and not of both.",
        "suspended": "A pair is left out when the machine slept, or lucid was stopped, during one of its runs.",
        "changed": "A pair is left out when a run of it had other versions or flags than its arm's first good run.",
    }
)

Order = Literal["abba", "random"]

_EVEN = 0.5

__all__ = [
    "ARMS",
    "CAPTURED",
    "CONTROL",
    "CPU_FIT_PAIRS",
    "DEFAULT_PAIRS",
    "DISCARDED_PAIRS",
    "NATIVE",
    "RULES",
    "TAINT_RULES",
    "Order",
    "control_arm",
    "default_pairs",
    "pairs_of",
    "plan_slots",
    "renumber",
    "rules",
]


def default_pairs(*, is_built_in: bool, has_gpu: bool) -> int:
    """Return how many pairs are measured where the user says nothing.

    Args:
        is_built_in: whether the built-in fit is measured.
        has_gpu: whether this machine lists a GPU.
    """
    return CPU_FIT_PAIRS if is_built_in and not has_gpu else DEFAULT_PAIRS


def rules(taints: Sequence[str]) -> tuple[str, ...]:
    """Return why a pair is left out, where these taints do that."""
    return (*RULES, *(TAINT_RULES[taint] for taint in taints))


def control_arm(base: Arm) -> Arm:
    """Return the arm whose runs repeat those of the base."""
    return Arm(name=CONTROL, env=dict(base.env), control=True)


def plan_slots(
    pairs: int,
    discarded: int,
    *,
    arms: Sequence[str] = ("native", "captured"),
    control_pairs: int = 0,
    order: Order = "abba",
    seed: int | None = None,
) -> tuple[Slot, ...]:
    """Return the runs in their order: rounds of one pair of each other arm with the base, the discarded ones first.

    In the order `abba` the pairs of an arm begin with it and with the base in turn; in the order `random` a coin is
    tossed for each pair. The pairs of the base with its control lie between the measured rounds, evenly spread.

    Args:
        pairs: measured pairs of each arm, at least 1.
        discarded: pairs of each arm that only warm the machine up.
        arms: names of the arms, the base first, without the control.
        control_pairs: pairs of the base with itself.
        order: which run of a pair comes first.
        seed: what the coin is tossed from.

    Raises:
        ValueError: no pair is measured, or a number is negative.
    """
    if pairs < 1 or min(discarded, control_pairs) < 0 or len(arms) < 2:
        raise ValueError(
            "pairs must be at least 1, discarded and control_pairs at least 0, arms at least two, "
            f"got {pairs}, {discarded}, {control_pairs} and {list(arms)}"
        )
    if (order == "random") != (seed is not None):
        raise ValueError(f"a drawn order needs a seed and no other has one, got {order!r} and {seed}")
    coin = random.Random(seed)  # noqa: S311 - its first numbers are the same in every version of Python
    planned = []
    for turn, other in _rounds(pairs, discarded, arms[1:], control_pairs=control_pairs):
        base_first = turn % 2 == 0 if seed is None else coin.random() < _EVEN
        both = (arms[0], other) if base_first else (other, arms[0])
        planned.append(tuple(Slot(slot=0, pair=0, arm=arm, discarded=turn < 0) for arm in both))
    return renumber(planned)


def _rounds(pairs: int, discarded: int, others: Sequence[str], *, control_pairs: int) -> Iterator[tuple[int, str]]:
    """Yield the pairs: the number of each among those of its arm, below 0 if it is discarded, and the arm."""
    controls: dict[int, list[int]] = {}  # by the turn before which they lie
    for control in range(control_pairs):
        # The middle of the i-th of as many equal stretches as there are control pairs.
        middle = (2 * control + 1) * pairs // (2 * control_pairs)
        controls.setdefault(middle, []).append(control)
    for turn in range(-discarded, pairs):
        yield from ((control, CONTROL) for control in controls.get(turn, ()))
        yield from ((turn, other) for other in others)


def pairs_of(slots: Sequence[Slot]) -> list[tuple[Slot, ...]]:
    """Return the slots of each pair, the pairs in their order."""
    return [tuple(pair) for _, pair in groupby(slots, key=lambda slot: slot.pair)]


def renumber(pairs: Sequence[Sequence[Slot]], *, first_slot: int = 0, first_pair: int = 0) -> tuple[Slot, ...]:
    """Return the slots of these pairs, one pair after the other, numbered on from here."""
    slots = [replace(slot, pair=first_pair + place) for place, pair in enumerate(pairs) for slot in pair]
    return tuple(replace(slot, slot=first_slot + place) for place, slot in enumerate(slots))
