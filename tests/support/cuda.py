"""What tests on a CUDA device share."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def synchronisation_forbidden() -> Iterator[None]:
    """Make every synchronising call that torch knows of an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
