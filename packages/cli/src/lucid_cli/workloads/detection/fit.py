"""The fit from end to end: data, epochs, validation, checkpoints, and what lucid is told of them."""

from dataclasses import asdict, dataclass, fields
from itertools import repeat
from typing import Any

import torch

import lucid_profiler
from lucid_cli.workloads.detection.ap import Precision, average_precision
from lucid_cli.workloads.detection.checkpoint import (
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
from lucid_cli.workloads.detection.trainer import Trainer, autocast, prepare_images
from lucid_cli.workloads.detection.values import Detections, Targets

__all__ = ["Result", "fit", "validate"]

# Detections below it hardly move average precision and cost most of the suppression's time.
SCORE_FLOOR = 0.01

# What may differ between a run and its resumption, because no byte depends on it.
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
        precisions = _run_epochs(trainer, loaders, options)
    _hand_over(trainer, precisions, flags)
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
    return torch.device(name)


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


def _run_epochs(trainer: Trainer, loaders: Loaders, options: Options) -> list[dict[str, Any]]:
    """Train and validate epoch by epoch, from the checkpoint on where there is one to resume."""
    precisions: list[dict[str, Any]] = []
    first_epoch = 0
    if options.resume:
        first_epoch = _resume(trainer, precisions, options)
    for epoch in range(first_epoch, options.epochs):
        _train_epoch(trainer, loaders.train, epoch)
        lucid_profiler.mark("validate")
        precisions.append(asdict(validate(trainer, loaders.val)))
        loss = float(trainer.losses[-1])
        latest = precisions[-1]
        _say(
            f"epoch {epoch + 1} of {options.epochs}: loss {loss:.3f}, AP {latest['ap']:.3f}, AP50 {latest['ap50']:.3f}"
        )
        if options.checkpoint is not None:
            lucid_profiler.mark("checkpoint")
            _save(trainer, precisions, options, epoch=epoch + 1)
    return precisions


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


def _settings(options: Options) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(options) if field.name not in _FREE}


def _save(trainer: Trainer, precisions: list[dict[str, Any]], options: Options, *, epoch: int) -> None:
    if options.checkpoint is None:
        return
    contents = {
        "settings": _settings(options),
        "epoch": epoch,
        "trainer": trainer.state_dict(),
        "precisions": precisions,
        "random": random_state(),
    }
    save_checkpoint(options.checkpoint, contents)


def _resume(trainer: Trainer, precisions: list[dict[str, Any]], options: Options) -> int:
    """Take over a checkpoint and return the epoch to go on with."""
    if options.checkpoint is None:
        return 0
    contents = load_checkpoint(options.checkpoint, settings=_settings(options))
    trainer.load_state_dict(contents["trainer"])
    precisions.extend(contents["precisions"])
    restore_random_state(contents["random"])
    return int(contents["epoch"])


def _hand_over(trainer: Trainer, precisions: list[dict[str, Any]], flags: dict[str, bool | int | str]) -> None:
    """Give lucid every part whose bytes must agree."""
    lucid_profiler.state("model", trainer.model.state_dict())
    lucid_profiler.state("optimizer", trainer.optimizer.state_dict())
    lucid_profiler.state("scheduler", trainer.schedule.state_dict(trainer.num_steps))
    lucid_profiler.state("ema", trainer.ema.state_dict())
    lucid_profiler.state("losses", trainer.all_losses())
    last = {"ap": precisions[-1]["ap"], "ap50": precisions[-1]["ap50"]}
    lucid_profiler.state("metrics", {**last, "epochs": precisions})
    lucid_profiler.state("determinism", flags)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - what the program is asked to print
