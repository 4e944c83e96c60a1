"""What is known of an optimizer that stepped: where it works, when a step of it begins, how its parameters are called.

Nothing here imports torch; what is looked at was made by it.
"""

import sys
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from operator import getitem
from types import FrameType, FunctionType, MethodType
from typing import Any, ClassVar, SupportsIndex
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
    `num_states` is how many entries its state had after its last step; `is_nested` says that the step under way calls
    itself, as one does that calls its parent's; `remark` is what a reader has to know of its step times.
    """

    __slots__ = (
        "alive",
        "begin_ns",
        "device",
        "index",
        "is_nested",
        "names",
        "num_groups",
        "num_states",
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
        self.num_states = 0
        self.begin_ns = 0
        self.device: int | None = None
        self.pending = False
        self.is_nested = False

    def describe(self) -> dict[str, Any]:
        """Return what a report says about the optimizer itself."""
        kind = type(self.optimizer)
        return {"index": self.index, "name": kind.__qualname__, "module": kind.__module__, "num_steps": self.num_steps}


_own = object.__getattribute__


class _Closure:
    """What a program gives to `step()` to make the gradients; the step begins after the first call of it.

    In all else it is the program's own: whatever is asked of it is asked of what the program gave. Only `is` and
    `type()` tell the two apart.
    """

    __slots__ = ("__weakref__", "_begin", "_closure", "_tracked", "_was_called")

    _kind: ClassVar[Callable[..., Any]]

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Any:
        """Make what the class of the program's closure makes: `WeakMethod` calls the class of what it is given."""
        return cls._kind(*args, **kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Do what the program's closure does."""
        tracked = _own(self, "_tracked")
        result = _own(self, "_closure")(*args, **kwargs)
        if _own(self, "_was_called"):
            tracked.remark = _REPEATS
        else:
            object.__setattr__(self, "_was_called", True)
            _own(self, "_begin")(tracked)
        return result

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple[Any, ...]:
        """Leave the program's closure in its place, in a pickle and in a deep copy."""
        return getitem, ((_own(self, "_closure"),), 0)

    def __copy__(self) -> Any:
        return copy(_own(self, "_closure"))

    def __getattribute__(self, name: str) -> Any:
        # A pickler asks the object for its, not the class; and who calls `closure.__call__()` calls it.
        is_own = name in ("__call__", "__reduce_ex__")
        return _own(self, name) if is_own else getattr(_own(self, "_closure"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_own(self, "_closure"), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_own(self, "_closure"), name)

    def __dir__(self) -> list[str]:
        return dir(_own(self, "_closure"))

    def __repr__(self) -> str:
        return repr(_own(self, "_closure"))

    def __str__(self) -> str:
        return str(_own(self, "_closure"))

    def __eq__(self, other: object) -> bool:
        return bool(_own(self, "_closure") == other)

    def __hash__(self) -> int:
        return hash(_own(self, "_closure"))


def _bound(stand_in: _Closure, instance: object, _owner: type | None = None) -> Any:
    return stand_in if instance is None else MethodType(stand_in, instance)


def _class_for(kind: type) -> type:
    """Return the class of what takes the place of closures of one kind; functions alone are bound in a class."""
    binding = {"__get__": _bound} if kind is FunctionType else {}
    return type(kind.__name__, (_Closure,), {"__slots__": (), "__module__": kind.__module__, "_kind": kind, **binding})


_STAND_INS = {kind: _class_for(kind) for kind in _FOLLOWED}


def followed(closure: Any, tracked: TrackedOptimizer, *, begin: _Begin) -> Any:
    """Return what to give to `step()` in the closure's place; None for what is no function, which is left as it is."""
    kind = _STAND_INS.get(type(closure))
    if kind is None:
        tracked.remark = _NOT_FOLLOWED
        return None
    stand_in: Any = object.__new__(kind)
    for name, value in (("_closure", closure), ("_tracked", tracked), ("_begin", begin), ("_was_called", False)):
        object.__setattr__(stand_in, name, value)
    return stand_in


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
