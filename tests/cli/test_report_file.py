"""The file of a report: it is not another's, has a name of its own, and is still there and whole at the end."""

import re
from pathlib import Path

import click
import pytest

from cli.harness import Lucid, wait_for
from lucid_cli.report_file import ReportFile
from lucid_profiler.writer import Writer

BUSY = "another lucid is writing this report; wait until it has ended, or name another file with -o"
# Does something to the report, in the first run only.
CHILD = """
[ -e done ] && exit "$(cat done)"
until [ -s report.jsonl ]; do sleep 0.01; done
{action}
echo {code} > done
"""
REMOVE, MOVE, REPLACE = "rm report.jsonl", "mv report.jsonl moved.jsonl", "echo x > other; mv other report.jsonl"
TRUNCATE, WRITE = ": > report.jsonl", "echo hello >> report.jsonl"
LOST = "the report was deleted or replaced while it was being written; its records are lost"
DAMAGED = "the report was truncated or written to by another program while it was being written"
OPTIONS = ("--pairs", "2", "--interval", "0")


def test_the_report_of_another_lucid_is_not_overwritten(lucid: Lucid) -> None:
    """Refused before anything runs, and not a byte of it is lost; afterwards it may be."""
    process = lucid.start("profile", "run", "--interval", "0", "-o", "report.jsonl", "--", "sleep", "60")
    assert process.stderr is not None
    while b"report: " not in process.stderr.readline():
        assert process.poll() is None
    before = lucid.report.read_bytes()
    ran = lucid.profile("touch", "ran")
    after = lucid.report.read_bytes()
    process.kill()
    process.communicate(timeout=20)
    assert (ran.code, ran.out) == (2, "")
    assert BUSY in ran.err
    assert not (lucid.directory / "ran").exists()
    assert (after, len(before) > 0) == (before, True)
    assert lucid.profile("touch", "ran").code == 0


def test_a_report_that_another_has_begun_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    """Both found no file when they began."""
    path = tmp_path / "report.jsonl"
    file = ReportFile(str(path), overwrite=True)
    with Writer(path), pytest.raises(click.UsageError, match=BUSY):
        file.open()


@pytest.mark.parametrize(
    ("name", "packer"), [("x.jsonl.gz", "gzip"), ("x.JSONL.GZ", "gzip"), ("x.zst", "zstd"), ("taken.gz", "gzip")]
)
@pytest.mark.parametrize("option", ["--overwrite", "--dry-run"])
def test_the_name_of_a_packed_file_is_refused(lucid: Lucid, name: str, packer: str, option: str) -> None:
    """Plain text under it would be taken for damage by others; nothing is run and nothing written."""
    (lucid.directory / "taken.gz").write_text("mine")
    ran = lucid("profile", "run", "-o", name, option, "--", "touch", "ran")
    plain = Path(name).with_suffix("")
    assert (ran.code, ran.out) == (2, "")
    assert f"-o {name}: a report is written unpacked; write {plain}, and pack it afterwards with {packer}" in ran.err
    assert [path.name for path in lucid.directory.iterdir()] == ["taken.gz"]
    assert (lucid.directory / "taken.gz").read_text() == "mine"


@pytest.mark.parametrize(("action", "code"), [(REMOVE, 0), (REPLACE, 0), (REMOVE, 3)])
def test_a_report_that_was_deleted_is_an_error_of_the_environment(lucid: Lucid, action: str, code: int) -> None:
    """Told after the run in which it went and at the end, where the table is printed; 9 before 8."""
    name = lucid.script(CHILD.format(action=action, code=code), "child.sh")
    ran = lucid("profile", "run", *OPTIONS, "--keep-going", "-o", "report.jsonl", "--", "sh", name)
    assert ran.code == 9
    assert ran.err.splitlines()[-1] == f"Error: report.jsonl: {LOST}"
    assert ran.err.count(f"Warning: report.jsonl: {LOST}") == 1
    assert ran.err.index("Warning: ") < ran.err.index("run 2 of 6")
    assert "verdict   " in ran.out
    assert not lucid.report.exists() or lucid.report.read_text() == "x\n"


@pytest.mark.parametrize(("action", "code"), [(TRUNCATE, 0), (WRITE, 0), (TRUNCATE, 3)])
def test_a_report_that_another_program_changes_is_an_error_of_the_environment(
    lucid: Lucid, action: str, code: int
) -> None:
    """As one that was deleted, since it cannot be read afterwards; the table is printed."""
    name = lucid.script(CHILD.format(action=action, code=code), "child.sh")
    ran = lucid("profile", "run", *OPTIONS, "--keep-going", "-o", "report.jsonl", "--", "sh", name)
    assert ran.code == 9
    last = ran.err.splitlines()[-1]
    assert re.fullmatch(rf"Error: report\.jsonl: {DAMAGED}; it is damaged: \d+ bytes where \d+ were written", last)
    assert ran.err.count(f"Warning: report.jsonl: {DAMAGED}") == 1
    assert ran.err.index("Warning: ") < ran.err.index("run 2 of 6")
    assert "verdict   " in ran.out
    assert lucid("report", "validate", "report.jsonl").code == 7


def test_a_report_that_is_taken_up_is_watched_too(lucid: Lucid) -> None:
    """The bytes that stood in it before count."""
    wait = "until [ -s report.jsonl ]; do sleep 0.01; done; touch ready; exec sleep 60"
    process = lucid.start("profile", "run", *OPTIONS, "-o", "report.jsonl", "--", "sh", lucid.script(wait, "child.sh"))
    wait_for(lucid.directory / "ready")
    process.kill()
    process.communicate(timeout=20)
    wait = "until grep -q same_devices report.jsonl; do sleep 0.01; done"
    lucid.script(f"[ -e done ] && exit\n{wait}\necho hello >> report.jsonl\ntouch done\n", "child.sh")
    ran = lucid("profile", "run", "--resume", "report.jsonl")
    assert ran.code == 9
    kinds = re.findall(rf"^(.*): {re.escape(str(lucid.report.resolve()))}: {DAMAGED}", ran.err, re.MULTILINE)
    assert kinds == ["Warning", "Error"]


@pytest.mark.parametrize("options", [(), ("--save-state", "0")])
def test_values_that_an_earlier_report_kept_are_in_the_way(lucid: Lucid, options: tuple[str, ...]) -> None:
    """They would be taken for those of the new report; refused before anything runs, and report and values stay."""
    kept = lucid.directory / "report.jsonl.state" / "run0-native"
    kept.mkdir(parents=True)
    lucid.report.write_text("mine")
    ran = lucid.profile("touch", "ran", options=options)
    assert (ran.code, ran.out) == (2, "")
    words = "report.jsonl.state exists already, with the values of an earlier report; move or remove it"
    assert words in " ".join(ran.err.split())
    assert not (lucid.directory / "ran").exists()
    assert (lucid.report.read_text(), kept.exists()) == ("mine", True)


def test_where_no_report_can_be_made_the_environment_is_to_blame(tmp_path: Path) -> None:
    """9, as for the log of `attach`, where the user has named no file; a file that was named in vain is 2."""
    nowhere = Lucid(Path("/proc"))  # where nobody makes a file, root neither
    ran = nowhere("profile", "run", "--", "touch", str(tmp_path / "ran"), env={"TMPDIR": str(tmp_path)})
    assert (ran.code, ran.out) == (9, "")
    (line,) = ran.err.splitlines()
    assert re.fullmatch(r"Error: the report lucid-.*\.jsonl cannot be written: .*; name a file elsewhere with -o", line)
    named = nowhere("profile", "run", "-o", "x.jsonl", "--", "touch", str(tmp_path / "ran"))
    assert (named.code, "the report x.jsonl cannot be written" in named.err) == (2, True)
    assert not (tmp_path / "ran").exists()


def test_a_report_that_was_moved_is_named_and_whole(lucid: Lucid) -> None:
    """It goes on in the open file; whoever looks for it under its name has to know."""
    name = lucid.script(CHILD.format(action=MOVE, code=0), "child.sh")
    ran = lucid("profile", "run", *OPTIONS, "-o", "report.jsonl", "--", "sh", name)
    assert ran.code == 9
    moved = lucid.directory / "moved.jsonl"
    words = f"the report was moved while it was being written; its records are in {moved}"
    assert ran.err.splitlines()[-1] == f"Error: report.jsonl: {words}"
    assert lucid("report", "validate", "moved.jsonl").code == 0
    assert ran.out == lucid("report", "show", "moved.jsonl").out.replace("moved.jsonl", "report.jsonl")


def test_a_report_that_was_moved_away_and_back_is_where_it_belongs(lucid: Lucid) -> None:
    """Only what is so at the end counts."""
    text = "case $(wc -c < runs) in 1) mv report.jsonl moved.jsonl ;; 3) mv moved.jsonl report.jsonl ;; esac"
    wait = "until [ -s report.jsonl ] || [ -s moved.jsonl ]; do sleep 0.01; done"
    name = lucid.script(f"printf x >> runs\n{wait}\n{text}\n", "child.sh")
    ran = lucid("profile", "run", *OPTIONS, "-o", "report.jsonl", "--", "sh", name)
    assert ran.code == 0
    assert lucid("report", "validate", "report.jsonl").code == 0


def test_what_happens_in_the_last_run_is_told_once(lucid: Lucid) -> None:
    """The error at the end is enough."""
    ran = lucid.profile("sh", "-c", '[ "$LUCID_PROFILE_ARM" = native ] || rm report.jsonl', options=OPTIONS[2:])
    assert (ran.code, ran.err.count(LOST)) == (9, 1)
