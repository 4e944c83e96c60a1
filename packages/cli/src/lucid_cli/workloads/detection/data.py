"""Where the images of a fit come from, and the loaders over them."""

from dataclasses import dataclass
from functools import partial

from lucid_cli.workloads.detection.augment import Augmentation
from lucid_cli.workloads.detection.coco import CocoPictures, read_coco
from lucid_cli.workloads.detection.dataset import DetectionDataset, EpochLoader, Source, make_loader
from lucid_cli.workloads.detection.digits import DigitCanvases
from lucid_cli.workloads.detection.options import Options

__all__ = ["Loaders", "Sources", "open_sources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaders:
    """Batches to train on and to validate with."""

    train: EpochLoader
    val: EpochLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Images by index, not decoded yet.

    Attributes:
        train: Images to train on.
        val: Other images, to validate with.
        names: Names of the classes.
        flip: Probability that a training image is mirrored; digits never are.
        notes: What was left out, one sentence each.
    """

    train: Source
    val: Source
    names: tuple[str, ...]
    flip: float = 0.5
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
        )


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
        notes=tuple(f"skipped {count}: {reason}" for reason, count in coco.skipped.items()),
    )
