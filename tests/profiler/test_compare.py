import math
import random
import statistics
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lucid_profiler import jsonio
from lucid_profiler.compare import Analysis, Difference, analyze, diff, pair_record, plain_analysis, verify_summary
from lucid_profiler.errors import NotComparableError
from lucid_profiler.processes import by_run, match
from lucid_profiler.reader import Report, read_report
from lucid_profiler.records import (
    AgentHealth,
    Arm,
    End,
    Env,
    Header,
    Metric,
    Pair,
    PairParity,
    Record,
    Run,
    Slot,
    State,
    Summary,
    Tool,
    Wall,
    identity_digest,
)
from lucid_profiler.writer import Writer

FASTER = [(1.00, 0.90), (1.01, 0.91), (0.99, 0.89), (1.00, 0.905), (1.02, 0.91), (1.00, 0.90)]
SAME_STATE = {"weight": 1.0}

Build = Callable[..., Report]


@pytest.fixture
def build(make_header: Callable[..., Header], make_run: Callable[..., Run], make_state: Callable[..., State]) -> Build:
    """Give a function that makes a report of one discarded pair and measured ones.

    `runs` changes single runs by number, `metrics` gives each pair's values by name, `states` replaces the state of
    single runs (None: it recorded none).
    """

    def build_report(
        seconds: Sequence[tuple[float | None, float | None]] = FASTER,
        *,
        header: Mapping[str, Any] | None = None,
        runs: Mapping[int, Mapping[str, Any]] | None = None,
        states: Mapping[int, Any] | None = None,
        metrics: Mapping[str, tuple[Metric, Sequence[tuple[Any, Any]]]] | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> Report:
        made_runs, made_states, pairs = [], [], []
        for number in range(2 * len(seconds) + 2):
            pair = number // 2 - 1
            values = {"wall": Metric(value=seconds[pair][number % 2] if pair >= 0 else 9.0, unit="s")}
            for name, (metric, series) in (metrics or {}).items():
                values[name] = replace(metric, value=series[max(pair, 0)][number % 2])
            run = make_run(number, discarded=pair < 0, metrics=values)
            made_runs.append(replace(run, **(runs or {}).get(number, {})))
            if (value := (states or {}).get(number, SAME_STATE)) is not None:
                made_states.append(make_state(number, value))
        env = Env(scope="host", identity=dict(identity or {}), identity_digest=identity_digest(dict(identity or {})))
        report = Report(
            path="a.jsonl",
            header=make_header(pairs=len(seconds), **(header or {})),
            envs=(env,),
            runs=tuple(made_runs),
            states=tuple(made_states),
        )
        for base, other in zip(made_runs[::2], made_runs[1::2], strict=True):
            pairs.append(pair_record(report, base, other))
        return replace(report, pairs=tuple(pairs))

    return build_report


def decision(analysis: Analysis) -> tuple[str, str]:
    """Return decision and code of a verdict."""
    return analysis.verdict.decision, analysis.verdict.reason


def test_a_clear_gain_is_better(build: Build) -> None:
    """Six pairs that all gain ten percent give the verdict better, with the parts that it covers."""
    got = analyze(build())
    wall = got.metrics["wall"]
    ratios = [math.log(other / base) for base, other in FASTER]
    interval = stats.ttest_1samp(ratios, 0).confidence_interval(0.95)
    assert decision(got) == ("better", "interval_excludes_zero")
    assert got.verdict.parts == ("parameters",)
    assert got.verdict.metric == "wall"
    assert wall.effect is not None
    assert (wall.effect.t_low, wall.effect.t_high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert wall.effect.range_coverage == 1 - 2**-5
    assert (wall.base.n, wall.base.median, wall.base.min, wall.base.max) == (6, 1.0, 0.99, 1.02)
    assert wall.ratio_of_medians == statistics.median([other for _, other in FASTER]) / 1.0
    assert wall.change == "better"
    assert (got.num_pairs, got.num_discarded, got.num_included, got.excluded) == (7, 1, 6, ())
    assert (got.capture["captured"].replays, got.capture["native"].replays) == (60, 0)


def test_the_discarded_pair_is_kept_and_counts_for_nothing(build: Build) -> None:
    """Its times enter no statistic; it is marked in the pair record and counted."""
    report = build()
    assert report.pairs[0].flags == ("discarded",)
    assert not report.pairs[0].included
    changed = replace(report, runs=tuple(replace(run, metrics={}) if run.discarded else run for run in report.runs))
    assert analyze(changed) == analyze(report)


@pytest.mark.parametrize(("better", "expected"), [("lower", "worse"), ("higher", "better")])
def test_the_direction_of_a_metric_decides(better: Any, expected: str, build: Build) -> None:
    """More of a metric is worse or better as it says, with nothing but the values to go by."""
    series = [(100.0, 120.0 + index) for index in range(6)]
    report = build(metrics={"rate": (Metric(value=0, unit="1", better=better), series)}, header={"primary": "rate"})
    assert decision(analyze(report)) == (expected, "interval_excludes_zero")


def test_a_metric_without_direction_gives_no_verdict(build: Build) -> None:
    """Where neither lower nor higher is better, a change is named and not judged."""
    series = [(100.0, 120.0 + index) for index in range(6)]
    report = build(metrics={"loss": (Metric(value=0, unit="1", better="none"), series)}, header={"primary": "loss"})
    assert analyze(report).metrics["loss"].change == "higher"
    assert decision(analyze(report)) == ("withheld", "no_direction")


def test_noise_is_inconclusive_with_the_pairs_that_would_settle_it(build: Build) -> None:
    """An interval that holds 0 is inconclusive, and the number of pairs is more than there are."""
    got = analyze(build([(1.0, 0.95), (1.0, 1.04), (1.0, 0.96), (1.0, 1.02), (1.0, 0.94), (1.0, 1.01)]))
    assert decision(got) == ("inconclusive", "interval_includes_zero")
    assert got.verdict.pairs_needed is not None
    assert got.verdict.pairs_needed > 6
    assert analyze(build()).verdict.pairs_needed is None


def test_equal_times_are_no_difference(build: Build) -> None:
    """All-equal samples give an interval without width, a note and no NaN, and more pairs would not help."""
    got = analyze(build([(1.5, 1.5)] * 4))
    effect = got.metrics["wall"].effect
    assert effect is not None
    assert (effect.mean, effect.t_low, effect.t_high, effect.sd) == (0.0, 0.0, 0.0, 0.0)
    assert effect.note is not None
    assert got.metrics["wall"].change == "no_change"
    assert decision(got) == ("inconclusive", "no_difference")
    assert got.verdict.pairs_needed is None


def test_equal_ratios_have_an_interval_without_width(build: Build) -> None:
    """Pairs that all gain exactly half are better, and the note says what the interval cannot."""
    got = analyze(build([(2.0, 1.0), (4.0, 2.0), (8.0, 4.0)]))
    effect = got.metrics["wall"].effect
    assert effect is not None
    assert effect.t_low == effect.t_high == math.log(0.5)
    assert effect.note is not None
    assert got.verdict.decision == "better"


def test_the_false_verdict_rate_is_what_the_header_says(build: Build) -> None:
    """Under pure noise, two arms of the same speed get a verdict in at most 5 % of experiments (99 % limit)."""
    rng = random.Random(20260102)
    template = build()
    draws = 2000
    false_verdicts = 0
    for _ in range(draws):
        walls = [Metric(value=math.exp(rng.gauss(0, 0.003)), unit="s") for _ in template.runs]
        runs = tuple(replace(run, metrics={"wall": wall}) for run, wall in zip(template.runs, walls, strict=True))
        got = analyze(replace(template, runs=runs)).verdict.decision
        assert got in {"better", "worse", "inconclusive"}
        false_verdicts += got != "inconclusive"
    assert false_verdicts <= stats.binom.ppf(0.99, draws, 0.05)
    assert false_verdicts >= stats.binom.ppf(0.001, draws, 0.05)


def test_too_few_pairs_give_no_verdict(build: Build) -> None:
    """Without pairs, and with fewer than three, the verdict is withheld and says how many there are."""
    assert decision(analyze(build([]))) == ("withheld", "no_pairs")
    got = analyze(build(FASTER[:2]))
    assert decision(got) == ("withheld", "too_few_pairs")
    assert got.verdict.detail == "2 of at least 3 pairs are in the statistics"
    assert analyze(build(FASTER[:3])).verdict.decision == "better"


def test_a_report_without_runs_or_arms_is_analysed(make_header: Callable[..., Header]) -> None:
    """A header alone, even one of a single arm or none, comes to a withheld verdict and no error."""
    for arms in ((), (Arm(name="native"),), (Arm(name="native"), Arm(name="captured"))):
        got = analyze(Report(path="a.jsonl", header=make_header(arms=arms)))
        assert decision(got) == ("withheld", "no_pairs")
        assert got.parity.status == "not_observed"
        assert (got.num_pairs, got.metrics) == (0, {})


@pytest.mark.parametrize("side", [0, 1])
def test_a_failed_run_takes_its_pair_out_on_both_sides(side: int, build: Build) -> None:
    """The pair stays in the file, is left out of both arms, is counted with its reason, and breaks no parity."""
    failed = 6 + side
    report = build(runs={failed: {"status": "failed", "metrics": {}, "capture": None}}, states={failed: None})
    got = analyze(report)
    assert len(report.pairs) == 7
    assert report.pairs[3].flags == (f"failed:{failed}",)
    assert (got.num_pairs, got.num_included) == (7, 5)
    assert [(pair.pair, pair.reasons) for pair in got.excluded] == [(3, (f"failed:{failed}",))]
    assert (got.metrics["wall"].base.n, got.metrics["wall"].other.n) == (5, 5)
    assert (got.capture["native"].num_runs, got.capture["captured"].num_runs) == (5, 5)
    assert got.verdict.decision == "better"


def test_failures_below_the_minimum_of_pairs_leave_no_verdict(build: Build) -> None:
    """Three pairs of which one failed are too few."""
    assert decision(analyze(build(FASTER[:3], runs={5: {"status": "timeout"}}))) == ("withheld", "too_few_pairs")


def test_a_pair_whose_run_is_missing_is_left_out(build: Build) -> None:
    """A pair record that names a run that is not there counts as excluded, not as a crash."""
    report = build()
    got = analyze(replace(report, runs=report.runs[:-1]))
    assert got.excluded[-1].reasons == ("missing:13",)
    assert got.num_included == 5


def test_a_rule_of_the_header_can_leave_a_pair_out(build: Build) -> None:
    """A pair that its writer did not include is left out with the writer's flags, though both runs are fine."""
    report = build()
    flagged = replace(report.pairs[2], included=False, flags=("throttled",))
    got = analyze(replace(report, pairs=(*report.pairs[:2], flagged, *report.pairs[3:])))
    assert [(pair.pair, pair.reasons) for pair in got.excluded] == [(2, ("throttled",))]


def test_a_missing_value_leaves_the_other_metrics_alone(build: Build) -> None:
    """A value that one run lacks takes its pair out of that metric alone, counted with its reason."""
    series = [(10.0, 9.0 + index / 10) for index in range(6)]
    report = build(metrics={"step": (Metric(value=0, unit="s"), series)})
    runs = list(report.runs)
    gone = Metric(value=None, unit="s", reason="no_steps")
    runs[5] = replace(runs[5], metrics={**runs[5].metrics, "step": gone})
    got = analyze(replace(report, runs=tuple(runs)))
    assert (got.metrics["step"].base.n, got.metrics["step"].other.n, got.metrics["step"].num_missing) == (5, 5, 1)
    assert got.metrics["step"].reasons == {"no_steps": 1}
    assert got.metrics["wall"].base.n == 6
    assert got.verdict.decision == "better"


def test_a_secondary_metric_that_is_absent_hides_no_regression(build: Build) -> None:
    """Twenty percent worse is worse, whatever other numbers are missing."""
    slower = [(1.0 + index / 100, 1.2 + index / 90) for index in range(6)]
    unknown = [(None, None)] * 6
    got = analyze(build(slower, metrics={"peak_rss": (Metric(value=None, unit="By", reason="no_agent"), unknown)}))
    assert got.verdict.decision == "worse"
    assert got.metrics["peak_rss"].change == "unknown"
    assert got.metrics["peak_rss"].effect_reason == "no_value"
    assert got.metrics["peak_rss"].reasons == {"no_agent": 12}
    assert got.metrics["peak_rss"].base.median is None


@pytest.mark.parametrize(
    ("series", "change", "ratio", "reason"),
    [
        ((0, 0), "no_change", None, "zero_baseline"),
        ((0.0, -0.0), "no_change", None, "zero_baseline"),
        ((0, 64), "new", None, "zero_baseline"),
        ((64, 0), "unknown", 0.0, "not_positive"),
        ((-2.0, -1.0), "unknown", 0.5, "not_positive"),
        ((-2.0, 3.0), "unknown", -1.5, "not_positive"),
        ((math.nan, 1.0), "unknown", None, "no_value"),
        ((1.0, math.inf), "unknown", None, "no_value"),
        ((10**400, 1), "unknown", None, "no_value"),
    ],
)
def test_values_without_logarithm_stop_nothing(
    series: tuple[Any, Any], change: str, ratio: float | None, reason: str, build: Build
) -> None:
    """Zero, negative and non-finite values divide nothing, enter no logarithm, and the other rows are there."""
    got = analyze(build(metrics={"odd": (Metric(value=0, unit="By"), [series] * 6)}))
    odd = got.metrics["odd"]
    assert (odd.change, odd.ratio_of_medians, odd.effect_reason) == (change, ratio, reason)
    assert odd.effect is None
    assert got.metrics["wall"].change == "better"


def test_missing_nan_and_infinite_are_told_apart(build: Build) -> None:
    """Why a value cannot be used is counted by kind: absent, unknown, NaN, either infinity."""
    series = [(math.nan, math.inf), (-math.inf, None), (10**400, 1.0), *[(1.0, 1.0)] * 3]
    report = build(metrics={"loss": (Metric(value=None, unit="1", reason="no_steps"), series)})
    runs = [*report.runs[:-1], replace(report.runs[-1], metrics={"wall": report.runs[-1].metrics["wall"]})]
    loss = analyze(replace(report, runs=tuple(runs))).metrics["loss"]
    assert loss.reasons == {"-inf": 1, "beyond_double": 1, "inf": 1, "nan": 1, "no_steps": 1, "not_recorded": 1}
    assert (loss.base.n, loss.num_missing) == (2, 4)


def test_one_pair_without_logarithm_is_not_picked_out(build: Build) -> None:
    """A single zero among the pairs leaves the metric without an effect instead of a selected one."""
    series = [(10.0, 9.0), (0.0, 9.0), *[(10.0, 9.1)] * 4]
    odd = analyze(build(metrics={"odd": (Metric(value=0, unit="s"), series)})).metrics["odd"]
    assert (odd.effect, odd.effect_reason, odd.base.n) == (None, "zero_baseline", 6)


@pytest.mark.parametrize(
    ("series", "change"),
    [
        ([(100, 100)] * 6, "no_change"),
        ([*[(100, 100)] * 5, (100, 101)], "worse"),
        ([*[(100, 100)] * 5, (100, 99)], "better"),
        ([*[(100, 100)] * 4, (100, 99), (100, 101)], "mixed"),
        ([(2**60, 2**60 + 1)] * 6, "worse"),
    ],
)
def test_exact_metrics_need_no_statistics(series: Sequence[tuple[int, int]], change: str, build: Build) -> None:
    """For a metric that equal runs repeat exactly, any difference is one, beyond 2**53 too."""
    got = analyze(build(metrics={"bytes": (Metric(value=0, unit="By", exact=True), series)}))
    assert got.metrics["bytes"].change == change


def test_native_runs_that_differ_make_parity_undecidable(build: Build) -> None:
    """When native runs differ among themselves, nothing is decided, and the first difference is named."""
    got = analyze(build(states={4: {"weight": 1.5}, 9: {"weight": 2.0}}))
    assert got.verdict.decision == "undecidable"
    assert got.parity.status == "undecidable"
    assert got.parity.difference is not None
    assert (got.parity.difference.part, got.parity.difference.runs) == ("parameters", (0, 4))
    assert got.parity.difference.tensor == "weight"
    assert got.verdict.detail == got.parity.difference.text
    assert got.parity.difference.text == "parameters weight: 1.0 in run 0 (native), 1.5 in run 4 (native)"


def test_a_pair_that_differs_fails_parity(build: Build) -> None:
    """One captured run with another bit fails parity, whatever the speed, and names runs, part and tensor."""
    wrong = struct.unpack("<d", struct.pack("<Q", struct.unpack("<Q", struct.pack("<d", 1.0))[0] ^ 1))[0]
    report = build(states={9: {"weight": wrong}})
    got = analyze(report)
    assert decision(got) == ("parity_failed", "states_differ")
    assert got.parity.difference is not None
    assert (got.parity.difference.runs, got.parity.difference.tensor) == ((8, 9), "weight")
    assert [pair.parity.status for pair in report.pairs] == ["equal"] * 4 + ["different"] + ["equal"] * 2
    assert report.pairs[4].parity.difference == got.parity.difference.text


def test_discarded_runs_take_part_in_parity(build: Build) -> None:
    """A difference in the discarded pair is as much a difference as any."""
    assert analyze(build(states={1: {"weight": 7.0}})).verdict.decision == "parity_failed"
    assert analyze(build(states={0: {"weight": 7.0}})).verdict.decision == "undecidable"


@pytest.mark.parametrize(
    ("run", "value", "expected", "text"),
    [
        (5, None, "parity_failed", "run 5 (captured) did not record part parameters"),
        (4, None, "undecidable", "run 4 (native) did not record part parameters"),
        (5, {"weight": 1.0, "bias": 0.0}, "parity_failed", "bias: missing in run 4 (native), 0.0 in run 5 (captured)"),
        (5, {"bias": 2.0}, "parity_failed", "bias: missing in run 4 (native), 2.0 in run 5 (captured)"),
        (
            5,
            {"bias": 1.0},
            "parity_failed",
            "the same values under other names, weight in run 4 (native), bias in run 5 (captured)",
        ),
        (5, {}, "parity_failed", "(value): missing in run 4 (native), dict[] "),
        (5, {"weight": -1.0}, "parity_failed", "weight: 1.0 in run 4 (native), -1.0 in run 5 (captured)"),
        (5, {"weight": 1}, "parity_failed", "weight: 1.0 in run 4 (native), 1 in run 5 (captured)"),
        (5, {"weight": [2.0]}, "parity_failed", "weight: 1.0 in run 4 (native), missing in run 5 (captured)"),
    ],
)
def test_what_one_side_lacks_is_a_difference(run: int, value: Any, expected: str, text: str, build: Build) -> None:
    """A part, a tensor or a type that only one side has is never skipped."""
    got = analyze(build(states={run: value}))
    assert got.verdict.decision == expected
    assert text in str(got.verdict.detail)


def test_a_structure_that_differs_is_a_difference(build: Build) -> None:
    """The same leaves under the same spelling in another structure differ, without a tensor to blame."""
    nested, dotted = {"a": {"b": 1.0}}, {"a.b": 1.0}
    got = analyze(build(states={**dict.fromkeys(range(14), nested), 3: dotted}))
    assert got.parity.difference is not None
    assert got.parity.difference.tensor is None
    assert "another structure" in got.parity.difference.text


def test_values_that_look_alike_are_told_by_their_digests(build: Build) -> None:
    """NaNs of two payloads, and texts that differ after their sixtieth character, show no equal words."""
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]
    for values in ((math.nan, payload), ("x" * 70 + "a", "x" * 70 + "b")):
        states: dict[int, Any] = {run: {"loss": values[0]} for run in range(14)}
        got = analyze(build(states={**states, 5: {"loss": values[1]}}))
        assert got.parity.difference is not None
        words = got.parity.difference.text.removeprefix("parameters loss: ").split(", ")
        assert len({word.split(" in run")[0] for word in words}) == 2


def test_with_one_base_run_a_difference_is_no_proof(build: Build) -> None:
    """A single native run shows no repetition, so the code says that; a second one, discarded too, does."""
    report = build(FASTER[:1], states={3: {"weight": 2.0}})
    assert decision(analyze(report)) == ("parity_failed", "states_differ")
    single = replace(report, runs=report.runs[2:], pairs=report.pairs[1:])
    assert analyze(single).parity.num_base_runs == 1
    assert decision(analyze(single)) == ("parity_failed", "base_not_repeated")


def test_a_part_that_is_missing_comes_after_one_that_differs(build: Build, make_state: Callable[..., State]) -> None:
    """A difference that was seen is named before a part that one run did not record, whatever their order is."""
    report = build(states={5: None})
    assert decision(analyze(report)) == ("parity_failed", "part_not_recorded")
    extra = [make_state(run, run == 7, part="own_part") for run in range(14)]
    both = replace(report, states=(*report.states, *extra))
    got = analyze(both)
    assert decision(got) == ("parity_failed", "states_differ")
    assert got.verdict.detail == "own_part (value): False in run 6 (native), True in run 7 (captured)"
    pair = pair_record(both, both.runs[6], both.runs[7])
    assert pair.parity.difference == got.verdict.detail


def _in_processes(make_state: Callable[..., State], run: int, values: Sequence[Any], **rank: Any) -> list[State]:
    return [
        replace(
            make_state(run, {"weight": value, "shared": 0.5}, process=process),
            rank=process if rank.get("ranked") else None,
        )
        for process, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.0, 2.0, 3.0), None),
        ((3.0, 1.0, 2.0), None),
        ((2.0, 1.0, 3.0), None),
        (
            (4.0, 3.0, 1.0),
            "parameters weight: 2.0 in run 4 (native) process 1, 4.0 in run 5 (captured) process 0",
        ),
        ((3.0, 1.0), "parameters: recorded by 3 processes of run 4 (native), 2 processes of run 5 (captured)"),
        ((3.0,), "parameters: recorded by 3 processes of run 4 (native), 1 process of run 5 (captured)"),
        (
            (3.0, 1.0, 2.0, 2.0),
            "parameters: recorded by 3 processes of run 4 (native), 4 processes of run 5 (captured)",
        ),
        ((1.0, 1.0, 2.0), "parameters weight: 3.0 in run 4 (native) process 2, 1.0 in run 5 (captured) process 1"),
    ],
)
def test_processes_without_ranks_are_a_set(
    build: Build, make_state: Callable[..., State], values: Sequence[float], text: str | None
) -> None:
    """Equal sets are equal in any order; of one that differs, the process that differs is named."""
    report = build(FASTER[:3])
    states = [
        state for run in range(8) for state in _in_processes(make_state, run, values if run == 5 else (1.0, 2.0, 3.0))
    ]
    got = analyze(replace(report, states=tuple(states)))
    assert got.parity.status == ("different" if text else "equal")
    assert (got.parity.difference.text if got.parity.difference else None) == text


def test_processes_with_ranks_are_compared_by_rank(build: Build, make_state: Callable[..., State]) -> None:
    """What two ranks have exchanged is a difference, and the rank names the process."""
    report = build(FASTER[:3])
    states = [
        state
        for run in range(8)
        for state in _in_processes(make_state, run, (2.0, 1.0) if run == 5 else (1.0, 2.0), ranked=True)
    ]
    got = analyze(replace(report, states=tuple(states)))
    assert got.parity.difference is not None
    assert got.parity.difference.text == (
        "parameters weight: 1.0 in run 4 (native) process 0, 2.0 in run 5 (captured) process 0"
    )
    unranked = [replace(state, rank=None) if state.run == 5 else state for state in states]
    assert analyze(replace(report, states=tuple(unranked))).parity.status == "equal"


def test_a_process_that_differs_is_matched_by_its_parts(build: Build, make_state: Callable[..., State]) -> None:
    """The process with most equal parts is the counterpart, although another one has its number."""
    report = build(FASTER[:3])

    def processes(run: int, order: Sequence[int], losses: Sequence[float]) -> list[State]:
        kinds = [({"weight": float(kind)}, {"loss": losses[kind]}) for kind in order]
        return [
            make_state(run, value, part=part, process=process)
            for process, both in enumerate(kinds)
            for part, value in zip(("parameters", "losses"), both, strict=True)
        ]

    states = [
        state
        for run in range(8)
        for state in (processes(run, (1, 0), (7.0, 9.0)) if run == 5 else processes(run, (0, 1), (7.0, 8.0)))
    ]
    got = analyze(replace(report, states=tuple(states)))
    assert got.parity.parts["parameters"].status == "equal"
    assert got.verdict.detail == "losses loss: 8.0 in run 4 (native) process 1, 9.0 in run 5 (captured) process 0"


@given(st.permutations(range(5)), st.permutations(range(5)))
@settings(max_examples=30)
def test_the_numbers_of_processes_never_matter(first: list[int], second: list[int]) -> None:
    """Any two numberings of the same processes match each process with its equal."""
    runs = [
        by_run(
            State(run=0, process=number, part="p", digest=str(kind), num_tensors=0, num_bytes=0, strides_digest="")
            for number, kind in enumerate(order)
        )[0]
        for order in (first, second)
    ]
    assert {(first[a or 0], second[b or 0]) for a, b in match(*runs)} == {(kind, kind) for kind in range(5)}


def test_parts_processes_and_repeats_are_all_compared(build: Build, make_state: Callable[..., State]) -> None:
    """Each part of each process counts, in the order in which a process recorded it; the others are not observed."""

    def more(run: int, losses: Sequence[float]) -> list[State]:
        repeated = [make_state(run, loss, part="losses", process=1) for loss in losses]
        return [*repeated, make_state(run, {}, part="own_part")]

    report = build()
    whole = replace(report, states=(*report.states, *(item for run in range(14) for item in more(run, (1.0, 2.0)))))
    got = analyze(whole)
    assert got.parity.status == "equal"
    assert got.parity.covered == ("parameters", "losses", "own_part")
    assert got.parity.parts["scheduler"].status == "not_observed"
    assert got.parity.parts["losses"].num_runs == 14
    for losses in ((2.0, 1.0), (1.0,), (1.0, 2.0, 2.0), ()):
        extra = (item for run in range(14) for item in more(run, losses if run == 3 else (1.0, 2.0)))
        other = analyze(replace(report, states=(*report.states, *extra)))
        assert other.verdict.decision == "parity_failed"
        assert other.parity.difference is not None
        assert other.parity.difference.part == "losses"


def test_equal_nans_are_equal_and_flagged(build: Build) -> None:
    """A loss that is the same NaN everywhere keeps parity and is counted; another payload differs."""
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]
    states: dict[int, Any] = {run: {"loss": math.nan} for run in range(14)}
    got = analyze(build(states=states))
    assert got.parity.status == "equal"
    assert got.parity.parts["parameters"].nonfinite == 1
    assert analyze(build(states={**states, 3: {"loss": payload}})).parity.status == "different"


def test_another_memory_layout_is_told_and_is_no_difference(build: Build) -> None:
    """Strides that differ leave parity equal and are reported."""
    report = build()
    assert analyze(report).parity.parts["parameters"].equal_strides is True
    states = tuple(replace(state, strides_digest="0" * 64) if state.run == 3 else state for state in report.states)
    got = analyze(replace(report, states=states))
    assert got.parity.status == "equal"
    assert got.parity.parts["parameters"].equal_strides is False


def test_another_value_is_no_other_memory_layout(build: Build) -> None:
    """Parity has the difference; the strides agree."""
    report = build()
    states = tuple(replace(state, digest="0" * 64) if state.run == 3 else state for state in report.states)
    got = analyze(replace(report, states=states)).parity
    assert (got.status, got.parts["parameters"].equal_strides) == ("different", True)


def test_no_digests_no_verdict(build: Build) -> None:
    """Where no run recorded its state there is no speed verdict."""
    got = analyze(build(states=dict.fromkeys(range(14))))
    assert decision(got) == ("withheld", "parity_not_observed")
    assert got.verdict.parts == ()


def test_a_captured_arm_must_replay(build: Build, make_run: Callable[..., Run]) -> None:
    """A captured run without replays, or a native one with some, withholds the verdict with counted reasons."""
    idle = make_run(5, replays=0).capture
    got = analyze(build(runs={5: {"capture": idle}}))
    assert decision(got) == ("withheld", "no_replays")
    assert "1 of 6 captured runs replayed nothing: warmup (6)" in str(got.verdict.detail)
    busy = make_run(5, replays=3).capture
    assert decision(analyze(build(runs={4: {"capture": busy}}))) == ("withheld", "native_replayed")
    assert decision(analyze(build(runs={1: {"capture": idle}}))) == ("better", "interval_excludes_zero")


def test_a_run_without_capture_report_says_why(build: Build) -> None:
    """An optimizer that reports no captures, and an agent that was not loaded, are counted reasons."""
    gone = {"capture": None, "agent": AgentHealth(loaded=False, reason="isolated")}
    got = analyze(build(runs={5: {"capture": None}, 7: gone}))
    assert decision(got) == ("withheld", "no_replays")
    assert got.capture["captured"].reasons == {"isolated": 1, "no_capture_report": 1, "warmup": 4}
    assert got.capture["captured"].num_reporting == 4


@pytest.mark.parametrize("different", [False, True])
def test_an_arm_whose_environment_asks_for_captures_must_replay(build: Build, different: bool) -> None:
    """Whatever its name is, and also where its computation is another one."""
    names = {"native": "own", "captured": "ours"}
    runs = {run: {"arm": names[("native", "captured")[run % 2]], "capture": None} for run in range(14)}
    asked = Arm(name="ours", env={"LUCID_CAPTURE_UPDATES": "1"}, different=different)
    got = analyze(build(header={"arms": (Arm(name="own"), asked)}, runs=runs))
    assert decision(got) == ("withheld", "no_replays")
    assert got.verdict.detail == "6 of 6 ours runs replayed nothing: no_capture_report (6)"


def test_an_arm_whose_environment_forbids_captures_may_not_replay(build: Build, make_run: Callable[..., Run]) -> None:
    """Its variable counts, not its name."""
    busy = make_run(5, replays=3).capture
    runs = {run: {"arm": ("base", "captured")[run % 2], "capture": busy} for run in range(14)}
    forbidden = Arm(name="captured", env={"LUCID_CAPTURE_UPDATES": "0"})
    got = analyze(build(header={"arms": (Arm(name="base"), forbidden)}, runs=runs))
    assert decision(got) == ("withheld", "native_replayed")
    assert got.verdict.detail == "6 of 6 captured runs replayed graphs"


def test_other_arms_need_no_replays(build: Build) -> None:
    """The capture check belongs to arms that say so by variable or name; others are compared without it."""
    names = {"native": "plain", "captured": "tuned"}
    runs = {run: {"arm": names[("native", "captured")[run % 2]], "capture": None} for run in range(14)}
    got = analyze(build(header={"arms": (Arm(name="plain"), Arm(name="tuned"))}, runs=runs))
    assert (got.base, got.other) == ("plain", "tuned")
    assert got.verdict.decision == "better"


def walls(native: str, captured: str, steps: tuple[int, int] = (120, 120)) -> dict[int, dict[str, Any]]:
    """Return the changes that give each arm's runs walls of a source, and a number of seen steps."""
    return {
        run: {
            "wall": Wall(source=(native, captured)[run % 2], begin_ns=0, end_ns=1),  # type: ignore[arg-type]
            "agent": AgentHealth(loaded=True, num_processes=1, num_steps=steps[run % 2]),
        }
        for run in range(14)
    }


@pytest.mark.parametrize("different", [False, True])
@pytest.mark.parametrize(
    ("runs", "detail"),
    [
        (
            walls("steps", "steps", (120, 10)),
            "the wall spans 120 seen optimizer steps in native runs and 10 seen optimizer steps in captured runs",
        ),
        (
            walls("steps", "steps", (1, 2)),
            "the wall spans 1 seen optimizer step in native runs and 2 seen optimizer steps in captured runs",
        ),
        (
            walls("fit", "process", (0, 0)),
            "the wall spans fit() in native runs and the whole process in captured runs",
        ),
        (
            walls("steps", "fit"),
            "the wall spans 120 seen optimizer steps in native runs and fit() in captured runs",
        ),
        (
            walls("steps", "steps") | dict(list(walls("fit", "steps", (9, 118)).items())[:4]),
            (
                "the wall spans fit() or 120 seen optimizer steps in native runs and 118 to 120 seen optimizer steps "
                "in captured runs"
            ),
        ),
    ],
)
def test_walls_of_unequal_work_have_no_verdict(
    runs: Mapping[int, Mapping[str, Any]], detail: str, different: bool, build: Build
) -> None:
    """Walls of another source, or of another number of seen steps, say nothing about speed, whatever the arm is."""
    arm = Arm(name="captured", different=different)
    got = analyze(build(runs=runs, header={"arms": (Arm(name="native"), arm)}))
    assert decision(got) == ("withheld", "walls_differ")
    assert got.verdict.detail == detail


@pytest.mark.parametrize(
    "runs",
    [
        walls("steps", "steps"),
        walls("fit", "fit", (120, 10)),
        walls("process", "process", (3, 10)),
        # What is in no statistic is asked nothing: the discarded pair.
        walls("fit", "fit") | {0: {"wall": Wall(source="process", begin_ns=0, end_ns=1)}},
    ],
)
def test_walls_of_the_same_span_are_compared(runs: Mapping[int, Mapping[str, Any]], build: Build) -> None:
    """Steps that were not seen do not matter where the wall is not taken from them."""
    assert decision(analyze(build(runs=runs))) == ("better", "interval_excludes_zero")


def holes(*runs: int) -> dict[int, dict[str, Any]]:
    """Return the changes that give runs a process which trained and left no digest."""
    return {
        run: {"agent": AgentHealth(loaded=True, num_processes=2, num_steps=11, uncovered=("one process", "a state"))}
        for run in runs
    }


@pytest.mark.parametrize("runs", [(2,), (5,), tuple(range(14))], ids=["native", "captured", "all"])
def test_what_is_in_no_digest_leaves_no_claim_of_equality(runs: tuple[int, ...], build: Build) -> None:
    """Whether one arm or both have it: what two processes ended with without a word may be anything."""
    got = analyze(build(runs=holes(*runs)))
    assert decision(got) == ("withheld", "parity_incomplete")
    assert got.verdict.detail == "one process, and 1 more"
    assert analyze(build(runs=holes(*runs), states={5: {"weight": 4.0}})).verdict.decision == "parity_failed"


def test_what_is_in_no_digest_does_not_matter_where_no_equality_is_claimed(build: Build) -> None:
    """Of another computation, and in a discarded pair."""
    other = {"arms": (Arm(name="native"), Arm(name="captured", different=True))}
    assert analyze(build(runs=holes(*range(14)), header=other)).verdict.decision == "better"
    assert analyze(build(runs=holes(0, 1))).verdict.decision == "better"


def test_another_computation_is_judged_although_the_base_does_not_repeat(build: Build) -> None:
    """Its states are held against nothing, so it does not matter whether the base's agree."""
    states = {2: {"weight": 3.0}}
    arms = (Arm(name="native"), Arm(name="captured", different=True))
    got = analyze(build(states=states, header={"arms": arms}))
    assert got.parity.status == "undecidable"
    assert decision(got) == ("better", "interval_excludes_zero")
    assert analyze(build(states=states)).verdict.decision == "undecidable"


def test_another_primary_metric_asks_for_no_wall(build: Build) -> None:
    """Walls of unequal work are no reason against a verdict on something else."""
    series = [(100.0, 120.0 + index) for index in range(6)]
    runs = walls("steps", "steps", (120, 10))
    report = build(metrics={"rate": (Metric(value=0, unit="1"), series)}, header={"primary": "rate"}, runs=runs)
    assert decision(analyze(report)) == ("worse", "interval_excludes_zero")


def test_reasons_come_in_their_order(build: Build, make_run: Callable[..., Run]) -> None:
    """Native differences come before captured ones, parity before the capture check, the number of pairs last."""
    idle = make_run(5, replays=0).capture
    bad: dict[str, Any] = {"states": {2: {"weight": 3.0}, 5: {"weight": 4.0}}, "runs": {5: {"capture": idle}}}
    assert analyze(build(FASTER[:2], **bad)).verdict.decision == "undecidable"
    assert analyze(build(FASTER[:2])).verdict.reason == "too_few_pairs"
    assert analyze(build(**bad)).verdict.decision == "undecidable"
    assert analyze(build(states={5: {"weight": 4.0}}, runs=bad["runs"])).verdict.decision == "parity_failed"
    assert analyze(build(runs=bad["runs"])).verdict.reason == "no_replays"
    unequal = walls("steps", "process")
    unequal[5] |= bad["runs"][5]
    assert analyze(build(runs=unequal)).verdict.reason == "no_replays"
    assert analyze(build(FASTER[:2], runs=walls("steps", "process"))).verdict.reason == "walls_differ"


def test_the_order_of_the_records_does_not_matter(build: Build) -> None:
    """Records in another order come to the same numbers and decision."""
    report = build()
    backwards = replace(report, runs=report.runs[::-1], states=report.states[::-1], pairs=report.pairs[::-1])
    assert analyze(backwards).metrics == analyze(report).metrics
    assert analyze(backwards).verdict == analyze(report).verdict


def with_summary(report: Report, path: Path) -> Report:
    """Write a whole report with its summary to a file and read it back."""
    with Writer(path) as writer:
        records: list[Record] = [report.header, *report.envs, *report.runs, *report.states, *report.pairs]
        for record in records:
            writer.write(record)
        writer.write(Summary(analysis=plain_analysis(analyze(report))))
        writer.write(End(status="complete", num_records=writer.num_records))
    return read_report(str(path), allow_partial=False)


def test_the_summary_follows_from_the_file(build: Build, tmp_path: Path) -> None:
    """A report that was written and read back comes to its own summary, byte for byte."""
    odd = {"odd": (Metric(value=0, unit="By"), [(0, 2**60 + 1), *[(math.nan, -0.0)] * 5])}
    report = with_summary(build(metrics=odd), tmp_path / "a.jsonl")
    assert verify_summary(report) == []
    assert report.summary is not None
    assert jsonio.dumps(plain_analysis(analyze(report))) == jsonio.dumps(report.summary.analysis)


def test_a_summary_that_says_something_else_is_found(build: Build, tmp_path: Path) -> None:
    """Every number, name or verdict that does not follow from the runs is listed with its path."""
    report = with_summary(build(), tmp_path / "a.jsonl")
    assert report.summary is not None
    wrong = jsonio.loads(jsonio.dumps(report.summary.analysis))
    wrong["metrics"]["wall"]["effect"]["mean"] *= 1.001
    wrong["verdict"]["decision"] = "worse"
    wrong["num_included"] = 7
    wrong["excluded"] = [{"pair": 1, "reasons": []}]
    wrong["invented"] = 1
    found = verify_summary(replace(report, summary=Summary(analysis=wrong)))
    assert [text.split(":")[0] for text in found] == [
        "summary.excluded",
        "summary.invented",
        "summary.metrics.wall.effect.mean",
        "summary.num_included",
        "summary.verdict.decision",
    ]
    assert verify_summary(replace(report, summary=None)) == ["summary: missing"]


def test_the_end_agrees_with_the_runs(build: Build, make_header: Callable[..., Header]) -> None:
    """Complete is every planned run, each ok; failed and interrupted need something that went wrong or is missing."""
    report = build()
    slots = tuple(Slot(slot=run.run, pair=run.pair, arm=run.arm) for run in report.runs)
    header = make_header(slots=slots)
    failed = (*report.runs[:-1], replace(report.runs[-1], status="failed"))
    whole, short = report.runs, report.runs[:-1]
    expected: list[tuple[Any, Any, bool]] = [
        ("complete", whole, True),
        ("complete", short, False),
        ("complete", failed, False),
        ("failed", failed, True),
        ("failed", whole, False),
        ("failed", short, False),
        ("interrupted", short, True),
        ("interrupted", failed, True),
        ("interrupted", whole, False),
    ]
    for status, runs, is_sound in expected:
        ended = replace(report, header=header, runs=runs, pairs=(), end=End(status=status, num_records=1))
        problems = [text for text in verify_summary(ended) if text.startswith("end.status")]
        assert bool(problems) is not is_sound, (status, len(runs))


def test_another_machines_logarithm_is_no_difference(build: Build, tmp_path: Path) -> None:
    """A last digit that another library rounds otherwise is accepted."""
    report = with_summary(build(), tmp_path / "a.jsonl")
    assert report.summary is not None
    near = jsonio.loads(jsonio.dumps(report.summary.analysis))
    near["metrics"]["wall"]["effect"]["mean"] = math.nextafter(near["metrics"]["wall"]["effect"]["mean"], 1)
    assert verify_summary(replace(report, summary=Summary(analysis=near))) == []


def test_pairs_and_states_that_do_not_follow_are_found(build: Build) -> None:
    """A pair with another effect, flag or parity, or without its run, and a state without run are listed."""
    report = build()
    wrong = replace(report.pairs[1], included=False, effects={"wall": 0.5}, parity=PairParity(status="different"))
    lost = Pair(pair=9, runs=(90, 91), included=True, parity=PairParity(status="equal"))
    stray = replace(report.states[0], run=77)
    bad = replace(report, pairs=(report.pairs[0], wrong, *report.pairs[2:], lost), states=(*report.states, stray))
    found = verify_summary(bad)
    assert [text.split(":")[0] for text in found] == [
        "pair 1.effects.wall",
        "pair 1.included",
        "pair 1.parity.status",
        "pair 9",
        "state of run 77",
    ]


@given(st.lists(st.tuples(st.floats(), st.floats()), min_size=3, max_size=5))
@settings(max_examples=100)
def test_no_values_break_the_analysis(values: list[tuple[float, float]]) -> None:
    """Whatever doubles the runs report, the analysis comes to plain finite data that JSON holds."""
    runs = tuple(
        _bare_run(2 * pair + side, pair, value) for pair, both in enumerate(values) for side, value in enumerate(both)
    )
    pairs = tuple(
        Pair(pair=pair, runs=(2 * pair, 2 * pair + 1), included=True, parity=PairParity(status="equal"))
        for pair in range(len(values))
    )
    header = _bare_header()
    got = analyze(Report(path="a", header=header, runs=runs, pairs=pairs))
    text = jsonio.dumps(asdict(got))
    assert b"$float" not in text
    assert jsonio.loads(text)["num_included"] == len(values)


def _bare_header() -> Header:
    arms = (Arm(name="a"), Arm(name="b"))
    return Header(id="", created="", tool=Tool(name="lucid", version="0"), command=(), arms=arms, pairs=3)


def _bare_run(number: int, pair: int, value: float) -> Run:
    return Run(
        run=number,
        pair=pair,
        arm="ab"[number % 2],
        status="ok",
        started="",
        process_ns=1,
        metrics={"wall": Metric(value=value, unit="s")},
        agent=AgentHealth(loaded=False),
    )


GPU = {"gpu_name": "NVIDIA H200", "torch": "2.11.0", "driver_major": "580"}


def compare(a: Report, b: Report, *allow: str) -> Difference:
    """Compare two reports, allowing keys by name."""
    return diff(a, b, allow=allow)


def test_two_reports_of_one_effect_do_not_differ(build: Build) -> None:
    """A report against itself has one row a metric, a quiet canary, and is inconclusive."""
    report = build(identity=GPU)
    got = compare(report, report)
    assert [row.metric for row in got.rows] == ["wall"]
    assert got.rows[0].difference is not None
    assert got.rows[0].difference.difference == 0.0
    assert (got.decision, got.reason) == ("inconclusive", "interval_includes_zero")
    assert got.canary is not None
    assert got.canary.is_quiet
    assert (got.identities, got.only_in_a, got.only_in_b) == ((), (), ())


def test_the_effects_are_compared_and_not_the_seconds(build: Build) -> None:
    """On a machine twice as slow, a larger gain is still a larger gain, by Welch's interval; the canary tells."""
    a = build()
    b_values = [(2 * base, 2 * other * 0.9 + index / 1000) for index, (base, other) in enumerate(FASTER)]
    got = compare(a, build(b_values))
    effects = [[math.log(other / base) for base, other in values] for values in (FASTER, b_values)]
    interval = stats.ttest_ind(effects[1], effects[0], equal_var=False).confidence_interval(0.95)
    row = got.rows[0]
    assert row.difference is not None
    assert (row.difference.low, row.difference.high) == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert (row.verdict, got.decision) == ("better", "better")
    assert got.canary is not None
    assert got.canary.interval.difference == pytest.approx(math.log(2))
    assert (got.canary.is_quiet, got.canary.is_certain) == (False, True)
    assert compare(build(b_values), a).decision == "worse"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"identity": {**GPU, "gpu_name": "NVIDIA A100"}}, "gpu_name"),
        ({"identity": {**GPU, "torch": "2.10.0"}}, "torch"),
        ({"identity": {**GPU, "driver_major": "570"}}, "driver_major"),
        ({"identity": {key: GPU[key] for key in ("gpu_name", "torch")}}, "driver_major"),
        ({"identity": {**GPU, "allow_tf32": True}}, "allow_tf32"),
        ({"identity": GPU, "header": {"command": ("python", "train.py", "--batch", "8")}}, "command"),
        ({"identity": GPU, "header": {"method": "paired/1"}}, "method"),
        ({"identity": GPU, "header": {"primary": "peak_rss"}}, "primary"),
        ({"identity": GPU, "header": {"arms": (Arm(name="native"), Arm(name="captured"))}}, "arms"),
        ({"identity": GPU, "runs": {2: {"metrics": {"wall": Metric(value=1.0, unit="ms")}}}}, "unit:wall"),
    ],
)
def test_what_differs_in_substance_is_refused_unless_allowed(changes: dict[str, Any], key: str, build: Build) -> None:
    """Another GPU, driver, torch, setting, command, method or unit is named and refused, or allowed by name."""
    a, b = build(identity=GPU), build(**changes)
    with pytest.raises(NotComparableError) as caught:
        compare(a, b)
    assert [reason.split(" is ")[0] for reason in caught.value.reasons] == [key]
    with pytest.raises(NotComparableError):
        compare(a, b, "something_else")
    got = compare(a, b, key)
    assert [(found.key, found.tier) for found in got.identities] == [(key, "allowed")]


def test_every_obstacle_is_listed(build: Build) -> None:
    """All differences come in one error, with both values."""
    a = build(identity=GPU)
    b = build(identity={"gpu_name": None, "torch": "2.10.0", "driver_major": "580"})
    with pytest.raises(
        NotComparableError, match=r"gpu_name is NVIDIA H200 .* unknown .*; torch is 2\.11\.0 .* 2\.10\.0"
    ):
        compare(a, b)


def test_what_differs_in_detail_is_noted(build: Build) -> None:
    """Another card of the same model and another number of pairs are shown and do not stop the comparison."""
    a = build(identity={**GPU, "gpu_uuid": "GPU-1"})
    b = build(FASTER[:4], identity={**GPU, "gpu_uuid": "GPU-2"})
    got = compare(a, b)
    assert {(found.key, found.tier) for found in got.identities} == {("gpu_uuid", "noted"), ("pairs", "noted")}


def test_lost_metrics_stop_and_added_ones_are_listed(build: Build) -> None:
    """A metric that the second report lost is refused unless allowed; one that it gained is listed."""
    series = [(100, 100 + index) for index in range(6)]
    plain, rich = build(), build(metrics={"peak_rss": (Metric(value=0, unit="By"), series)})
    added = compare(plain, rich)
    assert (added.only_in_a, added.only_in_b) == ((), ("peak_rss",))
    with pytest.raises(NotComparableError, match="metric:peak_rss has values in the first report and none"):
        compare(rich, plain)
    lost = compare(rich, plain, "metric:peak_rss")
    assert (lost.only_in_a, [row.metric for row in lost.rows]) == (("peak_rss",), ["wall"])
    unknown = build(metrics={"peak_rss": (Metric(value=None, unit="By", reason="no_agent"), [(None, None)] * 6)})
    with pytest.raises(NotComparableError, match="metric:peak_rss"):
        compare(rich, unknown)
    assert compare(unknown, unknown).only_in_a == ()


def test_no_common_metric_is_refused(build: Build) -> None:
    """Reports without any metric in common are not comparable, and both lists are shown."""
    series = [(100, 100 + index) for index in range(6)]
    nothing = [(None, None)] * 6
    a, b = build(), build(nothing, metrics={"peak_rss": (Metric(value=0, unit="By"), series)})
    with pytest.raises(NotComparableError, match="no metric has values in both: wall against peak_rss"):
        compare(a, b)


def test_a_report_without_runs_is_refused(build: Build) -> None:
    """A report without runs, or without a pair in its statistics, passes no comparison, on either side."""
    good = build()
    empty = replace(good, runs=(), states=(), pairs=())
    with pytest.raises(NotComparableError, match="the first report has no runs"):
        compare(empty, good)
    with pytest.raises(NotComparableError, match="the second report has no runs"):
        compare(good, empty)
    with pytest.raises(NotComparableError, match="second report has 2 runs and no pair"):
        compare(good, build([]))


def test_a_report_without_verdict_gives_none_to_the_comparison(build: Build) -> None:
    """Where parity failed in one report its rows are shown and the decision is withheld."""
    got = compare(build(), build(states={5: {"weight": 4.0}}))
    assert (got.decision, got.reason) == ("withheld", "the second report has no verdict: states_differ")
    assert len(got.rows) == 1


def test_zeros_and_equal_values_are_the_same(build: Build) -> None:
    """0 against 0 is no change, beside the other rows; so are equal values in every pair."""
    zero = build(metrics={"extra": (Metric(value=0, unit="By"), [(0, 0)] * 6)})
    got = compare(zero, zero)
    assert [(row.metric, row.verdict) for row in got.rows] == [("wall", "inconclusive"), ("extra", "same")]
    equal = build([(1.5, 1.5)] * 3)
    assert compare(equal, equal).rows[0].verdict == "same"
    assert (compare(equal, equal).decision, compare(equal, equal).reason) == ("same", "no_difference")


def test_importing_the_comparison_is_cheap() -> None:
    """Comparing reports imports no torch, no numpy, no scipy and no click."""
    code = (
        "import sys, lucid_profiler.compare; print(*{'torch', 'numpy', 'scipy', 'click', 'psutil'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == ""
