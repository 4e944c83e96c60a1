import io
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.protocol import MAX_FRAME_BYTES, encode
from lucid_profiler.monitor.target import MAX_ARGV_CHARS, ExitStatus, Target, open_pidfd

LIMIT_S = 20
STRANGER = """
import os, sys
from lucid_profiler.monitor.target import Target
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
target = Target(int(sys.argv[1]))
print("follows", flush=True)
sys.stdin.read()
print(target.has_ended(), target.exit_status())
"""
WAITING = "import sys; sys.exit(int(sys.stdin.readline() or 0))"
SAYING = "print(flush=True); " + WAITING


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """Give a process that ends with the status that it reads."""
    with subprocess.Popen([sys.executable, "-c", WAITING], stdin=subprocess.PIPE, env={"SOME": "thing=é"}) as process:
        yield process
        process.kill()


@pytest.fixture
def target(process: "subprocess.Popen[bytes]") -> Iterator[Target]:
    """Give the process as a target."""
    target = Target(process.pid)
    yield target
    target.close()


def end(process: "subprocess.Popen[bytes]", status: int, *, is_reaped: bool) -> None:
    """Have the process end with a status, and wait for that."""
    assert process.stdin is not None
    process.stdin.write(f"{status}\n".encode())
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if is_reaped:
        process.wait(LIMIT_S)


def test_a_target_is_known_by_number_start_and_command(process: "subprocess.Popen[bytes]", target: Target) -> None:
    """The header of a log tells which process was meant."""
    assert target.describe() == {
        "pid": process.pid,
        "start_ticks": target.start_ticks,
        "argv": [sys.executable, "-c", WAITING],
    }
    assert target.start_ticks is not None
    assert not target.has_ended()
    assert target.exit_status() is None


@pytest.mark.parametrize(
    "words",
    [
        [b"x" * 120_000] * 10,
        [b"image.png"] * 100_000,
        [b""] * 100_000,
        [b"\xff"] * 100_000,
        [b"\x01" * 4000] * 3,
        [b"\xf0\x9f\x98\x80\xff"] * 20_000,
        ["\N{GRINNING FACE}".encode() * 2500 + b"\xff"] * 2,
    ],
)
def test_of_a_long_command_line_answers_have_the_first_words(words: list[bytes]) -> None:
    """What they say fits a frame whatever the words are, and what is left out is counted; the header has it all."""
    with subprocess.Popen(
        [os.fsencode(sys.executable), b"-c", SAYING.encode(), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the kernel has its command line in place
        target = Target(process.pid)
        end(process, 0, is_reaped=True)
    argv = [sys.executable, "-c", SAYING, *map(os.fsdecode, words)]
    assert target.describe()["argv"] == argv
    brief = dict(target.brief())
    kept = brief.pop("argv")
    assert isinstance(kept, list)
    assert kept == argv[: len(kept)]
    assert brief == {
        "pid": process.pid,
        "start_ticks": target.start_ticks,
        "num_argv_left_out": len(argv) - len(kept),
    }
    num_chars = len("".join(kept)) + len(kept)
    assert num_chars <= MAX_ARGV_CHARS < num_chars + len(argv[len(kept)]) + 1
    assert len(encode(dict(target.brief()))) < MAX_FRAME_BYTES * 3 // 4
    target.close()


def test_of_a_short_command_line_nothing_is_left_out(target: Target) -> None:
    """Nor is anything said of one that is not known."""
    assert target.brief() == {**target.describe(), "num_argv_left_out": 0}
    target.argv = None
    assert target.brief() == {**target.describe(), "num_argv_left_out": None}


def test_the_environment_is_the_target_s_own(target: Target) -> None:
    """Devices are chosen by what the target was started with, not by what the monitor was."""
    environ = target.environ()
    assert environ is not None
    assert environ["SOME"] == "thing=é"
    assert "PATH" not in environ


@pytest.mark.parametrize(
    ("written", "environ"),
    [
        (b"", {}),
        (b"A=1\0B=\0", {"A": "1", "B": ""}),
        (b"A=first\0A=second\0", {"A": "first"}),
        (b"train.py epoch 3\0\0\0\0", None),
        (b"\0\0\0\0", None),
        (b"A=1\0rest of a title\0", None),
    ],
)
def test_an_environment_that_a_title_was_written_over_is_not_known(
    target: Target, monkeypatch: pytest.MonkeyPatch, written: bytes, environ: dict[str, str] | None
) -> None:
    """Without any variable it would be taken for one that hides no device; of two of a name the first counts."""
    monkeypatch.setattr("builtins.open", lambda *_: io.BytesIO(written))
    assert target.environ() == environ


@pytest.mark.parametrize("is_reaped", [False, True])
def test_the_status_of_a_target_is_known(
    process: "subprocess.Popen[bytes]", target: Target, *, is_reaped: bool
) -> None:
    """Before its parent asks for it, and on newer systems afterwards; elsewhere it is None, not 0."""
    end(process, 3, is_reaped=is_reaped)
    assert target.has_ended()
    expected = [ExitStatus(returncode=3, signal=None)]
    assert target.exit_status() in (expected if not is_reaped else [*expected, None])
    assert target.environ() is None


def test_a_status_of_0_is_believed_only_where_it_is_shown(
    process: "subprocess.Popen[bytes]", target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel shows 0 to whoever may not know: then the status is not known."""
    end(process, 0, is_reaped=False)
    assert target.exit_status() == ExitStatus(returncode=0, signal=None)
    monkeypatch.setattr("lucid_profiler.monitor.target._may_look_into", lambda _: False)
    assert target.exit_status() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_how_another_user_s_process_ended_is_not_known(process: "subprocess.Popen[bytes]") -> None:
    """A crash is not a success because nobody may see it."""
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER, str(process.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as stranger:
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"follows\n"
        process.send_signal(signal.SIGSEGV)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        stranger.stdin.close()
        assert stranger.stdout.read() == b"True None\n"


def test_a_signal_that_ended_the_target_is_named(process: "subprocess.Popen[bytes]", target: Target) -> None:
    """A kill -9 is told from a status."""
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert target.exit_status() == ExitStatus(returncode=None, signal="SIGKILL")


def test_a_process_that_has_ended_cannot_be_followed(process: "subprocess.Popen[bytes]") -> None:
    """Neither a zombie nor a free number."""
    end(process, 0, is_reaped=False)
    with pytest.raises(EnvironmentUnusableError, match=f"process {process.pid} has ended; only its status"):
        Target(process.pid)
    process.wait(LIMIT_S)
    with pytest.raises(EnvironmentUnusableError, match=f"process {process.pid} does not exist"):
        Target(process.pid)


def test_another_process_of_that_number_is_refused(process: "subprocess.Popen[bytes]", target: Target) -> None:
    """Who knows when the target was started cannot get one that took over its number."""
    assert target.start_ticks is not None
    Target(process.pid, start_ticks=target.start_ticks).close()
    with pytest.raises(EnvironmentUnusableError, match="does not exist"):
        Target(process.pid, start_ticks=target.start_ticks - 1)


@pytest.mark.parametrize("pid", [2**22 + 1, 2**31, 2**70])
def test_a_number_that_no_process_can_have_is_refused(pid: int) -> None:
    """Whatever is asked for, the answer is one sentence."""
    with pytest.raises(EnvironmentUnusableError, match=f"process {pid} does not exist"):
        Target(pid)


def test_a_thread_is_no_process() -> None:
    """Following a thread would end with the thread."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(EnvironmentUnusableError, match=f"is a thread of process {os.getpid()}; name that process"):
            Target(thread.native_id or 0)
    finally:
        done.set()
        thread.join()


def test_interpreters_without_the_function_use_the_system_call(
    process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are built with headers older than the system they run on."""
    monkeypatch.delattr(os, "pidfd_open")
    fd = open_pidfd(process.pid)
    try:
        end(process, 0, is_reaped=True)
        assert select.select([fd], [], [], LIMIT_S)[0] == [fd]
    finally:
        os.close(fd)
    with pytest.raises(ProcessLookupError):
        open_pidfd(process.pid)


def test_no_descriptor_is_left_where_a_target_is_refused(process: "subprocess.Popen[bytes]") -> None:
    """A daemon that is asked again and again stays as it is."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        with pytest.raises(EnvironmentUnusableError):
            Target(process.pid, start_ticks=1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_first_process_of_a_namespace_can_be_followed() -> None:
    """In a container the training is often process 1."""
    script = (
        "import os, sys, time; from lucid_profiler.monitor.target import Target; "
        "from lucid_profiler.monitor.tree import Tree\n"
        "if os.fork() == 0: time.sleep(60)\n"
        "if (pid := os.fork()) == 0:\n"
        "    target = Target(1)\n"
        "    tree = Tree(1, start_ticks=target.start_ticks); tree.scan()\n"
        "    print(os.getppid(), tree.read()[0]['num_processes'], flush=True); os._exit(0)\n"
        "os.waitpid(pid, 0)"
    )
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    if "unshare" in done.stderr:
        pytest.skip("namespaces are not allowed here")
    assert (done.stdout, done.stderr) == ("1 2\n", "")


def test_a_namespace_with_the_proc_of_another_one_is_noticed() -> None:
    """Without a /proc of its own, numbers mean other processes there: nothing is read from it."""
    script = "from lucid_profiler.monitor.target import Target; import os; print(Target(os.getpid()).describe())"
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    if "unshare" in done.stderr:
        pytest.skip("namespaces are not allowed here")
    assert done.stdout == "{'pid': 1, 'start_ticks': None, 'argv': None}\n"
