import signal
import subprocess
import time

import pytest

from cli.harness import Lucid, is_running, wait_for, wait_for_end

WAITS_FOR_SIGINT = """
import signal, sys, time
def save(*_):
    time.sleep(0.5)
    open("saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGINT, save)
open("ready", "w").close()
time.sleep(60)
"""
IGNORES_SIGNALS = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
open("ready", "w").close()
time.sleep(60)
"""
HAS_WORKERS = """
import multiprocessing, os, sys, time
def work():
    time.sleep(60)
if __name__ == "__main__":
    workers = [multiprocessing.get_context("fork").Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    open("pids.tmp", "w").write(" ".join(str(worker.pid) for worker in workers))
    os.rename("pids.tmp", "ready")
    time.sleep(60)
"""
WAITS_THE_SECOND_TIME = """
import os, time
if os.path.exists("ran"):
    open("pid", "w").write(str(os.getpid()))
    os.rename("pid", "ready")
    time.sleep(60)
open("ran", "w").close()
"""
HOLDS_THE_PIPE = """
import subprocess, sys
print("before", flush=True)
open("grandchild", "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
"""
BIG_OUTPUT = """
import os
for _ in range(1600):
    os.write(1, b"a" * 65536)
    os.write(2, b"b" * 65535 + b"\\r")
os.write(2, b"the end")
"""


def _start(lucid: Lucid, script: str, *options: str) -> "subprocess.Popen[bytes]":
    name = lucid.script(script)
    return lucid.start("profile", "run", "--pairs", "3", "-o", "report.jsonl", *options, "--", "python", name)


def _last_run(lucid: Lucid) -> tuple[str, int | None, str | None, str]:
    """Return status, exit status and signal of the last run, and the status of the report."""
    ran = lucid("report", "show", "report.jsonl")
    assert ran.code == 0
    run = ran.records("run")[-1]
    return run["status"], run["returncode"], run["signal"], ran.records("end")[0]["status"]


@pytest.mark.parametrize(
    ("script", "returncode"),
    [
        ("import sys; sys.exit(1)", 1),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(255)", 255),
        ("raise ValueError('the reason')", 1),
        ("import os; os._exit(7)", 7),
    ],
)
def test_a_failed_run_ends_the_experiment_and_keeps_its_status(lucid: Lucid, script: str, returncode: int) -> None:
    """Exit code 8, the status in the report, no later run, and a report that can be read."""
    ran = lucid.profile("python", "-c", script, options=("--pairs", "3"))
    assert ran.code == 8
    assert f"failed, exit status {returncode}" in ran.err
    assert len(ran.records("run")) == 1
    assert _last_run(lucid) == ("failed", returncode, None, "failed")


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGABRT", "SIGTERM"])
def test_a_signal_that_ended_a_run_is_named(lucid: Lucid, name: str) -> None:
    """The report holds the signal's name, and the exit code is 8 whichever it is."""
    script = f"import os, signal; os.kill(os.getpid(), signal.{name})"
    ran = lucid.profile("python", "-c", script)
    assert ran.code == 8
    assert f"failed, ended by {name}" in ran.err
    assert _last_run(lucid) == ("failed", None, name, "failed")


def test_the_last_lines_of_a_failed_run_are_shown(lucid: Lucid) -> None:
    """The traceback reaches standard error, and only the end of long output."""
    ran = lucid.profile("python", "-c", "[print('line', i) for i in range(9999)]; raise ValueError('the reason')")
    assert ran.err.splitlines()[-1] == "  | ValueError: the reason"
    assert len(ran.err.splitlines()) < 40


@pytest.mark.parametrize("launch", [("-c",), ("-m", "child"), ("child.py",)])
def test_a_flood_on_standard_output_does_not_wash_the_traceback_away(lucid: Lucid, launch: tuple[str, ...]) -> None:
    """A program's buffered output comes after its traceback; record and progress hold the reason all the same."""
    script = "import sys\n[print('line', i) for i in range(9999)]\nraise ValueError('the reason')"
    lucid.script(script)
    ran = lucid.profile("python", *launch, *([script] if launch == ("-c",) else []))
    (run,) = ran.records("run")
    assert run["output_tail"].endswith("ValueError: the reason\n")
    assert "line 9998\n--- standard error ---\nTraceback" in run["output_tail"]
    assert len(run["output_tail"]) <= 4096
    assert "  | ValueError: the reason\n" in ran.err
    assert ran.err.index("line 9998") < ran.err.index("Traceback")


def test_a_process_that_leaves_the_session_does_not_outlive_the_run(lucid: Lucid) -> None:
    """It is ended and named in the notes, wherever its output went, and costs the run no time."""
    script = "setsid sh -c 'echo $$ > escaped; exec sleep 60' >/dev/null 2>&1 & while [ ! -s escaped ]; do :; done"
    ran = lucid.profile("sh", "-c", script)
    assert ran.code == 0
    assert not is_running(int((lucid.directory / "escaped").read_text()))
    for run in ran.records("run"):
        assert run["notes"] == ["1 process (sleep) outlived the command and was ended"]
        assert run["process_ns"] < 900_000_000


def test_ctrl_c_while_lucid_is_still_loading_is_quiet(lucid: Lucid) -> None:
    """The exit code is that of any other Ctrl-C, without a traceback."""
    lucid.script("import time; open('ready', 'w').close(); time.sleep(60)", "click.py")
    process = lucid.start("profile", "run", "--", "true", env={"PYTHONPATH": str(lucid.directory)})
    wait_for(lucid.directory / "ready")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == (b"", b"")
    assert process.returncode == 130


def test_undecodable_output_hides_neither_status_nor_reason(lucid: Lucid) -> None:
    """Invalid UTF-8, half a character at the end and NULs are kept in a form that can be read."""
    script = r"import os; os.write(2, b'\xff\xfe\x00reason \xc3\xa9 \x1b[31m half \xc3'); os._exit(3)"
    ran = lucid.profile("python", "-c", script)
    assert ran.code == 8
    assert ran.records("run")[0]["output_tail"] == "\\xff\\xfe\x00reason é \x1b[31m half \\xc3"
    assert "reason é" in ran.err
    assert "\x1b" not in ran.err


def test_with_keep_going_the_other_runs_take_place(lucid: Lucid) -> None:
    """A failing arm leaves its pairs out of the statistics, and the exit code says that something failed."""
    script = "import os, sys; sys.exit(os.environ['LUCID_PROFILE_ARM'] == 'captured')"
    ran = lucid.profile("python", "-c", script, options=("--pairs", "2", "--keep-going"))
    assert ran.code == 8
    assert [run["status"] for run in ran.records("run")] == ["ok", "failed", "failed", "ok"]
    assert [pair["included"] for pair in ran.records("pair")] == [False, False]


def test_hundreds_of_megabytes_of_output_pass_in_flat_memory(lucid: Lucid) -> None:
    """Neither pipe fills up, the bytes are counted, and only the tail is kept."""
    name = lucid.script(BIG_OUTPUT)
    process = lucid.start(
        "profile", "run", "--pairs", "1", "--discard-pairs", "0", "-o", "report.jsonl", "python", name
    )
    process.communicate(timeout=60)
    ran = lucid("report", "show", "report.jsonl")
    for run in ran.records("run"):
        assert (run["stdout_bytes"], run["stderr_bytes"]) == (1600 * 65536, 1600 * 65536 + 7)
        assert run["output_tail"].endswith("the end")
        assert len(run["output_tail"].encode()) <= 4096
    assert process.returncode == 0


def test_a_grandchild_that_holds_the_pipe_does_not_hold_lucid(lucid: Lucid) -> None:
    """After the command's end there is a short wait, then the group is gone and the run counts."""
    begin = time.monotonic()
    ran = lucid.profile("python", lucid.script(HOLDS_THE_PIPE))
    assert ran.code == 0
    assert time.monotonic() - begin < 20
    assert not is_running(int((lucid.directory / "grandchild").read_text()))
    for run in ran.records("run"):
        assert run["status"] == "ok"
        assert run["process_ns"] < 900_000_000
        assert run["notes"] == ["1 process (sleep) outlived the command and was ended"]


def test_a_time_limit_ends_the_whole_group(lucid: Lucid) -> None:
    """A run over its limit is marked, and what it had started is gone."""
    begin = time.monotonic()
    script = HOLDS_THE_PIPE + "import time; time.sleep(60)"
    ran = lucid.profile("python", lucid.script(script), options=("--timeout", "0.5"))
    assert ran.code == 8
    assert time.monotonic() - begin < 20
    assert "timed out" in ran.err
    assert not is_running(int((lucid.directory / "grandchild").read_text()))
    assert _last_run(lucid) == ("timeout", None, "SIGTERM", "failed")


def test_on_ctrl_c_the_child_may_save_and_the_report_is_closed(lucid: Lucid) -> None:
    """SIGINT is passed on, lucid waits for the handler, and the report says interrupted."""
    process = _start(lucid, WAITS_FOR_SIGINT)
    wait_for(lucid.directory / "ready")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert (lucid.directory / "saved").exists()
    assert _last_run(lucid) == ("interrupted", 0, None, "interrupted")
    assert lucid("report", "validate", "report.jsonl").code == 0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)]
)
def test_a_second_signal_ends_a_stubborn_child(lucid: Lucid, number: signal.Signals, code: int) -> None:
    """A child that ignores the first signal is killed at the second."""
    process = _start(lucid, IGNORES_SIGNALS)
    wait_for(lucid.directory / "ready")
    process.send_signal(number)
    if number != signal.SIGHUP:
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == code
    assert _last_run(lucid)[::3] == ("interrupted", "interrupted")


def test_on_sigterm_the_workers_of_the_child_go_too(lucid: Lucid) -> None:
    """No process of the group outlives lucid."""
    process = _start(lucid, HAS_WORKERS)
    pids = [int(pid) for pid in wait_for(lucid.directory / "ready").split()]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert not [pid for pid in pids if is_running(pid)]


def test_after_sigkill_the_command_is_gone_and_the_report_readable(lucid: Lucid) -> None:
    """The kernel ends the command with lucid; what was written before is shown, with a warning about the end."""
    process = _start(lucid, WAITS_THE_SECOND_TIME)
    pid = int(wait_for(lucid.directory / "ready"))
    process.kill()
    process.communicate(timeout=20)
    wait_for_end(pid)
    ran = lucid("report", "show", "report.jsonl")
    assert ran.code == 0
    assert "no end record" in ran.err
    assert len(ran.records("run")) == 1


def test_a_run_in_which_lucid_was_stopped_is_left_out(lucid: Lucid) -> None:
    """Its end is seen late, so that its wall would be longer than it was."""
    name = lucid.script("import time; open('ready', 'w').close(); time.sleep(0.5); open('gone', 'w').close()")
    fixed = ("--pairs", "1", "--discard-pairs", "0", "--interval", "0", "-o", "report.jsonl")
    process = lucid.start("profile", "run", *fixed, "--", "python", name)
    wait_for(lucid.directory / "ready")
    process.send_signal(signal.SIGSTOP)
    wait_for(lucid.directory / "gone")
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    ran = lucid("report", "show", "report.jsonl")
    assert [run["taints"] for run in ran.records("run") if "taints" in run] == [["suspended"]]
    assert ran.records("pair")[0]["included"] is False
    assert "lucid was stopped for a while during it" in " ".join(ran.out.split())


def test_a_signal_ignored_by_lucids_starter_stays_ignored(lucid: Lucid) -> None:
    """A background job of a shell does not end at the terminal's Ctrl-C."""
    name = lucid.script("import time; open('ready', 'w').close(); time.sleep(0.5)")
    fixed = ("--pairs", "1", "--discard-pairs", "0", "-o", "report.jsonl")
    process = lucid.start("profile", "run", *fixed, "--", "python", name, sigint=signal.SIG_IGN)
    wait_for(lucid.directory / "ready")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
