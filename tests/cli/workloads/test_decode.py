"""Decoding and suppression against a loop over boxes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lucid_cli.workloads.detection.decode import decode, suppress
from lucid_cli.workloads.detection.values import Predictions

Box = tuple[float, float, float, float]


def overlap(a: Box, b: Box) -> float:
    """Return intersection over union of two boxes with area."""
    width = max(min(a[2], b[2]) - max(a[0], b[0]), 0)
    height = max(min(a[3], b[3]) - max(a[1], b[1]), 0)
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return width * height / (areas - width * height)


def looped(boxes: list[Box], classes: list[int], limit: float) -> list[int]:
    """Return the positions that stay, one box at a time."""
    kept: list[int] = []
    for place, box in enumerate(boxes):
        rivals = [boxes[other] for other in kept if classes[other] == classes[place]]
        if all(overlap(rival, box) <= limit for rival in rivals):
            kept.append(place)
    return kept


def predictions(boxes: Tensor, logits: Tensor) -> Predictions:
    """Return predictions whose cells lie nowhere in particular."""
    cells = boxes.shape[1]
    return Predictions(boxes=boxes, logits=logits, centers=torch.zeros(cells, 2), strides=torch.ones(cells))


numbers = st.integers(min_value=0, max_value=12)
lengths = st.integers(min_value=1, max_value=12)
some_boxes = st.lists(
    st.tuples(
        st.builds(lambda x, y, w, h: (x, y, x + w, y + h), numbers, numbers, lengths, lengths), st.integers(0, 2)
    ),
    max_size=25,
)


@settings(deadline=None)
@given(pairs=some_boxes, limit=st.sampled_from([0.11, 0.31, 0.53, 0.71]))
def test_suppression_keeps_what_a_loop_keeps(pairs: list[tuple[Box, int]], limit: float) -> None:
    """The rounds end where one pass from the best box to the worst ends."""
    boxes = [box for box, _ in pairs]
    classes = [label for _, label in pairs]
    table = torch.tensor(boxes, dtype=torch.float32).view(-1, 4)
    kept = suppress(table, torch.tensor(classes, dtype=torch.int64), iou_limit=limit)
    assert kept.tolist() == looped(boxes, classes, limit)


def test_a_suppressed_box_suppresses_no_other() -> None:
    """In a chain where each overlaps the next, every second box stays."""
    chain = torch.tensor([[2.0 * place, 0, 2.0 * place + 6, 4] for place in range(7)])
    assert suppress(chain, torch.zeros(7, dtype=torch.int64), iou_limit=0.4).tolist() == [0, 2, 4, 6]


def test_detections_are_sorted_by_score() -> None:
    """Scores descend, classes and boxes go with them, and one cell may be two classes."""
    boxes = torch.tensor([[[0.0, 0, 4, 4], [20, 0, 24, 4]]])
    (found,) = decode(predictions(boxes, torch.tensor([[[0.0, -9.0], [1.0, 2.0]]])))
    assert found.classes.tolist() == [1, 0, 0]
    assert found.boxes[:, 0].tolist() == [20, 20, 0]
    torch.testing.assert_close(found.scores, torch.tensor([2.0, 1.0, 0.0]).sigmoid())


def test_equal_scores_keep_the_order_of_cells_and_classes() -> None:
    """Among equal scores the lower cell comes first, then the lower class, and it suppresses the later cell."""
    boxes = torch.tensor([[[9.0, 9, 12, 12], [0, 0, 4, 4], [0, 0, 4, 4]]])
    (found,) = decode(predictions(boxes, torch.zeros(1, 3, 2)))
    assert found.boxes[:, 0].tolist() == [9, 9, 0, 0]
    assert found.classes.tolist() == [0, 1, 0, 1]


def test_floor_and_number_limit_what_is_found() -> None:
    """Scores below the floor and scores that are not numbers go, and no image keeps more than its number."""
    boxes = torch.tensor([[[10.0 * place, 0, 10.0 * place + 4, 4] for place in range(4)]])
    logits = torch.tensor([[[3.0], [float("nan")], [1.0], [-1.0]]])
    (found,) = decode(predictions(boxes, logits), score_floor=0.5)
    assert found.boxes[:, 0].tolist() == [0, 20]
    (found,) = decode(predictions(boxes, logits), max_detections=1)
    assert found.boxes[:, 0].tolist() == [0]


def test_images_are_decoded_apart() -> None:
    """Each image has its own value, an image with nothing above the floor has empty tensors."""
    boxes = torch.tensor([0.0, 0, 4, 4]).expand(3, 1, 4)
    first, second, third = decode(predictions(boxes, torch.tensor([[[1.0]], [[-20.0]], [[1.0]]])))
    assert len(first.scores) == len(third.scores) == 1
    assert (second.boxes.shape, second.scores.shape, second.classes.shape) == ((0, 4), (0,), (0,))


def test_half_precision_logits_are_scored_in_float32() -> None:
    """Logits of an autocast network give float32 scores without a gradient."""
    logits = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    (found,) = decode(predictions(torch.tensor([[[0.0, 0, 4, 4]]]), logits))
    assert found.scores.dtype == torch.float32
    assert not found.scores.requires_grad
