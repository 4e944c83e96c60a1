"""The torch optimizer that runs a rule: checks, groups, state, the native step."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from lucid_optim.batches import Familiar, lanes_of, make_batches
from lucid_optim.buckets import orthogonalize_all
from lucid_optim.capture import RULE_METHODS, Plan, Step, UpdateCapture, is_overridden, requested_capture
from lucid_optim.certificate import Members
from lucid_optim.checks import check_group, check_saved_buffers, check_state, check_tensors, check_values, positive_int
from lucid_optim.graphs import MAX_BRANCHES
from lucid_optim.layout import is_dense, matched
from lucid_optim.orthogonalization import OrthogonalizationCapture
from lucid_optim.report import CaptureReport, Tally
from lucid_optim.rule import Batch, Group, Rule
from lucid_optim.update import Update, write

__all__ = ["RuleOptimizer", "Update"]

# A class that replaces one of these may write where a recording reads.
MACHINERY = ("step", "_updates", "_batches", "_buffer")


class RuleOptimizer(Optimizer):
    """An optimizer whose mathematics is a `Rule` and whose step is batched.

    Subclasses name their rule in the class attribute `rule` and pass its hyperparameters as `defaults`. A step prepares
    the updates of a group, then writes them, groups in their order. Gradients are read, never written or rebound;
    parameters and buffers are written in place and keep their strides.

    Args:
        params: Parameters, named parameters or group dicts, as `torch.optim.Optimizer` takes them.
        defaults: A value for each hyperparameter of the rule.
        capture_updates: Whether the preparation of updates is recorded and replayed; None reads LUCID_CAPTURE_UPDATES.
        capture_orthogonalization: Whether the orthogonalisation alone is, wherever preparation runs natively.
        strict: Whether a step that would fall back to the native path raises `CaptureError` instead.
        capture_branches: How many groups a recording prepares side by side, 1 to 8: more takes less time and more
            memory.

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
        strict: bool = False,
        capture_branches: int = 4,
    ) -> None:
        if positive_int(capture_branches) or capture_branches > MAX_BRANCHES:
            raise ValueError(f"capture_branches must be an int from 1 to {MAX_BRANCHES}, got {capture_branches!r}")
        for name, value in (("capture_orthogonalization", capture_orthogonalization), ("strict", strict)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        self.capture_updates, self._overridden = requested_capture(capture_updates)
        self.capture_orthogonalization = capture_orthogonalization
        self.strict = strict
        self.capture_branches = capture_branches
        self._start_capture()
        self._tallies: dict[int, tuple[Group, Tally]] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickling and copying keep: state, groups and the capture flags, not recordings nor counts."""
        return {
            **super().__getstate__(),
            "capture_updates": self.capture_updates,
            "capture_orthogonalization": self.capture_orthogonalization,
            "strict": self.strict,
            "capture_branches": self.capture_branches,
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
        kept = [] if is_copy else [self._tally(group) for group in self.param_groups]
        for group in state["param_groups"]:
            for parameter in group["params"]:
                self._fit_buffers(parameter, adopted.get(parameter, {}), self.rule.buffers(group))
        super().__setstate__(state)
        if is_copy:
            self.capture_updates, overridden = requested_capture(self.capture_updates)
            self._overridden |= overridden
            self._start_capture()
        self.release()
        self._tallies = {id(group): (group, tally) for group, tally in zip(self.param_groups, kept, strict=False)}

    def _start_capture(self) -> None:
        self._capture = UpdateCapture()
        self._orthogonalize = OrthogonalizationCapture()
        self._familiar = Familiar()

    def release(self) -> None:
        """Drop every recording and give its device memory back to the allocator; the next steps may record again."""
        self._capture.release()
        self._orthogonalize.release()
        self._familiar.forget()

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
        self.release()

    def capture_report(self) -> CaptureReport:
        """Return, for each group, whether its steps are replayed and why not where they are not."""
        native, replay = self._capture.times()
        setup = self._capture.setup_seconds
        gain = native - replay if native is not None and replay is not None else 0.0
        recording = self._capture.recording
        return CaptureReport(
            requested=self.capture_updates,
            orthogonalization_requested=self.capture_orthogonalization,
            overridden=self._overridden,
            groups=tuple(self._tally(group).report() for group in self.param_groups),
            pool_bytes=recording.pool_bytes() if recording is not None else 0,
            setup_seconds=setup,
            native_seconds=native,
            replay_seconds=replay,
            break_even_steps=math.ceil(setup / gain) if gain > 0 else None,
            orthogonalization_recordings=self._orthogonalize.recordings,
            orthogonalization_replays=self._orthogonalize.replays,
            orthogonalization_reasons=dict(self._orthogonalize.reasons),
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
        structures = {
            position: check_values(self.rule, position, group) for position, group in enumerate(self.param_groups)
        }
        groups = [
            Members.of(position, group, tuple(self.rule.buffers(group)))
            for position, group in enumerate(self.param_groups)
        ]
        step = Step(
            groups=[members for members in groups if members.params],
            param_groups=self.param_groups,
            state=self.state,
            rule=self.rule,
            structures={members.position: structures[members.position] for members in groups if members.params},
            orthogonalize=orthogonalize_all,
            is_overridden=self._is_overridden(),
            is_strict=self.strict,
            num_branches=self.capture_branches,
        )
        plan = self._capture.plan(step) if self.capture_updates else Plan.all_native(step, "not_requested")
        try:
            self._check_tensors(plan, step, groups)
            plan = self._capture.replay(plan, step)
            self._step_natively(plan, step)
        finally:
            self._familiar.dismiss()
        if self.capture_updates:
            self._capture.settle(plan, step)
        self._count(plan)
        return loss

    def _check_tensors(self, plan: Plan, step: Step, groups: Sequence[Members]) -> None:
        """Look at everything that neither a recording nor an earlier native step answers for."""
        if not is_overridden(self, RuleOptimizer, ("_batches", "_buffer")):
            self._familiar.recognize(plan.of(plan.native, step), self.state)
        replayed = plan.replayed
        for members in groups:
            is_known = members.position in replayed or members.position in self._familiar
            places = members.left_out if is_known else None
            check_tensors(self.rule, members.position, self.param_groups[members.position], self.state, places)

    def _step_natively(self, plan: Plan, step: Step) -> None:
        """Step the groups that the plan leaves over."""
        native = plan.native
        if not native:
            return
        with self._capture.native(plan):
            for position in native:
                for update in self._updates(self.param_groups[position]):
                    write(Update(*update))
        if not step.is_overridden:
            self._familiar.learn(plan.of(native, step), self.state)

    def _is_overridden(self) -> bool:
        is_promised = vars(type(self.rule)).get("is_capturable") and not vars(self.rule).keys() & set(RULE_METHODS)
        return not is_promised or is_overridden(self, RuleOptimizer, MACHINERY)

    def _count(self, plan: Plan) -> None:
        """Add a step to the counts of its groups."""
        if len(self._tallies) > len(self.param_groups):  # groups were taken out; nobody else may hold them
            live = {id(one) for one in self.param_groups}
            self._tallies = {key: entry for key, entry in self._tallies.items() if key in live}
        for position, reason in plan.reasons.items():
            tally = self._tally(self.param_groups[position])
            tally.captured = reason is None
            if reason is None:
                tally.replays += 1
                tally.recordings += plan.is_recorded_now
                tally.copied_bytes = plan.copied_bytes[position]
            else:
                tally.reasons[reason] += 1
                if reason == "held_back" and plan.culprit is not None:
                    tally.held_back_by[plan.culprit] += 1

    def _tally(self, group: Group) -> Tally:
        """Return a group's counts; they follow the group, wherever it stands, and end with it."""
        known = self._tallies.get(id(group))
        if known is None:
            live = {id(one) for one in self.param_groups}
            for stale in self._tallies.keys() - live:
                del self._tallies[stale]
            known = self._tallies[id(group)] = (group, Tally())
        return known[1]

    def _updates(self, group: Group) -> Iterator[Update]:
        """Prepare a group's updates natively, phase by phase.

        Whoever iterates must write each update before asking for the next. A subclass may override this to yield
        updates of its own.

        Args:
            group: One of `param_groups`.

        Yields:
            Updates in the order in which they are to be written.
        """
        structure, scalars = self.rule.structure(group), self.rule.scalars(group)
        for batch in self._batches(group):
            for phase in self.rule.phases(structure):
                yield Update(batch.params, phase.prepare(batch, structure, scalars), phase.factor(group))

    def _batches(self, group: Group) -> Iterator[Batch]:
        """Split a group's parameters into batches whose order of update cannot matter.

        Parameters that share memory with one another, or with a gradient, come one by one in the order of the group;
        each sees what the writes before it have left.
        """
        position = next(at for at, one in enumerate(self.param_groups) if one is group)
        orthogonalize = self._orthogonalize if self.capture_orthogonalization else orthogonalize_all
        if position in self._familiar:
            return self._familiar.batches(position, orthogonalize)
        members = Members.of(position, group, tuple(self.rule.buffers(group)))
        columns = {name: [self._buffer(param, name) for param in members.params] for name in members.names}
        lanes = lanes_of(members.params, members.gradients, columns)
        return make_batches(lanes, members.params, members.gradients, columns, orthogonalize)

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
