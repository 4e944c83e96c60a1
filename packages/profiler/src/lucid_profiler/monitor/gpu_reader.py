"""What the sampler asks of the devices, and the answers where there are none."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from lucid_profiler.monitor.gpu_processes import IsMember, never
from lucid_profiler.monitor.readings import Reasons, Values

__all__ = ["GpuReader", "NoGpus", "Sheets", "Times"]

Sheets = Mapping[str, tuple[Values, Reasons]]
"""By UUID: fields, and the reasons of those that are None."""
Times = Mapping[str, tuple[int, int]]
"""By UUID: the times before and after a call."""


class GpuReader(Protocol):
    """What the sampler asks of the devices."""

    @property
    def reason(self) -> str | None:
        """Why there are no devices."""

    @property
    def why_missing(self) -> str | None:
        """Why devices may be missing; None where all are there."""

    @property
    def devices(self) -> Sequence[Any]:
        """The identity of each device."""

    @property
    def memory_api(self) -> str | None:
        """Which version of the memory query is used, the older one where devices differ."""

    @property
    def notes(self) -> Sequence[str]:
        """What a reader should know, each said once."""

    @property
    def nvml_ns(self) -> Mapping[str, int]:
        """Time spent in each call of the driver, in ns."""

    @property
    def num_calls(self) -> Mapping[str, int]:
        """How often each was called."""

    @property
    def num_errors(self) -> Mapping[str, int]:
        """How often an answer was no value, by call and reason."""

    def read_fast(self) -> Sheets:
        """Read what is cheap."""

    def read_processes(self, pids: Collection[int], *, is_member: IsMember = never) -> Sheets:
        """Read the memory of processes, also of those of which only `is_member` knows."""

    def read_energy(self) -> tuple[Sheets, Times]:
        """Read the energy counters, and when each was read."""

    def reopen_if_due(self) -> object:
        """Try again to reach a driver that went away."""

    def close(self) -> None:
        """Let go of the driver."""


class NoGpus:
    """No devices, and why.

    Args:
        reason: a code of `readings.REASONS`.
    """

    def __init__(self, reason: str) -> None:
        self.reason = self.why_missing = reason
        self.devices: tuple[Any, ...] = ()
        self.memory_api: str | None = None
        self.notes: list[str] = []
        self.nvml_ns: dict[str, int] = {}
        self.num_calls: dict[str, int] = {}
        self.num_errors: dict[str, int] = {}

    def read_fast(self) -> Sheets:
        """Return nothing."""
        return {}

    def read_processes(self, pids: Collection[int], *, is_member: IsMember = never) -> Sheets:  # noqa: ARG002 - the interface of devices
        """Return nothing."""
        return {}

    def read_energy(self) -> tuple[Sheets, Times]:
        """Return nothing."""
        return {}, {}

    def reopen_if_due(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
