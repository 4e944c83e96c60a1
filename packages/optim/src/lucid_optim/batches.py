"""How a group's parameters are split into batches that one multi-tensor kernel can take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lucid_optim.certificate import Certificate, Layouts, Members, State, Watch
from lucid_optim.layout import is_dense, matched, same_layout
from lucid_optim.memory import shares_memory
from lucid_optim.rule import Batch, Orthogonalize

__all__ = ["Familiar", "lanes_of", "make_batches"]

Columns = Mapping[str, list[Tensor]]


def lanes_of(params: Sequence[Tensor], gradients: Sequence[Tensor], columns: Columns) -> list[list[int]]:
    """Split parameters into batches of one device, dtype and regularity, whose order of update cannot matter.

    Parameters that share memory with one another, or with a gradient, come one by one in their order.

    Args:
        params: Parameters of one group, none empty.
        gradients: Their gradients.
        columns: Their buffers by name.

    Returns:
        The places of each batch's parameters.
    """
    buffers = [buffer for column in columns.values() for buffer in column]
    if shares_memory([*params, *buffers], gradients):
        return [[at] for at in range(len(params))]
    lanes: dict[object, list[int]] = {}
    for at, param in enumerate(params):
        lanes.setdefault(_lane(param, [column[at] for column in columns.values()]), []).append(at)
    return list(lanes.values())


def _lane(parameter: Tensor, buffers: Sequence[Tensor]) -> object:
    """Return what must agree for parameters to share one multi-tensor kernel's fast path."""
    dtypes = tuple(buffer.dtype for buffer in buffers)
    is_regular = is_dense(parameter) and all(same_layout(buffer, parameter) for buffer in buffers)
    return parameter.device, parameter.dtype, dtypes, is_regular


def make_batches(
    lanes: Sequence[Sequence[int]],
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    columns: Columns,
    orthogonalize: Orthogonalize,
    *,
    are_matched: bool = False,
) -> Iterator[Batch]:
    """Make batches when they are asked for: each sees what the writes before it have left.

    Args:
        lanes: What `lanes_of` returned.
        params: Parameters of one group.
        gradients: Their gradients; copied only where their strides or dtype differ from the parameter's.
        columns: Their buffers by name.
        orthogonalize: Handed on to the batches.
        are_matched: Whether no gradient is known to differ.
    """
    for places in lanes:
        yield Batch(
            params=[params[at] for at in places],
            grads=[gradients[at] if are_matched else _matched(gradients[at], params[at]) for at in places],
            state={name: [column[at] for at in places] for name, column in columns.items()},
            orthogonalize=orthogonalize,
        )


def _matched(gradient: Tensor, parameter: Tensor) -> Tensor:
    return matched(gradient, parameter) if is_dense(parameter) else gradient


@dataclass(slots=True)
class _Split:
    """The lanes of a group, and whether gradients of some layouts need no copy."""

    lanes: list[list[int]]
    layouts: Layouts | None = None
    are_matched: bool = False


class Familiar:
    """Groups whose tensors are those of an earlier native step, which need not be looked at one by one again.

    To look at 369 parameters, their gradients and buffers in Python takes as long as their update; a certificate
    compares them in a tenth of that.
    """

    def __init__(self) -> None:
        self._certificate: Certificate | None = None
        self._splits: dict[int, _Split] = {}
        self._now: dict[int, Members] = {}
        self._pause = self._misses = 0

    def recognize(self, groups: Sequence[Members], state: State) -> None:
        """Find out whether the groups of this step are familiar: all of them, or none.

        Args:
            groups: What is to be stepped natively.
            state: The optimizer's.
        """
        self._now = {}
        if self._certificate is None:
            return
        if self._certificate.failures(groups, state):
            self._certificate = None
        else:
            self._now = {members.position: members for members in groups}

    def __contains__(self, position: int) -> bool:
        """Tell whether a group, checked in an earlier step, is as it was."""
        return position in self._now

    def batches(self, position: int, orthogonalize: Orthogonalize) -> Iterator[Batch]:
        """Return the batches of a familiar group."""
        members, split = self._now[position], self._splits[position]
        watch = self._watch(position)
        if split.layouts is not watch.gradient_layouts:
            pairs = zip(members.gradients, members.params, strict=True)
            split.are_matched = all(
                not is_dense(param) or (gradient.dtype == param.dtype and gradient.stride() == param.stride())
                for gradient, param in pairs
            )
            split.layouts = watch.gradient_layouts
        return make_batches(
            split.lanes,
            members.params,
            members.gradients,
            watch.columns,
            orthogonalize,
            are_matched=split.are_matched,
        )

    def _watch(self, position: int) -> Watch:
        if self._certificate is None:
            raise KeyError(position)
        return self._certificate.watches[position]

    def dismiss(self) -> None:
        """Let go of this step's gradients."""
        self._now = {}

    def learn(self, groups: Sequence[Members], state: State) -> None:
        """Remember the groups of a native step that has just ended, unless they are familiar.

        Where nothing stays as it was, learning pauses for longer and longer.
        """
        if self._certificate is not None or not groups or torch.is_inference_mode_enabled():
            self._misses = 0
            return
        self._pause -= 1
        if self._pause >= 0:
            return
        self._misses = min(2 * self._misses + 1, 64)
        self._pause = self._misses - 1
        buffers = (state[param][name] for members in groups for param in members.params for name in members.names)
        if any(buffer.is_inference() for buffer in buffers):
            return
        self._certificate = Certificate(groups, state)
        self._splits = {
            position: _Split(lanes=lanes_of(watch.params, (), watch.columns))
            for position, watch in self._certificate.watches.items()
        }

    def forget(self) -> None:
        """Look at everything again."""
        self._certificate = None
        self._now = {}
        self._pause = self._misses = 0
