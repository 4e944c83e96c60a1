"""The design of an experiment through the installed command: arms, controls, order, taints, pauses, the dry run."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.harness import Lucid, Ran, wait_for
from support import fake_nvml
from support.fake_nvml import UUID

WRITES_WORDS = """
import json, os, sys
line = [os.environ["LUCID_PROFILE_ARM"], os.environ.get("KEY"), os.environ.get("LUCID_CAPTURE_UPDATES"), *sys.argv[1:]]
open("lines.txt", "a").write(json.dumps(line) + "\\n")
"""
# Ends in a state that the arm decides, without torch.
HAS_STATE = """
import os, time
import lucid_profiler
with lucid_profiler.fit():
    time.sleep(0.01)
lucid_profiler.state("model", {"weight": [1.0, float(os.environ["KEY"])]})
"""
# As long as the monitor needs to take a few looks.
SAMPLED = """
import time
import lucid_profiler
time.sleep(0.6)
with lucid_profiler.fit():
    time.sleep(1.4)
"""
TIMES = ("--cool-down", "--timeout", "--expect-seconds", "--interval")
COUNTS = ("--pairs", "--discard-pairs", "--control")


def _lines(lucid: Lucid) -> list[list[Any]]:
    return [json.loads(line) for line in (lucid.directory / "lines.txt").read_text().splitlines()]


def test_arms_set_variables_and_take_their_place_in_the_command(lucid: Lucid) -> None:
    """Each run has its arm's, nothing of native and captured, and the header keeps the command as typed."""
    name = lucid.script(WRITES_WORDS)
    options = ("--arm", "small:KEY=1", "--arm", r"big:KEY=2\,3", "--interval", "0")
    ran = lucid.profile("python", name, "--config={arm}.toml", "{{arm}}", options=options)
    assert ran.code == 0, ran.err
    assert _lines(lucid) == [
        ["small", "1", None, "--config=small.toml", "{arm}"],
        ["big", "2,3", None, "--config=big.toml", "{arm}"],
    ]
    (header,) = ran.records("header")
    assert header["command"] == ["python", name, "--config={arm}.toml", "{{arm}}"]
    assert [(arm["name"], arm["env"]) for arm in header["arms"]] == [("small", {"KEY": "1"}), ("big", {"KEY": "2,3"})]


def test_without_arms_braces_are_the_commands_own(lucid: Lucid) -> None:
    """They reach it as typed."""
    lucid.profile("python", lucid.script(WRITES_WORDS), "{arm}", "{{arm}}", options=("--interval", "0"))
    assert [line[3:] for line in _lines(lucid)] == [["{arm}", "{{arm}}"]] * 2


def test_a_program_may_be_another_one_in_each_arm(lucid: Lucid) -> None:
    """Each is found before anything runs, in the PATH of its arm too."""
    for arm in ("a", "b"):
        folder = lucid.directory / arm
        folder.mkdir()
        (folder / "tool").write_text(f"#!/bin/sh\necho {arm} >> ran.txt\n")
        (folder / "tool").chmod(0o755)
    options = ("--interval", "0", "--arm", f"a:PATH={lucid.directory}/a", "--arm", f"b:PATH={lucid.directory}/b")
    assert lucid.profile("tool", options=options).code == 0
    assert (lucid.directory / "ran.txt").read_text() == "a\nb\n"
    assert lucid.profile("./{arm}/tool", options=("--arm", "a", "--arm", "c")).code == 127


def test_an_arm_may_have_an_import_path_of_its_own(lucid: Lucid) -> None:
    """The agent comes first in it and costs nothing of it."""
    for arm in ("a", "b"):
        (lucid.directory / arm).mkdir()
        (lucid.directory / arm / "lib.py").write_text(f"NAME = '{arm}'")
    script = lucid.script("import lib; open('names.txt', 'a').write(lib.NAME)")
    paths = [f"{arm}:PYTHONPATH={lucid.directory}/{arm}" for arm in ("a", "b")]
    ran = lucid.profile("python", script, options=("--arm", paths[0], "--arm", paths[1], "--interval", "0"))
    assert (ran.code, (lucid.directory / "names.txt").read_text()) == (0, "ab")
    assert all(run["agent"]["loaded"] for run in ran.records("run"))


def test_a_control_repeats_the_base(lucid: Lucid) -> None:
    """Its runs cannot see what they are, its pairs are in the file, and the text has the noise."""
    options = ("--control", "2", "--pairs", "2", "--interval", "0")
    ran = lucid.profile("python", lucid.script(WRITES_WORDS), options=options)
    assert ran.code == 0
    assert lucid("report", "validate", "report.jsonl").code == 0
    played = [run["arm"] for run in ran.records("run")]
    assert played == ["native", "control", "native", "captured", "control", "native", "captured", "native"]
    assert [line[0] for line in _lines(lucid)] == [arm.replace("control", "native") for arm in played]
    assert [line[2] for line in _lines(lucid)] == [str(int(arm == "captured")) for arm in played]
    assert ran.records("header")[0]["pairs"] == 2


@pytest.mark.parametrize(("different", "code"), [((), 4), (("--different", "b"), 0)])
def test_an_arm_that_computes_something_else_breaks_no_parity(
    lucid: Lucid, different: tuple[str, ...], code: int
) -> None:
    """Said beforehand it is asked of none; else it is exit code 4."""
    options = ("--arm", "a:KEY=1", "--arm", "b:KEY=2", "--interval", "0", *different)
    ran = lucid.profile("python", lucid.script(HAS_STATE), options=options)
    assert ran.code == code, ran.out + ran.err
    assert lucid("report", "validate", "report.jsonl").code == 0


def test_every_arm_but_a_different_one_must_keep_parity(lucid: Lucid) -> None:
    """A third arm that differs is exit code 4 as the second would be."""
    options = ("--arm", "a:KEY=1", "--arm", "b:KEY=1", "--arm", "c:KEY=2", "--interval", "0")
    assert lucid.profile("python", lucid.script(HAS_STATE), options=options).code == 4


def test_a_drawn_order_is_recorded_with_its_seed(lucid: Lucid) -> None:
    """The same seed gives the same slots; without one it is drawn."""
    options = ("--order", "random", "--pairs", "5", "--interval", "0")
    drawn = lucid.profile("true", options=options).records("header")[0]
    assert drawn["order"] == "random"
    again = lucid.profile("true", options=(*options, "--seed", str(drawn["seed"]))).records("header")[0]
    assert again["slots"] == drawn["slots"]


def _tainted(lucid: Lucid, *options: str, **calls: Any) -> Ran:
    env = fake_nvml.environment(fake_nvml.scenario(fake_nvml.device(**calls)), lucid.directory)
    return lucid.profile(sys.executable, lucid.script(SAMPLED), options=options, env=env)


def test_a_throttled_run_leaves_its_pair_out(lucid: Lucid) -> None:
    """The rule stands in the header, the taint at the run, the reason at the pair."""
    ran = _tainted(lucid, reasons=0x44)
    assert ran.code == 0, ran.err
    (header,) = ran.records("header")
    assert header["taints"] == ["throttled", "foreign", "suspended", "changed"]
    assert len(header["rules"]) == 5
    assert [run["taints"] for run in ran.records("run")] == [["throttled"]] * 2
    (pair,) = ran.records("pair")
    assert (pair["included"], pair["flags"]) == (False, ["throttled:0", "throttled:1"])


def test_what_is_not_to_be_left_out_is_only_flagged(lucid: Lucid) -> None:
    """`--leave-out` names what is; the power cap is a note in any case."""
    ran = _tainted(lucid, "--leave-out", "suspended", reasons=0x44)
    assert ran.records("header")[0]["taints"] == ["suspended"]
    (pair,) = ran.records("pair")
    assert (pair["included"], pair["flags"]) == (True, ["throttled:0", "throttled:1"])
    assert all("the power cap held the clocks of its GPU back" in run["notes"] for run in ran.records("run"))


def test_a_neighbour_in_both_runs_is_told_and_kept(lucid: Lucid) -> None:
    """It bends both alike."""
    ran = _tainted(lucid, compute_processes=[[os.getpid(), 2**30]])
    assert [run["taints"] for run in ran.records("run")] == [["foreign"]] * 2
    (pair,) = ran.records("pair")
    assert (pair["included"], pair["flags"]) == (True, ["foreign:0", "foreign:1"])


def test_gpus_that_cannot_be_told_apart_are_noted(lucid: Lucid) -> None:
    """Two GPUs have processes under numbers that mean nothing here: one of them may be the run, and is no taint."""
    hidden = [[2**22 - 1, 2**30]]
    devices = [
        fake_nvml.device(uuid=f"GPU-{name}", pci=f"00000000:0{name}:00.0", compute_processes=hidden, reasons=0x44)
        for name in "12"
    ]
    env = fake_nvml.environment(fake_nvml.scenario(*devices), lucid.directory)
    ran = lucid.profile(sys.executable, lucid.script(SAMPLED), env=env)
    assert not any(run.get("taints") for run in ran.records("run"))
    note = "not known which of the GPUs the run used, so throttling and other processes were not looked for"
    assert all(note in run["notes"] for run in ran.records("run"))


def test_a_busy_gpu_is_refused_where_an_idle_machine_is_required(lucid: Lucid) -> None:
    """Exit code 9 with the GPU and the remedy, nothing run, nothing written."""
    busy = fake_nvml.device(compute_processes=[[os.getpid(), 2**30]])
    env = fake_nvml.environment(fake_nvml.scenario(busy), lucid.directory)
    ran = lucid.profile("touch", "ran", options=("--require-idle",), env=env)
    assert (ran.code, ran.out) == (9, "")
    assert f"the machine is not idle: 1 process on {UUID}" in ran.err
    assert "wait until it is, or leave --require-idle out" in ran.err
    assert not (lucid.directory / "ran").exists()
    assert not ran.report.exists()


def test_ctrl_c_ends_a_cool_down(lucid: Lucid) -> None:
    """The report is closed as interrupted behind the run before."""
    fixed = ("--cool-down", "600", "--interval", "0", "-o", "report.jsonl")
    process = lucid.start("profile", "run", *fixed, "--", "touch", "ran")
    wait_for(lucid.directory / "ran")
    assert process.stderr is not None
    while b"cooling down for 600 s" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    ran = lucid("report", "validate", "report.jsonl")
    assert (ran.code, ran.records("end")[0]["status"], len(ran.records("run"))) == (0, "interrupted", 1)


@pytest.mark.parametrize("name", TIMES[:3])
def test_a_time_may_be_as_long_as_thirty_days(lucid: Lucid, name: str) -> None:
    """The help says so."""
    assert lucid("profile", "run", name, "2592000", "--pairs", "10000", "--dry-run", "--", "true").code == 0
    text = " ".join(lucid("profile", "run", "--help").out.split())
    assert "x<=2592000]" in text
    assert "[1<=x<=10000]" in text


def test_a_dry_run_starts_and_writes_nothing(lucid: Lucid) -> None:
    """Runs, order, what each arm sets and the time are on standard output."""
    options = ("--arm", "a:KEY=x y", "--arm", "b:KEY=2", "--order", "random", "--seed", "3", "--cool-down", "30")
    more = ("--dry-run", "--expect-seconds", "600", "--control", "1", "--pairs", "3")
    ran = lucid("profile", "run", *options, *more, "--", "touch", "ran-{arm}")
    assert (ran.code, ran.err) == (0, "")
    assert list(lucid.directory.iterdir()) == []
    lines = ran.out.splitlines()
    assert lines[0] == "10 runs, nothing of it started, nothing written"
    assert "order     random, seed 3" in lines
    assert "time      about 104 min: 10 times 10 min, pauses of 4 min in it" in lines
    assert "          $ touch ran-a" in lines
    assert "          KEY='x y'" in lines
    assert "arm       control: a once more" in lines
    table = lines[lines.index("slot  pair  arm") + 1 :]
    assert len(table) == 10
    assert [line.endswith("(discarded)") for line in table] == [True] * 2 + [False] * 8


@pytest.mark.parametrize(
    ("options", "time"),
    [
        ((), "not known; --expect-seconds says how long one run takes"),
        (("--timeout", "60"), "at most 14 min: 14 times the limit of --timeout"),
    ],
)
def test_a_dry_run_says_what_it_knows_of_the_time(lucid: Lucid, options: tuple[str, ...], time: str) -> None:
    """A limit is a bound; without anything it says what would help."""
    ran = lucid("profile", "run", "--dry-run", *options, "--", "true")
    assert f"time      {time}" in ran.out.splitlines()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--arm", "a"), "one arm is compared with nothing; add another --arm"),
        (("--arm", "a", "--arm", "a"), "there are two arms of that name; rename one"),
        (("--arm", "a:X", "--arm", "b"), "'X' is no KEY=VALUE"),
        (("--arm", "a", "--arm", "control", "--control", "1"), "rename the arm"),
        (("--different", "native"), "that is the base; name an arm that is compared with it"),
        (("--different", "c"), "there is no such arm; the arms are native, captured"),
        (("--seed", "1"), "only a drawn order has a seed; add --order random"),
        (("--leave-out", "none", "--leave-out", "foreign"), "nothing else goes with it"),
        (("--leave-out", "noise"), "noise"),
        (("--order", "baab"), "baab"),
        (("--cool-down", "-1"), "--cool-down"),
        *(((name, "1e308"), f"'{name}': 1e+308 is not in the range") for name in TIMES),
        *(((name, "10001", "--dry-run"), f"'{name}': 10001 is not in the range") for name in COUNTS),
        (("--control", "-1"), "--control"),
        (("--dry-run", "-o", "taken.jsonl"), "taken.jsonl exists already"),
    ],
)
def test_options_that_make_no_sense_are_refused(lucid: Lucid, options: tuple[str, ...], words: str) -> None:
    """Exit code 2, the remedy in words, nothing run, nothing written."""
    (lucid.directory / "taken.jsonl").touch()
    before = {path.name for path in lucid.directory.iterdir()}
    ran = lucid("profile", "run", *options, "--", "touch", "ran")
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert {path.name for path in lucid.directory.iterdir()} == before


def test_the_help_tells_every_option(tmp_path: Path) -> None:
    """Each with its meaning."""
    text = " ".join(Lucid(tmp_path)("profile", "run", "--help").out.split())
    for option in ("--arm", "--different", "--control", "--order", "--seed", "--cool-down", "--require-idle"):
        assert f"{option} " in text
    for option in ("--leave-out", "--dry-run", "--resume", "--expect-seconds"):
        assert f"{option} " in text
    assert r"A comma inside a value is typed '\,'" in text
