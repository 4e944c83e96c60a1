"""What a fit may be told, its presets, and the command line."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    """File that is written after every epoch; a temporary one, deleted at the end, where none is named."""
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
    "device": "auto, cpu, cuda or cuda:0",
    "amp": "auto: bfloat16 autocast on CUDA devices that have it",
    "augment": "flip, scale and colour augmentation",
    "scale": "augmentation scales by 1 - SCALE to 1 + SCALE",
    "device_hsv": "shift colours on the device",
    "channels_last": "channels_last memory format",
    "images": "folder of images, with --annotations; else handwritten digits are drawn",
    "annotations": "COCO instances file of those images",
    "checkpoint": "file to write after every epoch; else a temporary one, so that its time is measured as well",
    "resume": "go on from --checkpoint",
}
_CHOICES = {"model": ("nano", "tiny"), "amp": ("auto", "off")}


class Range(NamedTuple):
    """The values that a number may have."""

    low: float
    high: float
    is_open: bool = False
    """Whether `high` itself is too high."""

    def __str__(self) -> str:
        return f"at least {self.low} and below {self.high}" if self.is_open else f"from {self.low} to {self.high}"

    def has(self, value: float) -> bool:
        """Return whether a value is inside; what is not a number never is."""
        return self.low <= value < self.high if self.is_open else self.low <= value <= self.high


RANGES = {
    "size": Range(32, 8192),
    "batch": Range(1, 65_536),
    "epochs": Range(1, 100_000),
    "num_train": Range(1, 10_000_000),
    "num_val": Range(1, 10_000_000),
    "seed": Range(0, 2**63 - 1),
    "workers": Range(0, 256),
    "threads": Range(1, 1024),
    "lr": Range(0, 1000),
    "final_lr": Range(0, 1),
    "momentum": Range(0, 1, is_open=True),
    "weight_decay": Range(0, 1000),
    "warmup_epochs": Range(0, 100_000),
    "warmup_momentum": Range(0, 1, is_open=True),
    "warmup_bias_lr": Range(0, 1000),
    "clip": Range(1e-9, 1e9),
    "ema_decay": Range(0, 1, is_open=True),
    "ema_tau": Range(1e-9, 1e9),
    "scale": Range(0, 1, is_open=True),
}
"""Of every option that is a number."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; an option that is not given keeps the preset's value."""
    parser = argparse.ArgumentParser(
        prog="python -m lucid_cli.workloads.detection",
        usage="%(prog)s [--preset NAME] [--OPTION VALUE]...",  # all of them would bury an error
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
        text = _HELP[field.name] + _preset_words(field.name)
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            kind = _path if field.default is None else str
            reader = _number(field.name, type(field.default)) if field.name in RANGES else kind
            parser.add_argument(flag, type=reader, choices=_CHOICES.get(field.name), default=None, help=text)
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


def _preset_words(name: str) -> str:
    """Say what an option is where it is not given, in each preset if they differ."""
    values = {preset: getattr(replace(Options(), **changes), name) for preset, changes in PRESETS.items()}
    if None in values.values():
        return ""
    words = {
        preset: str(value) if not isinstance(value, bool) else "on" if value else "off"
        for preset, value in values.items()
    }
    if len(set(words.values())) == 1:
        return f" (default: {words['quick']})"
    return f" ({', '.join(f'{preset}: {value}' for preset, value in words.items())})"


def _number(name: str, kind: type) -> Callable[[str], float]:
    """Return what reads an option that is a number and refuses one outside its range."""

    def read(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = float("nan")
        if not RANGES[name].has(value):
            noun = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {noun} {RANGES[name]}, got {text!r:.80}")
        return value

    return read


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def _complaint(options: Options) -> str | None:
    """Return what is wrong with the values, or None."""
    checks = [
        (options.size % 32 != 0, f"--size must be a multiple of 32, got {options.size}"),
        (
            options.num_train < options.batch,
            f"--num-train {options.num_train} is less than one batch of {options.batch}",
        ),
        (
            # The coarsest map is then a single cell, and a norm over one value is none.
            options.size == 32 and (options.batch == 1 or options.num_train % options.batch == 1),
            (
                f"--size 32 needs two images in each batch, and --batch {options.batch} with --num-train "
                f"{options.num_train} makes one of a single image: use another --batch, or --size 64"
            ),
        ),
        ((options.images is None) != (options.annotations is None), "--images and --annotations go together"),
        (options.resume and options.checkpoint is None, "--resume needs --checkpoint"),
        (
            not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", options.device),
            f"--device must be auto, cpu, cuda or cuda and a number such as cuda:0, got {options.device!r:.80}",
        ),
    ]
    return next((message for is_wrong, message in checks if is_wrong), None)
