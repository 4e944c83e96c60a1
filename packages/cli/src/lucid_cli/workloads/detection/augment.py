"""Random changes to a training image, each drawn from (seed, epoch, index) so that it does not matter who draws it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lucid_cli.workloads.detection import geometry
from lucid_cli.workloads.detection.geometry import Placement
from lucid_cli.workloads.detection.seeding import generator_of
from lucid_cli.workloads.detection.values import Targets

TINY = 1e-12  # keeps the division of black and grey pixels finite; far below one step of any image

__all__ = ["Augmentation", "Change", "augment", "draw", "jitter_hsv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """How far images are changed.

    Attributes:
        flip: Probability that an image is mirrored left to right.
        scale: Images are scaled by 1 - scale to 1 + scale.
        translate: Images are moved by up to this share of their side, either way.
        hue: The gain of the hue is between 1 - hue and 1 + hue.
        saturation: Likewise.
        value: Likewise.
        device_hsv: Whether colours are left to `jitter_hsv` on the device, a whole batch at once.
    """

    flip: float = 0.5
    scale: float = 0.5
    translate: float = 0.1
    hue: float = 0.015
    saturation: float = 0.7
    value: float = 0.4
    device_hsv: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What happens to one image in one epoch.

    Attributes:
        flip: Whether it is mirrored.
        scale: Its side after the change over its side before.
        shift_x: By how much of its side it moves to the right.
        shift_y: By how much of its side it moves down.
        gains: Factors of hue, saturation and value.
    """

    flip: bool
    scale: float
    shift_x: float
    shift_y: float
    gains: tuple[float, float, float]


def draw(augmentation: Augmentation, *, seed: int, epoch: int, index: int) -> Change:
    """Return the change of one image in one epoch, the same in every process."""
    generator = generator_of("augment", seed, epoch, index)
    chance, *around = torch.rand(7, generator=generator, dtype=torch.float64).tolist()
    scale, shift_x, shift_y, hue, saturation, value = (2 * number - 1 for number in around)
    return Change(
        flip=chance < augmentation.flip,
        scale=1 + augmentation.scale * scale,
        shift_x=augmentation.translate * shift_x,
        shift_y=augmentation.translate * shift_y,
        gains=(
            1 + augmentation.hue * hue,
            1 + augmentation.saturation * saturation,
            1 + augmentation.value * value,
        ),
    )


def augment(image: Tensor, targets: Targets, change: Change, *, hsv: bool = True) -> tuple[Tensor, Targets]:
    """Change an image and its boxes.

    Args:
        image: `(3, s, s)` uint8; read only.
        targets: Its objects; read only.
        change: What to do.
        hsv: Whether the colours change too.

    Returns:
        An image of the same shape, and the objects of which enough is still seen (`geometry.MIN_VISIBLE`).
    """
    if change.flip:
        image, targets = geometry.flip(image, targets)
    size = image.shape[1]
    scaled = max(round(size * change.scale), 1)
    margin = (size - scaled) / 2
    placement = Placement(
        height=scaled,
        width=scaled,
        top=round(margin + change.shift_y * size),
        left=round(margin + change.shift_x * size),
    )
    image, targets = geometry.place(image, targets, placement, size=size)
    if hsv:
        image = jitter_hsv(image[None], torch.tensor([change.gains]))[0]
    return image, targets


def jitter_hsv(images: Tensor, gains: Tensor) -> Tensor:
    """Multiply hue, saturation and value of images, on the device that they are on.

    Hue goes round, saturation and value end at 1. Gains of 1 change nothing.

    Args:
        images: `(b, 3, h, w)`, uint8 or floating point in [0, 1]; read only.
        gains: `(b, 3)` factors of hue, saturation and value, none negative.

    Returns:
        New images of the same dtype; uint8 is rounded to the nearest.
    """
    floats = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    hue, saturation, value = _to_hsv(floats)
    by_hue, by_saturation, by_value = gains.to(floats)[:, :, None, None].unbind(1)
    jittered = _to_rgb(hue * by_hue % 1, (saturation * by_saturation).clamp(max=1), (value * by_value).clamp(max=1))
    return (jittered * 255).round().to(images.dtype) if images.dtype == torch.uint8 else jittered.to(images.dtype)


def _to_hsv(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hue in [0, 1), saturation and value of `(b, 3, h, w)`, each `(b, h, w)`; grey has hue 0."""
    red, green, blue = images.unbind(1)
    value = images.amax(dim=1)
    chroma = value - images.amin(dim=1)
    divisor = chroma.clamp(min=TINY)
    sixth = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    return sixth / 6 % 1, chroma / value.clamp(min=TINY), value


def _to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Return `(b, 3, h, w)`: each channel is the value, less the chroma where the hue is far from that colour."""
    chroma = value * saturation
    distances = ((start + 6 * hue) % 6 for start in (5, 3, 1))
    channels = [value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in distances]
    return torch.stack(channels, dim=1)
