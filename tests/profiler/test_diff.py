import math
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucid_cli.reporters.difference import render_compared
from lucid_cli.reporters.difference_json import diff_json
from lucid_cli.reporters.difference_tables import csv_table, markdown_tables
from lucid_cli.reporters.difference_words import Compared
from lucid_cli.reporters.tabular import csv_text, markdown
from lucid_profiler.diff import Difference, DiffRow, diff, refused, try_each
from lucid_profiler.errors import NotComparableError
from lucid_profiler.gates import judge_gate, parse_gate
from lucid_profiler.kernels import KernelTable, Launches
from lucid_profiler.reader import Report
from lucid_profiler.records import Arm, Kernels, Metric, Wall
from support.paired_reports import Pairs, make_report

WALL = Metric(value=None, unit="s")
BYTES = Metric(value=None, unit="By")
NATIVE = (1.00, 1.01, 0.99, 1.00, 1.02, 1.00)
FASTER: Pairs = [(native, native * (0.9 + index / 10_000)) for index, native in enumerate(NATIVE)]


def scaled(pairs: Pairs, *, base: float = 1.0, other: float = 1.0) -> Pairs:
    """Return pairs whose arms take so many times as long."""
    return [(first * base, second * base * other) for first, second in pairs]


def report(walls: Pairs = FASTER, **settings: Any) -> Report:
    """Return a report of the wall alone."""
    return make_report({"wall": (WALL, walls)}, **settings)


def row(a: Pairs, b: Pairs, *, metric: Metric = BYTES, **settings: Any) -> DiffRow:
    """Return the row of a secondary metric with these values."""
    both = [make_report({"wall": (WALL, FASTER), "x": (metric, values)}) for values in (a, b)]
    return diff(both[0], both[1], **settings).rows[1]


def test_a_margin_makes_equal_effects_the_same() -> None:
    """Without one they are inconclusive, with the pairs that would settle a difference; a narrow margin needs pairs."""
    a = report()
    b = report([(native, native * (0.9002 + index / 10_000)) for index, native in enumerate(NATIVE)])
    assert diff(a, b).decision == "inconclusive"
    assert diff(a, b, margins={"wall": 1.0}).decision == "same"
    assert diff(a, b, margins={"wall": 1.0}).reason == "within_margin"
    narrow = diff(a, b, margins={"wall": 0.03}).rows[0]
    assert narrow.verdict == "inconclusive"
    assert narrow.pairs_needed is not None
    assert narrow.pairs_needed > 6


@pytest.mark.parametrize(
    ("limit", "is_quiet"), [(2.0, False), (8.4, False), (8.6, True), (100.0, True), (1000.0, True)]
)
def test_the_canary_has_a_limit_in_percent(limit: float, is_quiet: bool) -> None:
    """A base arm that is 8.5 % slower is quiet from there on; the paired effects do not move."""
    got = diff(report(), report(scaled(FASTER, base=1.085)), canary_limit=limit)
    assert got.canary is not None
    assert got.canary.is_quiet is is_quiet
    assert got.hides_absolute is not is_quiet
    assert got.decision == "inconclusive"
    back = diff(report(scaled(FASTER, base=1.085)), report(), canary_limit=limit)
    assert back.canary is not None
    assert back.canary.is_quiet is (limit > 7.84)


def test_a_slower_machine_with_equal_bytes_is_no_regression() -> None:
    """Parity holds, the canary is loud, and the verdict is neither better nor worse."""
    got = diff(report(), report(scaled(FASTER, base=1.136)))
    assert (got.analysis_b.parity.status, got.hides_absolute, got.decision) == ("equal", True, "inconclusive")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([(0, 0)] * 6, [(0, 0)] * 6, ("same", "no_difference")),
        ([(0, 0)] * 6, [(0, 9)] * 6, ("worse", "appears")),
        ([(0, 9)] * 6, [(0, 0)] * 6, ("better", "vanishes")),
        ([(0, 9)] * 6, [(0, 9)] * 6, ("not_comparable", "zero_baseline")),
        ([(9, 9)] * 6, [(-9, 9)] * 6, ("not_comparable", "not_positive")),
        ([(9, 9)] * 6, [(9, 9), *[(9, float("nan"))] * 5], ("not_comparable", "non_finite")),
        ([(9, 9)] * 6, [(9, 9), (9, 9), *[(9, None)] * 4], ("not_comparable", "too_few_pairs")),
        ([(9, 9)] * 6, [(9, 12)] * 6, ("worse", "interval_excludes_zero")),
        ([(78.8, 78.8)] * 6, [(115.0, 115.0)] * 6, ("same", "no_difference")),
    ],
)
def test_a_row_has_a_verdict_or_the_reason_why_not(a: Pairs, b: Pairs, expected: tuple[str, str]) -> None:
    """Zeros, negative, missing and non-finite values stop no other row and are told apart."""
    got = row(a, b)
    assert (got.verdict, got.reason) == expected


def test_an_exact_metric_needs_a_single_pair() -> None:
    """Any difference of it is one, without statistics; where pairs say both, it is inconclusive."""
    exact = replace(BYTES, exact=True)
    assert row([(9, 9)] * 6, [(9, 10)] * 6, metric=exact).verdict == "worse"
    assert row([(9, 9)] * 6, [(9, 9)] * 6, metric=exact).verdict == "same"
    assert row([(9, 9)] * 6, [(9, 8), *[(9, 10)] * 5], metric=exact).verdict == "inconclusive"
    single = [report([(1.0, 0.9)]), report([(1.0, 0.8)])]
    assert diff(single[0], single[1]).rows[0].reason == "too_few_pairs"
    assert [(one.metric, one.verdict) for one in diff(single[0], single[1]).counters] == [
        ("capture_recordings", "same"),
        ("capture_replays", "same"),
        ("capture_native_steps", "same"),
    ]


def test_other_directions_are_not_judged() -> None:
    """Where the reports disagree about what is better there is no verdict, also when that is allowed."""
    both = [
        make_report({"wall": (WALL, FASTER), "x": (replace(BYTES, better=better), [(9, 9)] * 6)})
        for better in ("lower", "higher")
    ]
    got = diff(both[0], both[1], allow=["unit:x"])
    assert (got.rows[1].verdict, got.rows[1].reason) == ("not_comparable", "other_direction")


def test_captures_and_launches_are_rows() -> None:
    """What the optimizers count, and the launches a step of the traced processes, are compared as facts."""
    tables = {
        arm: KernelTable(pid=1, device="cuda", num_warmup_steps=2, num_steps=10, launches=Launches(kernels=kernels))
        for arm, kernels in (("native", 2000), ("captured", 100))
    }
    kernels = tuple(Kernels(arm=arm, status="ok", table=table) for arm, table in tables.items())
    a = replace(report(), kernels=kernels)
    got = {one.metric: one for one in diff(a, replace(report(replays=8), kernels=kernels)).counters}
    assert (got["capture_replays"].verdict, got["capture_replays"].better) == ("lower", "none")
    assert (got["launches_per_step"].a.base.median, got["launches_per_step"].a.other.median) == (200.0, 10.0)
    assert got["launches_per_step"].verdict == "same"
    for without, listed in ((diff(a, report()), "only_in_a"), (diff(report(), a), "only_in_b")):
        assert "launches_per_step" not in {one.metric for one in without.counters}
        assert getattr(without, listed) == ("launches_per_step",)
        assert judge_gate(parse_gate("launches_per_step<=+0", "gate"), without).reason == "only_in_one_report"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"parts": {"settings": {"batch": 8}, "data": {"images": [1, 2]}}}, "settings.batch"),
        ({"parts": {"settings": {"batch": 16}, "data": {"images": [1, 3]}}}, "data"),
        (
            {
                "header": {"schema": "lucid.report/2.0"},
                "parts": {"settings": {"batch": 16}, "data": {"images": [1, 2]}},
            },
            "schema",
        ),
        ({"parts": {"settings": {"batch": 16}}}, "data"),
    ],
)
def test_settings_data_and_schema_make_reports_incomparable(settings: dict[str, Any], key: str) -> None:
    """Another batch, other data and another major version are named and refused, or allowed by name."""
    a, b = report(parts={"settings": {"batch": 16}, "data": {"images": [1, 2]}}), report(**settings)
    with pytest.raises(NotComparableError) as caught:
        diff(a, b)
    assert [reason.split(" is ")[0] for reason in caught.value.reasons] == [key]
    assert [one.tier for one in diff(a, b, allow=[key]).identities] == ["allowed"]


def with_walls(source: Literal["fit", "steps", "process"], *, last: Literal["fit", "steps", "process"]) -> Report:
    """Return a report whose walls are of a source, and those of its last pair, which is left out, of another."""
    made = report()
    sources = [*[source] * (len(made.runs) - 2), last, last]
    runs = [
        replace(run, wall=Wall(source=one, begin_ns=0, end_ns=1)) for run, one in zip(made.runs, sources, strict=True)
    ]
    pairs = (*made.pairs[:-1], replace(made.pairs[-1], included=False))
    return replace(made, runs=tuple(runs), pairs=pairs)


def test_walls_of_another_source_make_reports_incomparable() -> None:
    """The wall of a marked interval is no wall of steps; allowed by name, and asked of the statistics' runs alone."""
    steps, marked = with_walls("steps", last="process"), with_walls("fit", last="steps")
    with pytest.raises(NotComparableError) as caught:
        diff(steps, marked)
    assert caught.value.reasons == ("wall_source is steps in the first report and fit in the second",)
    assert [one.tier for one in diff(steps, marked, allow=["wall_source"]).identities] == ["allowed"]
    assert diff(steps, with_walls("steps", last="fit")).identities == ()


def test_a_report_with_walls_of_unequal_work_is_better_than_none() -> None:
    """Whatever the interval says, no row has a word, and a limit no verdict."""
    unequal = report()
    runs = [
        replace(run, wall=Wall(source="fit" if run.run % 2 else "steps", begin_ns=0, end_ns=1)) for run in unequal.runs
    ]
    unequal = replace(unequal, runs=tuple(runs))
    got = diff(unequal, unequal)
    assert (got.decision, got.reason) == ("withheld", "the first report has no verdict: walls_differ")
    assert [(one.verdict, one.reason) for one in got.rows] == [("not_comparable", "walls_differ")]
    gate = judge_gate(parse_gate("wall<=+1%", "gate"), got)
    assert (gate.status, gate.reason) == ("no_verdict", "walls_differ")
    words = " ".join(render_compared([Compared(name="b", a=unequal, b=unequal, difference=got)]).split())
    assert "not comparable, walls that span unequal work in one of the reports" in words


def test_volatile_readings_and_minor_versions_never_count() -> None:
    """Temperature, load and boot time change from minute to minute; a minor version adds what may be ignored."""
    a, b = (report(volatile={"temperature": value, "boot_time": value}) for value in (1, 2))
    b = replace(b, header=replace(b.header, schema="lucid.report/1.7"))
    assert diff(a, b).identities == ()


@pytest.mark.parametrize("side", [0, 1])
def test_drift_that_explains_an_effect_takes_the_difference_back(side: int) -> None:
    """A report whose own verdict was taken back cannot be better or worse than another."""
    walls = [(math.exp(0.02 * (2 * pair)), math.exp(0.02 * (2 * pair + 1) + 0.002 * (pair % 2))) for pair in range(6)]
    both = [report(), report()]
    both[side] = report(walls)
    got = diff(both[0], both[1])
    verdicts = got.analysis_a.verdict, got.analysis_b.verdict
    assert verdicts[side].reason == "drift_explains"
    assert (got.decision, got.reason) == ("inconclusive", "drift_explains")


def test_several_reports_are_each_compared_with_the_first() -> None:
    """In their order, and what stands in the way of any is named with its file."""
    first, better, equal = report(), report(scaled(FASTER, other=0.95)), report()
    both = [found for _, found in try_each(first, [better, equal]) if isinstance(found, Difference)]
    assert [found.decision for found in both] == ["better", "inconclusive"]
    odd = replace(report(identity={"gpu_name": "H200"}), path="odd.jsonl")
    error = refused(try_each(first, [better, odd]), has_paths=True)
    assert error is not None
    assert error.reasons == ("odd.jsonl: gpu_name is not recorded in the first report and H200 in the second",)
    assert refused(try_each(first, [better, equal])) is None


def test_every_arm_but_the_controls_is_compared() -> None:
    """With an arm that is the base's own there is nothing to compare."""
    arms = (
        Arm(name="native"),
        Arm(name="captured", env={"LUCID_CAPTURE_UPDATES": "1"}),
        Arm(name="again", control=True),
    )
    both = [report(header={"arms": arms}) for _ in range(2)]
    ((_, found),) = try_each(both[0], both[1:])
    assert isinstance(found, Difference)
    assert found.analysis_b.other == "captured"


values = st.one_of(
    st.none(), st.floats(), st.integers(-(2**70), 2**70), st.sampled_from([0, 0.0, -0.0, 1.7e308, -1.7e308])
)
series = st.lists(st.tuples(values, values), min_size=4, max_size=4)


@settings(max_examples=150)
@given(a=series, b=series, exact=st.booleans())
def test_no_values_break_a_comparison_or_a_form_of_it(a: Pairs, b: Pairs, exact: bool) -> None:
    """Whatever a metric holds, the other rows, every form and limits on it come to an end, within 100 columns."""
    metric = replace(BYTES, exact=exact)
    both = [make_report({"wall": (WALL, FASTER[:4]), "x": (metric, one)}) for one in (a, b)]
    got = diff(both[0], both[1], allow=["metric:x"], margins={"x": 1.0})
    gates = tuple(judge_gate(parse_gate(text, "gate"), got) for text in ("x<=+1%", "x>=-1MiB", "wall<=+1%"))
    compared = [Compared(name="b", a=both[0], b=both[1], difference=got, gates=gates)]
    assert max(map(len, render_compared(compared).splitlines())) <= 100
    assert markdown(markdown_tables(compared)).endswith("\n")
    assert csv_text(csv_table(compared)).endswith("\r\n")
    assert diff_json(compared, 0).count("\n") == 1


def test_a_metric_that_is_never_finite_was_measured_all_the_same() -> None:
    """NaN in every pair is neither a lost metric nor an added one: it is a row without a word, with its reason."""
    nan: Pairs = [(float("nan"), float("nan"))] * 6
    for a, b in (([(9, 9)] * 6, nan), (nan, [(9, 9)] * 6), (nan, nan)):
        got = row(a, b)
        assert (got.verdict, got.reason) == ("not_comparable", "non_finite")
    assert row(nan, nan).b.reasons == {"nan": 12}
    missing: Pairs = [(None, None)] * 6
    with pytest.raises(NotComparableError, match="metric:x has values in the first report and none in the second"):
        row(nan, missing)


def test_other_units_are_not_judged() -> None:
    """Seconds against bytes have no difference, also when that is allowed."""
    both = [
        make_report({"wall": (WALL, FASTER), "x": (replace(BYTES, unit=unit), [(9, 9)] * 6)}) for unit in ("s", "By")
    ]
    got = diff(both[0], both[1], allow=["unit:x"])
    assert (got.rows[1].verdict, got.rows[1].reason) == ("not_comparable", "other_unit")


@pytest.mark.parametrize(
    ("header", "key", "tier"),
    [
        ({"alpha": 0.01}, "alpha", "fatal"),
        ({"taints": ("throttled",)}, "taints", "noted"),
        ({"rules": ("A failed run leaves its pair out.",)}, "rules", "noted"),
    ],
)
def test_the_rules_of_the_statistics_are_circumstances(header: dict[str, Any], key: str, tier: str) -> None:
    """Another rate of false verdicts is refused; what leaves pairs out is noted."""
    ((_, found),) = try_each(report(), [report(header=header)])
    assert [(one.key, one.tier) for one in found.identities] == [(key, tier)]


def test_intervals_are_called_by_their_level() -> None:
    """Reports that accept one false verdict in a hundred have intervals of 99 %."""
    strict = [report(header={"alpha": 0.01}), report(scaled(FASTER, other=0.95), header={"alpha": 0.01})]
    got = diff(strict[0], strict[1])
    text = render_compared([Compared(name="b", a=strict[0], b=strict[1], difference=got)])
    assert "paired % [99 %]" in text
    assert ", 99 % interval [" in text
    assert "95 %" not in text


@pytest.mark.parametrize("factor", [0.98, 1.02, 1 / 0.98, 1 / 1.02])
def test_the_limit_of_the_canary_is_within_it(factor: float) -> None:
    """Exactly two percent are quiet in both directions, whatever the logarithms' last digits are."""
    limit = 2.0 if factor in {0.98, 1.02} else 100 * abs(factor - 1)
    got = diff(report(), report(scaled(FASTER, base=factor)), canary_limit=limit)
    assert got.canary is not None
    assert got.canary.is_quiet


def test_exact_counts_differ_by_one_whatever_their_size() -> None:
    """Logarithms of large integers are equal where the integers are not."""
    exact, large = replace(BYTES, exact=True), 2**60
    assert row([(large, large)] * 6, [(large, large + 1)] * 6, metric=exact).verdict == "worse"
    assert row([(large, large + 1)] * 6, [(large, large)] * 6, metric=exact).verdict == "better"
    assert row([(large, large)] * 6, [(large + 1, large + 1)] * 6, metric=exact).verdict == "same"
    assert row([(3, 9)] * 6, [(5, 15)] * 6, metric=exact).verdict == "same"
    assert row([(large, large)] * 6, [(large, large + 1)] * 6, metric=exact, margins={"x": 1.0}).verdict == "same"


def test_a_card_has_one_name() -> None:
    """The driver writes GPU- before a UUID and torch does not: the same card is no difference, another is one value."""
    a, b = (report(identity={"gpu_uuid": uuid}) for uuid in ("GPU-1", "1"))
    assert diff(a, b).identities == ()
