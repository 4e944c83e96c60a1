"""Checkpoint files: whole or not there, and refused where they do not belong."""

from pathlib import Path

import pytest
import torch

from lucid_cli.workloads.detection.checkpoint import (
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from lucid_cli.workloads.detection.errors import WorkloadError


def test_contents_come_back(tmp_path: Path) -> None:
    """Tensors, numbers and nested dicts survive, in a folder that did not exist."""
    path = tmp_path / "made" / "last.pt"
    save_checkpoint(path, {"settings": {"seed": 1}, "model": {"weight": torch.arange(3.0)}, "losses": [0.5]})
    contents = load_checkpoint(path, settings={"seed": 1})
    assert contents["model"]["weight"].tolist() == [0.0, 1.0, 2.0]
    assert contents["losses"] == [0.5]
    assert [entry.name for entry in path.parent.iterdir()] == ["last.pt"]


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """What cannot be saved replaces nothing and leaves no fragment."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"settings": {}})
    before = path.read_bytes()
    (tmp_path / "last.pt.part").mkdir()
    with pytest.raises(WorkloadError, match="cannot be written"):
        save_checkpoint(path, {"settings": {}})
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["missing", "cut", "text"])
def test_an_unreadable_checkpoint_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    """The file is named."""
    path = tmp_path / "last.pt"
    if damage == "cut":
        save_checkpoint(path, {"settings": {}})
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "text":
        path.write_text("not a checkpoint")
    with pytest.raises(WorkloadError, match=r"last\.pt cannot be read"):
        load_checkpoint(path, settings={})


def test_a_checkpoint_of_other_settings_is_refused_with_both_values(tmp_path: Path) -> None:
    """Resuming under another batch size would not equal an uninterrupted run."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"settings": {"batch": 4, "seed": 1}})
    with pytest.raises(WorkloadError, match="batch 4 then, 8 now"):
        load_checkpoint(path, settings={"batch": 8, "seed": 1})


def test_random_numbers_go_on_where_they_were() -> None:
    """Restoring the generators repeats what followed."""
    state = random_state()
    first = torch.randn(4)
    restore_random_state(state)
    assert torch.randn(4).tolist() == first.tolist()
