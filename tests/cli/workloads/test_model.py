"""The detector's shape, its first predictions, and that equal seeds give equal bytes."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lucid_cli.workloads.detection.model import STRIDES, Attention, Head, Variant, build_detector
from support.reference import bits

VARIANTS: tuple[Variant, ...] = ("nano", "tiny")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Small images gain nothing from a second thread and lose much where cores are shared.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def num_parameters(model: nn.Module) -> int:
    """Return the number of trainable values."""
    return sum(param.numel() for param in model.parameters())


def kinds(model: nn.Module) -> Counter[str]:
    """Return how many convolutions of each kind there are."""
    found: Counter[str] = Counter()
    for conv in model.modules():
        if isinstance(conv, nn.Conv2d):
            found["1x1" if conv.kernel_size == (1, 1) else "depthwise" if conv.groups > 1 else "full"] += 1
            found["strided"] += conv.stride == (2, 2)
    return found


@pytest.mark.parametrize("num_classes", [10, 80])
def test_nano_has_the_size_of_a_small_detector(num_classes: int) -> None:
    """About 2.5 million parameters in about 120 matrices, most of them 1x1, strided, full and depthwise ones too."""
    with torch.device("meta"):
        model = build_detector("nano", num_classes)
    assert 2_200_000 < num_parameters(model) < 2_700_000
    assert 110 <= sum(param.ndim >= 2 for param in model.parameters()) <= 130
    found = kinds(model)
    assert found["1x1"] > found["depthwise"] > found["full"] > found["strided"] == 7
    assert any(isinstance(part, Attention) for part in model.modules())


def test_tiny_is_tiny() -> None:
    """A tenth of nano's parameters in about thirty matrices, for on a CPU the number of operations counts."""
    model = build_detector("tiny", 10)
    assert num_parameters(model) < 260_000
    assert sum(param.ndim >= 2 for param in model.parameters()) <= 32
    assert all(kinds(model)[kind] > 0 for kind in ("1x1", "full", "strided"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("side", [96, 128, 320, 640])
def test_every_cell_is_described_at_every_size(variant: Variant, side: int) -> None:
    """Boxes, logits, centres and strides have a row for each cell of the three scales."""
    with torch.device("meta"):
        found = build_detector(variant, 7)(torch.empty(2, 3, side, side))
    cells = sum((side // stride) ** 2 for stride in STRIDES)
    assert found.boxes.shape == (2, cells, 4)
    assert found.logits.shape == (2, cells, 7)
    assert (found.centers.shape, found.strides.shape) == ((cells, 2), (cells,))


def test_cells_lie_row_by_row_from_fine_to_coarse() -> None:
    """Centres are the middles of squares of the stride, in images that are not square too."""
    found = build_detector("tiny", 1).eval()(torch.rand(1, 3, 32, 64))
    expected = [
        [(column + 0.5) * stride, (row + 0.5) * stride, stride]
        for stride in STRIDES
        for row in range(32 // stride)
        for column in range(64 // stride)
    ]
    assert torch.cat([found.centers, found.strides[:, None]], dim=1).tolist() == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_first_predictions_are_cautious(variant: Variant) -> None:
    """A new network gives finite boxes around their centres, about two strides to each side, and low scores."""
    with torch.no_grad():
        found = build_detector(variant, 10)(torch.rand(2, 3, 96, 96))
    assert found.boxes.isfinite().all()
    assert found.logits.isfinite().all()
    reach = torch.cat([found.centers - found.boxes[..., :2], found.boxes[..., 2:] - found.centers], dim=2)
    assert (reach >= 0).all()
    assert float((reach / found.strides[:, None]).median()) == pytest.approx(2, rel=0.3)
    assert float(found.logits.sigmoid().median()) == pytest.approx(0.01, rel=0.6)


def test_sides_are_never_negative() -> None:
    """However far the weights drive the distances, no box is inside out."""
    model = build_detector("tiny", 2).eval()
    with torch.no_grad():
        for head in model.heads:
            assert isinstance(head, Head)
            last = head.box[-1]
            assert isinstance(last, nn.Conv2d)
            assert last.bias is not None
            last.bias.copy_(torch.tensor([-300.0, -20.0, 20.0, 300.0]))
        found = model(torch.rand(1, 3, 64, 64))
    assert found.boxes.isfinite().all()
    assert (found.boxes[..., 2:] >= found.boxes[..., :2]).all()


def test_channels_last_changes_the_layout_only() -> None:
    """Weights and images in channels_last give the same predictions to rounding."""
    model = build_detector("tiny", 3).eval()
    images = torch.rand(2, 3, 64, 96)
    with torch.no_grad():
        expected = model(images)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        found = model(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(found.boxes, expected.boxes, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-3)


def test_boxes_are_float32_under_autocast() -> None:
    """In bfloat16 the logits follow the network, boxes and centres stay in float32."""
    model = build_detector("tiny", 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(torch.rand(2, 3, 64, 64))
    assert found.logits.dtype == torch.bfloat16
    assert {found.boxes.dtype, found.centers.dtype, found.strides.dtype} == {torch.float32}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_seeds_give_equal_bytes(variant: Variant) -> None:
    """Two detectors built after the same seed have the same names and bytes."""
    states = []
    for _ in range(2):
        torch.manual_seed(42)
        states.append(build_detector(variant, 10).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(bits(states[0][name]) == bits(states[1][name]) for name in states[0])


def test_every_parameter_learns() -> None:
    """A loss of all predictions gives each parameter a finite gradient."""
    model = build_detector("nano", 4)
    found = model(torch.rand(2, 3, 32, 32))
    (found.boxes.square().mean() + found.logits.square().mean()).backward()
    assert all(param.grad is not None and param.grad.isfinite().all() for param in model.parameters())


def test_attention_looks_at_all_cells() -> None:
    """The attention block agrees with torch's own attention on the same projections."""
    block = Attention(48, heads=3)
    x = torch.rand(2, 48, 3, 5)
    query, key, value = block.qkv(x).view(2, 3, block.heads, 16, 15).transpose(3, 4).unbind(1)
    expected = nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(block._look(x), expected.mT.reshape(2, 48, 3, 5))


def test_sizes_and_names_that_do_not_fit_are_refused() -> None:
    """A side that is no multiple of 32, an unknown variant and no classes are errors that name the value."""
    with pytest.raises(ValueError, match=r"multiples of 32, got \(96, 100\)"):
        build_detector("tiny", 1)(torch.rand(1, 3, 96, 100))
    with pytest.raises(ValueError, match="got 'huge' and 3"):
        build_detector("huge", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one class"):
        build_detector("tiny", 0)
