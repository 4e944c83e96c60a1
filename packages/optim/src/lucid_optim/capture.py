"""When an optimizer's steps are recorded and replayed, and why not where they are not.

A step is native until a certificate that was issued after one native step has held through a second one, which is
timed; then it is recorded, and replayed as long as the certificate and the signature hold. What changes makes the step
native, and a new certificate is issued.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from inspect import unwrap
from typing import Any

from torch import Tensor

from lucid_optim import graphs, spans
from lucid_optim.certificate import Certificate, Members, State, ineligibility
from lucid_optim.context import forbidding_mode, numeric_modes
from lucid_optim.recording import Recording
from lucid_optim.report import PLANNED, REASONS, CaptureError
from lucid_optim.rule import Group, Orthogonalize, Rule, Scalar

__all__ = ["Plan", "Step", "UpdateCapture", "is_overridden", "requested_capture"]

logger = logging.getLogger("lucid_optim")

# A strict optimizer that has stepped natively so often in a row, for whatever reason, has fallen back.
STRICT_PATIENCE = 4
# After these a recording can never be used again.
INVALIDATING = {"changed_parameters", "changed_state", "changed_structure", "changed_modes"}
# Under these nothing is certified.
UNCERTIFIED = {"overridden", "inference_mode", "autocast", "compiling", "dispatch_mode", "enclosing_capture"}
# What a preparation may depend on, beside the contract.
RULE_METHODS = ("buffers", "scalars", "structure", "prepare", "phases")
# A recording that was replayed less often was wasted. After two of those in a row the next one waits, twice as long
# after each more, at most so many steps.
WORTHWHILE_REPLAYS = 8
LONGEST_PATIENCE = 8
# A recording that has not been of use for so many steps in a row gives its memory back.
MOST_MISSES = 16
# The replay that is timed: the first ones may still wait for the device to finish the set-up.
TIMED_REPLAY = 3


def requested_capture(explicit: bool | None, environment: Mapping[str, str] = os.environ) -> tuple[bool, bool]:
    """Decide whether capture is on.

    `LUCID_CAPTURE_UPDATES` (0 or 1) is the default where nothing explicit was said, and wins over an explicit argument
    inside an arm of `lucid profile run`, which sets `LUCID_PROFILE_ARM`.

    Args:
        explicit: The constructor's argument.
        environment: Where the variables are looked up.

    Returns:
        The decision, and whether it went against `explicit`.

    Raises:
        TypeError: If `explicit` is not a bool or None.
        ValueError: If `LUCID_CAPTURE_UPDATES` is set to anything but 0 or 1.
    """
    if explicit is not None and not isinstance(explicit, bool):
        raise TypeError(f"capture_updates must be True, False or None, got {explicit!r}")
    text = environment.get("LUCID_CAPTURE_UPDATES", "")
    if text not in {"", "0", "1"}:
        raise ValueError(f"LUCID_CAPTURE_UPDATES must be 0 or 1, got {text!r}")
    inside_arm = bool(environment.get("LUCID_PROFILE_ARM"))
    if explicit is not None and not (inside_arm and text):
        return explicit, False
    decision = text == "1"
    return decision, explicit is not None and explicit != decision


def is_overridden(optimizer: object, base: type, names: Sequence[str]) -> bool:
    """Tell whether a subclass replaces one of the base's methods, or the instance itself one other than `step`.

    Wrappers of `step` that keep what they wrap in `__wrapped__` do not count: torch sets them. An instance's own
    `step`, which schedulers set, has called the class's by the time that this is asked.
    """
    for name in names:
        if name == "step":
            is_own = unwrap(type(optimizer).step) is unwrap(base.step)  # type: ignore[attr-defined]
        else:
            is_own = name not in vars(optimizer) and getattr(type(optimizer), name) is getattr(base, name)
        if not is_own:
            return True
    return False


def identity(rule: Rule) -> tuple[object, ...]:
    """Return the rule and the methods that it has now; whoever exchanges one has another rule."""
    return rule, *(getattr(type(rule), name) for name in RULE_METHODS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step is about.

    Attributes:
        groups: The groups that take part, each with its position.
        param_groups: All groups of the optimizer.
        state: The optimizer's.
        rule: Of every group.
        structures: By position, for the groups that take part.
        orthogonalize: Handed to the rule.
        is_overridden: Whether somebody's code takes the place of the machinery's or the rule's.
        is_strict: Whether falling back raises.
        num_branches: How many groups a recording prepares side by side.
    """

    groups: list[Members]
    param_groups: list[Group]
    state: State
    rule: Rule
    structures: dict[int, Any]
    orthogonalize: Orthogonalize
    is_overridden: bool
    is_strict: bool
    num_branches: int

    def buffers(self, members: Members) -> list[Tensor]:
        """Return the buffers of a group's members, as far as they have been made."""
        entries = [self.state[param] for param in members.params if param in self.state]
        found = [entry.get(name) for entry in entries for name in members.names]
        return [buffer for buffer in found if buffer is not None]

    def scalar_tensors(self, position: int) -> list[Tensor]:
        """Return the hyperparameters of a group that are tensors."""
        values = (self.param_groups[position][name] for name in self.rule.hyperparameters)
        return [value for value in values if isinstance(value, Tensor)]

    def signature(self) -> dict[int, str]:
        """Return the structures in a form whose equality distinguishes types and the sign of zero."""
        return {position: repr(structure) for position, structure in self.structures.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What becomes of one step.

    Attributes:
        reasons: By group position, the key of `REASONS` for a native step, or None for a replay.
        culprit: The group that holds back those whose reason is `held_back`.
        candidate: What holds now, or None.
        is_recorded_now: Whether this step makes a recording.
        copied_bytes: By group position, bytes of gradients that the replay has copied.
    """

    reasons: Mapping[int, str | None]
    culprit: int | None = None
    candidate: "Candidate | None" = None
    is_recorded_now: bool = False
    copied_bytes: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def all_native(cls, step: Step, reason: str) -> "Plan":
        """Return the plan in which every group runs natively for one reason."""
        return cls(reasons={members.position: reason for members in step.groups})

    @staticmethod
    def of(positions: Sequence[int], step: Step) -> list[Members]:
        """Return the groups at some positions."""
        return [members for members in step.groups if members.position in positions]

    @property
    def replayed(self) -> list[int]:
        """Positions of the groups that are to be replayed."""
        return [position for position, reason in self.reasons.items() if reason is None]

    @property
    def native(self) -> list[int]:
        """Positions of the groups that are to be stepped natively."""
        return [position for position, reason in self.reasons.items() if reason is not None]


class Candidate:
    """A certificate with the signature under which it was issued, and what was recorded under both.

    Attributes:
        certificate: Of the tensors.
        ineligible: Groups that no recording can serve, each with its key of `REASONS`.
        recording: Of the other groups, or None.
        refusal: Why no recording could be made.
        num_held: Steps for which it has held.
        num_missed: Steps in a row for which it has not.
    """

    def __init__(self, step: Step) -> None:
        self.certificate = Certificate(step.groups, step.state)
        self.ineligible = self.certificate.ineligible()
        self.recording: Recording | None = None
        self.refusal: str | None = None
        self.num_held = 0
        self.num_missed = 0
        self._signature = step.signature()
        self._modes = numeric_modes()
        self._rule = identity(step.rule)

    def failures(self, step: Step, signature: Mapping[int, str], modes: tuple[object, ...]) -> dict[int, str]:
        """Return the groups for which something does not hold any more, each with its key of `REASONS`."""
        found = self.certificate.failures(step.groups, step.state)
        for position in signature:
            if position in found:
                continue
            # Groups outside the recording are read after its writes, which natively come in their order.
            if any(map(self.certificate.meets, step.scalar_tensors(position))):
                found[position] = "shared_memory"
            elif position not in self.ineligible:
                if signature[position] != self._signature.get(position) or identity(step.rule) != self._rule:
                    found[position] = "changed_structure"
                elif modes != self._modes:
                    found[position] = "changed_modes"
        return found

    def release(self) -> None:
        """Give the recording's memory back."""
        if self.recording is not None:
            self.recording.reset()
            self.recording = None


class UpdateCapture:
    """Recording and replay of one optimizer's update preparation.

    Attributes:
        setup_seconds: Host seconds spent on recordings, failed ones included.
    """

    def __init__(self) -> None:
        self.setup_seconds = 0.0
        self._num_wasted = 0
        self._candidates: list[Candidate] = []
        self._native_watch: graphs.Stopwatch | None = None
        self._replay_watch: graphs.Stopwatch | None = None
        self._num_native = 0
        self._logged: set[str] = set()

    @property
    def recording(self) -> Recording | None:
        """The present recording."""
        return next((one.recording for one in self._candidates if one.recording is not None), None)

    def _drop(self) -> None:
        """Drop recordings and certificates; after one that was not worth it, the next one waits longer."""
        replays = [one.recording.replays for one in self._candidates if one.recording is not None]
        if replays:
            self._num_wasted = self._num_wasted + 1 if replays[0] < WORTHWHILE_REPLAYS else 0
        for candidate in self._candidates:
            candidate.release()
        self._candidates = []

    def release(self) -> None:
        """Drop recordings and certificates, and give their memory back."""
        for candidate in self._candidates:
            candidate.release()
        self._candidates = []
        self._num_native = 0
        self._num_wasted = 0

    def times(self) -> tuple[float | None, float | None]:
        """Return the device seconds of a native and of a replayed step, as far as they are known."""
        watches = (self._native_watch, self._replay_watch)
        native, replay = (None if watch is None else watch.seconds() for watch in watches)
        return native, replay

    def plan(self, step: Step) -> Plan:
        """Decide what becomes of a step; nothing is written.

        Raises:
            CaptureError: If a group would fall back and the optimizer is strict.
        """
        if not step.groups:
            return Plan(reasons={})
        plan = self._plan(step)
        self._num_native = 0 if plan.replayed else self._num_native + 1
        for position, reason in plan.reasons.items():
            if reason is not None and (reason not in PLANNED or self._num_native >= STRICT_PATIENCE):
                self._complain(step, position, reason)
        return plan

    def _complain(self, step: Step, position: int, reason: str, detail: str = "") -> None:
        """Raise if strict, else log each reason once."""
        if step.is_strict:
            self._num_native = 0
            raise CaptureError(position, reason, detail)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("group %d runs natively: %s: %s %s", position, reason, REASONS[reason], detail)

    def _plan(self, step: Step) -> Plan:
        if step.is_overridden:
            return Plan.all_native(step, "overridden")
        devices = {members.params[0].device for members in step.groups}
        mode = next(filter(None, map(forbidding_mode, devices)), None)
        if mode is not None:
            return Plan.all_native(step, mode)
        if not self._candidates:
            reasons = {
                members.position: ineligibility(members, step.buffers(members)) or "warming_up"
                for members in step.groups
            }
            return Plan(reasons=reasons)
        positions = [members.position for members in step.groups]
        signature, modes = step.signature(), numeric_modes()
        plans = []
        for candidate in list(self._candidates):
            failures = candidate.failures(step, signature, modes)
            if not failures:
                candidate.num_missed = 0
                candidate.num_held += 1
                reason = candidate.refusal
                if candidate.recording is None and reason is None:
                    reason = self._delay(candidate, step)
                return Plan(
                    reasons={position: candidate.ineligible.get(position, reason) for position in positions},
                    candidate=candidate,
                )
            candidate.num_missed += 1
            if candidate.num_missed > MOST_MISSES:
                candidate.release()
                self._candidates.remove(candidate)
            own = {**candidate.ineligible, **failures}
            plans.append(
                Plan(
                    reasons={position: own.get(position, "held_back") for position in positions},
                    culprit=next(iter(failures)),
                )
            )
        return plans[-1]  # the newest certificate knows best

    def _delay(self, candidate: Candidate, step: Step) -> str | None:
        """Return the key of `REASONS` for why a candidate that holds is not recorded yet, or None."""
        if self._native_watch is None:
            return "warming_up"
        patience = min(2 ** max(0, self._num_wasted - 2), LONGEST_PATIENCE)
        # Whoever is strict wants replays, whatever they cost.
        return "waiting" if candidate.num_held < patience and not step.is_strict else None

    def replay(self, plan: Plan, step: Step) -> Plan:
        """Record where that is due, and replay; the groups left over are to be stepped natively.

        Args:
            plan: What `plan` returned for this step.
            step: The step.

        Returns:
            The plan as it was carried out.

        Raises:
            CaptureError: If recording failed and the optimizer is strict; nothing has been written.
        """
        candidate = plan.candidate
        if candidate is None or not plan.replayed:
            return plan
        scalars = {position: step.rule.scalars(step.param_groups[position]) for position in plan.replayed}
        recording, is_recorded_now = candidate.recording, False
        if recording is None:
            structures = {position: step.structures[position] for position in plan.replayed}
            recording, detail = self._record(candidate, step, structures, scalars)
            if recording is None:
                self._complain(step, plan.replayed[0], str(candidate.refusal), detail)
                return replace(plan, reasons={at: one or candidate.refusal for at, one in plan.reasons.items()})
            is_recorded_now = True
        watch = None
        if self._replay_watch is None and recording.replays == TIMED_REPLAY:
            watch = self._replay_watch = graphs.Stopwatch()
        with graphs.measured(watch, recording.device):
            recording.replay(step.param_groups, {members.position: members for members in step.groups}, scalars)
        return replace(plan, is_recorded_now=is_recorded_now, copied_bytes=recording.copied_bytes)

    def _record(
        self,
        candidate: Candidate,
        step: Step,
        structures: Mapping[int, Any],
        scalars: Mapping[int, Mapping[str, Scalar]],
    ) -> tuple[Recording | None, str]:
        """Record for a candidate, in place of every other one, so that two recordings never hold memory at once.

        Returns:
            The recording, or None and what went wrong, of which nothing is kept but the words.
        """
        begin = time.perf_counter()
        self._drop()
        self._candidates = [candidate]
        detail = ""
        try:
            with graphs.building(candidate.certificate.device or step.groups[0].params[0].device):
                candidate.recording = Recording(
                    candidate.certificate, step.rule, structures, scalars, step.orthogonalize, step.num_branches
                )
        except graphs.RecordingError as error:
            candidate.refusal, detail = error.reason, str(error)
        finally:
            self.setup_seconds += time.perf_counter() - begin
        return candidate.recording, detail

    def native(self, plan: Plan) -> AbstractContextManager[None]:
        """Return the context in which a step's native part runs; it times the one that comes before a recording."""
        candidate = plan.candidate
        watch = None
        if candidate is not None and self._native_watch is None and not plan.replayed:
            watch = self._native_watch = graphs.Stopwatch()
        return graphs.measured(watch, candidate.certificate.device if candidate is not None else None)

    def settle(self, plan: Plan, step: Step) -> None:
        """Issue a certificate after a step that none covered."""
        if plan.candidate is not None or not plan.reasons or UNCERTIFIED & set(plan.reasons.values()):
            return
        if INVALIDATING & set(plan.reasons.values()):
            self._drop()
        candidate = Candidate(step)
        self._candidates = [one for one in self._candidates if one.recording is not None]
        if len(candidate.ineligible) == len(step.groups):
            return
        if candidate.certificate.failures(step.groups, step.state) and not candidate.certificate.has_overlap:
            return  # an odd step: other kernels may have been loaded than are to be recorded
        if candidate.certificate.device is not None:
            spans.load(candidate.certificate.device)
        self._candidates.append(candidate)
