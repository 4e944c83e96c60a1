import pytest

from lucid_profiler.monitor.plan import TIERS, Plan, Tier

MS = 1_000_000
S = 1_000_000_000


def next_ns(tier: Tier, cost_ns: int, *, num_before: int = 1) -> int:
    """Return how long after a reading at this cost the next one is due, on a grid of 1 ms."""
    plan = Plan(0)
    for _ in range(num_before):
        plan.note(tier, 0, now_ns=0, cost_ns=0)
    plan.note(tier, 0, now_ns=0, cost_ns=cost_ns)
    return next(time for time in range(0, 100 * S, MS) if plan.is_due(tier, time))


@pytest.mark.parametrize(
    ("tier", "cost_ns", "expected_ns"),
    [
        ("tree", 0, 0),
        ("tree", 400_000, 100 * MS),
        ("tree", 4 * MS, S),
        ("children", 0, S),
        ("children", 2 * MS, S),
        ("children", 3 * MS, 1500 * MS),
        ("pss", 1 * MS, S),
        ("pss", 20 * MS, 20 * S),
        ("processes", 0, S),
    ],
)
def test_a_tier_waits_for_its_period_or_its_share(tier: Tier, cost_ns: int, expected_ns: int) -> None:
    """The tree may take 0.4 % of a core, a look for children 0.2 %, and a PSS 0.1 %."""
    assert next_ns(tier, cost_ns) == expected_ns


@pytest.mark.parametrize(("tier", "limit_ns"), [("tree", 2 * S), ("children", 2 * S), ("pss", 60 * S)])
def test_nothing_is_put_off_for_ever(tier: Tier, limit_ns: int) -> None:
    """However much a reading costs, the next one comes within the limit that is stated."""
    assert next_ns(tier, 10 * S) == limit_ns


@pytest.mark.parametrize(("tier", "period_ns"), [("tree", 0), ("children", S), ("pss", S)])
def test_the_first_reading_is_not_charged(tier: Tier, period_ns: int) -> None:
    """It meets all processes of the machine for the first time; children that follow must be seen at once."""
    assert next_ns(tier, 10 * S, num_before=0) == period_ns


def test_the_cadence_is_what_was_done() -> None:
    """How often, and the longest time without: before the first reading, between two, and up to the end."""
    plan = Plan(1000)
    for now_ns in (1010, 1015, 1045, 1050):
        plan.note("tree", now_ns, now_ns=now_ns, cost_ns=0)
    plan.note("pss", 1000, now_ns=1030, cost_ns=0)
    assert plan.cadence(1060) == {"tree": {"num": 4, "longest_ns": 30}, "pss": {"num": 1, "longest_ns": 30}}
    assert plan.cadence(1100) == {"tree": {"num": 4, "longest_ns": 50}, "pss": {"num": 1, "longest_ns": 70}}


def test_at_first_everything_is_due_and_nothing_was_read() -> None:
    """A run without samples has no cadence, rather than one of 0."""
    plan = Plan(0)
    assert all(plan.is_due(tier, 0) for tier in TIERS)
    assert plan.cadence(5) == {}
