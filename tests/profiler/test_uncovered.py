"""What was trained and is in no digest: the report says so, and no verdict speaks of equality."""

import enum
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lucid_profiler
from lucid_profiler.awaited import AwaitedAgent
from lucid_profiler.collect import Observation, observe
from lucid_profiler.hooks import MAX_OPTIMIZERS, TorchHooks
from lucid_profiler.journal import Guard, Journal
from lucid_profiler.records import Wall
from lucid_profiler.ring import RingWriter
from lucid_profiler.session import ProcessSession


class Process:
    """A process that trains under an agent, played by this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        guard = Guard()
        self.hooks = TorchHooks(folder / "steps-1.ring", guard=guard)
        self.session = ProcessSession(folder, hooks=self.hooks, guard=guard, name="1", environ={})
        self.hooks.install()
        (folder / "agent-1.loaded").touch()

    def train(self, kind: type[torch.optim.SGD] = torch.optim.SGD, **settings: Any) -> torch.optim.SGD:
        """Return an optimizer that has stepped once."""
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        optimizer = kind([parameter], lr=0.1, **settings)
        optimizer.step()
        return optimizer

    def seen(self) -> Observation:
        """Return what the report will say of it, once it has ended."""
        self.session.finish()
        wall = Wall(source="process", begin_ns=1, end_ns=2)
        return observe(self.folder, run=0, process=wall, max_rss_bytes=None)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """Play a process."""
    played = Process(tmp_path)
    yield played
    played.hooks.deactivate()


class Color(enum.Enum):
    """A constant among settings."""

    RED = 1


class Preconditioner:
    """What an optimizer may keep, and no digest can be taken of."""

    def __init__(self) -> None:
        self.matrix = torch.ones(2)


def test_what_is_digested_whole_is_covered(process: Process) -> None:
    """Keys that are numbers, bytes and complex numbers included; functions and constants are no state."""
    optimizer = process.train(momentum=0.9)
    (state,) = optimizer.state.values()
    state["pre"] = {0: torch.ones(2), 1: [torch.zeros(1)]}
    state |= {"raw": b"ab", "number": 1 + 2j}
    optimizer.param_groups[0] |= {"schedule": test_what_is_digested_whole_is_covered, "kind": Color.RED}
    optimizer.param_groups[0] |= {"dtype": torch.float16, "rule": Preconditioner}
    seen = process.seen()
    (found,) = [state for state in seen.states if state.part == "optimizer_state"]
    prefix = "optimizer0.state.optimizer0.group0.param0"
    assert {f"{prefix}.{name}" for name in ("pre.0", "pre.1.0", "raw", "number", "momentum_buffer")} <= set(
        found.tensors
    )
    assert seen.agent.uncovered == ()


@pytest.mark.parametrize("place", ["state", "settings"])
def test_state_of_which_there_is_no_digest_is_named(process: Process, place: str) -> None:
    """By its name and class."""
    optimizer = process.train(momentum=0.9)
    (state,) = optimizer.state.values()
    (state if place == "state" else optimizer.param_groups[0])["pre"] = Preconditioner()
    seen = process.seen()
    assert seen.agent.uncovered == ("state of optimizer 0: 'pre' of class Preconditioner",)
    assert f"in no digest: {seen.agent.uncovered[0]}" in seen.notes


@pytest.mark.parametrize(
    "empty",
    [
        lambda one: one.param_groups.clear(),
        lambda one: one.param_groups[0]["params"].clear(),
        lambda one: one.state.clear(),
    ],
    ids=["groups", "parameters", "state"],
)
def test_an_optimizer_that_was_emptied_is_no_equal_one(
    process: Process, empty: Callable[[torch.optim.SGD], None]
) -> None:
    """A program that lets go of memory before its evaluation leaves two empty states."""
    optimizer = process.train(momentum=0.9)
    empty(optimizer)
    assert process.seen().agent.uncovered == ("optimizer 0 was emptied after its last step",)


def _weights(*values: float) -> list[nn.Parameter]:
    weights = [nn.Parameter(torch.full((2,), float(value))) for value in values]
    for weight in weights:
        weight.grad = torch.ones(2)
    return weights


def test_parameters_that_left_an_optimizer_are_missed(process: Process) -> None:
    """As a layer does that is frozen between two epochs: it was trained, and nobody has it any more."""
    optimizer = torch.optim.SGD(_weights(1, 2, 3), lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:2]
    optimizer.step()
    assert process.seen().agent.uncovered == ("optimizer 0 trained 1 parameter that it has no more",)


def test_a_trained_parameter_that_another_took_the_place_of_is_missed(process: Process) -> None:
    """Its state is still there, and tells."""
    optimizer = torch.optim.SGD(_weights(1, 2), lr=0.1, momentum=0.9)
    optimizer.step()
    optimizer.param_groups[0]["params"][1:] = _weights(3)
    optimizer.step()
    assert process.seen().agent.uncovered == ("optimizer 0 trained 1 parameter that it has no more",)


def test_parameters_that_were_never_trained_may_leave(process: Process) -> None:
    """As those of a backbone that was frozen from the start, or of which somebody has looked at the state."""
    frozen, *trained = _weights(1, 2, 3)
    frozen.requires_grad = False
    frozen.grad = None
    optimizer = torch.optim.SGD([frozen, *trained], lr=0.1, momentum=0.9)
    optimizer.step()
    optimizer.param_groups[0]["params"] = trained
    optimizer.step()
    assert not optimizer.state[frozen]
    assert process.seen().agent.uncovered == ()


def test_parameters_that_joined_an_optimizer_are_none_that_left(process: Process) -> None:
    """As layers do that are thawed one after the other."""
    optimizer = torch.optim.SGD(_weights(1), lr=0.1)
    for value in (2, 3):
        optimizer.step()
        optimizer.param_groups[0]["params"] += _weights(value)
    optimizer.step()
    assert process.seen().agent.uncovered == ()


def test_parameters_without_their_values_are_no_equal_ones(process: Process) -> None:
    """A program may free memory before its evaluation and keep the objects."""
    optimizer = torch.optim.SGD(_weights(1, 2), lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["params"][1].data = torch.empty(0)
    assert process.seen().agent.uncovered == ("optimizer 0 has parameters that are smaller than when it trained them",)


def test_every_optimizer_that_lives_is_digested(process: Process) -> None:
    """As with one for each parameter, which step within the backward pass."""
    optimizers = [process.train() for _ in range(MAX_OPTIMIZERS + 4)]
    seen = process.seen()
    (found,) = [state for state in seen.states if state.part == "parameters"]
    assert found.num_tensors == len(optimizers)
    assert seen.agent.uncovered == ()


def test_optimizers_that_are_gone_are_counted(process: Process) -> None:
    """Those that stepped last are held, so of twelve in turn four are."""
    for _ in range(MAX_OPTIMIZERS + 4):
        process.train()
        gc.collect()
    assert process.seen().agent.uncovered == ("4 of 12 optimizers were gone before the end of the process",)


def test_a_process_that_trained_and_left_nothing_is_counted(process: Process) -> None:
    """One that was ended, say, beside another that came to its exit."""
    process.train()
    RingWriter(process.folder / "steps-2.ring").write(1, 2, 0, step=1)
    assert process.seen().agent.uncovered == tuple(
        f"1 of 2 processes that trained left no digest of {part}" for part in ("parameters", "optimizer_state")
    )


def test_a_part_of_which_there_is_no_digest_at_all_is_named(process: Process) -> None:
    """A tensor of a kind that has no plain values takes the whole part with it."""
    optimizer = process.train(momentum=0.9)
    (state,) = optimizer.state.values()
    state["sparse"] = torch.eye(2).to_sparse()
    assert process.seen().agent.uncovered == ("1 of 1 processes that trained left no digest of optimizer_state",)


def _in_a_cycle(optimizer: torch.optim.SGD) -> None:
    optimizer.param_groups[0]["owner"] = lambda: optimizer


def test_which_optimizers_are_digested_is_not_the_collector_s_whim(process: Process) -> None:
    """Those in a cycle of references are alive until it comes by; so it comes by once at the end."""
    gc.disable()
    try:
        for _ in range(MAX_OPTIMIZERS + 4):
            _in_a_cycle(process.train())
        seen = process.seen()
    finally:
        gc.enable()
    (found,) = [state for state in seen.states if state.part == "parameters"]
    assert found.num_tensors == MAX_OPTIMIZERS
    assert seen.agent.uncovered == ("4 of 12 optimizers were gone before the end of the process",)


def test_a_process_that_trained_nothing_owes_no_digest(process: Process) -> None:
    """It may have marked a phase."""
    process.train()
    journal = Journal(process.folder / "agent-2.jsonl")
    journal.write("steps", num_steps=0, optimizers=[])
    journal.close()
    assert process.seen().agent.uncovered == ()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("num_steps", "num_told"), [(0, 0), (3, 1)], ids=["a loader", "a training"])
def test_a_forked_process_that_trains_is_counted_once(process: Process, num_steps: int, num_told: int) -> None:
    """It has no agent; loader processes, which step nothing, leave nothing."""
    optimizer = process.train()
    agent = AwaitedAgent(str(process.folder))
    child = os.fork()
    if not child:
        agent._leave()
        for _ in range(num_steps):
            optimizer.step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    told = [text for text in process.seen().agent.uncovered if "forked process" in text]
    assert len(told) == num_told
    assert not told or told[0].startswith("1 forked process trained without an agent")


FORKS_FIRST = """
import os
{before}
if not os.fork():
    import torch
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    for _ in range({num_steps}):
        torch.optim.SGD([parameter], lr=0.1).step()
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("before", ["", "import lucid_profiler; lucid_profiler.mark('one')"], ids=["alone", "marked"])
@pytest.mark.parametrize(("num_steps", "num_told"), [(0, 0), (2, 1)])
def test_a_process_that_was_forked_before_torch_was_imported_is_counted(
    before: str, num_steps: int, num_told: int, tmp_path: Path
) -> None:
    """Whether or not the agent had come by then: as the children of a pool or of a forkserver."""
    startup = Path(lucid_profiler.__file__).parent / "_startup"
    environ = {**os.environ, "LUCID_RUN_DIR": str(tmp_path), "PYTHONPATH": str(startup)}
    script = FORKS_FIRST.format(before=before, num_steps=num_steps)
    subprocess.run([sys.executable, "-c", script], env=environ, check=True)
    assert len([*tmp_path.glob("agent-*.forked")]) == num_told
