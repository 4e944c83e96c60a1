import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.harness import Lucid
from lucid_cli import app, built_in
from lucid_cli.commands.profile_run import command
from lucid_cli.experiment import default_pairs
from support import fake_nvml

WRITE_ARGV = "import json, os, sys; json.dump([os.fsencode(a).hex() for a in sys.argv[1:]], open('argv.json', 'w'))"
WRITE_ENV = (
    "import os; open('env.txt', 'a').write(os.environ['LUCID_PROFILE_ARM'] + os.environ['LUCID_CAPTURE_UPDATES'] + ' ')"
)

NO_LIMITS = ("inf", "-inf", "nan", "1e999", "0", "-1")


def _argv(lucid: Lucid) -> list[bytes]:
    """Return the arguments that the child saw last."""
    return [bytes.fromhex(text) for text in json.loads((lucid.directory / "argv.json").read_text())]


def test_pairs_run_in_fresh_processes_in_abba_order_after_a_discarded_one(lucid: Lucid) -> None:
    """Slots are stored before, runs follow them, each arm has its environment, and the file is closed as complete."""
    ran = lucid("profile", "run", "--pairs", "2", "-o", str(lucid.report), "--", "python", lucid.script(WRITE_ENV))
    assert ran.code == 0
    order = "captured1 native0 native0 captured1 captured1 native0 "
    assert (lucid.directory / "env.txt").read_text() == order
    (header,) = ran.records("header")
    slots = [(slot["slot"], slot["pair"], slot["arm"], slot["discarded"]) for slot in header["slots"]]
    assert [arm + ("1" if arm == "captured" else "0") for _, _, arm, _ in slots] == order.split()
    assert [discarded for *_, discarded in slots] == [True, True, False, False, False, False]
    runs = ran.records("run")
    assert [(run["run"], run["pair"], run["arm"], run["discarded"]) for run in runs] == slots
    assert {(run["status"], run["returncode"], run["agent"]["loaded"]) for run in runs} == {("ok", 0, True)}
    assert [(pair["pair"], pair["included"]) for pair in ran.records("pair")] == [(0, False), (1, True), (2, True)]
    assert header["command"] == ["python", "child.py"]
    assert ran.records("end")[0]["status"] == "complete"


def test_the_result_is_what_report_show_prints(lucid: Lucid) -> None:
    """Standard output gets the table and nothing of the child's."""
    ran = lucid.profile("python", lucid.script("print('from the child')"))
    assert ran.out == lucid("report", "show", "report.jsonl").out
    assert "from the child" not in ran.out + ran.err


def test_progress_is_one_plain_line_a_run_on_standard_error(lucid: Lucid) -> None:
    """Each line names run, pair, arm and seconds; the remaining time follows the first; there is no ANSI."""
    ran = lucid.profile("python", "-c", "pass", options=("--pairs", "2"))
    lines = [line for line in ran.err.splitlines() if line.startswith("run ")]
    assert [line.split("  ")[:3] for line in lines] == [
        ["run 1 of 4", "pair 0", "native"],
        ["run 2 of 4", "pair 0", "captured"],
        ["run 3 of 4", "pair 1", "captured"],
        ["run 4 of 4", "pair 1", "native"],
    ]
    assert ["left" in line for line in lines] == [True, True, True, False]
    assert "\x1b" not in ran.err + ran.out


def test_with_verbose_the_childs_output_goes_to_standard_error(lucid: Lucid) -> None:
    """The child's words never mix with the result."""
    ran = lucid.profile("python", lucid.script("print('from the child')"), options=("-v",))
    assert ran.err.count("from the child\n") == 2
    assert "from the child" not in ran.out


@pytest.mark.parametrize(
    "args",
    [
        [b"-number", b"-1", b"--lr=-1e-3", b"--", b"", b"-h"],
        [b"--pairs", b"9", b"-o", b"x.jsonl", b"--help", b"--verbose"],
        [b"2 2 1", b"'single'", b'"double"', b"$HOME", b"*", b"a\nb", b"\xff\xfe \xc3\xa9"],
    ],
)
@pytest.mark.parametrize("separator", [["--"], []])
def test_arguments_reach_the_command_byte_for_byte(lucid: Lucid, args: list[bytes], separator: list[str]) -> None:
    """No shell, no option of lucid after the command's first word, with `--` or without."""
    fixed = ["profile", "run", "--pairs", "1", "--discard-pairs", "0", "-o", "report.jsonl"]
    ran = lucid(*fixed, *separator, "python", lucid.script(WRITE_ARGV), *args)
    assert ran.code == 0
    assert _argv(lucid) == args
    assert len(ran.records("run")) == 2


def test_a_second_separator_belongs_to_the_command(lucid: Lucid) -> None:
    """Only the first `--` is lucid's."""
    lucid.profile("python", lucid.script(WRITE_ARGV), "--", "x", "--")
    assert _argv(lucid) == [b"--", b"x", b"--"]


def test_a_module_runs_from_the_working_directory(lucid: Lucid) -> None:
    """`python -m` finds the program's package as it does without lucid."""
    package = lucid.directory / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(WRITE_ARGV)
    assert lucid.profile("python", "-m", "pkg.train", "--x", "1").code == 0
    assert _argv(lucid) == [b"--x", b"1"]


def test_an_unset_pythonpath_leaves_the_import_path_alone(lucid: Lucid) -> None:
    """A script sees the same sys.path with lucid and without."""
    name = lucid.script("import sys; open('path.txt', 'w').write(repr(sys.path))")
    for value in ("", "extra"):
        assert lucid.profile("python", name, env={"PYTHONPATH": value}).code == 0
        profiled = (lucid.directory / "path.txt").read_text()
        plain = {**os.environ, "PYTHONPATH": value}
        subprocess.run([sys.executable, name], cwd=lucid.directory, env=plain, check=True)
        assert profiled == (lucid.directory / "path.txt").read_text()


def test_a_script_on_standard_input_is_given_to_every_run(lucid: Lucid) -> None:
    """`python -` runs the same script in each run when standard input is asked for."""
    script = lucid.directory / "stdin.py"
    script.write_text(WRITE_ENV)
    with script.open("rb") as stdin:
        assert lucid.profile("python", "-", options=("--stdin",), stdin=stdin).code == 0
    assert (lucid.directory / "env.txt").read_text() == "native0 captured1 "


def test_standard_input_is_at_its_end_by_default(lucid: Lucid) -> None:
    """A child that would wait for an answer gets none, whatever lucid's own input holds."""
    script = lucid.directory / "answers.txt"
    script.write_text("yes\n")
    with script.open("rb") as stdin:
        ran = lucid.profile("python", "-c", "import sys; sys.exit(sys.stdin.read() != '')", stdin=stdin)
    assert ran.code == 0


def test_the_program_is_what_path_says_and_its_path_is_recorded(lucid: Lucid) -> None:
    """A shim called python runs instead of lucid's own interpreter."""
    shims = lucid.directory / "shims"
    shims.mkdir()
    shim = shims / "python"
    shim.write_text('#!/bin/sh\necho "$@" > shim.txt\n')
    shim.chmod(0o755)
    ran = lucid.profile("python", "a", "b c", env={"PATH": f"{shims}:/usr/bin:/bin"})
    assert ran.code == 0
    assert (lucid.directory / "shim.txt").read_text() == "a b c\n"
    (host,) = [env for env in ran.records("env") if env["scope"] == "host"]
    assert host["volatile"]["program"] == str(shim)


def test_a_program_that_is_not_python_is_measured_without_an_agent(lucid: Lucid) -> None:
    """The process is the interval, and the report says that no agent was there."""
    ran = lucid.profile("true")
    assert ran.code == 0
    for run in ran.records("run"):
        assert run["agent"]["loaded"] is False
        assert run["agent"]["reason"] == "no_agent"
        assert run["wall"]["source"] == "process"
    assert "no agent" in ran.out


def test_a_child_that_ignores_sigchld_is_reaped_like_any_other(lucid: Lucid) -> None:
    """Signal settings of child or parent cost no exit status."""
    ran = lucid.profile("python", "-c", "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    assert (ran.code, [run["returncode"] for run in ran.records("run")]) == (0, [0, 0])


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        (("profile", "run", "--pairs", "0", "--", "true"), "--pairs"),
        (("profile", "run", "--pairs", "many", "--", "true"), "--pairs"),
        (("profile", "run", "--unknown", "--", "true"), "--unknown"),
        (("profile", "run", "-o", "missing/x.jsonl", "--", "touch", "ran"), "missing/x.jsonl cannot be written"),
        (("profile", "run", "-o", "taken.jsonl", "--", "touch", "ran"), "taken.jsonl exists already"),
        (("profile", "run", "-o", "taken.jsonl/x", "--", "touch", "ran"), "cannot be written"),
        (("profile", "run", "-o", "-", "--", "touch", "ran"), "the report needs a file"),
        (("profile", "run", "-o", "/dev/stdout", "--", "touch", "ran"), "it is standard output"),
        (("profile", "run", "-o", "/dev/fd/1", "--overwrite", "--", "touch", "ran"), "it is standard output"),
        (("profile", "run", "-o", "/dev/stderr", "--", "touch", "ran"), "it is standard error"),
        *((("profile", "run", "--timeout", value, "--", "touch", "ran"), "--timeout") for value in NO_LIMITS),
        (("profile",), "Usage"),
        (("nonsense",), "nonsense"),
    ],
)
def test_usage_errors_are_found_before_anything_runs(lucid: Lucid, args: tuple[str, ...], cause: str) -> None:
    """Exit code 2, the cause in words, and no process started."""
    (lucid.directory / "taken.jsonl").write_text("mine")
    ran = lucid(*args)
    assert (ran.code, ran.out) == (2, "")
    assert cause in ran.err
    assert not (lucid.directory / "ran").exists()
    assert (lucid.directory / "taken.jsonl").read_text() == "mine"


@pytest.mark.parametrize(("separator", "gpus", "pairs"), [([], [], 2), (["--"], [fake_nvml.device()], 6)])
def test_without_a_command_the_built_in_fit_is_measured(
    lucid: Lucid, separator: list[str], gpus: list[dict[str, Any]], pairs: int
) -> None:
    """The command in the report is the one that was run, under the interpreter that runs lucid; a GPU is worth six."""
    package = lucid.directory / "lucid_cli" / "workloads"
    package.mkdir(parents=True)
    (package / "detection.py").write_text("print('stands in for the fit')")
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    env = fake_nvml.environment(fake_nvml.scenario(*gpus), lucid.directory)
    ran = lucid("profile", "run", "-o", "report.jsonl", "-v", *separator, env=env)
    assert ran.code == 0, ran.err
    (header,) = ran.records("header")
    assert header["command"] == [sys.executable, "-m", "lucid_cli.workloads.detection"]
    assert (header["pairs"], header["discarded_pairs"]) == (pairs, 1)
    assert ran.err.count("stands in for the fit\n") == 2 * (pairs + 1)


@pytest.mark.parametrize(
    ("is_built_in", "has_gpu", "pairs"), [(True, False, 2), (True, True, 6), (False, False, 6), (False, True, 6)]
)
def test_six_pairs_are_the_default_and_two_where_nothing_can_be_captured(
    pairs: int, *, is_built_in: bool, has_gpu: bool
) -> None:
    """Both are even, and the help says so."""
    assert default_pairs(is_built_in=is_built_in, has_gpu=has_gpu) == pairs
    text = CliRunner().invoke(command, ["--help"]).output
    assert "[default: 6; 2 for the built-in fit without a GPU]" in " ".join(text.split())


def test_the_built_in_fit_says_what_it_lacks_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One line with the packages and how to get them, exit code 9, no report."""
    missing = {"torch", "sklearn", "scipy"}
    monkeypatch.setattr(built_in, "find_spec", lambda name: None if name in missing else object())
    monkeypatch.chdir(tmp_path)
    assert app.run(["profile", "run"]) == 9
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("Error: the built-in fit needs torch and scikit-learn and scipy: run `")
    assert "-m pip install torch scikit-learn scipy`" in line
    assert list(tmp_path.iterdir()) == []


def test_the_parts_of_a_small_fit_are_observed_and_its_time_is_told(lucid: Lucid) -> None:
    """Both arms end in the same bytes in every part; the text has the phases and the settings."""
    fit = ["-m", "lucid_cli.workloads.detection", "--preset", "quick", "--device", "cpu"]
    small = ["--num-train", "32", "--num-val", "8", "--batch", "8", "--epochs", "2", "--warmup-epochs", "1"]
    ran = lucid.profile(sys.executable, *fit, *small)
    assert ran.code == 0, ran.err
    (pair,) = ran.records("pair")
    assert pair["parity"]["status"] == "equal"
    parts = {state["part"] for state in ran.records("state")}
    assert {"model", "optimizer", "scheduler", "ema", "losses", "metrics", "settings"} <= parts
    for record in ran.records("run"):
        assert record["wall"]["source"] == "fit"
        names = [phase["name"] for phase in record["phases"]]
        assert names == ["load", "warm-up", "validate", "checkpoint", "train", "validate", "checkpoint"]
    table = ran.out.split("\nphase ")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table[1:6]] == ["load", "warm-up", "validate", "checkpoint", "train"]
    text = " ".join(ran.out.split())
    assert "CUBLAS_WORKSPACE_CONFIG=':4096:8'" in text
    assert "torch.use_deterministic_algorithms=True" in text
    for setting in ("model='tiny'", "size=64", "batch=8", "epochs=2", "lr=0.1", "device='cpu'", "amp='off'"):
        assert setting in text
    assert "more" not in text.split("settings ")[1].split("metrics ")[0]
    assert not list(lucid.directory.glob("lucid-fit-*"))


def test_overwrite_replaces_a_report_and_the_default_name_is_new(lucid: Lucid) -> None:
    """An existing file goes only when that is asked for; without -o the name holds the time."""
    lucid.report.write_text("mine")
    assert lucid.profile("true").code == 0
    assert lucid("report", "validate", "report.jsonl").code == 0
    assert lucid("profile", "run", "--pairs", "1", "--discard-pairs", "0", "--", "true").code == 0
    (name,) = [path.name for path in lucid.directory.glob("lucid-*.jsonl")]
    assert len(name) == len("lucid-20260102T030405Z-01234567.jsonl")


@pytest.mark.parametrize(
    ("command", "code", "cause"),
    [
        ("missing-program", 127, "missing-program: not found in PATH"),
        ("./missing", 127, "no such file"),
        (".", 126, "is a directory"),
        ("./plain.txt", 126, "is not executable"),
        ("./no-format", 126, "Exec format error"),
        ("./orphan", 127, "its interpreter /nowhere/python does not exist"),
    ],
)
def test_a_command_that_cannot_be_started_leaves_no_report(lucid: Lucid, command: str, code: int, cause: str) -> None:
    """One line names the cause, the code is a shell's, and nothing is left behind."""
    for name, text, mode in (
        ("plain.txt", "x", 0o644),
        ("no-format", "neither program nor script", 0o755),
        ("orphan", "#!/nowhere/python\n", 0o755),
    ):
        (lucid.directory / name).write_text(text)
        (lucid.directory / name).chmod(mode)
    ran = lucid("profile", "run", "--pairs", "1", "-o", "report.jsonl", "--", command, "x")
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith("Error: ")
    assert cause in ran.err
    assert len(ran.err.splitlines()) == 1
    assert not ran.report.exists()


@pytest.mark.parametrize("target", ["report.jsonl", "link.jsonl"])
def test_a_command_that_cannot_be_started_costs_no_earlier_report(lucid: Lucid, target: str) -> None:
    """What was to be overwritten is still there, byte for byte, and nothing is said about it."""
    (lucid.directory / "no-format").write_text("neither program nor script")
    (lucid.directory / "no-format").chmod(0o755)
    lucid.report.write_text("mine")
    (lucid.directory / "link.jsonl").symlink_to("report.jsonl")
    ran = lucid("profile", "run", "-o", target, "--overwrite", "--", "./no-format")
    assert (ran.code, ran.err) == (126, "Error: ./no-format: Exec format error\n")
    assert lucid.report.read_text() == "mine"
    assert lucid("profile", "run", "--pairs", "1", "-o", target, "--overwrite", "--", "true").code == 0
    assert lucid("report", "validate", "report.jsonl").code == 0


def test_a_report_may_go_to_a_device_or_a_pipe(lucid: Lucid) -> None:
    """`/dev/null` and a pipe exist already and lose nothing, also where standard output is the same device."""
    fixed = ("profile", "run", "--pairs", "1", "--discard-pairs", "0")
    null = subprocess.DEVNULL
    devices: tuple[dict[str, Any], ...] = ({}, {"stdout": null}, {"stdout": null, "stderr": null})
    for settings in devices:
        assert lucid(*fixed, "-o", "/dev/null", "--", "true", **settings).code == 0
    read, write = os.pipe()
    ran = lucid(*fixed, "-o", f"/dev/fd/{write}", "--", "true", pass_fds=(write,))
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        lines = [json.loads(line)["t"] for line in pipe]
    assert (ran.code, lines[0], lines[-1]) == (0, "header", "end")


def test_a_full_disk_is_an_error_of_the_environment(lucid: Lucid) -> None:
    """A report that cannot be written ends the command with a word why."""
    ran = lucid("profile", "run", "--pairs", "1", "-o", "/dev/full", "--overwrite", "--", "true")
    assert ran.code == 9
    assert "/dev/full: No space left on device" in ran.err
    assert Path("/dev/full").exists()


def test_neither_terminal_nor_standard_input_is_needed(lucid: Lucid) -> None:
    """A session without a terminal and a closed input change nothing."""
    ran = lucid.profile("true", start_new_session=True, stdin=None, preexec_fn=lambda: os.close(0))
    assert ran.code == 0


def test_a_reader_that_has_gone_away_is_no_error(lucid: Lucid) -> None:
    """A closed pipe at standard output or standard error leaves report and status alone."""
    read, write = os.pipe()
    os.close(read)
    closed: tuple[dict[str, Any], ...] = ({"stdout": write}, {"stderr": write}, {"stdout": write, "stderr": write})
    try:
        for streams in closed:
            ran = lucid.profile("true", **streams)
            assert ran.code == 0
            assert ran.records("end")[0]["status"] == "complete"
            assert lucid.profile("false", **streams).code == 8
            assert lucid.profile("missing-program", **streams).code == 127
            assert lucid("profile", "run", "--pairs", "0", **streams).code == 2
    finally:
        os.close(write)
