import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.address import lock_path, socket_path
from lucid_profiler.monitor.client import Client, connect
from lucid_profiler.monitor.log import read_log
from lucid_profiler.monitor.process import Monitor, launch
from lucid_profiler.monitor.protocol import encode
from lucid_profiler.monitor.records import End, Event, Gap, Header, Mark, Sample, TargetExit
from lucid_profiler.monitor.tree import read_stat
from support import fake_nvml

LIMIT_S = 30.0  # for what takes a fraction of a second on a machine that is not busy
END_LIMIT_S = 2.0
NUM_CYCLES = 8
LAUNCHER = """
import sys
from pathlib import Path
from lucid_profiler.monitor.process import launch
monitor = launch(target_pid=int(sys.argv[1]), output=Path(sys.argv[2]), with_nvml=False, timeout_s=30)
print(monitor.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def target() -> Iterator["subprocess.Popen[bytes]"]:
    """Give a process that waits."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Give the name of a log."""
    return tmp_path / "monitor.jsonl"


@pytest.fixture
def directory() -> Iterator[Path]:
    """Give a private directory whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def wait_until_gone(pid: int, *, limit_s: float) -> float:
    """Wait until a process that is not ours has ended; return the seconds that took."""
    begin = time.monotonic()
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() - begin < limit_s
        time.sleep(0.01)
    return time.monotonic() - begin


def wait_for_samples(path: Path, num: int) -> None:
    """Wait until a log has so many samples."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists() or path.read_bytes().count(b'"kind":"sample"') < num:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end_of(path: Path) -> End:
    """Return the last record of a log that is whole."""
    end = read_log(path).records[-1]
    assert isinstance(end, End)
    return end


def names_in(folder: str) -> set[str]:
    """Return the names in a folder."""
    return {path.name for path in Path(folder).iterdir()}


def children() -> set[str]:
    """Return the numbers of this process's children, zombies included."""
    return {name for name in names_in("/proc") if name.isdecimal() and _parent(name) == os.getpid()}


def _parent(name: str) -> int:
    try:
        return int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _launch_with_socket(target: "subprocess.Popen[bytes]", output: Path, directory: Path) -> Monitor:
    monitor = launch(
        target_pid=target.pid,
        output=output,
        interval_s=0.02,
        with_nvml=False,
        directory=directory,
        timeout_s=LIMIT_S,
    )
    assert monitor.reason is None
    return monitor


def test_a_monitor_follows_until_it_is_stopped(
    target: "subprocess.Popen[bytes]", output: Path, directory: Path
) -> None:
    """Samples come at their interval, marks are answered, and the last record is there when `stop` returns."""
    monitor = _launch_with_socket(target, output, directory)
    wait_for_samples(output, 3)
    client = connect(directory, timeout_s=LIMIT_S)
    assert client is not None
    mark = client.request("mark", name="fit begin")
    assert client.request("status")["num_samples"] >= 3
    client.close()
    monitor.stop(LIMIT_S)
    monitor.stop()
    records = read_log(output).records
    assert isinstance(records[0], Header)
    assert records[0].interval_ns == 20_000_000
    assert mark["mono_ns"] in [record.mono_ns for record in records if isinstance(record, Mark)]
    assert end_of(output).status == "stopped"
    assert target.poll() is None


def test_devices_are_read_in_the_monitor_s_process(
    target: "subprocess.Popen[bytes]", output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher itself never opens the driver."""
    for name, value in fake_nvml.environment(fake_nvml.H200, tmp_path).items():
        monkeypatch.setenv(name, value)
    monitor = launch(target_pid=target.pid, output=output, interval_s=0.02, timeout_s=LIMIT_S)
    assert monitor.reason is None
    wait_for_samples(output, 2)
    monitor.stop(LIMIT_S)
    samples = [record for record in read_log(output).records if isinstance(record, Sample)]
    assert {uuid for sample in samples for uuid in sample.gpus} == {fake_nvml.UUID}
    assert samples[0].gpus[fake_nvml.UUID]["power_draw_mw"] == 412_345


@pytest.mark.parametrize("is_listening", [False, True])
def test_a_target_with_a_long_command_line_is_followed(output: Path, directory: Path, *, is_listening: bool) -> None:
    """A megabyte of file names and more: answers say how much they leave out, and the header of the log has it all."""
    words = [*["x" * 120_000] * 8, *["image.png"] * 20_000]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words]) as process:
        monitor = launch(
            target_pid=process.pid,
            output=output,
            interval_s=0.02,
            with_nvml=False,
            directory=directory if is_listening else None,
            timeout_s=LIMIT_S,
        )
        assert monitor.reason is None
        wait_for_samples(output, 3)
        if is_listening:
            client = connect(directory, timeout_s=LIMIT_S)
            assert client is not None
            found = client.request("status")["target"]
            assert (found["pid"], found["argv"][1], found["num_argv_left_out"]) == (process.pid, "-c", len(words))
            client.close()
        process.kill()
        assert monitor.wait(LIMIT_S)
        monitor.stop()
    header = read_log(output).records[0]
    assert isinstance(header, Header)
    assert header.target["argv"][3:] == words
    assert end_of(output).status == "target_exit"


def test_a_monitor_s_own_processor_time_is_the_kernel_s(target: "subprocess.Popen[bytes]", output: Path) -> None:
    """From the start of its process to its last record: more than before it was asked to stop, less than in all."""
    before = os.times().children_user + os.times().children_system
    monitor = launch(target_pid=target.pid, output=output, with_nvml=False, timeout_s=LIMIT_S)
    assert monitor.pid is not None
    wait_for_samples(output, 3)
    stat = read_stat(monitor.pid)
    assert stat is not None
    monitor.stop(LIMIT_S)
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    after = os.times().children_user + os.times().children_system
    error_s = 4 / ticks_per_s
    assert stat.own_ticks / ticks_per_s - error_s <= end_of(output).own_cpu_s <= after - before + error_s


def test_a_monitor_never_loads_torch(target: "subprocess.Popen[bytes]", output: Path) -> None:
    """It is small and touches no device but through the driver's own library."""
    monitor = launch(target_pid=target.pid, output=output, with_nvml=False, timeout_s=LIMIT_S)
    wait_for_samples(output, 1)
    maps = Path(f"/proc/{monitor.pid}/maps").read_text()
    monitor.stop(LIMIT_S)
    assert "libpython" in maps or "python" in maps
    assert not [name for name in ("torch", "libcuda", "numpy", "psutil") if name in maps]


def test_kill_9_of_the_target_ends_the_monitor(target: "subprocess.Popen[bytes]", output: Path) -> None:
    """Within two seconds, with the signal in the log."""
    monitor = launch(target_pid=target.pid, output=output, with_nvml=False, timeout_s=LIMIT_S)
    wait_for_samples(output, 1)
    target.kill()
    begin = time.monotonic()
    assert monitor.wait(LIMIT_S)
    assert time.monotonic() - begin < END_LIMIT_S
    monitor.stop()
    (found,) = (record for record in read_log(output).records if isinstance(record, TargetExit))
    assert found.status == {"returncode": None, "signal": "SIGKILL"}
    assert end_of(output).status == "target_exit"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_launcher_ends_the_monitor(
    target: "subprocess.Popen[bytes]", output: Path, number: signal.Signals
) -> None:
    """However it ends, no monitor is left behind, and the log has its last record."""
    command = [sys.executable, "-c", LAUNCHER, str(target.pid), str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        wait_for_samples(output, 1)
        launcher.send_signal(number)
        launcher.wait()
        assert wait_until_gone(pid, limit_s=LIMIT_S) < END_LIMIT_S
    assert end_of(output).status == "launcher_exit"
    assert target.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_monitor_with_its_last_record(
    target: "subprocess.Popen[bytes]", output: Path, number: signal.Signals
) -> None:
    """Also in the middle of a long interval."""
    monitor = launch(target_pid=target.pid, output=output, interval_s=600, with_nvml=False, timeout_s=LIMIT_S)
    assert monitor.pid is not None
    wait_for_samples(output, 1)
    os.kill(monitor.pid, number)
    assert monitor.wait(END_LIMIT_S)
    monitor.stop()
    assert end_of(output).status == "signal"


STALL: dict[str, Any] = {"value": 1, "from_call": 1, "latency_us": 60_000_000}
"""Longer than any wait of these tests; the end waits for the energy counter where no sample waits for the power."""


@pytest.fixture
def stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a driver that does not answer after three samples, or at the end."""
    device = fake_nvml.device(power_usage=[{"value": 1}, {**STALL, "from_call": 3}], energy=[{"value": 1}, STALL])
    for name, value in fake_nvml.environment(fake_nvml.scenario(device), tmp_path).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("stalled")
@pytest.mark.parametrize("how", ["target_exit", "signal", "stop"])
def test_a_driver_that_does_not_answer_holds_nobody_up(
    target: "subprocess.Popen[bytes]", output: Path, directory: Path, how: str
) -> None:
    """A call that takes a minute: the monitor is gone all the same, with its last record, and its socket is, too."""
    monitor = launch(target_pid=target.pid, output=output, directory=directory, timeout_s=LIMIT_S)
    assert monitor.reason is None
    assert monitor.pid is not None
    wait_for_samples(output, 3)
    if how == "target_exit":
        target.kill()
    elif how == "signal":
        os.kill(monitor.pid, signal.SIGTERM)
    else:
        monitor.stop(0.2)
    assert monitor.wait(LIMIT_S)
    monitor.stop()
    records = read_log(output).records
    end = end_of(output)
    # Where it is asked to stop while the loop is held up, only a signal reaches it.
    assert end.status in ({"stopped", "signal"} if how == "stop" else {how})
    assert end.num_samples == 3
    exits = [record.status for record in records if isinstance(record, TargetExit)]
    assert exits == [{"returncode": None, "signal": "SIGKILL"}] * (how == "target_exit")
    assert any(isinstance(record, Event) and "did not answer" in record.data["text"] for record in records)
    assert not list(directory.iterdir())


def test_a_driver_that_does_not_open_holds_nobody_up(
    target: "subprocess.Popen[bytes]", output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target ends while the driver is opened: there is a whole log that has no device and no sample."""
    played = fake_nvml.scenario(fake_nvml.device(), init={"value": None, "latency_us": 60_000_000})
    for name, value in fake_nvml.environment(played, tmp_path).items():
        monkeypatch.setenv(name, value)
    monitor = launch(target_pid=target.pid, output=output, timeout_s=LIMIT_S)
    assert monitor.reason is None
    target.kill()
    assert monitor.wait(LIMIT_S)
    monitor.stop()
    header, end = read_log(output).records[0], end_of(output)
    assert isinstance(header, Header)
    assert (header.devices, header.reason) == ((), "gap")
    assert (end.status, end.num_samples) == ("target_exit", 0)


def test_a_driver_that_answers_late_keeps_nobody_from_the_daemon(
    target: "subprocess.Popen[bytes]", output: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample takes longer than the second that a client has: requests are answered all the same."""
    played = fake_nvml.scenario(fake_nvml.device(power_usage={"value": 1, "latency_us": 1_300_000}))
    for name, value in fake_nvml.environment(played, tmp_path).items():
        monkeypatch.setenv(name, value)
    monitor = launch(target_pid=target.pid, output=output, directory=directory, timeout_s=LIMIT_S)
    assert monitor.reason is None
    wait_for_samples(output, 1)
    for verb in ("status", "status", "flush"):
        with closing(connect(directory, timeout_s=LIMIT_S) or pytest.fail("no daemon")) as client:
            assert client.request(verb)["ok"] is True
    monitor.stop()
    gaps = [record.reason for record in read_log(output).records if isinstance(record, Gap)]
    assert set(gaps) == {"slow_driver"}


@pytest.mark.parametrize("closed", [(0,), (0, 1), (0, 1, 2)])
def test_a_monitor_starts_where_standard_files_are_closed(
    target: "subprocess.Popen[bytes]", output: Path, closed: tuple[int, ...]
) -> None:
    """New files get their numbers then, which the monitor's own standard files take from them."""
    program = (
        "import os, sys\nfrom pathlib import Path\n"
        "[os.close(fd) for fd in map(int, sys.argv[3:])]\n"
        "from lucid_profiler.monitor.process import launch\n"
        "monitor = launch(target_pid=int(sys.argv[1]), output=Path(sys.argv[2]), with_nvml=False, timeout_s=30)\n"
        "monitor.stop()\n"
        "os._exit(monitor.reason is not None)\n"
    )
    words = [str(target.pid), str(output), *map(str, closed)]
    done = subprocess.run([sys.executable, "-c", program, *words], check=False, timeout=LIMIT_S)
    assert done.returncode == 0
    assert end_of(output).status == "stopped"


def test_a_monitor_that_hangs_is_killed(target: "subprocess.Popen[bytes]", output: Path) -> None:
    """`stop` waits as long as it was told to, and what was written can be read."""
    monitor = launch(target_pid=target.pid, output=output, with_nvml=False, timeout_s=LIMIT_S)
    assert monitor.pid is not None
    wait_for_samples(output, 1)
    os.kill(monitor.pid, signal.SIGSTOP)
    begin = time.monotonic()
    monitor.stop(0.2)
    assert time.monotonic() - begin < LIMIT_S
    assert not Path(f"/proc/{monitor.pid}").exists()
    assert any(isinstance(record, Sample) for record in read_log(output).records)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_pid": 2**22 + 1}, "does not exist"),
        ({"output": Path("/nowhere/monitor.jsonl")}, "/nowhere/monitor.jsonl: No such file or directory"),
        ({"interval_s": 0.0}, "interval_s is 0.0"),
        ({"interval_s": float("nan")}, "interval_s is nan"),
        ({"timeout_s": 0.001}, "not ready within 0.001 s"),
    ],
)
def test_a_monitor_that_cannot_be_had_says_why(
    target: "subprocess.Popen[bytes]", output: Path, settings: dict[str, object], words: str
) -> None:
    """Nothing is raised, no process is left, and the other methods do nothing."""
    before = children()
    arguments = {"target_pid": target.pid, "output": output, "with_nvml": False, "timeout_s": LIMIT_S, **settings}
    monitor = launch(**arguments)  # type: ignore[arg-type]
    assert monitor.reason is not None
    assert words in monitor.reason
    assert (monitor.pid, monitor.wait(0)) == (None, True)
    monitor.stop()
    assert children() == before


def test_a_disk_without_room_stops_nothing(target: "subprocess.Popen[bytes]", directory: Path) -> None:
    """Every record is dropped and counted, and the monitor still answers."""
    monitor = launch(
        target_pid=target.pid,
        output=Path("/dev/full"),
        interval_s=0.01,
        with_nvml=False,
        directory=directory,
        timeout_s=LIMIT_S,
    )
    assert monitor.reason is None
    deadline = time.monotonic() + LIMIT_S
    status: Mapping[str, Any] = {"num_dropped_records": 0}
    while status["num_dropped_records"] < 5:
        assert time.monotonic() < deadline
        client = connect(directory, timeout_s=LIMIT_S)
        assert client is not None
        status = client.request("status")
        client.close()
    assert status["num_samples"] >= 4
    monitor.stop(LIMIT_S)
    assert target.poll() is None


def test_the_program_s_own_modules_do_not_replace_the_monitor_s(
    target: "subprocess.Popen[bytes]", output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training directory may hold a file called like a module of the standard library."""
    (tmp_path / "selectors.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    monitor = launch(target_pid=target.pid, output=Path("monitor.jsonl"), with_nvml=False, timeout_s=LIMIT_S)
    assert monitor.reason is None
    wait_for_samples(output, 1)
    monitor.stop(LIMIT_S)


def test_cycles_leave_nothing(target: "subprocess.Popen[bytes]", output: Path) -> None:
    """After many starts and stops there is no process, descriptor, thread or shared memory more than before."""

    def held() -> tuple[int, int, set[str], set[str]]:
        return len(names_in("/proc/self/fd")), threading.active_count(), children(), names_in("/dev/shm")

    before = held()
    for _ in range(NUM_CYCLES):
        monitor = launch(target_pid=target.pid, output=output, with_nvml=False, timeout_s=LIMIT_S)
        assert monitor.reason is None
        monitor.stop(LIMIT_S)
    assert held() == before
    assert [record.status for record in read_log(output).records if isinstance(record, End)] == ["stopped"] * NUM_CYCLES
    assert list(output.parent.iterdir()) == [output]


def test_bad_clients_change_nothing(target: "subprocess.Popen[bytes]", output: Path, directory: Path) -> None:
    """Silent, half, flooding and deaf ones: samples go on, others are answered, nothing is left at the end."""
    monitor = _launch_with_socket(target, output, directory)
    bad = []
    for data in (b"", encode({"verb": "status"})[:9], encode({"verb": "status"}) * 500, b"\xff" * 70_000):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(socket_path(directory)))
        client.setblocking(False)
        bad.append(client)
        if data:
            client.send(data)
    before = output.read_bytes().count(b'"kind":"sample"')
    good = connect(directory, timeout_s=LIMIT_S)
    assert good is not None
    assert good.request("status")["ok"] is True
    good.close()
    wait_for_samples(output, before + 5)
    for client in bad:
        client.close()
    monitor.stop(LIMIT_S)
    assert not list(directory.iterdir())
    assert connect(directory) is None


def test_a_daemon_outlives_its_launcher_and_is_found_by_others(
    target: "subprocess.Popen[bytes]", output: Path, directory: Path
) -> None:
    """There is one for a directory; asked to start the same again it says so, for another target it refuses."""
    monitor = launch(target_pid=target.pid, output=output, with_nvml=False, directory=directory, timeout_s=LIMIT_S)
    assert monitor.reason is None
    assert monitor.pid is not None
    second = launch(
        target_pid=target.pid, output=output.with_name("2"), with_nvml=False, directory=directory, timeout_s=LIMIT_S
    )
    assert second.reason == f"a daemon runs already, process {monitor.pid}"
    assert int(lock_path(directory).read_text()) == monitor.pid
    monitor.detach()
    client = connect(directory, timeout_s=LIMIT_S)
    assert client is not None
    start: dict[str, Any] = {"pid": target.pid, "output": str(output), "interval_s": 0.1, "with_nvml": False}
    assert client.request("start", **start) == {"ok": True, "already": True}
    with pytest.raises(EnvironmentUnusableError, match=f"follows process {target.pid} already"):
        client.request("start", **{**start, "pid": os.getpid()})
    _refuses(client)
    assert client.request("mark", name="m")["energy_mj"] == {}
    assert client.request("flush") == {"ok": True}
    client.request("stop")
    client.close()
    wait_until_gone(monitor.pid, limit_s=LIMIT_S)
    os.waitpid(monitor.pid, 0)
    assert end_of(output).status == "stopped"
    assert not list(directory.iterdir())


def _refuses(client: Client) -> None:
    for request, words in (
        ({"verb": "dance"}, "the verb 'dance' is none of hello, start, stop, status, mark, flush"),
        ({"verb": "hello", "schema": "lucid.monitor/0"}, "speaks lucid.monitor/1"),
        ({"verb": "mark", "name": ""}, "the name of a mark"),
        ({"verb": "mark", "name": 3}, "the name of a mark"),
    ):
        with pytest.raises(EnvironmentUnusableError, match=words):
            client.request(**request)


def test_what_a_killed_daemon_left_is_taken_over(
    target: "subprocess.Popen[bytes]", output: Path, directory: Path
) -> None:
    """Its lock went with it, its socket is replaced, and its log is continued."""
    for num in (1, 2):
        monitor = launch(target_pid=target.pid, output=output, with_nvml=False, directory=directory, timeout_s=LIMIT_S)
        assert monitor.reason is None
        assert monitor.pid is not None
        wait_for_samples(output, num)
        os.kill(monitor.pid, signal.SIGKILL)
        assert monitor.wait(LIMIT_S)
        monitor.stop()
        assert socket_path(directory).exists()
    assert sum(isinstance(record, Header) for record in read_log(output).records) == 2
