"""Checkpoint files: whole or not there, refused where they do not belong, and never over a file of another kind."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_cli.workloads.detection.checkpoint import (
    claim_file,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from lucid_cli.workloads.detection.errors import WorkloadError


def contents(**changes: Any) -> dict[str, Any]:
    """Return what a checkpoint after one epoch holds, in small."""
    return {"settings": {}, "epoch": 1, "trainer": {}, "precisions": [{}], "random": {}, **changes}


def test_contents_come_back(tmp_path: Path) -> None:
    """Tensors, numbers and nested dicts survive, in a folder that did not exist, with the usual permissions."""
    path = claim_file(tmp_path / "made" / "last.pt", resume=False)
    save_checkpoint(path, contents(settings={"seed": 1}, trainer={"weight": torch.arange(3.0)}))
    loaded = load_checkpoint(path, settings={"seed": 1}, epochs=1)
    assert loaded["trainer"]["weight"].tolist() == [0.0, 1.0, 2.0]
    assert [entry.name for entry in path.parent.iterdir()] == ["last.pt"]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be saved replaces nothing and leaves no fragment; the advice fits the cause."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, contents())
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(WorkloadError, match=r"cannot be written \(No space left on device\): free space"):
        save_checkpoint(path, contents())
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("last.pt", before)]


def test_two_fits_at_once_do_not_share_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one that writes while the first does has a name of its own."""
    path = tmp_path / "last.pt"
    names = []
    move = Path.replace

    def replace(self: Path, target: Path) -> None:
        names.append(self.name)
        if len(names) == 1:
            save_checkpoint(path, contents())
        move(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    save_checkpoint(path, contents())
    assert len(set(names)) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.pt"]


def make_folder(path: Path) -> None:
    """Make a folder."""
    path.mkdir()


def make_text(path: Path) -> None:
    """Write a text."""
    path.write_text("a diary")


def make_model(path: Path) -> None:
    """Write a file of torch's that is no checkpoint of ours."""
    torch.save({"weight": torch.zeros(2)}, path)


def make_circle(path: Path) -> None:
    """Link a file to itself."""
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_folder, "is no regular file"),
        (os.mkfifo, "is no regular file"),
        (make_text, "is there already and is no checkpoint"),
        (make_model, "is there already and is no checkpoint"),
        (Path.touch, "is there already and is no checkpoint"),
        (make_circle, "cannot be written|is no regular file"),
    ],
)
def test_what_is_no_checkpoint_is_not_overwritten(tmp_path: Path, make: Any, message: str) -> None:
    """It is refused before anything is trained, and stays as it is."""
    path = tmp_path / "last.pt"
    make(path)
    before = path.lstat()
    with pytest.raises(WorkloadError, match=message):
        claim_file(path, resume=False)
    assert path.lstat().st_ino == before.st_ino
    assert path.lstat().st_size == before.st_size
    assert len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_of_this_program_may_be_written_again(tmp_path: Path) -> None:
    """A fit may be repeated; through a link the file that it leads to is written, and the link stays."""
    path, link = tmp_path / "last.pt", tmp_path / "link.pt"
    save_checkpoint(path, contents())
    link.symlink_to(path)
    file = claim_file(link, resume=False)
    save_checkpoint(file, contents(epoch=2, precisions=[{}, {}]))
    assert link.is_symlink()
    assert load_checkpoint(path, settings={}, epochs=2)["epoch"] == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text/last.pt", r"\(Not a directory\): a part of the path is a file"),
        ("n" * 250, r"\(File name too long\): use a shorter name"),
    ],
)
def test_a_place_where_nothing_can_be_written_is_found_before_training(tmp_path: Path, name: str, message: str) -> None:
    """The cause and what to do about it are in the message."""
    (tmp_path / "text").touch()
    with pytest.raises(WorkloadError, match=message):
        claim_file(tmp_path / name, resume=False)


def test_nothing_to_go_on_from_is_one_clear_error(tmp_path: Path) -> None:
    """The remedy is to start anew."""
    with pytest.raises(WorkloadError, match=r"no checkpoint .*last\.pt to go on from: leave --resume away"):
        claim_file(tmp_path / "last.pt", resume=True)


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "list", "tensor"])
def test_a_file_that_holds_something_else_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    """The file is named, in one line of our own."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, contents())
    whole = path.read_bytes()
    if damage == "list":
        torch.save([1, 2], path)
    elif damage == "tensor":
        torch.save(torch.zeros(3), path)
    else:
        path.write_bytes({"empty": b"", "cut": whole[:-20], "text": b"not a checkpoint"}[damage])
    with pytest.raises(WorkloadError, match=r"last\.pt is no checkpoint of this program, or a damaged one") as caught:
        load_checkpoint(path, settings={}, epochs=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", range(0, 1400, 60))
def test_damaged_bytes_are_never_a_traceback(tmp_path: Path, place: int) -> None:
    """Wherever they lie, they are one error, or do not matter."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, contents(trainer={"weight": torch.arange(3.0)}))
    damaged = bytearray(path.read_bytes())
    damaged[place : place + 40] = b"\xa5" * 40
    path.write_bytes(damaged)
    try:
        load_checkpoint(path, settings={}, epochs=1)
    except WorkloadError as error:
        assert "is no checkpoint" in str(error)  # noqa: PT017 - most places raise, some do not matter


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": [1]},
        {"epoch": "1"},
        {"epoch": True},
        {"epoch": 0, "precisions": []},
        {"epoch": 3, "precisions": [{}] * 3},
        {"precisions": []},
        {"trainer": None},
        {"random": []},
    ],
)
def test_a_checkpoint_of_another_shape_is_one_clear_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A field of another type, and an epoch that this fit does not have."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, contents(**changes))
    with pytest.raises(WorkloadError, match="is no checkpoint of this program, or a damaged one"):
        load_checkpoint(path, settings={}, epochs=2)


def test_a_checkpoint_of_other_settings_is_refused_with_both_values(tmp_path: Path) -> None:
    """Resuming under another batch size would not equal an uninterrupted run; a tensor is no batch size at all."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, contents(settings={"batch": 4, "seed": 1}))
    with pytest.raises(WorkloadError, match="batch 4 then, 8 now"):
        load_checkpoint(path, settings={"batch": 8, "seed": 1}, epochs=1)
    save_checkpoint(path, contents(settings={"batch": torch.zeros(2)}))
    with pytest.raises(WorkloadError, match="batch tensor"):
        load_checkpoint(path, settings={"batch": 8}, epochs=1)


def test_random_numbers_go_on_where_they_were() -> None:
    """Restoring the generators repeats what followed."""
    state = random_state()
    first = torch.randn(4)
    restore_random_state(state)
    assert torch.randn(4).tolist() == first.tolist()
