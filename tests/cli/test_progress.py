"""The plain lines of an experiment, and how long it still takes."""

import subprocess
import sys
from pathlib import Path

import pytest

from lucid_cli.progress import Progress
from lucid_cli.remaining import Estimate, duration
from lucid_profiler.records import AgentHealth, Arm, Kernels, Run, RunStatus, Slot, Wall


def slot_of(number: int, *, discarded: bool = False) -> Slot:
    """Return a slot of the base."""
    return Slot(slot=number, pair=number // 2, arm="native", discarded=discarded)


def run_of(slot: Slot, seconds: float, *, status: RunStatus = "ok") -> Run:
    """Return what came of a slot."""
    end_ns = round(seconds * 1e9)
    return Run(
        run=slot.slot,
        pair=slot.pair,
        arm=slot.arm,
        discarded=slot.discarded,
        status=status,
        returncode=0 if status == "ok" else 3,
        started="2026-01-01T00:00:00.000Z",
        process_ns=end_ns,
        wall=Wall(source="process", begin_ns=0, end_ns=end_ns),
        agent=AgentHealth(loaded=True),
        output_tail="" if status == "ok" else "Traceback\nValueError: no\n",
    )


def end(progress: Progress, number: int, seconds: float, *, discarded: bool = False, status: RunStatus = "ok") -> None:
    """Let a run take place."""
    slot = slot_of(number, discarded=discarded)
    progress.began(slot, Path("gone"))
    progress.started()
    progress.ended(slot, run_of(slot, seconds, status=status))


def test_each_run_that_ends_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With its place, pair, arm and time, and what remains; nothing goes to standard output."""
    with Progress(3) as progress:
        end(progress, 0, 40.0, discarded=True)
        end(progress, 1, 10.0)
        end(progress, 2, 10.0)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "run 1 of 3  pair 0 (discarded)  native  40.00 s  about 80 s left",
        "run 2 of 3  pair 0  native  10.00 s  about 10 s left",
        "run 3 of 3  pair 1  native  10.00 s",
    ]


def test_a_failed_run_shows_the_end_of_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Below its line, which says how it failed."""
    with Progress(2) as progress:
        end(progress, 0, 1.0, status="failed")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("run 1 of 2  pair 0  native  1.00 s  ")
    assert "3" in first.removeprefix("run 1 of 2  pair 0  native  1.00 s  ")
    assert rest == ["  | Traceback", "  | ValueError: no"]


def test_runs_that_were_resumed_are_counted_from_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Their slots have numbers above those of the report that goes on."""
    with Progress(2) as progress:
        end(progress, 8, 1.0)
    assert capsys.readouterr().err.startswith("run 1 of 2  pair 4  native")


def test_what_is_not_timed_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Pauses, runs that count kernels and what they counted, and runs that look for a difference."""
    arm = Arm(name="native", env={})
    with Progress(2) as progress:
        progress.waiting("cooling down for 5 s")
        progress.rerun(arm, "kernels")
        progress.traced(arm, Kernels(arm="native", status="ok", table=None, reason="no_cuda"))
        progress.rerun(arm, "locate")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["cooling down for 5 s", "counting kernels, not timed  native"]
    assert lines[2].startswith("kernels of native, not timed  ")
    assert lines[3:] == ["looking for the first difference, not timed  native"]


def test_nothing_is_estimated_before_a_run_has_succeeded() -> None:
    """How long a failed run took says nothing of the others."""
    estimate = Estimate(4)
    assert estimate.left_s() is None
    assert estimate.done(3.0) is None
    estimate.add(0.1, discarded=True, succeeded=False)
    assert estimate.left_s() is None


def test_the_slow_first_pair_counts_only_until_there_are_others() -> None:
    """Without others it is all that is known."""
    estimate = Estimate(6)
    estimate.add(100.0, discarded=True, succeeded=True)
    estimate.add(40.0, discarded=True, succeeded=True)
    assert estimate.left_s() == pytest.approx(4 * 70.0)
    estimate.add(10.0, discarded=False, succeeded=True)
    assert estimate.left_s() == pytest.approx(3 * 10.0)


def test_the_rest_shrinks_while_a_run_goes_on() -> None:
    """But a run that takes longer than the others takes nothing away from those to come."""
    estimate = Estimate(4)
    estimate.add(10.0, discarded=False, succeeded=True)
    assert estimate.left_s(4.0) == pytest.approx(26.0)
    assert estimate.left_s(500.0) == pytest.approx(20.0)
    assert estimate.done(5.0) == pytest.approx(1.5 / 4)
    assert estimate.done(500.0) == pytest.approx(2 / 4)


def test_the_first_run_has_no_pause_before_it_and_all_others_have() -> None:
    """Each run that is to come takes its pause and its own time."""
    estimate = Estimate(6, pause_s=4.0)
    estimate.add(1.0, discarded=True, succeeded=True)
    assert estimate.left_s() == pytest.approx(5 * 5.0)
    assert estimate.left_s(3.0) == pytest.approx(5 * 5.0 - 3.0)
    estimate.add(5.0, discarded=True, succeeded=True)
    assert estimate.left_s() == pytest.approx(4 * 5.0)
    failed = Estimate(3, pause_s=4.0)
    failed.add(1.0, discarded=True, succeeded=False)
    failed.add(5.0, discarded=False, succeeded=True)
    assert failed.left_s() == pytest.approx(5.0)


def test_the_first_line_counts_the_pauses_to_come(capsys: pytest.CaptureFixture[str]) -> None:
    """Three runs and pauses are left; the pause before the second run has not been seen yet."""
    with Progress(4, cool_down_s=20.0) as progress:
        end(progress, 0, 2.0)
    assert capsys.readouterr().err == "run 1 of 4  pair 0  native  2.00 s  about 66 s left\n"


def test_after_the_last_run_nothing_remains() -> None:
    """Its line has no estimate."""
    estimate = Estimate(1)
    estimate.add(10.0, discarded=False, succeeded=True)
    assert estimate.left_s() is None


@pytest.mark.parametrize(("seconds", "text"), [(119.4, "119 s"), (121, "2 min"), (7300, "2.0 h")])
def test_times_are_told_in_one_unit(seconds: float, text: str) -> None:
    """As a reader would say them."""
    assert duration(seconds) == text


def test_where_nobody_watches_the_live_line_is_not_even_imported() -> None:
    """Standard error is a pipe here, as in a batch job."""
    program = "import sys; from lucid_cli.progress import Progress; Progress(2); print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
