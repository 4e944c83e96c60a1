import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.harness import Lucid, Ran, is_running, wait_for, wait_for_end
from lucid_cli.reporters.checkup import render_checkup
from lucid_profiler import jsonio
from lucid_profiler.checkup.catalogue import CATALOGUE
from lucid_profiler.checkup.examine import Checkup
from lucid_profiler.checkup.finding import Finding, Level
from support import fake_nvml
from support.fake_nvml import UUID, device, scenario

ROOT = Path(__file__).parent.parent.parent
LEVELS = {"ok", "note", "warning", "problem"}


def document(ran: Ran) -> dict[str, Any]:
    """Return the one JSON document that a run printed, read without lucid."""
    (line,) = ran.out.splitlines()
    read: dict[str, Any] = json.loads(line)
    return read


def findings(ran: Ran) -> dict[str, dict[str, Any]]:
    """Return the findings of a run's document by their codes."""
    return {finding["code"]: finding for finding in document(ran)["findings"]}


def bare_interpreter(lucid: Lucid) -> str:
    """Write a Python without packages and return its name: it answers at once, since it has no torch to load."""
    path = lucid.directory / "bare"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return str(path)


def make(*levels: Level, found: str = "found so") -> Checkup:
    """Return a check-up with one finding a level."""
    codes = list(CATALOGUE)
    made = tuple(Finding(code=code, level=level, found=found) for code, level in zip(codes, levels, strict=False))
    return Checkup(python="python", requires_gpu=False, findings=made)


def test_a_usable_machine_exits_0_with_one_document(lucid: Lucid) -> None:
    """Every finding says its area, level, value, why it matters and what to do; the default is lucid's own Python."""
    ran = lucid("doctor", "--json")
    said = document(ran)
    assert ran.code == 0
    assert (said["kind"], said["usable"], said["counts"]["problem"]) == ("lucid.doctor", True, 0)
    found = findings(ran)
    assert found["torch"]["value"] == str(torch.__version__)
    assert found["interpreter"]["subject"] == sys.executable
    for finding in said["findings"]:
        assert finding["level"] in LEVELS
        assert finding["area"] == CATALOGUE[finding["code"]].area
        assert finding["found"]
        assert finding["why"]
        assert finding["remedy"]
        assert not finding["found"].startswith("unknown") or finding["reason"]


def test_the_text_has_the_areas_and_the_conclusion(lucid: Lucid) -> None:
    """The result is on standard output, the word to wait on standard error; no line is too long."""
    ran = lucid("doctor", "--python", bare_interpreter(lucid))
    lines = ran.out.splitlines()
    assert [line for line in lines if line and line[0] != " "][:3] == ["driver", "host", "python"]
    assert lines[-1].startswith("not usable: 1 problem, ")
    assert max(map(len, lines)) <= 100
    assert ran.err == "doctor: loading torch in a process of its own, some seconds ...\n"


@pytest.mark.parametrize("python", ["/no/such/python", "no-such-python", "/bin/true"])
def test_without_an_interpreter_the_environment_is_unusable(lucid: Lucid, python: str) -> None:
    """Exit 9, and the document is printed all the same, with the reason."""
    ran = lucid("doctor", "--json", "--python", python)
    assert ran.code == 9
    assert findings(ran)["interpreter"]["level"] == "problem"
    assert python in findings(ran)["interpreter"]["found"]
    assert not document(ran)["usable"]


def test_an_interpreter_without_torch_is_unusable(lucid: Lucid) -> None:
    """The interpreter is asked, and not this one in its place."""
    ran = lucid("doctor", "--json", "--python", bare_interpreter(lucid))
    assert ran.code == 9
    assert findings(ran)["interpreter"]["level"] == "ok"
    assert findings(ran)["torch"]["found"] == "not installed there"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_gpu_that_is_asked_for_must_be_there(lucid: Lucid) -> None:
    """Else the environment is unusable for what was asked; the capture is not tried, and is not called good."""
    ran = lucid("doctor", "--json", "--require-gpu")
    assert ran.code == 9
    assert findings(ran)["cuda"]["level"] == "problem"
    assert findings(ran)["capture"]["reason"] == "no_cuda"


@pytest.mark.gpu
def test_on_a_gpu_the_capture_is_tried(lucid: Lucid) -> None:
    """A tiny optimizer is recorded, replayed, and leaves the bytes of the native one."""
    ran = lucid("doctor", "--json", "--require-gpu")
    assert ran.code == 0
    assert findings(ran)["cuda"]["level"] == "ok"
    assert findings(ran)["capture"]["level"] == "ok"
    assert findings(ran)["capture"]["value"]["is_equal"]


def test_warnings_of_a_gpu_do_not_make_it_unusable(lucid: Lucid, tmp_path: Path) -> None:
    """A busy card with a pending ECC change is described, and counts for no problem."""
    env = fake_nvml.environment(scenario(device(ecc_mode=[1, 0])), tmp_path)
    ran = lucid("doctor", "--json", "--python", bare_interpreter(lucid), env=env)
    found = findings(ran)
    assert (found["gpu_ecc"]["level"], found["gpu_ecc"]["subject"]) == ("warning", UUID)
    assert found["gpu_ecc"]["value"] == {"current": True, "pending": False}
    assert found["gpu_processes"]["level"] == "warning"
    assert document(ran)["counts"]["problem"] == 1  # the interpreter's torch


def test_two_gpus_are_told_apart(lucid: Lucid, tmp_path: Path) -> None:
    """Where a code comes twice, the text names the device."""
    other = "GPU-22222222-2222-3333-4444-555555555555"
    env = fake_nvml.environment(scenario(device(), device(uuid=other, pci="00000000:02:00.0")), tmp_path)
    out = lucid("doctor", "--python", bare_interpreter(lucid), env=env).out
    assert re.search(rf"^  ok      gpu_ecc +{UUID}: on$", out, re.MULTILINE)
    assert re.search(rf"^  ok      gpu_ecc +{other}: on$", out, re.MULTILINE)


def test_nothing_is_left_behind(lucid: Lucid) -> None:
    """Neither in the current directory nor among temporary files."""
    python = bare_interpreter(lucid)
    before = sorted(lucid.directory.rglob("*"))
    lucid("doctor", "--python", python)
    assert sorted(lucid.directory.rglob("*")) == before


def test_an_empty_interpreter_is_an_error_of_use(lucid: Lucid) -> None:
    """Exit 2 with the remedy."""
    ran = lucid("doctor", "--python", "")
    assert (ran.code, ran.out) == (2, "")
    assert "name an interpreter" in ran.err


def test_an_argument_is_an_error_of_use(lucid: Lucid) -> None:
    """Nothing is looked at then."""
    assert lucid("doctor", "now").code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_interpreter_too(lucid: Lucid, number: signal.Signals) -> None:
    """Ctrl-C leaves no process behind, also none that does not react."""
    slow = lucid.directory / "slow"
    slow.write_text("#!/bin/sh\ntrap '' INT TERM\necho $$ > pid.new; mv pid.new pid\nsleep 600\n")
    slow.chmod(0o755)
    doctor = lucid.start("doctor", "--python", str(slow))
    pid = int(wait_for(lucid.directory / "pid"))
    assert is_running(pid)
    doctor.send_signal(number)
    out, _ = doctor.communicate(timeout=30)
    assert (doctor.returncode, out) == (128 + number, b"")
    wait_for_end(pid)


def test_the_command_itself_loads_no_torch() -> None:
    """Torch belongs to the interpreter that is asked."""
    program = (
        "import sys\nfrom lucid_cli import app\n"
        "code = app.run(['doctor', '--json', '--python', '/no/such/python'])\n"
        "sys.exit('torch' in sys.modules or code != 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_the_list_of_commands_does_not_load_the_check_up() -> None:
    """`lucid --help` stays quick."""
    program = (
        "import sys\nfrom lucid_cli import app\napp.run(['--help'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'psutil', 'lucid_cli.commands.doctor')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, "doctor" in done.stdout) == (0, True)


def test_a_good_finding_is_a_line_and_others_have_a_remedy() -> None:
    """What is good needs no advice."""
    good, bad = render_checkup(make("ok")), render_checkup(make("warning"))
    remedy = CATALOGUE[next(iter(CATALOGUE))].remedy
    assert remedy not in " ".join(good.split())
    assert remedy in " ".join(bad.split())
    assert good.splitlines()[-1] == "usable: 0 problems, 0 warnings, 0 notes, 1 ok"


def test_only_a_problem_makes_a_machine_unusable() -> None:
    """Warnings and notes do not count."""
    assert make("warning", "note", "ok").is_usable
    assert not make("warning", "problem").is_usable


def test_text_from_elsewhere_cannot_break_the_layout() -> None:
    """A newline in an error of the interpreter, or a word without end, stays in its column."""
    lines = render_checkup(make("note", found=f"one\ntwo {'x' * 300}")).splitlines()
    assert max(map(len, lines)) <= 100
    assert "one two" in lines[1]


def test_a_path_that_is_no_unicode_survives_json() -> None:
    """It comes back as the name that the system gave."""
    name = os.fsdecode(b"/caf\xe9/python")
    checkup = Checkup(python=name, requires_gpu=False, findings=())
    assert jsonio.loads(jsonio.dumps(checkup.plain()))["python"] == name


def test_every_finding_is_explained_in_the_pages() -> None:
    """The page on the doctor lists each code with the words that the command uses."""
    page = (ROOT / "docs" / "doctor.md").read_text()
    for code, entry in CATALOGUE.items():
        assert f"| `{code}` | {entry.why} | {entry.remedy} |" in page, code


def test_the_page_explains_no_other_finding() -> None:
    """What was taken away is taken out of the page."""
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert set(re.findall(r"^\| `([a-z0-9_]+)` \|", page, re.MULTILINE)) - LEVELS == set(CATALOGUE)
