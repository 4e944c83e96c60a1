"""What every test shares: the `gpu` marker, a fixed seed, and no limit on the time of an example."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("lucid", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lucid")


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
