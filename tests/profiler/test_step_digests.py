import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lucid_profiler
from lucid_profiler import step_digests
from lucid_profiler.digest import digest_state
from lucid_profiler.entries import NoteEntry
from lucid_profiler.errors import ReportError
from lucid_profiler.hooks import TorchHooks
from lucid_profiler.journal import Guard, Journal
from lucid_profiler.step_digests import (
    Moment,
    StepDigests,
    StepState,
    read_process,
    read_steps,
    step_files,
    watch_steps,
)
from lucid_profiler.traces import read_traces

STARTUP = Path(lucid_profiler.__file__).parent / "_startup"

SCRIPT = """
import os, sys, torch
torch.manual_seed(0)

maker, judge = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
loader = torch.utils.data.DataLoader(torch.randn(4, 2), batch_size=2, num_workers=2)
first, second = torch.optim.SGD(maker.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(judge.parameters(), lr=0.1)
for index, x in enumerate(loader):
    judge(maker(x)).sum().backward()
    first.step()
    if index:
        second.step()
if os.fork() == 0:
    first.step()
    sys.exit(0)
os.wait()
"""


@pytest.fixture
def hooks(tmp_path: Path) -> Iterator[TorchHooks]:
    """Return installed hooks."""
    watching = TorchHooks(tmp_path / "steps.ring", guard=Guard())
    watching.install()
    yield watching
    watching.deactivate()


@pytest.fixture
def notes() -> list[str]:
    """Return where notes go."""
    return []


def read(run_dir: Path) -> list[StepState]:
    """Return the moments of the one process."""
    (path,) = step_files(run_dir)
    return list(read_steps(path))


def tensor_digest(value: Any) -> str:
    """Return the short digest of one tensor."""
    return digest_state(value).tensors["(value)"].digest


def train(num_steps: int, lr: float = 0.5) -> "tuple[torch.nn.Parameter, torch.optim.Optimizer]":
    """Train one parameter with known gradients."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=lr, momentum=0.9)
    for index in range(num_steps):
        weight.grad = torch.full((2,), float(index))
        optimizer.step()
    return weight, optimizer


def test_each_moment_has_the_digests_of_its_values(tmp_path: Path, hooks: TorchHooks, notes: list[str]) -> None:
    """Before the first step all of the optimizer, before others the gradients, after a step its result."""
    watch_steps(hooks, StepDigests(tmp_path, note=notes.append).take)
    weight, optimizer = train(2)
    first, after_first, second, after_second = read(tmp_path)
    assert first.moment == Moment(1, "before", 0)
    assert set(first.parts) == {"gradients", "parameters", "optimizer_state"}
    assert after_first.moment == Moment(1, "after", 0)
    assert (second.moment, set(second.parts)) == (Moment(2, "before", 0), {"gradients"})
    name = "optimizer0.group0.param0"
    assert first.parts["parameters"].by_name() == {name: tensor_digest(torch.tensor([1.0, 2.0]))}
    assert second.parts["gradients"].by_name() == {name: tensor_digest(torch.tensor([1.0, 1.0]))}
    assert after_second.parts["parameters"].by_name() == {name: tensor_digest(weight.detach())}
    state = after_second.parts["optimizer_state"].by_name()
    buffer = optimizer.state[weight]["momentum_buffer"]
    assert state[f"optimizer0.state.{name}.momentum_buffer"] == tensor_digest(buffer)
    assert state["optimizer0.groups.0.lr"] == tensor_digest(0.5)
    assert after_second.parts["parameters"].digest == digest_state({name: weight.detach()}).digest
    assert notes == []


def test_a_missing_gradient_is_a_value_too(tmp_path: Path, hooks: TorchHooks, notes: list[str]) -> None:
    """None is not the same as zeros."""
    watch_steps(hooks, StepDigests(tmp_path, note=notes.append).take)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert list(read(tmp_path)[0].parts["gradients"].by_name().values()) == [tensor_digest(None)]


def test_a_part_without_a_digest_is_noted_once(tmp_path: Path, hooks: TorchHooks, notes: list[str]) -> None:
    """A sparse gradient, say; the other parts are there."""
    seen: set[str] = set()
    watch_steps(hooks, StepDigests(tmp_path, note=seen.add).take)
    table = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    for _ in range(2):
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert [set(state.parts) for state in read(tmp_path)][2:] == [set(), {"parameters", "optimizer_state"}]
    (note,) = seen
    assert note.startswith("no digest of 'gradients' around a step: ")


def test_a_gradient_without_memory_is_noted(tmp_path: Path, hooks: TorchHooks, notes: list[str]) -> None:
    """As one of zeros that torch has not written out; the program goes on."""
    watch_steps(hooks, StepDigests(tmp_path, note=notes.append).take)
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch._efficientzerotensor((3,))
    torch.optim.SGD([weight], lr=0.1).step()
    assert [set(state.parts) for state in read(tmp_path)] == [
        {"parameters", "optimizer_state"},
        {"parameters", "optimizer_state"},
    ]
    (note,) = notes
    assert "optimizer0.group0.param0 is a torch.Tensor of 12 bytes" in note


SHARDED = """
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import lucid_profiler

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
distributed.destroy_process_group()
lucid_profiler.state("model", model.state_dict())
"""


def test_a_sharded_model_is_digested_by_its_shards(tmp_path: Path) -> None:
    """With FSDP2, at every step and at the end, when the processes can no longer communicate."""
    if torch.__version__ < "2.6" or not torch.distributed.is_available():
        pytest.skip("torch has no public FSDP2")
    env = {**os.environ, "LUCID_RUN_DIR": str(tmp_path), "PYTHONPATH": str(STARTUP), "LUCID_STEP_DIGESTS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SHARDED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (trace,) = read_traces(tmp_path)
    assert trace.all(NoteEntry) == ()
    assert {"weight", "weight._local_tensor", "weight.context"} <= set(trace.states["parameters"].tensors)
    assert "optimizer0.state.weight.exp_avg._local_tensor" in trace.states["optimizer_state"].tensors
    assert trace.states["model"].tensors == trace.states["parameters"].tensors
    last = read(tmp_path)[-1].parts
    assert {part: last[part].digest for part in last} == {part: trace.states[part].digest for part in last}


def test_beyond_the_bound_whole_parts_are_left(tmp_path: Path, hooks: TorchHooks, notes: list[str]) -> None:
    """First without single tensors, then nothing, and a note says so; the file never grows far beyond."""
    watch_steps(hooks, StepDigests(tmp_path, note=notes.append, max_bytes=4000).take)
    train(100)
    states = read(tmp_path)
    known = [part.tensors is not None for state in states for part in state.parts.values()]
    assert known == sorted(known, reverse=True)
    assert 0 < sum(known) < len(known)
    assert all(len(part.digest) == 64 for state in states for part in state.parts.values())
    assert states[-1].parts[next(iter(states[-1].parts))].by_name() == {}
    assert len(states) < 100
    assert step_files(tmp_path)[0].stat().st_size < 2 * 4000 + 1000
    assert notes == [
        f"the digests of steps after {states[-1].moment.step} are missing: their file has reached its bound"
    ]


def test_a_full_disk_ends_the_digests(
    tmp_path: Path, hooks: TorchHooks, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is noted once, and training goes on."""

    def full(journal: Journal, kind: str, **fields: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "write", full)
    watch_steps(hooks, StepDigests(tmp_path, note=notes.append).take)
    train(3)
    assert hooks.num_steps == 3
    assert notes == ["the digests of step 1 and later are missing: [Errno 28] No space left on device"]


def test_nothing_is_read_while_a_graph_is_captured(
    tmp_path: Path, hooks: TorchHooks, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To copy a tensor there would end the capture; the moment is there without parts."""
    monkeypatch.setattr(step_digests, "_is_capturing", lambda: True)
    watch_steps(hooks, StepDigests(tmp_path, note=notes.append).take)
    train(1)
    assert [(state.moment.when, state.parts) for state in read(tmp_path)] == [("before", {}), ("after", {})]


@pytest.mark.gpu
def test_a_capture_with_a_step_goes_on(tmp_path: Path, hooks: TorchHooks, notes: list[str]) -> None:
    """Its graph can be replayed, and the moments inside it are without parts."""
    watch_steps(hooks, StepDigests(tmp_path, note=notes.append).take)
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    weight.grad = torch.ones(2, device="cuda")
    optimizer = torch.optim.Adam([weight], lr=0.1, capturable=True)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    assert [len(state.parts) for state in read(tmp_path)] == [3, 2, 0, 0]
    assert notes == []


def test_digests_change_nothing_in_training(tmp_path: Path, hooks: TorchHooks, notes: list[str]) -> None:
    """The result has the bytes of a run without them, and the generator is where it was."""
    weight, _ = train(3)
    before = torch.random.get_rng_state()
    watch_steps(hooks, StepDigests(tmp_path, note=notes.append).take)
    again, _ = train(3)
    assert bytes(again.detach().view(torch.uint8).tolist()) == bytes(weight.detach().view(torch.uint8).tolist())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_torn_last_line_is_left_out(tmp_path: Path, hooks: TorchHooks, notes: list[str]) -> None:
    """A process that was killed leaves what it wrote before."""
    watch_steps(hooks, StepDigests(tmp_path, note=notes.append).take)
    train(2)
    (path,) = step_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert [state.moment.step for state in read(tmp_path)] == [1, 1, 2]


def test_a_damaged_line_is_told(tmp_path: Path, hooks: TorchHooks, notes: list[str]) -> None:
    """With its number."""
    watch_steps(hooks, StepDigests(tmp_path, note=notes.append).take)
    train(1)
    (path,) = step_files(tmp_path)
    for line, problem in (
        (b"{\n", "line 2"),
        (b'{"kind":"moment"}\n', "does not describe a step"),
        (b"1\n", "no kind"),
    ):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([lines[0], line, *lines[2:]]))
        with pytest.raises(ReportError, match=problem):
            read(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ReportError, match="does not say which process"):
        read_process(path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> "tuple[Path, subprocess.CompletedProcess[str]]":
    """Return the run directory of a script with two optimizers, workers and a forked child."""
    directory = tmp_path_factory.mktemp("recorded")
    (directory / "script.py").write_text(SCRIPT)
    (directory / "run").mkdir()
    env = {
        **os.environ,
        "LUCID_RUN_DIR": str(directory / "run"),
        "PYTHONPATH": str(STARTUP),
        "LUCID_STEP_DIGESTS": "1",
        "RANK": "3",
    }
    command = [sys.executable, str(directory / "script.py")]
    return directory / "run", subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_steps_of_all_optimizers_are_counted_together(
    recorded: "tuple[Path, subprocess.CompletedProcess[str]]",
) -> None:
    """Each optimizer's first step begins with its whole state; a forked child and loader workers add nothing."""
    run_dir, done = recorded
    assert (done.returncode, done.stderr) == (0, "")
    states = read(run_dir)
    assert [state.moment for state in states if state.moment.when == "after"] == [
        Moment(1, "after", 0),
        Moment(2, "after", 0),
        Moment(3, "after", 1),
    ]
    assert [len(state.parts) for state in states if state.moment.when == "before"] == [3, 1, 3]
    names = {"weight", "bias", "optimizer1.weight", "optimizer1.bias"}
    assert set(states[-1].parts["parameters"].by_name()) == names


def test_a_file_says_which_process_wrote_it(recorded: "tuple[Path, subprocess.CompletedProcess[str]]") -> None:
    """Rank and arguments."""
    run_dir, done = recorded
    identity = read_process(step_files(run_dir)[0])
    assert (identity.rank, identity.command) == (3, hashlib.sha256("\0".join(done.args).encode()).hexdigest()[:16])


def test_the_last_digests_are_those_of_the_report(recorded: "tuple[Path, subprocess.CompletedProcess[str]]") -> None:
    """After the last step as at the end of the process."""
    run_dir, _ = recorded
    (trace,) = read_traces(run_dir)
    last = read(run_dir)[-1].parts
    assert {part: last[part].digest for part in last} == {part: entry.digest for part, entry in trace.states.items()}
    assert trace.all(NoteEntry) == ()
