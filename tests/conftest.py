"""What every test shares: the `gpu` marker and a fixed seed."""

import os

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device, unless LUCID_REQUIRE_GPU=1 asks for them."""
    if torch.cuda.is_available() or os.environ.get("LUCID_REQUIRE_GPU") == "1":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    """Fix the seed, and one thread: small tensors do not gain from more, and a busy machine makes threads wait."""
    torch.manual_seed(20261129)
    torch.set_num_threads(1)
