import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest

from cli.harness import LUCID
from lucid_cli.child import run_child
from lucid_cli.interrupts import Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    """Return the signals to lucid, while they are caught."""
    with Interrupts() as entered:
        yield entered


def test_a_status_that_exists_counts_before_a_limit_that_runs_out(interrupts: Interrupts) -> None:
    """A process that ends just at its limit is either timed out and killed, or done; never both."""
    for _ in range(20):
        ended = run_child(["sleep", "0.02"], os.environ, interrupts=interrupts, timeout_s=0.02)
        if ended.ending == "timeout":
            assert (ended.returncode, ended.signal) == (None, "SIGTERM")
        else:
            assert (ended.returncode, ended.signal) == (0, None)


def test_a_handler_that_exits_well_after_the_limit_is_still_timed_out(interrupts: Interrupts) -> None:
    """A run that was cut short does not count because it went quietly."""
    script = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(60)"
    ended = run_child([sys.executable, "-c", script], os.environ, interrupts=interrupts, timeout_s=0.3)
    assert ended.ending == "timeout"


def test_times_are_on_the_clock_of_the_agent(interrupts: Interrupts) -> None:
    """The interval of a process holds what the process itself reads from the monotonic clock."""
    ended = run_child(
        [sys.executable, "-c", "import time; print(time.monotonic_ns(), end='')"], os.environ, interrupts=interrupts
    )
    assert ended.begin_ns < int(ended.output_tail) < ended.end_ns
    assert ended.stdout_bytes == len(ended.output_tail)


def test_a_peak_below_lucids_own_is_not_invented(interrupts: Interrupts) -> None:
    """The kernel counts a new process from lucid's own size; only what is above it says something."""
    small = run_child(["true"], os.environ, interrupts=interrupts)
    assert small.max_rss_bytes is None
    script = "x = bytearray(2**30); x[::4096] = bytes(len(x[::4096]))"
    large = run_child([sys.executable, "-c", script], os.environ, interrupts=interrupts)
    assert (large.max_rss_bytes or 0) >= 2**30


def test_input_from_a_file_is_read_from_its_beginning_each_time(interrupts: Interrupts) -> None:
    """Every run gets all of it."""
    with tempfile.TemporaryFile() as file:
        file.write(b"all of it")
        for _ in range(2):
            assert run_child(["cat"], os.environ, interrupts=interrupts, stdin=file).output_tail == "all of it"


def test_the_program_is_looked_up_in_the_childs_own_path(interrupts: Interrupts) -> None:
    """The PATH that counts is the one that the command is given."""
    with pytest.raises(FileNotFoundError):
        run_child(["lucid"], {"PATH": "/nowhere"}, interrupts=interrupts)
    ended = run_child(["lucid", "--version"], {"PATH": str(LUCID.parent)}, interrupts=interrupts)
    assert ended.output_tail.startswith("lucid ")


def test_interrupts_give_the_handlers_back() -> None:
    """Whatever handled the signals before does so again."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.first == signal.SIGTERM
        assert interrupts.events.get(timeout=5) == signal.SIGTERM
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
    assert after == before
