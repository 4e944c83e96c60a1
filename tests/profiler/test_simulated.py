"""Verdicts, warnings and intervals of simulated reports whose truth is known.

Rates without an effect are taken over 2,000 reports a setting; those with one, where only a verdict against the effect
can be false and none is expected, over 400. Limits are binomial at 99 %. Seeds are those of the settings, so a rate is
the same in every run.
"""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from scipy import stats
from tools.bench.simulated import ALPHA, Order, Setting, Tally, assess, simulate, tally

from lucid_cli.reporters.sentences import verdict_sentence, warning_sentence
from lucid_cli.reporters.table import render_report
from lucid_profiler import jsonio
from lucid_profiler.compare import analyze, pair_record, plain_analysis, verify_summary
from lucid_profiler.pairs import moments, welch_interval
from lucid_profiler.reader import Report
from lucid_profiler.records import Arm, Header, Metric, Run, State, Summary

NUM_REPORTS = 2000
NUM_WITH_EFFECT = 400
NOISE = Setting(name="noise")
DRIFTS = (Setting(name="drift", drift=0.004), Setting(name="drift", drift=0.02))
STEP = Setting(name="step", step=0.15)
MODES = Setting(name="modes", mode=0.05)
SLOW_FIRST = Setting(name="slow first run", first=0.1)
SLOW_FIRST_KEPT = Setting(name="slow first run in the statistics", first=0.1, num_discarded=0)
DISTURBED = (*DRIFTS, STEP, MODES, SLOW_FIRST_KEPT)

counted = functools.cache(tally)


def name(setting: Setting) -> str:
    """Return the id of a setting's test."""
    return f"{setting.name} {setting.drift or ''} {setting.effect or ''} {setting.num_pairs}"


def at_most(num_reports: int, rate: float) -> float:
    """Return the count that a true rate exceeds in 1 of 100 simulations."""
    return float(stats.binom.ppf(0.99, num_reports, rate))


def band(num_reports: int, rate: float) -> tuple[float, float]:
    """Return the counts between which a true rate stays in 99 of 100 simulations."""
    low, high = stats.binom.interval(0.99, num_reports, rate)
    return float(low), float(high)


@pytest.mark.parametrize("num_pairs", [3, 4, 6, 10])
def test_noise_alone_seldom_comes_to_a_verdict(num_pairs: int) -> None:
    """Of 2,000 reports of independent noise no more have a verdict than 5 % and a 99 % limit allow."""
    counts = counted(replace(NOISE, num_pairs=num_pairs), NUM_REPORTS)
    assert counts.false <= at_most(NUM_REPORTS, ALPHA)
    assert counts.decisions.total() == NUM_REPORTS


def test_a_slow_first_run_is_discarded_with_its_pair() -> None:
    """It comes to no more verdicts than noise alone, and to no more warnings."""
    counts = counted(SLOW_FIRST, NUM_REPORTS)
    assert counts.false <= at_most(NUM_REPORTS, ALPHA)
    assert counts.warned <= at_most(NUM_REPORTS, ALPHA)


@pytest.mark.parametrize("num_pairs", [3, 4, 6, 10])
def test_noise_alone_seldom_warns(num_pairs: int) -> None:
    """No rule warns of more than 5 % of reports of independent noise, nor do all of them together."""
    counts = counted(replace(NOISE, num_pairs=num_pairs), NUM_REPORTS)
    assert all(num <= ALPHA * NUM_REPORTS for num in counts.codes.values())
    assert counts.warned <= ALPHA * NUM_REPORTS


@pytest.mark.parametrize("setting", DISTURBED, ids=name)
def test_what_bends_the_runs_warns_or_wins_nothing(setting: Setting) -> None:
    """Without an effect at most 1 % of reports have a verdict and no warning (5 % are allowed)."""
    counts = counted(setting, NUM_REPORTS)
    assert counts.unwarned_false <= 0.01 * NUM_REPORTS
    assert counts.false <= at_most(NUM_REPORTS, ALPHA)


@pytest.mark.parametrize("effect", [-0.005, -0.01, -0.1])
@pytest.mark.parametrize("setting", [*DISTURBED, SLOW_FIRST], ids=name)
def test_what_bends_the_runs_turns_no_effect_round(setting: Setting, effect: float) -> None:
    """With an effect at most 1 % of reports have a verdict against it and no warning; over 400 reports."""
    counts = counted(replace(setting, effect=effect), NUM_WITH_EFFECT)
    assert counts.unwarned_false <= 0.01 * NUM_WITH_EFFECT


@pytest.mark.parametrize(
    ("setting", "code", "share"),
    [
        (DRIFTS[0], "drift", 0.99),
        (DRIFTS[1], "drift", 0.99),
        (STEP, "step", 0.6),
        (MODES, "two_modes", 0.9),
        (SLOW_FIRST_KEPT, "outlying_pair", 0.99),
    ],
    ids=lambda value: name(value) if isinstance(value, Setting) else str(value),
)
def test_each_disturbance_has_its_warning(setting: Setting, code: str, share: float) -> None:
    """Drift, step, modes and a slow run are named; a step at the first or last runs is only an outlying pair."""
    assert counted(setting, NUM_REPORTS).codes[code] >= share * NUM_REPORTS


@pytest.mark.parametrize(("effect", "share"), [(-0.005, 0.5), (-0.01, 0.9), (-0.1, 1.0)])
def test_six_pairs_find_a_small_effect(effect: float, share: float) -> None:
    """At 0.3 % noise 1 % less time is found in 90 % of reports, half a percent in half of them."""
    counts = counted(replace(NOISE, effect=effect), NUM_REPORTS)
    assert counts.found >= share * NUM_REPORTS
    assert counts.false == 0


@pytest.mark.parametrize("drift", [0.004, 0.02])
@pytest.mark.parametrize(("order", "num_pairs"), [("random", 3), ("base_first", 3), ("base_first", 6)])
def test_drift_that_one_sided_orders_let_in_wins_nothing(drift: float, order: Order, num_pairs: int) -> None:
    """Where one arm ran later, by the draw or since pairs were left out, drift is taken out before a verdict."""
    setting = Setting(name=order, drift=drift, num_pairs=num_pairs, order=order)
    counts = counted(setting, NUM_REPORTS)
    assert counts.false <= at_most(NUM_REPORTS, ALPHA)
    assert counts.unwarned_false <= 0.01 * NUM_REPORTS


def test_without_the_rule_drift_would_win_in_a_one_sided_order() -> None:
    """At +2 % a run and the base always first, most of the t intervals alone miss the truth."""
    setting = Setting(name="base_first", drift=0.02, num_pairs=3, order="base_first")
    assert counted(setting, NUM_REPORTS).t_covers < 0.2 * NUM_REPORTS


@pytest.mark.parametrize(
    "setting",
    [
        *(replace(NOISE, num_pairs=n) for n in (3, 4, 6, 10)),
        *(replace(NOISE, effect=effect) for effect in (-0.005, -0.01, -0.1)),
        MODES,
    ],
    ids=name,
)
def test_intervals_hold_the_truth_as_often_as_they_say(setting: Setting) -> None:
    """The t interval in 95 % of reports and the range in its own share, both within 99 % limits.

    The t interval is exact for log-normal noise alone; with modes of equal shares in both arms it comes close.
    """
    counts = counted(setting, NUM_REPORTS)
    low, high = band(NUM_REPORTS, 1 - ALPHA)
    assert low <= counts.t_covers <= high
    low, high = band(NUM_REPORTS, 1 - 2.0 ** (1 - setting.num_pairs))
    assert low <= counts.range_covers <= high


@pytest.mark.parametrize("setting", [*DRIFTS, STEP, SLOW_FIRST_KEPT], ids=name)
def test_intervals_of_bent_runs_are_too_wide_and_never_too_narrow(setting: Setting) -> None:
    """Drift, a step and a slow run widen both intervals: they hold the truth at least as often as they say."""
    counts = counted(setting, NUM_REPORTS)
    assert counts.t_covers >= band(NUM_REPORTS, 1 - ALPHA)[0]
    assert counts.range_covers >= band(NUM_REPORTS, 1 - 2.0 ** (1 - setting.num_pairs))[0]


def test_the_t_interval_cannot_hold_its_label_for_modes_in_one_arm() -> None:
    """A slow mode in a fifth of one arm's runs is often not seen at all, and the mean is missed; the range is not."""
    setting = Setting(name="modes in one arm", mode=0.05, mode_shares=(0.0, 0.2))
    counts = counted(setting, NUM_REPORTS)
    assert counts.t_covers < 0.8 * NUM_REPORTS
    assert counts.unwarned_false <= at_most(NUM_REPORTS, ALPHA)


def test_the_interval_between_two_reports_holds_the_truth_as_often_as_it_says() -> None:
    """Welch's interval, of reports of unequal noise and size, holds the difference in 95 % within 99 % limits."""
    rng = random.Random(20260103)
    hits = 0
    for _ in range(NUM_REPORTS):
        a, b = ([rng.gauss(mean, sd) for _ in range(n)] for mean, sd, n in ((0, 0.003, 6), (-0.02, 0.006, 8)))
        interval = welch_interval(moments(a), moments(b), alpha=ALPHA)
        assert interval is not None
        hits += interval.low <= -0.02 <= interval.high
    low, high = band(NUM_REPORTS, 1 - ALPHA)
    assert low <= hits <= high


Whole = Callable[..., Report]


@pytest.fixture
def whole(make_header: Callable[..., Header], make_state: Callable[..., State]) -> Whole:
    """Give a function that makes the report of simulated pairs, with equal states."""

    def make(pairs: list[tuple[Run, Run]], method: str = "paired/2") -> Report:
        runs = tuple(run for pair in pairs for run in pair)
        states = tuple(make_state(run.run, 1.0) for run in runs)
        header = make_header(arms=(Arm(name="base"), Arm(name="other")), method=method, discarded_pairs=0)
        report = Report(path="a.jsonl", header=header, runs=runs, states=states)
        return replace(report, pairs=tuple(pair_record(report, *pair) for pair in pairs))

    return make


@pytest.fixture
def one_sided() -> list[tuple[Run, Run]]:
    """Give pairs that drift makes slower in the arm that always comes second."""
    return simulate(Setting(name="", drift=0.02, order="base_first", num_discarded=0), random.Random(3))


@pytest.mark.parametrize("setting", [NOISE, DRIFTS[1], MODES, replace(STEP, effect=-0.1)], ids=name)
def test_a_whole_report_comes_to_the_same(setting: Setting, whole: Whole) -> None:
    """What is simulated on numbers alone is what `analyze` says of the report that holds them."""
    rng = random.Random(7)
    for _ in range(5):
        pairs = simulate(setting, rng)
        analysis, outcome = analyze(whole(pairs)), assess(pairs)
        assert analysis.verdict.decision == outcome.decision
        assert analysis.metrics["wall"].effect == outcome.effect
        assert analysis.warnings == outcome.warnings


def test_a_report_keeps_the_verdict_of_its_method(whole: Whole, one_sided: list[tuple[Run, Run]]) -> None:
    """Drift takes a verdict back under paired/2; a report of paired/1 keeps what it says, and has the warning."""
    new, old = analyze(whole(one_sided)), analyze(whole(one_sided, "paired/1"))
    assert (new.verdict.decision, new.verdict.reason) == ("inconclusive", "drift_explains")
    assert new.verdict.pairs_needed is None
    assert (old.verdict.decision, old.verdict.reason) == ("worse", "interval_excludes_zero")
    assert new.warnings == old.warnings


@pytest.mark.parametrize(("method", "expected"), [("paired/1", []), ("paired/2", ["summary.warnings"])])
def test_old_summaries_need_no_warnings(
    method: str, expected: list[str], whole: Whole, one_sided: list[tuple[Run, Run]]
) -> None:
    """A summary of paired/1 is whole without warnings; one of paired/2 is not."""
    report = whole(one_sided, method)
    plain = jsonio.loads(jsonio.dumps(plain_analysis(analyze(report))))
    assert verify_summary(replace(report, summary=Summary(analysis=plain))) == []
    del plain["warnings"]
    found = verify_summary(replace(report, summary=Summary(analysis=plain)))
    assert [text.split(":")[0] for text in found] == expected


def test_an_exact_metric_has_no_warnings(whole: Whole) -> None:
    """Where equal runs give equal numbers there is no noise, and a difference needs no test."""
    pairs = [
        tuple(replace(run, metrics={"wall": Metric(value=run.run + 1, unit="By", exact=True)}) for run in pair)
        for pair in simulate(NOISE, random.Random(1))
    ]
    assert analyze(whole(pairs)).warnings == ()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (DRIFTS[1], "drift: wall changes by +1.7"),
        (STEP, "step: wall is +1"),
        (MODES, "two modes: "),
        (replace(DRIFTS[1], num_pairs=8), "order: pairs that began with base differ by +"),
        (SLOW_FIRST_KEPT, "outlier: pair 0 with -9."),
        (
            replace(DRIFTS[1], order="base_first"),
            "order: base began 6 pairs and other 0, so drift moves the effect, by +",
        ),
    ],
    ids=["drift", "step", "two_modes", "order_effect", "outlying_pair", "drift_explains"],
)
def test_warnings_are_printed_above_the_verdict(setting: Setting, words: str, whole: Whole) -> None:
    """Each warning has a sentence with its numbers, and the table holds it before the verdict."""
    analysis = analyze(report := whole(simulate(setting, random.Random(3))))
    sentences = [warning_sentence(warning, analysis) for warning in analysis.warnings]
    assert any(sentence.startswith(words) for sentence in sentences), sentences
    text = " ".join(render_report(report, analysis).split())
    assert all(0 < text.index(f"warning {sentence}") < text.index("verdict ") for sentence in sentences)


def test_a_verdict_that_drift_took_back_says_what_to_do(whole: Whole, one_sided: list[tuple[Run, Run]]) -> None:
    """The sentence has the interval, the reason and the remedy, and no number of pairs that would settle it."""
    sentence = verdict_sentence(analyze(whole(one_sided)))
    assert sentence.startswith("inconclusive: the 95 % interval [+")
    assert sentence.endswith("an even number of pairs in ABBA order cancels it")


def test_the_simulator_draws_what_it_says() -> None:
    """Order, drift, step and modes are in the walls: without noise each run is what its setting makes it."""
    setting = Setting(name="", noise=0.0, drift=0.5, effect=-0.5, num_pairs=2)
    pairs = simulate(setting, random.Random(0))
    assert [(base.run, other.run) for base, other in pairs] == [(2, 3), (5, 4)]
    walls = [[run.metrics["wall"].value for run in pair] for pair in pairs]
    assert walls == [[2.0, 1.25], [3.5, 1.5]]
    counts: Tally = tally(setting, 3)
    assert counts.decisions == {"withheld": 3}
    assert math.exp(setting.expected_mean) == 0.5
