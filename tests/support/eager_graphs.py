"""A stand-in for CUDA graphs on tensors of any device, so that the machinery around them is tested without a GPU.

Like a graph it runs nothing while it records, always works on the tensors of the recording, and leaves its results in
the same tensors at each replay. What it cannot show is what the driver and the allocator do.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_optim import graphs


class EagerRecorded:
    """Work that is run anew at each replay."""

    alive = 0

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self.result: Any = None
        self.collector_was_enabled = gc.isenabled()
        EagerRecorded.alive += 1

    def replay(self) -> None:
        assert self._work is not None, "replayed after reset"
        fresh = self._work()
        if self.result is None:
            self.result = fresh
        else:
            for kept, new in zip(_flat(self.result), _flat(fresh), strict=True):
                kept.copy_(new)

    def pool_bytes(self) -> int:
        return 64

    def reset(self) -> None:
        if self._work is not None:
            EagerRecorded.alive -= 1
        self._work = None

    def __del__(self) -> None:
        self.reset()


def _flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in _flat(part)]


class HostWatch:
    """A stopwatch on the host's clock."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._begin = 0.0

    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._begin

    def seconds(self) -> float | None:
        return self._seconds


def install(monkeypatch: pytest.MonkeyPatch, *, failing: list[str] | None = None) -> None:
    """Put the stand-in in place of CUDA graphs, for tensors of every device.

    Args:
        monkeypatch: Undoes it.
        failing: Reasons with which the next recordings fail, consumed from the front.
    """
    failures = failing if failing is not None else []

    def record(work: Callable[[], Any], device: torch.device) -> EagerRecorded:
        if failures:
            raise graphs.RecordingError(failures.pop(0), "it was to fail")
        return EagerRecorded(work)

    @contextlib.contextmanager
    def in_order(device: torch.device) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def measured(watch: Any, device: torch.device | None) -> Iterator[None]:
        if watch is not None:
            watch.start()
        yield
        if watch is not None:
            watch.stop()

    monkeypatch.setattr(graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "in_branches", lambda jobs, device, num_branches: [job() for job in jobs])
    monkeypatch.setattr(graphs, "in_order", in_order)
    monkeypatch.setattr(graphs, "measured", measured)
    monkeypatch.setattr(graphs, "Stopwatch", HostWatch)
