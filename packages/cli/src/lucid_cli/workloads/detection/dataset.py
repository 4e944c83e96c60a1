"""From a source of pictures to batches: the cache of decoded images, the order of an epoch, workers and collation.

The position of an image in an epoch and how it is augmented depend on (seed, epoch, index) alone. So the bytes of every
batch are the same with any number of workers, from process to process, and from whatever epoch a run goes on.
"""

import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lucid_cli.workloads.detection.augment import Augmentation, augment, draw
from lucid_cli.workloads.detection.errors import WorkloadError
from lucid_cli.workloads.detection.geometry import letterbox
from lucid_cli.workloads.detection.seeding import generator_of
from lucid_cli.workloads.detection.values import Batch, Targets

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps what torch shares between processes

__all__ = ["DetectionDataset", "EpochLoader", "Picture", "Source", "collate", "make_loader"]

Picture = tuple[Tensor, Targets]  # (3, h, w) uint8 and its objects


class Source(Protocol):
    """Pictures of any size, by index; drawing or decoding one may be slow."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Picture: ...


class DetectionDataset(Dataset[Picture]):
    """The pictures of a source, each fitted to a square.

    Args:
        source: What to read. With a cache it is read once, here, in this process.
        size: Side of the squares in pixels.
        cache: Whether all pictures are kept decoded, in memory that loader workers share.

    Raises:
        WorkloadError: If the cache does not fit into shared memory, or the source cannot be read.
    """

    def __init__(self, source: Source, size: int, *, cache: bool) -> None:
        self.names = source.names
        self.size = size
        self._pictures = _cached(source, size) if cache else _Fitted(source, size)

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> Picture:
        """Return an image, `(3, size, size)` uint8, and its objects; both are copies that the caller may write.

        Raises:
            WorkloadError: If the picture is not cached and cannot be read.
        """
        image, targets = self._pictures[index]
        return image.clone(), Targets(boxes=targets.boxes.clone(), classes=targets.classes.clone())

    def targets(self) -> list[Targets]:
        """Return the objects of every picture, not copied; without a cache each picture is read for them.

        Raises:
            WorkloadError: If a picture is not cached and cannot be read.
        """
        return [self._pictures[index][1] for index in range(len(self))]


class EpochLoader:
    """Batches of one epoch after the other, from worker processes that stay alive in between.

    Args:
        loader: Yields what `_collate` returns, in the order of `sampler`.
        sampler: Where the loader gets its order.
        augmentation: What the loader draws for each image; None for nothing.
    """

    def __init__(
        self, loader: "DataLoader[_Picked]", sampler: "_EpochSampler", augmentation: Augmentation | None
    ) -> None:
        self._loader = loader
        self._sampler = sampler
        self._augmentation = augmentation

    def __len__(self) -> int:
        """Return the number of batches of an epoch; the last one may be smaller."""
        return len(self._loader)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, in host memory.

        Raises:
            WorkloadError: If a picture cannot be read, or a worker is gone.
        """
        self._sampler.epoch = epoch
        with _no_advice(), _errors_only_here():
            batches = iter(self._loader)
        try:
            for batch in batches:
                if isinstance(batch, WorkloadError):
                    raise batch
                yield batch
        except (RuntimeError, OSError, EOFError) as error:
            lost = _lost_worker(error) if self._loader.num_workers > 0 else None
            if lost is None:
                raise
            raise lost from error

    def gains(self, epoch: int) -> list[Tensor]:
        """Return the HSV gains of each batch of an epoch, `(b, 3)` float32, for `jitter_hsv` on a device."""
        augmentation = self._augmentation or Augmentation(hue=0, saturation=0, value=0)
        changes = (
            draw(augmentation, seed=self._sampler.seed, epoch=epoch, index=index)
            for index in self._sampler.order(epoch)
        )
        return list(torch.tensor([change.gains for change in changes]).split(self._loader.batch_size or 1))


def make_loader(
    dataset: DetectionDataset,
    *,
    batch: int,
    workers: int,
    seed: int,
    shuffle: bool,
    pin: bool,
    augmentation: Augmentation | None = None,
    start_method: Literal["fork", "spawn"] = "fork" if sys.platform == "linux" else "spawn",
) -> EpochLoader:
    """Return a loader of which every byte depends on (dataset, batch, seed, shuffle, augmentation, epoch) alone.

    torch's global generator is neither read nor moved on. Workers run one torch thread each and never touch CUDA, so
    they may be forked from a process that does.

    Args:
        dataset: What to load.
        batch: Images of a batch.
        workers: Processes, started with the first epoch; 0 loads in this one.
        seed: Of order and augmentation.
        shuffle: Whether each epoch has an order of its own; else images come by index.
        pin: Whether batches are copied to page-locked memory; ignored where there is no CUDA device.
        augmentation: How images are changed; None leaves them.
        start_method: How workers come into being. Spawned ones import the main module again.
    """
    sampler = _EpochSampler(len(dataset), seed=seed, shuffle=shuffle)
    with _no_advice():
        loader = DataLoader(
            _Augmented(dataset, augmentation, seed),
            batch_size=batch,
            sampler=sampler,
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=pin and torch.cuda.is_available(),
            generator=generator_of("workers", seed),  # without one, each epoch would draw from the global generator
            persistent_workers=workers > 0,
            worker_init_fn=_leave_interrupts if workers > 0 else None,
            multiprocessing_context=start_method if workers > 0 else None,
        )
    return EpochLoader(loader, sampler, augmentation)


def collate(pictures: Sequence[Picture]) -> Batch:
    """Stack pictures of one size, and lay their objects one after the other."""
    targets = [picture[1] for picture in pictures]
    counts = torch.tensor([len(target.classes) for target in targets])
    return Batch(
        images=torch.stack([image for image, _ in pictures]),
        boxes=torch.cat([target.boxes for target in targets]),
        classes=torch.cat([target.classes for target in targets]),
        image_index=torch.arange(len(pictures)).repeat_interleave(counts),
    )


class _Fitted:
    """The pictures of a source, read and fitted to a square whenever one is asked for."""

    def __init__(self, source: Source, size: int) -> None:
        self.source = source
        self.size = size

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Picture:
        image, targets = self.source[index]
        return letterbox(image, targets, size=self.size)


def _cached(source: Source, size: int) -> list[Picture]:
    """Read all pictures, and return them as views of one tensor in shared memory.

    Raises:
        WorkloadError: If there is too little of it.
    """
    shape = (len(source), 3, size, size)
    num_bytes = len(source) * 3 * size * size
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else num_bytes
    if free_bytes < num_bytes:
        raise WorkloadError(
            f"the cache of {len(source)} images needs {num_bytes >> 20} MiB of shared memory, and {SHARED_MEMORY} has "
            f"{free_bytes >> 20} MiB free: use fewer or smaller images, or more of it (docker run --shm-size)"
        )
    images = torch.empty(shape, dtype=torch.uint8).share_memory_()
    pictures: list[Picture] = []
    for index, image in enumerate(images):
        pixels, targets = letterbox(*source[index], size=size)
        pictures.append((image.copy_(pixels), targets))
    return pictures


class _Draw(NamedTuple):
    """What a worker is asked for: an image's index, and the epoch, which it has no other way to know."""

    epoch: int
    image: int


_Picked = Picture | WorkloadError


class _EpochSampler(Sampler[_Draw]):
    """The order of an epoch, which is set before the loader is iterated over."""

    def __init__(self, num_images: int, *, seed: int, shuffle: bool) -> None:
        self.num_images = num_images
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_images

    def __iter__(self) -> Iterator[_Draw]:
        return iter([_Draw(self.epoch, index) for index in self.order(self.epoch)])

    def order(self, epoch: int) -> list[int]:
        """Return the images' indices."""
        if not self.shuffle:
            return list(range(self.num_images))
        indices: list[int] = torch.randperm(self.num_images, generator=generator_of("order", self.seed, epoch)).tolist()
        return indices


class _Augmented(Dataset[_Picked]):
    """Pictures as a worker hands them out; an error is a value, for raised there it would arrive as a traceback."""

    def __init__(self, dataset: DetectionDataset, augmentation: Augmentation | None, seed: int) -> None:
        self.dataset = dataset
        self.augmentation = augmentation
        self.seed = seed

    def __getitem__(self, wanted: _Draw) -> _Picked:
        try:
            image, targets = self.dataset[wanted.image]
        except WorkloadError as error:
            return error
        if self.augmentation is None:
            return image, targets
        change = draw(self.augmentation, seed=self.seed, epoch=wanted.epoch, index=wanted.image)
        return augment(image, targets, change, hsv=not self.augmentation.device_hsv)


def _collate(picked: Sequence[_Picked]) -> Batch | WorkloadError:
    """Collate pictures, or return the first error among them."""
    pictures: list[Picture] = []
    for picture in picked:
        if isinstance(picture, WorkloadError):
            return picture
        pictures.append(picture)
    return collate(pictures)


def _leave_interrupts(_worker: int) -> None:
    """Let Ctrl-C, which a terminal sends to every process, end the training process alone; it ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _lost_worker(error: Exception) -> WorkloadError | None:
    """Return what to say if `error`, which came instead of a batch, tells of a worker that is gone; else None.

    torch says so once it has seen the worker dead. A worker that dies while it hands over a batch closes its socket
    before that, so that the error is the connection's.
    """
    message = str(error)
    if "in DataLoader worker process" in message:  # an exception that a living worker has passed on
        return None
    if isinstance(error, RuntimeError) and "DataLoader worker" not in message:
        return None
    reason = (message.splitlines() or [type(error).__name__])[0].strip().rstrip(".")
    return WorkloadError(f"a loader process is gone ({reason}): if memory ran out, use fewer --workers")


@contextmanager
def _errors_only_here() -> Iterator[None]:
    """Undo the SIGCHLD handler that torch sets with the first workers, so that a lost one is an error of `next` alone.

    The handler raises in whatever line runs, and again whenever any child ends; `next` sees a dead worker within
    5 seconds without it.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    if threading.current_thread() is threading.main_thread():  # elsewhere torch sets none
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


@contextmanager
def _no_advice() -> Iterator[None]:
    """Silence two warnings: how many workers there are is the user's choice, and a forked one needs no other thread."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*use of fork.* may lead to deadlocks", category=DeprecationWarning)
        yield
