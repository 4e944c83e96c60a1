"""The whole fit, small: it repeats, it resumes, it learns, and it says what it cannot do."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import lucid_profiler
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


def coco(folder: Path, *, box: tuple[float, ...] = (4, 4, 20, 20), num_boxes: int = 20, name: str = "thing") -> Options:
    """Return the options of a small fit on twelve and four images of one object each, the first `num_boxes` of them."""
    folder.mkdir(exist_ok=True)
    for index in range(16):
        Image.new("RGB", (64, 64), (index * 10, 20, 30)).save(folder / f"{index:02}.bmp")
    images = [{"id": index, "file_name": f"{index:02}.bmp", "width": 64, "height": 64} for index in range(16)]
    objects = [{"image_id": index, "category_id": 1, "bbox": box} for index in range(16)]
    document = {"images": images, "annotations": objects[:num_boxes], "categories": [{"id": 1, "name": name}]}
    (folder / "instances.json").write_text(json.dumps(document))
    return replace(SMALL, epochs=1, images=folder, annotations=folder / "instances.json")


def test_a_fit_resumes_on_the_same_data_only(tmp_path: Path) -> None:
    """Moved data are the same; another box, name or picture, or digits, are one clear error."""
    path = tmp_path / "last.pt"
    fit(replace(coco(tmp_path / "a"), checkpoint=path))
    assert fit(replace(coco(tmp_path / "b"), checkpoint=path, resume=True)).precisions
    others = [coco(tmp_path / "c", box=(4, 4, 20, 21)), coco(tmp_path / "d", name="object"), replace(SMALL, epochs=1)]
    changed = coco(tmp_path / "e")
    (tmp_path / "e" / "03.bmp").write_bytes((tmp_path / "e" / "03.bmp").read_bytes() + b"more")
    for other in [*others, changed]:
        with pytest.raises(WorkloadError, match=r"is of another fit: .*data_digest '\w{16}' then, '\w{16}' now"):
            fit(replace(other, checkpoint=path, resume=True))


def test_the_resolved_device_is_what_must_be_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` and what it stands for are one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = replace(SMALL, epochs=1, checkpoint=tmp_path / "last.pt")
    assert fit(replace(small, device="auto")) == fit(replace(small, device="cpu", amp="off", resume=True))


def spoil_weight(trainer: dict[str, Any]) -> None:
    """Give the first weight another shape."""
    trainer["model"][next(iter(trainer["model"]))] = torch.zeros(1)


def spoil_momentum(trainer: dict[str, Any]) -> None:
    """Give the first momentum another shape."""
    trainer["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(3)


def spoil_steps(trainer: dict[str, Any]) -> None:
    """Take steps away that the epochs have."""
    trainer.update(num_steps=1, losses=trainer["losses"][:1])


@pytest.mark.parametrize("spoil", [dict.clear, spoil_weight, spoil_momentum, spoil_steps])
def test_a_checkpoint_of_other_tensors_is_one_clear_error(tmp_path: Path, spoil: Callable[..., None]) -> None:
    """Nothing is trained on from it."""
    small = replace(SMALL, epochs=1, checkpoint=tmp_path / "last.pt")
    fit(small)
    contents = final_state(tmp_path / "last.pt")
    spoil(contents["trainer"])
    torch.save(contents, tmp_path / "last.pt")
    with pytest.raises(WorkloadError, match="is no checkpoint of this program, or a damaged one"):
        fit(replace(small, resume=True))


def test_a_checkpoint_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of another kind is not even loaded for."""
    (tmp_path / "diary").write_text("mine")
    monkeypatch.setattr(fit_module, "open_sources", None)
    with pytest.raises(WorkloadError, match="is there already"):
        fit(replace(SMALL, checkpoint=tmp_path / "diary"))
    assert (tmp_path / "diary").read_text() == "mine"
    assert capsys.readouterr().out == ""


def test_without_a_name_the_checkpoint_is_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written like any other, so that its time is measured, and gone at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    written = []

    def save(path: Path, contents: dict[str, Any]) -> None:
        checkpoint.save_checkpoint(path, contents)
        written.append(path)

    monkeypatch.setattr(fit_module, "save_checkpoint", save)
    fit(replace(SMALL, epochs=2))
    assert len(written) == 2
    assert all(path.parent.parent == tmp_path for path in written)
    assert list(tmp_path.iterdir()) == []


def test_what_was_trained_is_handed_to_lucid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option that has a meaning for the result, resolved, with the data and the flags, and no paths."""
    parts: dict[str, Any] = {}
    monkeypatch.setattr(lucid_profiler, "state", parts.__setitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fit(replace(SMALL, epochs=1))
    settings = parts["settings"]
    assert {"model": "tiny", "size": 64, "batch": 4, "epochs": 1, "lr": 0.05, "workers": 0}.items() <= settings.items()
    assert (settings["device"], settings["amp"], settings["data"], settings["num_classes"]) == (
        "cpu",
        "off",
        "digits",
        10,
    )
    assert settings["torch.use_deterministic_algorithms"] is True
    assert not {"checkpoint", "resume", "images", "annotations"} & settings.keys()
    assert set(Options.__dataclass_fields__) - settings.keys() == {"checkpoint", "resume", "images", "annotations"}


def test_without_objects_ap_is_not_defined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In validation: no number but a reason, printed and handed over; in training: a note."""
    parts: dict[str, Any] = {}
    monkeypatch.setattr(lucid_profiler, "state", parts.__setitem__)
    fit(coco(tmp_path / "a", num_boxes=12))
    reason = "no validation image has an annotated object"
    assert capsys.readouterr().out.endswith(f", AP not defined: {reason}\n")
    assert {"ap": None, "ap50": None, "reason": reason}.items() <= parts["metrics"].items()
    fit(coco(tmp_path / "b", num_boxes=0))
    assert capsys.readouterr().out.startswith("no training image has an annotated object, ")


def test_a_loss_that_is_no_number_is_a_warning_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The fit goes on, and says from which step on there was nothing to learn."""
    fit(replace(SMALL, epochs=2, lr=1e30, warmup_epochs=0.0))
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert re.fullmatch(r"warning: the loss is not finite from step [2-6] on; a lower --lr may help", warnings[0])


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
    assert (validate(untrained, sources.load(options).val).ap50 or 0.0) < 0.01
    result = fit(options)
    assert result.precisions[-1]["ap50"] > 0.35
    assert result.precisions[-1]["ap"] > 0.15


def test_a_device_that_is_not_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is in the message."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WorkloadError, match="sees no CUDA device; use --device cpu"):
        fit(replace(SMALL, device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(WorkloadError, match="--device cuda:1: there are 1 CUDA devices, the first is cuda:0"):
        fit(replace(SMALL, device="cuda:1"))


def program(*arguments: str) -> list[str]:
    """Return the command line of a small fit."""
    small = ["--size", "64", "--num-train", "8", "--num-val", "2", "--batch", "4", "--epochs", "1", "--workers", "0"]
    return [sys.executable, "-m", "lucid_cli.workloads.detection", "--preset", "quick", *small, *arguments]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_ctrl_c_is_quiet_and_ends_the_fit_and_its_workers(workers: str) -> None:
    """The status is that of a process that SIGINT ended, with nothing on standard error."""
    process = subprocess.Popen(
        program("--epochs", "10000", "--workers", workers),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("epoch 1 of 10000")
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (-signal.SIGINT, "")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_output_that_nobody_reads_is_one_line() -> None:
    """The fit ends at the first line that it cannot print."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(program(), stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written (Broken pipe): let it be read to the end\n"


def test_without_torch_the_program_says_so_in_one_line() -> None:
    """No traceback, and what to install."""
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", code, "lucid_cli.workloads.detection"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"error: the built-in fit needs torch: run `.* -m pip install torch`\n", done.stderr)


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    """`python -m` trains with the flags it is given; a bad one is a usage error; an unusable folder status 1."""
    done = subprocess.run(program(), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("epoch 1 of 1: loss ")
    missing = ["--images", str(tmp_path / "none"), "--annotations", str(tmp_path / "none.json")]
    failed = subprocess.run(program(*missing), capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")
    assert "Traceback" not in failed.stderr
