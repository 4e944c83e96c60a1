"""A checkpoint: everything that a resumed fit needs to go on to the byte."""

import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lucid_cli.workloads.detection.errors import WorkloadError

__all__ = ["load_checkpoint", "random_state", "restore_random_state", "save_checkpoint"]


def save_checkpoint(path: Path, contents: dict[str, Any]) -> None:
    """Write a checkpoint beside `path` and rename it, so that `path` is never half written.

    Raises:
        WorkloadError: If it cannot be written; what stood at `path` is still there.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(contents, temporary)
        os.replace(temporary, path)  # noqa: PTH105 - pathlib's replace is this call
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            temporary.unlink()
        raise WorkloadError(
            f"the checkpoint {path} cannot be written: {error}; free space or name another folder"
        ) from error


def load_checkpoint(path: Path, *, settings: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint and check that it belongs to a fit of these settings.

    Args:
        path: A file that `save_checkpoint` wrote.
        settings: What must be the same for the resumed run to equal an uninterrupted one.

    Raises:
        WorkloadError: If it cannot be read, or was written under other settings; the message names them.
    """
    try:
        contents: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        saved = contents["settings"]
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise WorkloadError(f"the checkpoint {path} cannot be read: {error}") from error
    changed = [name for name in settings if saved.get(name) != settings[name]]
    if changed:
        listed = ", ".join(f"{name} {saved.get(name)!r} then, {settings[name]!r} now" for name in changed)
        raise WorkloadError(
            f"the checkpoint {path} is of another fit: {listed}; start anew or pass what it was made with"
        )
    return contents


def random_state() -> dict[str, Any]:
    """Return the state of torch's generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    """Set torch's generators back to what `random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
