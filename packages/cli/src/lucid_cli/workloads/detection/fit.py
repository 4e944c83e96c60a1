"""The fit from end to end: data, epochs, validation, checkpoints, and what lucid is told of them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import lucid_profiler
from lucid_cli.workloads.detection.ap import Precision, average_precision
from lucid_cli.workloads.detection.checkpoint import (
    claim_file,
    damaged,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from lucid_cli.workloads.detection.data import Loaders, open_sources
from lucid_cli.workloads.detection.dataset import EpochLoader
from lucid_cli.workloads.detection.decode import decode
from lucid_cli.workloads.detection.determinism import set_deterministic
from lucid_cli.workloads.detection.errors import WorkloadError
from lucid_cli.workloads.detection.model import build_detector
from lucid_cli.workloads.detection.options import Options
from lucid_cli.workloads.detection.trainer import Trainer, autocast, prepare_images, uses_bfloat16
from lucid_cli.workloads.detection.values import Detections, Targets

__all__ = ["Result", "fit", "validate"]

# Detections below it hardly move average precision and cost most of the suppression's time.
SCORE_FLOOR = 0.01

# What may differ between a run and its resumption: no byte depends on it, or, as for paths, on what is found there.
_FREE = frozenset({"checkpoint", "resume", "workers", "images", "annotations"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a fit came to.

    Attributes:
        losses: The loss of every step.
        precisions: The validation of every epoch, as plain numbers.
    """

    losses: list[float]
    precisions: list[dict[str, Any]]


def fit(options: Options) -> Result:
    """Train from start to end, print a line an epoch, and hand every part of the state to lucid.

    Everything from the first decoded image to the last checkpoint is inside the timed interval; imports, deterministic
    settings and the construction of the model on the CPU come before it.

    Raises:
        WorkloadError: If the data, the device or a checkpoint cannot be used; the message has the remedy.
    """
    device = choose_device(options.device)
    flags = set_deterministic(seed=options.seed, threads=options.threads)
    with _checkpoint_file(options) as file:
        sources = open_sources(options)
        for note in sources.notes:
            _say(note)
        model = build_detector(options.model, len(sources.names))
        with lucid_profiler.fit():
            lucid_profiler.mark("load")
            loaders = sources.load(options)
            model = model.to(device)
            if options.channels_last:
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            trainer = Trainer(model, options, num_classes=len(sources.names), steps_per_epoch=len(loaders.train))
            settings = _settings(trainer, loaders)
            precisions = _run_epochs(trainer, loaders, file=file, settings=settings)
    _hand_over(trainer, precisions, {"workers": options.workers, **settings, **flags})
    return Result(losses=trainer.all_losses().tolist(), precisions=precisions)


def choose_device(name: str) -> torch.device:
    """Return the device that is meant.

    Raises:
        WorkloadError: If it is not there.
    """
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    if name.startswith("cuda") and not has_cuda:
        raise WorkloadError(f"--device {name}: this torch sees no CUDA device; use --device cpu")
    device = torch.device(name)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise WorkloadError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, the first is cuda:0")
    return device


@torch.no_grad()
def validate(trainer: Trainer, loader: EpochLoader) -> Precision:
    """Return the average precision of the averaged model over every batch of a loader."""
    found: list[Detections] = []
    there: list[Targets] = []
    for batch in loader.epoch(0):
        images = prepare_images(batch.images.to(trainer.device, non_blocking=True), trainer.options)
        with autocast(trainer.options, trainer.device):
            predictions = trainer.ema.model(images)
        found += decode(predictions, score_floor=SCORE_FLOOR)
        there += batch.targets()
    return average_precision(found, there, num_classes=trainer.num_classes)


@contextmanager
def _checkpoint_file(options: Options) -> Iterator[Path]:
    """Yield the file that checkpoints go to: the one that is named, or one in a folder that is deleted at the end.

    Raises:
        WorkloadError: If none can be written.
    """
    if options.checkpoint is not None:
        yield claim_file(options.checkpoint, resume=options.resume)
        return
    try:
        folder = TemporaryDirectory(prefix="lucid-fit-", ignore_cleanup_errors=True)
    except OSError as error:
        raise WorkloadError(
            f"there is no temporary folder for the checkpoint ({error.strerror}): set TMPDIR, or name a file with "
            "--checkpoint"
        ) from error
    with folder as name:
        yield Path(name, "last.pt")


def _run_epochs(trainer: Trainer, loaders: Loaders, *, file: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Train and validate epoch by epoch, from the checkpoint on where there is one to resume."""
    options = trainer.options
    precisions: list[dict[str, Any]] = []
    if options.resume:
        precisions = _resume(trainer, file, settings, steps_per_epoch=len(loaders.train))
    is_finite = True
    for epoch in range(len(precisions), options.epochs):
        _train_epoch(trainer, loaders.train, epoch)
        lucid_profiler.mark("validate")
        precisions.append(asdict(validate(trainer, loaders.val)))
        _say(f"epoch {epoch + 1} of {options.epochs}: loss {float(trainer.losses[-1]):.3f}, {_words(precisions[-1])}")
        if is_finite:
            is_finite = _check_losses(trainer, since=epoch * len(loaders.train))
        lucid_profiler.mark("checkpoint")
        _save(trainer, precisions, file, settings)
    return precisions


def _words(precision: dict[str, Any]) -> str:
    """Say what a validation came to."""
    if precision["ap"] is None:
        return f"AP not defined: {precision['reason']}"
    return f"AP {precision['ap']:.3f}, AP50 {precision['ap50']:.3f}"


def _check_losses(trainer: Trainer, *, since: int) -> bool:
    """Return whether every loss from a step on is finite, and print a warning if one is not."""
    infinite = (~torch.stack(trainer.losses[since:]).isfinite()).nonzero()
    if len(infinite) == 0:
        return True
    _say(f"warning: the loss is not finite from step {since + int(infinite[0]) + 1} on; a lower --lr may help")
    return False


def _train_epoch(trainer: Trainer, loader: EpochLoader, epoch: int) -> None:
    """Take one step a batch; colours are shifted on the device where that is asked for."""
    options = trainer.options
    gains = loader.gains(epoch) if options.augment and options.device_hsv else repeat(None, len(loader))
    phase = _enter_phase(trainer, "")
    for batch, batch_gains in zip(loader.epoch(epoch), gains, strict=True):
        phase = _enter_phase(trainer, phase)
        trainer.step(batch, batch_gains)


def _enter_phase(trainer: Trainer, current: str) -> str:
    """Mark the phase of the next step if it is another one, and return it."""
    phase = "warm-up" if trainer.is_warming_up else "train"
    if phase != current:
        lucid_profiler.mark(phase)
    return phase


def _settings(trainer: Trainer, loaders: Loaders) -> dict[str, Any]:
    """Return everything that the bytes depend on as plain values: options, what `auto` came to, and the data."""
    options = trainer.options
    return {
        **{field.name: getattr(options, field.name) for field in fields(options) if field.name not in _FREE},
        "device": trainer.device.type,
        "amp": "bfloat16" if uses_bfloat16(options, trainer.device) else "off",
        "data": "digits" if options.images is None else "coco",
        "data_digest": loaders.digest,
        "num_classes": trainer.num_classes,
    }


def _save(trainer: Trainer, precisions: list[dict[str, Any]], file: Path, settings: dict[str, Any]) -> None:
    contents = {
        "settings": settings,
        "epoch": len(precisions),
        "trainer": trainer.state_dict(),
        "precisions": precisions,
        "random": random_state(),
    }
    save_checkpoint(file, contents)


def _resume(trainer: Trainer, file: Path, settings: dict[str, Any], *, steps_per_epoch: int) -> list[dict[str, Any]]:
    """Take over a checkpoint and return the validations of its epochs.

    Raises:
        WorkloadError: If it is none of this fit.
    """
    contents = load_checkpoint(file, settings=settings, epochs=trainer.options.epochs)
    precisions: list[dict[str, Any]] = contents["precisions"]
    try:
        trainer.load_state_dict(contents["trainer"])
        restore_random_state(contents["random"])
        for precision in precisions:
            _words(precision)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise damaged(file) from error
    if trainer.num_steps != len(precisions) * steps_per_epoch:
        raise damaged(file)
    return precisions


def _hand_over(trainer: Trainer, precisions: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Give lucid every part whose bytes must agree."""
    lucid_profiler.state("model", trainer.model.state_dict())
    lucid_profiler.state("optimizer", trainer.optimizer.state_dict())
    lucid_profiler.state("scheduler", trainer.schedule.state_dict(trainer.num_steps))
    lucid_profiler.state("ema", trainer.ema.state_dict())
    lucid_profiler.state("losses", trainer.all_losses())
    last = {"ap": precisions[-1]["ap"], "ap50": precisions[-1]["ap50"]}
    reason = {} if precisions[-1]["ap"] is not None else {"reason": precisions[-1]["reason"]}
    lucid_profiler.state("metrics", {**last, **reason, "epochs": precisions})
    lucid_profiler.state("settings", settings)


def _say(text: str) -> None:
    """Print a line.

    Raises:
        WorkloadError: If nobody reads it.
    """
    try:
        print(text, flush=True)  # noqa: T201 - what the program is asked to print
    except OSError as error:
        # Python would try the rest of the line again when it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise WorkloadError(f"the output cannot be written ({error.strerror}): let it be read to the end") from error
