"""What the example does by itself; under lucid-yolo's trainer it runs on a machine with a GPU."""

import hashlib
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lucid_optim import MuSGD

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "lucid_yolo_fit.py"
FEW = ["--num-train", "3", "--num-val", "2"]


@pytest.fixture(scope="module")
def example() -> Any:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("lucid_yolo_fit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lucid_yolo_fit"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_generated_data_are_the_same_bytes_each_time(example: Any, tmp_path: Path) -> None:
    """Images and annotations, in another folder and another process' turn."""
    for name in ("a", "b"):
        example.prepare(example.parse([*FEW, "--cache", str(tmp_path / name)]))
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert len(digests(tmp_path / "a")) == 7


def test_generated_images_are_photographs_in_size_and_effort(example: Any, tmp_path: Path) -> None:
    """JPEG files of COCO's sizes, of about a hundred kilobytes or more, no two alike."""
    train, val = example.prepare(example.parse([*FEW, "--cache", str(tmp_path)]))
    files = sorted(train.images.iterdir())
    for file in files:
        with Image.open(file) as image:
            assert image.format == "JPEG"
            assert image.size in example.SIZES
        assert 60_000 < file.stat().st_size < 400_000
    assert len({file.read_bytes() for file in files}) == 5
    assert val.images == train.images


def test_generated_boxes_lie_inside_their_images_and_name_known_classes(example: Any, tmp_path: Path) -> None:
    """Every image has at least one, and none has a segmentation, which lucid-yolo would want to read."""
    for split in example.prepare(example.parse([*FEW, "--cache", str(tmp_path)])):
        contents = json.loads(split.annotations.read_text())
        sizes = {image["id"]: (image["width"], image["height"]) for image in contents["images"]}
        assert {one["image_id"] for one in contents["annotations"]} == set(sizes)
        assert len(contents["categories"]) == example.NUM_CLASSES
        for one in contents["annotations"]:
            left, top, width, height = one["bbox"]
            assert left >= 0
            assert top >= 0
            assert left + width <= sizes[one["image_id"]][0] + 0.02
            assert top + height <= sizes[one["image_id"]][1] + 0.02
            assert 1 <= one["category_id"] <= example.NUM_CLASSES
            assert "segmentation" not in one


def test_prepared_data_are_not_prepared_again(example: Any, tmp_path: Path) -> None:
    """The next run takes what is there."""
    options = example.parse([*FEW, "--cache", str(tmp_path)])
    train, _ = example.prepare(options)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert example.prepare(options)[0] == train
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def coco(folder: Path, num: int) -> Path:
    """Write annotations of images whose order by name is the reverse of theirs."""
    images = [{"id": number, "file_name": f"{num - number:03}.jpg", "width": 8, "height": 8} for number in range(num)]
    boxes = [{"id": number, "image_id": number, "category_id": 1, "bbox": [0, 0, 1, 1]} for number in range(num)]
    for number in range(num):
        (folder / f"{num - number:03}.jpg").touch()
    file = folder / "instances.json"
    file.write_text(json.dumps({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "a"}]}))
    return file


def test_of_coco_the_first_images_by_name_train_and_the_next_validate(example: Any, tmp_path: Path) -> None:
    """Without an overlap, each with its own annotations."""
    words = ["--images", str(tmp_path), "--annotations", str(coco(tmp_path, 6)), "--cache", str(tmp_path / "cache")]
    train, val = (json.loads(split.annotations.read_text()) for split in example.prepare(example.parse([*FEW, *words])))
    assert [image["file_name"] for image in train["images"]] == ["001.jpg", "002.jpg", "003.jpg"]
    assert [image["file_name"] for image in val["images"]] == ["004.jpg", "005.jpg"]
    assert sorted(one["image_id"] for one in val["annotations"]) == [1, 2]


def test_too_few_images_are_told_with_the_remedy(example: Any, tmp_path: Path) -> None:
    """Nothing stays in the cache."""
    words = ["--images", str(tmp_path), "--annotations", str(coco(tmp_path, 4)), "--cache", str(tmp_path / "cache")]
    with pytest.raises(SystemExit, match="names 4 images, 5 are needed: lower --num-train"):
        example.prepare(example.parse([*FEW, *words]))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_image_is_told_before_the_fit(example: Any, tmp_path: Path) -> None:
    """Of COCO as of what was generated, also when the data are prepared already."""
    coco_words = [
        "--images",
        str(tmp_path),
        "--annotations",
        str(coco(tmp_path, 6)),
        "--cache",
        str(tmp_path / "cache"),
    ]
    for words in (coco_words, ["--cache", str(tmp_path / "cache")]):
        options = example.parse([*FEW, *words])
        _, val = example.prepare(options)
        name = json.loads(val.annotations.read_text())["images"][-1]["file_name"]
        (val.images / name).unlink()
        with pytest.raises(SystemExit, match=f"{name} is missing: remove .* or complete --images"):
            example.prepare(options)


IMAGE = {"id": 1, "file_name": "1.jpg", "width": 8, "height": 8}
BOX = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1]}


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        ("[1", "Expecting"),
        ("[]", "it holds no object"),
        ("{}", "it has no list 'images'"),
        ({"images": {}}, "it has no list 'images'"),
        ({"images": [None]}, r"images\[0\] has no 'id' that is a whole number"),
        ({"images": [IMAGE, {"file_name": "1.jpg"}]}, r"images\[1\] has no 'id' that is a whole number"),
        ({"images": [IMAGE | {"id": True}]}, r"images\[0\] has no 'id' that is a whole number"),
        ({"images": [IMAGE | {"file_name": 1}]}, r"images\[0\] has no 'file_name' that is a text"),
        ({"images": [IMAGE | {"height": 0}]}, r"images\[0\] has no 'height' that is a number of pixels"),
        ({"images": [IMAGE, IMAGE]}, "two images have the same 'id'"),
        ({"categories": []}, "it has 0 categories, the detector 1 to 80"),
        ({"categories": [{"id": number} for number in range(81)]}, "it has 81 categories, the detector 1 to 80"),
        ({"categories": [{"name": "a"}]}, r"categories\[0\] has no 'id' that is a whole number"),
        ({"annotations": [BOX | {"image_id": [1]}]}, r"annotations\[0\] has no 'image_id' that is a whole number"),
        ({"annotations": [BOX | {"bbox": [0, 0]}]}, r"annotations\[0\] has no 'bbox' that is four numbers"),
        ({"annotations": [BOX | {"bbox": [0, 0, 1, 10**400]}]}, r"annotations\[0\] has no 'bbox'"),
        ({"annotations": [BOX | {"iscrowd": None}]}, r"annotations\[0\] has no 'iscrowd' that is 0 or 1"),
        ({"annotations": [BOX | {"area": "big"}]}, r"annotations\[0\] has no 'area' that is a number"),
        ({"categories": [{"id": 1}, {"id": 1}]}, "two categories have the same 'id'"),
        ("[" * 100_000, "maximum recursion"),
        ({"annotations": [BOX | {"bbox": [0, 0, 1, math.nan]}]}, r"annotations\[0\] has no 'bbox'"),
        ({"annotations": [BOX, {"image_id": 1, "caption": "a"}]}, r"annotations\[1\] has no 'category_id'"),
        ({"annotations": [BOX | {"category_id": 2}]}, r"annotations\[0\] is of category 2, which is not listed"),
    ],
)
def test_annotations_that_are_none_are_told(contents: Any, why: str, example: Any, tmp_path: Path) -> None:
    """With what is wrong and where, before anything stays in the cache."""
    file = tmp_path / "instances.json"
    whole = {"images": [IMAGE], "annotations": [BOX], "categories": [{"id": 1}]}
    file.write_text(contents if isinstance(contents, str) else json.dumps(whole | contents))
    words = ["--images", str(tmp_path), "--annotations", str(file), "--cache", str(tmp_path / "cache")]
    with pytest.raises(SystemExit, match=f"is no file of COCO's instances: {why}"):
        example.prepare(example.parse([*FEW, *words]))
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("contents", ['{"images": [', "[]", "{}"])
def test_prepared_data_that_were_cut_off_are_told(contents: str, example: Any, tmp_path: Path) -> None:
    """With what to remove."""
    options = example.parse([*FEW, "--cache", str(tmp_path)])
    train, _ = example.prepare(options)
    train.annotations.write_text(contents)
    with pytest.raises(SystemExit, match=f"--cache: {tmp_path}/generated-.* cannot be used .*: remove it"):
        example.prepare(options)


@pytest.mark.parametrize("place", ["image", "cache"])
def test_names_that_are_too_long_are_told(place: str, example: Any, tmp_path: Path) -> None:
    """Of an image as one that is missing, of a cache with its option."""
    cache = tmp_path / ("x" * 300 if place == "cache" else "cache")
    file = coco(tmp_path, 6)
    if place == "image":
        file.write_text(file.read_text().replace("001.jpg", "0" * 300))
    words = ["--images", str(tmp_path), "--annotations", str(file), "--cache", str(cache)]
    with pytest.raises(SystemExit, match="^--cache: File name too long" if place == "cache" else "is missing: remove"):
        example.prepare(example.parse([*FEW, *words]))


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc")
def test_a_cache_in_which_nothing_can_be_made_is_told(example: Any) -> None:
    """As one that is no folder."""
    with pytest.raises(SystemExit, match=r"--cache: .*: /proc$"):
        example.prepare(example.parse([*FEW, "--cache", "/proc"]))


def test_a_cache_that_is_no_folder_is_told(example: Any, tmp_path: Path) -> None:
    """With the option's name."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="--cache: "):
        example.prepare(example.parse([*FEW, "--cache", str(tmp_path / "file")]))


@pytest.mark.parametrize(
    ("words", "variable", "chosen"),
    [
        ([], None, "ours"),
        (["--optimizer", "own"], None, "own"),
        (["--optimizer", "captured"], None, "ours"),
        ([], "own", "own"),
        (["--optimizer", "native"], "own", "ours"),
    ],
)
def test_the_optimizer_comes_from_the_option_else_from_the_environment(
    words: list[str], variable: str | None, chosen: str, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of lucid's own arms mean ours, so that {arm} serves."""
    if variable is not None:
        monkeypatch.setenv("LUCID_YOLO_OPTIMIZER", variable)
    assert example.parse(words).optimizer == chosen


@pytest.mark.parametrize(
    ("words", "variable"),
    [
        (["--images", "folder"], None),
        (["--images", "no folder", "--annotations", __file__], None),
        (["--images", "x" * 300, "--annotations", __file__], None),
        (["--images", ".", "--annotations", "x" * 300], None),
        (["--images", ".", "--annotations", "no file"], None),
        (["--workers", "-1"], None),
        (["--annotations", "file"], None),
        (["--epochs", "0"], None),
        (["--epochs", "x"], None),
        (["--seed", "-1"], None),
        (["--seed", str(2**32)], None),
        (["--size", "63"], None),
        (["--optimizer", "adam"], None),
        ([], "adam"),
    ],
)
def test_what_cannot_be_used_ends_with_status_2(
    words: list[str],
    variable: str | None,
    example: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And a line that says why."""
    if variable is not None:
        monkeypatch.setenv("LUCID_YOLO_OPTIMIZER", variable)
    with pytest.raises(SystemExit) as ended:
        example.parse(words)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_what_is_not_installed_is_told_before_anything_is_made(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the line that installs it."""
    found = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        return None if name in {"pytorch_lightning", "fvcore"} else found(name) or True

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(sys, "argv", ["lucid_yolo_fit.py", "--cache", str(tmp_path / "cache")])
    with pytest.raises(
        SystemExit, match=r"^not installed: pytorch-lightning, fvcore; pip install lucid-yolo=="
    ) as told:
        example.main()
    assert "torchmetrics" not in str(told.value)
    assert not (tmp_path / "cache").exists()


def test_the_digest_of_the_data_follows_every_image(example: Any, tmp_path: Path) -> None:
    """One changed byte is another digest."""
    splits = example.prepare(example.parse([*FEW, "--cache", str(tmp_path)]))
    before = example.digest(splits)
    file = next(splits[1].images.glob("*5.jpg"))
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert example.digest(splits) != before


def test_pictures_follow_their_generator_alone(example: Any) -> None:
    """Equal for equal seeds, in pixels and boxes."""
    first, second = (example.picture(np.random.default_rng((1, 2))) for _ in range(2))
    assert first[0].tobytes() == second[0].tobytes()
    assert first[1] == second[1]


def test_ours_takes_over_the_settings_and_the_schedule_of_the_trainer_s_own(example: Any) -> None:
    """Parameters, hyperparameters, the factor of every step and how often it is asked for."""
    layer = torch.nn.Linear(2, 2)

    def own() -> dict[str, Any]:
        optimizer = MuSGD(layer.parameters(), lr=0.03, momentum=0.8, weight_decay=0.1, w_muon=0.3, w_sgd=0.7)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 2))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module = SimpleNamespace(parameters=layer.parameters, configure_optimizers=own)
    example.put_in_ours(module)
    theirs, ours = own(), module.configure_optimizers()
    assert ours["optimizer"].defaults == theirs["optimizer"].defaults
    assert ours["optimizer"].param_groups[0]["lr"] == theirs["optimizer"].param_groups[0]["lr"] == 0.015
    assert ours["lr_scheduler"]["interval"] == "step"
    assert ours["lr_scheduler"]["scheduler"].optimizer is ours["optimizer"]
