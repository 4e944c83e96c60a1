"""Average precision by COCO's rule.

Source: https://cocodataset.org/#detection-eval: greedy matching in the order of scores, precision made monotonic and
read at 101 points of recall, mean over IoU 0.50 to 0.95. No crowd regions, no ranges of area; how many detections an
image may have is the business of `decode`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lucid_cli.workloads.detection.boxes import pairwise_iou
from lucid_cli.workloads.detection.values import Detections, Targets

__all__ = ["Precision", "average_precision"]

THRESHOLDS = tuple((50 + 5 * step) / 100 for step in range(10))
# Multiples of 0.01 as a float64 product gives them, because the published evaluators compare with those.
RECALLS = tuple(step * 0.01 for step in range(101))

NO_TARGETS = "no validation image has an annotated object"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Average precision in [0, 1].

    Attributes:
        ap: Mean over IoU thresholds and classes; None where there are no targets at all.
        ap50: Mean over classes at the IoU threshold 0.50; None likewise.
        per_class: Mean over IoU thresholds of each class that has targets, by class.
        reason: Why there is no number; None where there is one.
    """

    ap: float | None
    ap50: float | None
    per_class: dict[int, float]
    reason: str | None = None


def average_precision(detections: Sequence[Detections], targets: Sequence[Targets], *, num_classes: int) -> Precision:
    """Compare what was found with what is there, computed on the CPU in float64.

    Args:
        detections: One value an image.
        targets: One value an image, in the same order.
        num_classes: Number of classes; those without targets are left out of every mean.

    Returns:
        Average precision.

    Raises:
        ValueError: If there are not as many detections as targets.
    """
    if len(detections) != len(targets):
        raise ValueError(f"one Detections and one Targets an image, got {len(detections)} and {len(targets)}")
    present = torch.cat([there.classes.cpu() for there in targets]) if targets else torch.zeros(0, dtype=torch.int64)
    if len(present) == 0:
        return Precision(ap=None, ap50=None, per_class={}, reason=NO_TARGETS)
    order = torch.cat([found.scores.cpu() for found in detections]).sort(descending=True, stable=True).indices
    classes = torch.cat([found.classes.cpu() for found in detections])[order]
    hits = torch.cat([_hits(*pair) for pair in zip(detections, targets, strict=True)], dim=1)[:, order]
    curves = {
        label: _mean_precision(hits[:, classes == label], total)  # (thresholds,)
        for label, total in enumerate(torch.bincount(present, minlength=num_classes).tolist())
        if total > 0
    }
    table = torch.stack(list(curves.values()))
    return Precision(
        ap=float(table.mean()),
        ap50=float(table[:, 0].mean()),
        per_class={label: float(curve.mean()) for label, curve in curves.items()},
    )


def _hits(found: Detections, there: Targets) -> Tensor:
    """Tell which of an image's k detections match a target of their class: `(thresholds, k)` bool.

    The best detection chooses first: of the targets that are free at a threshold, the one that it overlaps most.
    """
    overlap = pairwise_iou(found.boxes.cpu().double(), there.boxes.cpu().double())
    overlap = overlap * (found.classes.cpu()[:, None] == there.classes.cpu())  # (k, n)
    thresholds = torch.tensor(THRESHOLDS, dtype=torch.float64)
    free = torch.ones(len(thresholds), overlap.shape[1], dtype=torch.bool)
    hits = torch.zeros(len(thresholds), overlap.shape[0], dtype=torch.bool)
    for row in (overlap >= THRESHOLDS[0]).any(1).nonzero().flatten().tolist():
        choice = torch.where(free, overlap[row], -1.0)
        # The last of equals, as the published evaluators choose.
        column = choice.shape[1] - 1 - choice.flip(1).argmax(1)
        hits[:, row] = choice.amax(1) >= thresholds
        free[torch.arange(len(thresholds)), column] &= ~hits[:, row]
    return hits


def _mean_precision(hits: Tensor, total: int) -> Tensor:
    """Return the mean precision over points of recall, `(thresholds,)` float64, of hits in the order of scores."""
    matched = hits.cumsum(1).double()  # (thresholds, k)
    precision = matched / torch.arange(1, hits.shape[1] + 1)
    precision = torch.cat([precision, torch.zeros(len(hits), 1, dtype=torch.float64)], dim=1)
    envelope = precision.flip(1).cummax(1).values.flip(1)
    points = torch.tensor(RECALLS, dtype=torch.float64).expand(len(hits), -1).contiguous()
    return envelope.gather(1, torch.searchsorted(matched / total, points)).mean(1)
