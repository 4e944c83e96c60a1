import gc
from pathlib import Path

import click
import pytest

from lucid_cli.app import cli
from lucid_cli.command import CannotStartError, cannot_start, resolve_program


def _executable(path: Path, text: str = "#!/bin/sh\n", mode: int = 0o755) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_bare_name_is_what_path_says(tmp_path: Path) -> None:
    """The first directory of PATH that has an executable of that name wins, as in a shell."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    _executable(tmp_path / "a" / "tool", mode=0o644)
    second = _executable(tmp_path / "b" / "tool")
    assert resolve_program(["tool", "x"], {"PATH": f"{tmp_path}/a:{tmp_path}/b"}) == str(second)


@pytest.mark.parametrize(
    ("name", "exit_code", "cause"),
    [
        ("missing", 127, "not found in PATH"),
        ("./missing", 127, "no such file"),
        ("plain", 126, "is not executable"),
        ("folder", 126, "is a directory"),
        ("script", 127, "its interpreter /nowhere/python does not exist"),
        ("", 127, "empty"),
    ],
)
def test_the_cause_and_the_exit_code_are_those_of_a_shell(
    tmp_path: Path, name: str, exit_code: int, cause: str
) -> None:
    """127 where nothing is found, 126 where it cannot be executed, and the cause in words."""
    _executable(tmp_path / "plain", mode=0o644)
    (tmp_path / "folder").mkdir()
    _executable(tmp_path / "script", "#!/nowhere/python -u\n")
    with pytest.raises(CannotStartError, match=cause) as caught:
        resolve_program([name], {"PATH": str(tmp_path)})
    assert caught.value.exit_code == exit_code


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (FileNotFoundError(2, "No such file or directory"), 127),
        (PermissionError(13, "Permission denied"), 126),
        (OSError(8, "Exec format error"), 126),
    ],
)
def test_the_systems_refusal_keeps_its_words(error: OSError, exit_code: int) -> None:
    """What the system says when it will not execute a file becomes the message."""
    refused = cannot_start("tool", error)
    assert str(refused) == f"tool: {error.strerror}"
    assert refused.exit_code == exit_code


def test_a_command_that_was_found_has_garbage_collected() -> None:
    """The collector rests while modules are imported, and no longer."""
    gc.disable()
    try:
        assert cli.get_command(click.Context(cli), "doctor") is not None
        assert gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
