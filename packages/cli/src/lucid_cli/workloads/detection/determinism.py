"""The settings under which two runs of the same fit give the same bytes."""

import os

import torch

__all__ = ["set_deterministic"]

# Two workspaces of fixed size: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
CUBLAS_WORKSPACE_CONFIG = ":4096:8"


def set_deterministic(*, seed: int, threads: int) -> dict[str, bool | int | str]:
    """Make this process repeatable, and return what was set.

    Call it before CUDA is used: cuBLAS reads its variable when it starts. Operations that have no deterministic
    implementation raise from here on.

    Args:
        seed: Of torch's generators on every device.
        threads: Of torch's operations on the CPU; another number may add in another order.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE_CONFIG
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=True)
    # The mode would fill every new tensor, an operation each, against programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    return {
        "CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACE_CONFIG,
        "torch.manual_seed": seed,
        "torch.set_num_threads": threads,
        "torch.use_deterministic_algorithms": True,
        "torch.utils.deterministic.fill_uninitialized_memory": False,
        "torch.backends.cudnn.benchmark": False,
        "torch.backends.cudnn.deterministic": True,
    }
