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

_SEVERAL_THREADS = "is stepped by several threads at once: not all of its steps are recorded"
# Wrappers keep a module under these names, and a parameter is the same one within.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}

__all__ = [
    "TrackedOptimizer",
    "devices_in_use",
    "followed",
    "is_within_step",
    "num_elements",
    "parameters",
    "qualified_names",
]

_Begin = Callable[["TrackedOptimizer"], None]


class TrackedOptimizer:
    """One optimizer that stepped.

    `optimizer` is None while it is not among those that stepped last. `names` maps the identity of a parameter to its
    qualified name; `devices` are the indices of the CUDA devices that its steps keep busy, the one first whose time is
    taken;
    `num_states` is how many entries its state had after its last step; `num_parameters` and `num_elements` are the
    most that its groups had; `is_nested` says that the step under way calls itself, as one does that calls its
    parent's; `thread` began it; `remark` is what a reader has to know of its step times.
    """

    __slots__ = (
        "alive",
        "begin_ns",
        "devices",
        "index",
        "is_nested",
        "names",
        "num_elements",
        "num_groups",
        "num_parameters",
        "num_states",
        "num_steps",
        "optimizer",
        "pending",
        "remark",
        "thread",
    )

    def __init__(self, optimizer: Any, *, index: int, on_death: Callable[[Any], None]) -> None:
        self.optimizer = optimizer
        self.alive = ref(optimizer, on_death)
        self.index = index
        self.remark: str | None = None
        self.names: dict[int, str] = {}
        self.num_elements = 0
        self.num_groups = 0
        self.num_parameters = 0
        self.num_steps = 0
        self.num_states = 0
        self.begin_ns = 0
        self.devices: tuple[int, ...] = ()
        self.pending = False
        self.is_nested = False
        self.thread = 0

    def note_threads(self) -> None:
        """Note that another thread steps it while one does."""
        self.remark = _SEVERAL_THREADS

    def name(self, modules: list[Any]) -> None:
        """Name each parameter as it is called below the outermost of these modules; of one in none the name stays."""
        wanted = {id(parameter) for parameter, _, _ in parameters(self)}
        names = {**self.names, **qualified_names(modules, wanted)}
        # The identity of a parameter that has left may be another's by now.
        self.names = {identity: name for identity, name in names.items() if identity in wanted}

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


def devices_in_use(optimizer: Any) -> tuple[int, ...]:
    """Return the devices of the CUDA parameters in their order; without any, the current one if it holds memory here.

    Nothing here makes a context on a device: one with a tensor or with memory has it.
    """
    cuda = sys.modules["torch"].cuda
    own = (parameter.device for group in optimizer.param_groups for parameter in group["params"])
    found = tuple(dict.fromkeys(int(device.index) for device in own if device.type == "cuda"))
    current = int(cuda.current_device())
    return found or ((current,) if cuda.memory_reserved(current) > 0 else ())


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


def num_elements(optimizer: Any) -> int:
    """Return how many numbers the parameters of an optimizer hold."""
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


def qualified_names(modules: list[Any], wanted: set[int]) -> dict[int, str]:
    """Return the name of each wanted parameter below its outermost module, without what only wraps modules.

    When the parameters belong to several outermost modules, each name begins with the class and place of its own.
    """
    inner = {id(child) for module in modules for child in module._modules.values()}  # noqa: SLF001 - torch's own map
    found: list[tuple[Any, dict[int, str]]] = []
    for root in (_unwrapped(module) for module in modules if id(module) not in inner):
        names = {
            id(p): _without_wrappers(name) for name, p in reversed(list(root.named_parameters())) if id(p) in wanted
        }
        if names:
            found.append((root, names))
    if len(found) == 1:
        return found[0][1]
    return {
        identity: f"{type(root).__name__}{place}.{name}"
        for place, (root, names) in reversed(list(enumerate(found)))
        for identity, name in names.items()
    }


def _unwrapped(module: Any) -> Any:
    """Return what a wrapper of a whole model is around: compiled or distributed, its parameters are the same."""
    while (held := _WRAPPERS.get(type(module).__name__)) is not None and hasattr(module, held):
        module = getattr(module, held)
    return module


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPED) or name
