"""What became of a request to capture, counted by group and by reason."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["PLANNED", "REASONS", "CaptureError", "CaptureReport", "GroupReport", "Tally"]

# Reason code -> what it means and what to do about it.
REASONS = {
    "not_requested": "capture is off; pass capture_updates=True or set LUCID_CAPTURE_UPDATES=1",
    "no_cuda": "capture needs CUDA parameters and these are on another device; move the model to a CUDA device",
    "overridden": "a subclass or the instance overrides the step, its updates or the rule; capture_orthogonalization "
    "serves such classes",
    "warming_up": "these steps come before a recording: they make buffers, load kernels and are timed",
    "waiting": "recordings were replaced before they had paid for themselves; the next one waits for quieter times",
    "changed_parameters": "a parameter was replaced, moved or laid out anew; the next steps record again",
    "changed_state": "a buffer was replaced, moved or laid out anew; leave optimizer.state alone between steps",
    "changed_gradients": "other parameters had gradients than those recorded; freeze once, not step by step",
    "changed_structure": "a hyperparameter changed that decides which operations run; change it rarely",
    "changed_modes": "a numeric mode such as TF32 or deterministic algorithms changed; set modes before training",
    "gradient": "a gradient was no plain float32 tensor on its parameter's device; let autograd make the gradients",
    "shared_memory": "a written tensor or a gradient shares memory with a written tensor; clone one of them",
    "subclass": "a parameter or buffer is of a tensor subclass, whose operations are its own; use plain parameters",
    "several_devices": "a group's tensors are on several devices; make one group a device",
    "other_device": "another group was recorded on another device; make one optimizer a device",
    "dtype": "a parameter or buffer is not float32; keep float32 parameters and autocast the forward pass",
    "layout": "a parameter or buffer has gaps or overlaps in memory; make it contiguous or channels_last",
    "inference_mode": "the step ran in inference mode; step outside it",
    "autocast": "the step ran under autocast; end autocast before the step",
    "compiling": "the step was being traced; compile the model, not the step",
    "dispatch_mode": "a torch dispatch mode was active and wants to see the operations; step outside it",
    "autograd": "autograd was to follow an orthogonalisation; call it under torch.no_grad()",
    "scheme": "only NewtonSchulz is recorded: what another scheme depends on is not known; use NewtonSchulz",
    "enclosing_capture": "the step was itself inside a CUDA graph capture; step outside it",
    "recording_failed": "recording raised; the log has the error, release() allows another attempt",
    "out_of_memory": "recording ran out of device memory; lower the batch size, release() allows another attempt",
    "held_back": "this group could be replayed, but another one of the recording could not; see that group's reasons",
}
# Native steps for these reasons belong to capturing; they count as falling back only when they go on and on.
PLANNED = frozenset(
    {
        "not_requested",
        "warming_up",
        "waiting",
        "changed_parameters",
        "changed_state",
        "changed_gradients",
        "changed_structure",
        "changed_modes",
        "held_back",
    }
)


class CaptureError(RuntimeError):
    """A strict optimizer would have had to fall back to the native step; nothing has been written.

    Attributes:
        reason: A key of `REASONS`.
    """

    def __init__(self, position: int, reason: str, detail: str = "") -> None:
        super().__init__(f"group {position} cannot be captured: {reason}: {REASONS[reason]}{detail and f' ({detail})'}")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One param group since the optimizer was made or unpickled.

    Attributes:
        captured: Whether the last step replayed a recording.
        reasons: Steps that ran natively, counted by a key of `REASONS`.
        held_back_by: For the steps counted as `held_back`, how often each other group, by position, was the culprit.
        recordings: Recordings that this group was part of.
        replays: Steps that replayed a recording.
        copied_bytes: Bytes of gradients copied into owned inputs by the last replay.
    """

    captured: bool
    reasons: dict[str, int]
    held_back_by: dict[int, int]
    recordings: int = 0
    replays: int = 0
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What an optimizer captured, and why not where it did not.

    Attributes:
        requested: Whether capturing update preparation is on.
        orthogonalization_requested: Whether capturing the orthogonalisation alone is on.
        overridden: Whether the arm of a `lucid profile run` decided against the constructor's explicit argument.
        groups: One report a param group, in their order.
        pool_bytes: Device memory that the present recording keeps reserved, owned copies of gradients included.
        setup_seconds: Host seconds spent on recordings.
        native_seconds: Device time of one native step after the first, or None while there is none; it includes what
            the device waits for the host.
        replay_seconds: Device time of one replayed step, likewise.
        break_even_steps: Replays after which the set-up has paid for itself, or None where it never does or the times
            are not known yet.
        orthogonalization_recordings: Recordings of the orthogonalisation alone.
        orthogonalization_replays: Its replays.
        orthogonalization_reasons: Its native calls, counted by a key of `REASONS`.
    """

    requested: bool
    orthogonalization_requested: bool
    overridden: bool
    groups: tuple[GroupReport, ...]
    pool_bytes: int = 0
    setup_seconds: float = 0.0
    native_seconds: float | None = None
    replay_seconds: float | None = None
    break_even_steps: int | None = None
    orthogonalization_recordings: int = 0
    orthogonalization_replays: int = 0
    orthogonalization_reasons: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists and numbers."""
        groups = [
            {**asdict(group), "held_back_by": {str(key): count for key, count in group.held_back_by.items()}}
            for group in self.groups
        ]
        return asdict(self) | {"groups": groups}


@dataclass(slots=True)
class Tally:
    """The running counts behind a `GroupReport`."""

    captured: bool = False
    reasons: Counter[str] = field(default_factory=Counter)
    held_back_by: Counter[int] = field(default_factory=Counter)
    recordings: int = 0
    replays: int = 0
    copied_bytes: int = 0

    def report(self) -> GroupReport:
        """Return the counts so far."""
        return GroupReport(
            captured=self.captured,
            reasons=dict(self.reasons),
            held_back_by=dict(self.held_back_by),
            recordings=self.recordings,
            replays=self.replays,
            copied_bytes=self.copied_bytes,
        )
