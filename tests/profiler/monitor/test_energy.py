from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucid_profiler.monitor.energy import Energy, PowerSample, describe, difference, hold_ns, integrate_power, prefer

SECOND = 1_000_000_000
TICK = 50_000_000


def steady(power_mw: float | None, *, begin_ns: int, end_ns: int) -> list[PowerSample]:
    """Return samples of a constant power, one a tick."""
    return [(at_ns, power_mw) for at_ns in range(begin_ns, end_ns, TICK)]


def test_the_counter_gives_joules_and_their_bound() -> None:
    """300 W for 10 s are 3,000 J, off by what one step of the counter holds."""
    energy = difference(1_000_000, 4_000_000, window_ns=10 * SECOND)
    assert energy == Energy(value_j=3_000.0, bound_j=30.0, source="counter")
    assert difference(0, 1, window_ns=10 * SECOND, power_mw=72_000).bound_j == pytest.approx(7.2)
    assert difference(0, 3_000_000, window_ns=10 * SECOND, power_mw=1).bound_j == pytest.approx(30)


@pytest.mark.parametrize(
    ("begin", "end", "window_ns", "reason"),
    [
        (5_000, 5_000, 5_000_000, "below_resolution"),
        (5_000, 6_000, 5_000_000, "below_resolution"),
        (5_000, 305_000, SECOND - 1, "below_resolution"),
        (9_000, 8_000, 10 * SECOND, "counter_reset"),
        (9_000, 8_000, 5_000_000, "counter_reset"),
        (5_000, 5_000, 10 * SECOND, "stuck_counter"),
        (None, 5_000, 10 * SECOND, "gap"),
        (5_000, None, 10 * SECOND, "gap"),
        (5_000, 2**64 - 1, 10 * SECOND, "implausible"),
        (5_000, 5_000 + 2**40, 3 * SECOND, "implausible"),
        (5_000, 5_000 + 2**40, 5_000_000, "implausible"),
    ],
)
def test_a_counter_that_cannot_tell_gives_none(begin: int | None, end: int | None, window_ns: int, reason: str) -> None:
    """A frozen, short, reset or absent counter is never zero joules."""
    energy = difference(begin, end, window_ns=window_ns)
    assert (energy.value_j, energy.bound_j, energy.reason) == (None, None, reason)


def test_the_callers_reason_is_kept() -> None:
    """Why a reading of the counter is missing is what the energy says."""
    assert difference(None, 1, window_ns=SECOND, reason="lost").reason == "lost"


def test_no_more_than_the_largest_power_that_can_be_is_taken_for_energy() -> None:
    """10 kW; the counter may have stood still for a step before the window and move for it within."""
    assert difference(0, 110_000_000, window_ns=11 * SECOND).value_j == pytest.approx(110_000)
    assert difference(0, 111_000_000, window_ns=11 * SECOND).value_j == pytest.approx(111_000)
    assert difference(0, 111_000_001, window_ns=11 * SECOND).reason == "implausible"


def test_a_step_of_the_power_is_integrated_with_repeats() -> None:
    """10 s at 300 W and 10 s at 70 W are 3,700 J, off by one step after two readings and by the second they trail."""
    samples = steady(300_000, begin_ns=0, end_ns=10 * SECOND) + steady(70_000, begin_ns=10 * SECOND, end_ns=20 * SECOND)
    energy = integrate_power(samples, begin_ns=0, end_ns=20 * SECOND)
    assert energy.value_j == pytest.approx(3_700)
    assert energy.bound_j == pytest.approx(230 * 0.05 * 2 + 230 * 1 + 0.001 * 20)  # after the last one nothing is known
    assert (energy.source, energy.coverage) == ("power_held", 1.0)


def means(power: list[tuple[int, float]], *, end_ns: int, tick_ns: int = 2 * TICK) -> list[PowerSample]:
    """Return what a driver reads of a power, given by when each level begins: means of the second before."""
    reads = range(SECOND, end_ns, tick_ns)
    return [(at_ns, true_j(power, at_ns - SECOND, at_ns) * 1e3) for at_ns in reads]


def true_j(power: list[tuple[int, float]], begin_ns: int, end_ns: int) -> float:
    """Return the energy of levels of power in W."""
    ends = [*(at_ns for at_ns, _ in power[1:]), 10**12]
    parts = zip(power, ends, strict=True)
    return sum(watts * max(0, min(until, end_ns) - max(at_ns, begin_ns)) / 1e9 for (at_ns, watts), until in parts)


def test_readings_that_trail_behind_are_in_the_bound() -> None:
    """2 s at 700 W after idling at 100 W are 1,400 J; the driver's means rise to that only within a second."""
    power = [(0, 100.0), (5 * SECOND, 700.0)]
    energy = integrate_power(means(power, end_ns=9 * SECOND), begin_ns=5 * SECOND, end_ns=7 * SECOND)
    assert energy.value_j is not None
    assert energy.bound_j is not None
    assert energy.value_j < 1_100
    assert abs(energy.value_j - 1_400) <= energy.bound_j


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(SECOND, 3 * SECOND), st.floats(10, 1_000)), min_size=1, max_size=8),
    st.integers(2 * SECOND, 8 * SECOND),
    st.integers(SECOND, 8 * SECOND),
)
def test_the_bound_holds(levels: list[tuple[int, float]], begin_ns: int, length_ns: int) -> None:
    """Whatever the power does in levels of a second or longer, and wherever the interval lies."""
    starts = accumulate((duration_ns for duration_ns, _ in levels[:-1]), initial=0)
    power = [(at_ns, watts) for at_ns, (_, watts) in zip(starts, levels, strict=True)]
    end_ns = begin_ns + length_ns
    energy = integrate_power(means(power, end_ns=end_ns + 2 * SECOND), begin_ns=begin_ns, end_ns=end_ns)
    assert energy.value_j is not None
    assert energy.bound_j is not None
    assert abs(energy.value_j - true_j(power, begin_ns, end_ns)) <= energy.bound_j


def test_what_is_not_covered_is_in_the_bound() -> None:
    """The first 0.3 s of ten have no reading: at 100 W they are 30 J, and are taken to be as the rest is."""
    samples = steady(100_000, begin_ns=3 * SECOND // 10, end_ns=10 * SECOND)
    energy = integrate_power(samples, begin_ns=0, end_ns=10 * SECOND)
    assert energy.value_j == pytest.approx(1000)
    assert energy.bound_j == pytest.approx(30 + 0.01)


@pytest.mark.parametrize(
    ("interval_s", "is_bounded"), [(0.1, True), (1.0, True), (1.05, True), (1.5, False), (5.0, False)]
)
def test_between_readings_that_lie_far_apart_nobody_saw_anything(interval_s: float, is_bounded: bool) -> None:
    """A burst of seconds may lie there, and equal readings around it are no bound of it."""
    samples: list[PowerSample] = [(round(at * interval_s * SECOND), 100_000) for at in range(300)]
    energy = integrate_power(samples, begin_ns=0, end_ns=20 * SECOND, max_hold_ns=hold_ns(round(interval_s * SECOND)))
    assert energy.value_j == pytest.approx(2000)
    assert (energy.bound_j is not None) is is_bounded


def test_steady_power_is_known_to_a_step_of_the_readings() -> None:
    """Not to nothing: the driver gives whole milliwatts."""
    energy = integrate_power(steady(400_000, begin_ns=0, end_ns=10 * SECOND), begin_ns=0, end_ns=10 * SECOND)
    assert energy.bound_j == pytest.approx(0.01)


@pytest.mark.parametrize(("interval_s", "hold_s"), [(0.1, 1.0), (0.6, 1.0), (1.5, 2.25)])
def test_a_reading_is_held_for_as_long_as_the_next_one_is_due(interval_s: float, hold_s: float) -> None:
    """And half as long again, but for a second in any case."""
    assert hold_ns(round(interval_s * SECOND)) == hold_s * SECOND


def test_the_energy_of_a_window_is_scaled_to_the_interval() -> None:
    """3,090 J in 10.3 s are 3,000 J in ten, off by what 0.1 s of a step and 0.5 s at the ends come to at 400 W."""
    energy = difference(
        0, 3_090_000, window_ns=103 * SECOND // 10, wall_ns=10 * SECOND, unsure_ns=SECOND / 2, power_mw=400_000
    )
    assert energy.value_j == pytest.approx(3_000)
    assert energy.bound_j == pytest.approx(400 * 0.6)


def test_an_interval_that_is_too_short_for_the_counter_is_not_scaled_to() -> None:
    """Readings two seconds apart say nothing of half a second between them."""
    energy = difference(0, 600_000, window_ns=2 * SECOND, wall_ns=SECOND // 2)
    assert (energy.value_j, energy.reason) == (None, "below_resolution")


def test_without_a_counter_the_integral_is_given_with_its_label() -> None:
    """120 W for 10 s on a GPU without a counter are about 1,200 J from power readings, not 0."""
    counter = difference(None, None, window_ns=10 * SECOND, reason="lost")
    held = integrate_power(steady(120_000, begin_ns=0, end_ns=10 * SECOND), begin_ns=0, end_ns=10 * SECOND)
    chosen = prefer(counter, held)
    assert chosen.value_j == pytest.approx(1_200)
    assert chosen.source == "power_held"
    without_power = integrate_power(steady(None, begin_ns=0, end_ns=10 * SECOND), begin_ns=0, end_ns=10 * SECOND)
    assert prefer(counter, without_power) == counter
    assert prefer(counter, without_power).value_j is None


def test_a_device_without_a_counter_has_the_reason_of_its_power() -> None:
    """The readings could have told the energy, were it not for what they say."""
    counter = difference(None, None, window_ns=10 * SECOND, reason="not_supported")
    held = integrate_power(steady(None, begin_ns=0, end_ns=10 * SECOND), begin_ns=0, end_ns=10 * SECOND)
    assert prefer(counter, held) is held


def test_the_counter_goes_first() -> None:
    """Where both are known the counter is the answer."""
    counter = difference(0, 1_200_000, window_ns=10 * SECOND)
    held = integrate_power(steady(120_000, begin_ns=0, end_ns=10 * SECOND), begin_ns=0, end_ns=10 * SECOND)
    assert prefer(counter, held) is counter


def test_sources_that_disagree_are_told() -> None:
    """187 J against 327 J is said in words; 1,200 against 1,210 J is not worth a word."""
    counter = Energy(value_j=187.0, bound_j=4.0, source="counter")
    text = describe(counter, Energy(value_j=327.0, bound_j=3.0, source="power_held"))
    assert text is not None
    assert "187.0 J" in text
    assert "327.0 J" in text
    assert describe(Energy(value_j=1_200.0, bound_j=0.0, source="counter"), _held(1_210)) is None
    assert describe(counter, Energy(value_j=None, bound_j=None, source="power_held", reason="gap")) is None
    assert describe(Energy(value_j=100.0, bound_j=30.0, source="counter"), _held(120)) is None


def _held(value_j: float) -> Energy:
    return Energy(value_j=value_j, bound_j=0.0, source="power_held")


def test_a_gap_is_not_filled() -> None:
    """A reading is held for a second at most; when too little is covered there is no sum."""
    samples = steady(100_000, begin_ns=0, end_ns=5 * SECOND) + steady(100_000, begin_ns=9 * SECOND, end_ns=10 * SECOND)
    energy = integrate_power(samples, begin_ns=0, end_ns=10 * SECOND)
    assert (energy.value_j, energy.reason) == (None, "gap")
    assert energy.coverage == pytest.approx(0.695)


def test_a_missing_reading_ends_the_one_before() -> None:
    """From a None on the power is unknown until the next reading."""
    samples: list[PowerSample] = [(0, 100_000), (TICK, None), (2 * TICK, 100_000)]
    energy = integrate_power(samples, begin_ns=0, end_ns=100 * TICK, max_hold_ns=100 * TICK)
    assert energy.value_j == pytest.approx(0.1 * 100 * 50)
    assert energy.coverage == pytest.approx(0.99)


def test_edges_are_covered_by_the_reading_before() -> None:
    """The interval's begin belongs to the sample before it, and what lies outside does not count."""
    samples: list[PowerSample] = [(0, 100_000), (SECOND, 200_000), (2 * SECOND, 400_000)]
    energy = integrate_power(samples, begin_ns=SECOND // 2, end_ns=3 * SECOND // 2)
    assert energy.value_j == pytest.approx(150)
    assert energy.coverage == 1.0


@pytest.mark.parametrize("end_ns", [0, -5])
def test_an_empty_interval_has_no_energy(end_ns: int) -> None:
    """There is no energy of no time, and no division by it."""
    assert integrate_power([(0, 1)], begin_ns=0, end_ns=end_ns).reason == "below_resolution"


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.floats(1, 1e6), min_size=2, max_size=30),
    st.integers(0, 10 * TICK),
    st.integers(1, 40 * TICK),
)
def test_an_interval_is_the_sum_of_its_parts(powers: list[float], cut_ns: int, length_ns: int) -> None:
    """Energy is additive and the same wherever on the clock the interval lies."""
    samples: list[PowerSample] = [(at * TICK, power) for at, power in enumerate(powers)]
    long_hold = 100 * SECOND
    end_ns = cut_ns + length_ns
    parts = [
        integrate_power(samples, begin_ns=begin, end_ns=end, max_hold_ns=long_hold).value_j
        for begin, end in ((0, cut_ns), (cut_ns, end_ns))
        if end > begin
    ]
    whole = integrate_power(samples, begin_ns=0, end_ns=end_ns, max_hold_ns=long_hold)
    late = 10**18
    moved = integrate_power(
        [(at_ns + late, power) for at_ns, power in samples],
        begin_ns=late,
        end_ns=late + end_ns,
        max_hold_ns=long_hold,
    )
    assert whole.value_j == pytest.approx(sum(part or 0.0 for part in parts))
    assert moved == whole
