"""Where output goes: whole or not at all, to nothing that would hold it up, and with names that stay on their line."""

import errno
import os
import resource
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from cli.harness import Lucid, Ran
from cli.reports import write_report
from lucid_cli.export.destination import opened
from lucid_cli.output import one_line
from lucid_cli.special_files import unwritable_kind

REPORT = "a.jsonl"
EXPORTS = tuple(("report", "export", REPORT, "--to", form) for form in ("chrome-trace", "csv"))
HTML = ("report", "html", REPORT)
RUN = ("profile", "run", "--pairs", "1", "--discard-pairs", "0", "--interval", "0")
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
# Where files end early Python itself would leave half a compiled module for the tests after this one.
UNCOMPILED = {"PYTHONDONTWRITEBYTECODE": "1"}
TWO_LINES = "two\nlines\x1b.jsonl"


@pytest.fixture
def reports(lucid: Lucid) -> Lucid:
    """Give the command in a directory with a report."""
    write_report(lucid.directory / REPORT)
    return lucid


def files_end_at(num_bytes: int) -> Callable[[], None]:
    """Return what lets a process write so much of a file and then fail, as where a disk is nearly full."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def without_reader(lucid: Lucid, *args: str, **settings: Any) -> Ran:
    """Run the command with a pipe as standard output that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    try:
        return lucid(*args, stdout=write, **settings)
    finally:
        os.close(write)


@pytest.mark.parametrize("args", [*EXPORTS, (*HTML, "-o", "-")], ids=lambda args: args[-1])
@pytest.mark.parametrize("env", [{}, UNBUFFERED], ids=["buffered", "unbuffered"])
def test_a_reader_that_leaves_before_the_first_byte_is_no_error(
    args: tuple[str, ...], env: dict[str, str], reports: Lucid
) -> None:
    """Status 0 and no word, also where the first write fails already."""
    ran = without_reader(reports, *args, env=env)
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("args", [*EXPORTS, (*HTML, "-o", "-")], ids=lambda args: args[-1])
def test_a_closed_standard_output_is_no_error(args: tuple[str, ...], reports: Lucid) -> None:
    """Nobody wants what it would hold."""
    ran = reports(*args, stdout=None, preexec_fn=lambda: os.close(1))
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("target", ["-", "/dev/full"])
@pytest.mark.parametrize("args", [*EXPORTS, HTML], ids=lambda args: args[-1])
def test_what_is_full_is_named(args: tuple[str, ...], target: str, reports: Lucid) -> None:
    """Standard output as well as a file."""
    with Path("/dev/full").open("wb") as full:
        ran = reports(*args, "-o", target, stdout=full)
    name = "standard output" if target == "-" else target
    assert (ran.code, ran.err) == (9, f"Error: {name}: No space left on device\n")


@pytest.mark.parametrize(
    "args",
    [("show", REPORT), ("show", REPORT, "--format", "json"), EXPORTS[1][1:], (*HTML[1:], "-o", "-")],
    ids=lambda args: args[-1],
)
def test_an_output_without_a_buffer_loses_no_part_of_it_silently(args: tuple[str, ...], reports: Lucid) -> None:
    """A write that takes a part of what it is given is not the last one."""
    with (reports.directory / "out").open("wb") as out:
        ran = reports("report", *args, env={**UNBUFFERED, **UNCOMPILED}, stdout=out, preexec_fn=files_end_at(500))
    assert (ran.code, ran.err) == (9, "Error: standard output: File too large\n")


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
@pytest.mark.parametrize("args", [EXPORTS[1], HTML], ids=lambda args: args[1])
def test_a_full_disk_leaves_no_file_and_is_no_obstacle_later(
    args: tuple[str, ...], overwrite: tuple[str, ...], reports: Lucid
) -> None:
    """The error names the file, nothing has its name, and the next try finds no remains."""
    ran = reports(*args, "-o", "out", *overwrite, env=UNCOMPILED, preexec_fn=files_end_at(500))
    assert (ran.code, ran.err) == (9, "Error: out: File too large\n")
    assert [path.name for path in reports.directory.iterdir()] == [REPORT]
    assert reports(*args, "-o", "out", *overwrite).code == 0


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_came_meanwhile_is_not_replaced(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --overwrite, also where the file system has no links; asked for, it is."""
    if not has_links:
        monkeypatch.setattr(os, "link", _no_links)
    path = tmp_path / "out"
    destination = opened(str(path), overwrite=False)
    destination.__enter__().write(b"ours")
    path.write_bytes(b"theirs")
    with pytest.raises(click.UsageError, match="out exists already"):
        destination.__exit__(None, None, None)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("out", b"theirs")]
    with opened(str(path), overwrite=True) as sink:
        sink.write(b"ours")
    assert path.read_bytes() == b"ours"


def test_a_file_system_without_links_holds_files_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written gets its name, and nothing else stays."""
    monkeypatch.setattr(os, "link", _no_links)
    with opened(str(tmp_path / "out"), overwrite=False) as sink:
        sink.write(b"ours")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("out", b"ours")]


def _no_links(*_: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize(("kind", "words"), [("pipe", "a named pipe"), ("dir", "a directory"), ("socket", "a socket")])
@pytest.mark.parametrize(
    "args",
    [
        (*RUN, "-o", "{}", "--", "touch", "ran"),
        (*RUN, "-o", "{}", "--overwrite", "--", "touch", "ran"),
        (*RUN, "-o", "{}", "--overwrite", "--dry-run", "--", "touch", "ran"),
        *((*args, "-o", "{}", "--overwrite") for args in (*EXPORTS, HTML)),
    ],
    ids=" ".join,
)
def test_what_would_hold_output_up_is_refused(args: tuple[str, ...], kind: str, words: str, reports: Lucid) -> None:
    """At once, with the remedy, before anything runs, and what is there stays."""
    path = reports.directory / kind
    with socket.socket(socket.AF_UNIX) as server:
        {"pipe": os.mkfifo, "dir": os.mkdir, "socket": lambda name: server.bind(str(name))}[kind](path)
        before = path.stat()
        ran = reports(*(word.replace("{}", kind) for word in args), timeout=30)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert "name a file with -o" in ran.err
    assert not (reports.directory / "ran").exists()
    assert os.path.samestat(path.stat(), before)


def test_a_step_summary_that_would_hold_output_up_is_refused(reports: Lucid) -> None:
    """Before the report is read."""
    os.mkfifo(reports.directory / "pipe")
    ran = reports("report", "show", "missing.jsonl", "--step-summary", env={"GITHUB_STEP_SUMMARY": "pipe"}, timeout=30)
    assert (ran.code, ran.out) == (2, "")
    assert "pipe is a named pipe" in ran.err
    assert "let GITHUB_STEP_SUMMARY name a file" in ran.err


def test_a_disk_is_no_place_for_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report on a block device would be the end of what is on it."""
    monkeypatch.setattr(Path, "stat", lambda _: SimpleNamespace(st_mode=stat.S_IFBLK | 0o600))
    assert unwritable_kind("/dev/sda") == "a block device"


@pytest.mark.parametrize("args", [*EXPORTS, HTML], ids=lambda args: args[-1])
def test_output_goes_into_a_pipe_that_was_handed_over(args: tuple[str, ...], reports: Lucid) -> None:
    """As /dev/stdout; what comes out is what a file would hold."""
    assert reports(*args, "-o", "out").code == 0
    ran = reports(*args, "-o", "/dev/stdout")
    assert ran.code == 0
    assert ran.out == (reports.directory / "out").read_bytes().decode()


@pytest.mark.parametrize("command", ["show", "diff"])
def test_a_step_summary_is_appended_whole_or_not_at_all(command: str, reports: Lucid) -> None:
    """On a disk that is nearly full the file is as it was, the loss is 9, and the error names the file."""
    summary = reports.directory / "summary.md"
    summary.write_text("# before\n")
    files = (REPORT,) * (1 + (command == "diff"))
    env = {"GITHUB_STEP_SUMMARY": str(summary), **UNCOMPILED}
    ran = reports("report", command, *files, "--step-summary", env=env, preexec_fn=files_end_at(300))
    assert (ran.code, ran.err) == (9, f"Error: {summary}: File too large\n")
    assert summary.read_text() == "# before\n"
    assert "verdict" in ran.out


def test_a_step_summary_that_is_full_is_named(reports: Lucid) -> None:
    """A device is no file that could be cut."""
    ran = reports("report", "show", REPORT, "--step-summary", env={"GITHUB_STEP_SUMMARY": "/dev/full"})
    assert (ran.code, ran.err) == (9, "Error: /dev/full: No space left on device\n")


def test_a_step_summary_may_be_a_pipe_that_was_handed_over(reports: Lucid) -> None:
    """To look at it."""
    ran = reports("report", "show", REPORT, "--step-summary", env={"GITHUB_STEP_SUMMARY": "/dev/stdout"})
    assert (ran.code, ran.err) == (0, "")
    assert "\n### captured against native" in ran.out


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain é", "plain é"), ("a\nb\r", "a\\nb\\r"), ("\x1b\u2028\x85", "\\x1b\\u2028\\x85"), ("\udcff", "\\udcff")],
)
def test_a_name_stays_on_its_line(text: str, shown: str) -> None:
    """Line ends, control characters and bytes that are no text are escapes."""
    assert one_line(text) == shown


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("report", "validate", TWO_LINES), 0),
        (("report", "validate", "torn\n.jsonl"), 7),
        (("report", "show", "torn\n.jsonl"), 0),
        (("report", "show", "miss\ning"), 7),
        (("report", "diff", TWO_LINES, "miss\ning"), 7),
        (("report", "export", TWO_LINES, "--to", "csv", "-o", "no\nfolder/out"), 2),
        (("report", "export", "torn\n.jsonl", "--to", "csv", "-o", "o\nut"), 0),
        (("report", "html", TWO_LINES, "-o", "p\nage"), 0),
        (("report", "html", TWO_LINES, "-o", TWO_LINES), 2),
        ((*RUN, "-o", TWO_LINES, "--", "true"), 2),
        ((*RUN, "-o", "n\new", "--", "true"), 0),
        ((*RUN, "-o", "n\new", "--", "miss\ning"), 127),
        (("profile", "run", "--resume", TWO_LINES), 2),
        (("profile", "attach", "1", "-o", TWO_LINES), 2),
    ],
    ids=ascii,
)
def test_a_message_that_names_a_file_is_one_line(args: tuple[str, ...], code: int, reports: Lucid) -> None:
    """Whatever the name holds: no message can be made to look like two."""
    whole = (reports.directory / REPORT).read_bytes()
    (reports.directory / TWO_LINES).write_bytes(whole)
    (reports.directory / "torn\n.jsonl").write_bytes(whole[:-5])
    ran = reports(*args)
    assert ran.code == code
    lines = [*ran.err.splitlines(), *(ran.out.splitlines() if args[1] == "validate" else ())]
    assert lines
    names = {name for word in args if "\n" in word for name in word.split("\n")}
    assert not [line for line in lines if line.startswith(tuple(names - {""})) and "\\n" not in line]
    assert [line for line in lines if "\\n" in line]
    assert ran.err.count("Error:") == int(code > 0)
    assert not ran.err or "\x1b" not in ran.err


def test_the_help_of_a_group_keeps_its_lines(lucid: Lucid) -> None:
    """It is shown as an error where no command is given, and is the only one of several lines."""
    assert len(lucid("report").err.splitlines()) > 5


@pytest.mark.parametrize(
    ("args", "words"),
    [(("profile", "run"), "0, or from 0.01 to 3600"), (("profile", "attach"), "from 0.01 to 3600")],
)
def test_the_help_says_which_intervals_there_are(args: tuple[str, ...], words: str, lucid: Lucid) -> None:
    """What it says and what is refused are the same."""
    shown = " ".join(lucid(*args, "--help").out.split())
    assert f"[default: 0.1; {words}]" in shown
    for value in ("0.001", "3601", "nan", "-1"):
        ran = lucid(*args, "--interval", value, "1")
        assert ran.code == 2
        assert f"{words}." in " ".join(ran.err.split()) or value == "nan"
