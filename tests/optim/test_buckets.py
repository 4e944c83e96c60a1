"""Batches of matrices: which go together, and that going together changes nothing but rounding."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lucid_optim import NewtonSchulz, orthogonalize
from lucid_optim.buckets import orthogonalize_all, plan
from support.reference import bits, orthogonalized, relative_error


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=12))
def test_a_plan_covers_each_matrix_once_in_a_bucket_of_its_shape(shapes: list[tuple[int, int]]) -> None:
    """No matrix is lost, doubled, padded, or batched with another shape than its own or its transpose."""
    buckets = plan(tuple(shapes))
    seen = [position for bucket in buckets for position in (*bucket.wide, *bucket.tall)]
    assert sorted(seen) == list(range(len(shapes)))
    for bucket in buckets:
        assert all(shapes[position] == (bucket.short, bucket.long) for position in bucket.wide)
        assert all(shapes[position] == (bucket.long, bucket.short) for position in bucket.tall)
    assert len({(bucket.short, bucket.long) for bucket in buckets}) == len(buckets)


def layouts(shape: tuple[int, ...]) -> list[Tensor]:
    """Return random tensors of one shape in several memory orders."""
    row_major = torch.randn(shape)
    reverse = tuple(reversed(range(len(shape))))
    swapped = torch.randn(shape).transpose(0, 1).contiguous().transpose(0, 1)
    return [row_major, torch.randn(shape).permute(reverse).contiguous().permute(reverse), swapped]


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from([(4, 6), (6, 4), (4, 4), (1, 5), (5, 1), (4, 3, 2), (6, 2, 2), (4, 1, 3, 2)]),
        min_size=1,
        max_size=6,
    )
)
def test_a_batch_gives_each_matrix_what_it_would_get_alone(shapes: list[tuple[int, ...]]) -> None:
    """Results have each update's shape and strides, follow the float64 reference, and alias no input."""
    updates = [tensor for shape in shapes for tensor in layouts(shape)]
    before = [bits(update) for update in updates]
    results = orthogonalize_all(updates, NewtonSchulz())
    for update, result, kept in zip(updates, results, before, strict=True):
        assert result.shape == update.shape
        assert result.stride() == update.stride()
        assert bits(update) == kept
        assert result.untyped_storage().data_ptr() != update.untyped_storage().data_ptr()
        matrix = update.double().reshape(update.shape[0], -1)
        expected = orthogonalized(matrix, 5).reshape(update.shape)
        assert relative_error(result, expected, expected) < 2e-3


def test_results_share_no_element_with_one_another() -> None:
    """Writing one result leaves the others as they are."""
    results = orthogonalize_all([torch.randn(3, 5), torch.randn(5, 3), torch.randn(3, 5)], NewtonSchulz())
    kept = [bits(result) for result in results]
    results[0].fill_(7)
    results[1].fill_(8)
    assert bits(results[2]) == kept[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_public_function_keeps_shape_dtype_and_strides(dtype: torch.dtype) -> None:
    """`orthogonalize` runs in float32 and returns the update's own dtype and layout."""
    update = torch.randn(6, 4, 3, 3).to(dtype).contiguous(memory_format=torch.channels_last)
    result = orthogonalize(update)
    assert (result.shape, result.dtype, result.stride()) == (update.shape, dtype, update.stride())
    values = torch.linalg.svdvals(result.double().reshape(6, -1))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.3


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_an_empty_update_comes_back_empty(shape: tuple[int, int]) -> None:
    """Nothing to orthogonalise is no error."""
    assert orthogonalize(torch.empty(shape)).shape == shape


@pytest.mark.parametrize(
    ("update", "options", "message"),
    [
        (torch.ones(3), {}, "at least two dimensions"),
        (torch.ones(3, 3, dtype=torch.int64), {}, "floating-point tensor"),
        (torch.ones(3, 3), {"steps": 0}, "steps must be a positive int, got 0"),
        (torch.ones(3, 3), {"steps": 5.0}, "steps must be a positive int, got 5.0"),
        (torch.ones(3, 3), {"steps": True}, "steps must be a positive int, got True"),
        (torch.ones(3, 3), {"eps": -5.0}, "eps must be non-negative, got -5.0"),
        (torch.ones(3, 3), {"coefficients": (1.0, 2.0)}, "coefficients must be three finite numbers"),
        (torch.eye(3).to_sparse(), {}, "dense floating-point tensor"),
    ],
)
def test_what_it_cannot_orthogonalise_is_refused(update: Tensor, options: dict[str, Any], message: str) -> None:
    """Bad arguments are named with their value."""
    with pytest.raises(ValueError, match=message):
        orthogonalize(update, **options)


@pytest.mark.parametrize("norm", ["add_eps", "clamp_eps"])
def test_zero_stays_zero_and_a_nan_stays_in_its_own_matrix(norm: str) -> None:
    """The batch dimension is no channel between matrices."""
    scheme = NewtonSchulz(norm="add_eps" if norm == "add_eps" else "clamp_eps")
    batch = torch.stack([torch.zeros(3, 4), torch.full((3, 4), math.nan), torch.randn(3, 4)])
    result = scheme(batch)
    assert bits(result[0].abs()) == bits(torch.zeros(3, 4))
    assert bool(result[1].isnan().all())
    assert relative_error(result[2], orthogonalized(batch[2].double(), 5), batch[2]) < 1e-4


def test_its_arguments_reach_the_iteration() -> None:
    """Steps, coefficients and eps are those that are passed, and no graph is recorded."""
    update = torch.randn(3, 5, requires_grad=True)
    once = orthogonalize(update, steps=1, coefficients=(1.0, 0.0, 0.0), eps=7.0)
    assert not once.requires_grad
    expected = update.detach() / (update.detach().norm() + 7.0)
    assert relative_error(once, expected.double(), expected) < 1e-6
