import errno
import hashlib
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lucid_cli.workloads.detection.augment import Augmentation, draw, jitter_hsv
from lucid_cli.workloads.detection.dataset import (
    DetectionDataset,
    EpochLoader,
    Picture,
    _EpochSampler,
    collate,
    make_loader,
)
from lucid_cli.workloads.detection.errors import WorkloadError
from lucid_cli.workloads.detection.values import Batch, Targets

SIZE = 64

TWO_EPOCHS = """
import hashlib, sys, torch
from lucid_cli.workloads.detection.augment import Augmentation
from lucid_cli.workloads.detection.dataset import DetectionDataset, make_loader
from lucid_cli.workloads.detection.digits import DigitCanvases

torch.manual_seed(int(sys.argv[1]))  # what the process has drawn must not matter
dataset = DetectionDataset(DigitCanvases(10, 96, 42, split="train"), 96, cache=True)
for workers in (0, 1, 3):
    loader = make_loader(
        dataset, batch=4, workers=workers, seed=42, shuffle=True, pin=True, augmentation=Augmentation()
    )
    digest = hashlib.sha256()
    for epoch in range(2):
        for batch in loader.epoch(epoch):
            for tensor in (batch.images, batch.boxes, batch.classes, batch.image_index):
                digest.update(tensor.numpy().tobytes())
    print(digest.hexdigest())
"""


class Shades:
    """Pictures of one shade each, with one box whose class is the index; every read leaves a line in a file.

    Args:
        num_images: Number of pictures, at most 255.
        log: Where reads are written down, by whichever process.
        broken: Index that cannot be read.
    """

    names = ("thing",)

    def __init__(self, num_images: int, log: Path | None = None, broken: int | None = None) -> None:
        self.num_images = num_images
        self.log = log
        self.broken = broken

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> Picture:
        if index == self.broken:
            raise WorkloadError(f"picture {index} is broken: repair it")
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {index}\n")
        image = torch.full((3, SIZE, SIZE), index, dtype=torch.uint8)
        box = torch.tensor([[8.0, 8.0, 9.0 + index, 40.0]]).clamp(max=SIZE)
        return image, Targets(boxes=box, classes=torch.tensor([index]))


def loader_of(source: Shades, *, cache: bool = True, workers: int = 0, shuffle: bool = True) -> EpochLoader:
    """Return a loader of batches of four, under one seed."""
    dataset = DetectionDataset(source, SIZE, cache=cache)
    return make_loader(dataset, batch=4, workers=workers, seed=5, shuffle=shuffle, pin=False)


def order_of(batches: Iterable[Batch]) -> list[int]:
    """Return the indices of the pictures in the order in which they come."""
    return [int(number) for batch in batches for number in batch.images[:, 0, 0, 0]]


def bytes_of(tensor: Tensor) -> bytes:
    """Return a tensor's values as bytes."""
    return tensor.numpy().tobytes()


def digest_of(batches: Iterable[Batch]) -> str:
    """Return the SHA-256 of all that batches hold."""
    digest = hashlib.sha256()
    for batch in batches:
        for tensor in (batch.images, batch.boxes, batch.classes, batch.image_index):
            digest.update(bytes_of(tensor))
    return digest.hexdigest()


def test_two_processes_load_the_same_bytes_with_any_number_of_workers() -> None:
    """Two epochs of digits, augmented, under another hash seed and random state: one SHA-256 for 0, 1 and 3 workers."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", TWO_EPOCHS, seed],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [error for _, error in outputs] == ["", ""]
    digests = [digest for output, _ in outputs for digest in output.split()]
    assert len(digests) == 6
    assert len(set(digests)) == 1


def test_spawned_workers_load_the_same_bytes() -> None:
    """Where processes cannot be forked the batches are no others."""
    dataset = DetectionDataset(Shades(6), SIZE, cache=True)
    digests = [
        digest_of(
            make_loader(
                dataset, batch=4, workers=workers, seed=5, shuffle=True, pin=False,
                augmentation=Augmentation(), start_method="spawn",
            ).epoch(1)
        )
        for workers in (0, 1)
    ]  # fmt: skip
    assert digests[0] == digests[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_picture_comes_once_an_epoch_and_epochs_differ(workers: int) -> None:
    """Shuffled epochs are permutations, none like the other; going back to an epoch gives it again."""
    loader = loader_of(Shades(10), workers=workers)
    orders = [order_of(loader.epoch(epoch)) for epoch in (0, 1, 2, 1)]
    assert len(loader) == 3
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[1] == orders[3]
    assert len({tuple(order) for order in orders}) == 3


def test_an_epoch_that_is_left_early_does_not_disturb_the_next() -> None:
    """Batches that workers have prepared in vain are not seen."""
    loader = loader_of(Shades(20), workers=2)
    expected = order_of(loader.epoch(1))
    next(loader.epoch(0))
    assert order_of(loader.epoch(1)) == expected


def test_without_shuffling_pictures_come_by_index() -> None:
    """Validation reads in order, in every epoch."""
    loader = loader_of(Shades(6), shuffle=False)
    assert [order_of(loader.epoch(epoch)) for epoch in (0, 3)] == [list(range(6))] * 2


def test_workers_persist_over_epochs(tmp_path: Path) -> None:
    """Without a cache the pictures of three epochs are read by the same two processes, none of them this one."""
    log = tmp_path / "reads"
    loader = loader_of(Shades(12, log), cache=False, workers=2)
    for epoch in range(3):
        order_of(loader.epoch(epoch))
    readers = {line.split()[0] for line in log.read_text().splitlines()}
    assert len(readers) == 2
    assert str(os.getpid()) not in readers


def _kill_a_worker(log: Path, messages: Connection) -> None:
    """Lose the only worker of a loader, and send what is said of it, whether SIGCHLD is handled, and what comes after.

    torch's handler would raise here, wherever the process is, whenever a child ends.
    """
    batches = loader_of(Shades(200, log), cache=False, workers=1).epoch(0)
    try:
        next(batches)
        os.kill(int(log.read_text().split()[0]), signal.SIGKILL)
        for _ in batches:
            time.sleep(0.01)
    except WorkloadError as error:
        messages.send(str(error))
    subprocess.run([sys.executable, "-c", ""], check=True)
    messages.send(signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)


def test_a_worker_that_is_killed_is_one_clear_error(tmp_path: Path) -> None:
    """Whenever torch finds out, the message says what may be done, and nothing is raised elsewhere."""
    spawn = multiprocessing.get_context("spawn")
    receiving, sending = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_kill_a_worker, args=(tmp_path / "reads", sending))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    message = receiving.recv()
    assert re.fullmatch(r"a loader process is gone \(.*\): .* use fewer --workers.*", message)
    assert "\n" not in message
    assert receiving.recv() is True


@dataclass
class _BrokenLoader:
    """A loader whose first batch does not come."""

    error: Exception
    num_workers: int = 1

    def __iter__(self) -> Iterator[Batch]:
        raise self.error
        yield

    def epoch(self) -> Batch:
        """Return the first batch of an epoch."""
        sampler = _EpochSampler(1, seed=0, shuffle=False)
        return next(EpochLoader(cast("Any", self), sampler, None).epoch(0))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        EOFError(),
        RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"),
        ConnectionResetError("Caught ConnectionResetError in pin memory thread for device 0.\nTraceback"),
    ],
    ids=repr,
)
def test_a_connection_that_breaks_is_a_lost_worker(error: Exception) -> None:
    """A worker that dies while it hands over a batch: its end of the socket is gone before torch sees it dead."""
    with pytest.raises(WorkloadError, match=r"^a loader process is gone \(.+\): .* use fewer --workers$"):
        _BrokenLoader(error).epoch()


@pytest.mark.parametrize(
    "loader",
    [
        _BrokenLoader(OSError("Caught OSError in DataLoader worker process 0.\nTraceback")),
        _BrokenLoader(RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nTraceback")),
        _BrokenLoader(RuntimeError("CUDA error: out of memory")),
        _BrokenLoader(OSError(errno.EIO, "Input/output error"), num_workers=0),
    ],
)
def test_other_errors_are_not_explained_as_lost_workers(loader: _BrokenLoader) -> None:
    """A mistake keeps its traceback, in a worker and in this process."""
    with pytest.raises(type(loader.error)) as raised:
        loader.epoch()
    assert raised.value is loader.error


def test_workers_end_with_their_loader(tmp_path: Path) -> None:
    """Nothing stays behind when a loader is dropped."""
    log = tmp_path / "reads"
    loader = loader_of(Shades(12, log), cache=False, workers=2)
    order_of(loader.epoch(0))
    readers = {int(line.split()[0]) for line in log.read_text().splitlines()}
    del loader
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{reader}").exists() for reader in readers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cached_picture_is_decoded_once_in_all(tmp_path: Path, workers: int) -> None:
    """Over three epochs each picture is read once, by the process that made the data set."""
    log = tmp_path / "reads"
    loader = loader_of(Shades(10, log), workers=workers)
    for epoch in range(3):
        assert sorted(order_of(loader.epoch(epoch))) == list(range(10))
    assert log.read_text().splitlines() == [f"{os.getpid()} {index}" for index in range(10)]


def test_the_cache_lies_in_shared_memory() -> None:
    """All images are views of one shared tensor, so that spawned workers get a handle and forked ones no copy."""
    dataset = DetectionDataset(Shades(5), SIZE, cache=True)
    images = [dataset._pictures[index][0] for index in range(5)]
    assert all(image.is_shared() for image in images)
    assert len({image.untyped_storage().data_ptr() for image in images}) == 1


@pytest.mark.parametrize("cache", [False, True])
def test_a_consumer_cannot_write_into_the_data_set(cache: bool) -> None:
    """Pictures and batches are copies: what is written into them is not read again."""
    dataset = DetectionDataset(Shades(4), SIZE, cache=cache)
    image, targets = dataset[2]
    image.fill_(99)
    targets.boxes.fill_(99)
    targets.classes.fill_(99)
    loader = make_loader(dataset, batch=4, workers=0, seed=5, shuffle=False, pin=False)
    (batch,) = loader.epoch(0)
    assert batch.classes.tolist() == [0, 1, 2, 3]
    for tensor in (batch.images, batch.boxes, batch.classes):
        tensor.fill_(99)
    again, same = dataset[2]
    assert again.unique().tolist() == [2]
    assert (same.boxes.tolist(), same.classes.tolist()) == ([[8, 8, 11, 40]], [2])


def test_a_cache_equals_its_source() -> None:
    """Cached or not, the pictures have the same bytes."""
    cached, direct = (DetectionDataset(Shades(5), SIZE, cache=cache) for cache in (True, False))
    for index in range(5):
        (image, targets), (expected, same) = cached[index], direct[index]
        assert bytes_of(image) == bytes_of(expected)
        assert bytes_of(targets.boxes) == bytes_of(same.boxes)


def test_a_cache_beyond_shared_memory_is_refused_before_anything_is_read() -> None:
    """The message names what is needed, what is free and what to do."""
    with pytest.raises(WorkloadError, match=r"10000 images needs \d+ MiB .*: use fewer or smaller"):
        DetectionDataset(Shades(10_000, broken=0), 1 << 20, cache=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_picture_is_the_same_error_from_a_worker(workers: int) -> None:
    """The message arrives as it was written, without a worker's traceback in it."""
    loader = loader_of(Shades(9, broken=6), cache=False, workers=workers)
    with pytest.raises(WorkloadError) as caught:
        order_of(loader.epoch(0))
    assert str(caught.value) == "picture 6 is broken: repair it"


def test_a_broken_picture_is_found_when_the_cache_is_filled() -> None:
    """Before the first step, not in the middle of the training."""
    with pytest.raises(WorkloadError, match="picture 3 is broken"):
        DetectionDataset(Shades(5, broken=3), SIZE, cache=True)


def test_collate_lays_objects_one_after_the_other() -> None:
    """Images without objects keep their number; shapes hold with no objects at all."""
    none = Targets(boxes=torch.empty(0, 4), classes=torch.empty(0, dtype=torch.int64))
    two = Targets(boxes=torch.arange(8.0).reshape(2, 4), classes=torch.tensor([3, 1]))
    one = Targets(boxes=torch.ones(1, 4), classes=torch.tensor([2]))
    images = [torch.full((3, 2, 2), shade, dtype=torch.uint8) for shade in range(4)]
    batch = collate(list(zip(images, [two, none, one, none], strict=True)))
    assert (batch.images.shape, batch.images.dtype) == ((4, 3, 2, 2), torch.uint8)
    assert batch.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert batch.boxes.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [1, 1, 1, 1]]
    assert batch.classes.tolist() == [3, 1, 2]
    assert batch.image_index.tolist() == [0, 0, 2]
    empty = collate([(images[0], none)])
    assert (empty.boxes.shape, empty.boxes.dtype) == ((0, 4), torch.float32)
    assert (empty.image_index.shape, empty.image_index.dtype) == ((0,), torch.int64)


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_global_generator_alone(workers: int) -> None:
    """A resumed fit finds the random state that an uninterrupted one has."""
    before = torch.get_rng_state()
    order_of(loader_of(Shades(5), workers=workers).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_gains_belong_to_the_images_of_each_batch() -> None:
    """Colours left to the device and shifted there by `gains` equal those of the loader, byte for byte."""
    dataset = DetectionDataset(Shades(10), SIZE, cache=True)
    in_loader, on_device = (
        make_loader(
            dataset, batch=4, workers=0, seed=5, shuffle=True, pin=False,
            augmentation=Augmentation(device_hsv=device_hsv),
        )
        for device_hsv in (False, True)
    )  # fmt: skip
    gains = on_device.gains(1)
    assert [len(rows) for rows in gains] == [4, 4, 2]
    for expected, batch, rows in zip(in_loader.epoch(1), on_device.epoch(1), gains, strict=True):
        assert bytes_of(jitter_hsv(batch.images, rows)) == bytes_of(expected.images)
        assert bytes_of(batch.boxes) == bytes_of(expected.boxes)
    first = in_loader._sampler.order(1)[0]
    change = draw(Augmentation(), seed=5, epoch=1, index=first)
    assert gains[0][0].tolist() == pytest.approx(change.gains, rel=1e-6)


def test_gains_without_augmentation_are_ones() -> None:
    """What is not augmented is not changed on the device either."""
    assert all((rows == 1).all() for rows in loader_of(Shades(6)).gains(0))


def test_an_error_crosses_processes() -> None:
    """A worker can hand it over with its message."""
    assert str(pickle.loads(pickle.dumps(WorkloadError("no: do")))) == "no: do"


def test_batches_are_pinned_only_where_there_is_a_device() -> None:
    """Asking for page-locked memory without CUDA neither warns nor fails."""
    dataset = DetectionDataset(Shades(4), SIZE, cache=True)
    loader = make_loader(dataset, batch=4, workers=0, seed=5, shuffle=False, pin=True)
    (batch,) = loader.epoch(0)
    assert batch.images.is_pinned() == torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_are_the_same_after_cuda_has_started(workers: int) -> None:
    """Workers forked from a process that uses CUDA hand over the bytes that this process would load itself."""
    torch.zeros(1, device="cuda")
    dataset = DetectionDataset(Shades(10), SIZE, cache=True)
    loader = make_loader(dataset, batch=4, workers=workers, seed=5, shuffle=True, pin=True, augmentation=Augmentation())
    plain = make_loader(dataset, batch=4, workers=0, seed=5, shuffle=True, pin=False, augmentation=Augmentation())
    for epoch in range(2):
        pinned = list(loader.epoch(epoch))
        assert all(batch.images.is_pinned() and batch.boxes.is_pinned() for batch in pinned)
        assert digest_of(pinned) == digest_of(plain.epoch(epoch))
        assert digest_of([batch.to("cuda", non_blocking=True).to("cpu") for batch in pinned]) == digest_of(pinned)
