"""Muon against torch.optim.Muon and a float64 reference."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lucid_optim import Muon
from support.reference import bits, orthogonalized, relative_error

SHAPES = [(8, 8), (12, 5), (5, 12), (12, 5), (1, 6), (6, 1)]


def reference_step(
    value: Tensor, buffer: Tensor, gradient: Tensor, *, lr: float, momentum: float, nesterov: bool, weight_decay: float
) -> tuple[Tensor, Tensor]:
    """Return a parameter and its buffer after one step, in float64."""
    buffer = momentum * buffer + (1 - momentum) * gradient
    update = (1 - momentum) * gradient + momentum * buffer if nesterov else buffer
    matrix = update.reshape(update.shape[0], -1)
    ratio = math.sqrt(max(1, matrix.shape[0] / matrix.shape[1]))
    direction = ratio * orthogonalized(matrix, 5, clamp=True).reshape(value.shape)
    return value * (1 - lr * weight_decay) - lr * direction, buffer


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.05, "weight_decay": 0.0, "nesterov": False},
        {"lr": 0.02, "momentum": 0.5, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
        {"lr": 0.02, "adjust_lr_fn": "original", "eps": 1e-5, "ns_coefficients": (3.0, -3.0, 1.0)},
    ],
)
def test_it_agrees_with_torch_within_its_bfloat16_iteration(options: dict[str, Any]) -> None:
    """Five steps beside torch's Muon differ by less than the resolution of bfloat16, momentum by float32 rounding."""
    ours = [Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [Parameter(param.detach().clone()) for param in ours]
    begins = [param.detach().clone() for param in ours]
    mine, other = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for _ in range(5):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.randn(left.shape)
            right.grad = left.grad.clone()
        mine.step()
        other.step()
    for left, right, begin in zip(ours, theirs, begins, strict=True):
        assert relative_error(left, right.detach().double(), right.detach() - begin) < 2**-6
        buffer, published = mine.state[left]["momentum_buffer"], other.state[right]["momentum_buffer"]
        assert relative_error(buffer, published.double(), published) < 1e-6


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
def test_defaults_and_keys_are_those_of_torch() -> None:
    """Groups hold torch's keys and defaults, so states travel both ways."""
    param, twin = Parameter(torch.randn(4, 3)), Parameter(torch.randn(4, 3))
    mine, other = Muon([param]), torch.optim.Muon([twin])
    assert mine.defaults == other.defaults
    param.grad, twin.grad = torch.ones(4, 3), torch.ones(4, 3)
    mine.step()
    other.step()
    other.load_state_dict(mine.state_dict())
    mine.load_state_dict(other.state_dict())


@pytest.mark.parametrize("nesterov", [True, False])
def test_convolutions_follow_the_reference_in_any_memory_format(*, nesterov: bool) -> None:
    """Parameters of more than two dimensions are matrices (shape[0], rest), strides kept."""
    shapes = [(6, 4, 3, 3), (24, 1, 3, 3), (5, 7, 1, 1), (6, 10)]
    params = [Parameter(torch.randn(shape)) for shape in shapes]
    params[0] = Parameter(params[0].detach().contiguous(memory_format=torch.channels_last))
    strides = [param.stride() for param in params]
    values = [param.detach().double() for param in params]
    buffers = [torch.zeros_like(value) for value in values]
    optimizer = Muon(params, lr=0.1, weight_decay=0.2, nesterov=nesterov)
    begins = list(values)
    for _ in range(3):
        for at, param in enumerate(params):
            param.grad = torch.randn(param.shape)
            values[at], buffers[at] = reference_step(
                values[at],
                buffers[at],
                param.grad.double(),
                lr=0.1,
                momentum=0.95,
                nesterov=nesterov,
                weight_decay=0.2,
            )
        optimizer.step()
    for param, value, begin, stride in zip(params, values, begins, strides, strict=True):
        assert param.stride() == stride
        assert relative_error(param, value, value - begin) < 2**-5


@pytest.mark.parametrize("shape", [(), (3,)])
def test_vectors_and_scalars_are_refused_with_a_remedy(shape: tuple[int, ...]) -> None:
    """A parameter that is no matrix is named at construction and in add_param_group."""
    message = "parameter 0 of shape .* has fewer than two dimensions; give it to another optimizer"
    with pytest.raises(ValueError, match="group 0, " + message):
        Muon([Parameter(torch.ones(shape))])
    optimizer = Muon([Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match="group 1, " + message):
        optimizer.add_param_group({"params": [Parameter(torch.ones(shape))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("adjust_lr_fn", "rms", "adjust_lr_fn must be None or 'original' or 'match_rms_adamw', got 'rms'"),
        ("adjust_lr_fn", 3, "adjust_lr_fn must be"),
        ("ns_coefficients", (1.0, 2.0), "ns_coefficients must be three finite numbers"),
        ("ns_coefficients", (1.0, 2.0, math.nan), "ns_coefficients must be three finite numbers"),
        ("ns_coefficients", 3.0, "ns_coefficients must be three finite numbers"),
        ("nesterov", 1, "nesterov must be True or False, got 1"),
        ("momentum", -1.0, "momentum must be non-negative"),
        ("eps", -1e-7, "eps must be non-negative"),
    ],
)
def test_a_bad_value_is_refused_by_name(key: str, value: Any, message: str) -> None:
    """Every hyperparameter is checked at construction."""
    with pytest.raises(ValueError, match=message):
        Muon([Parameter(torch.ones(2, 2))], **{key: value})


def test_an_empty_matrix_does_not_hide_its_neighbours() -> None:
    """A zero-element parameter is skipped and the others move as without it."""
    params = [Parameter(torch.randn(shape)) for shape in [(4, 3), (0, 8), (8, 0), (3, 4)]]
    twins = [Parameter(params[0].detach().clone()), Parameter(params[3].detach().clone())]
    for param in params:
        param.grad = torch.ones(param.shape)
    for twin in twins:
        twin.grad = torch.ones(twin.shape)
    Muon(params, lr=0.1).step()
    Muon(twins, lr=0.1).step()
    assert bits(params[0]) == bits(twins[0])
    assert bits(params[3]) == bits(twins[1])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
@pytest.mark.parametrize("eps", [1e-7, 1e-3])
def test_a_tiny_gradient_is_divided_by_eps_and_no_less(eps: float) -> None:
    """Below `eps` the norm is clamped, not added to, as in torch."""
    ours, theirs = Parameter(torch.zeros(4, 6)), Parameter(torch.zeros(4, 6))
    mine = Muon([ours], lr=1.0, weight_decay=0.0, momentum=0.0, eps=eps)
    other = torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, momentum=0.0, eps=eps)
    gradient = torch.randn(4, 6)
    ours.grad = gradient * (0.5 * eps / gradient.norm())
    theirs.grad = ours.grad.clone()
    mine.step()
    other.step()
    assert relative_error(ours, theirs.detach().double(), theirs.detach()) < 2**-6


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [(0, ValueError, "ns_steps must be positive"), (5.0, TypeError, "ns_steps must be an int")],
)
def test_iterations_are_checked(value: Any, error: type[Exception], message: str) -> None:
    """As for MuSGD, at construction."""
    with pytest.raises(error, match=message):
        Muon([Parameter(torch.ones(2, 2))], ns_steps=value)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [("adjust_lr_fn", "foo", ValueError), ("ns_coefficients", ("a", "b", "c"), ValueError), ("eps", "x", TypeError)],
)
def test_a_setting_spoilt_later_stops_the_step_before_any_byte(key: str, value: Any, error: type[Exception]) -> None:
    """Settings of the last group are checked before the first group is written."""
    first, last = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 2))
    optimizer = Muon([{"params": [first]}, {"params": [last]}])
    first.grad, last.grad = torch.ones(2, 2), torch.ones(2, 2)
    optimizer.param_groups[1][key] = value
    with pytest.raises(error, match=f"group 1: {key}"):
        optimizer.step()
    assert bits(first) == bits(torch.ones(2, 2))
    assert not optimizer.state
