"""Overlap of boxes `x1 y1 x2 y2` with `x1 <= x2` and `y1 <= y2`: IoU, Complete IoU, clipping."""

import math

import torch
from torch import Tensor

__all__ = ["area", "complete_iou", "iou", "pairwise_iou"]

# Below these, in pixels and square pixels, a side or an area counts as none; they bound quotients and their gradients.
MIN_SIDE = 1e-3
MIN_AREA = MIN_SIDE**2


def area(boxes: Tensor) -> Tensor:
    """Return the areas `(...)` of boxes `(..., 4)`."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Return intersection over union of boxes `(..., 4)` and `(..., 4)` that broadcast, 0 where both have no area."""
    width = torch.minimum(a[..., 2], b[..., 2]) - torch.maximum(a[..., 0], b[..., 0])
    height = torch.minimum(a[..., 3], b[..., 3]) - torch.maximum(a[..., 1], b[..., 1])
    shared = width.clamp(min=0) * height.clamp(min=0)
    return shared / (area(a) + area(b) - shared).clamp(min=MIN_AREA)


def pairwise_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return intersection over union `(n, m)` of each of `(n, 4)` with each of `(m, 4)` boxes; n and m may be 0."""
    return iou(a[:, None], b[None])


def complete_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return Complete IoU: IoU less the distance of the centres and the difference of the aspect ratios.

    Source: Zheng et al., Distance-IoU Loss, https://arxiv.org/abs/1911.08287, with the weight of the aspect term held
    constant in the gradient. In the aspect ratio sides count as at least `MIN_SIDE`, so that gradients of the thinnest
    boxes are finite.

    Args:
        a: Boxes `(..., 4)`, floating point.
        b: Boxes `(..., 4)`, which broadcast with `a`.

    Returns:
        `(...)` in (-2, 1]: 1 for equal boxes, negative for most that do not overlap.
    """
    overlap = iou(a, b)
    offset = (a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) / 2
    hull = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    distance = offset.square().sum(-1) / hull.square().sum(-1).clamp(min=MIN_AREA)
    aspect = (4 / math.pi**2) * (_angle(a) - _angle(b)).square()
    with torch.no_grad():
        weight = aspect / ((1 - overlap).clamp(min=0) + aspect).clamp(min=torch.finfo(aspect.dtype).tiny)
    return overlap - distance - weight * aspect


def _angle(boxes: Tensor) -> Tensor:
    """Return the arc tangent `(...)` of width over height."""
    sides = (boxes[..., 2:] - boxes[..., :2]).clamp(min=MIN_SIDE)
    return torch.atan(sides[..., 0] / sides[..., 1])
