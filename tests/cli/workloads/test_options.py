"""Options and presets: what they mean, and what is refused."""

from pathlib import Path

import pytest

from lucid_cli.workloads.detection.options import Options, build_parser, parse


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
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--num-train", "4", "--batch", "8"], "--num-train 4 is less than one batch of 8"),
        (["--scale", "1"], "--scale must be at least 0 and below 1, got 1.0"),
        (["--workers", "-1"], "--workers must be 0 or more"),
        (["--images", "folder"], "--images and --annotations go together"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--device", "gpu"], "--device must be auto, cpu or cuda, got gpu"),
        (["--epoch", "x"], "invalid"),
        (["--model", "huge"], "invalid choice"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the option, and status 2."""
    with pytest.raises(SystemExit) as refusal:
        parse(arguments, has_cuda=False)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_every_option_is_explained() -> None:
    """The help names each field of Options."""
    text = build_parser().format_help()
    assert all("--" + name.replace("_", "-") in text for name in Options.__dataclass_fields__)
