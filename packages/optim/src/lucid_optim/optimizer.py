"""The torch optimizer that runs a rule: checks, groups, state, the native step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from lucid_optim.certificate import native_reason, requested_capture, shares_memory
from lucid_optim.checks import check_group, check_saved_buffers, check_state, check_step
from lucid_optim.layout import is_dense, matched, same_layout
from lucid_optim.report import CaptureReport, Tally
from lucid_optim.rule import Batch, Group, Rule, Scalar

__all__ = ["RuleOptimizer", "Update"]


class Update(NamedTuple):
    """One write, `params <- params + factor * updates`, pairwise.

    Attributes:
        params: Parameters to write.
        updates: One tensor a parameter, of its shape; read only.
        factor: A number, or a one-element tensor.
    """

    params: list[Tensor]
    updates: list[Tensor]
    factor: Scalar


def _write(update: Update) -> None:
    """Write one update; a factor of exactly 0 leaves every byte as it is.

    A factor on the host enters as `alpha`; one on the parameters' device by a multiplication of its own, so that
    nothing is read back.
    """
    params, updates, factor = update
    if isinstance(factor, Tensor) and factor.is_cuda and all(param.device == factor.device for param in params):
        torch._foreach_add_(params, torch._foreach_mul(updates, factor.reshape(())))
        return
    value = float(factor)
    if value != 0:
        torch._foreach_add_(params, updates, alpha=value)


class RuleOptimizer(Optimizer):
    """An optimizer whose mathematics is a `Rule` and whose step is batched.

    Subclasses name their rule in the class attribute `rule` and pass its hyperparameters as `defaults`. A step prepares
    the updates of a group, then writes them, groups in their order. Gradients are read, never written or rebound;
    parameters and buffers are written in place and keep their strides.

    Args:
        params: Parameters, named parameters or group dicts, as `torch.optim.Optimizer` takes them.
        defaults: A value for each hyperparameter of the rule.
        capture_updates: Whether the preparation of updates is recorded and replayed; None reads LUCID_CAPTURE_UPDATES.
        capture_orthogonalization: Whether the orthogonalisation alone is.

    Raises:
        ValueError: If a hyperparameter is out of range or a parameter cannot be updated; the message names it.
        TypeError: If a hyperparameter has the wrong type.
    """

    rule: ClassVar[Rule]

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        capture_updates: bool | None = None,
        capture_orthogonalization: bool = False,
    ) -> None:
        if not isinstance(capture_orthogonalization, bool):
            raise TypeError(f"capture_orthogonalization must be True or False, got {capture_orthogonalization!r}")
        self.capture_updates, self._overridden = requested_capture(capture_updates)
        self.capture_orthogonalization = capture_orthogonalization
        self._tallies: dict[int, tuple[Group, Tally]] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickling and copying keep: state, groups and the capture flags, not the counts."""
        return {
            **super().__getstate__(),
            "capture_updates": self.capture_updates,
            "capture_orthogonalization": self.capture_orthogonalization,
            "_overridden": self._overridden,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Adopt a state after checking it whole; `load_state_dict` and unpickling both end here.

        Raises:
            ValueError: If the state does not fit this optimizer, which is then unchanged.
            TypeError: If a hyperparameter has the wrong type.
        """
        adopted = state["state"]
        is_copy = "capture_updates" in state
        for position, group in enumerate(state["param_groups"]):
            if not is_copy:
                check_group(self.rule, position, group)
            check_state(self.rule, position, group, adopted)
        for group in state["param_groups"]:
            for parameter in group["params"]:
                self._fit_buffers(parameter, adopted.get(parameter, {}), self.rule.buffers(group))
        super().__setstate__(state)
        if is_copy:
            self.capture_updates, overridden = requested_capture(self.capture_updates)
            self._overridden |= overridden
        self._tallies = {}

    @staticmethod
    def _fit_buffers(parameter: Tensor, entry: dict[str, Any], names: Sequence[str]) -> None:
        """Give a parameter's buffers its strides, and drop those that are still to be made."""
        for name in names:
            buffer = entry.get(name)
            if buffer is None:
                entry.pop(name, None)
            elif is_dense(parameter):
                entry[name] = matched(buffer, parameter)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load hyperparameters and buffers saved by `state_dict`, here or by another implementation of the rule.

        Buffers take their parameter's device, dtype and, where it is dense, strides. A parameter without a buffer
        starts from zero. The capture flags are the optimizer's own and stay as they are.

        Args:
            state_dict: As `torch.optim.Optimizer.load_state_dict` takes it; not written.

        Raises:
            ValueError: If it lacks a hyperparameter, holds one out of range, or a buffer that does not fit; the message
                names it, and the optimizer is unchanged.
            TypeError: If a hyperparameter has the wrong type.
        """

        def check(optimizer: Optimizer, saved: StateDict) -> None:
            for group in optimizer.param_groups:
                check_saved_buffers(self.rule, group, saved["state"])

        handle = self.register_load_state_dict_pre_hook(check)  # the last one, after what the user's have made of it
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group after checking it whole.

        Args:
            param_group: As `torch.optim.Optimizer.add_param_group` takes it; keys unknown to the rule are kept.

        Raises:
            ValueError: If a value is out of range or a parameter cannot be updated; no group is added.
            TypeError: If a value has the wrong type; no group is added.
        """
        super().add_param_group(param_group)
        position = len(self.param_groups) - 1
        try:
            check_group(self.rule, position, self.param_groups[position])
        except BaseException:
            self.param_groups.pop()
            raise

    def capture_report(self) -> CaptureReport:
        """Return, for each group, whether its steps are replayed and why not where they are not."""
        return CaptureReport(
            requested=self.capture_updates,
            orthogonalization_requested=self.capture_orthogonalization,
            overridden=self._overridden,
            groups=tuple(self._tally(group).report() for group in self.param_groups),
        )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # compiled training steps call this one as it is
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: Re-evaluates the model and returns the loss; called once, with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: If a gradient is sparse or complex or a buffer does not fit; nothing has been written then.
            TypeError: If a hyperparameter's type does not fit the operations; nothing has been written then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for position, group in enumerate(self.param_groups):
            check_step(self.rule, position, group, self.state)
        for group in self.param_groups:
            members = _members(group)
            if not members:
                continue
            for update in self._updates(group):
                _write(Update(*update))
            requested = self.capture_updates or self.capture_orthogonalization
            self._tally(group).reasons[native_reason(members, requested=requested)] += 1
        return loss

    def _tally(self, group: Group) -> Tally:
        """Return a group's counts; they follow the group, wherever it stands, and end with it."""
        live = {id(one) for one in self.param_groups}
        for stale in self._tallies.keys() - live:
            del self._tallies[stale]
        return self._tallies.setdefault(id(group), (group, Tally()))[1]

    def _updates(self, group: Group) -> Iterator[Update]:
        """Prepare a group's updates natively, phase by phase.

        Whoever iterates must write each update before asking for the next. A subclass may override this to yield
        updates of its own.

        Args:
            group: One of `param_groups`.

        Yields:
            Updates in the order in which they are to be written.
        """
        scalars = self.rule.scalars(group)
        for batch in self._batches(group):
            for phase in self.rule.phases(group):
                yield Update(batch.params, phase.prepare(batch, group, scalars), phase.factor(group))

    def _batches(self, group: Group) -> Iterator[Batch]:
        """Split a group's parameters into batches whose order of update cannot matter.

        Parameters that share memory with one another, or with a gradient, come one by one in the order of the group;
        each sees what the writes before it have left.
        """
        params = [param for param in _members(group) if param.numel()]
        names = self.rule.buffers(group)
        state = {name: [self._buffer(param, name) for param in params] for name in names}
        buffers = [buffer for column in state.values() for buffer in column]
        gradients = [param.grad for param in params if param.grad is not None]
        if shares_memory([*params, *buffers], gradients):
            keys: list[object] = list(range(len(params)))
        else:
            keys = [_lane(param, [column[at] for column in state.values()]) for at, param in enumerate(params)]
        lanes: dict[object, list[int]] = {}
        for at, key in enumerate(keys):
            lanes.setdefault(key, []).append(at)
        for places in lanes.values():
            yield Batch(
                params=[params[at] for at in places],
                grads=[_matched_gradient(params[at], gradients[at]) for at in places],
                state={name: [column[at] for at in places] for name, column in state.items()},
            )

    def _buffer(self, parameter: Tensor, name: str) -> Tensor:
        """Return a parameter's buffer, made of zeros at its first gradient."""
        state = self.state[parameter]
        buffer: Tensor | None = state.get(name)
        if buffer is None:
            # A buffer made in inference mode could never be updated outside it.
            with torch.inference_mode(mode=False):
                buffer = torch.zeros_like(parameter, requires_grad=False)
            state[name] = buffer
        return buffer


def _members(group: Group) -> list[Tensor]:
    return [param for param in group["params"] if param.grad is not None]


def _lane(parameter: Tensor, buffers: Sequence[Tensor]) -> object:
    """Return what must agree for parameters to share one multi-tensor kernel's fast path."""
    dtypes = tuple(buffer.dtype for buffer in buffers)
    regular = is_dense(parameter) and all(same_layout(buffer, parameter) for buffer in buffers)
    return parameter.device, parameter.dtype, dtypes, regular


def _matched_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    return matched(gradient, parameter) if is_dense(parameter) else gradient
