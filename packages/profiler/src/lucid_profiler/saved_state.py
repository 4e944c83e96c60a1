"""Keeps the values behind digests, one file a part, and reads them back; docs/parity.md describes the files.

A file appears whole or not at all. Values are read as the digest reads them, device tensors one at a time.
"""

import errno
import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lucid_profiler.awaited import STATE_VARIABLE
from lucid_profiler.digest import _flatten, _leaf, _numbered, _unique_names
from lucid_profiler.errors import ReportError
from lucid_profiler.journal import is_of_a_signal
from lucid_profiler.snapshot import rank

FORMAT = "lucid.saved/1"
SUFFIX = ".state"
NAME_VARIABLE = "LUCID_SAVE_NAME"
STEP_VARIABLE = "LUCID_SAVE_STEP"
RESERVE_BYTES = 64 * 2**20  # of the disk: the program may be about to write there itself

_MAX_LINE_BYTES = 64 * 2**20
_MAX_NAME_CHARS = 60
_ROOT_NAME = "(value)"

__all__ = [
    "FORMAT",
    "NAME_VARIABLE",
    "RESERVE_BYTES",
    "STATE_VARIABLE",
    "STEP_VARIABLE",
    "SUFFIX",
    "ProcessIdentity",
    "SavedLeaf",
    "StateSaver",
    "command_digest",
    "process_folders",
    "process_identity",
    "read_identity",
    "read_saved",
    "run_folder_name",
    "save_step_asked_for",
    "saved_file",
    "saver_asked_for",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """What tells which process of one run is the same as which of another."""

    rank: int | None
    command: str
    """First 16 hex digits of SHA-256 over the process's arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLeaf:
    """One tensor, or one value beside the tensors, as it was digested."""

    name: str
    """As in a report: the steps of its path joined by dots."""
    path: tuple[tuple[str, str], ...]
    """Letter and key of each step."""
    kind: str
    """`tensor`, `plain`, or `wrapper`."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, 0 where they address nothing."""
    data: bytes
    """Row-major, little-endian."""


def run_folder_name(run: int, arm: str) -> str:
    """Return the name under which the state of a report's run is saved: what `tools/rehash.py` expects."""
    return _safe(f"run{run}-{arm}")


def saved_file(folder: Path, part: str) -> Path:
    """Return where a part is saved in the folder of a process; the part itself is named in the file's first line."""
    digest = hashlib.sha256(part.encode("utf-8", "surrogatepass")).hexdigest()
    return folder / f"{_safe(part)}-{digest[:8]}{SUFFIX}"


def process_folders(run_folder: Path) -> list[Path]:
    """Return the folders of the processes that saved something, in the order of their names."""
    return sorted(path for path in run_folder.glob("process-*") if path.is_dir())


def command_digest() -> str:
    """Return what stands for the arguments of this process."""
    arguments = "\0".join(sys.orig_argv).encode("utf-8", "surrogatepass")
    return hashlib.sha256(arguments).hexdigest()[:16]


def process_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    return ProcessIdentity(rank=rank(), command=command_digest())


def save_step_asked_for(environ: Mapping[str, str]) -> int | None:
    """Return the step around which the environment asks for the state; None if it does not.

    Raises:
        ValueError: `LUCID_SAVE_STEP` is no step.
    """
    text = environ.get(STEP_VARIABLE, "").strip()
    if not text or not environ.get(STATE_VARIABLE):
        return None
    if not text.isascii() or not text.isdecimal() or int(text[:18]) < 1:
        raise ValueError(f"{STEP_VARIABLE} is {text!r:.40}, expected the number of a step from 1")
    return int(text[:18])


def saver_asked_for(
    environ: Mapping[str, str], note: Callable[[str], None], *, process: str | None = None
) -> "StateSaver | None":
    """Return what saves states where the environment names a directory, else None.

    Args:
        environ: `LUCID_SAVE_STATE` names the directory, `LUCID_SAVE_NAME` the folder in it that belongs to this run.
        note: Is told what could not be saved.
        process: Name of the process, by default its pid.
    """
    directory = environ.get(STATE_VARIABLE)
    if not directory:
        return None
    name = _safe(environ.get(NAME_VARIABLE) or "run")
    # Absolute, because the program may change its directory.
    return StateSaver(Path(directory).absolute() / name / f"process-{process or os.getpid()}", note=note)


class StateSaver:
    """Saves parts of the state of one process; what goes wrong is told to `note` and raises nothing.

    Args:
        folder: Of the process; made when something is saved.
        note: Is told what could not be saved.
    """

    def __init__(self, folder: Path, *, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._note = note

    def below(self, name: str) -> "StateSaver":
        """Return a saver for a folder inside this one."""
        return StateSaver(self._folder / name, note=self._note)

    def save(self, part: str, state: Any) -> bool:
        """Save one part, in place of what was saved of it before; return whether it is saved."""
        path = saved_file(self._folder, part)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            _write_whole(path, part, state)
        except (OSError, TypeError, ValueError, RuntimeError) as error:
            if is_of_a_signal(error):
                raise
            self._note(f"the values of {part!r} were not saved: {error}"[:500])
            return False
        return True


def read_identity(path: Path) -> ProcessIdentity:
    """Return which process saved a file.

    Raises:
        ReportError: It is not one of these files.
        OSError: It cannot be opened.
    """
    with path.open("rb") as file:
        header = _read_header(path, file)
    try:
        return ProcessIdentity(rank=header["rank"], command=str(header["command"]))
    except KeyError as error:
        raise ReportError(str(path), 1, f"the first line lacks {error}") from error


def read_saved(path: Path, *, only: str | None = None) -> Iterator[SavedLeaf]:
    """Yield the leaves of a saved part in the order of the digest, one in memory at a time.

    Args:
        path: The file.
        only: The name of the one leaf that is wanted; the bytes of the others are passed over.

    Raises:
        ReportError: It is not one of these files, or it is damaged or cut off.
        OSError: It cannot be opened.
    """
    names: dict[str, int] = {}
    with path.open("rb") as file:
        _read_header(path, file)
        while "end" not in (line := _read_line(path, file)):
            try:
                steps = tuple((letter, _from_text(key)) for letter, key in line["path"])
                name = _numbered(".".join(key for _, key in steps) or _ROOT_NAME, names)
                data = _read_data(path, file, line["bytes"], is_wanted=only in (None, name))
                leaf = SavedLeaf(
                    name=name,
                    path=steps,
                    kind=line["kind"],
                    dtype=line["dtype"],
                    shape=tuple(line["shape"]),
                    strides=tuple(line["strides"]),
                    data=data,
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ReportError(str(path), None, f"a line of it describes no leaf: {error!r:.100}") from error
            if only in (None, name):
                yield leaf
        if line["end"] != len(names):
            raise ReportError(str(path), None, f"it holds {len(names)} leaves and says {line['end']}")


def _safe(name: str) -> str:
    """Return a file name that resembles `name`."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_MAX_NAME_CHARS].lstrip(".") or "_"


def _write_whole(path: Path, part: str, state: Any) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            _write(file, part, state)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write(file: BinaryIO, part: str, state: Any) -> None:
    identity = process_identity()
    file.write(_line({"format": FORMAT, "part": _to_text(part), "rank": identity.rank, "command": identity.command}))
    entries = sorted(_flatten(state, b"", (), 0), key=lambda entry: entry.path)
    for entry, name in zip(entries, _unique_names(entries), strict=True):
        leaf = _leaf(entry.value, name)
        num_bytes = len(leaf.data)
        _check_room(file, num_bytes)
        described = {"kind": leaf.kind, "dtype": leaf.dtype, "shape": leaf.shape, "strides": leaf.strides}
        path = [[letter, _to_text(key)] for letter, key in _steps(entry.path)]
        file.write(_line({"path": path, **described, "bytes": num_bytes}))
        file.write(leaf.data)
        file.write(b"\n")
        del leaf  # before the next one comes to the host
    file.write(_line({"end": len(entries)}))


def _check_room(file: BinaryIO, num_bytes: int) -> None:
    """Refuse to fill the disk, which the program may need.

    Raises:
        OSError: There would be less than the reserve left.
    """
    found = os.fstatvfs(file.fileno())
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < num_bytes + RESERVE_BYTES:
        text = f"{free_bytes:,} bytes are free, {num_bytes:,} are needed and {RESERVE_BYTES:,} stay free"
        raise OSError(errno.ENOSPC, text)


def _steps(path: bytes) -> Iterator[tuple[str, str]]:
    """Yield letter and key of each step of a path as the digest encodes it."""
    place = 8
    for _ in range(struct.unpack_from("<q", path)[0]):
        (length,) = struct.unpack_from("<q", path, place + 1)
        begin = place + 9
        yield chr(path[place]), path[begin : begin + length].decode("utf-8", "surrogatepass")
        place = begin + length


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode("ascii") + b"\n"


def _to_text(text: str) -> str | dict[str, str]:
    """Return what JSON carries exactly: the text, or the hex digits of its UTF-8 where it holds surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return {"utf8": text.encode("utf-8", "surrogatepass").hex()}
    return text


def _from_text(found: Any) -> str:
    if isinstance(found, dict):
        return bytes.fromhex(found["utf8"]).decode("utf-8", "surrogatepass")
    if not isinstance(found, str):
        raise TypeError(f"{found!r:.40} is no text")
    return found


def _read_header(path: Path, file: BinaryIO) -> dict[str, Any]:
    header = _read_line(path, file)
    if header.get("format") != FORMAT:
        raise ReportError(str(path), 1, f"it is no saved state of the format {FORMAT}")
    return header


def _read_line(path: Path, file: BinaryIO) -> dict[str, Any]:
    line = file.readline(_MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise ReportError(str(path), None, "it is cut off")
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ReportError(str(path), None, f"it is damaged: {error}") from error
    if not isinstance(fields, dict):
        raise ReportError(str(path), None, "it is damaged: a line holds no object")
    return fields


def _read_data(path: Path, file: BinaryIO, num_bytes: int, *, is_wanted: bool) -> bytes:
    if is_wanted:
        data = file.read(num_bytes)
    else:
        file.seek(num_bytes, os.SEEK_CUR)
        data = b""
    if (is_wanted and len(data) != num_bytes) or file.read(1) != b"\n":
        raise ReportError(str(path), None, "it is cut off or damaged")
    return data
