import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from cli.harness import Lucid, is_running
from lucid_cli.commands.daemon import _answering
from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.address import Lock, socket_path
from lucid_profiler.monitor.client import Client
from support import fake_nvml

LIMIT_S = 30
READY_LIMIT_S = 10.0  # as long as a start waits for another one


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the commands a place of their own for the daemon, with a short name."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


@pytest.fixture
def target() -> Iterator["subprocess.Popen[bytes]"]:
    """Give a process that waits."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def kinds(path: Path) -> list[str]:
    """Return the kinds of a log's records, read without lucid."""
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


def wait_for_sample(path: Path) -> None:
    """Wait until the monitor has written a sample."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists() or b'"kind":"sample"' not in path.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_daemon_is_started_looked_at_and_stopped(
    lucid: Lucid, runtime: Path, target: "subprocess.Popen[bytes]"
) -> None:
    """Each is a command of its own, and the log is whole when `stop` has returned."""
    log = lucid.directory / "log.jsonl"
    started = lucid("profile", "daemon", "start", str(target.pid), "-o", "log.jsonl", "--interval", "0.02", "--no-nvml")
    assert (started.code, started.out) == (0, "")
    assert started.err.splitlines()[1] == "log: log.jsonl"
    daemon = int(started.err.split()[2])
    wait_for_sample(log)
    status = lucid("profile", "daemon", "status")
    assert status.code == 0
    assert f"follows process {target.pid} every 0.02 s, into {log}" in status.out
    assert " missed, 0 records could not be written" in status.out
    assert lucid("profile", "daemon", "stop").code == 0
    deadline = time.monotonic() + LIMIT_S
    while is_running(daemon):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found = kinds(log)
    assert (found[0], found[-1]) == ("header", "end")
    assert not list((runtime / "lucid").iterdir())
    assert target.poll() is None


def test_stop_returns_once_the_log_is_finished(
    lucid: Lucid, runtime: Path, target: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    """Also where the last readings take a while; and then no daemon runs any more."""
    slow = {"value": 1, "latency_us": 50_000}
    devices = [
        fake_nvml.device(uuid=f"{fake_nvml.UUID[:-1]}{at}", pci=f"00000000:0{at}:00.0", energy=slow) for at in range(8)
    ]
    env = fake_nvml.environment(fake_nvml.scenario(*devices), tmp_path)
    assert lucid("profile", "daemon", "start", str(target.pid), "-o", "log.jsonl", env=env).code == 0
    wait_for_sample(lucid.directory / "log.jsonl")
    assert lucid("profile", "daemon", "stop").code == 0
    assert kinds(lucid.directory / "log.jsonl")[-1] == "end"
    assert lucid("profile", "daemon", "status").out == "no daemon runs\n"


def test_a_daemon_without_room_for_one_more_is_not_denied(
    lucid: Lucid, runtime: Path, target: "subprocess.Popen[bytes]"
) -> None:
    """Sixteen others hold its connections for a second: `stop` waits for them, and it stops."""
    assert lucid("profile", "daemon", "start", str(target.pid), "-o", "log.jsonl", "--no-nvml").code == 0
    with ExitStack() as others:
        for _ in range(16):
            other = others.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            other.connect(str(socket_path(runtime / "lucid")))
        stopped = lucid("profile", "daemon", "stop")
    assert (stopped.code, stopped.err) == (0, "")
    assert kinds(lucid.directory / "log.jsonl")[-1] == "end"


def test_a_daemon_whose_files_were_removed_is_not_denied(
    lucid: Lucid, runtime: Path, target: "subprocess.Popen[bytes]"
) -> None:
    """Status says what is lost with its log; without its socket it cannot be reached, and runs."""
    started = lucid("profile", "daemon", "start", str(target.pid), "-o", "log.jsonl", "--no-nvml")
    daemon = int(started.err.split()[2])
    wait_for_sample(lucid.directory / "log.jsonl")
    (lucid.directory / "log.jsonl").unlink()
    assert "its log was deleted: what it records is lost" in lucid("profile", "daemon", "status").out
    socket_path(runtime / "lucid").unlink()
    for verb in ("status", "stop"):
        asked = lucid("profile", "daemon", verb)
        assert asked.code == 9
        assert f"a daemon runs, process {daemon}, but its socket" in asked.err
    os.kill(daemon, signal.SIGTERM)


def test_another_user_s_directory_is_not_taken_for_a_daemon_that_hangs(runtime: Path) -> None:
    """It cannot be entered: the remedy is a directory of one's own."""
    words = f"{runtime}/lucid belongs to another user; set XDG_RUNTIME_DIR"
    with pytest.raises(EnvironmentUnusableError, match=words), _answering():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_second_start_changes_nothing(lucid: Lucid, runtime: Path, target: "subprocess.Popen[bytes]") -> None:
    """For the same process it is done already; for another one it is refused."""
    start = ("profile", "daemon", "start")
    assert lucid(*start, str(target.pid), "--no-nvml").code == 0
    again = lucid(*start, str(target.pid), "--no-nvml")
    assert again.code == 0
    assert f"process {target.pid} is followed already" in again.err
    other = lucid(*start, str(os.getpid()), "--no-nvml")
    assert other.code == 9
    assert f"a daemon follows process {target.pid} already; end it first" in other.err
    assert lucid("profile", "daemon", "stop").code == 0
    assert len(list(lucid.directory.glob(f"lucid-monitor-*Z-{target.pid}.jsonl"))) == 1


def test_of_starts_at_the_same_time_one_follows(lucid: Lucid, runtime: Path, target: "subprocess.Popen[bytes]") -> None:
    """Whoever comes too late finds the process followed, as one that comes later does."""
    starts = [lucid.start("profile", "daemon", "start", str(target.pid), "--no-nvml") for _ in range(4)]
    said = [start.communicate(timeout=3 * LIMIT_S)[1].decode() for start in starts]
    assert [start.returncode for start in starts] == [0] * 4, said
    assert sum("daemon: process " in text for text in said) == 1
    assert sum(f"process {target.pid} is followed already, into {lucid.directory}" in text for text in said) == 3
    assert lucid("profile", "daemon", "stop").code == 0
    assert len(list(lucid.directory.glob("lucid-monitor-*"))) == 1


@pytest.mark.parametrize("is_same", [True, False])
def test_a_start_waits_for_a_daemon_that_was_just_begun(
    lucid: Lucid, runtime: Path, target: "subprocess.Popen[bytes]", *, is_same: bool
) -> None:
    """It listens, and is not told yet what to follow: only then is it known whether that is the same process."""
    (runtime / "lucid").mkdir(mode=0o700)
    ours, theirs = socket.socketpair()
    words = ["--control", str(theirs.fileno()), "--directory", str(runtime / "lucid")]
    with (
        theirs,
        subprocess.Popen(
            [sys.executable, "-m", "lucid_profiler.monitor", *words], pass_fds=[theirs.fileno()]
        ) as daemon,
        closing(Client(ours, timeout_s=LIMIT_S)) as client,
    ):
        client.request("hello")
        late = lucid.start("profile", "daemon", "start", str(target.pid if is_same else os.getpid()), "--no-nvml")
        with pytest.raises(subprocess.TimeoutExpired):
            late.wait(1.5)
        client.request("start", pid=target.pid, output=str(lucid.directory / "log"), with_nvml=False)
        said = late.communicate(timeout=LIMIT_S)[1].decode()
        client.request("stop")
        daemon.wait(LIMIT_S)
    if is_same:
        assert (late.returncode, said) == (0, f"process {target.pid} is followed already, into {lucid.directory}/log\n")
    else:
        assert late.returncode == 9
        assert f"a daemon follows process {target.pid} already; end it first" in said


def test_a_start_waits_for_a_daemon_that_is_about_to_end(
    lucid: Lucid, runtime: Path, target: "subprocess.Popen[bytes]"
) -> None:
    """It answers no more and has its lock still: what comes after it follows the process itself."""
    directory = runtime / "lucid"
    directory.mkdir(mode=0o700)
    lock = Lock(directory)
    start = lucid.start("profile", "daemon", "start", str(target.pid), "--no-nvml")
    with pytest.raises(subprocess.TimeoutExpired):
        start.wait(4)
    lock.release()
    said = start.communicate(timeout=LIMIT_S)[1].decode()
    assert start.returncode == 0, said
    assert "daemon: process " in said
    assert lucid("profile", "daemon", "stop").code == 0


def test_a_lock_that_is_never_given_back_is_not_waited_for_without_end(
    lucid: Lucid, runtime: Path, target: "subprocess.Popen[bytes]"
) -> None:
    """Whose it is, is said."""
    directory = runtime / "lucid"
    directory.mkdir(mode=0o700)
    lock = Lock(directory)
    started = lucid("profile", "daemon", "start", str(target.pid), "--no-nvml")
    assert started.code == 9
    assert f"a daemon runs already, process {os.getpid()}" in started.err
    lock.release()


def test_a_start_of_no_process_is_not_tried_again(lucid: Lucid, runtime: Path) -> None:
    """Only a daemon of somebody else is waited for."""
    begin = time.monotonic()
    started = lucid("profile", "daemon", "start", str(2**22 + 1), "--no-nvml")
    assert started.code == 9
    assert f"process {2**22 + 1} does not exist" in started.err
    assert time.monotonic() - begin < READY_LIMIT_S


def test_without_a_daemon_the_commands_say_so(lucid: Lucid, runtime: Path) -> None:
    """Stopping what does not run is no failure; asking for its status is answered by the exit code too."""
    status = lucid("profile", "daemon", "status")
    assert (status.code, status.out) == (9, "no daemon runs\n")
    stop = lucid("profile", "daemon", "stop")
    assert (stop.code, stop.out) == (0, "")
    assert "no daemon runs" in stop.err


def test_attach_follows_to_the_end_and_sums_up(lucid: Lucid) -> None:
    """The result is what the process used, and how it ended; torch is not needed for it."""
    script = "import time\nwhile time.process_time() < 0.5: pass\nimport sys; sys.exit(3)"
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.readline()\n" + script], stdin=subprocess.PIPE
    ) as process:
        attach = lucid.start(
            "profile", "attach", str(process.pid), "-o", "log.jsonl", "--no-nvml", "--interval", "0.05"
        )
        wait_for_sample(lucid.directory / "log.jsonl")
        assert process.stdin is not None
        process.stdin.close()
        out, err = attach.communicate(timeout=LIMIT_S)
    text = out.decode()
    assert attach.returncode == 0
    assert f"process {process.pid} has ended with status 3\n" in text
    assert "CPU time 0." in text
    assert "at most 1 process\n" in text
    assert "GPUs were not read" in text
    assert b"log: log.jsonl" in err


def test_a_long_command_line_is_no_obstacle(lucid: Lucid, runtime: Path) -> None:
    """Thousands of file names, or one long text, as trainings are given them."""
    for words in (["/data/images/0123456789.png"] * 3000, ["x" * 66_000]):
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words]) as process:
            started = lucid("profile", "daemon", "start", str(process.pid), "--no-nvml", "-o", f"{len(words)}.daemon")
            assert started.code == 0, started.err
            attach = lucid.start("profile", "attach", str(process.pid), "--no-nvml", "-o", f"{len(words)}.log")
            wait_for_sample(lucid.directory / f"{len(words)}.log")
            status = lucid("profile", "daemon", "status")
            assert f"follows process {process.pid} " in status.out
            stop = lucid("profile", "daemon", "stop")
            assert (stop.code, stop.err) == (0, "")
            process.kill()
            out, err = attach.communicate(timeout=LIMIT_S)
            assert attach.returncode == 0, err
            assert f"process {process.pid} has ended by SIGKILL\n" in out.decode()


def test_ctrl_c_ends_attach_and_not_the_process(lucid: Lucid, target: "subprocess.Popen[bytes]") -> None:
    """The log is finished and shown, as after the end of the process."""
    attach = lucid.start("profile", "attach", str(target.pid), "-o", "log.jsonl", "--no-nvml")
    wait_for_sample(lucid.directory / "log.jsonl")
    attach.send_signal(signal.SIGINT)
    out, _ = attach.communicate(timeout=LIMIT_S)
    assert attach.returncode == 0
    assert f"process {target.pid} still runs" in out.decode()
    assert kinds(lucid.directory / "log.jsonl")[-1] == "end"
    assert target.poll() is None


def test_attach_refuses_what_it_cannot_do(lucid: Lucid, target: "subprocess.Popen[bytes]") -> None:
    """A process that does not exist is an unusable environment; a file that exists is not overwritten."""
    gone = lucid("profile", "attach", str(2**22 + 1), "--no-nvml")
    assert gone.code == 9
    assert f"process {2**22 + 1} does not exist" in gone.err
    (lucid.directory / "mine").write_text("keep")
    existing = lucid("profile", "attach", str(target.pid), "-o", "mine")
    assert existing.code == 2
    assert "mine exists already" in existing.err
    assert (lucid.directory / "mine").read_text() == "keep"
    (lucid.directory / "old.0").write_text("keep")
    older = lucid("profile", "attach", str(target.pid), "-o", "old")
    assert older.code == 2
    assert "old.0 is a part of an older log old; name another file with -o" in older.err
    assert lucid("profile", "attach", str(target.pid), "-o", "").code == 2
    for command in (("attach",), ("daemon", "start")):
        nowhere = lucid("profile", *command, str(target.pid), "-o", "missing/log")
        assert nowhere.code == 2
        assert "the log missing/log cannot be written: No such file or directory" in nowhere.err
    for bad in (("0",), ("1", "--interval", "0"), ("x",)):
        assert lucid("profile", "attach", *bad).code == 2
