"""From options to the runs that will take place, in their order; pure."""

from lucid_profiler.records import Arm, Slot

NATIVE = Arm(name="native", env={"LUCID_CAPTURE_UPDATES": "0"})
CAPTURED = Arm(name="captured", env={"LUCID_CAPTURE_UPDATES": "1"})
ARMS = (NATIVE, CAPTURED)
DEFAULT_PAIRS = 6  # an even number: with ABBA a linear drift cancels
CPU_FIT_PAIRS = 2  # of the built-in fit where no GPU is: nothing can be captured, and parity needs no statistics
DISCARDED_PAIRS = 1
RULES = ("A pair is left out when the status of one of its runs is not ok.",)

__all__ = [
    "ARMS",
    "CAPTURED",
    "CPU_FIT_PAIRS",
    "DEFAULT_PAIRS",
    "DISCARDED_PAIRS",
    "NATIVE",
    "RULES",
    "default_pairs",
    "plan_slots",
]


def default_pairs(*, is_built_in: bool, has_gpu: bool) -> int:
    """Return how many pairs are measured where the user says nothing.

    Args:
        is_built_in: whether the built-in fit is measured.
        has_gpu: whether this machine lists a GPU.
    """
    return CPU_FIT_PAIRS if is_built_in and not has_gpu else DEFAULT_PAIRS


def plan_slots(pairs: int, discarded: int, *, arms: tuple[str, str] = ("native", "captured")) -> tuple[Slot, ...]:
    """Return the runs in ABBA order: the pairs begin with either arm in turn, the discarded ones come first.

    Args:
        pairs: measured pairs, at least 1.
        discarded: pairs that only warm the machine up.
        arms: names of the two arms, the base first.

    Raises:
        ValueError: no pair is measured, or a number is negative.
    """
    if pairs < 1 or discarded < 0:
        raise ValueError(f"pairs must be at least 1 and discarded at least 0, got {pairs} and {discarded}")
    order = [
        (pair, arm)
        for pair in range(discarded + pairs)
        # The first measured pair begins with the base, whatever was discarded.
        for arm in (arms if (pair - discarded) % 2 == 0 else arms[::-1])
    ]
    return tuple(
        Slot(slot=slot, pair=pair, arm=arm, discarded=pair < discarded) for slot, (pair, arm) in enumerate(order)
    )
