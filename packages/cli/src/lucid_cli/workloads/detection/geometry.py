"""Places an image on a square canvas and takes its boxes along: the one resampling of letterbox and augmentation."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lucid_cli.workloads.detection.values import Targets

MIN_VISIBLE = 0.25  # share of a box's area that must stay inside the canvas; less is no longer the object
FILL = 114  # grey of what no image covers: near the middle, so that it is no edge to most images

__all__ = ["FILL", "MIN_VISIBLE", "Placement", "flip", "letterbox", "place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where an image lies on the canvas, in pixels; it may reach beyond it.

    Attributes:
        height: The image's height after resizing, at least 1.
        width: Its width after resizing, at least 1.
        top: Row of its first row; may be negative.
        left: Column of its first column; may be negative.
    """

    height: int
    width: int
    top: int
    left: int


def place(image: Tensor, targets: Targets, placement: Placement, *, size: int) -> tuple[Tensor, Targets]:
    """Resize an image, lay it on a grey canvas, and move, clip and drop its boxes.

    Args:
        image: `(3, h, w)` uint8; read only.
        targets: Its objects; read only.
        placement: Where it goes.
        size: Side of the canvas.

    Returns:
        A canvas `(3, size, size)` uint8 of its own memory, and the objects of which at least `MIN_VISIBLE` is seen.
    """
    scale_y, scale_x = placement.height / image.shape[1], placement.width / image.shape[2]
    canvas = image.new_full((3, size, size), FILL)
    _paste(canvas, _resize(image, placement.height, placement.width), placement.top, placement.left)
    scale = targets.boxes.new_tensor([scale_x, scale_y, scale_x, scale_y])
    offset = targets.boxes.new_tensor([placement.left, placement.top, placement.left, placement.top])
    return canvas, _visible(targets.boxes * scale + offset, targets.classes, size)


def letterbox(image: Tensor, targets: Targets, *, size: int) -> tuple[Tensor, Targets]:
    """Fit a whole image into the middle of a square; one that has that size already is returned as it is.

    Args:
        image: `(3, h, w)` uint8.
        targets: Its objects.
        size: Side of the square in pixels.
    """
    height, width = image.shape[1:]
    if height == width == size:
        return image, targets
    scale = size / max(height, width)
    height, width = max(round(height * scale), 1), max(round(width * scale), 1)
    placement = Placement(height=height, width=width, top=(size - height) // 2, left=(size - width) // 2)
    return place(image, targets, placement, size=size)


def flip(image: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
    """Mirror an image and its boxes left to right; both are new."""
    left, top, right, bottom = targets.boxes.unbind(1)
    width = image.shape[2]
    boxes = torch.stack([width - right, top, width - left, bottom], dim=1)
    return image.flip(2), Targets(boxes=boxes, classes=targets.classes)


def _resize(image: Tensor, height: int, width: int) -> Tensor:
    if image.shape[1:] == (height, width):
        return image
    return interpolate(image[None], size=(height, width), mode="bilinear", antialias=True)[0]


def _paste(canvas: Tensor, image: Tensor, top: int, left: int) -> None:
    """Write what of the image lies on the canvas."""
    size = canvas.shape[1]
    row, column = max(top, 0), max(left, 0)
    height = max(min(top + image.shape[1], size) - row, 0)
    width = max(min(left + image.shape[2], size) - column, 0)
    seen = image[:, row - top : row - top + height, column - left : column - left + width]
    canvas[:, row : row + height, column : column + width] = seen


def _visible(boxes: Tensor, classes: Tensor, size: int) -> Targets:
    """Clip boxes to the canvas and drop those of which too little is left."""
    clipped = boxes.clamp(0, size)
    sides = clipped[:, 2:] - clipped[:, :2]
    whole = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    keep = (sides > 0).all(dim=1) & (sides.prod(dim=1) >= MIN_VISIBLE * whole)
    return Targets(boxes=clipped[keep], classes=classes[keep])
