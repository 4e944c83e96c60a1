"""Where the images of a fit come from, and the loaders over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lucid_cli.workloads.detection.augment import Augmentation
from lucid_cli.workloads.detection.coco import Coco, CocoPictures, read_coco
from lucid_cli.workloads.detection.dataset import DetectionDataset, EpochLoader, Source, make_loader
from lucid_cli.workloads.detection.digits import DigitCanvases
from lucid_cli.workloads.detection.errors import WorkloadError
from lucid_cli.workloads.detection.options import Options
from lucid_cli.workloads.detection.values import Targets
from lucid_profiler.digest import digest_state

__all__ = ["Loaders", "Sources", "open_sources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaders:
    """Batches to train on and to validate with.

    Attributes:
        digest: Of class names, files, boxes and classes, in their order; another one is other data.
    """

    train: EpochLoader
    val: EpochLoader
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Images by index, not decoded yet.

    Attributes:
        train: Images to train on.
        val: Other images, to validate with.
        names: Names of the classes.
        flip: Probability that a training image is mirrored; digits never are.
        files: Name and number of bytes of each image file, training images first; empty where images are drawn.
        notes: What was left out or is missing, one sentence each.
    """

    train: Source
    val: Source
    names: tuple[str, ...]
    flip: float = 0.5
    files: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    def load(self, options: Options) -> Loaders:
        """Decode every image once into the cache and return loaders; workers start with the first epoch.

        Raises:
            WorkloadError: If an image cannot be decoded or the cache does not fit.
        """
        changes = Augmentation(flip=self.flip, scale=options.scale, device_hsv=options.device_hsv)
        augmentation = changes if options.augment else None
        train, val = (DetectionDataset(source, options.size, cache=True) for source in (self.train, self.val))
        loader = partial(make_loader, batch=options.batch, workers=options.workers, seed=options.seed, pin=True)
        return Loaders(
            train=loader(train, shuffle=True, augmentation=augmentation),
            val=loader(val, shuffle=False),
            digest=self._digest(train, val),
        )

    def _digest(self, train: DetectionDataset, val: DetectionDataset) -> str:
        """Return 16 hex digits of a SHA-256."""
        objects = [_laid_out(dataset.targets()) for dataset in (train, val)]
        return digest_state([self.names, self.files, *objects]).digest[:16]


def open_sources(options: Options) -> Sources:
    """Return the images that the options ask for.

    Raises:
        WorkloadError: If they cannot be found or read.
    """
    if options.images is None or options.annotations is None:
        return Sources(
            train=DigitCanvases(options.num_train, options.size, options.seed, split="train"),
            val=DigitCanvases(options.num_val, options.size, options.seed, split="val"),
            names=DigitCanvases.names,
            flip=0.0,
        )
    coco = read_coco(options.images, options.annotations, num_train=options.num_train, num_val=options.num_val)
    return Sources(
        train=CocoPictures(coco.train, coco.names),
        val=CocoPictures(coco.val, coco.names),
        names=coco.names,
        files=_files(coco),
        notes=_notes(coco),
    )


def _files(coco: Coco) -> tuple[tuple[str, int], ...]:
    """Return name and number of bytes of each file.

    Raises:
        WorkloadError: If one is gone.
    """
    try:
        return tuple((image.name, image.path.stat().st_size) for image in coco.train + coco.val)
    except OSError as error:
        raise WorkloadError(f"{error.filename} cannot be read ({error.strerror}): check the folder") from error


def _notes(coco: Coco) -> tuple[str, ...]:
    notes = [f"skipped {count}: {reason}" for reason, count in coco.skipped.items()]
    if not any(len(image.classes) for image in coco.train):
        notes.append("no training image has an annotated object, so there is nothing to learn but background")
    return tuple(notes)


def _laid_out(targets: Sequence[Targets]) -> dict[str, Any]:
    """Return the objects of all images one after the other, and how many each image has."""
    return {
        "counts": torch.tensor([len(target.classes) for target in targets]),
        "boxes": torch.cat([target.boxes for target in targets]),
        "classes": torch.cat([target.classes for target in targets]),
    }
