"""The driver as this process has it open: every call is timed, none raises, and absent versions give way to older ones.

NVML is opened once for all in a process and counts who uses it; a fork inherits that count but not the driver's side.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any

from lucid_profiler.monitor.gpu_devices import Found, list_devices
from lucid_profiler.monitor.nvml_calls import (
    FORKED,
    FUNCTION_NOT_FOUND,
    NO_BINDING,
    REPORTS_ABSENCE,
    UNKNOWN,
    Way,
    code_of,
    failures,
    ways,
)

__all__ = ["Driver"]

_holders: list[int] = []  # the process that opened NVML, once for each `Driver` that has it open


class Driver:
    """NVML, opened and closed in pairs.

    Attributes:
        nvml_ns: Call: time spent in it, in ns.
        num_calls: Call: how often it was made.
    """

    def __init__(self) -> None:
        self.nvml_ns: defaultdict[str, int] = defaultdict(int)
        self.num_calls: defaultdict[str, int] = defaultdict(int)
        self._is_open = False
        self._pid = os.getpid()
        self._pynvml: Any = None
        self._failures: tuple[type[BaseException], ...] = ()
        self._ways: dict[str, tuple[Way, ...]] = {}
        self._chosen: dict[tuple[str, str], int] = {}  # the way in which a device has answered a call
        with suppress(ImportError, AttributeError):  # not installed, or another package of that name
            import pynvml  # noqa: PLC0415 - reports are read without it

            self._failures, self._ways, self._pynvml = failures(pynvml), ways(pynvml), pynvml

    @property
    def is_forked(self) -> bool:
        """Tell whether the driver was opened by a process of which this one is a copy."""
        return self._pid != os.getpid() or any(pid != self._pid for pid in _holders)

    def way(self, name: str, uuid: str) -> int | None:
        """Return in which of the ways a device has answered a call, 0 for the newest; None where it has not yet."""
        return self._chosen.get((name, uuid))

    def open(self) -> int | None:
        """Open NVML, and close it first where it is open; return the error code, None on success."""
        self.close()
        if self.is_forked:
            return FORKED
        if self._pynvml is None:
            return NO_BINDING
        _, code = self._timed("init", self._pynvml.nvmlInit)
        if code is None:
            self._chosen.clear()
            self._is_open = True
            _holders.append(self._pid)
        return code

    def close(self) -> None:
        """Give NVML back; what others in this process have opened stays open."""
        if self._is_open and not self.is_forked:
            self._timed("shutdown", self._pynvml.nvmlShutdown)
            _holders.remove(self._pid)
        self._is_open = False

    def devices(self) -> tuple[list[Found], list[int]]:
        """Return the devices that answer, and the error codes of those that do not."""
        count, code = self._timed("device_count", self._pynvml.nvmlDeviceGetCount)
        return ([], [code]) if code is not None else list_devices(self._pynvml, count=count, timed=self._timed)

    def handle(self, uuid: str) -> tuple[Any, int | None]:
        """Return a new handle of a device, or the error code."""
        return self._timed("handle", self._pynvml.nvmlDeviceGetHandleByUUID, uuid)

    def ask(self, name: str, handle: Any, *, uuid: str) -> tuple[Any, int | None]:
        """Return a device's answer to the call of that name, or the error code.

        The way in which a device first answers is its own until the driver is opened anew: what has answered exists, so
        that a later report of its absence is an error of that call and chooses no other.
        """
        choices = self._ways[name]
        known = self._chosen.get((name, uuid))
        if known is not None:
            answer, code = self._timed(name, choices[known], handle)
            return answer, UNKNOWN if code in REPORTS_ABSENCE else code
        for number, choice in enumerate(choices):
            answer, code = self._timed(name, choice, handle)
            if code is None:
                self._chosen[name, uuid] = number
            if code not in REPORTS_ABSENCE:
                return answer, code
        return None, FUNCTION_NOT_FOUND

    def _timed(self, name: str, call: Callable[..., Any], *arguments: Any) -> tuple[Any, int | None]:
        begin_ns = perf_counter_ns()
        try:
            return call(*arguments), None
        except self._failures as error:
            return None, code_of(error)
        finally:
            self.nvml_ns[name] += perf_counter_ns() - begin_ns
            self.num_calls[name] += 1
