"""Confirms the digests of a report from the saved values themselves, with no code of lucid.

Written from docs/parity.md alone, with the standard library alone: it reads the files that `--save-state` left,
computes SHA-256 over them by the definition there, and compares with the report. Exit status: 0 all equal, 4 something
differs, 7 something is missing or cannot be read.
"""

import argparse
import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

EXIT_DIFFERENT = 4
EXIT_UNREADABLE = 7
CHUNK_BYTES = 2**20
FORMAT = "lucid.saved/1"
RUN_FOLDER = re.compile(r"run(\d+)-.*")


class UnreadableError(Exception):
    """A file that is not what docs/parity.md describes; the message names it."""


class Leaf(NamedTuple):
    """One leaf as it was hashed here."""

    digest: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Part:
    """One part of one process, as it was hashed here."""

    name: str
    rank: int | None
    digest: str = ""
    strides_digest: str = ""
    leaves: dict[str, Leaf] = field(default_factory=dict)


def number(value: int) -> bytes:
    """Encode a number: 64 bits, signed, little-endian."""
    return value.to_bytes(8, "little", signed=True)


def numbers(values: Sequence[int]) -> bytes:
    """Encode how many there are, then each."""
    return number(len(values)) + b"".join(number(value) for value in values)


def counted(data: bytes) -> bytes:
    """Encode a text, given as its bytes: their number, then they."""
    return number(len(data)) + data


def rehash(path: Path) -> Part:
    """Hash the part in one saved file.

    Raises:
        UnreadableError: The file is damaged or cut off.
    """
    try:
        with path.open("rb") as file:
            return _rehash(path, file)
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{path}: {error!r:.200}") from error


def _rehash(path: Path, file: BinaryIO) -> Part:
    header = _line(path, file)
    if header.get("format") != FORMAT:
        raise UnreadableError(f"{path}: it is not of the format {FORMAT}")
    part = Part(_text(header["part"]).decode("utf-8", "surrogatepass"), header["rank"])
    state, layout = hashlib.sha256(counted(b"lucid.state/1")), hashlib.sha256(counted(b"lucid.strides/1"))
    last_path = b""
    while "end" not in (line := _line(path, file)):
        keys = [_text(key) for _, key in line["path"]]
        steps = b"".join(
            letter.encode("ascii") + counted(key) for (letter, _), key in zip(line["path"], keys, strict=True)
        )
        leaf_path = number(len(keys)) + steps
        if leaf_path <= last_path:
            raise UnreadableError(f"{path}: its leaves are not in the order of their paths")
        last_path = leaf_path
        digest = _hash_leaf(path, file, line)
        state.update(leaf_path + digest)
        layout.update(leaf_path + numbers(line["strides"]))
        name = b".".join(keys).decode("utf-8", "surrogatepass") or "(value)"
        unique, place = name, 1
        while unique in part.leaves:
            place += 1
            unique = f"{name} ({place})"
        part.leaves[unique] = Leaf(digest.hex()[:16], line["dtype"], tuple(line["shape"]))
    if line["end"] != len(part.leaves) or file.read(1):
        raise UnreadableError(f"{path}: its end does not fit what is before it")
    part.digest, part.strides_digest = state.hexdigest(), layout.hexdigest()
    return part


def _hash_leaf(path: Path, file: BinaryIO, line: dict[str, Any]) -> bytes:
    head = counted(b"lucid.leaf/1") + counted(line["kind"].encode()) + counted(line["dtype"].encode())
    hashed = hashlib.sha256(head + numbers(line["shape"]) + number(line["bytes"]))
    left = line["bytes"]
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise UnreadableError(f"{path}: it is cut off")
        hashed.update(chunk)
        left -= len(chunk)
    if file.read(1) != b"\n":
        raise UnreadableError(f"{path}: it is cut off or damaged")
    return hashed.digest()


def _line(path: Path, file: BinaryIO) -> dict[str, Any]:
    line = file.readline()
    if not line.endswith(b"\n"):
        raise UnreadableError(f"{path}: it is cut off")
    found = json.loads(line)
    if not isinstance(found, dict):
        raise UnreadableError(f"{path}: a line holds no object")
    return found


def _text(found: Any) -> bytes:
    """Return the UTF-8 of a text in a saved file."""
    return bytes.fromhex(found["utf8"]) if isinstance(found, dict) else found.encode("utf-8")


def read_report(path: Path) -> dict[int, dict[int, list[dict[str, Any]]]]:
    """Return the `state` records of a report by run and process.

    Raises:
        UnreadableError: The report cannot be read.
    """
    found: dict[int, dict[int, list[dict[str, Any]]]] = {}
    try:
        with path.open("rb") as file:
            if not file.peek(1):
                raise UnreadableError(f"{path}: it is empty")
            for line in file:
                record = json.loads(line)
                if record["t"] == "state":
                    record["part"] = _report_text(record["part"])
                    record["tensors"] = {_report_key(key): value for key, value in record["tensors"].items()}
                    found.setdefault(record["run"], {}).setdefault(record["process"], []).append(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{path}: {error!r:.200}") from error
    return found


def _report_text(found: Any) -> str:
    """Return a text as a report writes it: with surrogates it is an object with the hex digits of its bytes."""
    if not isinstance(found, dict):
        return str(found)
    (tag, digits) = next(iter(found.items()))
    return bytes.fromhex(digits).decode("utf-8", "surrogateescape" if tag == "$bytes" else "surrogatepass")


def _report_key(key: str) -> str:
    """Return the key of an object as a report writes it: `$` is doubled at its begin, or announces hex digits."""
    if key.startswith(("$bytes:", "$surrogates:")):
        tag, _, digits = key.partition(":")
        return _report_text({tag: digits})
    return key[1:] if key.startswith("$$") else key


def check_run(run: int, folder: Path, processes: dict[int, list[dict[str, Any]]]) -> tuple[list[str], int]:
    """Compare everything that one run saved with what the report says of it.

    Returns:
        Lines for people, and the exit status.

    Raises:
        UnreadableError: A saved file cannot be read.
    """
    saved = [
        parts
        for process in sorted(folder.glob("process-*"))
        if (parts := [rehash(path) for path in sorted(process.glob("*.state"))])
    ]
    lines: list[str] = []
    statuses = [0]
    waiting = dict(processes)
    for parts in saved:
        process = _counterpart(parts, waiting)
        if process is None:
            lines.append(f"different  run {run}: more processes saved their state than the report has")
            statuses.append(EXIT_DIFFERENT)
            continue
        records = {record["part"]: record for record in waiting.pop(process)}
        for part in parts:
            found, is_equal = _check_part(f"run {run} process {process}", part, records.pop(part.name, None))
            lines += found
            statuses.append(0 if is_equal else EXIT_DIFFERENT)
        lines += [
            f"missing    run {run} process {process}  {_printable(name)}: it was not saved" for name in sorted(records)
        ]
        statuses.append(EXIT_UNREADABLE if records else 0)
    lines += [f"missing    run {run} process {process}: nothing of it was saved" for process in sorted(waiting)]
    statuses.append(EXIT_UNREADABLE if waiting else 0)
    return lines, max(statuses)


def _counterpart(parts: list[Part], processes: dict[int, list[dict[str, Any]]]) -> int | None:
    """Return the process of the report that saved these parts: of the same rank, else the one most alike."""
    digests = {part.name: part.digest for part in parts}

    def likeness(process: int) -> tuple[bool, int, int]:
        records = processes[process]
        is_same_rank = parts[0].rank is not None and records[0].get("rank") == parts[0].rank
        num_equal = sum(digests.get(record["part"]) == record["digest"] for record in records)
        return is_same_rank, num_equal, -process

    return max(processes, key=likeness, default=None)


def _check_part(where: str, part: Part, record: dict[str, Any] | None) -> tuple[list[str], bool]:
    where = f"{where}  {_printable(part.name)}"
    if record is None:
        return [f"different  {where}: the report does not have it"], False
    told = {name: Leaf(digest, dtype, tuple(shape)) for name, (digest, dtype, shape) in record["tensors"].items()}
    is_equal = part.digest == record["digest"]
    problems = [] if is_equal else [f"saved {part.digest}, report {record['digest']}"]
    if part.strides_digest != record["strides_digest"]:
        problems.append("other strides")
    lines = []
    # A report leaves out the tensors of a part that has very many.
    for name in sorted(part.leaves.keys() | told.keys()) if told else ():
        mine, theirs = part.leaves.get(name), told.get(name)
        leaf = mine or theirs
        shown = f"{leaf.dtype}{list(leaf.shape)}" if leaf else ""
        difference = f": saved {_shown(mine)}, report {_shown(theirs)}" if mine != theirs else ""
        lines.append(f"{_word(mine == theirs)}  {where}  {_printable(name)}  {shown}{difference}")
        is_equal &= mine == theirs
    found = f"{len(part.leaves)} tensors and values"
    lines.append(f"{_word(not problems)}  {where}  {'; '.join(problems) or found}")
    return lines, is_equal and not problems


def _word(is_equal: bool) -> str:
    return "equal    " if is_equal else "different"


def _shown(leaf: Leaf | None) -> str:
    return f"{leaf.digest} {leaf.dtype}{list(leaf.shape)}" if leaf else "nothing"


def _printable(name: str) -> str:
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in name)


def _run_folders(saved: Path, run: int | None) -> Iterator[tuple[int | None, Path]]:
    """Yield number and folder of each saved run; None where the name does not say the number."""
    folders = [saved] if any(saved.glob("process-*")) else sorted(path for path in saved.glob("*") if path.is_dir())
    for folder in folders:
        match = RUN_FOLDER.fullmatch(folder.resolve().name)
        yield run if run is not None and len(folders) == 1 else int(match[1]) if match else None, folder


def _check_folder(run: int | None, folder: Path, states: dict[int, dict[int, list[dict[str, Any]]]]) -> int | None:
    """Print what is found in the folder of a run; return the exit status, None where nothing was and is to be."""
    if run is None:
        print(f"{folder}: its name does not begin with run<number>-; say which run with --run", file=sys.stderr)
        return EXIT_UNREADABLE
    if run not in states:
        if not any(folder.glob("process-*/*.state")):
            return None
        print(f"different  run {run}: it was saved, and the report has no state of it")
        return EXIT_DIFFERENT
    try:
        lines, status = check_run(run, folder, states[run])
    except UnreadableError as error:
        print(error, file=sys.stderr)
        return EXIT_UNREADABLE
    print("\n".join(lines))
    return status


def _check_all(report: Path, saved: Path, run: int | None) -> int:
    states = read_report(report)
    if run is not None and run not in states:
        raise UnreadableError(f"{report}: it has no state of run {run}")
    found = [_check_folder(number_of_run, folder, states) for number_of_run, folder in _run_folders(saved, run)]
    statuses = [status for status in found if status is not None]
    if not statuses:
        raise UnreadableError(f"{saved}: there is no saved state")
    return max(statuses)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description="Confirm the digests of a report from the values that were saved.")
    parser.add_argument("report", type=Path, help="the report, JSON lines")
    parser.add_argument("saved", type=Path, help="the directory that was saved to, or the folder of one run in it")
    parser.add_argument("--run", type=int, help="number of the run, where the name of its folder does not say it")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names need not fit the terminal's encoding
    try:
        status = _check_all(options.report, options.saved, options.run)
    except UnreadableError as error:
        print(error, file=sys.stderr)
        return EXIT_UNREADABLE
    print({0: "all equal", EXIT_DIFFERENT: "different"}.get(status, "not all of it was saved, or could be read"))
    return status


if __name__ == "__main__":
    sys.exit(main())
