"""The whole fit, small: it repeats, it resumes, it learns, and it says what it cannot do."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_cli.workloads.detection import checkpoint
from lucid_cli.workloads.detection import fit as fit_module
from lucid_cli.workloads.detection.data import open_sources
from lucid_cli.workloads.detection.errors import WorkloadError
from lucid_cli.workloads.detection.fit import fit, validate
from lucid_cli.workloads.detection.model import build_detector
from lucid_cli.workloads.detection.options import Options
from lucid_cli.workloads.detection.trainer import Trainer
from lucid_profiler.digest import digest_state

SMALL = Options(
    size=64, batch=4, epochs=3, num_train=12, num_val=4, workers=0, threads=1, warmup_epochs=1.0, lr=0.05, ema_tau=5.0
)


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    """Undo what `set_deterministic` does to this process."""
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(mode=False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = False
    if before is None:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def final_state(path: Path) -> dict[str, Any]:
    """Return everything that a checkpoint holds but the settings' paths."""
    contents: dict[str, Any] = torch.load(path, weights_only=True)
    return contents


def test_two_fits_end_in_the_same_bytes(tmp_path: Path) -> None:
    """Weights, optimizer, average, losses and metrics agree, with loader processes and without."""
    digests = []
    for name, workers in (("a", 0), ("b", 2)):
        fit(replace(SMALL, workers=workers, checkpoint=tmp_path / name))
        digests.append(digest_state(final_state(tmp_path / name)).digest)
    assert digests[0] == digests[1]


def test_a_resumed_fit_equals_an_uninterrupted_one_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after the first epoch and gone on with, every part of the state and every loss is the same."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    uninterrupted = fit(replace(SMALL, checkpoint=whole))
    save = checkpoint.save_checkpoint

    def save_and_stop(path: Path, contents: dict[str, Any]) -> None:
        save(path, contents)
        raise KeyboardInterrupt

    monkeypatch.setattr(fit_module, "save_checkpoint", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        fit(replace(SMALL, checkpoint=cut))
    monkeypatch.undo()
    resumed = fit(replace(SMALL, checkpoint=cut, resume=True))
    assert digest_state(final_state(cut)).digest == digest_state(final_state(whole)).digest
    assert resumed == uninterrupted
    assert len(resumed.losses) == 9


def test_another_seed_gives_other_bytes() -> None:
    """The comparison above could fail."""
    assert fit(replace(SMALL, epochs=1)).losses != fit(replace(SMALL, epochs=1, seed=7)).losses


def test_the_loss_falls(capsys: pytest.CaptureFixture[str]) -> None:
    """Sixty steps on a dozen canvases bring the loss well down, and each epoch prints a line."""
    result = fit(replace(SMALL, epochs=20, augment=False, lr=0.1))
    assert sum(result.losses[-6:]) < 0.7 * sum(result.losses[:6])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    assert lines[-1].startswith("epoch 20 of 20: loss ")


def test_the_default_fit_learns_far_more_than_chance() -> None:
    """Untrained, the detector's AP50 is below 0.01; the preset for CPUs ends above 0.35 (0.58 where it was made)."""
    options = Options(workers=0)
    sources = open_sources(options)
    torch.manual_seed(options.seed)
    untrained = Trainer(build_detector(options.model, 10), options, num_classes=10, steps_per_epoch=1)
    assert validate(untrained, sources.load(options).val).ap50 < 0.01
    result = fit(options)
    assert result.precisions[-1]["ap50"] > 0.35
    assert result.precisions[-1]["ap"] > 0.15


def test_a_device_that_is_not_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is in the message."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WorkloadError, match="sees no CUDA device; use --device cpu"):
        fit(replace(SMALL, device="cuda"))


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    """`python -m` trains with the flags it is given; a bad one is a usage error; an unusable folder status 1."""
    command = [sys.executable, "-m", "lucid_cli.workloads.detection", "--preset", "quick", "--threads", "1"]
    small = ["--size", "64", "--num-train", "8", "--num-val", "2", "--batch", "4", "--epochs", "1", "--workers", "0"]
    done = subprocess.run([*command, *small], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("epoch 1 of 1: loss ")
    missing = ["--images", str(tmp_path / "none"), "--annotations", str(tmp_path / "none.json")]
    failed = subprocess.run([*command, *small, *missing], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")
    assert "Traceback" not in failed.stderr
