"""One recording of the preparation of all certified groups, and its replay."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lucid_optim import graphs
from lucid_optim.batches import lanes_of, make_batches
from lucid_optim.certificate import Certificate, Layouts, Members, Watch
from lucid_optim.layout import same_layout
from lucid_optim.rule import Batch, Group, Orthogonalize, Phase, Rule, Scalar
from lucid_optim.spans import Copies, Writes, are_served
from lucid_optim.update import Update, write_together

__all__ = ["Recording"]


class _Inputs:
    """Owned copies of gradients, with their parameters' strides.

    Args:
        params: What the gradients belong to; not kept.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.tensors = [torch.empty_like(param, requires_grad=False) for param in params]
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors)
        self._copies = Copies(self.tensors) if are_served(params[0].device) else None
        self._planned: tuple[Layouts, ...] = ()
        self._is_direct = False

    def submit(self) -> bool:
        """Submit what belongs into the recording, before anything reads the inputs; return whether that is anything."""
        if self._copies is not None:
            self._copies.submit()
        return self._copies is not None

    def take(self, watches: Sequence[Watch], gradients: list[Tensor]) -> None:
        """Bring this step's gradients in, or their addresses.

        Args:
            watches: What certified the gradients just now.
            gradients: In the order of the parameters; read only.
        """
        layouts = tuple(watch.gradient_layouts for watch in watches)
        if layouts != self._planned:
            pairs = zip(self.tensors, gradients, strict=True)
            self._is_direct = all(tensor.stride() == gradient.stride() for tensor, gradient in pairs)
            self._planned = layouts
        if not self._is_direct:
            gradients = [
                self._laid_out(tensor, gradient) for tensor, gradient in zip(self.tensors, gradients, strict=True)
            ]
        if self._copies is None:
            torch._foreach_copy_(self.tensors, gradients)
        elif self._is_direct:
            self._copies.point([address for watch in watches for address in watch.gradient_addresses])
        else:
            self._copies.point([gradient.data_ptr() for gradient in gradients])

    @staticmethod
    def _laid_out(tensor: Tensor, gradient: Tensor) -> Tensor:
        """Return a gradient with its input's strides; where that takes a copy, it goes straight into the input."""
        if same_layout(gradient, tensor):
            return gradient.as_strided(tensor.shape, tensor.stride())
        return tensor.copy_(gradient)


class _Slots:
    """Owned float32 scalars on the device, read by recorded operations and by writes.

    A value is uploaded when it differs from the last one in any bit; nothing is ever read back.

    Args:
        names: Of the scalars.
        device: Where they lie.

    Attributes:
        tensor: All of them, in the order of the names.
        values: Views of them by name.
    """

    def __init__(self, names: Sequence[Any], device: torch.device) -> None:
        self.tensor = torch.zeros(len(names), dtype=torch.float32, device=device)
        self.values: dict[Any, Tensor] = dict(zip(names, self.tensor.unbind(), strict=True))
        self._last: dict[Any, tuple[float, float]] = {}

    def upload(self, scalars: Mapping[Any, Scalar]) -> None:
        """Bring every slot to its value of this step."""
        for name, scalar in scalars.items():
            if isinstance(scalar, Tensor):
                self._last.pop(name, None)
                self.values[name].copy_(scalar)
                continue
            # The sign of a zero is a bit as well.
            key = (scalar, math.copysign(1.0, scalar))
            if self._last.get(name) != key:
                self.values[name].fill_(scalar)
                self._last[name] = key


class _Work(NamedTuple):
    """What one phase has to do for one batch."""

    position: int
    batch: Batch
    structure: Any
    phase: Phase


class _Stage:
    """One phase of all groups: a graph that fills the updates, and the writes that follow it.

    Args:
        works: What is recorded, in this order.
        slots: By group position.
        begin: Submits what comes before.
        device: Of all tensors.
        num_branches: How many works run side by side.

    Raises:
        RecordingError: If recording failed.
    """

    def __init__(
        self,
        works: Sequence[_Work],
        slots: Mapping[int, _Slots],
        begin: Callable[[], object],
        device: torch.device,
        num_branches: int,
    ) -> None:
        def prepare() -> list[list[Tensor]]:
            begin()
            jobs = [
                partial(work.phase.prepare, work.batch, work.structure, slots[work.position].values) for work in works
            ]
            return graphs.in_branches(jobs, device, num_branches)

        self.graph = graphs.record(prepare, device)
        self._works = works
        self._factors = _Slots(range(len(works)), device)
        self._writes = self._prepare_writes() if are_served(device) and self._are_plain() else None

    def replay(self, groups: Sequence[Group]) -> None:
        """Prepare with the values in the slots, then write with the groups' factors."""
        self.graph.replay()
        factors = [work.phase.factor(groups[work.position]) for work in self._works]
        if self._writes is None or any(isinstance(factor, Tensor) and factor.is_cuda for factor in factors):
            works = zip(self._works, self.graph.result, factors, strict=True)
            write_together(Update(work.batch.params, updates, factor) for work, updates, factor in works)
            return
        self._factors.upload({at: float(factor) for at, factor in enumerate(factors)})
        self._writes.submit()

    def _are_plain(self) -> bool:
        """Tell whether one kernel can write all updates by their addresses."""
        pairs = [
            pair
            for work, updates in zip(self._works, self.graph.result, strict=True)
            for pair in zip(work.batch.params, updates, strict=True)
        ]
        return all(param.stride() == update.stride() and update.dtype == param.dtype for param, update in pairs)

    def _prepare_writes(self) -> Writes:
        params = [param for work in self._works for param in work.batch.params]
        updates = [update for updates in self.graph.result for update in updates]
        places = [at for at, work in enumerate(self._works) for _ in work.batch.params]
        return Writes(params, updates, places, self._factors.tensor)


class Recording:
    """The preparation of all groups of a span, recorded.

    Native steps prepare and write group after group. Here all groups are prepared, then all are written, phase by
    phase: the same bytes, since the certificate says that no group reads what another writes.

    Args:
        certificate: Of the tensors; its groups outside the span stay native.
        rule: What is recorded.
        structures: By group position, for the groups of the span, one or more.
        scalars: Likewise; only the names matter.
        orthogonalize: Handed to the rule.
        num_branches: How many groups are prepared side by side.

    Raises:
        RecordingError: If recording failed; nothing has run.

    Attributes:
        device: Where it runs.
        copied_bytes: By group position, bytes of gradients that a replay copies.
        replays: Replays so far.
    """

    def __init__(
        self,
        certificate: Certificate,
        rule: Rule,
        structures: Mapping[int, Any],
        scalars: Mapping[int, Mapping[str, Scalar]],
        orthogonalize: Orthogonalize,
        num_branches: int,
    ) -> None:
        if certificate.device is None:
            raise ValueError("no group of the certificate can be recorded")
        self.device = certificate.device
        self._home = graphs.Home(self.device)
        self._watches = [certificate.watches[position] for position in structures]
        self._slots = {position: _Slots(tuple(scalars[position]), self.device) for position in structures}
        self._inputs = _Inputs([param for watch in self._watches for param in watch.params])
        self.copied_bytes: dict[int, int] = {}
        self.replays = 0

        inputs = iter(self._inputs.tensors)
        by_group: list[list[list[_Work]]] = []
        for watch in self._watches:
            structure = structures[watch.position]
            own = [next(inputs) for _ in watch.params]
            self.copied_bytes[watch.position] = sum(tensor.nbytes for tensor in own)
            lanes = lanes_of(watch.params, own, watch.columns)
            batches = list(make_batches(lanes, watch.params, own, watch.columns, orthogonalize))
            by_group.append(
                [
                    [_Work(watch.position, batch, structure, phase) for batch in batches]
                    for phase in rule.phases(structure)
                ]
            )
        # A phase may have nothing to compute, and of a graph without operations torch warns or worse.
        self._anchor = torch.zeros(1, device=self.device)  # replays write it, so it lives as long as they may come
        self._stages = [
            _Stage(
                [work for works in stage for work in works],
                self._slots,
                self._begin if at == 0 else self._anchor.zero_,
                self.device,
                num_branches,
            )
            for at, stage in enumerate(zip_longest(*by_group, fillvalue=()))
        ]

    def _begin(self) -> None:
        """Submit what comes before everything else."""
        if not self._inputs.submit():
            self._anchor.zero_()

    def replay(
        self, groups: Sequence[Group], members: Mapping[int, Members], scalars: Mapping[int, Mapping[str, Scalar]]
    ) -> None:
        """Take one step of the span's groups.

        Args:
            groups: The optimizer's groups; they give the factors of the writes.
            members: By position; their gradients are copied.
            scalars: By position, the values of this step.
        """
        gradients = [gradient for watch in self._watches for gradient in members[watch.position].gradients]
        with graphs.in_order(self.device):
            self._inputs.take(self._watches, gradients)
            for position, slots in self._slots.items():
                slots.upload(scalars[position])
            for stage in self._stages:
                stage.replay(groups)
        self.replays += 1

    def pool_bytes(self) -> int:
        """Return the device memory that the recording keeps reserved, owned inputs included."""
        return self._inputs.num_bytes + sum(stage.graph.pool_bytes() for stage in self._stages)

    def reset(self) -> None:
        """Give graphs and memory back."""
        self._home.await_last_use()
        for stage in self._stages:
            stage.graph.reset()

    def __del__(self) -> None:
        """Let the memory of what was dropped without a reset wait for its last use as well."""
        try:  # noqa: SIM105 - at the end of the interpreter contextlib may be gone
            self._home.await_last_use()
        except Exception:  # noqa: BLE001, S110 - half made, or the interpreter is ending
            pass
