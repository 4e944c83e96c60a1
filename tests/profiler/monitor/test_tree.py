import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid_profiler.monitor.tree import Total, Tree, read_available_bytes, read_own_peak_bytes, read_stat

LIMIT_S = 20
# Starts a child that burns `seconds` of processor time and takes its status; prints when that is done, then waits.
WITH_CHILD = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < float({seconds}): pass"
child = subprocess.Popen([sys.executable, "-c", burn])
child.wait()
print("done", flush=True)
sys.stdin.read()
"""
# Starts a child that starts a grandchild and ends; the grandchild ends with its standard input.
ORPHAN = """
import subprocess, sys
grandchild = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()']); time.sleep({seconds})"
subprocess.run([sys.executable, "-c", grandchild])
print("done", flush=True)
sys.stdin.read()
"""  # noqa: E501 - a program in one line


@contextmanager
def running(program: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program that ends with its standard input."""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(LIMIT_S)


def tree_of(process: "subprocess.Popen[bytes]") -> Tree:
    """Return the tree below a process."""
    stat = read_stat(process.pid)
    assert stat is not None
    return Tree(process.pid, start_ticks=stat.start_ticks)


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def number(value: float | None) -> float:
    """Return a value that must be known."""
    assert value is not None
    return value


def test_a_process_and_its_children_are_one_tree() -> None:
    """Processes, threads, memory and I/O are those of all together."""
    with running(WITH_CHILD.format(seconds=0.5)) as process:
        tree = tree_of(process)

        def has_child() -> bool:
            tree.scan()
            return len(tree.pids) == 2

        until(has_child)
        values, reasons = tree.read()
        assert not reasons
        assert values["num_processes"] == 2
        assert number(values["num_threads"]) >= 2
        own = read_stat(process.pid)
        assert own is not None
        assert number(values["rss_bytes"]) > own.rss_pages * os.sysconf("SC_PAGE_SIZE")
        assert number(values["read_bytes"]) >= 0
        assert number(values["write_bytes"]) >= 0


def test_processor_time_of_a_child_that_has_ended_stays() -> None:
    """What a child used belongs to the tree after its end."""
    with running(WITH_CHILD.format(seconds=0.3)) as process:
        tree = tree_of(process)
        before = number(tree.read()[0]["cpu_time_s"])
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        tree.scan()
        values, _ = tree.read()
        assert values["num_processes"] == 1
        assert number(values["cpu_time_s"]) - before >= 0.25


def test_an_orphan_that_was_seen_stays_in_the_tree() -> None:
    """A worker whose parent has ended still works for the target."""
    with running(ORPHAN.format(seconds=1.0)) as process:
        tree = tree_of(process)

        def is_seen() -> bool:
            tree.scan()
            return len(tree.pids) == 3

        until(is_seen)
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        tree.scan()
        assert tree.read()[0]["num_processes"] == 2


def test_shared_pages_are_divided() -> None:
    """The proportional memory of a process is at most its resident one, and is not nothing."""
    with running("import sys; print('ready', flush=True); sys.stdin.read()") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        tree = tree_of(process)
        resident = number(tree.read()[0]["rss_bytes"])
        values, reasons = tree.read_pss()
        assert not reasons
        assert 0 < number(values["pss_bytes"]) <= resident * 1.1


def test_a_zombie_is_no_process_and_keeps_its_time() -> None:
    """Between its end and its parent's question, a process has no memory and no threads, but has used time."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        tree = tree_of(process)
        until(lambda: number(tree.read()[0]["cpu_time_s"]) >= 0.05)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        values, _ = tree.read()
        assert (values["num_processes"], values["num_threads"], values["rss_bytes"]) == (0, 0, 0)
        assert number(values["cpu_time_s"]) >= 0.05


def test_a_process_that_is_gone_has_no_values() -> None:
    """Every field is None and says why; nothing is 0."""
    with running("") as process:
        tree = tree_of(process)
        process.wait(LIMIT_S)
        for values, reasons in (tree.read(), tree.read_pss()):
            assert values
            assert all(value is None for value in values.values())
            assert reasons == dict.fromkeys(values, "not_found")


def test_another_process_of_the_same_number_is_not_taken_for_it() -> None:
    """A number alone is no identity."""
    stat = read_stat(os.getpid())
    assert stat is not None
    values, reasons = Tree(os.getpid(), start_ticks=stat.start_ticks + 1).read()
    assert values["rss_bytes"] is None
    assert reasons["rss_bytes"] == "not_found"


def test_where_proc_numbers_others_nothing_is_read() -> None:
    """A /proc of another namespace would describe somebody else's processes."""
    tree = Tree(os.getpid(), start_ticks=None)
    tree.scan()
    for values, reasons in (tree.read(), tree.read_pss()):
        assert set(reasons.values()) == {"pid_namespace"}
        assert set(values.values()) == {None}
    assert tree.pids == ()


def test_memory_of_machine_and_monitor_is_known() -> None:
    """Both amounts are in bytes."""
    assert number(read_available_bytes()) > 1 << 20
    assert number(read_own_peak_bytes()) > 1 << 20


@given(steps=st.lists(st.integers(0, 100), max_size=30))
def test_a_sum_that_only_grows_is_passed_on(steps: list[int]) -> None:
    """Without losses the total is the sum over the living."""
    total = Total()
    living = 0
    for step in steps:
        living += step
        assert total.update(living) == living


@given(sums=st.lists(st.integers(0, 1000), max_size=50))
def test_a_total_never_falls(sums: list[int]) -> None:
    """Whatever ends, what was used was used."""
    total = Total()
    totals = [total.update(living) for living in sums]
    assert totals == sorted(totals)
    assert all(one >= living for one, living in zip(totals, sums, strict=True))


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ((100, 40, 110), 110),  # 60 were on their way from a child to its parent
        ((100, 40, 45, 50), 105 + 0),  # 60 are lost with a process that nobody asked for its status
    ],
)
def test_only_what_stays_away_is_lost(sums: tuple[int, ...], expected: int) -> None:
    """A sum that is lower for one look is a look in between; one that stays lower has lost something."""
    total = Total()
    assert [total.update(living) for living in sums][-1] == expected
