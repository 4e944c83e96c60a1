"""Which cell learns which target: task-aligned assignment, dense over images, targets and cells.

Source: Feng et al., TOOD: Task-aligned One-stage Object Detection, https://arxiv.org/abs/2108.07755 (section 3.2), for
the measure, its normalisation and the constants.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lucid_cli.workloads.detection.boxes import iou
from lucid_cli.workloads.detection.values import Batch, Predictions

__all__ = ["Assignment", "assign"]

TOP_K = 13
SCORE_POWER = 1.0
IOU_POWER = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What each cell is to learn.

    Attributes:
        target: `(b, a)` int64, the position of the cell's target in the batch, -1 for background.
        alignment: `(b, a)` float32 in [0, 1], the score that the cell should give to its target's class; 0 for
            background. The best cell of a target has the greatest IoU that any of its cells has.
    """

    target: Tensor
    alignment: Tensor


@torch.no_grad()
def assign(predictions: Predictions, batch: Batch, *, top_k: int = TOP_K) -> Assignment:
    """Give each target the cells that already describe it best.

    A target wants the `top_k` cells of greatest `score^1 iou^6` among those whose centre lies inside its box, lower
    index first where they are equal. A target that contains no centre wants the cell of the nearest centre, and gets
    it before any target that contains centres. A cell that several want goes to the one of greatest IoU, then to the
    first of the batch.

    Args:
        predictions: `b` images, `a` cells, `c` classes; read without gradient.
        batch: `n` targets, ascending by image, classes below `c`.
        top_k: Cells that a target may want, at least 1.

    Returns:
        Cells' targets and alignments, on the device of the predictions.
    """
    if len(batch.boxes) == 0:
        shape, device = predictions.boxes.shape[:2], predictions.boxes.device
        return Assignment(
            target=torch.full(shape, -1, dtype=torch.int64, device=device),
            alignment=torch.zeros(shape, device=device),
        )
    rows, real = _by_image(batch.image_index, len(predictions.boxes))  # (b, m)
    boxes, classes = batch.boxes[rows], batch.classes[rows]  # (b, m, 4), (b, m)
    overlap = iou(boxes[:, :, None], predictions.boxes[:, None])  # (b, m, a)
    measure = _scores(predictions.logits, classes) ** SCORE_POWER * overlap**IOU_POWER

    best, sole = _claims(predictions.centers, boxes, measure, top_k=top_k)
    best, sole = best & real[:, :, None], sole & real[:, :, None]
    wanted = torch.where(sole.any(1, keepdim=True), sole, best)
    winner = torch.where(wanted, overlap, -1).argmax(1)  # (b, a), the first of equals
    owns = wanted & (winner[:, None] == torch.arange(rows.shape[1], device=rows.device)[:, None])  # (b, m, a)
    return Assignment(
        target=torch.where(wanted.any(1), rows.gather(1, winner), -1),
        alignment=_normalized(measure * owns, overlap * owns).sum(1),
    )


def _by_image(image_index: Tensor, num_images: int) -> tuple[Tensor, Tensor]:
    """Return the positions of each image's targets, `(b, m)` for the m of the fullest image, and which are real."""
    counts = (image_index == torch.arange(num_images, device=image_index.device)[:, None]).sum(1, keepdim=True)
    places = torch.arange(int(counts.max()), device=image_index.device)
    rows = counts.cumsum(0) - counts + places
    return rows.clamp(max=len(image_index) - 1), places < counts


def _scores(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the probability `(b, m, a)` that each cell gives to each target's class; logits `(b, a, c)`."""
    images = torch.arange(len(logits), device=logits.device)[:, None]
    return logits.float().sigmoid().transpose(1, 2)[images, classes]


def _claims(centers: Tensor, boxes: Tensor, measure: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the cells `(b, m, a)` that are among a target's best inside its box, and its nearest if none is inside."""
    corner, opposite = boxes[:, :, None, :2], boxes[:, :, None, 2:]
    inside = ((centers > corner) & (centers < opposite)).all(-1)
    # topk breaks ties as it likes; a stable sort prefers the lower index.
    order = torch.where(inside, measure, -1).sort(dim=2, descending=True, stable=True).indices
    best = torch.zeros_like(inside).scatter(2, order[:, :, :top_k], value=True) & inside

    nearest = (centers - (corner + opposite) / 2).square().sum(-1).argmin(2, keepdim=True)
    is_nearest = nearest == torch.arange(len(centers), device=centers.device)
    return best, is_nearest & ~inside.any(2, keepdim=True)


def _normalized(measure: Tensor, overlap: Tensor) -> Tensor:
    """Scale the measures `(b, m, a)` of each target's cells so that the greatest equals their greatest IoU."""
    peak = measure.amax(2, keepdim=True).clamp(min=torch.finfo(measure.dtype).tiny)
    return measure / peak * overlap.amax(2, keepdim=True)
