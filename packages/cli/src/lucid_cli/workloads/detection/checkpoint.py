"""A checkpoint: everything that a resumed fit needs to go on to the byte."""

import errno
import io
import os
import pickle
import secrets
import stat
import struct
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lucid_cli.workloads.detection.errors import WorkloadError

__all__ = ["claim_file", "damaged", "load_checkpoint", "random_state", "restore_random_state", "save_checkpoint"]

FORMAT = "lucid_cli.workloads.detection/1"
"""What a checkpoint says that it is; another file is neither resumed nor overwritten."""
_FIELDS = {"settings": dict, "epoch": int, "trainer": dict, "precisions": list, "random": dict}

# Whatever torch and pickle raise on bytes that are not theirs.
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
)

_ADVICE = {
    errno.EACCES: "name a file in a folder that you may write to",
    errno.EPERM: "name a file in a folder that you may write to",
    errno.EROFS: "name a file in a folder that you may write to",
    errno.EDQUOT: "free space, or name a file in another folder",
    errno.ENOSPC: "free space, or name a file in another folder",
    errno.EEXIST: "a part of the path is a file; name another folder",
    errno.ENOTDIR: "a part of the path is a file; name another folder",
    errno.ELOOP: "its symbolic links lead in a circle; name another file",
    errno.ENAMETOOLONG: "use a shorter name",
}


def claim_file(path: Path, *, resume: bool) -> Path:
    """Return the file that checkpoints go to, links followed, after making its folder and writing there on trial.

    Args:
        path: What the user named.
        resume: Whether a checkpoint must be there; else one may be, and no other file.

    Raises:
        WorkloadError: If a checkpoint cannot or must not be written there, or there is none to resume.
    """
    file = Path(os.path.realpath(path))
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise _unwritable(path, error) from error
    if mode is None and resume:
        raise WorkloadError(f"there is no checkpoint {path} to go on from: leave --resume away to start anew")
    if mode is not None and not stat.S_ISREG(mode):
        raise WorkloadError(f"{path} is no regular file, so no checkpoint can be written to it: name another file")
    if mode is not None and not resume and _contents(file) is None:
        raise WorkloadError(f"{path} is there already and is no checkpoint of this program: name another file")
    temporary = _temporary(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error
    return file


def save_checkpoint(path: Path, contents: dict[str, Any]) -> None:
    """Write a checkpoint beside `path` and rename it, so that `path` is never half written.

    Raises:
        WorkloadError: If it cannot be written; what stood at `path` is still there.
    """
    # Through memory, because torch's own writer does not say why it fails.
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **contents}, buffer)
    temporary = _temporary(path)
    try:
        with temporary.open("xb") as file:
            file.write(buffer.getbuffer())
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def load_checkpoint(path: Path, *, settings: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Read a checkpoint and check that it belongs to a fit of these settings.

    Args:
        path: A file that `save_checkpoint` wrote.
        settings: What must be the same for the resumed run to equal an uninterrupted one; plain values.
        epochs: How many there are; a checkpoint comes after one of them.

    Raises:
        WorkloadError: If it cannot be read, or was written under other settings; the message names them.
    """
    try:
        contents = _contents(path)
    except OSError as error:
        raise WorkloadError(f"the checkpoint {path} cannot be read: {error.strerror or error}") from error
    if contents is None:
        raise damaged(path)
    saved = contents["settings"]
    changed = [name for name, value in settings.items() if not _is_same(saved.get(name), value)]
    if changed:
        listed = ", ".join(f"{name} {saved.get(name)!r:.80} then, {settings[name]!r} now" for name in changed)
        raise WorkloadError(
            f"the checkpoint {path} is of another fit: {listed}; start anew or pass what it was made with"
        )
    if not 1 <= contents["epoch"] <= epochs or len(contents["precisions"]) != contents["epoch"]:
        raise damaged(path)
    return contents


def damaged(path: Path) -> WorkloadError:
    """Return the error of a file that does not hold what a checkpoint holds."""
    return WorkloadError(
        f"{path} is no checkpoint of this program, or a damaged one: name another file, or start anew with a new one"
    )


def random_state() -> dict[str, Any]:
    """Return the state of torch's generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    """Set torch's generators back to what `random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _contents(path: Path) -> dict[str, Any] | None:
    """Return what a checkpoint holds, None where the file is none.

    Raises:
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            return None
        file.seek(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on archives of other kinds
                contents: Any = torch.load(file, map_location="cpu", weights_only=True)
        except _UNREADABLE:
            return None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        return None
    return contents if all(type(contents.get(name)) is kind for name, kind in _FIELDS.items()) else None


def _is_same(saved: Any, value: Any) -> bool:
    return type(saved) is type(value) and bool(saved == value)


def _temporary(path: Path) -> Path:
    """Return a name in the same folder that no other fit uses."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


def _unwritable(path: Path, error: OSError) -> WorkloadError:
    advice = _ADVICE.get(error.errno or 0, "name another file")
    return WorkloadError(f"the checkpoint {path} cannot be written ({error.strerror or error}): {advice}")
