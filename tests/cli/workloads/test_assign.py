"""Assignment against a loop over images, targets and cells in float64."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lucid_cli.workloads.detection.assign import Assignment, assign
from lucid_cli.workloads.detection.values import Batch, Predictions

Box = tuple[int, int, int, int]
Target = tuple[Box, int]

# Sixteen cells of side 8 and four of side 16 on 32 by 32 pixels.
CENTERS = [(8.0 * x + 4, 8.0 * y + 4) for y in range(4) for x in range(4)]
CENTERS += [(16.0 * x + 8, 16.0 * y + 8) for y in range(2) for x in range(2)]


def overlap(a: Box, b: Box) -> float:
    """Return intersection over union of two boxes, 0 without area."""
    width = max(min(a[2], b[2]) - max(a[0], b[0]), 0)
    height = max(min(a[3], b[3]) - max(a[1], b[1]), 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union if union else 0.0


def reference_image(
    boxes: list[Box], logits: list[list[float]], targets: list[Target], top_k: int
) -> list[tuple[int, float]]:
    """Return each cell's target, -1 for none, and alignment, for one image."""
    ious = [[overlap(target, box) for box in boxes] for target, _ in targets]
    measures = [
        [u**6 / (1 + math.exp(-logits[cell][label])) for cell, u in enumerate(row)]
        for row, (_, label) in zip(ious, targets, strict=True)
    ]
    wishes, sole = [], []
    for row, ((x1, y1, x2, y2), _) in zip(measures, targets, strict=True):
        inside = [cell for cell, (x, y) in enumerate(CENTERS) if x1 < x < x2 and y1 < y < y2]
        middle = ((x1 + x2) / 2, (y1 + y2) / 2)
        nearest = min(range(len(CENTERS)), key=lambda cell: math.dist(CENTERS[cell], middle))
        wishes.append(sorted(inside, key=lambda cell: -row[cell])[:top_k] if inside else [nearest])
        sole.append(not inside)
    owner = []
    for cell in range(len(CENTERS)):
        rivals = [place for place, wish in enumerate(wishes) if cell in wish]
        rivals = [place for place in rivals if sole[place]] or rivals
        owner.append(max(rivals, key=lambda place: ious[place][cell], default=-1))
    result = []
    for cell, place in enumerate(owner):
        own = [other for other, same in enumerate(owner) if same == place]
        peak = max(measures[place][other] for other in own) if place >= 0 else 0.0
        best = max(ious[place][other] for other in own) if place >= 0 else 0.0
        result.append((place, measures[place][cell] / peak * best if peak > 0 else 0.0))
    return result


def predictions(boxes: Tensor, logits: Tensor) -> Predictions:
    """Return predictions of the cells above."""
    strides = torch.tensor([8.0] * 16 + [16.0] * 4)
    return Predictions(boxes=boxes, logits=logits, centers=torch.tensor(CENTERS), strides=strides)


def batch(images: list[list[Target]]) -> Batch:
    """Return a batch of targets with empty images."""
    flat = [target for targets in images for target in targets]
    return Batch(
        images=torch.zeros(len(images), 3, 32, 32, dtype=torch.uint8),
        boxes=torch.tensor([box for box, _ in flat], dtype=torch.float32).view(-1, 4),
        classes=torch.tensor([label for _, label in flat], dtype=torch.int64),
        image_index=torch.tensor([i for i, targets in enumerate(images) for _ in targets], dtype=torch.int64),
    )


def one_image(targets: list[Target], *, boxes: dict[int, Box], top_k: int = 13) -> Assignment:
    """Assign targets to cells that all score 0.5 and see the boxes given, or nothing."""
    seen = torch.zeros(1, 20, 4)
    for cell, box in boxes.items():
        seen[0, cell] = torch.tensor(box)
    return assign(predictions(seen, torch.zeros(1, 20, 3)), batch([targets]), top_k=top_k)


corners = st.integers(min_value=0, max_value=30)
lengths = st.integers(min_value=1, max_value=24)
some_box = st.builds(lambda x, y, w, h: (x, y, x + w, y + h), corners, corners, lengths, lengths)
some_targets = st.lists(st.tuples(some_box, st.integers(0, 2)), max_size=5)


@settings(max_examples=80)
@given(
    images=st.lists(some_targets, min_size=1, max_size=3),
    palette=st.lists(some_box, min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
    top_k=st.sampled_from([1, 3, 13, 50]),
)
def test_it_agrees_with_a_loop(images: list[list[Target]], palette: list[Box], seed: int, top_k: int) -> None:
    """Targets and alignments of random small cases are those of the loop, ties and crowded cells included."""
    generator = torch.Generator().manual_seed(seed)
    # A few boxes and scores shared by many cells make ties common.
    chosen = torch.randint(len(palette), (len(images), 20), generator=generator)
    boxes = torch.tensor(palette, dtype=torch.float32)[chosen]
    logits = torch.tensor([-2.0, 0.0, 1.0])[torch.randint(3, (len(images), 20, 3), generator=generator)]
    result = assign(predictions(boxes, logits), batch(images), top_k=top_k)
    first = 0
    for image, targets in enumerate(images):
        seen = [palette[place] for place in chosen[image].tolist()]
        expected = reference_image(seen, logits[image].tolist(), targets, top_k)
        owners = [first + place if place >= 0 else -1 for place, _ in expected]
        assert result.target[image].tolist() == owners
        alignment = torch.tensor([value for _, value in expected], dtype=torch.float32)
        torch.testing.assert_close(result.alignment[image], alignment, rtol=1e-4, atol=1e-6)
        first += len(targets)


def test_the_best_cells_inside_are_chosen() -> None:
    """Of the cells inside a target the one that sees it exactly gets 1, one that sees half of it a 64th."""
    target = (0, 0, 16, 16)
    result = one_image([(target, 1)], boxes={0: target, 1: (0, 0, 16, 8), 4: (0, 0, 2, 2), 9: target}, top_k=2)
    assert result.target[0].nonzero().flatten().tolist() == list(range(2, 20))  # 0 is the target, -1 is none
    assert result.alignment[0, :2].tolist() == [1.0, 1 / 64]


def test_ties_go_to_the_lower_index() -> None:
    """Of equally good cells the first are chosen, whatever their scale."""
    target = (0, 0, 32, 32)
    result = one_image([(target, 0)], boxes=dict.fromkeys(range(20), target), top_k=3)
    assert (result.target[0] == 0).nonzero().flatten().tolist() == [0, 1, 2]


def test_a_cell_wanted_twice_goes_to_the_greater_overlap() -> None:
    """Two targets want the cells at 4, 4: each cell goes to the target that it sees better, equals to the first."""
    large, small = (0, 0, 16, 16), (0, 0, 8, 8)
    result = one_image([(large, 0), (small, 1)], boxes={0: (0, 0, 8, 9), 1: large})
    assert result.target[0, :2].tolist() == [1, 0]
    twins = one_image([(small, 0), (small, 1)], boxes={0: small})
    assert twins.target[0, 0] == 0


def test_a_target_that_contains_no_centre_gets_the_nearest_cell() -> None:
    """A target between centres gets one cell, though a target that contains the centre sees it better."""
    tiny, large = (5, 5, 7, 7), (0, 0, 32, 32)
    result = one_image([(large, 0), (tiny, 1)], boxes=dict.fromkeys(range(20), large))
    assert (result.target[0] == 1).nonzero().flatten().tolist() == [0]
    assert int((result.target[0] == 0).sum()) == 12


def test_no_targets_leave_background() -> None:
    """A batch without targets, and an image without targets beside one with, have no cells to learn from."""
    empty = assign(predictions(torch.zeros(2, 20, 4), torch.zeros(2, 20, 3)), batch([[], []]))
    assert (empty.target == -1).all()
    assert (empty.alignment == 0).all()
    mixed = assign(predictions(torch.zeros(2, 20, 4), torch.zeros(2, 20, 3)), batch([[], [((0, 0, 16, 16), 0)]]))
    assert (mixed.target[0] == -1).all()
    assert (mixed.target[1] == 0).sum() == 5


def test_cells_that_see_nothing_are_assigned_with_alignment_zero() -> None:
    """Predictions without overlap give finite alignments of 0."""
    result = one_image([((0, 0, 16, 16), 0)], boxes={})
    assert (result.target[0] == 0).any()
    assert (result.alignment == 0).all()


def test_no_gradient_passes() -> None:
    """Alignments are constants of the loss."""
    boxes = torch.zeros(1, 20, 4, requires_grad=True)
    result = assign(predictions(boxes, torch.zeros(1, 20, 3, requires_grad=True)), batch([[((0, 0, 16, 16), 0)]]))
    assert not result.alignment.requires_grad
