import math
from dataclasses import replace
from typing import Any

import pytest

from lucid_profiler.diff import Difference, diff
from lucid_profiler.gates import GateKind, GateResult, judge_gate, parse_gate
from lucid_profiler.records import Metric
from support.paired_reports import Pairs, make_report

WALL: Pairs = [(1.00, 0.90), (1.01, 0.91), (0.99, 0.89), (1.00, 0.905), (1.02, 0.91), (1.00, 0.90)]
MIB = 1 << 20
KINDS: tuple[GateKind, ...] = ("gate", "expect")


def compared(a: Pairs, b: Pairs, *, metric: Metric | None = None, **settings: Any) -> Difference:
    """Compare reports of two metrics: the wall, which is the same in both, and `x`."""
    metrics = [
        {"wall": (Metric(value=None, unit="s"), WALL), "x": (metric or Metric(value=None, unit="By"), values)}
        for values in (a, b)
    ]
    return diff(make_report(metrics[0]), make_report(metrics[1]), **settings)


def judged(text: str, difference: Difference, kind: GateKind = "gate") -> GateResult:
    """Hold one limit against a difference."""
    return judge_gate(parse_gate(text, kind), difference)


def times(factor: float, spread: float = 0.0) -> Pairs:
    """Return six pairs of one effect, the pairs apart by so much."""
    return [(1000.0, 1000.0 * factor * (1 + spread * sign)) for sign in (-1, 1, -1, 1, -1, 1)]


@pytest.mark.parametrize(
    ("text", "limit", "unit", "is_upper"),
    [
        ("wall<=+1%", 1.0, "%", True),
        ("wall <= -5 %", -5.0, "%", True),
        ("gpu_utilization>=-0.5%", -0.5, "%", False),
        ("peak_reserved<=+64MiB", 64.0, "MiB", True),
        ("capture_replays>=-1", -1.0, "", False),
        ("wall<=0%", 0.0, "%", True),
        ("wall<=+.5ms", 0.5, "ms", True),
        ("wall<=+3µs", 3.0, "µs", True),
        ("wall>=-100%", -100.0, "%", False),
    ],
)
def test_limits_are_read(text: str, limit: float, unit: str, is_upper: bool) -> None:
    """A metric, <= or >=, and a change with its unit."""
    got = parse_gate(text, "gate")
    assert (got.limit, got.unit, got.is_upper) == (limit, unit, is_upper)
    assert got.metric == text.partition("<")[0].partition(">")[0].strip()


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("wall<=1%", r"write \+1% or -1%"),
        ("peak_reserved<=900MiB", r"write \+900MiB or -900MiB"),
        ("wall<=+1parsec", "unknown unit 'parsec'"),
        ("wall<=-101%", "below -100 %"),
        ("wall=+1%", "write METRIC<=LIMIT"),
        ("wall<+1%", "write METRIC<=LIMIT"),
        ("wall<=+nan%", "write METRIC<=LIMIT"),
        ("wall<=+1e3%", "write METRIC<=LIMIT"),
        ("<=+1%", "write METRIC<=LIMIT"),
        ("wall<=+1%%", "write METRIC<=LIMIT"),
        ("", "write METRIC<=LIMIT"),
    ],
)
def test_what_is_no_limit_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    """Above all a limit without a sign, which could be meant as a value."""
    with pytest.raises(ValueError, match=remedy):
        parse_gate(text, "gate")


@pytest.mark.parametrize(
    ("factor", "spread", "gate", "expect"),
    [
        (1.00, 0.0001, "passed", "passed"),
        (1.01, 0.0, "passed", "passed"),
        (1.01, 0.01, "inconclusive", "failed"),
        (1.05, 0.001, "failed", "failed"),
        (0.50, 0.001, "passed", "passed"),
    ],
)
def test_a_gate_fails_past_the_limit_and_an_expectation_holds_within_it(
    factor: float, spread: float, gate: str, expect: str
) -> None:
    """An interval on both sides of the limit fails no gate, and shows nothing that was expected."""
    difference = compared(times(1.0), times(factor, spread))
    assert judged("x<=+1%", difference).status == gate
    assert judged("x<=+1%", difference, "expect").status == expect


@pytest.mark.parametrize(("text", "status"), [("x>=-1%", "failed"), ("x>=-6%", "passed"), ("x<=-4%", "passed")])
def test_limits_have_two_directions(text: str, status: str) -> None:
    """At least and at most, whatever direction is better for the metric."""
    assert judged(text, compared(times(1.0), times(0.95, 0.001))).status == status


def test_amounts_are_what_the_other_arm_adds() -> None:
    """In a unit the difference is that of the pairs' differences, exact in bytes."""
    a: Pairs = [(800 * MIB, 800 * MIB)] * 6
    b: Pairs = [(800 * MIB, 864 * MIB)] * 6
    difference = compared(a, b)
    at_limit = judged("x<=+64MiB", difference)
    assert (at_limit.status, at_limit.low, at_limit.high) == ("passed", 64.0, 64.0)
    assert judged("x<=+63.9MiB", difference).status == "failed"
    assert judged("x<=+0.1GiB", difference).status == "passed"
    assert judged("x<=+8%", difference).status == "passed"


@pytest.mark.parametrize(
    ("a", "b", "percent", "amount"),
    [
        ([(0, 0)] * 6, [(0, 0)] * 6, "passed", "passed"),
        ([(0.0, -0.0)] * 6, [(0, 0)] * 6, "passed", "passed"),
        ([(0, 0)] * 6, [(0, 5 * MIB)] * 6, "failed", "failed"),
        ([(0, 5 * MIB)] * 6, [(0, 0)] * 6, "passed", "passed"),
        ([(MIB, MIB)] * 6, [(MIB, 0)] * 6, "passed", "passed"),
        ([(MIB, 0)] * 6, [(MIB, MIB)] * 6, "failed", "passed"),
        ([(0, MIB)] * 6, [(0, 4 * MIB)] * 6, "no_verdict", "failed"),
        ([(-5, -5)] * 6, [(-5, -5)] * 6, "passed", "passed"),
        ([(-5, -5)] * 6, [(-5, -7)] * 6, "no_verdict", "passed"),
        ([(0, 0)] * 6, [(0, 5 * MIB), *[(0, 0)] * 5], "no_verdict", "inconclusive"),
    ],
)
def test_zero_negative_appearing_and_vanishing_values(a: Pairs, b: Pairs, percent: str, amount: str) -> None:
    """From 0 to more is past every percentage, to 0 past none; amounts need no ratio."""
    difference = compared(a, b)
    assert judged("x<=+1%", difference).status == percent
    assert judged("x<=+1MiB", difference).status == amount


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_leaves_no_verdict(value: float) -> None:
    """Not even where it is in one pair of one report: without that pair the others would be a selection."""
    difference = compared(times(1.0, 0.001), [*times(1.0, 0.001)[:5], (1000.0, value)])
    for text in ("x<=+1%", "x<=+1MiB"):
        got = judged(text, difference)
        assert (got.status, got.reason) == ("no_verdict", "non_finite")


def test_amounts_beyond_a_double_leave_no_verdict_in_a_unit() -> None:
    """Each value is finite, and so is every ratio; only the spread of the amounts has no number."""
    huge: Pairs = [(1e200, 1.1e200), (1e200, 1.2e200)] * 3
    difference = compared(huge, huge)
    got = judged("x<=+1MiB", difference)
    assert (got.status, got.reason) == ("no_verdict", "non_finite_amount")
    assert judged("x<=+50%", difference).status == "passed"


def test_missing_values_leave_the_other_pairs() -> None:
    """Three pairs are enough, two are not."""
    assert judged("x<=+1%", compared(times(1.0), [*times(1.0)[:3], *[(1000.0, None)] * 3])).status == "passed"
    got = judged("x<=+1%", compared(times(1.0), [*times(1.0)[:2], *[(None, 1000.0)] * 4]))
    assert (got.status, got.reason) == ("no_verdict", "too_few_pairs")


def test_a_metric_that_a_report_lacks_leaves_no_verdict() -> None:
    """One that the first lacks, one that was allowed to be lost, and one that neither knows."""
    nothing: Pairs = [(None, None)] * 6
    assert judged("x<=+1%", compared(nothing, times(1.0))).reason == "only_in_one_report"
    lost = compared(times(1.0), nothing, allow=["metric:x"])
    assert (judged("x<=+1%", lost).status, judged("x<=+1%", lost).reason) == ("no_verdict", "only_in_one_report")
    assert judged("nothing<=+1%", lost).reason == "not_recorded"


def test_amounts_need_base_arms_that_agree() -> None:
    """Twice the memory in both arms is the same ratio, and no amount can be compared."""
    difference = compared([(MIB, 2 * MIB)] * 6, [(2 * MIB, 4 * MIB)] * 6)
    assert judged("x<=+1%", difference).status == "passed"
    got = judged("x<=+64MiB", difference)
    assert (got.status, got.reason) == ("no_verdict", "canary")


def test_a_unit_of_another_kind_is_a_mistake() -> None:
    """Bytes are not measured in seconds; the units that fit are named."""
    with pytest.raises(ValueError, match=r"x is not measured in ms; write %, B, kB"):
        judged("x<=+1ms", compared(times(1.0), times(1.0)))


def test_counters_can_be_limited() -> None:
    """Replays are counts without a direction, and without a ratio to the base's none."""
    pairs = {"wall": (Metric(value=None, unit="s"), WALL)}
    difference = diff(make_report(pairs), make_report(pairs, replays=8))
    assert judged("capture_replays>=0", difference).status == "failed"
    assert judged("capture_replays>=-2", difference).status == "passed"
    assert judged("capture_replays<=+1%", difference).reason == "zero_baseline"


def drifting(effect: float) -> Pairs:
    """Return pairs whose base begins each of them while everything slows down, which makes their effect."""
    return [(math.exp(0.04 * pair), math.exp(0.04 * pair + 0.02 + effect + 0.002 * (pair % 2))) for pair in range(6)]


@pytest.mark.parametrize("effect", [0.0, 0.05])
@pytest.mark.parametrize("text", ["wall<=+1%", "wall>=-1%", "wall<=+1s"])
def test_what_drift_bent_has_no_verdict(effect: float, text: str) -> None:
    """Whether or not the interval holds 0: no limit is judged on a measurement that was taken back."""
    wall = Metric(value=None, unit="s")
    difference = diff(make_report({"wall": (wall, drifting(0.0))}), make_report({"wall": (wall, drifting(effect))}))
    assert difference.rows[0].bent_by == "drift_explains"
    assert [(judged(text, difference, kind).status, judged(text, difference, kind).reason) for kind in KINDS] == [
        ("no_verdict", "drift_explains")
    ] * 2


@pytest.mark.parametrize("is_equal", [False, True])
def test_what_a_control_took_back_has_no_verdict(is_equal: bool) -> None:
    """A control that differs from its base says what the machine does, whichever report it is in."""
    wall = Metric(value=None, unit="s")
    b = compared(times(1.0), times(1.0))
    row = replace(b.rows[0], bent_by="control_differs")
    other = diff(make_report({"wall": (wall, WALL)}), make_report({"wall": (wall, times(1.05, 0.001))})).rows[0]
    bent = replace(b, rows=(row if is_equal else replace(other, bent_by="control_differs"), *b.rows[1:]))
    for kind in KINDS:
        got = judged("wall<=+1%", bent, kind)
        assert (got.status, got.reason, got.low) == ("no_verdict", "control_differs", None)
    assert judged("x<=+1%", bent).status == "passed"


def test_negative_bases_are_judged_where_they_are_near() -> None:
    """They have no logarithm; their distance in percent is held against the canary's limit all the same."""
    base = [(-1000.0, -1000.0 + step) for step in (1, 2, 1, 2, 1, 2)]
    near, far = ([(first * factor, second * factor) for first, second in base] for factor in (1.001, 1.05))
    assert judged("x<=+10B", compared(base, near)).status == "passed"
    got = judged("x<=+10B", compared(base, far))
    assert (got.status, got.reason) == ("no_verdict", "canary")


def test_amounts_that_are_withheld_are_in_no_limit() -> None:
    """Where the base arms differ a limit in a unit is judged by its own metric, and prints no amount."""
    slower = [(base * 1.5, other * 1.5) for base, other in WALL]
    x, wall = Metric(value=None, unit="By"), Metric(value=None, unit="s")
    a, b = (make_report({"wall": (wall, walls), "x": (x, times(1.0))}) for walls in (WALL, slower))
    got = judged("x<=+1B", diff(a, b))
    assert (got.status, got.low, got.high) == ("passed", None, None)
    assert judged("x<=+1%", diff(a, b)).low == pytest.approx(0.0, abs=1e-9)
