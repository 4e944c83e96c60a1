import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lucid_profiler import jsonio
from lucid_profiler.compare import (
    Analysis,
    analyze,
    analyze_all,
    pair_record,
    plain_analysis,
    verify_summary,
)
from lucid_profiler.reader import Report
from lucid_profiler.records import Arm, End, Header, Metric, Run, State, Summary

BASE, TUNED, OTHER = Arm(name="base"), Arm(name="tuned"), Arm(name="other")
CONTROL = Arm(name="again", control=True)
SGD = Arm(name="sgd", different=True)
NOISE = (0.000, 0.003, -0.002, 0.001, -0.003, 0.002)
FASTER = [("tuned", 1.0 + step, 0.9 - step) for step in NOISE]
SLOWER = [("other", 1.0 + step, 1.2 + step) for step in NOISE]
QUIET = [("again", 1.0 + step, 1.0 - step) for step in NOISE[:4]]
LOUD = [("again", 1.0 + step, 1.1 + step) for step in NOISE[:4]]
SAME = {"weight": 1.0}

Build = Callable[..., Report]


@pytest.fixture
def build(make_header: Callable[..., Header], make_run: Callable[..., Run], make_state: Callable[..., State]) -> Build:
    """Give a function that makes a report of pairs, each of the base and another arm, in ABBA order.

    `runs` changes single runs by number, `states` replaces the state of single runs (None: it recorded none).
    """

    def build_report(
        arms: Sequence[Arm],
        pairs: Sequence[tuple[str, float, float]],
        *,
        header: Mapping[str, Any] | None = None,
        runs: Mapping[int, Mapping[str, Any]] | None = None,
        states: Mapping[int, Any] | None = None,
    ) -> Report:
        made: list[tuple[Run, Run]] = []
        counts: dict[str, int] = {}
        for pair, (other, *seconds) in enumerate(pairs):
            counts[other] = counts.get(other, 0) + 1
            numbers = (2 * pair, 2 * pair + 1)[:: 1 if counts[other] % 2 else -1]
            fields = zip(numbers, (arms[0].name, other), seconds, strict=True)
            base, second = (
                replace(make_run(number, pair=pair, arm=arm, seconds=wall, replays=0), **(runs or {}).get(number, {}))
                for number, arm, wall in fields
            )
            made.append((base, second))
        in_order = sorted((run for both in made for run in both), key=lambda run: run.run)
        values = {run.run: (states or {}).get(run.run, SAME) for run in in_order}
        report = Report(
            path="a.jsonl",
            header=make_header(arms=tuple(arms), pairs=len(pairs), **(header or {})),
            runs=tuple(in_order),
            states=tuple(make_state(number, value) for number, value in values.items() if value is not None),
        )
        return replace(report, pairs=tuple(pair_record(report, *both) for both in made))

    return build_report


def decision(analysis: Analysis) -> tuple[str, str]:
    """Return decision and code of a verdict."""
    return analysis.verdict.decision, analysis.verdict.reason


def codes(analysis: Analysis) -> set[str]:
    """Return the codes of the warnings."""
    return {warning.code for warning in analysis.warnings}


def by_arm(report: Report) -> dict[str, Analysis]:
    """Return all comparisons by their other arm."""
    return {analysis.other: analysis for analysis in analyze_all(report)}


def test_each_further_arm_is_compared_with_the_first(build: Build) -> None:
    """Comparisons come in the header's order, each over its own pairs; without a name it is the first of them."""
    report = build([BASE, OTHER, TUNED], [pair for both in zip(FASTER, SLOWER, strict=True) for pair in both])
    first, second = analyze_all(report)
    assert [(one.base, one.other) for one in (first, second)] == [("base", "other"), ("base", "tuned")]
    assert (decision(first), decision(second)) == (
        ("worse", "interval_excludes_zero"),
        ("better", "interval_excludes_zero"),
    )
    assert analyze(report) == first
    assert (first.num_pairs, first.num_included, second.num_included) == (6, 6, 6)
    ratios = [math.log(other / base) for _, base, other in SLOWER]
    effect = first.metrics["wall"].effect
    assert effect is not None
    assert effect.mean == pytest.approx(sum(ratios) / 6)


def test_runs_of_another_setup_that_are_left_out_are_not_held_against_the_others(build: Build) -> None:
    """A report that went on under another version: neither its base runs nor its pairs decide parity."""
    states = {8: {"weight": 2.0}, 9: {"weight": 3.0}, 10: {"weight": 2.0}, 11: {"weight": 2.0}}
    runs: dict[int, dict[str, Any]] = {run: {"taints": ("changed",), "discarded": run in {8, 9}} for run in states}
    report = build([BASE, TUNED], FASTER, header={"taints": ("changed",)}, runs=runs, states=states)
    found = analyze(report)
    assert decision(found) == ("better", "interval_excludes_zero")
    assert (found.parity.status, found.parity.num_base_runs, found.num_included) == ("equal", 4, 4)
    assert [pair.reasons for pair in found.excluded] == [("changed:11", "changed:10")]
    kept = build([BASE, TUNED], FASTER, runs=runs, states=states)
    assert decision(analyze(kept)) == ("undecidable", "base_runs_differ")


def test_a_state_counts_whatever_bent_the_times_of_its_run(build: Build) -> None:
    """Heat leaves a pair out of the statistics and is no reason for other bits."""
    report = build(
        [BASE, TUNED],
        FASTER,
        header={"taints": ("throttled",)},
        runs={4: {"taints": ("throttled",)}},
        states={4: {"weight": 2.0}, 5: {"weight": 2.0}},
    )
    assert analyze(report).num_included == 5
    assert decision(analyze(report)) == ("undecidable", "base_runs_differ")


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [((), None), ((0,), None), ((0, 2), (1, 3)), ((1, 3), (3, 1)), ((0, 2, 4), (0, 3)), ((0, 1, 2, 4), None)],
)
def test_too_few_pairs_of_one_order_are_told(
    left_out: Sequence[int], expected: tuple[int, int] | None, build: Build
) -> None:
    """From three pairs on, where left-out ones leave fewer than two that began with one of the arms."""
    runs = {2 * pair: {"taints": ("throttled",)} for pair in left_out}
    found = analyze(build([BASE, TUNED], FASTER, header={"taints": ("throttled",)}, runs=runs))
    numbers = [(one.numbers["num_base_first"], one.numbers["num_other_first"]) for one in found.warnings]
    assert codes(found) == ({"order_untested"} if expected else set())
    assert numbers == ([expected] if expected else [])
    assert plain_analysis(found)["warnings"] == []


def test_other_arms_change_nothing_in_a_comparison(build: Build) -> None:
    """Pairs of a third arm are in no number of the comparison of the first two."""
    alone = analyze(build([BASE, TUNED], FASTER))
    beside = by_arm(build([BASE, TUNED, OTHER], [*FASTER, *SLOWER]))["tuned"]
    assert (beside.metrics, beside.capture, beside.verdict) == (alone.metrics, alone.capture, alone.verdict)


@pytest.mark.parametrize("name", ["base", "nobody", ""])
def test_only_a_further_arm_can_be_compared(name: str, build: Build) -> None:
    """The base itself and names that the header lacks are refused with the names that it has."""
    with pytest.raises(ValueError, match="expected one of tuned, other"):
        analyze(build([BASE, TUNED, OTHER], FASTER), name)


def test_all_base_runs_are_held_against_each_other(build: Build) -> None:
    """A base run beside one arm that ended in another state leaves nothing decided about any arm."""
    report = build([BASE, TUNED, OTHER], [*FASTER, *SLOWER], states={12: {"weight": 2.0}, 13: {"weight": 2.0}})
    assert {decision(one) for one in analyze_all(report)} == {("undecidable", "base_runs_differ")}


def test_a_difference_belongs_to_its_arm(build: Build) -> None:
    """Parity that one arm fails is no reason against another."""
    found = by_arm(build([BASE, TUNED, OTHER], [*FASTER, *SLOWER], states={13: {"weight": 2.0}}))
    assert decision(found["other"]) == ("parity_failed", "states_differ")
    assert decision(found["tuned"]) == ("better", "interval_excludes_zero")


def test_of_a_control_nothing_is_claimed(build: Build) -> None:
    """However far it is apart, it is no verdict; what it is apart by is there."""
    for pairs in (QUIET, LOUD):
        control = by_arm(build([BASE, TUNED, CONTROL], [*FASTER, *pairs]))["again"]
        assert decision(control) == ("withheld", "control")
        assert control.is_control
        assert control.metrics["wall"].effect is not None
        assert control.metrics["wall"].effect.n == 4
        assert "control_differs" not in codes(control)


def test_a_quiet_control_leaves_the_verdict(build: Build) -> None:
    """Where the base is the base, the other arm's verdict stands."""
    found = by_arm(build([BASE, TUNED, CONTROL], [*FASTER, *QUIET]))["tuned"]
    assert decision(found) == ("better", "interval_excludes_zero")
    assert not codes(found)


def test_a_base_that_differs_from_itself_takes_verdicts_back(build: Build) -> None:
    """Every arm's better and worse is inconclusive, with a warning that has the numbers of the control."""
    arms = [BASE, TUNED, OTHER, CONTROL]
    found = by_arm(build(arms, [*FASTER, *SLOWER, *LOUD]))
    effect = found["again"].metrics["wall"].effect
    assert effect is not None
    for name in ("tuned", "other"):
        assert decision(found[name]) == ("inconclusive", "control_differs")
        assert found[name].verdict.pairs_needed is None
        (warning,) = found[name].warnings
        assert warning.numbers == {
            "num_pairs": 4,
            "effect": effect.mean,
            "low": effect.t_low,
            "high": effect.t_high,
        }


def test_two_control_pairs_take_nothing_back(build: Build) -> None:
    """With two pairs an interval has a single degree of freedom, as for a verdict."""
    found = by_arm(build([BASE, TUNED, CONTROL], [*FASTER, *LOUD[:2]]))
    assert decision(found["tuned"]) == ("better", "interval_excludes_zero")
    assert not codes(found["tuned"])


def test_a_control_that_is_equal_is_quiet(build: Build) -> None:
    """Runs that differ by rounding alone, in an interval without width, are no difference."""
    pairs = [("again", 1.0, 1.0 + 2**-52)] * 4
    assert not codes(by_arm(build([BASE, TUNED, CONTROL], [*FASTER, *pairs]))["tuned"])


def test_drift_in_the_controls_own_order_takes_nothing_back(build: Build, make_run: Callable[..., Run]) -> None:
    """Control pairs that all began with the base are apart by drift; the other arm's pairs are in ABBA order."""
    report = build([BASE, TUNED, CONTROL], FASTER)
    controls = [
        make_run(number, pair=number // 2, arm=("base", "again")[number % 2], seconds=1.01**number)
        for number in range(12, 20)
    ]
    pairs = [pair_record(report, *controls[at : at + 2]) for at in range(0, 8, 2)]
    found = by_arm(replace(report, runs=(*report.runs, *controls), pairs=(*report.pairs, *pairs), states=()))
    effect = found["again"].metrics["wall"].effect
    assert effect is not None
    assert effect.t_low is not None
    assert effect.t_low > 0
    assert "drift_explains" in codes(found["again"])
    assert "control_differs" not in codes(found["tuned"])


def test_an_exact_metric_that_the_base_does_not_repeat_is_told(build: Build) -> None:
    """A count that differs between equal runs is no count to judge by, even in a single control pair."""

    def with_bytes(report: Report, numbers: Mapping[str, int]) -> Report:
        runs = tuple(
            replace(run, metrics={"bytes": Metric(value=numbers[run.arm], unit="By", exact=True)})
            for run in report.runs
        )
        return replace(report, runs=runs)

    report = build([BASE, TUNED, CONTROL], [*FASTER, *QUIET[:1]], header={"primary": "bytes"})
    equal = by_arm(with_bytes(report, {"base": 100, "tuned": 90, "again": 100}))["tuned"]
    unequal = by_arm(with_bytes(report, {"base": 100, "tuned": 90, "again": 101}))["tuned"]
    assert decision(equal) == ("better", "exact")
    assert decision(unequal) == ("inconclusive", "control_differs")


def test_control_runs_are_base_runs(build: Build) -> None:
    """They count for repetition, and one that ended in another state makes every comparison undecidable."""
    arms, pairs = [BASE, TUNED, CONTROL], [*FASTER[:1], *QUIET[:1]]
    assert by_arm(build(arms, pairs))["tuned"].parity.num_base_runs == 3
    found = by_arm(build(arms, [*FASTER, *QUIET], states={13: {"weight": 2.0}}))
    assert decision(found["tuned"]) == ("undecidable", "base_runs_differ")
    assert decision(found["again"]) == ("undecidable", "base_runs_differ")
    assert "in run 13 (again)" in str(found["tuned"].verdict.detail)


def test_parity_is_not_asked_of_a_different_arm(build: Build) -> None:
    """Other states are no failure, in the pairs neither, and the verdict speaks of no part."""
    pairs = [("sgd", base, other) for _, base, other in FASTER]
    states = {run: {"weight": 3.0} for run in (1, 2, 5, 6, 9, 10)}
    report = build([BASE, SGD], pairs, states=states)
    got = analyze(report)
    assert decision(got) == ("better", "interval_excludes_zero")
    assert got.is_different
    assert got.parity.status == "equal"
    assert got.verdict.parts == ()
    assert {pair.parity.status for pair in report.pairs} == {"not_observed"}
    same = replace(report, header=replace(report.header, arms=(BASE, replace(SGD, different=False))))
    assert analyze(same).verdict.decision == "parity_failed"


@pytest.mark.parametrize("states", [{3: {"weight": 2.0}}, dict.fromkeys(range(12))], ids=["differ", "none"])
def test_the_base_need_not_repeat_beside_a_different_arm(states: Any, build: Build) -> None:
    """Of another computation no state is asked: neither that base runs agree nor that there is one."""
    pairs = [("sgd", base, other) for _, base, other in FASTER]
    assert decision(analyze(build([BASE, SGD], pairs, states=states))) == ("better", "interval_excludes_zero")


@pytest.mark.parametrize(
    ("taints", "by_header", "reasons", "flags"),
    [
        ({4: ("throttled",)}, ("throttled",), ("throttled:4",), ("throttled:4",)),
        ({5: ("throttled",)}, (), (), ("throttled:5",)),
        ({5: ("suspended",)}, ("throttled", "foreign"), (), ("suspended:5",)),
        ({4: ("foreign",)}, ("foreign",), ("foreign:4",), ("foreign:4",)),
        ({4: ("foreign",), 5: ("foreign",)}, ("foreign",), (), ("foreign:4", "foreign:5")),
        (
            {4: ("throttled",), 5: ("throttled",)},
            ("throttled",),
            ("throttled:4", "throttled:5"),
            ("throttled:4", "throttled:5"),
        ),
        (
            {4: ("foreign", "throttled"), 5: ("foreign",)},
            ("foreign", "throttled"),
            ("throttled:4",),
            ("foreign:4", "throttled:4", "foreign:5"),
        ),
    ],
)
def test_taints_leave_a_pair_out_by_the_rule_of_the_header(
    taints: dict[int, tuple[str, ...]],
    by_header: tuple[str, ...],
    reasons: tuple[str, ...],
    flags: tuple[str, ...],
    build: Build,
) -> None:
    """Every taint is a flag; only those that the header lists leave the pair out, a shared neighbour never."""
    report = build(
        [BASE, TUNED],
        FASTER,
        header={"taints": by_header},
        runs={run: {"taints": found} for run, found in taints.items()},
    )
    got = analyze(report)
    assert report.pairs[2].flags == flags
    assert report.pairs[2].included is not bool(reasons)
    assert [(one.pair, one.reasons) for one in got.excluded] == ([(2, reasons)] if reasons else [])
    assert got.num_included == (5 if reasons else 6)


def test_failures_and_taints_are_told_together(build: Build) -> None:
    """A run that failed and was bent names both; in a discarded pair a taint leaves nothing more out."""
    bent = {"taints": ("throttled",)}
    runs = {0: {"discarded": True, **bent}, 1: {"discarded": True}, 4: {"status": "failed", **bent}}
    report = build([BASE, TUNED], FASTER, header={"taints": ("throttled",)}, runs=runs)
    got = analyze(report)
    assert report.pairs[0].flags == ("discarded", "throttled:0")
    assert report.pairs[2].flags == ("failed:4", "throttled:4")
    assert (got.num_discarded, got.num_included) == (1, 4)
    assert [(one.pair, one.reasons) for one in got.excluded] == [(2, ("failed:4", "throttled:4"))]


def test_a_pair_that_its_taints_leave_out_cannot_be_put_back(build: Build) -> None:
    """A record that includes it is found, and the statistics go by the runs."""
    report = build([BASE, TUNED], FASTER, header={"taints": ("throttled",)}, runs={5: {"taints": ("throttled",)}})
    wrong = replace(report.pairs[2], included=True, flags=())
    forged = replace(report, pairs=(*report.pairs[:2], wrong, *report.pairs[3:]))
    assert analyze(forged).num_included == 5
    assert [text.split(":")[0] for text in verify_summary(forged)] == ["pair 2.flags", "pair 2.included"]


def test_a_summary_holds_every_comparison(build: Build) -> None:
    """What any of them says is checked, and one that is missing is told."""
    report = build([BASE, TUNED, OTHER, CONTROL], [*FASTER, *SLOWER, *QUIET])
    first, *further = (jsonio.loads(jsonio.dumps(plain_analysis(one))) for one in analyze_all(report))
    whole = replace(
        report, summary=Summary(analysis=first, further=tuple(further)), end=End(status="complete", num_records=1)
    )
    assert verify_summary(whole) == []
    assert verify_summary(replace(whole, summary=Summary(analysis=first))) == [
        "summary.further: holds 0 comparisons, the runs give 2"
    ]
    changed = jsonio.loads(jsonio.dumps(further))
    changed[0]["verdict"]["decision"] = "better"
    found = verify_summary(replace(whole, summary=Summary(analysis=first, further=tuple(changed))))
    assert [text.split(":")[0] for text in found] == ["summary.further[0].verdict.decision"]


def test_what_an_arm_is_not_goes_unsaid(build: Build) -> None:
    """The summary of two plain arms has no word of controls and other computations, as before there were any."""
    plain = plain_analysis(analyze(build([BASE, TUNED], FASTER)))
    assert not {"is_control", "is_different"} & plain.keys()
    assert plain_analysis(by_arm(build([BASE, TUNED, CONTROL], [*FASTER, *QUIET]))["again"])["is_control"] is True
