"""What became of a request to capture, counted by group and by reason."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["REASONS", "CaptureReport", "GroupReport", "Tally"]

# Reason code -> what it means and what to do about it.
REASONS = {
    "not_requested": "capture is off; pass capture_updates=True or set LUCID_CAPTURE_UPDATES=1",
    "no_cuda": "capture needs CUDA parameters and these are on another device; move the model to a CUDA device",
    "not_implemented": "this release has no capture yet; the step ran natively",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One param group since the optimizer was made or unpickled.

    Attributes:
        captured: Whether the last step replayed a recording.
        reasons: Steps that ran natively, counted by a key of `REASONS`.
        recordings: Recordings made.
        replays: Steps that replayed a recording.
        copied_bytes: Bytes of gradients copied into owned inputs by the last replay.
        pool_bytes: Device memory that the recordings keep reserved.
        setup_seconds: Wall seconds spent on warm-up and recording.
    """

    captured: bool
    reasons: dict[str, int]
    recordings: int = 0
    replays: int = 0
    copied_bytes: int = 0
    pool_bytes: int = 0
    setup_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What an optimizer captured, and why not where it did not.

    Attributes:
        requested: Whether capturing update preparation is on.
        orthogonalization_requested: Whether capturing the orthogonalisation alone is on.
        overridden: Whether the arm of a `lucid profile run` decided against the constructor's explicit argument.
        groups: One report a param group, in their order.
    """

    requested: bool
    orthogonalization_requested: bool
    overridden: bool
    groups: tuple[GroupReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists and numbers."""
        return asdict(self) | {"groups": [asdict(group) for group in self.groups]}


@dataclass(slots=True)
class Tally:
    """The running counts behind a `GroupReport`."""

    reasons: Counter[str] = field(default_factory=Counter)

    def report(self) -> GroupReport:
        """Return the counts so far."""
        return GroupReport(captured=False, reasons=dict(self.reasons))
