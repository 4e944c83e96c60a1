import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucid_profiler.monitor.energy import Energy, PowerSample, describe, difference, integrate_power, prefer

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


@pytest.mark.parametrize(
    ("begin", "end", "window_ns", "reason"),
    [
        (5_000, 5_000, 5_000_000, "below_resolution"),
        (5_000, 6_000, 5_000_000, "below_resolution"),
        (5_000, 305_000, SECOND - 1, "below_resolution"),
        (9_000, 8_000, 10 * SECOND, "counter_reset"),
        (9_000, 8_000, 5_000_000, "counter_reset"),
        (5_000, 5_000, 10 * SECOND, "stuck_counter"),
        (None, 5_000, 10 * SECOND, "not_supported"),
        (5_000, None, 10 * SECOND, "not_supported"),
        (5_000, 2**64 - 1, 10 * SECOND, "implausible"),
    ],
)
def test_a_counter_that_cannot_tell_gives_none(begin: int | None, end: int | None, window_ns: int, reason: str) -> None:
    """A frozen, short, reset or absent counter is never zero joules."""
    energy = difference(begin, end, window_ns=window_ns)
    assert (energy.value_j, energy.bound_j, energy.reason) == (None, None, reason)


def test_the_callers_reason_is_kept() -> None:
    """Why a reading of the counter is missing is what the energy says."""
    assert difference(None, 1, window_ns=SECOND, reason="lost").reason == "lost"


def test_a_step_of_the_power_is_integrated_with_repeats() -> None:
    """10 s at 300 W and 10 s at 70 W are 3,700 J, off by at most the one step between two readings."""
    samples = steady(300_000, begin_ns=0, end_ns=10 * SECOND) + steady(70_000, begin_ns=10 * SECOND, end_ns=20 * SECOND)
    energy = integrate_power(samples, begin_ns=0, end_ns=20 * SECOND)
    assert energy.value_j == pytest.approx(3_700)
    assert energy.bound_j == pytest.approx(230 * 0.05)
    assert (energy.source, energy.coverage) == ("power_held", 1.0)


def test_without_a_counter_the_integral_is_given_with_its_label() -> None:
    """120 W for 10 s on a GPU without a counter are about 1,200 J from power readings, not 0."""
    counter = difference(None, None, window_ns=10 * SECOND)
    held = integrate_power(steady(120_000, begin_ns=0, end_ns=10 * SECOND), begin_ns=0, end_ns=10 * SECOND)
    chosen = prefer(counter, held)
    assert chosen.value_j == pytest.approx(1_200)
    assert chosen.source == "power_held"
    without_power = integrate_power(steady(None, begin_ns=0, end_ns=10 * SECOND), begin_ns=0, end_ns=10 * SECOND)
    assert prefer(counter, without_power) == counter
    assert prefer(counter, without_power).value_j is None


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
    assert energy.value_j == pytest.approx(0.1 * 99 * 50)
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
