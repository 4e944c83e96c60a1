"""The words that reports use for codes."""

import os
import shlex
import subprocess

import pytest

from lucid_cli.reporters.words import _REASONS, abbreviated
from lucid_optim import REASONS


def test_every_reason_of_capture_has_words() -> None:
    """Reports name each reason that an optimizer can count."""
    assert REASONS.keys() <= _REASONS.keys()
    assert "not_implemented" not in _REASONS


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py", "--name", "a b"],
        ["echo", "a\nb", "e\tf", "it's\r\x1b[0m", "\\n\n", "'", "''\n''", '"\n"'],
        ["echo", "\u00a0", "\u0085ä", "\U000e0001", "\udcff\udc80" + "1", "\x017"],
    ],
)
def test_a_command_can_be_pasted(command: list[str]) -> None:
    """What is shown is one line without anything invisible, and a shell makes the same words of it."""
    shown = abbreviated(shlex.join(command))
    assert shown.isprintable()
    pasted = f"printf '%s\\0' {shown.removeprefix(command[0])}"
    done = subprocess.run(["bash", "-c", pasted], stdout=subprocess.PIPE, check=True, env={"LC_ALL": "C.UTF-8"})
    assert [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]] == command[1:]


def test_a_plain_command_is_shown_as_it_was_quoted() -> None:
    """Nothing changes where everything can be seen."""
    text = shlex.join(["python", "it's", "a b", "é", "\\n"])
    assert abbreviated(text) == text
