from typing import Literal

import pytest

from cli.html.rich import UUID, header, run_of
from lucid_cli.html.energy import energy_words
from lucid_profiler.monitored import DeviceEnergy, MonitorReport
from lucid_profiler.records import Arm, Run


def run_with(*energies: tuple[float, float | None, Literal["counter", "power_held"]]) -> Run:
    """Return a run whose devices used so much, with this bound, by this source."""
    (slot, _) = header((Arm(name="native"), Arm(name="captured")), pairs=1).slots
    found = tuple(
        DeviceEnergy(uuid=f"{UUID}{place}", value_j=value_j, bound_j=bound_j, source=source)
        for place, (value_j, bound_j, source) in enumerate(energies)
    )
    run = run_of(slot, seconds=10)
    return Run(**{**{name: getattr(run, name) for name in Run.__slots__}, "monitor": MonitorReport(energy=found)})


@pytest.mark.parametrize(
    ("bound_j", "words"),
    [(5.0, "0.5"), (5.0001, "0.6"), (5.4, "0.6"), (5.9, "0.6"), (0.0, "0.1"), (0.01, "0.1"), (120.0, "12.0")],
)
def test_the_bound_is_rounded_up_and_never_down(bound_j: float, words: str) -> None:
    """What is said holds; a tenth of a percent is the least."""
    assert energy_words([run_with((1000.0, bound_j, "counter"))]) == f"to {words} % or better (counter)"


def test_the_worst_run_and_all_devices_of_a_run_count() -> None:
    """Bounds of a run's devices add up as their energies do."""
    two = run_with((1000.0, 1.0, "counter"), (3000.0, 23.0, "power_held"))
    assert energy_words([run_with((1000.0, 2.0, "counter")), two]) == "to 0.6 % or better (counter and power readings)"


def test_without_a_bound_none_is_invented() -> None:
    """One run that lacks it is enough; runs without readings say nothing."""
    unbound = run_with((1000.0, None, "power_held"))
    assert energy_words([run_with((1000.0, 1.0, "power_held")), unbound]) == "no bound (power readings)"
    assert energy_words([run_with((0.0, 1.0, "counter"))]) == "no bound (counter)"
    assert energy_words([run_with()]) == ""
