"""CUDA graphs, recorded on streams of our own and undone without a trace when recording fails.

`torch.cuda.graph` is not used: when the end of a capture raises, it leaves the capture stream current and the
allocator in the belief that a capture is under way, and it empties the allocator's cache, which would flatter the
reserved memory of whoever records.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from lucid_optim.private import abandon_pool

__all__ = [
    "MAX_BRANCHES",
    "Home",
    "Recorded",
    "RecordingError",
    "Stopwatch",
    "building",
    "can_capture",
    "in_branches",
    "in_order",
    "measured",
    "record",
]

Result = TypeVar("Result")

MAX_BRANCHES = 8


class RecordingError(RuntimeError):
    """Recording failed and left nothing behind.

    Attributes:
        reason: A key of `REASONS`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class _Lane:
    """What all recordings of one device share.

    Recordings are made one after the other on the same few streams, so that they share the workspaces that cuBLAS
    keeps for each. Replays are ordered for the same reason. The streams are of high priority because torch deals its
    streams out of a small pool, and few programs ask for those.
    """

    streams: list[torch.cuda.Stream]
    lock: threading.RLock = field(default_factory=threading.RLock)
    last_stream: torch.cuda.Stream | None = None
    done: torch.cuda.Event = field(default_factory=torch.cuda.Event)


_lanes: dict[int, _Lane] = {}
_lanes_lock = threading.RLock()  # a collection inside may drop a recording, which asks for its lane
# Weak references to torch's own objects outlive them, so these are to what holds them here.
_recordings: "weakref.WeakSet[Recorded[Any]]" = weakref.WeakSet()
_watches: "weakref.WeakSet[Stopwatch]" = weakref.WeakSet()


def _lane(device: torch.device) -> _Lane:
    index = device.index if device.index is not None else torch.cuda.current_device()
    with _lanes_lock:
        if index not in _lanes:
            streams = [torch.cuda.Stream(device=index, priority=-1) for _ in range(1 + MAX_BRANCHES)]
            _lanes[index] = _Lane(streams=streams)
        return _lanes[index]


def can_capture(device: torch.device) -> bool:
    """Tell whether work on a device can be recorded."""
    return device.type == "cuda"


class Recorded(Generic[Result]):
    """Recorded work.

    Attributes:
        result: What the work returned while it was recorded; the tensors in it hold the results of the latest replay.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Result, device: torch.device) -> None:
        self._graph = graph
        self._device = device
        self._kept_bytes: int | None = None  # None while the allocator can tell
        self.result = result
        _recordings.add(self)

    def replay(self) -> None:
        """Run the work again, on the current stream; nothing is allocated and nobody waits."""
        self._graph.replay()

    def pool_bytes(self) -> int:
        """Return the device memory that the recording keeps reserved; slow, it asks the allocator for a snapshot.

        After a reset that is none; after the reset at the end of the process it is what was kept until then.
        """
        if self._kept_bytes is not None:
            return self._kept_bytes
        pool = tuple(self._graph.pool())
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one.get("segment_pool_id", ())) == pool)

    def reset(self) -> None:
        """Give the graph and its memory back now."""
        self._kept_bytes = 0
        self._graph.reset()

    def end(self) -> None:
        """Give everything back at the end of the process; reports that are asked for later still say what was kept."""
        try:
            kept = self.pool_bytes()
        finally:
            self.reset()
        self._kept_bytes = kept

    def cuda_objects(self) -> list[Any]:
        """Return what a forked child must not destroy."""
        return [self._graph]


@atexit.register
def _reset_all() -> None:
    """Drop every graph while the driver still answers."""
    for recorded in list(_recordings):
        with contextlib.suppress(Exception):
            recorded.end()


def _leak_all() -> None:
    """Keep a forked child from destroying graphs and events: it cannot use them, and their destructors would abort."""
    owners: list[Recorded[Any] | Stopwatch] = [*_recordings, *_watches]
    for one in [*(lane.done for lane in _lanes.values()), *(one for owner in owners for one in owner.cuda_objects())]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    _recordings.clear()
    _watches.clear()


os.register_at_fork(after_in_child=_leak_all)


@contextlib.contextmanager
def in_order(device: torch.device) -> Iterator[None]:
    """Order what runs inside after everything that ran inside before, on whichever streams.

    Recordings own their inputs and outputs, so two steps on two streams would race where native ones would not.
    """
    lane = _lane(device)
    with lane.lock, torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        if lane.last_stream is not None and stream != lane.last_stream:
            stream.wait_event(lane.done)
        try:
            yield
        finally:
            lane.done.record(stream)
            lane.last_stream = stream


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from destroying somebody's graph in the middle of a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def record(work: Callable[[], Result], device: torch.device) -> Recorded[Result]:
    """Record work without running it.

    Args:
        work: Submits operations on the current stream and returns tensors that they fill. Everything that it calls must
            have run before, so that kernels are loaded. It is called once.
        device: Where the operations run.

    Returns:
        The recording.

    Raises:
        RecordingError: If the work or the recording failed. Nothing has run, no stream is capturing and the memory is
            back in the allocator.
    """
    lane = _lane(device)
    recorded: Recorded[Result] | None = None
    with lane.lock, torch.cuda.device(device), _no_collection():
        try:
            recorded, failure = _capture(work, device, lane.streams[0])
        finally:
            if recorded is None:
                _heal(device, lane.streams[0])
    if recorded is None:
        reason, message = failure
        raise RecordingError(reason, message)
    return recorded


def _capture(
    work: Callable[[], Result], device: torch.device, stream: torch.cuda.Stream
) -> tuple[Recorded[Result] | None, tuple[str, str]]:
    """Record on a stream; on failure return None and why, without any reference to the failed frames."""
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    failure: tuple[str, str] | None = None
    interrupt: BaseException | None = None
    result: Result | None = None
    has_ended = False
    with torch.cuda.stream(stream):
        try:
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                result = work()
            except BaseException as error:
                # The end of the capture may raise in its turn; what comes first is the reason.
                failure = _reason(error)
                interrupt = None if isinstance(error, Exception) else error
                raise
            finally:
                if torch.cuda.is_current_stream_capturing():
                    graph.capture_end()
                    has_ended = True
            return Recorded(graph, result, device), ("", "")
        except BaseException as error:  # noqa: BLE001 - whatever it is, the native step takes over
            failure = failure or _reason(error)
            interrupt = interrupt or (None if isinstance(error, Exception) else error)
    _abandon(graph, stream, pool, has_ended=has_ended)
    if interrupt is not None:
        raise interrupt
    return None, failure


def _reason(error: BaseException) -> tuple[str, str]:
    """Return the key of `REASONS` for an error, and its own words."""
    reason = "out_of_memory" if isinstance(error, torch.cuda.OutOfMemoryError) else "recording_failed"
    return reason, f"{type(error).__name__}: {error}".partition("\n")[0]


def _abandon(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any, *, has_ended: bool) -> None:
    """Undo a begun capture: where its end raised, the allocator still serves the stream from the pool."""
    with torch.cuda.stream(stream):
        if torch.cuda.is_current_stream_capturing():  # an interrupt came between
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
                has_ended = True
    if has_ended:
        graph.reset()
    else:
        abandon_pool(stream.device.index, pool)


def _heal(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Complete one small capture, which ends what a failed one has left begun in the random number generators."""
    with contextlib.suppress(RuntimeError), torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        cell = torch.zeros((), device=device)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            cell.add_(1)
        finally:
            graph.capture_end()
        graph.reset()


def in_branches(jobs: Sequence[Callable[[], Result]], device: torch.device, num_branches: int) -> list[Result]:
    """Run independent jobs of a recording on parallel branches, dealt out in turn; to be called while recording.

    A replay is bound by its longest chain of operations, so what does not depend on one another belongs side by side.
    A branch cannot use memory that another one has given back.

    Args:
        jobs: Each submits operations on the current stream. Their results outlive the call.
        device: Where they run.
        num_branches: At most so many run side by side; 1 runs all in sequence.

    Returns:
        What the jobs returned.
    """
    branches = _lane(device).streams[1 : 1 + min(num_branches, len(jobs))]
    if len(branches) < 2:
        return [job() for job in jobs]
    main = torch.cuda.current_stream(device)
    for branch in branches:
        branch.wait_stream(main)
    results = []
    try:
        for at, job in enumerate(jobs):
            with torch.cuda.stream(branches[at % len(branches)]):
                results.append(job())
    except BaseException:
        for branch in branches:
            with contextlib.suppress(RuntimeError):  # a broken capture refuses this too
                main.wait_stream(branch)
        raise
    for branch in branches:
        main.wait_stream(branch)
    return results


@contextlib.contextmanager
def building(device: torch.device) -> Iterator[None]:
    """Make whatever fails while a recording is put together a `RecordingError`; the device is the current one.

    Raises:
        RecordingError: In place of any other exception.
    """
    failure: tuple[str, str] | None = None
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        try:
            yield
        except RecordingError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the native step takes over
            failure = _reason(error)
    if failure is not None:
        raise RecordingError(*failure)


class Home:
    """The stream on which a recording's own tensors were made, and to which their memory goes back.

    Args:
        device: Of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def await_last_use(self) -> None:
        """Let the stream wait for the last step, wherever that ran, before it hands the memory out again."""
        if self._stream is None:
            return
        lane = _lane(self._device)
        if lane.last_stream is not None and lane.last_stream != self._stream:
            self._stream.wait_event(lane.done)


class Stopwatch:
    """The seconds between two places of a device's stream, read without waiting for them."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._has_stopped = False
        _watches.add(self)

    def cuda_objects(self) -> list[Any]:
        """Return what a forked child must not destroy."""
        return [self._begin, self._end]

    def start(self) -> None:
        """Mark the first place on the current stream."""
        self._begin.record()

    def stop(self) -> None:
        """Mark the second place on the current stream."""
        self._end.record()
        self._has_stopped = True

    def seconds(self) -> float | None:
        """Return the time between the two, or None while the device has not passed both."""
        has_passed = self._has_stopped and self._begin.query() and self._end.query()
        return self._begin.elapsed_time(self._end) / 1e3 if has_passed else None


@contextlib.contextmanager
def measured(watch: Stopwatch | None, device: torch.device | None) -> Iterator[None]:
    """Run a stopwatch, where there is one, over what runs inside on a device's current stream."""
    if watch is None or device is None:
        yield
        return
    with torch.cuda.device(device):
        watch.start()
    yield
    with torch.cuda.device(device):
        watch.stop()
