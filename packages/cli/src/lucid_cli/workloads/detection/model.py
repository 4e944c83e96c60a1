"""The detector: a convolutional backbone, a neck that mixes three scales, one head a scale.

Source of the ingredients: split stages from https://arxiv.org/abs/1911.11929, the neck's two directions from
https://arxiv.org/abs/1803.01534, distances to the sides of a box from https://arxiv.org/abs/1904.01355.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lucid_cli.workloads.detection.values import Predictions

__all__ = ["STRIDES", "Attention", "Detector", "Head", "Variant", "build_detector"]

Variant = Literal["nano", "tiny"]

# Pixels between the cells of the three scales.
STRIDES = (8, 16, 32)

# The probability that a new network gives to each class in each cell: background must not drown the first steps.
# Source: Lin et al., Focal Loss for Dense Object Detection, https://arxiv.org/abs/1708.02002
PRIOR = 0.01
# The distance, in strides, that a new network sees between a centre and each side.
FIRST_DISTANCE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a detector is.

    Attributes:
        widths: Channels at the strides 2, 4, 8, 16 and 32.
        depths: Residual blocks in the stages of strides 4, 8, 16 and 32.
        has_context: Whether each cell of the coarsest map sees its surroundings and all other cells.
        neck_depth: Residual blocks in each stage of the neck.
        head_widths: Channels after each separable convolution in a branch of a head.
    """

    widths: tuple[int, int, int, int, int]
    depths: tuple[int, int, int, int]
    has_context: bool
    neck_depth: int
    head_widths: tuple[int, ...]


SIZES: dict[Variant, Size] = {
    "nano": Size(
        widths=(16, 32, 64, 128, 256),
        depths=(2, 2, 3, 1),
        has_context=True,
        neck_depth=2,
        head_widths=(64, 64),
    ),
    "tiny": Size(
        widths=(16, 32, 64, 64, 64),
        depths=(1, 1, 0, 0),
        has_context=False,
        neck_depth=0,
        head_widths=(),
    ),
}


class Unit(nn.Module):
    """A convolution that keeps the size (divided by the stride), a batch norm, an activation."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, dilation: int = 1, depthwise: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            inputs,
            outputs,
            kernel,
            stride=stride,
            padding=dilation * (kernel // 2),
            dilation=dilation,
            groups=inputs if depthwise else 1,
            bias=False,
        )
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, inputs, h, w)` to `(b, outputs, h / stride, w / stride)`."""
        return functional.silu(self.norm(self.conv(x)), inplace=True)


def separable(inputs: int, outputs: int) -> nn.Sequential:
    """Return a 3x3 convolution in two parts: one filter a channel, then a mix of channels."""
    return nn.Sequential(Unit(inputs, inputs, 3, depthwise=True), Unit(inputs, outputs, 1))


class Residual(nn.Module):
    """Two 3x3 convolutions beside the identity, full ones or separable ones."""

    def __init__(self, width: int, *, full: bool) -> None:
        super().__init__()
        self.first = Unit(width, width, 3) if full else separable(width, width)
        self.second = Unit(width, width, 3) if full else separable(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, width, h, w)` to the same."""
        refined: Tensor = self.second(self.first(x))
        return x + refined


class Stage(nn.Module):
    """Half of the channels pass residual blocks, the other half passes by, a 1x1 convolution mixes them."""

    def __init__(self, inputs: int, outputs: int, *, depth: int, full: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.aside = Unit(inputs, half, 1)
        self.enter = Unit(inputs, half, 1)
        self.blocks = nn.Sequential(*(Residual(half, full=full) for _ in range(depth)))
        self.merge = Unit(outputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, inputs, h, w)` to `(b, outputs, h, w)`."""
        merged: Tensor = self.merge(torch.cat([self.aside(x), self.blocks(self.enter(x))], dim=1))
        return merged


def stage(inputs: int, outputs: int, *, depth: int, full: bool) -> nn.Module:
    """Return a stage; without residual blocks it is a mix of channels."""
    return Stage(inputs, outputs, depth=depth, full=full) if depth else Unit(inputs, outputs, 1)


class Context(nn.Module):
    """Three depthwise convolutions of growing reach, one after the other, seen side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.enter = Unit(width, half, 1)
        self.reach = nn.ModuleList(Unit(half, half, 3, dilation=dilation, depthwise=True) for dilation in (1, 2, 3))
        self.merge = Unit(4 * half, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, width, h, w)` to the same."""
        views = [self.enter(x)]
        for reach in self.reach:
            views.append(reach(views[-1]))
        merged: Tensor = self.merge(torch.cat(views, dim=1))
        return merged


class Attention(nn.Module):
    """Each cell looks at all cells, then thinks on its own; both beside the identity."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.position = Unit(width, width, 3, depthwise=True)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)
        self.think = nn.Sequential(Unit(width, 2 * width, 1), nn.Conv2d(2 * width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """`(b, width, h, w)` to the same."""
        x = x + self.out(self._look(x + self.position(x)))
        thought: Tensor = self.think(x)
        return x + thought

    def _look(self, x: Tensor) -> Tensor:
        # Written out: fused attention picks kernels by device and version, and not all of them add in a fixed order.
        b, _, h, w = x.shape
        query, key, value = self.qkv(x).view(b, 3, self.heads, -1, h * w).unbind(1)  # (b, heads, d, h * w)
        weights = (query.mT @ key / math.sqrt(query.shape[2])).softmax(dim=3)  # (b, heads, h * w, h * w)
        looked: Tensor = value @ weights.mT
        return looked.reshape(x.shape)


class Backbone(nn.Module):
    """Five halvings of the image; the last three scales are handed on."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        w2, w4, w8, w16, w32 = size.widths
        self.stem = nn.Sequential(Unit(3, w2, 3, stride=2), self._down(w2, w4, size.depths[0]))
        self.stage8 = self._down(w4, w8, size.depths[1])
        self.stage16 = self._down(w8, w16, size.depths[2])
        self.stage32 = self._down(w16, w32, size.depths[3])
        context = [Context(w32), Attention(w32, heads=w32 // 16)] if size.has_context else []
        self.context = nn.Sequential(*context)

    @staticmethod
    def _down(inputs: int, outputs: int, depth: int) -> nn.Sequential:
        return nn.Sequential(Unit(inputs, outputs, 3, stride=2), stage(outputs, outputs, depth=depth, full=True))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(b, 3, h, w)` to maps of the strides 8, 16 and 32."""
        x8 = self.stage8(self.stem(images))
        x16 = self.stage16(x8)
        return x8, x16, self.context(self.stage32(x16))


class Neck(nn.Module):
    """Coarse maps tell finer ones what is there, finer ones tell coarse ones where."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        _, _, w8, w16, w32 = size.widths
        depth = size.neck_depth
        self.down16 = stage(w32 + w16, w16, depth=depth, full=False)
        self.down8 = stage(w16 + w8, w8, depth=depth, full=False)
        self.shrink8 = Unit(w8, w8, 3, stride=2)
        self.up16 = stage(w8 + w16, w16, depth=depth, full=False)
        self.shrink16 = Unit(w16, w16, 3, stride=2)
        self.up32 = stage(w16 + w32, w32, depth=depth, full=False)

    def forward(self, x8: Tensor, x16: Tensor, x32: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps of the strides 8, 16 and 32 to maps of the same shapes."""
        y16 = self.down16(torch.cat([enlarged(x32), x16], dim=1))
        y8 = self.down8(torch.cat([enlarged(y16), x8], dim=1))
        z16 = self.up16(torch.cat([self.shrink8(y8), y16], dim=1))
        z32 = self.up32(torch.cat([self.shrink16(z16), x32], dim=1))
        return y8, z16, z32


def enlarged(x: Tensor) -> Tensor:
    """Repeat each cell of `(b, c, h, w)` as a square of four; the gradient is a plain sum, in a fixed order."""
    b, c, h, w = x.shape
    return x[:, :, :, None, :, None].expand(b, c, h, 2, w, 2).reshape(b, c, 2 * h, 2 * w)


class Head(nn.Module):
    """Two branches on one map: where the sides of a box are, and which class is in it."""

    def __init__(self, *widths: int, num_classes: int) -> None:
        super().__init__()
        # softplus(log(e^d - 1)) is d.
        sides = _last(widths[-1], 4, bias=math.log(math.expm1(FIRST_DISTANCE)))
        scores = _last(widths[-1], num_classes, bias=-math.log((1 - PRIOR) / PRIOR))
        self.box = nn.Sequential(*(separable(*pair) for pair in pairwise(widths)), sides)
        self.cls = nn.Sequential(*(separable(*pair) for pair in pairwise(widths)), scores)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(b, inputs, h, w)` to distances left, top, right, bottom `(b, h * w, 4)` and logits `(b, h * w, c)`.

        Distances are in strides, in float32, and not negative.
        """
        distances = functional.softplus(self.box(x).float())
        return distances.flatten(2).mT, self.cls(x).flatten(2).mT


def _last(inputs: int, outputs: int, *, bias: float) -> nn.Conv2d:
    """Return a 1x1 convolution whose bias starts at one value."""
    conv = nn.Conv2d(inputs, outputs, 1)
    conv.bias = nn.Parameter(torch.full((outputs,), bias))
    return conv


class Detector(nn.Module):
    """One box and one score a class for every cell of three scales.

    Args:
        size: Widths and depths.
        num_classes: Number of classes.
    """

    def __init__(self, size: Size, *, num_classes: int) -> None:
        super().__init__()
        self.backbone = Backbone(size)
        self.neck = Neck(size)
        self.heads = nn.ModuleList(
            Head(inputs, *size.head_widths, num_classes=num_classes) for inputs in size.widths[-3:]
        )

    def forward(self, images: Tensor) -> Predictions:
        """Describe every cell, finest scale first, rows from the top.

        Args:
            images: `(b, 3, h, w)` floating point in [0, 1], h and w multiples of 32.

        Returns:
            Predictions for `a = h w (1/64 + 1/256 + 1/1024)` cells.

        Raises:
            ValueError: If a side is not a multiple of 32.
        """
        if images.shape[2] % STRIDES[-1] or images.shape[3] % STRIDES[-1]:
            raise ValueError(f"the sides of an image must be multiples of {STRIDES[-1]}, got {tuple(images.shape[2:])}")
        maps = self.neck(*self.backbone(images))
        distances, logits = zip(*(head(x) for head, x in zip(self.heads, maps, strict=True)), strict=True)
        centers, strides = _cells(images)
        reach = torch.cat(distances, dim=1) * strides[:, None]  # (b, a, 4) pixels
        return Predictions(
            boxes=torch.cat([centers - reach[..., :2], centers + reach[..., 2:]], dim=2),
            logits=torch.cat(logits, dim=1),
            centers=centers,
            strides=strides,
        )


def _cells(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centres `(a, 2)` and the strides `(a,)` of all cells, in pixels."""
    height, width = images.shape[2:]
    centers, strides = [], []
    for stride in STRIDES:
        y = (torch.arange(height // stride, device=images.device) + 0.5) * stride
        x = (torch.arange(width // stride, device=images.device) + 0.5) * stride
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).flatten(0, 1)
        centers.append(grid)
        strides.append(torch.full((len(grid),), float(stride), device=images.device))
    return torch.cat(centers), torch.cat(strides)


def build_detector(variant: Variant, num_classes: int) -> Detector:
    """Return a new detector, its values drawn from torch's generator.

    Args:
        variant: `nano`, about 2.5 million parameters, or `tiny`, for CPUs and images of 64 to 128 pixels.
        num_classes: Number of classes, at least 1.

    Raises:
        ValueError: If there is no such variant, or no class.
    """
    if variant not in SIZES or num_classes < 1:
        raise ValueError(f"choose one of {', '.join(SIZES)} and at least one class, got {variant!r} and {num_classes}")
    return Detector(SIZES[variant], num_classes=num_classes)
