import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import pytest

from lucid_profiler.monitor.tree import Tree, read_available_bytes, read_own_peak_bytes, read_stat

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
# Never asks how its two children ended. The first burns, prints, and ends at a line; then the second burns more.
UNASKED = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def burn(seconds):
    while time.process_time() < seconds: pass
first, go = os.pipe(), os.pipe()
if not (child := os.fork()):
    burn(0.3)
    print("burnt", flush=True)
    os.read(first[0], 1)
    os._exit(0)
if not os.fork():
    os.read(go[0], 1)
    burn(0.6)
    print("burnt too", flush=True)
    time.sleep(600)
sys.stdin.readline()
os.write(first[1], b"x")
while os.path.exists(f"/proc/{child}"): time.sleep(0.01)
os.write(go[1], b"x")
sys.stdin.readline()
"""


@contextmanager
def running(program: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program that ends with its standard input."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(LIMIT_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


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


def test_processor_time_that_a_parent_took_counts_once() -> None:
    """A child that was seen to use time and whose status was taken is in its parent's time, and nowhere else."""
    with running(WITH_CHILD.format(seconds=0.4)) as process:
        tree = tree_of(process)

        def has_used() -> bool:
            tree.scan()
            tree.read()
            child = read_stat(tree.pids[-1])
            return len(tree.pids) == 2 and child is not None and child.own_ticks >= 10

        until(has_used)
        tree.read()
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        total_s = number(tree.read()[0]["cpu_time_s"])
        parent = read_stat(process.pid)
        assert parent is not None
        assert total_s <= (parent.own_ticks + parent.inherited_ticks) / os.sysconf("SC_CLK_TCK")


def test_processor_time_that_nobody_asks_for_stays() -> None:
    """Where a parent ignores how its children end, Linux adds their time to nobody; a busy sibling does not hide it."""
    with running(UNASKED) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        tree = tree_of(process)
        assert process.stdout.readline() == b"burnt\n"
        tree.scan()
        before = number(tree.read()[0]["cpu_time_s"])
        assert before >= 0.25
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"burnt too\n"
        values, _ = tree.read()
        assert values["num_processes"] == 2
        assert number(values["cpu_time_s"]) >= before + 0.5


def test_a_process_is_asked_who_it_belongs_to() -> None:
    """A grandchild that no scan has seen is found by its ancestors and joins; others do not."""
    with running(ORPHAN.format(seconds=600)) as process, running("import sys; sys.stdin.read()") as stranger:
        tree = tree_of(process)
        seen = tree_of(process)

        def is_seen() -> bool:
            seen.scan()
            return len(seen.pids) == 3

        until(is_seen)
        assert tree.pids == (process.pid,)
        assert tree.owns(seen.pids[2])
        assert tree.pids == seen.pids
        assert tree.read()[0]["num_processes"] == 3
        assert [tree.owns(pid) for pid in (stranger.pid, os.getpid(), 1, 0, -1, 2**22 + 1)] == [False] * 6
        os.killpg(process.pid, signal.SIGKILL)


def test_the_monitor_is_no_part_of_what_it_follows() -> None:
    """A program may start the monitor that follows it."""
    parent = read_stat(os.getppid())
    assert parent is not None
    tree = Tree(os.getppid(), start_ticks=parent.start_ticks)
    with running("import sys; sys.stdin.read()") as child:
        tree.scan()
        assert not tree.owns(child.pid)
        assert not {os.getpid(), child.pid} & set(tree.pids)


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


def test_the_number_of_a_process_that_is_gone_may_belong_to_a_new_one() -> None:
    """So that it is looked at again, whoever has it."""
    with running("import subprocess, sys; subprocess.run(['sleep', '0.3']); sys.stdin.read()") as process:
        tree = tree_of(process)
        deadline = time.monotonic() + 30
        while len(tree.pids) < 2:
            assert time.monotonic() < deadline
            tree.scan()
        (child,) = set(tree.pids) - {process.pid}
        assert child in tree._known
        before = tree._last_pid
        while child in tree.pids:
            assert time.monotonic() < deadline
            tree.read()
        assert child not in tree._known
        assert tree._is_stale  # so the next look takes place, and knows still whether numbers began anew
        assert tree._last_pid == before


def test_a_number_that_is_given_out_anew_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process known not to belong has ended, and a child has got its number."""
    with running("import sys; sys.stdin.read()") as process:
        tree = tree_of(process)
        newest = iter([(1 << 20) + 1, (1 << 20) + 2, 300])
        monkeypatch.setattr(tree, "_newest_pid", lambda: next(newest))
        tree.scan()
        assert os.getpid() in tree._known
        monkeypatch.setattr("lucid_profiler.monitor.tree.read_stat", lambda _pid: None)
        tree.scan()
        assert os.getpid() in tree._known
        tree.scan()
        assert not tree._known


def test_where_no_number_shows_that_processes_start_all_are_looked_for() -> None:
    """In a container another file system may stand in the place of /proc/loadavg, and stand still."""
    program = (
        "import subprocess, sys\n"
        "sys.stdin.readline()\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "sys.stdin.read()\n"
        "child.kill()\n"
    )
    with running(program) as process:
        tree = tree_of(process)
        tree._counts_starts = False
        tree.scan()
        assert tree.pids == (process.pid,)
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()

        def finds_both() -> bool:
            tree.scan()
            return len(tree.pids) == 2

        until(finds_both)


def test_threads_that_outlive_the_first_one_are_a_process() -> None:
    """Its state says zombie then, and /proc shows its memory under the number of another thread alone."""
    program = (
        "import ctypes, threading, sys\n"
        "held = bytearray(b'x') * (64 << 20)\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).syscall(60 if sys.maxsize > 2**32 else 1, 0)\n"
    )
    with running(program) as process:
        tree = tree_of(process)
        assert process.stdout is not None
        process.stdout.readline()
        until(lambda: (stat := read_stat(process.pid)) is not None and stat.state == "Z")
        values, _ = tree.read()
        assert number(values["rss_bytes"]) > 64 << 20
        assert (values["num_processes"], values["num_threads"]) == (1, 2)
        assert number(tree.read_pss()[0]["pss_bytes"]) > 64 << 20


@pytest.mark.parametrize("where", ["os.listdir", "os.open"])
def test_without_descriptors_nothing_is_known_and_nothing_lost(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Processes are not taken for gone; what was found before is read again later."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with running("import sys; sys.stdin.read()") as process:
        tree = tree_of(process)
        with monkeypatch.context() as patch:
            patch.setattr(where, refuse)
            tree.scan()
            values, reasons = tree.read()
        if where == "os.open":
            assert set(values.values()) == {None}
            assert set(reasons.values()) == {"gap"}
        tree.scan()
        assert number(tree.read()[0]["rss_bytes"]) > 0
        assert tree.pids == (process.pid,)


@pytest.mark.parametrize("why", ["pid_namespace", "no_permission", "not_supported"])
def test_where_proc_shows_nothing_the_reason_is_given(why: str) -> None:
    """A /proc of another namespace would describe somebody else's processes, another may be told to hide them."""
    tree = Tree(os.getpid(), start_ticks=None, why_hidden=why)
    tree.scan()
    for values, reasons in (tree.read(), tree.read_pss()):
        assert set(reasons.values()) == {why}
        assert set(values.values()) == {None}
    assert tree.pids == ()


def test_memory_of_machine_and_monitor_is_known() -> None:
    """Both amounts are in bytes."""
    assert number(read_available_bytes()) > 1 << 20
    assert number(read_own_peak_bytes()) > 1 << 20
