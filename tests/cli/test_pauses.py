import os
import signal
import threading
import time
from pathlib import Path

from lucid_cli.interrupts import Interrupts
from lucid_cli.pauses import Pauses
from lucid_cli.plan import Purpose
from lucid_profiler.records import Arm, Kernels, Run, Slot


class Told:
    """Keeps what it is told about pauses."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def waiting(self, text: str) -> None:
        self.texts.append(text)

    def began(self, slot: Slot, run_dir: Path) -> None:
        raise NotImplementedError

    def started(self) -> None:
        raise NotImplementedError

    def ended(self, slot: Slot, run: Run) -> None:
        raise NotImplementedError

    def traced(self, arm: Arm, kernels: Kernels) -> None:
        raise NotImplementedError

    def rerun(self, arm: Arm, purpose: Purpose) -> None:
        raise NotImplementedError


def test_without_anything_asked_for_there_is_no_pause() -> None:
    """Nothing is said either."""
    told = Told()
    pauses = Pauses(cool_down_s=0, look=None, interrupts=Interrupts(), observer=told)
    assert (pauses.take(), told.texts) == ((), [])


def test_a_cool_down_lasts_as_long_as_was_asked_for() -> None:
    """It is told once; what comes on the queue beside signals does not end it."""
    told, interrupts = Told(), Interrupts()
    interrupts.events.put("ended")
    begin = time.monotonic()
    assert Pauses(cool_down_s=0.2, look=None, interrupts=interrupts, observer=told).take() == ()
    assert time.monotonic() - begin >= 0.2
    assert told.texts == ["cooling down for 0.2 s"]


def test_a_signal_ends_a_pause() -> None:
    """A handler has noted it before."""
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert Pauses(cool_down_s=1000, look=None, interrupts=interrupts, observer=Told()).take() == ()


def test_a_machine_that_becomes_idle_is_waited_for() -> None:
    """Each new reason is told, and the run has nothing to note."""
    answers = [["a", "b"], ["a", "b"], ["b"], []]
    told = Told()
    pauses = Pauses(cool_down_s=0, look=lambda: answers.pop(0), interrupts=Interrupts(), observer=told, poll_s=0.001)
    assert pauses.take() == ()
    assert told.texts == ["waiting for an idle machine: a; b", "waiting for an idle machine: b"]


def test_a_machine_that_stays_busy_is_noted() -> None:
    """The run begins all the same."""
    pauses = Pauses(
        cool_down_s=0, look=lambda: ["a"], interrupts=Interrupts(), observer=Told(), idle_limit_s=0.01, poll_s=0.001
    )
    assert pauses.take() == ("it began although the machine was not idle: a",)


def test_a_pause_may_be_longer_than_a_clock_can_wait() -> None:
    """As an older report may ask for it; a signal in its middle ends it."""
    with Interrupts() as interrupts:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        assert Pauses(cool_down_s=1e308, look=None, interrupts=interrupts, observer=Told()).take() == ()
        timer.join()
