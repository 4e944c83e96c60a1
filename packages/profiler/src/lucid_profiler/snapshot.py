"""What the agent reads once, at the end of a process: peaks, states, capture counters, environment.

torch is taken from the modules that the program has loaded. Every function leaves the program's objects as they are.
"""

import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import chain, count
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from lucid_profiler.journal import Guard
from lucid_profiler.tracking import TrackedOptimizer

_TORCH_SETTINGS: Mapping[str, Callable[[Any], Any]] = {
    "torch": lambda torch: str(torch.__version__),
    "cuda": lambda torch: torch.version.cuda,
    "hip": lambda torch: torch.version.hip,
    "num_threads": lambda torch: torch.get_num_threads(),
    "deterministic_algorithms": lambda torch: torch.are_deterministic_algorithms_enabled(),
    "deterministic_warn_only": lambda torch: torch.is_deterministic_algorithms_warn_only_enabled(),
    "float32_matmul_precision": lambda torch: torch.get_float32_matmul_precision(),
    "matmul_tf32": lambda torch: _tf32(torch.backends.cuda.matmul),
    "cudnn_tf32": lambda torch: _tf32(torch.backends.cudnn),
    "cudnn_benchmark": lambda torch: torch.backends.cudnn.benchmark,
    "cudnn_deterministic": lambda torch: torch.backends.cudnn.deterministic,
}
_CUDA_SETTINGS: Mapping[str, Callable[[Any], Any]] = {
    "cudnn": lambda torch: torch.backends.cudnn.version(),
}
_DEVICE_SETTINGS: Mapping[str, Callable[[Any, int], str]] = {
    "gpu_name": lambda torch, index: str(torch.cuda.get_device_name(index)),
    "gpu_uuid": lambda torch, index: str(getattr(torch.cuda.get_device_properties(index), "uuid", "")),
}
_CONSTANTS = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial, Enum, range, slice, type)
_ENVIRONMENT_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "NVIDIA_TF32_OVERRIDE")

__all__ = [
    "as_state",
    "capture",
    "device",
    "devices_in_use",
    "environment",
    "first_replay_step",
    "memory",
    "optimizer_state",
    "parameters",
    "peak_resident_bytes",
    "plain_digest",
    "rank",
    "synchronize",
    "undigested",
]


def loaded_torch() -> Any:
    """Return torch if the program has loaded it, else None."""
    return sys.modules.get("torch")


def _cuda_in_use(torch: Any) -> bool:
    return torch is not None and hasattr(torch, "cuda") and bool(torch.cuda.is_initialized())


def devices_in_use(busy: Sequence[int], guard: Guard) -> list[int]:
    """Return `busy`, the current CUDA device and all on which the program has memory; none before it uses CUDA.

    Nothing here makes a context on a device: one with memory has it, and the current one counts only if it has one.
    """
    torch = loaded_torch()
    if not _cuda_in_use(torch):
        return []
    current = int(torch.cuda.current_device())
    found = {*busy, *([current] if _has_context(torch, current) else [])}
    with guard:  # an allocator of the program's own may keep no statistics
        found |= {index for index in range(torch.cuda.device_count()) if _has_memory(torch, index, found)}
    return sorted(found)


def _has_context(torch: Any, index: int) -> bool:
    """Return whether the program has a context on a device, without which no work of it can be queued there."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # noqa: SLF001 - torch asks so itself before it allocates
    return ask is None or bool(ask(index))


def _has_memory(torch: Any, index: int, known: Collection[int]) -> bool:
    return index not in known and torch.cuda.memory_reserved(index) > 0


def synchronize(devices: Sequence[int]) -> None:
    """Wait for CUDA devices, if the program has begun to use CUDA."""
    torch = loaded_torch()
    if _cuda_in_use(torch):
        for device in devices:
            torch.cuda.synchronize(device)


def device(index: int) -> dict[str, Any]:
    """Return what names a CUDA device that the program uses."""
    properties = sys.modules["torch"].cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    return {
        "device": index,
        "uuid": None if uuid is None else str(uuid),
        "name": str(properties.name),
        "total_bytes": int(properties.total_memory),
    }


def rank() -> int | None:
    """Return the rank that torchrun gave this process."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def peak_resident_bytes() -> int | None:
    """Return the high-water mark of this program's resident memory, which begins anew when a program is executed."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def memory(busy: Sequence[int], guard: Guard) -> dict[str, Any]:
    """Return the peaks in bytes, before anything here adds to them; None where CUDA is not in use.

    Those of a device are the largest of one of `busy`, of the current device where none is.
    """
    peaks: dict[str, Any] = {"peak_rss_bytes": None, "peak_allocated_bytes": None, "peak_reserved_bytes": None}
    with guard:
        peaks["peak_rss_bytes"] = peak_resident_bytes()
    torch = loaded_torch()
    if _cuda_in_use(torch):
        with guard:
            devices = _or_current(torch, busy)
            peaks["peak_allocated_bytes"] = max(int(torch.cuda.max_memory_allocated(index)) for index in devices)
            peaks["peak_reserved_bytes"] = max(int(torch.cuda.max_memory_reserved(index)) for index in devices)
    return peaks


def parameters(optimizers: Sequence[TrackedOptimizer], names: Mapping[int, str]) -> dict[str, Any]:
    """Return every parameter of the optimizers by name; the tensors are the program's own."""
    found = {
        id(parameter): parameter
        for tracked in optimizers
        for group in tracked.optimizer.param_groups
        for parameter in group["params"]
    }
    return _by_name((parameter, names[identity], parameter) for identity, parameter in found.items())


def optimizer_state(optimizers: Sequence[TrackedOptimizer], names: Mapping[int, str]) -> dict[str, Any]:
    """Return state and settings of each optimizer under `optimizer<index>`; the tensors are the program's own.

    Settings of a group are included, so that two arms with other learning rates differ; objects that no digest can be
    taken of are left out, and `undigested` names them.
    """
    return {
        f"optimizer{tracked.index}": {
            "state": _by_name(
                (key, _state_name(key, names, place), _plain_items(value) if isinstance(value, Mapping) else value)
                for place, (key, value) in enumerate(tracked.optimizer.state.items())
                if isinstance(value, Mapping) or _is_plain(value)
            ),
            "groups": [_plain_items(settings) for settings in _settings(tracked)],
        }
        for tracked in optimizers
    }


def undigested(tracked: TrackedOptimizer) -> list[str]:
    """Return what of an optimizer's state and settings is in no digest although it may hold what was trained.

    Functions, classes and other constants are the program's text, and no state.
    """
    torch = loaded_torch()
    constants = (
        *_CONSTANTS,
        *(() if torch is None else (torch.dtype, torch.device, torch.layout, torch.memory_format)),
    )
    named: dict[tuple[str, type], None] = {}
    mappings: list[Mapping[Any, Any]] = [*_settings(tracked)]
    for key, value in tracked.optimizer.state.items():
        mappings.append(value if isinstance(value, Mapping) else {key if isinstance(key, str) else "state": value})
    for mapping in mappings:
        found = ((name, item) for name, item in mapping.items() if not _is_plain(item))
        named |= {(str(name), type(item)): None for name, item in found if not isinstance(item, constants)}
    return [f"{name!r} of class {kind.__qualname__}" for name, kind in named]


def _settings(tracked: TrackedOptimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in tracked.optimizer.param_groups
    ]


def _state_name(key: Any, names: Mapping[int, str], place: int) -> str:
    # State under a parameter that no group lists any more goes by its place.
    return key if isinstance(key, str) else names.get(id(key), f"unlisted{place}")


def _plain_items(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    return _by_name((key, str(key), value) for key, value in mapping.items() if _is_plain(value))


def _by_name(items: Iterable[tuple[Any, str, Any]]) -> dict[str, Any]:
    """Return values by name, given key, name and value; where names are equal, a key that is no text gets another one.

    That has the key's class or, where it is taken, a number.
    """
    found = list(items)
    num = Counter(name for _, name, _ in found)
    named: dict[str, Any] = {}
    for key, name, value in found:
        others = (f"{name} ({what})" for what in chain([type(key).__qualname__], count(2)))
        is_alone = num[name] == 1 or type(key) is str
        named[name if is_alone else next(one for one in others if one not in num and one not in named)] = value
    return named


def _is_plain(value: Any) -> bool:
    """Return whether a digest can be taken of `value`; functions and objects of other classes have none.

    Of what is nested too deep, as a cycle is, the digest itself says so.
    """
    pending, seen = [value], set[int]()
    while pending:
        item = pending.pop()
        if not isinstance(item, (list, tuple, dict)):
            if not _is_leaf(item):
                return False
        elif id(item) not in seen:
            seen.add(id(item))
            if not isinstance(item, dict):
                pending += item
            elif all(isinstance(key, (str, int)) and not isinstance(key, bool) for key in item):
                pending += item.values()
            else:
                return False
    return True


def _is_leaf(value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return True
    torch, numpy = loaded_torch(), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))
    )


def as_state(value: Any) -> Any:
    """Return the `state_dict()` of an object that has one, else the value itself."""
    state_dict = getattr(value, "state_dict", None)
    return state_dict() if callable(state_dict) else value


def plain_digest(digest: Any) -> dict[str, Any]:
    """Return a `StateDigest` as the fields of a journal line."""
    return {
        "digest": digest.digest,
        "strides_digest": digest.strides_digest,
        "num_tensors": digest.num_tensors,
        "num_bytes": digest.num_bytes,
        "nonfinite": digest.nonfinite,
        "tensors": {name: [short, dtype, list(shape)] for name, (short, dtype, shape) in digest.tensors.items()},
        "values": digest.values,
    }


def capture(optimizers: Sequence[TrackedOptimizer], guard: Guard) -> list[dict[str, Any]] | None:
    """Return the capture counters of the optimizers that keep some; None if none does."""
    reports = []
    for tracked in optimizers:
        if hasattr(tracked.optimizer, "capture_report"):
            with guard:
                report = tracked.optimizer.capture_report().as_dict()
                own = {"optimizer": type(tracked.optimizer).__name__, **report, "index": tracked.index}
                # Present although nothing can be told: what an optimizer calls its groups is its own.
                own |= {"num_replays": None, "first_replay_step": None}
                reports.append(own)
                groups = report["groups"]
                own["num_replays"] = max((group["replays"] for group in groups), default=0)
                own["first_replay_step"] = first_replay_step(groups, tracked.num_steps)
    return reports or None


def first_replay_step(groups: Sequence[Mapping[str, Any]], num_steps: int) -> int | None:
    """Return the step, from 1, in which a replay first took place, where the counts of a capture report tell it.

    They do for a group that was recorded once, took part in all `num_steps` steps, and ran natively only before that
    recording. None where no group was replayed, or where one that was does not tell.
    """
    first: int | None = None
    for group in groups:
        if not group["replays"]:
            continue
        num_before = group["reasons"].get("warming_up", 0)
        is_told = group["recordings"] == 1 and set(group["reasons"]) <= {"warming_up"}
        if not is_told or num_before + group["replays"] != num_steps:
            return None
        first = num_before + 1 if first is None else min(first, num_before + 1)
    return first


def environment(busy: Sequence[int], guard: Guard) -> dict[str, dict[str, Any]]:
    """Return what the numbers and bytes of this process depend on; None where something cannot be read.

    The device is the one of `busy`, or the current one where none is; several are named one after the other.
    """
    identity: dict[str, Any] = {
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        **{name.lower(): os.environ.get(name) for name in _ENVIRONMENT_VARIABLES},
    }
    torch = loaded_torch()
    if torch is not None:
        settings = {**_TORCH_SETTINGS, **(_CUDA_SETTINGS if _cuda_in_use(torch) else {})}
        for name, read in settings.items():
            identity[name] = None
            with guard:
                identity[name] = read(torch)
    if _cuda_in_use(torch):
        for name, read_device in _DEVICE_SETTINGS.items():
            identity[name] = None
            with guard:
                values = [read_device(torch, index) for index in _or_current(torch, busy)]
                identity[name] = values[0] if len(values) == 1 else ", ".join(value or "unknown" for value in values)
    return {"identity": identity, "volatile": {"executable": sys.executable}}


def _or_current(torch: Any, busy: Sequence[int]) -> Sequence[int]:
    return busy or [torch.cuda.current_device()]


def _tf32(backend: Any) -> str:
    """Read a TF32 switch the way that does not raise once a program has set `fp32_precision`."""
    if hasattr(backend, "fp32_precision"):
        return str(backend.fp32_precision)
    return "tf32" if backend.allow_tf32 else "ieee"
