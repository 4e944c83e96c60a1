"""What a recording relies on, written down when it is made and compared at every step.

A recording reads and writes fixed addresses. It may be replayed while every tensor that the step touches is the object
it was, lies where it lay, and shares no byte that somebody writes. All groups with gradients are watched, also those
that run natively beside the recording, because their writes could reach into it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import ge, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lucid_optim import graphs
from lucid_optim.layout import is_dense
from lucid_optim.memory import WrittenRanges, num_spanned_bytes
from lucid_optim.private import are_at, tensor_guards
from lucid_optim.rule import Group

__all__ = ["Certificate", "Layouts", "Members", "Watch", "ineligibility"]

State = Mapping[Any, Mapping[str, Any]]
# Addresses a gradient that are remembered; allocators come back to a few.
MANY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The parameters of one group that take part in a step: those with a gradient and at least one element.

    Attributes:
        position: Of the group among `param_groups`.
        places: Of the parameters in the group's list.
        params: The parameters.
        gradients: Their gradients.
        names: Of their buffers.
        left_out: Places of parameters that have a gradient and no element.
    """

    position: int
    places: Sequence[int]
    params: list[Tensor]
    gradients: list[Tensor]
    names: tuple[str, ...]
    left_out: tuple[int, ...] = ()

    @classmethod
    def of(cls, position: int, group: Group, names: tuple[str, ...]) -> "Members":
        """Return the members of a group now, given the names of its buffers."""
        params: list[Tensor] = group["params"]
        found: list[Any] = [param.grad for param in params]
        if type(None) not in set(map(type, found)) and all(map(Tensor.numel, params)):
            # What nearly every step is, at the speed of nearly no Python.
            return cls(position=position, places=range(len(params)), params=list(params), gradients=found, names=names)
        moved = [place for place, gradient in enumerate(found) if gradient is not None]
        places = [place for place in moved if params[place].numel()]
        return cls(
            position=position,
            places=places,
            params=[params[place] for place in places],
            gradients=[found[place] for place in places],
            names=names,
            left_out=tuple(place for place in moved if not params[place].numel()),
        )


def ineligibility(members: Members, buffers: Sequence[Tensor] = ()) -> str | None:
    """Return the key of `REASONS` that keeps a group out of every recording, or None.

    Args:
        members: The group's parameters and gradients.
        buffers: The parameters' buffers, as far as they have been made.
    """
    device = members.params[0].device
    if not graphs.can_capture(device):
        return "no_cuda"
    faults = (_written_fault(tensor, device) for tensor in (*members.params, *buffers))
    reason = next(filter(None, faults), None)
    if reason is None and any(_is_unusual(gradient, device) for gradient in members.gradients):
        return "gradient"
    return reason


def _written_fault(tensor: Tensor, device: torch.device) -> str | None:
    """Return the key of `REASONS` for a parameter or buffer that cannot be recorded on a device, or None."""
    if type(tensor) not in {Tensor, Parameter}:
        return "subclass"
    if tensor.device != device:
        return "several_devices"
    if tensor.dtype != torch.float32:
        return "dtype"
    return None if is_dense(tensor) and not tensor.is_neg() else "layout"


def _is_unusual(gradient: Tensor, device: torch.device) -> bool:
    kind = (type(gradient), gradient.layout, gradient.dtype, gradient.device, gradient.is_neg())
    return kind != (Tensor, torch.strided, torch.float32, device, False)


def _facts(tensor: Tensor) -> tuple[object, ...]:
    """Return what a kernel is told of a tensor besides its address; strides of size-1 dimensions say nothing."""
    if tensor.layout != torch.strided:
        return type(tensor), tensor.layout
    shape = tensor.shape
    strides = tuple(stride for size, stride in zip(shape, tensor.stride(), strict=True) if size > 1)
    return type(tensor), tensor.dtype, tensor.device, shape, strides, tensor.is_neg()


class Layouts:
    """Type, dtype, device, shape, strides and negative bit of some tensors, to be compared with as many later ones.

    Args:
        tensors: What is described; none is kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._facts = list(map(_facts, tensors))
        self._guards = tensor_guards(tensors)

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether these tensors are of the described kind."""
        if len(tensors) != len(self._facts):
            return False
        if self._guards is not None and self._guards.check(*tensors):
            return True
        if list(map(_facts, tensors)) != self._facts:
            return False
        self._guards = tensor_guards(tensors)
        return True


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Tell whether two sequences hold the same objects; tensors have an equality of their own."""
    return len(first) == len(second) and all(map(is_, first, second))


class _Places:
    """Where some tensors lie in memory, and how."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._layouts = Layouts(tensors)
        self._addresses = _addresses(tensors)
        self._places = list(range(len(tensors)))

    def hold(self, tensors: list[Tensor]) -> bool:
        return self._layouts.hold(tensors) and are_at(tensors, self._addresses, self._places)


class Watch:
    """The certified tensors of one group.

    Attributes:
        position: Of the group.
        params: Its parameters that have gradients.
        columns: Their buffers by name, each in the order of `params`.
        eligibility: The key of `REASONS` that keeps the group out of every recording, or None.
        gradient_layouts: Of the gradients last seen; another object when they change.
        gradient_addresses: Where those lie; empty before any was seen.
    """

    def __init__(self, members: Members, entries: Sequence[Mapping[str, Any]]) -> None:
        self.position = members.position
        self._names = members.names
        self.params = members.params
        self.columns = {name: [entry[name] for entry in entries] for name in members.names}
        self.buffers = [buffer for column in self.columns.values() for buffer in column]
        self.eligibility = ineligibility(members, self.buffers)
        self._places = members.places
        self._entries = list(entries)
        self._param_places = _Places(self.params)
        self._buffer_places = _Places(self.buffers)
        self.gradient_layouts = Layouts(members.gradients)
        self._every_place = list(range(len(self.params)))
        # None of the gradients has been looked at yet.
        self.gradient_addresses: list[int] = []
        self._num_bytes: list[int] = []
        # By address, so many bytes from there on are known to be written by nobody.
        self._readable: dict[int, int] = {}

    def failure(self, members: Members, state: State, ranges: WrittenRanges, *, is_same_state: bool) -> str | None:
        """Return the key of `REASONS` for the first clause that does not hold any more, or None.

        Args:
            members: The group now.
            state: The optimizer's.
            ranges: Of all certified parameters and buffers.
            is_same_state: Whether `state` is known to hold the entries that it held.
        """
        if members.names != self._names:
            return "changed_structure"
        if members.places != self._places:
            return "changed_gradients"
        if not _are_same(members.params, self.params) or not self._param_places.hold(self.params):
            return "changed_parameters"
        if not is_same_state and not _are_same([state.get(param) for param in self.params], self._entries):
            return "changed_state"
        buffers = [entry.get(name) for name in self._names for entry in self._entries]
        if not _are_same(buffers, self.buffers) or not self._buffer_places.hold(self.buffers):
            return "changed_state"
        return self._gradient_failure(members.gradients, ranges)

    def _gradient_failure(self, gradients: list[Tensor], ranges: WrittenRanges) -> str | None:
        """Look at the gradients that are new since the last time that all of them were found good."""
        is_same_kind = self.gradient_layouts.hold(gradients)
        if not is_same_kind and not self._are_usable(gradients):
            return "gradient"
        if self.eligibility == "gradient" and not any(_is_unusual(one, self.params[0].device) for one in gradients):
            return "changed_gradients"
        if is_same_kind and self.gradient_addresses and are_at(gradients, self.gradient_addresses, self._every_place):
            return None
        if not is_same_kind:
            self.gradient_addresses = []  # first: an interrupt must not leave them beside layouts that they are not of
            self.gradient_layouts = Layouts(gradients)
        if not self.gradient_addresses:
            self._num_bytes = list(map(num_spanned_bytes, gradients))
        addresses = _addresses(gradients)
        if not all(map(ge, map(self._readable.get, addresses, repeat(0)), self._num_bytes)) and not self._learn(
            addresses, ranges
        ):
            return "shared_memory"
        self.gradient_addresses = addresses
        return None

    def _learn(self, addresses: Sequence[int], ranges: WrittenRanges) -> bool:
        """Look at bytes that have not been looked at yet; return whether nobody writes any of them."""
        if len(self._readable) > MANY * len(addresses):
            self._readable.clear()
        for address, num_bytes in zip(addresses, self._num_bytes, strict=True):
            if self._readable.get(address, 0) < num_bytes:
                if ranges.meet_bytes(address, address + num_bytes):
                    return False
                self._readable[address] = num_bytes
        return True

    def _are_usable(self, gradients: Sequence[Tensor]) -> bool:
        device = self.params[0].device
        if self.eligibility is None and any(_is_unusual(gradient, device) for gradient in gradients):
            return False
        return all(
            gradient.layout == torch.strided and gradient.is_floating_point() and gradient.shape == param.shape
            for gradient, param in zip(gradients, self.params, strict=True)
        )


class Certificate:
    """The certified tensors of all groups that have gradients.

    Args:
        groups: What takes part in the step, one or more.
        state: The optimizer's state; the buffers of every member exist.
    """

    def __init__(self, groups: Sequence[Members], state: State) -> None:
        self.watches = {
            members.position: Watch(members, [state[param] for param in members.params]) for members in groups
        }
        self._keys = list(state)
        self._entries = list(state.values())
        written = [tensor for watch in self.watches.values() for tensor in (*watch.params, *watch.buffers)]
        self._ranges = WrittenRanges(written)
        self.has_overlap = self._ranges.overlap()
        devices = {watch.params[0].device for watch in self.watches.values() if watch.eligibility is None}
        self.device = next(iter(devices), None)
        """Of the groups that can be recorded; those on a second device cannot."""

    def failures(self, groups: Sequence[Members], state: State) -> dict[int, str]:
        """Return, for each group whose certificate does not hold, the key of `REASONS` that says why."""
        if [members.position for members in groups] != list(self.watches):
            return dict.fromkeys((members.position for members in groups), "changed_gradients")
        if self.has_overlap:
            return dict.fromkeys(self.watches, "shared_memory")
        is_same_state = _are_same(self._keys, list(state)) and _are_same(self._entries, list(state.values()))
        found = {
            members.position: self.watches[members.position].failure(
                members, state, self._ranges, is_same_state=is_same_state
            )
            for members in groups
        }
        return {position: reason for position, reason in found.items() if reason is not None}

    def meets(self, tensor: Tensor) -> bool:
        """Tell whether a tensor shares memory with one that the step writes."""
        return self._ranges.meet(tensor)

    def ineligible(self) -> dict[int, str]:
        """Return the groups that no recording can serve, each with its key of `REASONS`."""
        found = {
            position: watch.eligibility or ("other_device" if watch.params[0].device != self.device else None)
            for position, watch in self.watches.items()
        }
        return {position: reason for position, reason in found.items() if reason is not None}
