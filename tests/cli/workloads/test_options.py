"""Options and presets: what they mean, and what is refused."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from lucid_cli.workloads.detection.options import PRESETS, RANGES, Options, build_parser, parse


def test_the_log_preset_carries_the_settings_of_the_log() -> None:
    """Nano, 640 px, batch 4, ten epochs, seed 42, four persistent workers, four threads, 256 + 32 images, clip 10."""
    options = parse(["--preset", "log"], has_cuda=False)
    assert (options.model, options.size, options.batch, options.epochs) == ("nano", 640, 4, 10)
    assert (options.seed, options.workers, options.threads) == (42, 4, 4)
    assert (options.num_train, options.num_val, options.clip, options.scale) == (256, 32, 10.0, 0.5)


@pytest.mark.parametrize(("has_cuda", "model"), [(True, "nano"), (False, "tiny")])
def test_the_automatic_preset_fits_the_machine(model: str, *, has_cuda: bool) -> None:
    """A CPU gets the small net, a CUDA device the real one."""
    assert parse([], has_cuda=has_cuda).model == model


def test_flags_win_over_the_preset() -> None:
    """Single settings can be changed, switches in both directions."""
    options = parse(["--preset", "log", "--epochs", "2", "--no-device-hsv", "--checkpoint", "a.pt"], has_cuda=False)
    assert (options.epochs, options.device_hsv, options.checkpoint) == (2, False, Path("a.pt"))
    assert options.batch == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "100"], "--size must be a multiple of 32, got 100"),
        (["--size", "32", "--batch", "1"], "--size 32 needs two images in each batch"),
        (
            ["--size", "32", "--num-train", "33", "--batch", "16"],
            "--batch 16 with --num-train 33 makes one of a single image",
        ),
        (["--batch", "0"], "argument --batch: must be a whole number from 1 to 65536, got '0'"),
        (["--seed", str(2**63)], "--seed: must be a whole number from 0 to 9223372036854775807, got '92233"),
        (["--threads", "1000000"], "--threads: must be a whole number from 1 to 1024, got '1000000'"),
        (["--lr", "nan"], "--lr: must be a number from 0 to 1000, got 'nan'"),
        (["--clip", "inf"], "--clip: must be a number from"),
        (["--momentum", "1"], "--momentum: must be a number at least 0 and below 1, got '1'"),
        (["--checkpoint", ""], "argument --checkpoint: must not be empty"),
        (["--num-train", "4", "--batch", "8"], "--num-train 4 is less than one batch of 8"),
        (["--scale", "1"], "--scale: must be a number at least 0 and below 1, got '1'"),
        (["--workers", "-1"], "--workers: must be a whole number from 0 to 256, got '-1'"),
        (["--images", "folder"], "--images and --annotations go together"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--device", "gpu"], "--device must be auto, cpu, cuda or cuda and a number such as cuda:0, got 'gpu'"),
        (["--device", "cuda:x"], "got 'cuda:x'"),
        (["--epochs", "x"], "argument --epochs: must be a whole number from 1 to 100000, got 'x'"),
        (["--model", "huge"], "invalid choice"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The usage and one line that names the option, the value and what it may be; status 2."""
    with pytest.raises(SystemExit) as refusal:
        parse(arguments, has_cuda=False)
    assert refusal.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: ")
    assert message in error


def test_every_option_is_explained() -> None:
    """The help names each field of Options."""
    text = build_parser().format_help()
    assert all("--" + name.replace("_", "-") in text for name in Options.__dataclass_fields__)


def test_the_help_has_the_values_of_the_presets() -> None:
    """One where all agree, else each."""
    text = " ".join(build_parser().format_help().split())
    assert "images a step (quick: 16, log: 4, gpu: 4)" in text
    assert "of weights, data and augmentation (default: 42)" in text
    assert "shift colours on the device (quick: off, log: on, gpu: on)" in text


def test_every_number_has_a_range_that_holds_the_presets() -> None:
    """No number goes unchecked, and no preset is outside."""
    numbers = {field.name for field in fields(Options) if type(field.default) in {int, float}}
    assert numbers == set(RANGES)
    for preset in PRESETS.values():
        options = replace(Options(), **preset)
        assert all(RANGES[name].has(getattr(options, name)) for name in numbers)
