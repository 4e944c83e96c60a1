"""Byte ranges: what counts as shared memory, against a byte-by-byte reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lucid_optim.memory import byte_range, shares_memory

BASE = torch.zeros(24)
views = st.tuples(st.integers(0, 20), st.integers(0, 4)).map(lambda cut: BASE[cut[0] : cut[0] + cut[1]])


@given(written=st.lists(views, max_size=4), read=st.lists(views, max_size=4))
def test_sharing_is_found_exactly_where_two_ranges_have_a_byte_in_common(
    written: list[torch.Tensor], read: list[torch.Tensor]
) -> None:
    """Written against written and written against read count; read against read does not."""

    def addresses(tensor: torch.Tensor) -> set[int]:
        return set(range(tensor.data_ptr(), tensor.data_ptr() + 4 * tensor.numel()))

    expected = any(
        addresses(first) & addresses(second)
        for at, first in enumerate(written)
        for second in [*written[at + 1 :], *read]
    )
    assert shares_memory(written, read) is expected


def test_a_range_spans_the_gaps_of_a_strided_tensor() -> None:
    """Interleaved columns of one base have ranges that meet."""
    base = torch.zeros(4, 6)
    begin, end = byte_range(base[:, 1])
    assert (begin - base.data_ptr(), end - begin) == (4, 4 * (3 * 6 + 1))
    assert shares_memory([base[:, 0], base[:, 1]], [])
    assert not shares_memory([base[:2], base[2:]], [])


def test_an_empty_tensor_shares_nothing() -> None:
    """Zero elements occupy no byte, even inside another tensor."""
    base = torch.zeros(8)
    assert not shares_memory([base, base[3:3]], [base[8:]])
