import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import lucid_profiler
from lucid_profiler.digest import digest_state
from lucid_profiler.records import Header, State, Tool
from lucid_profiler.saved_state import StateSaver, run_folder_name, saved_file
from lucid_profiler.snapshot import plain_digest
from lucid_profiler.writer import Writer
from tools import rehash

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "rehash.py"
STANDARD = {"argparse", "collections", "dataclasses", "hashlib", "io", "json", "pathlib", "re", "sys", "typing"}

NESTED = {
    "state": {0: {"momentum_buffer": torch.arange(6.0).reshape(2, 3).T, "step": torch.tensor(3.0)}, 1: {}},
    "param_groups": [
        {"lr": -0.0, "betas": (0.9, float("nan")), "foreach": None, "nesterov": True, "params": [0, 1], "name": "ü\n"}
    ],
    "scale": 1 - 2j,
    "huge": -(1 << 200),
    "raw": b"\x00\n{}",
}
PARTS: dict[str, Any] = {
    "parameters": {
        "bfloat16": torch.tensor([1.5, -0.0, float("inf")], dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "transposed": torch.arange(12, dtype=torch.float64).reshape(3, 4).T,
        "expanded": torch.ones(1, 4).expand(3, 4),
        "nan_payload": torch.tensor([0x7FC12345, 0x7F800001], dtype=torch.int32).view(torch.float32),
        "negative_zero": torch.tensor([-0.0]),
        "conjugated": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "bool": torch.tensor([True, False]),
    },
    "optimizer_state": NESTED,
    "losses": torch.tensor([1.0, 2.0]),
    "names": {"a": {"b": 1}, "a.b": 2, "$c": 3, "caf\udce9": 4, "\ud83d\ude00": 5, "": {"": ()}},
    "caf\udce9": "caf\udce9",
    "nameless": {"": 1},
    "nothing": None,
    "numbered": {"0": 1, 0: 2, "0 (2)": 3},
    "wrapped": {"w": TwoTensor(torch.ones(2), torch.zeros(2))},
}


def state(run: int, part: str, value: Any, **fields: Any) -> State:
    """Return the record of a part, as a report has it after its way through the agent's journal."""
    plain = plain_digest(digest_state(value))
    return State(run=run, part=part, **(plain | fields))


def write_report(path: Path, states: list[State], make_header: Callable[..., Header]) -> Path:
    """Write a report with these states."""
    with Writer(path) as writer:
        writer.write(make_header())
        for each in states:
            writer.write(each)
    return path


def save(folder: Path, parts: dict[str, Any]) -> None:
    """Save the parts of one process."""
    notes: list[str] = []
    saver = StateSaver(folder, note=notes.append)
    assert all(saver.save(part, value) for part, value in parts.items()), notes


@pytest.fixture(name="make_header")
def make_header_fixture() -> Callable[..., Header]:
    """Give a function that makes a header."""

    def make() -> Header:
        return Header(
            id="x", created="2026-01-02T03:04:05Z", tool=Tool(name="lucid", version="0"), command=(), arms=(), pairs=1
        )

    return make


class Saved:
    """A report and what one of its runs saved."""

    def __init__(self, directory: Path, make_header: Callable[..., Header]) -> None:
        self.directory = directory
        self.saved = directory / "saved"
        self.folder = self.saved / run_folder_name(4, "captured") / "process-77"
        save(self.folder, PARTS)
        states = [state(run, part, value) for run in (4, 5) for part, value in PARTS.items()]
        self.report = write_report(directory / "report.jsonl", states, make_header)

    def check(self, *options: str) -> int:
        """Run the tool in this process; return its status."""
        return rehash.main([str(self.report), str(self.saved), *options])


@pytest.fixture
def saved(tmp_path: Path, make_header: Callable[..., Header]) -> Saved:
    """Return a report whose run 4 saved its state."""
    return Saved(tmp_path, make_header)


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the first word of each printed line by the rest of it."""
    printed = [line for line in capsys.readouterr().out.splitlines() if "  " in line]
    return {rest.strip(): word for word, _, rest in (line.partition(" ") for line in printed)}


def test_every_kind_of_value_is_confirmed(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    """Every tensor and part is printed as equal, and the status says so."""
    assert saved.check() == 0
    found = lines(capsys)
    assert set(found.values()) == {"equal"}
    num_leaves = sum(len(digest_state(value).tensors) for value in PARTS.values())
    assert len(found) == num_leaves + len(PARTS)
    assert "run 4 process 0  parameters  transposed  float64[4, 3]" in found
    assert "run 4 process 0  optimizer_state  param_groups.0.betas.1  float[]" in found
    assert r"run 4 process 0  caf\udce9  (value)  str[]" in found


@pytest.mark.parametrize("name", ["bfloat16", "scalar", "transposed", "nan_payload", "negative_zero"])
def test_one_flipped_bit_is_found(saved: Saved, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """In the tensor where it is and nowhere else; the part differs with it."""
    path = saved_file(saved.folder, "parameters")
    data = path.read_bytes()
    (described,) = (line for line in data.split(b"\n") if line.startswith(b'{"path":[["s","%s"]]' % name.encode()))
    place = data.index(described) + len(described) + json.loads(described)["bytes"]
    path.write_bytes(data[:place] + bytes([data[place] ^ 0x80]) + data[place + 1 :])
    assert saved.check() == rehash.EXIT_DIFFERENT
    different = [rest for rest, word in lines(capsys).items() if word == "different"]
    assert len(different) == 2
    assert different[0].startswith(f"run 4 process 0  parameters  {name}  ")
    assert different[1].startswith("run 4 process 0  parameters  saved ")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"dtype":"bfloat16"', b'"dtype":"float16"'),
        (b'"shape":[4,3]', b'"shape":[3,4]'),
        (b'"strides":[1,4]', b'"strides":[4,1]'),
        (b'["s","bool"]', b'["i","bool"]'),
    ],
)
def test_type_shape_strides_and_keys_count(saved: Saved, before: bytes, after: bytes) -> None:
    """Whatever the definition covers."""
    path = saved_file(saved.folder, "parameters")
    data = path.read_bytes()
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, after))
    assert saved.check() in (rehash.EXIT_DIFFERENT, rehash.EXIT_UNREADABLE)


@pytest.mark.parametrize("cut", [1, 2, 20, 90])
def test_a_file_that_is_cut_off_is_unreadable(saved: Saved, capsys: pytest.CaptureFixture[str], cut: int) -> None:
    """With its name."""
    path = saved_file(saved.folder, "losses")
    path.write_bytes(path.read_bytes()[:-cut])
    assert saved.check() == rehash.EXIT_UNREADABLE
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\x1f\x8b\n", b'{"t":"state"}\n', b"[1]\n"])
def test_a_report_that_cannot_be_read_is_told(saved: Saved, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    """With its name."""
    saved.report.write_bytes(content)
    assert saved.check() == rehash.EXIT_UNREADABLE
    assert str(saved.report) in capsys.readouterr().err


def test_a_part_that_was_not_saved_is_not_confirmed(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are."""
    saved_file(saved.folder, "losses").unlink()
    assert saved.check() == rehash.EXIT_UNREADABLE
    found = lines(capsys)
    assert found.pop("run 4 process 0  losses: it was not saved") == "missing"
    assert set(found.values()) == {"equal"}


def test_a_part_that_the_report_lacks_is_a_difference(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    """Something that nobody has reported was saved."""
    save(saved.folder, {"metrics": 1.0})
    assert saved.check() == rehash.EXIT_DIFFERENT
    assert lines(capsys)["run 4 process 0  metrics: the report does not have it"] == "different"


def test_a_run_that_the_report_lacks_is_a_difference(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are confirmed all the same; a folder of such a run in which nothing is says nothing."""
    save(saved.saved / run_folder_name(3, "native") / "process-5", {"model": 1})
    (saved.saved / run_folder_name(7, "native")).mkdir()
    assert saved.check() == rehash.EXIT_DIFFERENT
    found = lines(capsys)
    assert found.pop("run 3: it was saved, and the report has no state of it") == "different"
    assert set(found.values()) == {"equal"}
    assert any(where.startswith("run 4 process 0  losses") for where in found)


def test_a_report_that_has_no_state_at_all_differs_from_what_was_saved(
    saved: Saved, make_header: Callable[..., Header]
) -> None:
    """It was cut off in its first run."""
    saved.report.unlink()
    write_report(saved.report, [], make_header)
    assert saved.check() == rehash.EXIT_DIFFERENT


@pytest.mark.parametrize("name", ["run3-native", "other"])
def test_a_folder_that_cannot_be_read_hides_no_other(
    saved: Saved, make_header: Callable[..., Header], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Its file is damaged, or its name does not say which run it is of; the others are confirmed."""
    folder = saved.saved / name
    save(folder / "process-5", {"model": 1})
    states = [state(3, "model", 1), *(state(4, part, value) for part, value in PARTS.items())]
    saved.report.unlink()
    write_report(saved.report, states, make_header)
    saved_file(folder / "process-5", "model").write_bytes(b"{}\n")
    assert saved.check() == rehash.EXIT_UNREADABLE
    captured = capsys.readouterr()
    assert str(folder) in captured.err
    assert re.search("^equal +run 4 process 0  losses", captured.out, re.MULTILINE)


def test_nothing_saved_confirms_nothing(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither an empty directory nor one that is not there."""
    shutil.rmtree(saved.saved)
    assert saved.check() == rehash.EXIT_UNREADABLE
    assert "there is no saved state" in capsys.readouterr().err


def test_a_folder_of_another_name_needs_the_run(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    """The option names it, and it must be in the report."""
    other = saved.saved / "other"
    (saved.saved / "run4-captured").rename(other)
    assert saved.check() == rehash.EXIT_UNREADABLE
    assert "say which run with --run" in capsys.readouterr().err
    assert saved.check("--run", "5") == 0
    saved.saved = other
    assert saved.check("--run", "4") == 0
    assert saved.check("--run", "6") == rehash.EXIT_UNREADABLE


def test_a_report_without_single_tensors_is_compared_by_parts(
    tmp_path: Path, make_header: Callable[..., Header], capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is of a part with very many."""
    save(tmp_path / "run0-native" / "process-1", {"model": NESTED})
    report = write_report(tmp_path / "r.jsonl", [state(0, "model", NESTED, tensors={}, values={})], make_header)
    assert rehash.main([str(report), str(tmp_path / "run0-native")]) == 0
    assert list(lines(capsys)) == [f"run 0 process 0  model  {len(digest_state(NESTED).tensors)} tensors and values"]


@pytest.mark.parametrize("with_ranks", [True, False])
def test_processes_are_matched(
    tmp_path: Path,
    make_header: Callable[..., Header],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    with_ranks: bool,
) -> None:
    """By rank, else by what they hold; the numbers of the system say nothing."""
    states = []
    values = [{"w": torch.tensor([rank + 1.0]), "same": torch.ones(2)} for rank in (0, 1)]
    for rank, value in enumerate(values):
        if with_ranks:
            monkeypatch.setenv("RANK", str(rank))
        save(tmp_path / "saved" / "run0-native" / f"process-{9 - rank}", {"model": value, "other": 1})
        for part, each in (("model", value), ("other", 1)):
            states.append(state(0, part, each, process=rank, rank=rank if with_ranks else None))
    report = write_report(tmp_path / "r.jsonl", states, make_header)
    assert rehash.main([str(report), str(tmp_path / "saved")]) == 0
    shutil.rmtree(tmp_path / "saved" / "run0-native" / "process-8")
    assert rehash.main([str(report), str(tmp_path / "saved")]) == rehash.EXIT_UNREADABLE
    assert "run 0 process 1: nothing of it was saved" in capsys.readouterr().out
    save(tmp_path / "saved" / "run0-native" / "process-8", {"model": values[1], "other": 1})
    save(tmp_path / "saved" / "run0-native" / "process-99", {"model": 1})
    assert rehash.main([str(report), str(tmp_path / "saved")]) == rehash.EXIT_DIFFERENT


def imports(source: str) -> set[str]:
    """Return the top-level names of everything that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level
            found.add((node.module or "").partition(".")[0])
    return found


def functions(source: str) -> set[str]:
    """Return the bodies of all functions, without their names and docstrings."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if isinstance(node.body[0], ast.Expr) else node.body
            found.add("\n".join(ast.dump(statement) for statement in body))
    return found


def test_it_shares_no_code_with_what_it_checks() -> None:
    """It imports the standard library alone, loads nothing by other means, and repeats no function of ours."""
    source = SCRIPT.read_text()
    assert imports(source) == STANDARD
    assert set(sys.stdlib_module_names) >= STANDARD
    called = {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"exec", "eval", "compile", "__import__"}
    package = Path(lucid_profiler.__file__).parent
    ours = set().union(*(functions(path.read_text()) for path in package.rglob("*.py")))
    assert not functions(source) & ours


def test_it_runs_where_nothing_is_installed(saved: Saved) -> None:
    """A Python without site packages confirms the state, in any encoding of the terminal."""
    command = [sys.executable, "-I", "-S", str(SCRIPT), str(saved.report), str(saved.saved)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"LC_ALL": "C"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nall equal\n")
