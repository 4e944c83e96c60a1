"""Two optimizers of one kind, one native and one captured, that are handed the same gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lucid_optim import MuSGD, RuleOptimizer
from support.reference import bits

# Full, depthwise and 1x1 convolutions, wide and tall matrices, vectors, a scalar; several of one shape.
SHAPES = [(16, 8), (8, 16), (16, 8, 3, 3), (32, 1, 3, 3), (8, 32, 1, 1), (16, 8), (7,), (), (16,)]

Gradient = Tensor | None


class Twins:
    """Parameters twice, with equal values and strides, and the optimizers that move them.

    Args:
        device: Where the parameters live.
        make: The optimizer's class, or something that makes one.
        shapes: Of the parameters.
        memory_format: Of parameters with four dimensions.
        num_groups: Parameters are dealt out to so many groups.
        captured: Further arguments of the captured one.
        options: Arguments of both.

    Attributes:
        native: The optimizer that never captures.
        captured: The one that does.
    """

    def __init__(
        self,
        device: str,
        make: Callable[..., RuleOptimizer] = MuSGD,
        *,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        memory_format: torch.memory_format = torch.contiguous_format,
        num_groups: int = 2,
        captured: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.device = device
        self._generator = torch.Generator("cpu").manual_seed(5)
        options = {"lr": 0.05, **options}
        values = [self._values(shape, memory_format) for shape in shapes]

        def build(**more: Any) -> RuleOptimizer:
            params = [Parameter(value.clone()) for value in values]
            groups = [{"params": params[at::num_groups]} for at in range(num_groups)]
            return make(groups, **options, **more)

        self.native = build(capture_updates=False)
        self.captured = build(**{"capture_updates": True, **(captured or {})})

    def _values(self, shape: tuple[int, ...], memory_format: torch.memory_format) -> Tensor:
        value = torch.randn(shape, generator=self._generator, device="cpu").to(self.device)
        return value.to(memory_format=memory_format) if len(shape) == 4 else value

    @property
    def both(self) -> tuple[RuleOptimizer, RuleOptimizer]:
        """The native optimizer, then the captured one."""
        return self.native, self.captured

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters pairwise."""
        groups = zip(self.native.param_groups, self.captured.param_groups, strict=True)
        return [pair for first, second in groups for pair in zip(first["params"], second["params"], strict=True)]

    def set(self, position: int, **values: Any) -> None:
        """Set values of one group in both."""
        for optimizer in self.both:
            optimizer.param_groups[position].update(values)

    def random(self, like: Tensor) -> Tensor:
        """Return random values with a tensor's shape, device and strides."""
        return torch.empty_like(like).copy_(
            torch.randn(like.shape, generator=self._generator, device="cpu").to(like.device)
        )

    def give(self, make: Callable[[int, Tensor], Gradient] | None = None) -> None:
        """Give both twins the same gradients, in tensors of their own."""
        for at, (first, second) in enumerate(self.pairs()):
            gradient = self.random(first.detach()) if make is None else make(at, first)
            first.grad, second.grad = (None if gradient is None else gradient.detach().clone() for _ in range(2))

    def step(self, make: Callable[[int, Tensor], Gradient] | None = None) -> None:
        """Give gradients, step both, and compare."""
        self.give(make)
        self.step_as_is()

    def step_as_is(self) -> None:
        """Step both on the gradients that they have, and compare every byte; gradients stay the objects they were."""
        gradients = [second.grad for _, second in self.pairs()]
        values = [None if gradient is None else bits(gradient) for gradient in gradients]
        for optimizer in self.both:
            optimizer.step()
        assert all(second.grad is gradient for (_, second), gradient in zip(self.pairs(), gradients, strict=True))
        assert values == [None if gradient is None else bits(gradient) for gradient in gradients]
        self.compare()

    def compare(self) -> None:
        """Compare bytes and strides of parameters and buffers."""
        for at, (first, second) in enumerate(self.pairs()):
            assert bits(first) == bits(second), f"parameter {at}"
            assert first.stride() == second.stride(), f"parameter {at}"
            mine, its = self.native.state.get(first, {}), self.captured.state.get(second, {})
            assert mine.keys() == its.keys(), f"state of {at}"
            for name, buffer in mine.items():
                assert bits(buffer) == bits(its[name]), f"{name} of {at}"
                assert buffer.stride() == its[name].stride(), f"{name} of {at}"

    def replays(self) -> list[int]:
        """Return the captured twin's replays, group by group."""
        return [group.replays for group in self.captured.capture_report().groups]

    def recordings(self) -> list[int]:
        """Return its recordings."""
        return [group.recordings for group in self.captured.capture_report().groups]

    def reasons(self, position: int = 0) -> dict[str, int]:
        """Return its reasons for one group."""
        return self.captured.capture_report().groups[position].reasons
