"""The detection loss: Complete IoU of assigned boxes and cross-entropy of every score."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lucid_cli.workloads.detection.assign import Assignment, assign
from lucid_cli.workloads.detection.boxes import complete_iou
from lucid_cli.workloads.detection.values import Batch, Predictions

__all__ = ["Losses", "detection_loss"]

BOX_WEIGHT = 2.0
CLS_WEIGHT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Scalars in float32.

    Attributes:
        box: Mean of `1 - CIoU` over the assigned cells, weighted by their alignment.
        cls: Cross-entropy summed over cells and classes, divided by the sum of alignments.
        total: `BOX_WEIGHT box + CLS_WEIGHT cls`, the one to differentiate.
    """

    box: Tensor
    cls: Tensor
    total: Tensor


def detection_loss(predictions: Predictions, batch: Batch, *, num_classes: int) -> Losses:
    """Compare predictions with targets.

    Background enters with weight 0 rather than being selected away, so that gradients need no scatter, whose order of
    addition a device chooses.

    Args:
        predictions: `b` images, `a` cells, `num_classes` classes.
        batch: Their targets, possibly none; images are not read.
        num_classes: Number of classes `c`.

    Returns:
        Losses; both are divided by the sum of the alignments or 1, whichever is greater.
    """
    assignment = assign(predictions, batch)
    boxes, scores = _goals(batch, assignment, num_classes=num_classes)
    norm = assignment.alignment.sum().clamp(min=1)
    distance = (1 - complete_iou(predictions.boxes, boxes)) * assignment.alignment
    box = distance.sum() / norm
    cls = functional.binary_cross_entropy_with_logits(predictions.logits.float(), scores, reduction="sum") / norm
    return Losses(box=box, cls=cls, total=BOX_WEIGHT * box + CLS_WEIGHT * cls)


def _goals(batch: Batch, assignment: Assignment, *, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return what each cell should say: boxes `(b, a, 4)`, arbitrary for background, and scores `(b, a, c)`."""
    shape, device = assignment.target.shape, assignment.target.device
    if len(batch.boxes) == 0:
        return torch.zeros(*shape, 4, device=device), torch.zeros(*shape, num_classes, device=device)
    row = assignment.target.clamp(min=0)
    is_class = batch.classes[row][..., None] == torch.arange(num_classes, device=device)
    return batch.boxes[row], is_class * assignment.alignment[..., None]
