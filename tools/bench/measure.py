"""How optimizer steps are timed: one process, every optimizer once a round, each on its own copy of the parameters."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tools.bench.peers import Candidate
from tools.bench.table import Sample, Series, round_order
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lucid_optim import REASONS, RuleOptimizer

__all__ = [
    "Entry",
    "Workload",
    "build",
    "build_all",
    "capture_note",
    "reason_of",
    "run_rounds",
    "synchronize",
    "time_step",
]

PARAMETER_SEED = 0
FIRST_GRADIENT_SEED = 1
# About the sizes of trained convolution weights and their gradients.
PARAMETER_SCALE = 0.05
GRADIENT_SCALE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The parameters that every optimizer gets a copy of.

    Attributes:
        name: Of the shape set.
        shapes: One a parameter.
        device: Where the parameters live.
        channels_last: Whether those of four dimensions lie in memory as channels_last.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    device: torch.device
    channels_last: bool = False

    def parameters(self) -> list[Tensor]:
        """Return new values, one tensor a shape, the same at every call."""
        return self._draw(PARAMETER_SEED, PARAMETER_SCALE)

    def gradients(self, round_number: int) -> list[Tensor]:
        """Return a round's gradients, one tensor a shape."""
        return self._draw(FIRST_GRADIENT_SEED + round_number, GRADIENT_SCALE)

    def _draw(self, seed: int, scale: float) -> list[Tensor]:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return [torch.randn(shape, generator=generator, device=self.device).mul_(scale) for shape in self.shapes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An optimizer over its own copy of the parameters.

    Attributes:
        candidate: What it was built from.
        places: For each parameter, the index of its shape in the workload.
        params: Its parameters.
        optimizer: The optimizer.
    """

    candidate: Candidate
    places: list[int]
    params: list[Parameter]
    optimizer: Optimizer

    @property
    def label(self) -> str:
        """The name, and in parentheses what differs from the implementation's defaults."""
        variant = "fused" if self.optimizer.defaults.get("fused") else self.candidate.variant
        return f"{self.candidate.name} ({variant})" if variant else self.candidate.name

    def refill(self, gradients: Sequence[Tensor]) -> None:
        """Give every parameter a new gradient with the parameter's strides, as a backward pass would."""
        with torch.no_grad():
            for place, param in zip(self.places, self.params, strict=True):
                param.grad = torch.empty_like(param).copy_(gradients[place].reshape(param.shape))


def build(candidate: Candidate, workload: Workload) -> Entry:
    """Build a candidate over its own copy of the workload's parameters; whatever its package raises passes through."""
    places, params = [], []
    for place, value in enumerate(workload.parameters()):
        if candidate.matrices_only and value.ndim < 2:
            continue
        places.append(place)
        if candidate.flattened and value.ndim > 2:
            params.append(Parameter(value.flatten(1)))
        elif workload.channels_last and value.ndim == 4:
            params.append(Parameter(value.contiguous(memory_format=torch.channels_last)))
        else:
            params.append(Parameter(value))
    return Entry(candidate=candidate, places=places, params=params, optimizer=candidate.make(params))


def reason_of(error: BaseException) -> str:
    """Return an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _built(candidate: Candidate, workload: Workload) -> Entry | str:
    try:
        return build(candidate, workload)
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything; its row says what
        return reason_of(error)


def build_all(candidates: Sequence[Candidate], workload: Workload) -> tuple[list[Entry], dict[str, str]]:
    """Build what can be built, and return it with the reasons of the others by name."""
    built = {candidate.name: _built(candidate, workload) for candidate in candidates}
    reasons = {name: found for name, found in built.items() if isinstance(found, str)}
    return [found for found in built.values() if isinstance(found, Entry)], reasons


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was submitted; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _events() -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(2)]


def time_step(step: Callable[[], object], device: torch.device) -> Sample:
    """Run one step and return its times.

    Wall time ends when the device is done, host time when `step` returns. Device time lies between two events, one
    submitted before the step and one after, so it holds the device's waits for the host too.
    """
    synchronize(device)
    events = _events() if device.type == "cuda" else []
    for event in events[:1]:
        event.record()
    begin = time.perf_counter_ns()
    step()
    returned = time.perf_counter_ns()
    for event in events[1:]:
        event.record()
    synchronize(device)
    end = time.perf_counter_ns()
    return Sample(
        wall_ms=(end - begin) / 1e6,
        host_ms=(returned - begin) / 1e6,
        device_ms=events[0].elapsed_time(events[1]) if events else None,
    )


def run_rounds(
    entries: Sequence[Entry], workload: Workload, *, rounds: int, warmup: int
) -> tuple[dict[str, Series], dict[str, str]]:
    """Time every entry once a round.

    Gradients are made outside the timed part, anew for each round and the same for every entry; garbage is collected
    between rounds only.

    Args:
        entries: What to time.
        workload: Where gradients come from.
        rounds: Rounds that are kept.
        warmup: Rounds before them that are not.

    Returns:
        By name, a series for each entry that went through every round and a reason for each that did not.
    """
    series = {entry.candidate.name: Series() for entry in entries}
    reasons: dict[str, str] = {}
    gc.disable()
    try:
        for round_number in range(warmup + rounds):
            gc.collect()
            gradients = workload.gradients(round_number)
            for position, index in enumerate(round_order(len(entries), round_number)):
                entry, name = entries[index], entries[index].candidate.name
                if name in reasons:
                    continue
                entry.refill(gradients)
                try:
                    sample = time_step(entry.optimizer.step, workload.device)
                except Exception as error:  # noqa: BLE001 - foreign code may raise anything; its row says what
                    reasons[name] = reason_of(error)
                    continue
                if round_number >= warmup:
                    series[name].add(sample, position)
    finally:
        gc.enable()
    return {name: kept for name, kept in series.items() if name not in reasons}, reasons


def capture_note(optimizer: Optimizer) -> str:
    """Return what became of a request to capture, nothing where there was none."""
    if not isinstance(optimizer, RuleOptimizer) or not optimizer.capture_updates:
        return ""
    groups = optimizer.capture_report().groups
    native: Counter[str] = Counter()
    for group in groups:
        native.update(group.reasons)
    parts = [f"{replays} replays"] if (replays := sum(group.replays for group in groups)) else []
    parts += [f"{count} native steps: {REASONS.get(reason, reason)}" for reason, count in native.items()]
    return "; ".join(parts)
