import hashlib
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import lucid_profiler
from lucid_profiler import digest as digest_module
from lucid_profiler import saved_state
from lucid_profiler.digest import digest_state
from lucid_profiler.entries import NoteEntry
from lucid_profiler.errors import ReportError
from lucid_profiler.saved_state import (
    SavedLeaf,
    StateSaver,
    process_folders,
    read_identity,
    read_saved,
    run_folder_name,
    save_step_asked_for,
    saved_file,
    saver_asked_for,
)
from lucid_profiler.traces import ProcessTrace, read_traces

STARTUP = Path(lucid_profiler.__file__).parent / "_startup"

TENSORS: dict[str, torch.Tensor] = {
    "float32": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "float64": torch.tensor([1.5, -0.0], dtype=torch.float64),
    "float16": torch.arange(5, dtype=torch.float16),
    "bfloat16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "float8_e4m3fn": torch.arange(5).to(torch.float8_e4m3fn),
    "int64": torch.tensor(-7),
    "uint8": torch.tensor([255, 10], dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "complex64": torch.tensor([1 + 2j, -0.0 - 1j], dtype=torch.complex64).conj(),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "expanded": torch.ones(1, 3).expand(4, 3),
    "nan_payload": torch.tensor([0x7FC12345, 0x7F800001 - 2**31], dtype=torch.int32).view(torch.float32),
    "newlines": torch.full((7,), 10, dtype=torch.uint8),
}


def element_bytes(tensor: torch.Tensor) -> bytes:
    """Return the row-major bytes element by element, without a copy of the tensor as a whole."""
    out = b""
    for index in np.ndindex(*tensor.shape):
        item = tensor[index].resolve_conj().clone()
        parts = [item.real.clone(), item.imag.clone()] if tensor.is_complex() else [item]
        out += b"".join(bytes(part.reshape(1).view(torch.uint8).tolist()) for part in parts)
    return out


def save(folder: Path, part: str, state: Any) -> Path:
    """Save a part where nothing may go wrong; return its file."""
    notes: list[str] = []
    assert StateSaver(folder, note=notes.append).save(part, state), notes
    return saved_file(folder, part)


def leaves(path: Path) -> dict[str, SavedLeaf]:
    """Return the leaves of a file by name."""
    return {leaf.name: leaf for leaf in read_saved(path)}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_every_kind_comes_back(tmp_path: Path, name: str) -> None:
    """Type, shape and exact bytes, as an element-by-element reference gives them."""
    tensor = TENSORS[name]
    (leaf,) = read_saved(save(tmp_path, "model", {name: tensor}))
    assert (leaf.name, leaf.kind, leaf.dtype, leaf.shape) == (name, "tensor", str(tensor.dtype)[6:], tensor.shape)
    assert leaf.data == element_bytes(tensor)


def test_strides_are_those_of_the_tensor(tmp_path: Path) -> None:
    """In elements; 0 where they address nothing."""
    found = leaves(save(tmp_path, "model", {name: TENSORS[name] for name in ("transposed", "expanded", "empty")}))
    assert {name: leaf.strides for name, leaf in found.items()} == {
        "transposed": (1, 3),
        "expanded": (0, 1),
        "empty": (0, 0),
    }


def test_leaves_have_the_names_of_the_digest(tmp_path: Path) -> None:
    """Nested, numbered where two paths have one spelling, and with surrogates that JSON would change."""
    state = {
        "a": {"b": 1, 3: [None, (b"\n{",)]},
        "a.b": torch.ones(1),
        "\ud83d\ude00": 2.0,
        "caf\udce9": "caf\udce9",
        "": {},
        "0": 1,
        0: 2,
        "0 (2)": 3,
    }
    path = save(tmp_path, "part", state)
    assert [leaf.name for leaf in read_saved(path)] == list(digest_state(state).tensors)
    assert leaves(path)["caf\udce9"].data == b"caf\xed\xb3\xa9"
    assert leaves(path)["a.3.1.0"].path == (("s", "a"), ("i", "3"), ("l", "1"), ("t", "0"))


def test_a_wrapper_is_saved_as_it_is_digested(tmp_path: Path) -> None:
    """Its class, and the exact bytes of each tensor in it."""
    wrapper = TwoTensor(TENSORS["float64"], TENSORS["float64"] + 1)
    path = save(tmp_path, "model", {"w": wrapper})
    found = leaves(path)
    assert list(found) == list(digest_state({"w": wrapper}).tensors)
    own = found["w"]
    assert (own.kind, own.dtype, own.shape) == ("wrapper", f"{TwoTensor.__module__}.TwoTensor[float64]", (2,))
    assert [found[name].path for name in ("w", "w.a")] == [(("s", "w"),), (("s", "w"), ("a", "a"))]
    assert [found[name].data for name in ("w", "w.a", "w.b")] == [b"", *map(element_bytes, (wrapper.a, wrapper.b))]


def test_what_is_not_in_memory_is_not_saved(tmp_path: Path) -> None:
    """It is a note."""
    notes: list[str] = []
    assert not StateSaver(tmp_path, note=notes.append).save("model", {"w": torch._efficientzerotensor((3,))})
    assert list(tmp_path.iterdir()) == []
    (note,) = notes
    assert note.startswith("the values of 'model' were not saved: w is a torch.Tensor of 12 bytes")


def test_a_value_alone_is_a_part(tmp_path: Path) -> None:
    """Its name is that of the digest."""
    (leaf,) = read_saved(save(tmp_path, "losses", TENSORS["bfloat16"]))
    assert (leaf.name, leaf.path) == ("(value)", ())


@pytest.mark.gpu
def test_a_device_s_values_are_those_of_the_host(tmp_path: Path) -> None:
    """Bytes, shape and strides."""
    host = torch.arange(6.0).reshape(2, 3).T
    found = [next(read_saved(save(tmp_path / device, "model", host.to(device)))) for device in ("cpu", "cuda")]
    assert found[0] == found[1]


def test_one_leaf_can_be_read_alone(tmp_path: Path) -> None:
    """The bytes of the others are passed over."""
    path = save(tmp_path, "model", TENSORS)
    (leaf,) = read_saved(path, only="float16")
    assert leaf.data == element_bytes(TENSORS["float16"])
    assert list(read_saved(path, only="none of them")) == []


def test_one_value_is_on_the_host_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is let go of before the next one is made."""
    alive: list[Any] = []
    read_leaf = digest_module._leaf

    def watched(value: Any, name: str) -> Any:
        assert [reference() for reference in alive if reference() is not None] == []
        leaf = read_leaf(value, name)
        alive.append(weakref.ref(leaf.data))
        return leaf

    monkeypatch.setattr(saved_state, "_leaf", watched)
    save(tmp_path, "model", [torch.ones(3) for _ in range(5)])
    assert len(alive) == 5


def test_a_part_that_is_given_again_replaces_the_first(tmp_path: Path) -> None:
    """As in a report, the last value counts; parts with one safe spelling stay apart."""
    for value in (1, 2):
        save(tmp_path, "a/b", value)
    save(tmp_path, "a_b", 3)
    assert [leaves(saved_file(tmp_path, part))["(value)"].data for part in ("a/b", "a_b")] == [b"2", b"3"]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    """Neither half a file nor the one of an earlier value; a note says why."""
    notes: list[str] = []
    saver = StateSaver(tmp_path / "run", note=notes.append)
    assert saver.save("model", {"a": torch.ones(2)})
    assert not saver.save("model", {"a": torch.ones(2), "b": print})
    assert list((tmp_path / "run").iterdir()) == []
    assert notes == [
        "the values of 'model' were not saved: b is of type builtins.builtin_function_or_method, which has no digest"
    ]


def test_a_folder_that_cannot_be_made_is_a_note(tmp_path: Path) -> None:
    """A file in its place, say."""
    (tmp_path / "run").touch()
    notes: list[str] = []
    assert not StateSaver(tmp_path / "run" / "process-1", note=notes.append).save("model", 1)
    assert notes[0].startswith("the values of 'model' were not saved: [Errno ")


def test_the_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reserve stays free for the program itself."""
    almost_full = SimpleNamespace(f_bavail=2**14, f_frsize=2**12 + 1)  # the reserve and 16 KiB
    monkeypatch.setattr(os, "fstatvfs", lambda fd: almost_full)
    notes: list[str] = []
    saver = StateSaver(tmp_path, note=notes.append)
    assert saver.save("small", torch.zeros(2**12))
    assert not saver.save("large", torch.zeros(2**12 + 1))
    assert "67,125,248 bytes are free, 16,388 are needed and 67,108,864 stay free" in notes[0]


@pytest.mark.parametrize("cut", range(1, 130))
def test_a_file_that_was_cut_off_is_told(tmp_path: Path, cut: int) -> None:
    """Wherever it was cut."""
    path = save(tmp_path, "model", {"a": torch.ones(3), "b": 2})
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ReportError, match=r"cut off|damaged"):
        list(read_saved(path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"format":"other/1"}\n', "no saved state"),
        (b"[]\n", "holds no object"),
        (b'{"format":"lucid.saved/1"}\n{"path":[["s",5]],"bytes":0}\n\n', "describes no leaf"),
        (b'{"format":"lucid.saved/1"}\n{"end":3}\n', "holds 0 leaves and says 3"),
        (b"\xff\n", "damaged"),
    ],
)
def test_what_is_no_saved_state_is_told(tmp_path: Path, content: bytes, problem: str) -> None:
    """With the file and what is wrong with it."""
    path = tmp_path / "x.state"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=problem):
        list(read_saved(path))


def test_an_identity_that_is_missing_is_told(tmp_path: Path) -> None:
    """A file without one was not written here."""
    path = tmp_path / "x.state"
    path.write_bytes(b'{"format":"lucid.saved/1","rank":0}\n')
    with pytest.raises(ReportError, match="lacks 'command'"):
        read_identity(path)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("run3-captured", "run3-captured"), ("../../etc", "_.._etc"), ("..", "_"), ("", "run"), ("a b\ud800", "a_b_")],
)
def test_a_run_stays_below_the_directory(tmp_path: Path, name: str, folder: str) -> None:
    """Whatever it is called."""
    saver = saver_asked_for({"LUCID_SAVE_STATE": str(tmp_path), "LUCID_SAVE_NAME": name}, print)
    assert saver is not None
    assert saver.save("model", 1)
    assert [path.name for path in tmp_path.iterdir()] == [folder]


def test_nothing_is_saved_unasked() -> None:
    """Without a directory there is no saver, and no step."""
    assert saver_asked_for({"LUCID_SAVE_STATE": "", "LUCID_SAVE_NAME": "x"}, print) is None
    assert save_step_asked_for({"LUCID_SAVE_STEP": "3"}) is None


@pytest.mark.parametrize("text", ["0", "-1", "three", "1.5", "²"])
def test_a_step_is_a_number_from_1(text: str) -> None:
    """Anything else is refused with its text."""
    with pytest.raises(ValueError, match="expected the number of a step from 1"):
        save_step_asked_for({"LUCID_SAVE_STEP": text, "LUCID_SAVE_STATE": "x"})


def test_the_folder_of_a_run_names_it() -> None:
    """Run and arm, in characters that every file system takes."""
    assert run_folder_name(12, "batch size/2") == "run12-batch_size_2"


SCRIPT = """
import os, resource, sys, torch
import lucid_profiler
torch.manual_seed(0)
net = torch.nn.Linear(3, 2)
loader = torch.utils.data.DataLoader(torch.randn(4, 3), batch_size=2, num_workers=2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
os.chdir("/")
with lucid_profiler.fit():
    for x in loader:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
if os.fork() == 0:
    lucid_profiler.state("model", {"of": "the child"})
    sys.exit(0)
os.wait()
losses = torch.tensor([1.0, 2.0])
lucid_profiler.state("losses", losses)
losses.zero_()
for name, value in net.named_parameters():
    print(name, value.detach().numpy().tobytes().hex())
limit = int(sys.argv[1])
if limit:
    sys.dont_write_bytecode = True  # half a compiled module would stay for the tests after this one
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    lucid_profiler.state("huge", torch.ones(limit))
"""


def run(directory: Path, *arguments: str, **env: str) -> "tuple[subprocess.CompletedProcess[str], ProcessTrace]":
    """Run the script under the agent."""
    script, run_dir = directory / "script.py", directory / "run"
    script.write_text(SCRIPT)
    run_dir.mkdir()
    settings = {**os.environ, "LUCID_RUN_DIR": str(run_dir), "PYTHONPATH": str(STARTUP), **env}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=settings, cwd=directory, capture_output=True, text=True, check=False)
    (trace,) = read_traces(run_dir)
    return done, trace


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> "tuple[Path, subprocess.CompletedProcess[str], ProcessTrace]":
    """Return the folder of a process that saved its state, and what else it left; its disk ends after 100 kB."""
    directory = tmp_path_factory.mktemp("saved")
    done, trace = run(directory, "100000", LUCID_SAVE_STATE="kept", LUCID_SAVE_NAME="run2-native", RANK="1")
    (folder,) = process_folders(directory / "kept" / "run2-native")
    return folder, done, trace


def test_a_process_saves_what_it_digests(saved: Any) -> None:
    """Every part of the report, with the bytes that the program itself prints, when the digest was taken."""
    folder, done, trace = saved
    assert (done.returncode, done.stderr) == (0, "")
    found = {part: leaves(saved_file(folder, part)) for part in ("parameters", "optimizer_state", "losses")}
    printed = dict(line.split() for line in done.stdout.splitlines())
    assert {name: leaf.data.hex() for name, leaf in found["parameters"].items()} == printed
    assert found["losses"]["(value)"].data == np.array([1, 2], "<f4").tobytes()
    for part, by_name in found.items():
        assert set(by_name) == set(trace.states[part].tensors)


def test_a_full_disk_is_a_note(saved: Any) -> None:
    """The script goes on, nothing of the part is left, and its digest is in the report all the same."""
    folder, done, trace = saved
    assert done.returncode == 0
    assert any("the values of 'huge' were not saved: [Errno 27]" in str(note) for note in trace.all(NoteEntry))
    assert len(list(folder.iterdir())) == 3
    assert "huge" in trace.states


def test_forked_children_save_nothing(saved: Any) -> None:
    """Neither loader workers nor a child that calls the API and runs its handlers."""
    folder, _, trace = saved
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert "model" not in trace.states


def test_a_file_says_which_process_wrote_it(saved: Any) -> None:
    """Rank and arguments."""
    folder, done, _ = saved
    identity = read_identity(saved_file(folder, "parameters"))
    assert identity.rank == 1
    expected = hashlib.sha256("\0".join(done.args).encode()).hexdigest()[:16]
    assert identity.command == expected


def test_the_state_of_one_step_is_saved_alone(tmp_path: Path) -> None:
    """Gradients before it, parameters and optimizer state after it; nothing at the end of the process."""
    done, trace = run(tmp_path, "0", LUCID_SAVE_STATE="kept", LUCID_SAVE_NAME="a", LUCID_SAVE_STEP="2")
    assert done.returncode == 0
    (folder,) = process_folders(tmp_path / "kept" / "a")
    found = {f"{path.parent.name} {path.name.partition('-')[0]}" for path in folder.rglob("*.state")}
    assert found == {"step2-before gradients", "step2-after parameters", "step2-after optimizer_state"}
    printed = dict(line.split() for line in done.stdout.splitlines())
    after = leaves(saved_file(folder / "step2-after", "parameters"))
    assert {name: leaf.data.hex() for name, leaf in after.items()} == printed
    assert "parameters" in trace.states


def test_a_step_that_never_came_is_a_note(tmp_path: Path) -> None:
    """With the number of those that did; nothing is saved."""
    done, trace = run(tmp_path, "0", LUCID_SAVE_STATE="kept", LUCID_SAVE_STEP="9")
    assert done.returncode == 0
    (note,) = trace.all(NoteEntry)
    assert note.text == "nothing was saved of step 9: the process took 2 steps"
    assert not (tmp_path / "kept").exists()


def test_the_lines_are_plain_json(tmp_path: Path) -> None:
    """The format needs nothing but a JSON reader, and is what docs/parity.md shows."""
    path = save(tmp_path, "losses", {"loss": torch.tensor([1.0, -0.0], dtype=torch.bfloat16)})
    first, second, rest = path.read_bytes().split(b"\n", 2)
    assert json.loads(first)["part"] == "losses"
    assert json.loads(second) == {
        "path": [["s", "loss"]],
        "kind": "tensor",
        "dtype": "bfloat16",
        "shape": [2],
        "strides": [1],
        "bytes": 4,
    }
    assert rest == b'\x80\x3f\x00\x80\n{"end":1}\n'
