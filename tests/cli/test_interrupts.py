import os
import signal
import threading
from pathlib import Path
from queue import Empty

import pytest

from lucid_cli.child import run_child
from lucid_cli.interrupts import Interrupts


def test_interrupts_give_the_handlers_back() -> None:
    """Whatever handled the signals before does so again."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.first == signal.SIGTERM
        assert interrupts.events.get(timeout=5) == signal.SIGTERM
    assert [signal.getsignal(number) for number in numbers] == before


def test_going_on_after_the_signal_that_ends_it_is_no_stop() -> None:
    """timeout(1) sends SIGCONT together with its signal."""
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGCONT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGCONT)
        assert interrupts.num_continued == 1


def _signal_to_another_thread(_pid: int = 0) -> None:
    """Have the kernel give SIGTERM to a thread that is not the main one, a moment from now."""
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()


def test_a_signal_that_another_thread_got_is_passed_on() -> None:
    """The kernel chooses the thread; the main one, in which handlers run, need not be woken."""
    with Interrupts() as interrupts:
        ended = run_child(["sleep", "20"], os.environ, interrupts=interrupts, on_start=_signal_to_another_thread)
    assert (ended.ending, ended.signal) == ("interrupted", "SIGTERM")


@pytest.mark.parametrize("timeout_s", [0.0, 0.01, 0.25])
def test_a_wait_in_which_nothing_comes_ends(timeout_s: float) -> None:
    """As a queue says it."""
    events = Interrupts().events
    with pytest.raises(Empty):
        events.get(timeout=timeout_s)
    with pytest.raises(Empty):
        events.get(block=False)
    events.put("ended")
    assert events.get(block=False) == "ended"


def test_the_same_signal_at_once_is_the_same_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """timeout(1) sends it to lucid and to its group; a later one or another one is a second request."""
    clock = iter([10.0, 10.001, 10.199, 10.2, 10.3, 10.301])
    numbers = [signal.SIGTERM] * 5 + [signal.SIGINT]
    with Interrupts() as interrupts, monkeypatch.context() as patched:
        patched.setattr("lucid_cli.interrupts.monotonic", lambda: next(clock))
        for number in numbers:
            signal.raise_signal(number)
        found = [interrupts.events.get_nowait() for _ in range(3)]
        assert interrupts.events.empty()
    assert found == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
    assert interrupts.first == signal.SIGTERM


def test_a_program_that_saves_is_not_killed_by_a_signal_that_was_sent_twice(tmp_path: Path) -> None:
    """The second comes while the first is being handled."""
    ready = tmp_path / "ready"
    script = f"trap 'sleep 0.3; exit 5' TERM; touch {ready}; while :; do sleep 0.01; done"

    def twice(_pid: int) -> None:
        while not ready.exists():
            pass
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)

    with Interrupts() as interrupts:
        ended = run_child(["sh", "-c", script], os.environ, interrupts=interrupts, on_start=twice)
    assert (ended.ending, ended.returncode, ended.signal) == ("interrupted", 5, None)
