"""`lucid profile run --resume`: killed in the middle of any run, a report becomes whole, and only where it may."""

import gzip
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cli.harness import Lucid, Ran, wait_for
from lucid_cli.experiment import plan_slots
from lucid_cli.resume import remaining_slots
from lucid_profiler import jsonio
from lucid_profiler.reader import read_report
from lucid_profiler.records import Slot, link
from lucid_profiler.saved_state import run_folder_name
from support import fake_nvml
from tools import rehash

# Waits in the run whose number, counted over all calls, stands in `stop`; the others end at once. With a trap,
# since a shell may go on after a Ctrl-C that came while it started a program.
CHILD = """
echo "$LUCID_PROFILE_ARM" >> arms.txt
if [ "$(wc -l < arms.txt)" = "$(cat stop)" ]; then
    trap "exit 130" INT
    touch ready
    for _ in $(seq 600); do sleep 0.1; done
fi
"""
# Hands something over and waits as above.
SAVING = """
import os, time
import lucid_profiler
lucid_profiler.state("model", {"weight": [1.0]})
open("runs.txt", "a").write("x")
if str(os.path.getsize("runs.txt")) == open("stop").read():
    open("ready", "w").close()
    time.sleep(60)
"""
PLAN = ("--pairs", "2", "--interval", "0")
NUM_RUNS = 6


def _kill(lucid: Lucid, run: int, *options: str, env: dict[str, str] | None = None, resume: bool = False) -> None:
    """Kill lucid with the kernel's own signal while its run of this number, counted from 0 over all calls, goes on."""
    (lucid.directory / "stop").write_text(str(run + 1))
    (lucid.directory / "ready").unlink(missing_ok=True)
    if resume:
        process = lucid.start("profile", "run", "--resume", "report.jsonl", *options, env=env)
    else:
        name = lucid.script(CHILD, "child.sh")
        process = lucid.start("profile", "run", *PLAN, "-o", "report.jsonl", *options, "--", "sh", name, env=env)
    wait_for(lucid.directory / "ready")
    # A command may be faster than the first records of its report.
    assert process.stderr is not None
    while b"report: " not in process.stderr.readline():
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL


def _resume(lucid: Lucid, *options: str, **settings: Any) -> Ran:
    (lucid.directory / "stop").write_text("none")
    return lucid("profile", "run", "--resume", "report.jsonl", *options, **settings)


def _check_whole(lucid: Lucid, ran: Ran, *, blocks: int) -> None:
    """Check that the report is valid and holds every planned pair once, each in its planned order."""
    assert ran.code == 0, ran.err
    assert lucid("report", "validate", "report.jsonl").code == 0
    (header,) = ran.records("header")
    (end,) = ran.records("end")
    assert end["status"] == "complete"
    assert len(ran.records("resume")) == blocks - 1
    runs = {run["run"]: run for run in ran.records("run")}
    measured = [pair for pair in ran.records("pair") if pair["included"]]
    firsts = [min(pair["runs"]) for pair in measured]
    assert [runs[first]["arm"] for first in firsts] == ["native", "captured"]
    assert len(measured) == header["pairs"]
    seqs = [json.loads(line)["seq"] for line in ran.report.read_bytes().splitlines()]
    assert seqs == list(range(len(seqs)))


@pytest.mark.parametrize("killed", range(NUM_RUNS))
def test_a_report_killed_in_the_middle_of_any_run_becomes_whole(lucid: Lucid, killed: int) -> None:
    """The cut-off pair is run again whole, what was whole is not, and the discarded pair comes first once more."""
    _kill(lucid, killed)
    num_before = len((lucid.directory / "arms.txt").read_text().split())
    ran = _resume(lucid)
    _check_whole(lucid, ran, blocks=2)
    arms = (lucid.directory / "arms.txt").read_text().split()[num_before:]
    num_left = min(2, 3 - killed // 2)
    assert arms == ["captured", "native", *["native", "captured", "captured", "native"][-2 * num_left :]]
    (resume,) = ran.records("resume")
    assert [slot["slot"] for slot in resume["slots"]] == list(range(NUM_RUNS, NUM_RUNS + len(arms)))
    assert (resume["block"], resume["same_devices"], resume["host_changed"]) == (1, True, False)


def test_a_report_may_be_killed_again_and_again(lucid: Lucid) -> None:
    """Two resumes in a row, one of them killed in its own discarded pair and one after it."""
    _kill(lucid, 3)
    _kill(lucid, 4, resume=True)
    _kill(lucid, 8, resume=True)
    ran = _resume(lucid)
    _check_whole(lucid, ran, blocks=4)
    assert [resume["block"] for resume in ran.records("resume")] == [1, 2, 3]
    numbers = [run["run"] for run in ran.records("run")]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("kept", [1, 17, -1])
def test_a_torn_tail_is_cut_off_after_saying_so(lucid: Lucid, kept: int) -> None:
    """Half a line goes; a line that lacks only its end is completed."""
    _kill(lucid, 3)
    *whole, last = lucid.report.read_bytes().splitlines(keepends=True)
    lucid.report.write_bytes(b"".join(whole) + last[:kept])
    ran = _resume(lucid)
    _check_whole(lucid, ran, blocks=2)
    assert ("its last line is torn and is cut off" in ran.err) == (kept > 0)


def test_a_report_that_was_interrupted_goes_on_behind_its_last_pair(lucid: Lucid) -> None:
    """Summary and end, which are derived, are written anew, and the run that was broken off does not count."""
    (lucid.directory / "stop").write_text("4")
    name = lucid.script(CHILD, "child.sh")
    process = lucid.start("profile", "run", *PLAN, "-o", "report.jsonl", "--", "sh", name)
    wait_for(lucid.directory / "ready")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    ran = _resume(lucid)
    _check_whole(lucid, ran, blocks=2)
    assert "its summary and its end are written anew" in ran.err
    assert Counter(run["status"] for run in ran.records("run"))["interrupted"] == 1


def test_kernels_are_left_to_the_report_that_goes_on(lucid: Lucid) -> None:
    """An interrupt is no reason why there are none."""
    (lucid.directory / "stop").write_text("2")
    name = lucid.script(CHILD, "child.sh")
    process = lucid.start("profile", "run", *PLAN, "--kernels", "-o", "report.jsonl", "--", "sh", name)
    wait_for(lucid.directory / "ready")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert b'"kind":"kernels"' not in lucid.report.read_bytes()
    ran = _resume(lucid)
    assert ran.code == 0, ran.err
    assert [kernels["reason"] for kernels in ran.records("kernels")] == ["no_agent"] * 2


def test_a_whole_report_is_refused(lucid: Lucid) -> None:
    """Exit code 2, one line with the remedy, not a byte changed."""
    (lucid.directory / "stop").write_text("none")
    assert lucid.profile("sh", lucid.script(CHILD, "child.sh")).code == 0
    before = lucid.report.read_bytes()
    ran = _resume(lucid)
    assert (ran.code, ran.out) == (2, "")
    assert "the report is whole, nothing is left to run; start a new one with -o" in ran.err
    assert lucid.report.read_bytes() == before


def test_a_report_that_is_being_written_is_refused(lucid: Lucid) -> None:
    """A second lucid does not write into the report of one that is alive."""
    (lucid.directory / "stop").write_text("2")
    name = lucid.script(CHILD, "child.sh")
    process = lucid.start("profile", "run", *PLAN, "-o", "report.jsonl", "--", "sh", name)
    wait_for(lucid.directory / "ready")
    ran = _resume(lucid)
    process.kill()
    process.communicate(timeout=20)
    assert ran.code == 2
    assert "another lucid is writing the report; wait until it has ended" in ran.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--pairs", "9"), "--pairs does not go with --resume"),
        (("--arm", "a"), "--arm does not go with --resume"),
        (("-o", "other.jsonl"), "--output does not go with --resume"),
        (("--", "true"), "the command is that of the report; leave 'true' out"),
        (("--stdin",), "its runs had another standard input; give them the same: leave --stdin out"),
    ],
)
def test_what_the_report_has_fixed_is_refused(lucid: Lucid, args: tuple[str, ...], words: str) -> None:
    """Exit code 2, one line, not a byte changed."""
    _kill(lucid, 0)
    before = lucid.report.read_bytes()
    ran = _resume(lucid, *args)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert lucid.report.read_bytes() == before


@pytest.mark.parametrize("name", ["missing.jsonl", "/dev/null", "."])
def test_only_a_report_in_a_file_goes_on(lucid: Lucid, name: str) -> None:
    """Exit code 2 with the name."""
    ran = lucid("profile", "run", "--resume", name)
    assert ran.code == 2
    assert f"--resume {name}: " in ran.err


@pytest.mark.parametrize("name", ["report.jsonl", "report.jsonl.gz"])
def test_a_packed_report_is_refused(lucid: Lucid, name: str) -> None:
    """By its bytes, whatever its name: nothing plain is written behind them."""
    _kill(lucid, 3)
    packed = gzip.compress(lucid.report.read_bytes())
    (lucid.directory / name).write_bytes(packed)
    ran = lucid("profile", "run", "--resume", name)
    assert (ran.code, ran.out) == (2, "")
    assert f"--resume {name}: the report is packed; unpack it first (gunzip)" in ran.err
    assert (lucid.directory / name).read_bytes() == packed


def test_a_report_that_zstd_packed_is_refused_too(lucid: Lucid) -> None:
    """Also where Python cannot unpack it."""
    packed = b"\x28\xb5\x2f\xfd" + b"\x00" * 20
    lucid.report.write_bytes(packed)
    ran = lucid("profile", "run", "--resume", "report.jsonl")
    assert (ran.code, ran.out) == (2, "")
    assert "the report is packed; unpack it first (unzstd)" in ran.err
    assert lucid.report.read_bytes() == packed


@pytest.mark.parametrize("num_torn_bytes", [0, 40])
def test_a_report_that_stopped_before_its_first_run_is_refused(lucid: Lucid, num_torn_bytes: int) -> None:
    """Killed before the facts of the machine were written: there is nothing to go on with."""
    _kill(lucid, 0)
    header, env = lucid.report.read_bytes().splitlines(keepends=True)
    before = header + env[:num_torn_bytes]
    lucid.report.write_bytes(before)
    ran = _resume(lucid)
    assert (ran.code, ran.out) == (2, "")
    assert "the report stopped before its first run; start a new one with -o" in ran.err
    assert lucid.report.read_bytes() == before


def test_no_report_is_no_report(lucid: Lucid) -> None:
    """A file that is damaged keeps its own exit code, and its bytes."""
    lucid.report.write_text("{}\n{}\n")
    assert lucid("profile", "run", "--resume", "report.jsonl").code == 7
    assert lucid.report.read_text() == "{}\n{}\n"


def test_the_command_is_run_where_it_was(lucid: Lucid) -> None:
    """From another directory the same words may be another program."""
    _kill(lucid, 0)
    elsewhere = lucid.directory / "elsewhere"
    elsewhere.mkdir()
    ran = Lucid(elsewhere)("profile", "run", "--resume", "../report.jsonl")
    assert ran.code == 2
    assert f"its command was run in {lucid.directory}; go there" in ran.err


def test_after_a_failed_run_the_rest_is_run_only_if_that_is_asked_for(lucid: Lucid) -> None:
    """The exit code still says that something failed, and the end too."""
    script = 'echo x >> runs.txt; [ "$(wc -l < runs.txt)" != 3 ]'
    fixed = ("--pairs", "2", "--interval", "0", "-o", "report.jsonl")
    assert lucid("profile", "run", *fixed, "--", "sh", "-c", script).code == 8
    refused = lucid("profile", "run", "--resume", "report.jsonl")
    assert refused.code == 2
    assert "run 2 failed; start a new report with -o, or add --keep-going" in refused.err
    ran = lucid("profile", "run", "--resume", "report.jsonl", "--keep-going")
    assert ran.code == 8
    assert ran.records("end")[0]["status"] == "failed"
    assert lucid("report", "validate", "report.jsonl").code == 0
    assert sum(pair["included"] for pair in ran.records("pair")) == 2


@pytest.mark.parametrize("bad_run", [3, 4])
def test_a_pair_with_a_failed_run_is_measured_again(lucid: Lucid, bad_run: int) -> None:
    """Whichever of its runs it was; then nothing is left to run."""
    script = f'echo x >> runs.txt; [ "$(wc -l < runs.txt)" != {bad_run} ]'
    fixed = ("--pairs", "2", "--interval", "0", "-o", "report.jsonl")
    assert lucid("profile", "run", *fixed, "--", "sh", "-c", script).code == 8
    ran = lucid("profile", "run", "--resume", "report.jsonl", "--keep-going")
    assert ran.code == 8
    assert sum(pair["included"] for pair in ran.records("pair")) == 2
    before = ran.report.read_bytes()
    again = lucid("profile", "run", "--resume", "report.jsonl", "--keep-going")
    assert (again.code, again.report.read_bytes()) == (2, before)
    assert "nothing is left to run; start a new report with -o" in again.err


def test_the_settings_of_the_runs_are_those_of_the_report(lucid: Lucid) -> None:
    """Arms, places in the command, the seed's order, the pause and what is left out go on as they were."""
    (lucid.directory / "stop").write_text("6")
    child = 'echo "$1 $KEY" >> arms.txt; [ "$(wc -l < arms.txt)" != "$(cat stop)" ] || { touch ready; sleep 60; }'
    fixed = ["--arm", "a:KEY=1", "--arm", r"b:KEY=2\,3", "--order", "random", "--seed", "7", "--leave-out", "none"]
    more = ("--control", "1", "--interval", "0", "--pairs", "3", "--cool-down", "0.01", "-o", "report.jsonl")
    process = lucid.start("profile", "run", *fixed, *more, "--", "sh", "-c", child, "sh", "{arm}")
    wait_for(lucid.directory / "ready")
    process.kill()
    process.communicate(timeout=20)
    ran = _resume(lucid)
    assert ran.code == 0, ran.err
    (header,) = ran.records("header")
    assert (header["seed"], header["order"], header["cool_down_s"]) == (7, "random", 0.01)
    slots = {slot["slot"]: slot for slot in header["slots"] + ran.records("resume")[0]["slots"]}
    played = [slots[run["run"]]["arm"] for run in ran.records("run")]
    lines = (lucid.directory / "arms.txt").read_text().splitlines()
    del lines[5]  # was killed
    assert lines == ["b 2,3" if arm == "b" else "a 1" for arm in played]
    assert sum(pair["included"] for pair in ran.records("pair")) == 4


def test_another_model_of_gpu_is_refused(lucid: Lucid, tmp_path: Path) -> None:
    """Exit code 5 with both names; the report stays as it is."""
    _kill(lucid, 3, env=fake_nvml.environment(fake_nvml.H200, tmp_path))
    before = lucid.report.read_bytes()
    other = fake_nvml.scenario(fake_nvml.device(name="NVIDIA L4"))
    ran = _resume(lucid, env=fake_nvml.environment(other, tmp_path))
    assert (ran.code, ran.out) == (5, "")
    assert "the GPUs were NVIDIA H200 and are NVIDIA L4; start a new report with -o" in ran.err
    assert lucid.report.read_bytes() == before


def test_another_machine_is_refused(lucid: Lucid) -> None:
    """A report whose processor is another one gets nothing from this."""
    _kill(lucid, 3)
    lines = lucid.report.read_bytes().splitlines()
    assert b'"cpu_model"' in lines[1]
    _edit_host(lucid.report, "cpu_model", "another processor")
    ran = _resume(lucid)
    assert ran.code == 5
    assert "the processor was another processor and is " in ran.err


def test_another_gpu_of_the_same_model_begins_a_block(lucid: Lucid, tmp_path: Path) -> None:
    """No pair spans the two, and the record says that the device is another one."""
    _kill(lucid, 3, env=fake_nvml.environment(fake_nvml.H200, tmp_path))
    uuid = "GPU-99999999-2222-3333-4444-555555555555"
    other = fake_nvml.scenario(fake_nvml.device(uuid=uuid))
    ran = _resume(lucid, env=fake_nvml.environment(other, tmp_path))
    _check_whole(lucid, ran, blocks=2)
    (resume,) = ran.records("resume")
    assert (resume["same_devices"], resume["gpu_uuids"]) == (False, [uuid])
    for pair in ran.records("pair"):
        assert len({run < NUM_RUNS for run in pair["runs"]}) == 1


def test_a_report_that_lacks_only_its_end_gets_it(lucid: Lucid) -> None:
    """Nothing is run again; what is derived is written."""
    (lucid.directory / "stop").write_text("none")
    fixed = ("--pairs", "2", "--interval", "0", "-o", "report.jsonl")
    assert lucid("profile", "run", *fixed, "--", "sh", lucid.script(CHILD, "child.sh")).code == 0
    lines = lucid.report.read_bytes().splitlines(keepends=True)
    lucid.report.write_bytes(b"".join(lines[:-1]))
    ran = _resume(lucid)
    _check_whole(lucid, ran, blocks=2)
    assert len(ran.records("run")) == NUM_RUNS
    assert ran.records("resume")[0]["slots"] == []


def test_a_sampled_run_leaves_nobody_who_holds_the_report(lucid: Lucid) -> None:
    """The monitor of the killed run does not keep the report from going on, and later runs are sampled."""
    _kill(lucid, 1, "--interval", "0.05")
    ran = _resume(lucid)
    _check_whole(lucid, ran, blocks=2)
    host = [env for env in ran.records("env") if env["scope"] == "host"][-1]
    assert host["volatile"]["settings"]["interval_s"] == 0.05


def _saved_runs(lucid: Lucid) -> set[str]:
    """Return the names of the folders in which a run has saved something."""
    return {path.parts[-3] for path in (lucid.directory / "report.jsonl.state").rglob("*.state")}


def _kill_saving(lucid: Lucid, run: int, *options: str) -> None:
    """Kill lucid while its run of this number, which has saved its state, goes on; that of pair 1 is asked for."""
    (lucid.directory / "stop").write_text(str(run + 1))
    fixed = (*PLAN, "--save-state", "1", "-o", "report.jsonl", *options)
    process = lucid.start("profile", "run", *fixed, "--", "python", lucid.script(SAVING))
    wait_for(lucid.directory / "ready")
    process.kill()
    process.communicate(timeout=20)


def test_the_values_of_the_pair_that_was_cut_off_are_kept(lucid: Lucid) -> None:
    """The pair has a new number, and so have the folders of its runs."""
    _kill_saving(lucid, 2)
    ran = _resume(lucid)
    _check_whole(lucid, ran, blocks=2)
    names = {run_folder_name(slot["slot"], slot["arm"]) for slot in ran.records("resume")[0]["slots"][2:4]}
    assert _saved_runs(lucid) == names


def test_what_the_cut_off_run_had_saved_is_removed(lucid: Lucid) -> None:
    """Nothing else is: what is kept is that of runs in the report, which confirm it, and what lucid did not save."""
    saved = lucid.directory / "report.jsonl.state"
    _kill_saving(lucid, 3, "--discard-pairs", "0")
    assert _saved_runs(lucid) == {run_folder_name(2, "captured"), run_folder_name(3, "native")}
    _resume(lucid, "--dry-run")
    assert run_folder_name(3, "native") in _saved_runs(lucid)
    for name in ("run3-other", "own"):
        (saved / name).mkdir()
    (saved / "run9-native").symlink_to(lucid.directory)
    ran = _resume(lucid)
    assert ran.code == 0, ran.err
    assert f"report.jsonl.state/{run_folder_name(3, 'native')}: its run was cut off, and it is removed" in ran.err
    again = {run_folder_name(slot["slot"], slot["arm"]) for slot in ran.records("resume")[0]["slots"]}
    assert _saved_runs(lucid) == {run_folder_name(2, "captured"), *again}
    for name in ("run3-other", "own"):
        (saved / name).rmdir()
    (saved / "run9-native").unlink()
    assert rehash.main([str(lucid.report), str(saved)]) == 0


def test_folders_of_runs_that_were_never_saved_are_not_touched(lucid: Lucid) -> None:
    """A directory of that name is somebody else's where no values were asked for."""
    _kill(lucid, 3)
    other = lucid.directory / "report.jsonl.state" / run_folder_name(3, "native")
    other.mkdir(parents=True)
    _check_whole(lucid, _resume(lucid), blocks=2)
    assert other.exists()


def test_a_dry_run_of_a_resume_changes_nothing(lucid: Lucid) -> None:
    """It prints what is left, with the time that the runs before took."""
    _kill(lucid, 3)
    before = lucid.report.read_bytes()
    ran = _resume(lucid, "--dry-run")
    assert ran.code == 0
    assert "6 runs, nothing of it started, nothing written" in ran.out
    assert "time      about " in ran.out
    assert lucid.report.read_bytes() == before


def test_the_numbers_of_what_is_left_are_new(lucid: Lucid) -> None:
    """Slots and pairs are numbered on after all that were planned, in the order that was planned."""
    _kill(lucid, 4)
    remaining = remaining_slots(read_report(lucid.report))
    planned = plan_slots(2, 1)
    assert remaining.slots == (
        Slot(slot=6, pair=3, arm="captured", discarded=True),
        Slot(slot=7, pair=3, arm="native", discarded=True),
        Slot(slot=8, pair=4, arm=planned[4].arm),
        Slot(slot=9, pair=4, arm=planned[5].arm),
    )
    assert remaining.renamed == {2: 4}


def _edit_host(report: Path, key: str, value: str) -> None:
    """Change a fact of the machine, and every link behind it."""
    prev, lines = "", []
    for raw in report.read_bytes().splitlines():
        fields = json.loads(raw)
        if fields["t"] == "env" and fields["scope"] == "host":
            fields["identity"][key] = value
        fields["prev"] = prev
        lines.append(jsonio.dumps(fields))
        prev = link(lines[-1])
    report.write_bytes(b"".join(line + b"\n" for line in lines))
