"""Memory order of tensors, against what torch itself says of them."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lucid_optim.layout import is_dense, matched, memory_matrix, same_layout
from support.reference import bits

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=5).map(tuple)


@given(shape=shapes, data=st.data())
def test_every_permutation_of_a_dense_tensor_is_dense(shape: tuple[int, ...], data: st.DataObject) -> None:
    """A permuted tensor fills one block; a strided slice of a larger one does not."""
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.randn(shape).permute(*order) if shape else torch.randn(())
    assert is_dense(tensor)
    gappy = torch.randn(*shape, 2)[..., 0]
    assert is_dense(gappy) == (gappy.numel() == 1)
    assert is_dense(torch.randn(1).expand(3)) is False


@given(shape=shapes.filter(lambda shape: len(shape) >= 2), data=st.data())
def test_the_memory_matrix_is_the_logical_one_up_to_columns_and_transposition(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Read as promised, memory holds each row's elements together, or each column's where it is transposed."""
    order = data.draw(st.permutations(range(len(shape))))
    inverse = [order.index(dim) for dim in range(len(shape))]
    tensor = torch.arange(math.prod(shape)).view([shape[dim] for dim in order]).permute(*inverse)
    assert tensor.shape == shape
    memory = memory_matrix(tensor.shape, tensor.stride())
    if memory is None:
        outer_and_inner = {dim for dim in (order[0], order[-1]) if shape[dim] > 1}
        assert shape[0] > 1
        assert 0 not in outer_and_inner
        return
    assert memory.rows * memory.cols == tensor.numel()
    view = tensor.as_strided((memory.rows, memory.cols), (memory.cols, 1))
    rows = view.T if memory.transposed else view
    logical = tensor.reshape(shape[0], -1)
    if memory.transposed or shape[0] > 1:
        assert rows.shape == logical.shape
        assert sorted(map(sorted, rows.tolist())) == sorted(map(sorted, logical.tolist()))
        assert [sorted(row) for row in rows.tolist()] == [sorted(row) for row in logical.tolist()]


def test_matching_copies_only_where_memory_differs() -> None:
    """Equal strides give the tensor itself, odd strides of size-1 dimensions a view, another layout a copy."""
    like = torch.randn(4, 1, 3, 3)
    same = torch.randn(4, 1, 3, 3)
    odd = same.as_strided((4, 1, 3, 3), (9, 5, 3, 1))
    other = torch.randn(3, 3, 1, 4).permute(3, 2, 0, 1)
    assert matched(same, like) is same
    view = matched(odd, like)
    assert view.data_ptr() == odd.data_ptr()
    assert view.stride() == like.stride()
    copied = matched(other, like)
    assert copied.stride() == like.stride()
    assert copied.data_ptr() != other.data_ptr()
    assert bits(copied) == bits(other)
    assert matched(same.double(), like).dtype == torch.float32


def test_strides_of_unit_dimensions_say_nothing() -> None:
    """Layouts are equal when they differ in dimensions of size 1 alone."""
    tensor: Tensor = torch.randn(4, 1, 3)
    assert same_layout(tensor, tensor.as_strided((4, 1, 3), (3, 99, 1)))
    assert not same_layout(tensor, torch.randn(3, 1, 4).permute(2, 1, 0))
