"""What is measured untimed, in a process of its own: the launches of one step and the memory that it adds."""

import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tools.bench.measure import Entry, Workload, build, reason_of, synchronize
from tools.bench.peers import Candidate
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["num_launches", "probe", "submissions"]

# Steps before anything is looked at: by then an optimizer has its state, and on CUDA a recording where it makes one.
SETTLING_STEPS = {"cpu": 1, "cuda": 4}
# How the CUDA runtime and driver name what a host submits to a device.
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")
COPIES = ("cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset")
MEMORY = ("kept_bytes", "peak_bytes", "reserved_bytes")
NO_MEMORY = "torch keeps no statistics of CPU memory"
NO_LAUNCHES = "the profiler saw no launch"


def submissions(names: Iterable[str]) -> dict[str, int]:
    """Count the runtime and driver calls that submit work, among the names of a trace's events."""
    return dict(sorted(Counter(name for name in names if name.startswith(LAUNCHES + COPIES)).items()))


def num_launches(by_name: Mapping[str, int]) -> int:
    """Return how many of the submissions are launches of a kernel or a graph, as opposed to copies and fills."""
    return sum(count for name, count in by_name.items() if name.startswith(LAUNCHES))


class _Dispatches(TorchDispatchMode):
    """Counts the ATen operations that reach a backend."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "aten":
            self.by_name[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _dispatched(entry: Entry) -> dict[str, Any]:
    with _Dispatches() as mode:
        entry.optimizer.step()
    return {"num_launches": mode.by_name.total(), "launches_by_name": dict(sorted(mode.by_name.items()))}


def _is_kernel(event: Any) -> bool:
    """Tell a kernel's record from that of a copy, a fill or a range that user code has named."""
    named_by_user = getattr(event, "is_user_annotation", False) or event.name.startswith("Optimizer.")
    return event.device_type.name == "CUDA" and not named_by_user and not event.name.startswith(("Memcpy", "Memset"))


def _launched(entry: Entry, device: torch.device) -> dict[str, Any]:
    """Trace one step; what a replayed graph runs is among the kernels, its launch among the launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        entry.optimizer.step()
        synchronize(device)
    events = trace.events() or []
    by_name = submissions(event.name for event in events)
    if not by_name:
        return {"num_launches": None, "reasons": {"num_launches": NO_LAUNCHES}}
    kernels = [event.name for event in events if _is_kernel(event)]
    return {"num_launches": num_launches(by_name), "launches_by_name": by_name, "num_kernels": len(kernels)}


def _allocated(entry: Entry, workload: Workload, allocated_before: int) -> dict[str, Any]:
    """Return what a settled optimizer keeps and what one more step adds, from empty caches."""
    gc.collect()
    synchronize(workload.device)
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    entry.optimizer.step()
    synchronize(workload.device)
    return {
        "kept_bytes": allocated - allocated_before,
        "peak_bytes": torch.cuda.max_memory_allocated() - allocated,
        "reserved_bytes": torch.cuda.max_memory_reserved() - reserved,
    }


def _probe_one(candidate: Candidate, workload: Workload) -> dict[str, Any]:
    entry = build(candidate, workload)
    on_cuda = workload.device.type == "cuda"
    entry.refill(workload.gradients(0))
    allocated = torch.cuda.memory_allocated() if on_cuda else 0
    for number in range(1, 1 + SETTLING_STEPS[workload.device.type]):
        entry.optimizer.step()
        entry.refill(workload.gradients(number))
    if not on_cuda:
        return {**_dispatched(entry), "reasons": dict.fromkeys(MEMORY, NO_MEMORY)}
    found = _allocated(entry, workload, allocated)
    entry.refill(workload.gradients(0))
    return {**found, **_launched(entry, workload.device)}


def _warm_up(device: torch.device) -> None:
    """Make what the first user of a device pays for: cuBLAS workspaces and the profiler's own set-up."""
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(1, 16, 16, device=device, dtype=dtype)
        torch.baddbmm(square, square, square)
        torch.mm(square[0], square[0])
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        torch.ones(1, device=device).add_(1)
        synchronize(device)


def probe(candidates: Sequence[Candidate], workload: Workload) -> dict[str, dict[str, Any]]:
    """Return what is known of each candidate's step apart from its times.

    Args:
        candidates: What to build, one at a time.
        workload: The parameters.

    Returns:
        By name: `num_launches`, `launches_by_name`, on CUDA `num_kernels`, `kept_bytes`, `peak_bytes` and
        `reserved_bytes`; `reasons` holds a sentence for each of them that is not known.
    """
    if workload.device.type == "cuda":
        _warm_up(workload.device)
    found: dict[str, dict[str, Any]] = {}
    for candidate in candidates:
        gc.collect()
        try:
            found[candidate.name] = _probe_one(candidate, workload)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything; its row says what
            found[candidate.name] = {"reasons": {"num_launches": reason_of(error)}}
    return found
