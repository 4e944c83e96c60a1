"""Reads a COCO instances file and the images that it speaks of.

What is wrong with single annotations of a large file is skipped and counted; what would train on the wrong data is an
error. The images' own bytes are looked at when an image is decoded, not before.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lucid_cli.workloads.detection.errors import WorkloadError
from lucid_cli.workloads.detection.instances import AnnotationEntry, ImageEntry, InstancesFile
from lucid_cli.workloads.detection.values import Targets

__all__ = ["Coco", "CocoImage", "CocoPictures", "SkipReason", "read_coco"]

SkipReason = Literal[
    "image file missing",
    "annotation of an image that is not listed",
    "crowd annotation",
    "box not finite",
    "box without area",
    "box outside the image",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoImage:
    """One image file and its objects.

    Attributes:
        path: Where it lies.
        name: What the annotations call it.
        boxes: `(n, 4)` float32, `x1 y1 x2 y2` in pixels of the file, inside the image, with an area.
        classes: `(n,)` int64, indices into `Coco.names`.
        width: In pixels, as annotated.
        height: In pixels, as annotated.
    """

    path: Path
    name: str
    boxes: Tensor
    classes: Tensor
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coco:
    """What was read.

    Attributes:
        train: The first images by file name.
        val: The ones after them.
        names: Of the classes, in the order of the file's category ids.
        skipped: How often something was left out, by reason: files that were passed over on the way, annotations of the
            images that were taken, and annotations of no image. A reason that did not occur is absent.
    """

    train: tuple[CocoImage, ...]
    val: tuple[CocoImage, ...]
    names: tuple[str, ...]
    skipped: Mapping[SkipReason, int]


class CocoPictures:
    """Decodes images when they are asked for.

    Args:
        images: What to decode.
        names: Of the classes.
    """

    def __init__(self, images: Sequence[CocoImage], names: tuple[str, ...]) -> None:
        self.images = images
        self.names = names

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Targets]:
        """Return an image, `(3, height, width)` uint8 RGB, and its objects.

        Raises:
            WorkloadError: If Pillow is missing, or the file cannot be decoded or has another size than annotated.
        """
        image = self.images[index]
        pixels = _decode(image.path)
        height, width = pixels.shape[1:]
        if (width, height) != (image.width, image.height):
            raise WorkloadError(
                f"{image.path} is {width} x {height} pixels, annotated as {image.width} x {image.height}, so its boxes "
                f"cannot be trusted: annotate the file as it is (a rotation in its EXIF data is not applied)"
            )
        return pixels, Targets(boxes=image.boxes, classes=image.classes)


def read_coco(images_dir: Path, annotations: Path, *, num_train: int, num_val: int) -> Coco:
    """Read the first `num_train` images by file name for training and the next `num_val` for validation.

    Args:
        images_dir: Folder that the file names are relative to.
        annotations: The JSON file.
        num_train: Number of training images, at least 1.
        num_val: Number of validation images, at least 0.

    Returns:
        Images of which the files exist; an image without annotations is kept, with no objects.

    Raises:
        WorkloadError: If the file cannot be read or does not make sense, or there are too few images.
    """
    if num_train < 1 or num_val < 0:
        raise WorkloadError(f"ask for at least 1 training and 0 validation images, not {num_train} and {num_val}")
    if not images_dir.is_dir():
        raise WorkloadError(f"{images_dir} is no folder: pass the one that holds the images")
    file = InstancesFile(annotations)
    skipped: Counter[SkipReason] = Counter()
    if file.num_unlisted:
        skipped["annotation of an image that is not listed"] = file.num_unlisted
    entries = _take(file, images_dir, num_train + num_val, skipped)
    category_ids = sorted(file.names)
    class_of = {category_id: number for number, category_id in enumerate(category_ids)}
    images: list[CocoImage] = []
    for entry in entries:
        boxes, classes = _objects(file.annotations[entry.id], entry, class_of, skipped)
        images.append(
            CocoImage(
                path=images_dir / entry.file_name,
                name=entry.file_name,
                boxes=boxes,
                classes=classes,
                width=entry.width,
                height=entry.height,
            )
        )
    return Coco(
        train=tuple(images[:num_train]),
        val=tuple(images[num_train:]),
        names=tuple(file.names[category_id] for category_id in category_ids),
        skipped=dict(skipped),
    )


def _take(file: InstancesFile, images_dir: Path, num_images: int, skipped: Counter[SkipReason]) -> list[ImageEntry]:
    """Return the first images by file name of which the file exists; no file is taken under two names."""
    taken: list[ImageEntry] = []
    names: dict[str, str] = {}
    for image in file.images:
        if len(taken) == num_images:
            break
        if os.path.isfile(images_dir / image.file_name):  # noqa: PTH113 - pathlib raises on names that are too long
            taken.append(image)
            file_path = os.path.realpath(images_dir / image.file_name)
            other = names.setdefault(file_path, image.file_name)
            if len(names) < len(taken):
                raise WorkloadError(
                    f"{file.path}: {other!r} and {image.file_name!r} are the same image: remove one of the two"
                )
        else:
            skipped["image file missing"] += 1
    if len(taken) < num_images:
        raise WorkloadError(
            f"{num_images} images are asked for, but of those that {file.path} lists {len(taken)} are in "
            f"{images_dir} ({skipped['image file missing']} missing): ask for fewer, or check the folder"
        )
    return taken


def _objects(
    annotations: list[AnnotationEntry], image: ImageEntry, class_of: Mapping[int, int], skipped: Counter[SkipReason]
) -> tuple[Tensor, Tensor]:
    """Return boxes `(n, 4)` float32 and classes `(n,)` int64 of what can be trained on."""
    boxes: list[list[float]] = []
    kept: list[int] = []
    for annotation in annotations:
        clipped = _clip(annotation, image)
        if isinstance(clipped, str):
            skipped[clipped] += 1
        else:
            boxes.append(clipped)
            kept.append(class_of[annotation.category_id])
    return torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), torch.tensor(kept, dtype=torch.int64)


def _clip(annotation: AnnotationEntry, image: ImageEntry) -> list[float] | SkipReason:
    """Return the box `x1 y1 x2 y2` inside the image, or why there is none."""
    x, y, width, height = annotation.box
    if annotation.is_crowd:
        return "crowd annotation"
    if not all(map(math.isfinite, annotation.box)):
        return "box not finite"
    if width <= 0 or height <= 0:
        return "box without area"
    x1, x2 = (min(max(end, 0.0), float(image.width)) for end in (x, x + width))
    y1, y2 = (min(max(end, 0.0), float(image.height)) for end in (y, y + height))
    corners = torch.tensor([x1, y1, x2, y2], dtype=torch.float32).tolist()  # as wide as it will be in training
    return corners if corners[0] < corners[2] and corners[1] < corners[3] else "box outside the image"


def _decode(path: Path) -> Tensor:
    """Return an image file as `(3, height, width)` uint8 RGB."""
    try:
        from PIL import Image  # noqa: PLC0415 - only image files need it
    except ImportError as error:
        raise WorkloadError(
            "images are decoded by Pillow, which is not installed: run `pip install pillow`, "
            "or leave --images away to train on digits"
        ) from error
    try:
        with Image.open(path) as file:
            # Colours of 16 bits have no mode of their own; before the pixels are read, the tiles name the raw one.
            is_cut = any(";16" in str(tile[3]) for tile in file.tile)
            file.load()
            file.info.pop("transparency", None)  # dropped in any case, with a warning for some palettes
            mode, image = file.mode, file.convert("RGB")
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise WorkloadError(
            f"{path} cannot be decoded ({error}): replace the file, or take it out of the annotations"
        ) from error
    if is_cut or mode.startswith(("I", "F")):
        raise WorkloadError(f"{path} has more than 8 bits a channel, which would be cut off: convert it to 8 bits")
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.reshape(image.height, image.width, 3).permute(2, 0, 1).contiguous()
