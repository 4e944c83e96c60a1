"""Average precision against COCO's rule, written out one detection at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucid_cli.workloads.detection.ap import average_precision
from lucid_cli.workloads.detection.values import Detections, Targets

Box = tuple[float, float, float, float]
Found = list[tuple[Box, float, int]]
There = list[tuple[Box, int]]
Scores = tuple[float | None, float | None, dict[int, float]]

A, B, C = (0.0, 0.0, 10.0, 10.0), (20.0, 0.0, 30.0, 10.0), (40.0, 0.0, 50.0, 10.0)


def overlap(a: Box, b: Box) -> float:
    """Return intersection over union of two boxes with area."""
    width = max(min(a[2], b[2]) - max(a[0], b[0]), 0)
    height = max(min(a[3], b[3]) - max(a[1], b[1]), 0)
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return width * height / (areas - width * height)


def precision_at(images: list[tuple[Found, There]], label: int, threshold: float) -> float:
    """Return the interpolated precision of one class at one threshold."""
    judged: list[tuple[float, bool]] = []
    for found, there in images:
        free = [box for box, own in there if own == label]
        for box, score, own in sorted(found, key=lambda item: -item[1]):
            if own != label:
                continue
            best, chosen = threshold, -1
            for place, target in enumerate(free):
                if overlap(box, target) >= best:
                    best, chosen = overlap(box, target), place
            judged.append((score, chosen >= 0))
            if chosen >= 0:
                free.pop(chosen)
    judged.sort(key=lambda item: -item[0])
    total = sum(own == label for _, there in images for _, own in there)
    points, right = [], 0
    for rank, (_, hit) in enumerate(judged, start=1):
        right += hit
        points.append((right / total, right / rank))
    recalls = [step * 0.01 for step in range(101)]
    return sum(max((p for r, p in points if r >= recall), default=0.0) for recall in recalls) / 101


def reference(images: list[tuple[Found, There]], num_classes: int) -> Scores:
    """Return AP, AP50 and the AP of each class that has targets."""
    present = {own for _, there in images for _, own in there}
    thresholds = [0.5 + 0.05 * step for step in range(10)]
    table = {
        label: [precision_at(images, label, threshold) for threshold in thresholds]
        for label in range(num_classes)
        if label in present
    }
    if not table:
        return None, None, {}
    means = {label: sum(row) / len(row) for label, row in table.items()}
    return sum(means.values()) / len(means), sum(row[0] for row in table.values()) / len(table), means


def as_values(images: list[tuple[Found, There]]) -> tuple[list[Detections], list[Targets]]:
    """Return the package's values, detections sorted by score."""
    detections, targets = [], []
    for found, there in images:
        ranked = sorted(found, key=lambda item: -item[1])
        detections.append(
            Detections(
                boxes=torch.tensor([box for box, _, _ in ranked], dtype=torch.float32).view(-1, 4),
                scores=torch.tensor([score for _, score, _ in ranked], dtype=torch.float32),
                classes=torch.tensor([label for _, _, label in ranked], dtype=torch.int64),
            )
        )
        targets.append(
            Targets(
                boxes=torch.tensor([box for box, _ in there], dtype=torch.float32).view(-1, 4),
                classes=torch.tensor([label for _, label in there], dtype=torch.int64),
            )
        )
    return detections, targets


def ap_of(images: list[tuple[Found, There]], num_classes: int = 3) -> Scores:
    """Return what the package makes of the images."""
    detections, targets = as_values(images)
    precision = average_precision(detections, targets, num_classes=num_classes)
    return precision.ap, precision.ap50, precision.per_class


small = st.integers(min_value=0, max_value=6)
lengths = st.integers(min_value=3, max_value=8)
some_box = st.builds(lambda x, y, w, h: (x, y, x + w, y + h), small, small, lengths, lengths)
labels = st.integers(min_value=0, max_value=2)
scores = st.sampled_from([0.125, 0.25, 0.5, 0.625, 0.75])
image = st.tuples(
    st.lists(st.tuples(some_box, scores, labels), max_size=8), st.lists(st.tuples(some_box, labels), max_size=4)
)


@settings(max_examples=60)
@given(images=st.lists(image, max_size=4))
def test_it_follows_cocos_rule(images: list[tuple[Found, There]]) -> None:
    """AP, AP50 and each class agree with the rule written out, ties of scores and of overlaps included."""
    ap, ap50, per_class = ap_of(images)
    expected = reference(images, 3)
    assert [ap, ap50] == pytest.approx(expected[:2])
    assert per_class == pytest.approx(expected[2])


def test_perfect_detections_have_one_and_none_have_zero() -> None:
    """Every target found alone is 1, and nothing found is 0."""
    there: There = [(A, 0), (B, 1)]
    assert ap_of([([(A, 0.9, 0), (B, 0.8, 1)], there)]) == (1.0, 1.0, {0: 1.0, 1: 1.0})
    assert ap_of([([], there)]) == (0.0, 0.0, {0: 0.0, 1: 0.0})


@pytest.mark.parametrize("images", [[([(A, 0.9, 0)], [])], [([], [])], []])
def test_without_targets_there_is_a_reason_and_no_number(images: list[tuple[Found, There]]) -> None:
    """Nothing to be found is not the same as nothing found."""
    detections, targets = as_values(images)
    precision = average_precision(detections, targets, num_classes=3)
    assert (precision.ap, precision.ap50, precision.per_class) == (None, None, {})
    assert precision.reason == "no validation image has an annotated object"
    assert average_precision(*as_values([([], [(A, 0)])]), num_classes=3).reason is None


def test_a_second_detection_of_a_target_is_wrong() -> None:
    """A duplicate after all targets are found costs nothing, between two targets it lowers the later half."""
    there: There = [(A, 0), (B, 0)]
    assert ap_of([([(A, 0.9, 0), (B, 0.8, 0), (A, 0.7, 0)], there)])[0] == 1.0
    # Recall 0 to 0.50 is reached with precision 1 (51 points), the rest with 2/3 (50 points).
    expected = (51 + 50 * 2 / 3) / 101
    assert ap_of([([(A, 0.9, 0), (A, 0.8, 0), (B, 0.7, 0)], there)])[0] == pytest.approx(expected)


def test_one_of_two_targets_found_reads_half_of_the_points() -> None:
    """With one of two targets found, 51 of the 101 points of recall have precision 1."""
    assert ap_of([([(A, 0.9, 0)], [(A, 0), (B, 0)])])[0] == pytest.approx(51 / 101)


def test_overlap_decides_at_how_many_thresholds_a_box_is_right() -> None:
    """A box that overlaps by 0.70 is right at 0.50 to 0.70, five thresholds of ten."""
    ap, ap50, _ = ap_of([([((0.0, 0.0, 10.0, 7.0), 0.9, 0)], [(A, 0)])])
    assert [ap, ap50] == pytest.approx([0.5, 1.0])


def test_classes_without_targets_are_left_out() -> None:
    """Detections of a class that is nowhere do not count, and a class that is never found does."""
    assert ap_of([([(A, 0.9, 0), (C, 0.95, 2)], [(A, 0), (B, 1)])]) == (0.5, 0.5, {0: 1.0, 1: 0.0})


def test_images_without_objects_count_what_is_found_in_them() -> None:
    """A better scored detection in an empty image halves the precision; an empty image without one does nothing."""
    right: tuple[Found, There] = ([(A, 0.5, 0)], [(A, 0)])
    assert ap_of([([], []), right])[0] == 1.0
    assert ap_of([([(A, 0.9, 0)], []), right])[0] == pytest.approx(0.5)


def test_detections_are_compared_with_targets_of_their_image() -> None:
    """The same box in another image is wrong."""
    assert ap_of([([(B, 0.9, 0)], [(A, 0)]), ([(A, 0.9, 0)], [(B, 0)])])[0] == 0.0


def test_as_many_detections_as_targets_are_needed() -> None:
    """Lists of different lengths are refused, with both lengths."""
    detections, _ = as_values([([], [])])
    with pytest.raises(ValueError, match="got 1 and 0"):
        average_precision(detections, [], num_classes=1)
