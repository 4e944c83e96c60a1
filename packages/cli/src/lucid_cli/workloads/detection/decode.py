"""From predictions to detections: the best scores, without the boxes that repeat a better one."""

import torch
from torch import Tensor

from lucid_cli.workloads.detection.boxes import pairwise_iou
from lucid_cli.workloads.detection.values import Detections, Predictions

__all__ = ["decode", "suppress"]

# As many of an image's best scores enter the suppression, whose cost grows with their square.
MAX_CANDIDATES = 500


@torch.no_grad()
def decode(
    predictions: Predictions, *, max_detections: int = 100, score_floor: float = 0.001, iou_limit: float = 0.65
) -> list[Detections]:
    """Return what is found in each image of a batch.

    A cell may be found as several classes. Equal scores keep the order of cells, then of classes, so equal predictions
    give equal detections on every run.

    Args:
        predictions: `b` images, `a` cells, `c` classes.
        max_detections: An image keeps as many at most.
        score_floor: Lower scores are dropped, and those that are not numbers.
        iou_limit: A box that overlaps a better one of its class by more is dropped.

    Returns:
        One value an image, on the device of the predictions.
    """
    num_classes = predictions.logits.shape[2]
    found = []
    for boxes, logits in zip(predictions.boxes, predictions.logits, strict=True):
        scores = logits.float().sigmoid().flatten()  # (a * c,)
        kept = (scores >= score_floor).nonzero().flatten()
        kept = kept[scores[kept].sort(descending=True, stable=True).indices][:MAX_CANDIDATES]
        cells, classes = kept // num_classes, kept % num_classes
        chosen = suppress(boxes[cells], classes, iou_limit=iou_limit)[:max_detections]
        found.append(
            Detections(boxes=boxes[cells][chosen], scores=scores[kept][chosen], classes=classes[chosen]),
        )
    return found


def suppress(boxes: Tensor, classes: Tensor, *, iou_limit: float) -> Tensor:
    """Return the positions that greedy non-maximum suppression keeps.

    Greedy means: the first box stays, and each later one stays unless a box that stays overlaps it. That sentence
    is applied to all boxes at once until nothing changes: after i rounds the first i answers are final, and a few
    rounds are enough because chains of overlaps are short.

    Args:
        boxes: `(k, 4)`, best first.
        classes: `(k,)`; only boxes of one class suppress one another.
        iou_limit: The greatest IoU that two boxes of one class may have.

    Returns:
        `(kept,)` int64, ascending.
    """
    same = classes[:, None] == classes
    overlaps = ((pairwise_iou(boxes, boxes) > iou_limit) & same).triu(diagonal=1)  # row suppresses column
    stays = torch.ones(len(boxes), dtype=torch.bool, device=boxes.device)
    while True:
        again = ~(overlaps & stays[:, None]).any(0)
        if torch.equal(again, stays):
            return stays.nonzero().flatten()
        stays = again
