"""What a fit may be told, its presets, and the command line."""

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

__all__ = ["PRESETS", "Options", "parse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one fit; the defaults are the preset `quick`, which two CPU cores finish in seconds."""

    model: Literal["nano", "tiny"] = "tiny"
    size: int = 64
    """Side of the square images in pixels, a multiple of 32."""
    batch: int = 16
    epochs: int = 6
    num_train: int = 384
    num_val: int = 64
    seed: int = 42
    workers: int = 1
    """Loader processes, kept over the epochs; 0 loads in the training process."""
    threads: int = 1
    """Of torch on the CPU; small maps gain nothing from a second one, and wait for it where cores are busy."""
    lr: float = 0.1
    final_lr: float = 0.05
    """Share of `lr` after the last step."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup_epochs: float = 1.0
    warmup_momentum: float = 0.8
    warmup_bias_lr: float = 0.05
    clip: float = 1.0
    """Largest norm of all gradients together."""
    ema_decay: float = 0.9999
    ema_tau: float = 100.0
    device: str = "auto"
    amp: Literal["auto", "off"] = "auto"
    """bfloat16 autocast where the device has it; the CPU runs in float32."""
    augment: bool = True
    scale: float = 0.2
    """Augmentation scales an image by 1 - scale to 1 + scale; small digits suffer from more."""
    device_hsv: bool = False
    """Whether colours are shifted on the device, a whole batch at once, instead of in the loader."""
    channels_last: bool = False
    images: Path | None = None
    """Folder of images to read instead of drawing digits."""
    annotations: Path | None = None
    """COCO instances file of those images."""
    checkpoint: Path | None = None
    """File that is written after every epoch."""
    resume: bool = False
    """Whether the fit goes on from `checkpoint`."""


# `log` has the settings of the engineering log that lucid comes from; `gpu` is its three-epoch form.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {},
    "log": {
        "model": "nano",
        "size": 640,
        "batch": 4,
        "epochs": 10,
        "num_train": 256,
        "num_val": 32,
        "seed": 42,
        "workers": 4,
        "threads": 4,
        "warmup_epochs": 3.0,
        "warmup_bias_lr": 0.1,
        "ema_tau": 2000.0,
        "lr": 0.01,
        "final_lr": 0.01,
        "clip": 10.0,
        "scale": 0.5,
        "device_hsv": True,
    },
}
PRESETS["gpu"] = {**PRESETS["log"], "epochs": 3, "warmup_epochs": 1.0, "ema_tau": 100.0}

_HELP = {
    "model": "network: nano has 2.5 M parameters, tiny is for CPUs",
    "size": "side of the square images in pixels, a multiple of 32",
    "batch": "images a step",
    "epochs": "passes over the training images",
    "num_train": "training images",
    "num_val": "validation images",
    "seed": "of weights, data and augmentation",
    "workers": "persistent loader processes; 0 loads in the training process",
    "threads": "torch threads on the CPU",
    "lr": "learning rate after the warm-up",
    "final_lr": "share of the learning rate after the last step",
    "momentum": "momentum after the warm-up",
    "weight_decay": "decay of matrices",
    "warmup_epochs": "length of the warm-up",
    "warmup_momentum": "momentum of the first step",
    "warmup_bias_lr": "learning rate of vectors in the first step",
    "clip": "largest norm of all gradients together",
    "ema_decay": "weight of the past in the averaged model",
    "ema_tau": "updates over which that weight grows",
    "device": "auto, cpu or cuda",
    "amp": "auto: bfloat16 autocast on CUDA devices that have it",
    "augment": "flip, scale and colour augmentation",
    "scale": "augmentation scales by 1 - SCALE to 1 + SCALE",
    "device_hsv": "shift colours on the device",
    "channels_last": "channels_last memory format",
    "images": "folder of images, with --annotations; else handwritten digits are drawn",
    "annotations": "COCO instances file of those images",
    "checkpoint": "file to write after every epoch",
    "resume": "go on from --checkpoint",
}
_CHOICES = {"model": ("nano", "tiny"), "amp": ("auto", "off")}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; an option that is not given keeps the preset's value."""
    parser = argparse.ArgumentParser(
        prog="python -m lucid_cli.workloads.detection",
        description="Train a small detector and hand every part of its state to lucid, when lucid is watching.",
    )
    parser.add_argument(
        "--preset",
        choices=("auto", *PRESETS),
        default="auto",
        help="settings to start from; auto is gpu where there is a CUDA device, else quick (default: auto)",
    )
    for field in fields(Options):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=_HELP[field.name])
        else:
            kind = Path if field.default is None else type(field.default)
            choices = _CHOICES.get(field.name)
            parser.add_argument(flag, type=kind, choices=choices, default=None, help=_HELP[field.name])
    return parser


def parse(arguments: list[str] | None = None, *, has_cuda: bool) -> Options:
    """Return the options that a command line asks for.

    Args:
        arguments: Without the program's name; None takes the process's own.
        has_cuda: Which preset `auto` stands for.

    Raises:
        SystemExit: On a usage error, with status 2 after a message.
    """
    parser = build_parser()
    given = vars(parser.parse_args(arguments))
    preset = given.pop("preset")
    if preset == "auto":
        preset = "gpu" if has_cuda else "quick"
    options = replace(Options(), **PRESETS[preset])
    options = replace(options, **{name: value for name, value in given.items() if value is not None})
    complaint = _complaint(options)
    if complaint:
        parser.error(complaint)
    return options


def _complaint(options: Options) -> str | None:
    """Return what is wrong with the values, or None."""
    counts = ("batch", "epochs", "num_train", "num_val", "threads")
    checks = [
        (options.size < 32 or options.size % 32 != 0, f"--size must be a multiple of 32, got {options.size}"),
        *(
            (getattr(options, name) < 1, f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
            for name in counts
        ),
        (
            options.num_train < options.batch,
            f"--num-train {options.num_train} is less than one batch of {options.batch}",
        ),
        (not 0 <= options.scale < 1, f"--scale must be at least 0 and below 1, got {options.scale}"),
        (options.workers < 0, f"--workers must be 0 or more, got {options.workers}"),
        ((options.images is None) != (options.annotations is None), "--images and --annotations go together"),
        (options.resume and options.checkpoint is None, "--resume needs --checkpoint"),
        (
            options.device not in {"auto", "cpu"} and not options.device.startswith("cuda"),
            f"--device must be auto, cpu or cuda, got {options.device}",
        ),
    ]
    return next((message for is_wrong, message in checks if is_wrong), None)
