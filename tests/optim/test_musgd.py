"""MuSGD against a float64 reference, the published implementation, and inputs that broke other optimizers."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import lucid_yolo.optim
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from lucid_optim import MuSGD
from support.reference import MuSGDReference, bits, orthogonalized, relative_error

SHAPES = [
    (),
    (1,),
    (7,),
    (1, 1),
    (5, 3),
    (3, 5),
    (6, 6),
    (1, 9),
    (9, 1),
    (16, 1, 1),
    (4, 1, 1),
    (8, 4, 1, 1),
    (6, 1, 3, 3),
    (4, 6, 3, 3),
    (12, 2, 1, 3),
    (12, 2, 3, 1),
    (2, 3, 3, 2, 2),
    (0,),
    (0, 4),
    (4, 0),
]


def transposed(tensor: Tensor) -> Tensor:
    """Lay a tensor out with its dimensions reversed in memory."""
    order = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


def middle_outermost(tensor: Tensor) -> Tensor:
    """Lay a tensor out with its first two dimensions swapped in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.ndim > 1 else tensor


def channels_last(tensor: Tensor) -> Tensor:
    """Lay an image-like tensor out with its channels innermost."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def odd_unit_strides(tensor: Tensor) -> Tensor:
    """Give dimensions of size 1 strides that no formula predicts."""
    dense = tensor.contiguous()
    return dense.as_strided(
        dense.shape, [97 if size == 1 else stride for size, stride in zip(dense.shape, dense.stride(), strict=True)]
    )


def sliced(tensor: Tensor) -> Tensor:
    """Place a tensor in every second element of a larger one."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1]) if tensor.ndim else torch.zeros(())
    if not tensor.ndim:
        return tensor
    view = wide[..., ::2]
    view.copy_(tensor)
    return view


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row_major": lambda tensor: tensor,
    "channels_last": channels_last,
    "transposed": transposed,
    "middle_outermost": middle_outermost,
    "odd_unit_strides": odd_unit_strides,
    "sliced": sliced,
}


@st.composite
def group_options(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the hyperparameters of one group."""
    return {
        "lr": draw(st.sampled_from([0.0, 1e-3, 0.05])),
        "momentum": draw(st.sampled_from([0.0, 0.5, 0.95])),
        "weight_decay": draw(st.sampled_from([0.0, -0.0, 5e-4, 0.3])),
        "w_muon": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "w_sgd": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "ns_steps": draw(st.integers(1, 6)),
    }


@st.composite
def parameter_plans(draw: st.DrawFn) -> list[tuple[tuple[int, ...], str, str]]:
    """Draw shapes with the layouts of a parameter and of its gradients."""
    names = st.sampled_from(sorted(LAYOUTS))
    return draw(st.lists(st.tuples(st.sampled_from(SHAPES), names, names), max_size=6))


@settings(max_examples=150)
@given(plans=st.lists(st.tuples(group_options(), parameter_plans()), min_size=1, max_size=3), data=st.data())
def test_every_mix_of_shapes_layouts_and_options_follows_the_reference(
    plans: list[tuple[dict[str, Any], list[tuple[tuple[int, ...], str, str]]]], data: st.DataObject
) -> None:
    """Whatever is grouped with whatever, each parameter moves as it would alone in float64, and keeps its strides."""
    groups: list[dict[str, Any]] = []
    cast: list[tuple[Parameter, MuSGDReference, str, dict[str, Any]]] = []
    for options, members in plans:
        params = []
        for shape, layout, gradient_layout in members:
            param = Parameter(LAYOUTS[layout](torch.randn(shape)))
            params.append(param)
            cast.append((param, MuSGDReference(param), gradient_layout, options))
        groups.append({"params": params, **options})
    if not cast:
        return
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    optimizer = MuSGD(groups, lr=1.0)
    begins = [param.detach().double().clone() for param, *_ in cast]
    strides = [param.stride() for param, *_ in cast]
    for _ in range(3):
        for param, reference, gradient_layout, options in cast:
            present = data.draw(st.booleans())
            gradient = LAYOUTS[gradient_layout](torch.randn(param.shape)) if present else None
            param.grad = gradient
            reference.step(gradient, **options)
        kept = [(param.grad, None if param.grad is None else bits(param.grad)) for param, *_ in cast]
        optimizer.step()
        for (param, *_), (gradient, before) in zip(cast, kept, strict=True):
            assert param.grad is gradient
            assert gradient is None or bits(gradient) == before
    for (param, reference, *_), begin, stride in zip(cast, begins, strides, strict=True):
        assert param.stride() == stride
        distance = float((param.detach().double() - reference.value).norm())
        rounding = 1e-6 * float(begin.norm())
        assert distance <= 5e-4 * reference.travelled + rounding
        if "momentum_buffer" in optimizer.state[param]:
            buffer = optimizer.state[param]["momentum_buffer"]
            assert relative_error(buffer, reference.momentum_buffer, reference.momentum_buffer) < 1e-5


def pair(shapes: list[tuple[int, ...]], **options: Any) -> tuple[MuSGD, lucid_yolo.optim.MuSGD]:
    """Return ours and the published optimizer over equal parameters."""
    ours = [Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [Parameter(param.detach().clone()) for param in ours]
    return MuSGD(ours, **options), lucid_yolo.optim.MuSGD(theirs, **options)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every parameter of an optimizer in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def hand_out(optimizers: tuple[torch.optim.Optimizer, ...], gradients: list[Tensor | None]) -> None:
    """Give each optimizer's parameters copies of the same gradients."""
    for optimizer in optimizers:
        for param, gradient in zip(params_of(optimizer), gradients, strict=True):
            param.grad = None if gradient is None else gradient.clone()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.02},
        {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1},
        {"lr": 0.1, "w_muon": 1.0, "w_sgd": 0.0, "weight_decay": 0.0, "ns_steps": 3},
    ],
)
def test_it_agrees_with_the_published_optimizer(options: dict[str, Any]) -> None:
    """Ten steps beside lucid_yolo's differ by float32 rounding, and the momentum not at all."""
    shapes = [shape for shape in SHAPES if math.prod(shape)] * 2
    ours, theirs = pair(shapes, **options)
    for step in range(10):
        hand_out((ours, theirs), [torch.randn(shape) if (step + at) % 4 else None for at, shape in enumerate(shapes)])
        ours.step()
        theirs.step()
    for mine, other in zip(params_of(ours), params_of(theirs), strict=True):
        assert relative_error(mine, other.detach().double(), other.detach()) < 2e-6
        buffer = ours.state[mine]["momentum_buffer"]
        assert bits(buffer) == bits(theirs.state[other]["momentum_buffer"])


def test_defaults_and_keys_are_the_published_ones() -> None:
    """A group holds exactly the published keys with the published defaults, and the state one buffer."""
    ours, theirs = pair([(3, 2), (2,)], lr=0.1)
    assert ours.defaults == theirs.defaults
    hand_out((ours, theirs), [torch.ones(3, 2), torch.ones(2)])
    ours.step()
    theirs.step()
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    assert {key: set(entry) for key, entry in ours.state_dict()["state"].items()} == {
        key: set(entry) for key, entry in theirs.state_dict()["state"].items()
    }


@pytest.mark.parametrize("loads_theirs", [True, False])
def test_state_travels_to_and_from_the_published_optimizer(*, loads_theirs: bool) -> None:
    """A state saved by one implementation goes on in the other."""
    ours, theirs = pair([(6, 4), (4, 2, 3, 3), (5,)], lr=0.05)
    shapes = [param.shape for param in params_of(ours)]
    hand_out((ours, theirs), [torch.randn(shape) for shape in shapes])
    ours.step()
    theirs.step()
    if loads_theirs:
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    else:
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    hand_out((ours, theirs), [torch.randn(shape) for shape in shapes])
    ours.step()
    theirs.step()
    for mine, other in zip(params_of(ours), params_of(theirs), strict=True):
        assert relative_error(mine, other.detach().double(), other.detach()) < 2e-6


@pytest.mark.parametrize("shape", [(32, 32), (24, 40), (40, 24), (16, 8, 3, 3), (32, 4, 1, 1)])
def test_updates_are_really_orthogonalised(shape: tuple[int, ...]) -> None:
    """The Muon part of an update has singular values near 1, whatever those of the gradient."""
    param = Parameter(torch.zeros(shape))
    optimizer = MuSGD([param], lr=1.0, momentum=0.0, weight_decay=0.0, w_muon=1.0, w_sgd=0.0)
    rows, cols = shape[0], math.prod(shape[1:])
    rank = min(rows, cols)
    left, right = torch.linalg.qr(torch.randn(rows, rank))[0], torch.linalg.qr(torch.randn(cols, rank))[0]
    param.grad = (left * torch.linspace(50.0, 1.0, rank) @ right.T).reshape(shape)
    optimizer.step()
    matrix = -param.detach().reshape(rows, -1) / (0.2 * math.sqrt(max(rows, cols)))
    values = torch.linalg.svdvals(matrix.double())
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3


@pytest.mark.parametrize("shape", [(64, 1, 3, 3), (64, 16, 1, 3), (64, 16, 3, 1), (16, 64, 1, 1)])
def test_the_scale_comes_from_the_flattened_matrix(shape: tuple[int, ...]) -> None:
    """A convolution is scaled by sqrt(max(out, in * kh * kw)), never by its kernel's height and width."""
    param = Parameter(torch.zeros(shape))
    optimizer = MuSGD([param], lr=1.0, momentum=0.0, weight_decay=0.0, w_muon=1.0, w_sgd=0.0)
    gradient = torch.randn(shape)
    param.grad = gradient
    optimizer.step()
    matrix = gradient.double().reshape(shape[0], -1)
    expected = -0.2 * math.sqrt(max(matrix.shape)) * orthogonalized(matrix, 5)
    assert relative_error(param, expected.reshape(shape), expected) < 1e-4


def test_a_five_dimensional_parameter_shares_a_batch_with_matrices() -> None:
    """Parameters of any rank and equal flattened shape are updated together, each as if alone."""
    shapes = [(8, 4, 1, 1, 5), (8, 20), (20, 8), (8, 20, 1)]
    params = [Parameter(torch.randn(shape)) for shape in shapes]
    references = [MuSGDReference(param) for param in params]
    optimizer = MuSGD(params, lr=0.1)
    for param, reference in zip(params, references, strict=True):
        param.grad = torch.randn(param.shape)
        reference.step(param.grad, lr=0.1)
    begins = [param.detach().clone() for param in params]
    optimizer.step()
    for param, reference, begin in zip(params, references, begins, strict=True):
        assert relative_error(param, reference.value, reference.value - begin.double()) < 2e-4


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_row_major_buffer_under_channels_last_parameters_is_used(memory_format: torch.memory_format) -> None:
    """Buffers saved row-major and loaded under channels_last parameters take the parameters' strides, values kept."""
    param = Parameter(torch.randn(6, 4, 3, 3).contiguous(memory_format=memory_format))
    optimizer = MuSGD([param], lr=0.1)
    buffer = torch.randn(6, 4, 3, 3)
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": buffer.clone()}}
    optimizer.load_state_dict(state)
    loaded = optimizer.state[param]["momentum_buffer"]
    assert loaded.stride() == param.stride()
    assert bits(loaded) == bits(buffer)
    reference = MuSGDReference(param)
    reference.momentum_buffer = buffer.double()
    param.grad = torch.randn(6, 4, 3, 3)
    reference.step(param.grad, lr=0.1)
    before = param.detach().double().clone()
    optimizer.step()
    assert relative_error(param, reference.value, reference.value - before) < 2e-4
    assert loaded.stride() == param.stride()


def test_a_buffer_of_other_strides_put_in_by_hand_keeps_them() -> None:
    """A momentum buffer replaced by hand is the one that is read and written, in its own strides."""
    param = Parameter(torch.randn(6, 4, 3, 3).contiguous(memory_format=torch.channels_last))
    optimizer = MuSGD([param], lr=0.1)
    param.grad = torch.randn(6, 4, 3, 3)
    optimizer.step()
    old = optimizer.state[param]["momentum_buffer"]
    old_bits = bits(old)
    new = torch.randn(6, 4, 3, 3)
    optimizer.state[param]["momentum_buffer"] = new
    reference = MuSGDReference(param)
    reference.momentum_buffer = new.double()
    reference.step(param.grad, lr=0.1)
    before = param.detach().double().clone()
    optimizer.step()
    assert bits(old) == old_bits
    assert optimizer.state[param]["momentum_buffer"] is new
    assert new.is_contiguous()
    assert relative_error(new, reference.momentum_buffer, reference.momentum_buffer) < 1e-6
    assert relative_error(param, reference.value, reference.value - before) < 2e-4


@pytest.mark.parametrize("sizes", [[1, 1, 0, 1, 0], [1, 0, 1, 1, 0, 0], [1] * 30 + [0] + [1] * 6, [1] * 36 + [0]])
def test_an_empty_parameter_does_not_hide_its_neighbours(sizes: list[int]) -> None:
    """Every non-empty parameter moves exactly as one alone, wherever an empty one stands in the list."""
    params = [Parameter(torch.randn(size)) for size in sizes]
    alone = [Parameter(param.detach().clone()) for param in params]
    together = MuSGD(params, lr=0.1)
    for param, single in zip(params, alone, strict=True):
        param.grad = torch.randn(param.shape)
        single.grad = param.grad.clone()
        MuSGD([single], lr=0.1).step()
    together.step()
    for param, single in zip(params, alone, strict=True):
        assert bits(param) == bits(single)
        assert together.state[param]["momentum_buffer"].shape == param.shape if param.numel() else True


def test_a_learnable_scalar_moves_beside_a_vector() -> None:
    """A 0-d parameter follows plain Nesterov momentum."""
    scalar, vector = Parameter(torch.tensor(2.0)), Parameter(torch.ones(3))
    optimizer = MuSGD([scalar, vector], lr=0.5, momentum=0.5)
    scalar.grad, vector.grad = torch.tensor(1.0), torch.ones(3)
    optimizer.step()
    assert scalar.item() == 2.0 - 0.5 * 1.5
    assert vector.tolist() == [1.0 - 0.5 * 1.5] * 3


def test_a_vector_is_never_decayed() -> None:
    """Weight decay touches matrices only."""
    vector, matrix = Parameter(torch.ones(3)), Parameter(torch.ones(3, 3))
    optimizer = MuSGD([vector, matrix], lr=0.5, weight_decay=0.5)
    vector.grad, matrix.grad = torch.zeros(3), torch.zeros(3, 3)
    optimizer.step()
    assert vector.tolist() == [1.0] * 3
    assert matrix.tolist() == [[0.75] * 3] * 3


def test_a_parameter_listed_twice_is_updated_twice_in_order() -> None:
    """As published: the momentum is applied twice within one step."""
    param = Parameter(torch.zeros(1))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = MuSGD([param, param], lr=0.1, momentum=0.9)
    param.grad = torch.ones(1)
    optimizer.step()
    # m = 1, n = 1.9, then m = 1.9, n = 1 + 0.9 * 1.9
    assert param.item() == pytest.approx(-0.1 * (1.9 + 2.71), rel=1e-6)


@pytest.mark.parametrize("kind", ["twice", "overlapping", "gradient_in_parameter"])
def test_parameters_that_share_memory_go_one_by_one_as_published(kind: str) -> None:
    """Shared memory between written tensors, or a gradient inside one, gives the published order of effects."""

    def build(optimizer_type: Callable[..., torch.optim.Optimizer]) -> tuple[torch.optim.Optimizer, Tensor]:
        base = torch.linspace(-1, 1, 30)
        first, second = Parameter(base[:20].view(5, 4)), Parameter(base[10:].view(4, 5))
        if kind == "twice":
            params = [first, first]
        elif kind == "overlapping":
            params = [first, second]
        else:
            second = Parameter(torch.ones(5, 4))
            params = [first, second]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = optimizer_type(params, lr=0.1, weight_decay=0.5)
        first.grad = torch.linspace(1, 2, 20).view(5, 4)
        if kind == "gradient_in_parameter":
            second.grad = first.detach()
        else:
            second.grad = torch.linspace(-2, 1, 20).view(4, 5)
        return optimizer, torch.cat([base, second.detach().reshape(-1)])

    results = []
    for optimizer_type in (MuSGD, lucid_yolo.optim.MuSGD):
        optimizer, _ = build(optimizer_type)
        for _ in range(3):
            optimizer.step()
        results.append([param.detach().clone() for param in params_of(optimizer)])
    for mine, other in zip(*results, strict=True):
        assert relative_error(mine, other.double(), other) < 2e-6


def test_gradients_may_be_views_of_one_bucket() -> None:
    """Gradients with non-zero offsets into one flat buffer are read and never written."""
    params = [Parameter(torch.randn(shape)) for shape in [(6, 4), (4, 6), (5,), (4, 2, 3, 3)]]
    twins = [Parameter(param.detach().clone()) for param in params]
    bucket = torch.randn(3 + sum(param.numel() for param in params))
    before = bits(bucket)
    offset = 3
    for param, twin in zip(params, twins, strict=True):
        param.grad = bucket[offset : offset + param.numel()].view(param.shape)
        twin.grad = param.grad.clone()
        offset += param.numel()
    MuSGD(params, lr=0.1).step()
    MuSGD(twins, lr=0.1).step()
    assert bits(bucket) == before
    for param, twin in zip(params, twins, strict=True):
        assert bits(param) == bits(twin)


def test_a_zero_gradient_gives_a_zero_update_and_leaves_its_neighbour_alone() -> None:
    """Zero matrices do not turn into NaN, alone or in a batch."""
    params = [Parameter(torch.ones(4, 4)), Parameter(torch.ones(4, 4))]
    optimizer = MuSGD(params, lr=0.1, weight_decay=0.0)
    single = Parameter(torch.ones(4, 4))
    single.grad = torch.randn(4, 4)
    params[0].grad, params[1].grad = torch.zeros(4, 4), single.grad.clone()
    optimizer.step()
    MuSGD([single], lr=0.1, weight_decay=0.0).step()
    assert bits(params[0]) == bits(torch.ones(4, 4))
    assert relative_error(params[1], single.detach().double(), single.detach()) < 1e-6


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_poisons_its_own_matrix_only(poison: float) -> None:
    """One NaN or infinity makes that matrix all NaN and leaves its batch neighbour untouched."""
    params = [Parameter(torch.randn(4, 6)) for _ in range(2)]
    optimizer = MuSGD(params, lr=0.1)
    for param in params:
        param.grad = torch.randn(4, 6)
    assert params[0].grad is not None
    params[0].grad[1, 2] = poison
    optimizer.step()
    assert int(params[0].isnan().sum()) == 24
    assert int(params[1].isnan().sum()) == 0


def test_negative_zero_gradients_leave_positive_zero_momentum() -> None:
    """0 * 0 + -0.0 is +0.0, as in the published loop."""
    ours, theirs = pair([(3, 3), (3,)], lr=0.1)
    hand_out((ours, theirs), [torch.full((3, 3), -0.0), torch.full((3,), -0.0)])
    ours.step()
    theirs.step()
    for mine, other in zip(params_of(ours), params_of(theirs), strict=True):
        assert bits(ours.state[mine]["momentum_buffer"]) == bits(torch.zeros(mine.shape))
        assert bits(mine) == bits(other)


@pytest.mark.parametrize(
    ("scale", "low", "high"), [(1.0, 3, 5), (1e-6, 3, 5), (1e-20, 0, 1e-9), (1e-38, 0, 1e-27), (3e38, 0, 5)]
)
def test_the_scale_of_a_gradient_is_forgotten_down_to_a_documented_threshold(
    scale: float, low: float, high: float
) -> None:
    """An orthogonalised 16x16 update has a norm near 4 unless the gradient's norm nears eps = 1e-7."""
    param = Parameter(torch.zeros(16, 16))
    optimizer = MuSGD([param], lr=1 / (0.2 * 4), momentum=0.0, weight_decay=0.0, w_muon=1.0, w_sgd=0.0)
    gradient = torch.rand(16, 16) * scale
    param.grad = gradient
    optimizer.step()
    assert bool(torch.isfinite(param).all())
    assert low <= float(param.detach().double().norm()) <= high


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
def test_a_zero_lr_moves_momentum_and_no_byte_of_a_parameter(lr: float | Tensor) -> None:
    """Warm-up may start at lr 0: even -0.0 and infinite updates leave the parameters' bytes."""
    param = Parameter(torch.tensor([[-0.0, 1.0], [2.0, 3.0]]))
    before = bits(param)
    optimizer = MuSGD([param], lr=0.1)
    optimizer.param_groups[0]["lr"] = lr
    param.grad = torch.tensor([[-1.0, math.inf], [1.0, 1.0]])
    optimizer.step()
    assert bits(param) == before
    assert bits(optimizer.state[param]["momentum_buffer"]) == bits(param.grad)


def test_a_group_without_gradients_is_skipped_without_state() -> None:
    """An empty group and a frozen group cost nothing and gain no state."""
    frozen, live = Parameter(torch.randn(3, 3)), Parameter(torch.randn(3, 3))
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [frozen]}, {"params": [live]}]
    optimizer = MuSGD(groups, lr=0.1)
    live.grad = torch.randn(3, 3)
    before = bits(frozen)
    optimizer.step()
    assert bits(frozen) == before
    assert frozen not in optimizer.state
    assert live in optimizer.state


def test_a_set_gradient_counts_whatever_requires_grad_says() -> None:
    """Freezing a layer while its old gradient is set goes on moving it, as in every torch optimizer."""
    ours, theirs = pair([(3, 3)], lr=0.1)
    hand_out((ours, theirs), [torch.ones(3, 3)])
    for optimizer in (ours, theirs):
        params_of(optimizer)[0].requires_grad_(False)
        optimizer.step()
    assert relative_error(params_of(ours)[0], params_of(theirs)[0].double(), params_of(theirs)[0]) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_dtypes_keep_their_momentum(dtype: torch.dtype) -> None:
    """Half and double parameters persist a buffer of their own dtype and follow the published optimizer."""
    ours = [Parameter(torch.randn(shape).to(dtype)) for shape in [(6, 4), (4, 6), (3,)]]
    theirs = [Parameter(param.detach().clone()) for param in ours]
    mine = MuSGD(ours, lr=0.05)
    other = lucid_yolo.optim.MuSGD(theirs, lr=0.05)
    for _ in range(10):
        hand_out((mine, other), [torch.randn(param.shape).to(dtype) for param in ours])
        mine.step()
        other.step()
    epsilon = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
    for left, right in zip(ours, theirs, strict=True):
        buffer, published = mine.state[left]["momentum_buffer"], other.state[right]["momentum_buffer"]
        assert buffer.dtype == dtype
        assert relative_error(buffer, published.double(), published) < 10 * epsilon
        assert relative_error(left, right.detach().double(), right.detach()) < 10 * epsilon


def test_autocast_does_not_change_the_update() -> None:
    """A step under autocast has the bytes of one outside it: the iteration stays in float32."""
    params = [Parameter(torch.randn(32, 24)), Parameter(torch.randn(5))]
    twins = [Parameter(param.detach().clone()) for param in params]
    for param, twin in zip(params, twins, strict=True):
        param.grad = torch.randn(param.shape)
        twin.grad = param.grad.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        MuSGD(params, lr=0.1).step()
    MuSGD(twins, lr=0.1).step()
    for param, twin in zip(params, twins, strict=True):
        assert bits(param) == bits(twin)


def test_a_first_step_in_inference_mode_leaves_a_buffer_that_can_be_updated() -> None:
    """A step under inference mode works, and so does the next one outside it."""
    param = Parameter(torch.randn(3, 3))
    twin = Parameter(param.detach().clone())
    optimizer, reference = MuSGD([param], lr=0.1), MuSGD([twin], lr=0.1)
    param.grad, twin.grad = torch.ones(3, 3), torch.ones(3, 3)
    with torch.inference_mode():
        optimizer.step()
    reference.step()
    optimizer.step()
    reference.step()
    assert bits(param) == bits(twin)
