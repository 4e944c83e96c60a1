"""The detection loss against values worked out by hand, and that it teaches."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lucid_cli.workloads.detection.ap import average_precision
from lucid_cli.workloads.detection.decode import decode
from lucid_cli.workloads.detection.loss import BOX_WEIGHT, CLS_WEIGHT, Losses, detection_loss
from lucid_cli.workloads.detection.model import build_detector
from lucid_cli.workloads.detection.values import Batch, Predictions
from lucid_optim import MuSGD
from support.reference import bits


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Small images gain nothing from a second thread and lose much where cores are shared.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def predictions(boxes: Tensor, logits: Tensor, centers: Tensor) -> Predictions:
    """Return predictions with cells of side 8."""
    return Predictions(boxes=boxes, logits=logits, centers=centers, strides=torch.full((len(centers),), 8.0))


def batch(num_images: int, boxes: Tensor, classes: list[int], image_index: list[int]) -> Batch:
    """Return a batch whose images nobody reads."""
    return Batch(
        images=torch.zeros(num_images, 3, 1, 1, dtype=torch.uint8),
        boxes=boxes.view(-1, 4),
        classes=torch.tensor(classes, dtype=torch.int64),
        image_index=torch.tensor(image_index, dtype=torch.int64),
    )


def entropy(logit: float, goal: float) -> float:
    """Return the binary cross-entropy of one score."""
    score = 1 / (1 + math.exp(-logit))
    return -goal * math.log(score) - (1 - goal) * math.log(1 - score)


def test_one_cell_and_one_target() -> None:
    """The cell sees twice the target: IoU and so alignment 1/2, a norm of 1, cross-entropies of two classes."""
    seen = predictions(torch.tensor([[[0.0, 0, 8, 8]]]), torch.tensor([[[0.5, -1.0]]]), torch.tensor([[4.0, 3.0]]))
    losses = detection_loss(seen, batch(1, torch.tensor([0.0, 0, 8, 4]), [0], [0]), num_classes=2)
    aspect = 4 / math.pi**2 * (math.atan(1) - math.atan(2)) ** 2
    ciou = 0.5 - 4 / 128 - aspect * aspect / (0.5 + aspect)
    box, cls = 0.5 * (1 - ciou), entropy(0.5, 0.5) + entropy(-1.0, 0.0)
    assert float(losses.box) == pytest.approx(box, rel=1e-5)
    assert float(losses.cls) == pytest.approx(cls, rel=1e-5)
    assert float(losses.total) == pytest.approx(BOX_WEIGHT * box + CLS_WEIGHT * cls, rel=1e-5)


def test_the_sum_of_alignments_divides_both_parts() -> None:
    """Two images, three cells: alignments 1, 1/64 of a half-seen target and 1/2, background counts in the scores."""
    boxes = torch.tensor([[[0.0, 0, 8, 8], [0, 0, 8, 4], [50, 50, 60, 60]], [[0, 0, 8, 4], [0, 0, 2, 2], [0, 0, 2, 2]]])
    centers = torch.tensor([[4.0, 4.0], [4.0, 3.0], [40.0, 40.0]])
    found = predictions(boxes, torch.zeros(2, 3, 1), centers)
    losses = detection_loss(
        found, batch(2, torch.tensor([[0.0, 0, 8, 8], [0, 0, 8, 8]]), [0, 0], [0, 1]), num_classes=1
    )
    aspect = 4 / math.pi**2 * (math.atan(1) - math.atan(2)) ** 2
    half = 1 - (0.5 - 4 / 128 - aspect * aspect / (0.5 + aspect))
    # The second image's second cell sees a 16th of the target: (1/16)^6 against (1/2)^6, times 1/2.
    sixteenth = 1 / 8**6 / 2
    slight = 1 - (1 / 16 - 18 / 128)
    norm = 1 + 1 / 64 + 1 / 2 + sixteenth
    assert float(losses.box) == pytest.approx((half / 64 + half / 2 + slight * sixteenth) / norm, rel=1e-5)
    # At a score of 1/2 the cross-entropy is log 2 whatever the goal.
    assert float(losses.cls) == pytest.approx(6 * math.log(2) / norm, rel=1e-5)


def test_without_targets_only_scores_are_taught() -> None:
    """No targets: no box loss, the cross-entropy of background, and gradients of zero, not of nothing, for boxes."""
    boxes = torch.tensor([[[0.0, 0, 8, 8], [0, 0, 4, 4]]], requires_grad=True)
    logits = torch.tensor([[[1.0], [-2.0]]], requires_grad=True)
    found = predictions(boxes, logits, torch.tensor([[4.0, 4.0], [12.0, 4.0]]))
    losses = detection_loss(found, batch(1, torch.zeros(0, 4), [], []), num_classes=1)
    losses.total.backward()
    assert float(losses.box.detach()) == 0
    assert float(losses.cls.detach()) == pytest.approx(entropy(1.0, 0.0) + entropy(-2.0, 0.0), rel=1e-5)
    assert boxes.grad is not None
    assert logits.grad is not None
    assert (boxes.grad == 0).all()
    assert logits.grad.flatten().tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))])


def test_a_perfect_prediction_costs_nothing() -> None:
    """A box that is its target's and a score of nearly one have a loss of nearly zero."""
    found = predictions(torch.tensor([[[0.0, 0, 8, 8]]]), torch.tensor([[[20.0]]]), torch.tensor([[4.0, 4.0]]))
    losses = detection_loss(found, batch(1, torch.tensor([0.0, 0, 8, 8]), [0], [0]), num_classes=1)
    assert float(losses.total) == pytest.approx(0, abs=1e-5)


def random_losses(*, dtype: torch.dtype = torch.float32, autocast: bool = False) -> tuple[Losses, Tensor]:
    """Return the losses of random predictions of 60 cells, and the gradient of their boxes."""
    generator = torch.Generator().manual_seed(7)
    corner = torch.rand(2, 60, 2, generator=generator) * 30
    boxes = torch.cat([corner, corner + 1 + 20 * torch.rand(2, 60, 2, generator=generator)], dim=2).requires_grad_()
    logits = torch.randn(2, 60, 3, generator=generator).bfloat16().to(dtype)
    found = predictions(boxes, logits, torch.rand(60, 2, generator=generator) * 40)
    targets = batch(2, torch.tensor([[0.0, 0, 20, 20], [10, 5, 33, 31], [2, 2, 2.5, 2.5]]), [0, 2, 1], [0, 0, 1])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        losses = detection_loss(found, targets, num_classes=3)
    losses.total.backward()
    assert boxes.grad is not None
    return losses, boxes.grad


def test_autocast_changes_no_bit() -> None:
    """Under autocast, with bfloat16 logits, losses and gradients are those of float32."""
    losses, gradient = random_losses()
    same, gradient_too = random_losses(dtype=torch.bfloat16, autocast=True)
    assert losses.total.dtype == same.total.dtype == torch.float32
    assert [bits(part) for part in (losses.box, losses.cls, losses.total, gradient)] == [
        bits(part) for part in (same.box, same.cls, same.total, gradient_too)
    ]


def rectangles() -> Batch:
    """Return four dark images, each with two bright rectangles: upright red ones, class 0, flat green ones, class 1."""
    images = torch.full((4, 3, 96, 96), 30, dtype=torch.uint8)
    boxes, classes = [], []
    for image in range(4):
        for label, (x, y, w, h) in enumerate([(6 + 14 * image, 8, 16, 30), (40 - 10 * image, 56, 36, 20)]):
            images[image, label, y : y + h, x : x + w] = 230
            boxes.append([x, y, x + w, y + h])
            classes.append(label)
    index = torch.arange(4).repeat_interleave(2)
    return Batch(images=images, boxes=torch.tensor(boxes).float(), classes=torch.tensor(classes), image_index=index)


def test_a_hundred_steps_learn_four_images_by_heart() -> None:
    """The tiny detector, this loss and MuSGD find the rectangles that they were shown: AP50 above 0.8."""
    shown = rectangles()
    images = shown.images.float() / 255
    model = build_detector("tiny", 2)
    optimizer = MuSGD(model.parameters(), lr=0.03, momentum=0.9)
    for step in range(100):
        for group in optimizer.param_groups:
            group["lr"] = 0.03 * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / 100)
        optimizer.zero_grad()
        detection_loss(model(images), shown, num_classes=2).total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    with torch.no_grad():
        found = decode(model.eval()(images))
    ap50 = average_precision(found, shown.targets(), num_classes=2).ap50
    assert ap50 is not None
    assert ap50 > 0.8


CUDA_STEPS = """
import hashlib, torch
from lucid_cli.workloads.detection.decode import decode
from lucid_cli.workloads.detection.loss import detection_loss
from lucid_cli.workloads.detection.model import build_detector
from lucid_cli.workloads.detection.values import Batch
torch.use_deterministic_algorithms(True)
torch.manual_seed(42)
model = build_detector("nano", 5).cuda()
corner = torch.rand(24, 2) * 200
batch = Batch(
    images=torch.randint(256, (4, 3, 320, 320), dtype=torch.uint8), boxes=torch.cat([corner, corner + 60], dim=1),
    classes=torch.arange(24) % 5, image_index=torch.arange(24) // 6,
).pin_memory().to("cuda", non_blocking=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
digest = hashlib.sha256()
for _ in range(4):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        predictions = model(batch.images / 255)
        losses = detection_loss(predictions, batch, num_classes=5)
    optimizer.zero_grad()
    losses.total.backward()
    optimizer.step()
    digest.update(losses.total.detach().cpu().numpy().tobytes())
for found in decode(predictions):
    digest.update(found.boxes.cpu().numpy().tobytes() + found.scores.cpu().numpy().tobytes())
for value in model.state_dict().values():
    digest.update(value.cpu().numpy().tobytes())
print(digest.hexdigest(), losses.total.isfinite().item())
"""


@pytest.mark.gpu
def test_cuda_trains_to_equal_bytes_under_deterministic_algorithms() -> None:
    """On CUDA torch refuses no operation of network and loss, and two processes end with the same bytes."""
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    outputs = [
        subprocess.run([sys.executable, "-c", CUDA_STEPS], env=env, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].endswith("True\n")
