import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from cli.harness import LUCID, wait_for, wait_for_end
from lucid_cli import child, descendants
from lucid_cli.child import run_child
from lucid_cli.command import CannotStartError
from lucid_cli.descendants import adopting_orphans
from lucid_cli.interrupts import Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    """Return the signals to lucid, while they are caught."""
    with Interrupts() as entered:
        yield entered


def test_a_status_that_exists_counts_before_a_limit_that_runs_out(interrupts: Interrupts) -> None:
    """A process that ends just at its limit is either timed out or done; a signal that hit it is never hidden."""
    for _ in range(20):
        ended = run_child(["sleep", "0.02"], os.environ, interrupts=interrupts, timeout_s=0.02)
        if ended.ending == "by_itself":
            assert (ended.returncode, ended.signal) == (0, None)
        else:
            # The signal may find it on its way out.
            assert (ended.returncode, ended.signal) in {(None, "SIGTERM"), (0, None)}


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
    with pytest.raises(CannotStartError, match="No such file"):
        run_child(["lucid"], {"PATH": "/nowhere"}, interrupts=interrupts)
    ended = run_child(["lucid", "--version"], {"PATH": str(LUCID.parent)}, interrupts=interrupts)
    assert ended.output_tail.startswith("lucid ")


@pytest.mark.parametrize("timeout_s", [1e7, 1e10, 1e30, sys.float_info.max])
def test_a_limit_in_a_million_years_is_a_limit(interrupts: Interrupts, timeout_s: float) -> None:
    """No wait is too long for the system's clocks."""
    ended = run_child(["true"], os.environ, interrupts=interrupts, timeout_s=timeout_s)
    assert (ended.ending, ended.returncode) == ("by_itself", 0)


def test_a_long_limit_is_waited_for_in_parts(interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that ends is not the limit."""
    monkeypatch.setattr("lucid_cli.interrupts._POLL_S", 0.01)
    for timeout_s in (None, 30.0):
        ended = run_child(["sleep", "0.2"], os.environ, interrupts=interrupts, timeout_s=timeout_s)
        assert (ended.ending, ended.returncode) == ("by_itself", 0)
    ended = run_child(["sleep", "60"], os.environ, interrupts=interrupts, timeout_s=0.2)
    assert ended.ending == "timeout"
    assert ended.end_ns - ended.begin_ns >= 200_000_000


@pytest.mark.parametrize("broken", ["on_start", "_follow", "Drain"])
def test_whatever_goes_wrong_in_lucid_the_group_is_killed_and_reaped(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    """An error between start and end leaves neither a process, nor a zombie, nor a thread."""

    def fail(*_: object, **__: object) -> NoReturn:
        wait_for(tmp_path / "pids")
        raise RuntimeError("broken")

    if broken != "on_start":
        monkeypatch.setattr(child, broken, fail)
    script = f"sleep 60 & echo $$ $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; sleep 60"
    on_start = fail if broken == "on_start" else None
    num_threads = threading.active_count()
    with pytest.raises(RuntimeError, match="broken"):
        run_child(["sh", "-c", script], os.environ, interrupts=interrupts, on_start=on_start)
    pid, grandchild = map(int, wait_for(tmp_path / "pids").split())
    wait_for_end(grandchild)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    assert threading.active_count() == num_threads


def _tail(interrupts: Interrupts, script: str) -> str:
    ended = run_child([sys.executable, "-c", script], os.environ, interrupts=interrupts)
    assert len(ended.output_tail.encode()) <= 4096
    return ended.output_tail


def test_each_stream_has_a_tail_of_its_own(interrupts: Interrupts) -> None:
    """Standard error comes last and keeps most of the room, whichever was written last; both are named."""
    text = _tail(
        interrupts, r"import os; os.write(2, b'e' * 9999 + b'reason\n'); os.write(1, b'o' * 99999 + b'result')"
    )
    out, err = text.removeprefix("--- standard output ---\n").split("\n--- standard error ---\n")
    assert set(out.removesuffix("result")) == {"o"}
    assert set(err.removesuffix("reason\n")) == {"e"}
    assert len(err) == 3072
    assert len(text) == 4096


@pytest.mark.parametrize(("short", "long"), [(1, 2), (2, 1)])
def test_a_stream_uses_the_room_that_the_other_leaves(interrupts: Interrupts, short: int, long: int) -> None:
    """A short message costs the long one only its own length."""
    text = _tail(interrupts, f"import os; os.write({long}, b'l' * 9999); os.write({short}, b'short')")
    assert "short" in text
    assert 4090 <= len(text) <= 4096
    assert text.endswith("short" if short == 2 else "l")


@pytest.mark.parametrize("unit", ["\\xff", "\\xf0\\x9f\\x9a\\x80", "\\xc3\\xa9"])
def test_a_tail_fits_whatever_the_bytes_are(interrupts: Interrupts, unit: str) -> None:
    """Replacements count in full, and no character is cut in half."""
    for streams in ((1,), (2,), (1, 2)):
        writes = "; ".join(f"os.write({stream}, b'{unit}' * 5000 + b'end')" for stream in streams)
        text = _tail(interrupts, f"import os; {writes}")
        assert text.endswith("end")
        assert len(text.encode()) > 4080
        if unit != "\\xff":
            assert "\ufffd" not in text


def test_orphans_of_what_was_there_before_are_not_of_the_run(interrupts: Interrupts) -> None:
    """A shell may exec lucid beside a job of its own, which leaves processes to lucid while a run goes on."""
    with adopting_orphans():
        script = "read go; sleep 60 >/dev/null & echo $!"
        sibling = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        left: list[int] = []

        def end_sibling(_pid: int) -> None:
            left.append(int(sibling.communicate(b"\n", timeout=30)[0]))

        ended = run_child(["true"], os.environ, interrupts=interrupts, on_start=end_sibling)
        assert (ended.outlived, ended.unended) == ((), ())
        os.kill(left[0], signal.SIGTERM)
        _pid, status = os.waitpid(left[0], 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


ESCAPES = "setsid sleep 60 >/dev/null 2>&1 & setsid sh -c 'sleep 60 & wait' & exit 3"


def test_processes_in_other_sessions_are_ended_and_named(interrupts: Interrupts) -> None:
    """Nothing of a run goes on after it, and the time of the run is that of the command."""
    with subprocess.Popen(["sleep", "60"]) as bystander:
        with adopting_orphans():
            before = descendants.sessions()
            ended = run_child(["sh", "-c", ESCAPES], os.environ, interrupts=interrupts)
            assert not descendants.descendants(before)
            assert descendants.sessions() == before
        assert bystander.poll() is None
        bystander.kill()
    assert (ended.returncode, ended.outlived, ended.unended) == (3, ("sh", "sleep", "sleep"), ())
    assert ended.end_ns - ended.begin_ns < 900_000_000


def test_a_process_that_ends_soon_is_not_said_to_have_been_ended(interrupts: Interrupts) -> None:
    """What clears up after the command's end has a moment for it."""
    with adopting_orphans():
        before = descendants.sessions()
        ended = run_child(["sh", "-c", "setsid sleep 0.3 >/dev/null 2>&1 &"], os.environ, interrupts=interrupts)
        assert descendants.sessions() == before
    assert (ended.outlived, ended.unended, ended.held_output) == ((), (), False)


def test_without_adoption_no_other_child_is_touched(interrupts: Interrupts) -> None:
    """Where orphans are not lucid's, nothing is claimed about them; the setting is given back after the runs."""
    with adopting_orphans():
        assert descendants._is_adopting()
    assert not descendants._is_adopting()
    ended = run_child(["sh", "-c", "sleep 60 &"], os.environ, interrupts=interrupts)
    assert (ended.outlived, ended.held_output) == ((), True)
