"""The values that travel between data, network, loss and metric. Boxes are `x1 y1 x2 y2` in pixels of the input."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Batch", "Detections", "Predictions", "Targets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The objects of one image.

    Attributes:
        boxes: `(n, 4)` float32.
        classes: `(n,)` int64.
    """

    boxes: Tensor
    classes: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Images of one size and their objects, those of all images one after the other.

    Attributes:
        images: `(b, 3, h, w)` uint8.
        boxes: `(n, 4)` float32.
        classes: `(n,)` int64.
        image_index: `(n,)` int64, ascending: the image that each object belongs to.
    """

    images: Tensor
    boxes: Tensor
    classes: Tensor
    image_index: Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """Return the batch on a device; tensors that are there already are shared."""
        return Batch(
            images=self.images.to(device, non_blocking=non_blocking),
            boxes=self.boxes.to(device, non_blocking=non_blocking),
            classes=self.classes.to(device, non_blocking=non_blocking),
            image_index=self.image_index.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "Batch":
        """Return a copy in page-locked memory; a DataLoader calls this by its name."""
        return Batch(
            images=self.images.pin_memory(),
            boxes=self.boxes.pin_memory(),
            classes=self.classes.pin_memory(),
            image_index=self.image_index.pin_memory(),
        )

    def targets(self) -> list[Targets]:
        """Return the objects of each image, `b` of them, empty ones included."""
        rows = [self.image_index == image for image in range(len(self.images))]
        return [Targets(boxes=self.boxes[row], classes=self.classes[row]) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """What the network says about a batch: one box and `c` scores for each of `a` cells of an image.

    Attributes:
        boxes: `(b, a, 4)` float32; no box is inside out.
        logits: `(b, a, c)`, the log-odds of each class, in the dtype that the network ran in.
        centers: `(a, 2)` float32, x and y of each cell's centre in pixels.
        strides: `(a,)` float32, the side of each cell in pixels.
    """

    boxes: Tensor
    logits: Tensor
    centers: Tensor
    strides: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Detections:
    """What is found in one image, best first.

    Attributes:
        boxes: `(k, 4)` float32.
        scores: `(k,)` float32 in [0, 1], descending.
        classes: `(k,)` int64.
    """

    boxes: Tensor
    scores: Tensor
    classes: Tensor
