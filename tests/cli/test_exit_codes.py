"""Every exit code through the installed command: where each is shown, and which of several comes first."""

import ast
import re
import signal
from pathlib import Path

import pytest

from cli.harness import Lucid, wait_for
from cli.reports import FLIPPED, WALLS, write_report

HERE = Path(__file__)
PAGE = HERE.parents[2] / "docs" / "profile.md"
SHOWN = {
    0: ("test_profile_run.py", "test_pairs_run_in_fresh_processes_in_abba_order_after_a_discarded_one"),
    1: (HERE.name, "test_a_fault_of_lucid_itself_is_1_with_its_traceback"),
    2: ("test_profile_run.py", "test_usage_errors_are_found_before_anything_runs"),
    3: ("test_report_diff.py", "test_every_outcome_has_its_exit_code"),
    4: ("test_design.py", "test_an_arm_that_computes_something_else_breaks_no_parity"),
    5: ("test_resume.py", "test_another_model_of_gpu_is_refused"),
    6: ("test_report_diff.py", "test_every_outcome_has_its_exit_code"),
    7: ("test_report.py", "test_what_is_no_report_is_refused_with_its_name"),
    8: ("test_failures.py", "test_a_failed_run_ends_the_experiment_and_keeps_its_status"),
    9: ("test_profile_run.py", "test_a_full_disk_is_an_error_of_the_environment"),
    126: ("test_profile_run.py", "test_a_command_that_cannot_be_started_leaves_no_report"),
    127: ("test_profile_run.py", "test_a_command_that_cannot_be_started_leaves_no_report"),
    129: ("test_failures.py", "test_a_second_signal_ends_a_stubborn_child"),
    130: ("test_failures.py", "test_a_second_signal_ends_a_stubborn_child"),
    131: ("test_failures.py", "test_a_second_signal_ends_a_stubborn_child"),
    143: ("test_failures.py", "test_a_second_signal_ends_a_stubborn_child"),
}
"""By exit code, the test that sees the installed command end with it."""

# Ends in another state in each run, without torch.
DIFFERS = """
import os, time
import lucid_profiler
with lucid_profiler.fit():
    time.sleep(0.01)
lucid_profiler.state("model", {"weight": [float(os.getpid())]})
"""
FAILS_THEN_WAITS = """
import os, sys, time
if not os.path.exists("failed"):
    open("failed", "w").close()
    sys.exit(3)
open("ready", "w").close()
time.sleep(60)
"""
GATE, EXPECT = ("--gate", "wall<=-50%"), ("--expect", "wall<=-50%")
NO_VERDICT = ("--gate", "peak_allocated<=+1%")
STRICT = ("--fail-on-inconclusive", "--gate", "wall<=-0.01%")


@pytest.mark.parametrize("code", SHOWN)
def test_each_code_has_a_test_that_drives_the_installed_command(code: int) -> None:
    """It is there, it has the number in it, and it takes the command as a subprocess."""
    file, name = SHOWN[code]
    module = ast.parse((HERE.parent / file).read_text())
    (test,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert code in {node.value for node in ast.walk(test) if isinstance(node, ast.Constant)}
    assert "Lucid" in {ast.unparse(arg.annotation) for arg in test.args.args if arg.annotation is not None}


def test_the_page_has_every_code() -> None:
    """The table on exit codes names the same numbers."""
    table = PAGE.read_text().split("\n## Exit codes\n")[1].split("\n\n## ")[0]
    cells = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    assert {int(code) for cell in cells for code in cell.split(",")} == set(SHOWN)


@pytest.mark.parametrize(
    ("module", "args"),
    [
        ("orjson", ("report", "show", "a.jsonl")),
        ("orjson", ("report", "diff", "a.jsonl", "a.jsonl")),
        ("psutil", ("profile", "run", "-o", "report.jsonl", "--", "touch", "ran")),
    ],
)
def test_a_fault_of_lucid_itself_is_1_with_its_traceback(lucid: Lucid, module: str, args: tuple[str, ...]) -> None:
    """A module that raises what nobody expects: nothing on standard output, the whole traceback beside it."""
    write_report(lucid.directory / "a.jsonl")
    broken = lucid.directory / "broken"
    broken.mkdir()
    (broken / f"{module}.py").write_text("raise RuntimeError('this module is broken')")
    ran = lucid(*args, env={"PYTHONPATH": str(broken)})
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("Traceback ")
    assert ran.err.endswith("RuntimeError: this module is broken\n")
    assert not (lucid.directory / "ran").exists()


@pytest.fixture
def compared(lucid: Lucid) -> Lucid:
    """Return the command beside reports that make `diff` end in each of its ways."""
    write_report(lucid.directory / "a.jsonl")
    write_report(lucid.directory / "same.jsonl")
    write_report(lucid.directory / "broken.jsonl", states={1: FLIPPED})
    write_report(
        lucid.directory / "open.jsonl", walls=[(a, b * (1 + 0.01 * (-1) ** at)) for at, (a, b) in enumerate(WALLS)]
    )
    (lucid.directory / "torn.jsonl").write_bytes((lucid.directory / "a.jsonl").read_bytes()[:-9])
    return lucid


@pytest.mark.parametrize(
    ("args", "code", "lost"),
    [
        (("same.jsonl", *GATE), 3, 9),
        (("same.jsonl", *EXPECT), 3, 9),
        (("broken.jsonl",), 4, 9),
        (("same.jsonl", *NO_VERDICT), 5, 9),
        (("open.jsonl", *STRICT), 6, 9),
        (("torn.jsonl", *GATE), 7, 7),
    ],
)
def test_a_result_that_is_lost_counts_before_what_it_says(
    compared: Lucid, args: tuple[str, ...], code: int, lost: int
) -> None:
    """9 before 3, 4, 5 and 6; a report that cannot be read, 7, before it."""
    assert compared("report", "diff", "a.jsonl", *args).code == code
    with Path("/dev/full").open("wb") as full:
        assert compared("report", "diff", "a.jsonl", *args, stdout=full).code == lost


def test_a_failed_run_counts_before_parity(lucid: Lucid) -> None:
    """8 before 4: of the first pair the states differ, and the last run fails."""
    name = lucid.script(f"{DIFFERS}\nopen('runs', 'a').write('x')\nif os.path.getsize('runs') > 3: os._exit(3)\n")
    ran = lucid.profile("python", name, options=("--pairs", "2", "--keep-going", "--interval", "0"))
    assert ran.code == 8
    assert ran.records("pair")[0]["parity"]["status"] == "different"


@pytest.mark.parametrize(("ending", "code"), [("", 4), ("sys.exit(3)", 8)])
def test_a_lost_table_counts_before_what_the_runs_came_to(lucid: Lucid, ending: str, code: int) -> None:
    """9 before 8 and 4; the report is whole all the same."""
    name = lucid.script(f"{DIFFERS}\nimport sys\n{ending}")
    assert lucid.profile("python", name, options=("--interval", "0")).code == code
    with Path("/dev/full").open("wb") as full:
        ran = lucid.profile("python", name, options=("--interval", "0"), stdout=full)
    assert ran.code == 9
    assert "standard output: No space left on device" in ran.err
    assert lucid("report", "validate", "report.jsonl").code == 0


def test_a_signal_counts_before_a_failed_run(lucid: Lucid) -> None:
    """130, although a run before it has failed."""
    name = lucid.script(FAILS_THEN_WAITS)
    process = lucid.start("profile", "run", "--keep-going", "-o", "report.jsonl", "--", "python", name)
    wait_for(lucid.directory / "ready")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    statuses = [run["status"] for run in lucid("report", "show", "report.jsonl").records("run")]
    assert statuses == ["failed", "interrupted"]
