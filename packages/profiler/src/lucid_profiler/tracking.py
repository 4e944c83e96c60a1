"""What is known of an optimizer that stepped: where it works, when a step of it begins, how its parameters are called.

Nothing here imports torch; what is looked at was made by it.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from operator import getitem
from types import FrameType, FunctionType, MethodType
from typing import Any, ClassVar, NamedTuple, SupportsIndex
from weakref import ref

_FOLLOWED = (FunctionType, MethodType, partial)
_REPEATS = "calls its closure again within a step: its step time includes the later calls"
_NOT_FOLLOWED = "is given something callable that is no function: its step time includes what that does"

_SEVERAL_THREADS = "is stepped by several threads at once: not all of its steps are recorded"
# Wrappers keep a module under these names, and a parameter is the same one within.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}

__all__ = [
    "Name",
    "Root",
    "TrackedOptimizer",
    "devices_in_use",
    "followed",
    "is_within_step",
    "named_roots",
    "num_elements",
    "parameters",
    "qualified_names",
]

_Begin = Callable[["TrackedOptimizer"], None]


class Root(NamedTuple):
    """An outermost module: its class, and the names of its parameters by identity."""

    kind: str
    names: dict[int, str]


class Name(NamedTuple):
    """What a parameter is called in its outermost module, and with that one's class and place where that is needed."""

    within: str
    text: str


class TrackedOptimizer:
    """One optimizer that stepped.

    `optimizer` is None while it is not among those that stepped last. `names` maps the identity of a parameter to its
    name, None where it has none; `devices` are the indices of the CUDA devices that its steps keep busy, the
    one first whose time is taken; `num_states` is how many entries its state had after its last step; `num_trained` and
    `num_elements` are the most parameters that it trained and what these held, which `is_counted` for its groups;
    `is_nested` says that the step under way calls itself, as one does that calls its parent's; `thread` began it;
    `remark` is what a reader has to know of its step times.
    """

    __slots__ = (
        "alive",
        "begin_ns",
        "devices",
        "index",
        "is_counted",
        "is_nested",
        "names",
        "num_elements",
        "num_groups",
        "num_states",
        "num_steps",
        "num_trained",
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
        self.names: dict[int, Name | None] = {}
        self.num_elements = 0
        self.num_groups = 0
        self.num_trained = 0
        self.num_steps = 0
        self.num_states = 0
        self.begin_ns = 0
        self.devices: tuple[int, ...] = ()
        self.pending = False
        self.is_counted = False
        self.is_nested = False
        self.thread = 0

    def note_threads(self) -> None:
        """Note that another thread steps it while one does."""
        self.remark = _SEVERAL_THREADS

    def count(self) -> None:
        """Count the parameters that are trained and what they hold, after a step: those that have a gradient now."""
        self.is_counted = True
        trained = [one for one, _, _ in parameters(self) if one.is_leaf and one.grad is not None]
        self.num_trained = max(self.num_trained, len(trained))
        self.num_elements = max(self.num_elements, num_elements(trained))

    def num_left(self) -> int:
        """Return how many parameters with state it has in no group any more."""
        own = {id(parameter) for parameter, _, _ in parameters(self)}
        state = getattr(self.optimizer, "state", {})
        keys = (key for key, value in state.items() if not isinstance(value, Mapping) or value)
        return sum(1 for key in keys if hasattr(key, "grad_fn") and id(key) not in own)

    def name(self, roots: Sequence["Root"], *, keeps_names: bool) -> None:
        """Name each parameter as it is called below the outermost module that it is in, if it is in one.

        Args:
            roots: the outermost modules.
            keeps_names: whether names stay that could be of what is found now.
        """
        wanted = {id(parameter) for parameter, _, _ in parameters(self)}
        found = qualified_names(roots, wanted)
        better = _better if keeps_names else _newer
        self.names = {identity: better(self.names.get(identity), found.get(identity)) for identity in wanted}

    def has_unnamed(self) -> bool:
        """Return whether there are parameters for which no name was looked for."""
        return any(id(parameter) not in self.names for parameter, _, _ in parameters(self))

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


def is_within_step(optimizer: Any, wrapper: FrameType, *, thread: int | None = None) -> bool:
    """Return whether torch's wrapper of `step()` runs within another one for the same optimizer.

    A count of begins and ends would not do: a step that raises has no end.

    Args:
        optimizer: the optimizer.
        wrapper: the frame of torch's wrapper.
        thread: another thread that may be within one, instead of this one.
    """
    # The frames of all threads: the way that Python documents.
    frame = wrapper.f_back if thread is None else sys._current_frames().get(thread)  # noqa: SLF001
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


def num_elements(parameters: Iterable[Any]) -> int:
    """Return how many numbers parameters hold; one that a lazy module has yet to make holds none."""
    total = 0
    for parameter in parameters:
        with suppress(ValueError, RuntimeError):
            total += parameter.numel()
    return total


def named_roots(modules: list[Any]) -> list[Root]:
    """Return the outermost of modules, each with the names of its parameters, without what only wraps modules.

    What the program's own classes do for that may raise anything.
    """
    inner = {id(child) for module in modules for child in module._modules.values()}  # noqa: SLF001 - torch's own map
    outer = {id(root): root for root in (_unwrapped(module) for module in modules if id(module) not in inner)}
    inside = {id(module) for root in outer.values() for module in root.modules() if module is not root}
    return [_named(root) for root in outer.values() if id(root) not in inside]


def _named(root: Any) -> Root:
    named = reversed(list(root.named_parameters()))  # of two names the first counts
    return Root(type(root).__name__, {id(parameter): _without_wrappers(name) for name, parameter in named})


def qualified_names(roots: Sequence[Root], wanted: Collection[int]) -> dict[int, Name]:
    """Return the name of each wanted parameter below its outermost module.

    When the parameters belong to several outermost modules, each name begins with the class and place of its own.
    """
    found = []
    for root in roots:
        names = {identity: root.names[identity] for identity in wanted if identity in root.names}
        if names:
            found.append((root, names))
    return {
        identity: Name(name, name if len(found) == 1 else f"{root.kind}{place}.{name}")
        for place, (root, names) in reversed(list(enumerate(found)))
        for identity, name in names.items()
    }


def _newer(old: Name | None, new: Name | None) -> Name | None:
    return new or old


def _better(old: Name | None, new: Name | None) -> Name | None:
    """Return the name that a parameter keeps: the first, unless it cannot be of what is found now.

    Further modules around a model make its names longer and give it another place for as long as they live; the
    identity of a parameter that is gone may be another's.
    """
    if old is None or new is None:
        return old or new
    short, long = sorted((f".{old.within}", f".{new.within}"), key=len)
    return old if long.endswith(short) else new


def _unwrapped(module: Any) -> Any:
    """Return what a wrapper of a whole model is around: compiled or distributed, its parameters are the same."""
    while hasattr(held := getattr(module, _WRAPPERS.get(type(module).__name__, ""), None), "named_parameters"):
        module = held
    return module


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPED) or name
