"""Traces some steps of this process with torch.profiler and leaves a table of kernels; for an extra, never timed run.

The agent makes a `KernelTrace` where the environment asks for one, calls it around every optimizer step, and at exit.
The tracer is armed at the first step, before anything is captured, and counts steps after a warm-up. Whatever goes
wrong is a reason in the table; the program goes on.
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from lucid_profiler.agent import STEPS_VARIABLE
from lucid_profiler.journal import Guard
from lucid_profiler.kernel_counts import MAX_EVENTS, count_events
from lucid_profiler.kernels import TRACED_SUFFIX, Event, EventKind, KernelTable, cupti_loaded, write_table
from lucid_profiler.snapshot import loaded_torch

NUM_WARMUP_STEPS = 8
NUM_STEPS = 20
MAX_STEPS = 1000
MAX_WINDOW_S = 120.0

_API_CALL = re.compile(r"(?:cuda|cu|hip)(?=[A-Z])")
_GRAPH_ID = re.compile(r'"graph id": ?(\d+)')
_STEP_PREFIX = "ProfilerStep#"
_NAMED_BY_TORCH = (_STEP_PREFIX, "Optimizer.")  # ranges that also appear on the device
_RECORD_ACTIVITIES: Mapping[str, EventKind] = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}

__all__ = [
    "MAX_STEPS",
    "NUM_STEPS",
    "NUM_WARMUP_STEPS",
    "STEPS_VARIABLE",
    "KernelTrace",
    "classify",
    "plain_events",
    "steps_asked_for",
]


def steps_asked_for(environ: Mapping[str, str]) -> int | None:
    """Return how many steps the environment asks to trace; None if it asks for no trace.

    Raises:
        ValueError: `LUCID_KERNELS` is no number of steps.
    """
    text = environ.get(STEPS_VARIABLE, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_STEPS:
        raise ValueError(f"{STEPS_VARIABLE} is {text!r:.40}, expected a number of steps from 1 to {MAX_STEPS}")
    return int(text)


def classify(name: str, *, on_device: bool, activity: str | None, is_annotation: bool) -> EventKind | None:
    """Return what an event is; None for what no table counts.

    Args:
        name: As the tracer gives it.
        on_device: Whether it is of a device.
        activity: Kineto's name of the kind, None where torch does not tell it.
        is_annotation: Whether it is a range that a person or torch has named.
    """
    if not on_device and name.startswith(_STEP_PREFIX):
        return "step"
    if is_annotation or name.startswith(_NAMED_BY_TORCH):
        return None
    if on_device:
        return _record_kind(name) if activity is None else _RECORD_ACTIVITIES.get(activity)
    if activity in (None, "cuda_runtime", "cuda_driver") and _API_CALL.match(name):
        return _launch_kind(name)
    return "operator" if activity in (None, "cpu_op") else None


def plain_events(events: Iterable[Any], *, device: Literal["cuda", "cpu"]) -> Iterator[Event]:
    """Yield the events of torch's tracer that a table of this device counts.

    Their methods are the same from torch 2.4 to 2.13, except that older ones do not tell the kind of activity.
    """
    for event in events:
        name = _name(event)
        on_device = event.device_type().name != "CPU"
        activity = event.activity_type() if hasattr(event, "activity_type") else None
        is_annotation = hasattr(event, "is_user_annotation") and bool(event.is_user_annotation())
        kind = classify(name, on_device=on_device, activity=activity, is_annotation=is_annotation)
        if kind is not None and (kind == "step" or (kind == "operator") == (device == "cpu")):
            yield Event(
                kind=kind,
                name=name,
                correlation=event.correlation_id(),
                begin_ns=event.start_ns(),
                duration_ns=event.duration_ns(),
                thread=event.start_thread_id(),
                graph=_graph_id(event) if on_device else 0,
            )


def _name(event: Any) -> str:
    try:
        return str(event.name())
    except UnicodeDecodeError as error:
        # What the tracer copied from a binary need not be text.
        return bytes(error.object).decode("utf-8", "backslashreplace")


def _graph_id(event: Any) -> int:
    if not hasattr(event, "metadata_json"):
        return 0
    found = _GRAPH_ID.search(event.metadata_json() or "")
    return int(found[1]) if found else 0


def _record_kind(name: str) -> EventKind:
    if name.startswith("Memcpy"):
        return "memcpy"
    return "memset" if name.startswith("Memset") else "kernel"


def _launch_kind(name: str) -> EventKind | None:
    call = _API_CALL.sub("", name, count=1)
    if call.startswith("GraphLaunch"):
        return "launch_graph"
    if "Launch" in call and "Kernel" in call:
        return "launch_kernel"
    if call.startswith("Memcpy"):
        return "launch_memcpy"
    return "launch_memset" if call.startswith("Memset") else None


class KernelTrace:
    """The one trace of this process.

    A step is one of the optimizer that stepped first, from the end of its step before. `<run_dir>/kernels-<pid>.json`
    is written as soon as the steps are counted, else by `finish`.

    Args:
        run_dir: Private directory of the run.
        name: Of the process's files, by default its pid.
        num_steps: Steps to count.
        num_warmup_steps: Steps before them, in which optimizers record their graphs.
        max_events: Beyond these, whole steps are left out.
        max_window_s: After so many seconds of counted steps, no further one is counted.
        guard: Counts what fails here.
        clock_s: Monotonic seconds.

    Raises:
        ValueError: A number of steps is out of range.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        name: str | None = None,
        num_steps: int = NUM_STEPS,
        num_warmup_steps: int = NUM_WARMUP_STEPS,
        max_events: int = MAX_EVENTS,
        max_window_s: float = MAX_WINDOW_S,
        guard: Guard | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 <= num_steps <= MAX_STEPS or not 1 <= num_warmup_steps <= MAX_STEPS:
            raise ValueError(
                f"{num_steps} steps after {num_warmup_steps} of warm-up: both must be from 1 to {MAX_STEPS}"
            )
        self._pid = os.getpid()
        self._path = run_dir / f"kernels-{name or self._pid}.json"
        self._num_steps = num_steps
        self._num_warmup_steps = num_warmup_steps
        self._max_events = max_events
        self._max_window_s = max_window_s
        self._guard = guard or Guard()
        self._clock_s = clock_s
        self._profiler: Any = None
        self._phase: Literal["idle", "tracing", "done"] = "idle"
        self._device: Literal["cuda", "cpu"] = "cpu"
        self._in_step = False
        self._num_ended = 0
        self._window_begin_s = 0.0
        self._notes: list[str] = []

    @property
    def is_tracing(self) -> bool:
        """Whether the tracer is on."""
        return self._phase == "tracing"

    def before_step(self, optimizer_index: int) -> None:
        """Begin an optimizer's step; the first one arms the tracer. Nested begins of one step count once."""
        if optimizer_index or self._phase == "done":
            return
        self._in_step = True
        if self._phase == "idle":
            self._guarded(self._arm)

    def after_step(self, optimizer_index: int) -> None:
        """End an optimizer's step, and with it one of the trace."""
        if self._phase == "tracing" and not optimizer_index and self._in_step:
            self._in_step = False
            self._guarded(self._advance)

    def finish(self) -> None:
        """Write what there is, if the steps were not complete; for the end of the process, before hooks are removed."""
        if self._phase == "idle":
            self._give_up("no optimizer stepped")
        elif self._phase == "tracing":
            self._guarded(self._collect)

    def deactivate(self) -> None:
        """Do nothing any more and write nothing; for forked children."""
        self._phase = "done"
        self._profiler = None

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever the tracer does, the program goes on; the table says it
            if not self._guard.takes(error):
                raise
            self._give_up(f"the tracer failed: {type(error).__name__}: {error}"[:500])

    def _give_up(self, reason: str) -> None:
        self._phase = "done"
        profiler, self._profiler = self._profiler, None
        with self._guard:
            if profiler is not None:
                _quietly(profiler.stop)
        with self._guard:
            write_table(self._blank(reason), self._path)

    def _blank(self, reason: str | None = None) -> KernelTable:
        torch = loaded_torch()
        versions = {"torch": str(torch.__version__), "cuda": torch.version.cuda} if torch is not None else {}
        return KernelTable(
            pid=self._pid,
            device=self._device,
            num_warmup_steps=self._num_warmup_steps,
            reason=reason,
            cupti_loaded=cupti_loaded(),
            versions=versions,
            notes=tuple(self._notes),
        )

    def _arm(self) -> None:
        torch = loaded_torch()
        self._device = "cuda" if torch.cuda.is_initialized() else "cpu"
        if (reason := _obstacle(torch, self._device)) is not None:
            self._give_up(reason)
            return
        # First, so that a process that is killed or fails from here on is known for a traced one.
        self._path.with_suffix(TRACED_SUFFIX).touch()
        activity = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(
            activities=[activity.CPU, activity.CUDA] if self._device == "cuda" else [activity.CPU],
            schedule=torch.profiler.schedule(wait=0, warmup=self._num_warmup_steps, active=self._num_steps, repeat=1),
            record_shapes=False,
            with_stack=False,
        )
        _quietly(self._profiler.start)
        self._phase = "tracing"

    def _advance(self) -> None:
        torch = loaded_torch()
        if self._device == "cuda":
            # Nothing may wait for a stream that records; the step is one with the next.
            if torch.cuda.is_current_stream_capturing():
                return
            if self._num_ended + 1 == self._num_warmup_steps:
                torch.cuda.synchronize()
        self._num_ended += 1
        _quietly(self._profiler.step)
        if self._num_ended == self._num_warmup_steps:
            self._window_begin_s = self._clock_s()
        elif self._num_counted == self._num_steps:
            self._collect()
        elif self._num_counted > 0 and self._clock_s() - self._window_begin_s > self._max_window_s:
            self._notes.append(f"stopped after {self._max_window_s:g} s: fewer steps than asked for")
            self._collect()

    @property
    def _num_counted(self) -> int:
        return self._num_ended - self._num_warmup_steps

    def _collect(self) -> None:
        profiler, self._profiler, self._phase = self._profiler, None, "done"
        _quietly(profiler.stop)
        if self._num_counted < 1:
            reason = f"{self._num_ended} steps ended, and counting begins after {self._num_warmup_steps} and one more"
            write_table(self._blank(reason), self._path)
            return
        events = list(plain_events(profiler.profiler.kineto_results.events(), device=self._device))
        table = count_events(events, self._blank(), num_steps=self._num_counted, max_events=self._max_events)
        write_table(table, self._path)


def _obstacle(torch: Any, device: str) -> str | None:
    """Say why the tracer cannot be armed now."""
    if torch.autograd._profiler_enabled():  # noqa: SLF001 - the only way to ask
        return "the program uses torch.profiler itself"
    if device == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return "the first step is inside a capture: the tracer must be armed before"
        # A graph leaves a pool if its capture allocated anything: https://github.com/pytorch/pytorch/issues/75504
        if any(tuple(segment["segment_pool_id"]) != (0, 0) for segment in torch.cuda.memory_snapshot()):
            return "a private memory pool exists before the first step: the tracer must be armed before any capture"
    return None


def _quietly(action: Callable[[], None]) -> None:
    # A program that turns warnings into errors does not mean those of a tracer that it has not started.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        action()
