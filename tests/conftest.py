"""What every test shares: the markers of GPUs, a fixed seed, and no limit on the time of an example."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("lucid", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lucid")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests where there are not the CUDA devices that they need, unless LUCID_REQUIRE_GPU asks for that many."""
    available = max(torch.cuda.device_count(), int(os.environ.get("LUCID_REQUIRE_GPU") or 0))
    for marker, needed, words in (("gpu", 1, "a CUDA device"), ("two_gpus", 2, "two CUDA devices")):
        if available < needed:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=f"needs {words}"))


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    """Fix the seed, and one thread: small tensors do not gain from more, and a busy machine makes threads wait."""
    torch.manual_seed(20261129)
    torch.set_num_threads(1)
