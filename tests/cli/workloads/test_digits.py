import subprocess
import sys
from typing import Literal

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from lucid_cli.workloads.detection.digits import DigitCanvases, _background
from lucid_cli.workloads.detection.errors import WorkloadError

SIZES = (64, 96, 128, 640)


def bytes_of(canvases: DigitCanvases, index: int) -> bytes:
    """Return everything that a canvas holds."""
    image, targets = canvases[index]
    tensors: tuple[Tensor, ...] = (image, targets.boxes, targets.classes)
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def test_a_canvas_depends_on_size_seed_split_and_index_alone() -> None:
    """Neither the number of canvases nor what was drawn before matters; each part of the key does."""
    canvases = DigitCanvases(9, 96, 1, split="train")
    expected = bytes_of(canvases, 5)
    torch.rand(3)
    assert bytes_of(canvases, 5) == expected
    assert bytes_of(DigitCanvases(6, 96, 1, split="train"), 5) == expected
    others = [
        bytes_of(DigitCanvases(9, 128, 1, split="train"), 5),
        bytes_of(DigitCanvases(9, 96, 2, split="train"), 5),
        bytes_of(DigitCanvases(9, 96, 1, split="val"), 5),
        bytes_of(canvases, 4),
    ]
    assert len({expected, *others}) == 5


def test_drawing_leaves_the_global_generator_alone() -> None:
    """A fit's random state is its own."""
    canvases = DigitCanvases(1, 96, 1, split="train")
    before = torch.get_rng_state()
    _ = canvases[0]
    assert torch.equal(torch.get_rng_state(), before)


def test_training_and_validation_share_no_scan() -> None:
    """Over several hundred canvases the scans of the two splits are disjoint, and each split shows all ten digits."""
    labels = load_digits().target
    scans: dict[str, set[int]] = {}
    splits: tuple[Literal["train", "val"], ...] = ("train", "val")
    for split in splits:
        canvases = DigitCanvases(400, 96, 7, split=split)
        scans[split] = {digit.scan for index in range(len(canvases)) for digit in canvases.digits(index)}
        assert {int(labels[scan]) for scan in scans[split]} == set(range(10))
    assert scans["train"].isdisjoint(scans["val"])
    assert max(scans["train"]) < 1437 <= min(scans["val"])


@pytest.mark.parametrize("size", SIZES)
def test_a_box_holds_a_digits_ink_and_nothing_around_it(size: int) -> None:
    """Against the canvas before it was written on: no pixel changes outside a box, and all four edges of a box do."""
    canvases = DigitCanvases(4, size, 3, split="train")
    for index in range(len(canvases)):
        image, targets = canvases[index]
        ground, _ = _background(canvases._generator("background", index), size)
        written = (image != (ground * 255).round().to(torch.uint8)).any(dim=0)
        for x1, y1, x2, y2 in targets.boxes.int().tolist():
            inside = written[y1:y2, x1:x2]
            assert inside[0].any()
            assert inside[-1].any()
            assert inside[:, 0].any()
            assert inside[:, -1].any()
            written[y1:y2, x1:x2] = False
        assert not written.any()


@pytest.mark.parametrize("size", SIZES)
def test_digits_are_few_apart_inside_and_of_the_stated_size(size: int) -> None:
    """One to six digits that do not overlap; the longer side of each is about 12 to 40 per cent of the canvas."""
    canvases = DigitCanvases(6, size, 5, split="val")
    for index in range(len(canvases)):
        image, targets = canvases[index]
        assert (image.dtype, image.shape) == (torch.uint8, (3, size, size))
        assert (targets.boxes.dtype, targets.classes.dtype) == (torch.float32, torch.int64)
        assert len(targets.boxes) == len(targets.classes)
        assert 1 <= len(targets.boxes) <= 6
        assert targets.boxes.min() >= 0
        assert targets.boxes.max() <= size
        longer = (targets.boxes[:, 2:] - targets.boxes[:, :2]).amax(dim=1)
        assert longer.min() >= 0.10 * size
        assert longer.max() <= 0.40 * size + 1
        covered = torch.zeros(size, size, dtype=torch.uint8)
        for x1, y1, x2, y2 in targets.boxes.int().tolist():
            covered[y1:y2, x1:x2] += 1
        assert covered.max() == 1


def test_every_number_of_digits_occurs() -> None:
    """Over many canvases there are one, two and up to six."""
    canvases = DigitCanvases(60, 96, 5, split="val")
    assert {len(canvases.digits(index)) for index in range(len(canvases))} == set(range(1, 7))


def test_classes_and_ink_are_those_of_the_scan() -> None:
    """The label is scikit-learn's, and the ink drawn looks like the scan's: shrunk to its size, they correlate."""
    digits = load_digits()
    canvases = DigitCanvases(20, 128, 11, split="train")
    for index in range(len(canvases)):
        classes = canvases[index][1].classes.tolist()
        drawn = canvases.digits(index)
        assert classes == [int(digits.target[digit.scan]) for digit in drawn]
        for digit in drawn:
            scan = torch.from_numpy(digits.images[digit.scan]).float()
            scan = scan[scan.amax(dim=1) > 3][:, scan.amax(dim=0) > 3]
            rows, columns = scan.shape
            shrunk = torch.nn.functional.adaptive_avg_pool2d(digit.ink[None], (rows, columns))[0]
            assert torch.corrcoef(torch.stack([scan.flatten(), shrunk.flatten()]))[0, 1] > 0.6


def test_ink_stands_out_from_every_ground() -> None:
    """The strongest ink of each digit differs from the ground by at least a tenth of the range of grey."""
    canvases = DigitCanvases(40, 96, 13, split="train")
    for index in range(len(canvases)):
        image = canvases[index][0].float() / 255
        ground, _ = _background(canvases._generator("background", index), 96)
        for digit in canvases.digits(index):
            x1, y1, x2, y2 = digit.box
            assert (image - ground).abs()[:, y1:y2, x1:x2].amin(dim=0).max() > 0.1


def test_an_index_beyond_the_canvases_is_refused() -> None:
    """Neither end of the range is passed over."""
    canvases = DigitCanvases(2, 96, 1, split="train")
    for index in (-1, 2):
        with pytest.raises(IndexError, match="2 canvases"):
            canvases[index]


@pytest.mark.parametrize(("num_images", "size"), [(0, 96), (3, 16)])
def test_too_few_or_too_small_canvases_are_refused(num_images: int, size: int) -> None:
    """The message says what is possible."""
    with pytest.raises(WorkloadError, match="at least 1 of at least 32 px"):
        DigitCanvases(num_images, size, 1, split="train")


def test_without_scikit_learn_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package and the way around it."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(WorkloadError, match="pip install scikit-learn"):
        DigitCanvases(1, 96, 1, split="train")


def test_what_scikit_learn_lacks_is_named() -> None:
    """Without SciPy it does not import, and SciPy is what has to be installed."""
    code = (
        "import sys; sys.modules['scipy'] = None\n"
        "from lucid_cli.workloads.detection.digits import load_scans\n"
        "from lucid_cli.workloads.detection.errors import WorkloadError\n"
        "try: load_scans()\n"
        "except WorkloadError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "run `pip install scipy`" in done.stdout
