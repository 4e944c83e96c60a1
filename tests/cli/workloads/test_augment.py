import colorsys
import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lucid_cli.workloads.detection.augment import Augmentation, Change, augment, draw, jitter_hsv
from lucid_cli.workloads.detection.geometry import MIN_VISIBLE, letterbox
from lucid_cli.workloads.detection.values import Targets

SIZE = 64
NOTHING = Change(flip=False, scale=1.0, shift_x=0.0, shift_y=0.0, gains=(1.0, 1.0, 1.0))
ROUNDING = 0.5 / 255 + 1e-6


def targets_of(*boxes: tuple[float, float, float, float]) -> Targets:
    """Return boxes, each with its row as its class."""
    return Targets(boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), classes=torch.arange(len(boxes)))


def painted(*boxes: tuple[int, int, int, int], height: int = SIZE, width: int = SIZE) -> Tensor:
    """Return a black image with white boxes."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    for x1, y1, x2, y2 in boxes:
        image[:, y1:y2, x1:x2] = 255
    return image


def bounds(image: Tensor) -> list[float]:
    """Return the box around what is brighter than the grey of an empty canvas."""
    ys, xs = (image[0] > 127).nonzero().unbind(1)
    return [float(xs.min()), float(ys.min()), float(xs.max()) + 1, float(ys.max()) + 1]


def colours() -> Tensor:
    """Return every eighteenth step of each channel and what lies near grey, `(1, 3, 1, n)` uint8."""
    grid = list(itertools.product(range(0, 256, 15), repeat=3))
    near_grey = [(level, level, min(level + 1, 255)) for level in range(256)]
    return torch.tensor(grid + near_grey, dtype=torch.uint8).T.reshape(1, 3, 1, -1).contiguous()


@pytest.mark.parametrize(
    "change",
    [
        replace(NOTHING, flip=True),
        replace(NOTHING, scale=0.5),
        replace(NOTHING, scale=1.5),
        replace(NOTHING, shift_x=0.125, shift_y=-0.0625),
        replace(NOTHING, flip=True, scale=1.25, shift_x=-0.1, shift_y=0.1),
    ],
)
def test_boxes_move_with_their_pixels(change: Change) -> None:
    """A white box on black is found in the changed image where its coordinates say, to a pixel."""
    box = (20, 24, 36, 52)
    image, targets = augment(painted(box), targets_of(box), change)
    assert targets.boxes[0].tolist() == pytest.approx(bounds(image), abs=1.0)


def test_no_change_changes_nothing() -> None:
    """Image, boxes and classes keep their bytes."""
    image = torch.randint(0, 256, (3, SIZE, SIZE), dtype=torch.uint8)
    given_targets = targets_of((1.5, 2.25, 30.0, 40.125), (0.0, 0.0, 64.0, 64.0))
    changed, targets = augment(image, given_targets, NOTHING)
    assert torch.equal(changed, image)
    assert torch.equal(targets.boxes, given_targets.boxes)
    assert torch.equal(targets.classes, given_targets.classes)


def test_inputs_are_not_written() -> None:
    """A cached image can be augmented again."""
    image, targets = painted((8, 8, 40, 40)), targets_of((8, 8, 40, 40))
    augment(image, targets, Change(flip=True, scale=0.7, shift_x=0.1, shift_y=0.1, gains=(1.1, 0.5, 0.5)))
    assert torch.equal(image, painted((8, 8, 40, 40)))
    assert targets.boxes.tolist() == [[8, 8, 40, 40]]


coordinate = st.floats(0, SIZE, width=32)
interval = st.tuples(coordinate, coordinate).map(sorted).filter(lambda ends: ends[0] < ends[1])


@settings(max_examples=80)
@given(
    ends=st.lists(st.tuples(interval, interval), max_size=5),
    flip=st.booleans(),
    scale=st.floats(0.5, 1.5),
    shift_x=st.floats(-0.6, 0.6),
    shift_y=st.floats(-0.6, 0.6),
)
def test_boxes_stay_valid_and_go_when_too_little_is_seen(
    ends: list[tuple[list[float], list[float]]], flip: bool, scale: float, shift_x: float, shift_y: float
) -> None:
    """What is left has an area inside the image; what is gone shows less than the stated share, computed in doubles."""
    boxes = [(x1, y1, x2, y2) for (x1, x2), (y1, y2) in ends]
    change = replace(NOTHING, flip=flip, scale=scale, shift_x=shift_x, shift_y=shift_y)
    image, targets = augment(painted(), targets_of(*boxes), change)
    assert image.shape == (3, SIZE, SIZE)
    assert targets.boxes.isfinite().all()
    assert ((targets.boxes >= 0) & (targets.boxes <= SIZE)).all()
    assert (targets.boxes[:, :2] < targets.boxes[:, 2:]).all()
    kept = set(targets.classes.tolist())
    assert len(kept) == len(targets.classes)
    scaled = round(SIZE * scale)
    left = round((SIZE - scaled) / 2 + shift_x * SIZE)
    top = round((SIZE - scaled) / 2 + shift_y * SIZE)
    for number, (x1, y1, x2, y2) in enumerate(boxes):
        x1, x2 = (SIZE - x2, SIZE - x1) if flip else (x1, x2)  # noqa: PLW2901 - the same box, mirrored
        factor = scaled / SIZE
        seen = seen_share(x1 * factor + left, x2 * factor + left) * seen_share(y1 * factor + top, y2 * factor + top)
        if min(x2 - x1, y2 - y1) > 0.01 and abs(seen - MIN_VISIBLE) > 1e-2:
            assert (number in kept) == (seen > MIN_VISIBLE)


def seen_share(start: float, end: float) -> float:
    """Return the share of an interval that lies on the canvas."""
    return max(min(end, SIZE) - max(start, 0), 0) / (end - start) if end > start else 0.0


def test_a_change_depends_on_seed_epoch_and_index_alone() -> None:
    """The same key gives the same change whatever was drawn before; each part of it matters; no global state moves."""
    before = torch.get_rng_state()
    changes = {
        (seed, epoch, index): draw(Augmentation(), seed=seed, epoch=epoch, index=index)
        for seed in range(3)
        for epoch in range(3)
        for index in range(3)
    }
    assert len(set(changes.values())) == 27
    assert draw(Augmentation(), seed=1, epoch=2, index=0) == changes[1, 2, 0]
    assert torch.equal(torch.get_rng_state(), before)


def test_changes_fill_their_ranges_and_keep_to_them() -> None:
    """Over many draws each number comes near both ends of its range, and half of the images are mirrored."""
    augmentation = Augmentation()
    changes = [draw(augmentation, seed=0, epoch=0, index=index) for index in range(2000)]
    columns = [
        ([change.scale for change in changes], 1.0, augmentation.scale),
        ([change.shift_x for change in changes], 0.0, augmentation.translate),
        ([change.shift_y for change in changes], 0.0, augmentation.translate),
        ([change.gains[0] for change in changes], 1.0, augmentation.hue),
        ([change.gains[1] for change in changes], 1.0, augmentation.saturation),
        ([change.gains[2] for change in changes], 1.0, augmentation.value),
    ]
    for values, middle, reach in columns:
        assert middle - reach <= min(values) < middle - 0.98 * reach
        assert middle + 0.98 * reach < max(values) <= middle + reach
    assert 0.45 < sum(change.flip for change in changes) / len(changes) < 0.55


def test_hsv_follows_the_standard_librarys_conversion() -> None:
    """Against colorsys, one pixel at a time in doubles, for colours all over the cube."""
    gains = (1.3, 0.6, 1.2)
    images = colours()
    jittered = jitter_hsv(images, torch.tensor([gains]))
    for before, after in zip(images[0, :, 0].T.tolist(), jittered[0, :, 0].T.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(channel / 255 for channel in before))
        expected = colorsys.hsv_to_rgb(hue * gains[0] % 1, min(saturation * gains[1], 1), min(value * gains[2], 1))
        assert [channel / 255 for channel in after] == pytest.approx(expected, abs=ROUNDING)


def test_gains_of_one_are_the_identity() -> None:
    """uint8 images keep their bytes; floats keep their values to float32's precision."""
    images, ones = colours(), torch.ones(1, 3)
    assert torch.equal(jitter_hsv(images, ones), images)
    floats = images.float() / 255
    torch.testing.assert_close(jitter_hsv(floats, ones), floats, rtol=0, atol=1e-6)


def check_batch_against_single_images(device: str) -> None:
    """Compare a float batch on a device with what `augment` makes of each image."""
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    changes = [draw(Augmentation(), seed=3, epoch=1, index=index) for index in range(4)]
    colour_only = [replace(NOTHING, gains=change.gains) for change in changes]
    pairs = zip(images, colour_only, strict=True)
    expected = torch.stack([augment(image, targets_of(), change)[0] for image, change in pairs])
    gains = torch.tensor([change.gains for change in changes], device=device)
    on_device = images.to(device)
    tolerance = 0 if device == "cpu" else 1
    assert (jitter_hsv(on_device, gains).cpu().int() - expected.int()).abs().max() <= tolerance
    floats = jitter_hsv(on_device.float() / 255, gains).cpu()
    assert (floats - expected.float() / 255).abs().max() <= ROUNDING


def test_a_batch_is_changed_like_its_images() -> None:
    """uint8 batches equal the single images byte for byte; float batches equal them to a rounding step."""
    check_batch_against_single_images("cpu")


@pytest.mark.gpu
def test_a_batch_on_the_device_is_changed_like_its_images() -> None:
    """A CUDA device differs from the loader by a rounding step at most."""
    check_batch_against_single_images("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_keep_their_dtype_and_range(dtype: torch.dtype) -> None:
    """Strong gains leave no value outside [0, 1] and make no NaN of black, grey or white."""
    images = (colours().float() / 255).to(dtype)
    jittered = jitter_hsv(images, torch.tensor([[1.015, 1.7, 1.4]]))
    assert jittered.dtype == dtype
    assert ((jittered >= 0) & (jittered <= 1)).all()


@pytest.mark.parametrize(("height", "width"), [(40, 80), (80, 40), (30, 30), (1, 200), (64, 64)])
def test_letterbox_keeps_the_aspect_and_moves_boxes(height: int, width: int) -> None:
    """The image is centred, its longer side fills the square, and a box around all of it stays around all of it."""
    image = torch.full((3, height, width), 255, dtype=torch.uint8)
    boxed, targets = letterbox(image, targets_of((0, 0, width, height)), size=SIZE)
    assert boxed.shape == (3, SIZE, SIZE)
    assert targets.boxes[0].tolist() == pytest.approx(bounds(boxed), abs=1e-4)
    x1, y1, x2, y2 = targets.boxes[0].tolist()
    assert max(x2 - x1, y2 - y1) == SIZE
    assert math.isclose(x1, SIZE - x2, abs_tol=1)
    assert math.isclose(y1, SIZE - y2, abs_tol=1)
    if min(height, width) > 8:
        assert (x2 - x1) / (y2 - y1) == pytest.approx(width / height, rel=0.03)
