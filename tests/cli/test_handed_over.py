"""What the runs are handed: standard input, other descriptors, and the directory they run in."""

import io
import os
import subprocess
import sys

import pytest

from cli.harness import LUCID, Lucid
from lucid_cli.child import run_child
from lucid_cli.interrupts import Interrupts
from lucid_cli.prepare import read_stdin

CHANGES_ITS_INPUT = (
    "cat; exec 2>/dev/null; echo more >&0; printf x 1<>/dev/stdin; (: >/dev/stdin); truncate -s 1 /dev/stdin"
)


def test_no_run_changes_what_the_next_one_reads(lucid: Lucid) -> None:
    """Neither through the descriptor that it has, nor by opening it once more, be it as root."""
    script = lucid.directory / "words.txt"
    script.write_text("abc\n")
    for command in (CHANGES_ITS_INPUT, "read first; exit 0"):
        with script.open("rb") as stdin:
            ran = lucid.profile("sh", "-c", f"{command}; true", options=("--stdin", "--no-agent", "-v"), stdin=stdin)
        assert ran.code == 0
        assert ran.err.count("abc\n") == (2 if command == CHANGES_ITS_INPUT else 0)
        assert "xbc" not in ran.err
        assert "more" not in ran.err
    assert script.read_text() == "abc\n"


def test_long_input_is_no_runs_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too long for memory lies in a file that only root could open for writing."""
    monkeypatch.setattr("lucid_cli.prepare._MAX_SEALED_BYTES", 3)
    for content in (b"abc", b"abcd"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        with read_stdin() as kept, Interrupts() as interrupts:
            assert bool(os.fstat(kept.fileno()).st_mode & 0o222) == (content == b"abc")
            for _ in range(2):
                ended = run_child(["sh", "-c", "cat; echo more >&0"], os.environ, interrupts=interrupts, stdin=kept)
                assert f"{content.decode()}\n--- standard error" in ended.output_tail
                assert ended.returncode != 0


def test_a_descriptor_that_the_runs_do_not_get_is_named(lucid: Lucid) -> None:
    """A shell's <(...) can be read only once; standard input and a command of the shell's own are as they were."""
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing):
        ran = lucid.profile("cat", f"/dev/fd/{reading}", pass_fds=(reading,))
    assert ran.code == 8
    assert f"Warning: /dev/fd/{reading} is closed in the runs" in ran.err
    assert "Warning" not in lucid.profile("cat", "/dev/fd/0", "/dev/stdin").err
    assert "Warning" not in lucid.profile("bash", "-c", "cat <(echo hi)").err


def test_a_deleted_working_directory_is_named(lucid: Lucid) -> None:
    """With what to do about it, and nothing is begun."""
    gone = lucid.directory / "gone"
    gone.mkdir()
    script = 'rmdir ../gone; exec "$0" profile run -- true'
    done = subprocess.run(
        ["sh", "-c", script, LUCID], cwd=gone, check=False, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 9
    assert done.stderr.startswith("Error: the working directory has been deleted; change to one that exists (cd)")
    assert done.stderr.count("\n") == 1
