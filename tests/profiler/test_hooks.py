"""More optimizers than are held: each is known again, and none is kept alive by having stepped long ago."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_profiler import hooks as hooks_module
from lucid_profiler.hooks import TorchHooks
from lucid_profiler.journal import Guard
from lucid_profiler.ring import read_ring


class _Wrapping(torch.optim.Optimizer):
    """Does nothing but step another one within its own step."""

    def __init__(self, inner: torch.optim.Optimizer | None = None) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(2))], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        if self.inner is not None:
            self.inner.step()


def _sgd() -> torch.optim.SGD:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


@pytest.fixture
def hooks(tmp_path: Path) -> Iterator[TorchHooks]:
    """Give hooks that are installed and have no fault at the end."""
    guard = Guard()
    hooks = TorchHooks(tmp_path / "steps.ring", guard=guard)
    hooks.install()
    yield hooks
    hooks.abandon()
    assert guard.errors == []


def test_optimizers_in_turn_are_known_again(hooks: TorchHooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of twenty is named once and keeps its number; those that stepped last are held for the digests."""
    num_named = 0
    qualified_names = hooks_module._qualified_names

    def count(modules: list[Any], wanted: set[int]) -> dict[int, str]:
        nonlocal num_named
        num_named += 1
        return qualified_names(modules, wanted)

    monkeypatch.setattr(hooks_module, "_qualified_names", count)
    heard = []
    hooks.watch(lambda tracked, _end_ns: heard.append((tracked.index, tracked.num_steps, tracked.optimizer)))
    optimizers = [_sgd() for _ in range(20)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    optimizers[0].step()
    assert num_named == 20
    assert heard[:60] == [(index, step, one) for step in (1, 2, 3) for index, one in enumerate(optimizers)]
    assert heard[60:] == [(0, 4, optimizers[0])]
    assert [record.optimizer for record in read_ring(tmp_path / "steps.ring").records] == [*range(20)] * 3 + [0]
    assert [(one.index, one.optimizer) for one in hooks.optimizers()] == [
        (index, optimizers[index]) for index in (0, *range(13, 20))
    ]
    assert len(hooks.parameter_names()) == 8
    assert hooks.notes() == ["20 optimizers stepped: digests cover the last 8"]


def test_an_optimizer_that_stepped_long_ago_may_go(hooks: TorchHooks) -> None:
    """Only the last eight are held; what comes at the place of one in memory is another."""
    alive = []
    for _ in range(50):
        optimizer = _sgd()
        alive.append(weakref.ref(optimizer))
        optimizer.step()
        del optimizer
    gc.collect()
    assert [reference() is not None for reference in alive] == [False] * 42 + [True] * 8
    assert [tracked.index for tracked in hooks.optimizers()] == [*range(42, 50)]
    assert [tracked.num_steps for tracked in hooks.optimizers()] == [1] * 8
    assert len(hooks._tracked) == 8


def test_steps_within_a_step_end_in_turn(hooks: TorchHooks) -> None:
    """Of ten optimizers that step within each other the outermost two are given up, and nothing fails."""
    optimizers = [_Wrapping()]
    while len(optimizers) < 10:
        optimizers.append(_Wrapping(optimizers[-1]))
    ended = []
    hooks.watch(lambda tracked, _end_ns: ended.append(tracked.optimizer))
    optimizers[-1].step()
    assert ended == optimizers[:8]
    optimizers[-1].step()
    assert ended[8:] == optimizers[:8]
    optimizers[3].step()
    assert ended[16:] == optimizers[:4]
