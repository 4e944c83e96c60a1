"""Overlap of boxes against scalar arithmetic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lucid_cli.workloads.detection.boxes import area, complete_iou, iou, pairwise_iou

Box = tuple[float, float, float, float]

coordinates = st.floats(min_value=-200, max_value=900, width=32)
sides = st.one_of(st.just(0.0), st.floats(min_value=0.125, max_value=700, width=32))
boxes = st.builds(lambda x, y, w, h: (x, y, x + w, y + h), coordinates, coordinates, sides, sides)


def scalar_iou(a: Box, b: Box) -> float:
    """Return intersection over union of two boxes."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union > 0 else 0.0


def scalar_parts(a: Box, b: Box) -> tuple[float, float, float]:
    """Return IoU, the distance of the centres and the aspect term of two boxes with area."""
    squared = ((a[0] + a[2] - b[0] - b[2]) / 2) ** 2 + ((a[1] + a[3] - b[1] - b[3]) / 2) ** 2
    diagonal = (max(a[2], b[2]) - min(a[0], b[0])) ** 2 + (max(a[3], b[3]) - min(a[1], b[1])) ** 2
    turn = math.atan((a[2] - a[0]) / (a[3] - a[1])) - math.atan((b[2] - b[0]) / (b[3] - b[1]))
    return scalar_iou(a, b), squared / diagonal, 4 / math.pi**2 * turn**2


def scalar_ciou(a: Box, b: Box) -> float:
    """Return Complete IoU of two boxes with area."""
    overlap, distance, aspect = scalar_parts(a, b)
    weight = aspect / (1 - overlap + aspect) if aspect > 0 else 0.0
    return overlap - distance - weight * aspect


def double(*values: Box) -> Tensor:
    """Return boxes as `(n, 4)` float64."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 4)


def test_hand_worked_overlaps() -> None:
    """A quarter shared, one inside the other, touching, apart, equal."""
    a = torch.tensor([[0.0, 0.0, 4.0, 4.0]])
    others = torch.tensor([[2.0, 2, 6, 6], [1, 1, 3, 3], [4, 0, 8, 4], [9, 9, 10, 10], [0, 0, 4, 4]])
    assert pairwise_iou(a, others).tolist() == [pytest.approx([4 / 28, 4 / 16, 0, 0, 1])]
    assert area(others).tolist() == [16, 4, 16, 1, 16]


@settings(deadline=None)
@given(a=st.lists(boxes, max_size=4), b=st.lists(boxes, max_size=4))
def test_every_pair_overlaps_as_two_boxes_do(a: list[Box], b: list[Box]) -> None:
    """The matrix holds each pair's IoU, either way round, for boxes without area and for no boxes too."""
    expected = torch.tensor([[scalar_iou(p, q) for q in b] for p in a], dtype=torch.float64).view(len(a), len(b))
    torch.testing.assert_close(pairwise_iou(double(*a), double(*b)), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pairwise_iou(double(*b), double(*a)).T, expected, rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(a=boxes, b=boxes)
def test_complete_iou_is_bounded(a: Box, b: Box) -> None:
    """In float32 Complete IoU lies in (-2, 1], never above IoU, and IoU is symmetric."""
    left, right = double(a).float(), double(b).float()
    value, overlap = complete_iou(left, right), iou(left, right)
    assert -2 < float(value) <= float(overlap) <= 1 + 1e-6
    assert torch.equal(overlap, iou(right, left))


@settings(deadline=None)
@given(a=boxes, b=boxes)
def test_complete_iou_agrees_with_scalar_arithmetic(a: Box, b: Box) -> None:
    """For boxes with area the value is the published formula's."""
    if area(double(a)) > 0 and area(double(b)) > 0:
        assert float(complete_iou(double(a), double(b))) == pytest.approx(scalar_ciou(a, b), rel=1e-9, abs=1e-9)


def test_a_hand_worked_complete_iou() -> None:
    """Two boxes that share half: centres 2 apart, a hull of 8 by 8, aspects of 1 and 2."""
    value = complete_iou(double((0, 0, 8, 8)), double((0, 0, 8, 4)))
    aspect = 4 / math.pi**2 * (math.atan(1) - math.atan(2)) ** 2
    assert float(value) == pytest.approx(0.5 - 4 / 128 - aspect**2 / (0.5 + aspect))


def test_the_gradient_holds_the_weight_of_the_aspect_term_constant() -> None:
    """The gradient is that of the formula with its weight fixed, by central differences."""
    a, b = (10.0, 20.0, 50.0, 45.0), (18.0, 15.0, 60.0, 70.0)
    overlap, _, aspect = scalar_parts(a, b)
    weight = aspect / (1 - overlap + aspect)

    def value(moved: list[float]) -> float:
        overlap, distance, aspect = scalar_parts((moved[0], moved[1], moved[2], moved[3]), b)
        return overlap - distance - weight * aspect

    leaf = double(a).requires_grad_()
    complete_iou(leaf, double(b)).sum().backward()
    step = 1e-5
    shifts = [[step * (place == moved) for place in range(4)] for moved in range(4)]
    numeric = [
        (value([x + d for x, d in zip(a, shift, strict=True)]) - value([x - d for x, d in zip(a, shift, strict=True)]))
        / (2 * step)
        for shift in shifts
    ]
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == pytest.approx(numeric, rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(a=boxes, b=boxes)
def test_gradients_are_finite(a: Box, b: Box) -> None:
    """Any two boxes have finite gradients on both sides, in float32."""
    left, right = double(a).float().requires_grad_(), double(b).float().requires_grad_()
    complete_iou(left, right).sum().backward()
    assert left.grad is not None
    assert right.grad is not None
    assert left.grad.isfinite().all()
    assert right.grad.isfinite().all()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((5, 5, 5, 5), (5, 5, 5, 5)),
        ((5, 5, 5, 9), (5, 5, 5, 9)),
        ((5, 5, 5, 5), (0, 0, 10, 10)),
        ((1, 2, 3, 4), (1, 2, 3, 4)),
        ((0, 0, 1, 1), (500, 500, 640, 640)),
        ((0, 0, 4, 4), (4, 0, 8, 4)),
    ],
    ids=["equal points", "equal lines", "point inside", "equal", "disjoint", "touching"],
)
def test_gradients_are_finite_at_the_edges(a: Box, b: Box) -> None:
    """Boxes without area, equal, disjoint and touching ones have finite values and gradients."""
    left = torch.tensor([a], dtype=torch.float32, requires_grad=True)
    value = complete_iou(left, torch.tensor([b], dtype=torch.float32))
    value.sum().backward()
    assert left.grad is not None
    assert value.isfinite().all()
    assert left.grad.isfinite().all()


def test_disjoint_boxes_are_drawn_together() -> None:
    """Without any overlap the gradient still moves a box towards the other."""
    box = torch.tensor([[0.0, 0.0, 10.0, 10.0]], requires_grad=True)
    complete_iou(box, torch.tensor([[50.0, 0.0, 60.0, 10.0]])).sum().backward()
    assert box.grad is not None
    assert float(box.grad[0, 0] + box.grad[0, 2]) > 0
