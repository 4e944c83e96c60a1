"""What is known of an optimizer that stepped: where it works, when a step of it begins, how its parameters are called.

Nothing here imports torch; what is looked at was made by it.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any
from weakref import ref

_FOLLOWED = (FunctionType, MethodType, partial)
_REPEATS = "calls its closure again within a step: its step time includes the later calls"
_NOT_FOLLOWED = "is given something callable that is no function: its step time includes what that does"

__all__ = ["TrackedOptimizer", "device_in_use", "followed", "is_within_step", "parameters", "qualified_names"]

_Begin = Callable[["TrackedOptimizer"], None]


class TrackedOptimizer:
    """One optimizer that stepped.

    `optimizer` is None while it is not among those that stepped last. `names` maps the identity of a parameter to its
    qualified name; `device` is the index of the CUDA device that its steps keep busy, None while there is none;
    `is_nested` says that the step under way calls itself, as one does that calls its parent's; `remark` is what a
    reader has to know of its step times.
    """

    __slots__ = (
        "alive",
        "begin_ns",
        "device",
        "index",
        "is_nested",
        "names",
        "num_groups",
        "num_steps",
        "optimizer",
        "pending",
        "remark",
    )

    def __init__(self, optimizer: Any, *, index: int, on_death: Callable[[Any], None]) -> None:
        self.optimizer = optimizer
        self.alive = ref(optimizer, on_death)
        self.index = index
        self.remark: str | None = None
        self.names: dict[int, str] = {}
        self.num_groups = 0
        self.num_steps = 0
        self.begin_ns = 0
        self.device: int | None = None
        self.pending = False
        self.is_nested = False

    def describe(self) -> dict[str, Any]:
        """Return what a report says about the optimizer itself."""
        kind = type(self.optimizer)
        return {"index": self.index, "name": kind.__qualname__, "module": kind.__module__, "num_steps": self.num_steps}


class _Closure:
    """What a program gives to `step()` to make the gradients; the step begins after the first call of it.

    In all else it is the program's own: its attributes, signature and class.
    """

    __slots__ = ("_begin", "_closure", "_tracked", "_was_called")

    def __init__(self, closure: Callable[..., Any], tracked: TrackedOptimizer, *, begin: _Begin) -> None:
        for name, value in (("_closure", closure), ("_tracked", tracked), ("_begin", begin), ("_was_called", False)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the program's closure does."""
        result = self._closure(*args, **kwargs)
        if self._was_called:
            self._tracked.remark = _REPEATS
        else:
            object.__setattr__(self, "_was_called", True)
            self._begin(self._tracked)
        return result

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._closure, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._closure, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._closure, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._closure == other)

    def __hash__(self) -> int:
        return hash(self._closure)


def followed(closure: Any, tracked: TrackedOptimizer, *, begin: _Begin) -> Any:
    """Return what to give to `step()` in the closure's place; None for what is no function, which is left as it is."""
    if type(closure) in _FOLLOWED:
        return _Closure(closure, tracked, begin=begin)
    tracked.remark = _NOT_FOLLOWED
    return None


def device_in_use(optimizer: Any) -> int | None:
    """Return the device of the first CUDA parameter; without one, the current device if the program has memory there.

    Nothing here makes a context on a device: one with a tensor or with memory has it.
    """
    cuda = sys.modules["torch"].cuda
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type == "cuda":
                return int(parameter.device.index)
    current = int(cuda.current_device())
    return current if cuda.memory_reserved(current) > 0 else None


def is_within_step(optimizer: Any, wrapper: FrameType) -> bool:
    """Return whether torch's wrapper of `step()` runs within another one for the same optimizer.

    A count of begins and ends would not do: a step that raises has no end.
    """
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is wrapper.f_code and any(value is optimizer for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False


def parameters(tracked: TrackedOptimizer) -> Iterator[tuple[Any, str | None, str]]:
    """Yield each parameter with the name that its group gives it, and with its place."""
    for group_index, group in enumerate(tracked.optimizer.param_groups):
        own_names = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            own_name = str(own_names[index]) if own_names and len(own_names) == len(group["params"]) else None
            yield parameter, own_name, f"optimizer{tracked.index}.group{group_index}.param{index}"


def qualified_names(modules: list[Any], wanted: set[int]) -> dict[int, str]:
    """Return the name of each wanted parameter below its outermost module.

    When the parameters belong to several outermost modules, each name begins with the class and place of its own.
    """
    inner = {id(child) for module in modules for child in module._modules.values()}  # noqa: SLF001 - torch's own map
    found: list[tuple[Any, dict[int, str]]] = []
    for root in (module for module in modules if id(module) not in inner):
        names = {id(p): name for name, p in reversed(list(root.named_parameters())) if id(p) in wanted}
        if names:
            found.append((root, names))
    if len(found) == 1:
        return found[0][1]
    return {
        identity: f"{type(root).__name__}{place}.{name}"
        for place, (root, names) in reversed(list(enumerate(found)))
        for identity, name in names.items()
    }
