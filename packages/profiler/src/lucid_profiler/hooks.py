"""Watches torch: optimizer steps, and the modules whose registered names the digests use.

torch is never imported from here. A finder waits until the program does it, and then registers torch's own global
hooks; they hold modules weakly, and optimizers too but for those that stepped last, which can be read at the end.
What is measured around a step is somebody else's: a fault there ends that measurement, not the program.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary, ref

from lucid_profiler.device_times import DeviceTimes
from lucid_profiler.journal import Guard
from lucid_profiler.ring import RingWriter

MAX_OPTIMIZERS = 8

__all__ = ["MAX_OPTIMIZERS", "TorchHooks", "TrackedOptimizer", "Watcher", "watch_torch"]


class TrackedOptimizer:
    """One optimizer that stepped.

    `optimizer` is None while it is not among those that stepped last. `names` maps the identity of a parameter to its
    qualified name; `device` is the index of the CUDA device that its steps keep busy, None while there is none.
    """

    __slots__ = (
        "alive",
        "begin_ns",
        "device",
        "index",
        "names",
        "num_groups",
        "num_steps",
        "optimizer",
        "pending",
        "repeats_closure",
    )

    def __init__(self, optimizer: Any, *, index: int, on_death: Callable[[Any], None]) -> None:
        self.optimizer = optimizer
        self.alive = ref(optimizer, on_death)
        self.index = index
        self.repeats_closure = False
        self.names: dict[int, str] = {}
        self.num_groups = 0
        self.num_steps = 0
        self.begin_ns = 0
        self.device: int | None = None
        self.pending = False

    def describe(self) -> dict[str, Any]:
        """Return what a report says about the optimizer itself."""
        kind = type(self.optimizer)
        return {"index": self.index, "name": kind.__qualname__, "module": kind.__module__, "num_steps": self.num_steps}


class _Closure:
    """What a program gives to `step()` to make the gradients; the step begins after the first call of it."""

    def __init__(
        self, closure: Callable[[], Any], tracked: TrackedOptimizer, *, begin: Callable[[TrackedOptimizer], None]
    ) -> None:
        self._closure = closure
        self._tracked = tracked
        self._begin = begin
        self._was_called = False

    def __call__(self) -> Any:
        """Do what the program's closure does."""
        result = self._closure()
        if self._was_called:
            self._tracked.repeats_closure = True
        else:
            self._was_called = True
            self._begin(self._tracked)
        return result


Watcher = Callable[[TrackedOptimizer, int], None]
"""Takes an optimizer, and the time at which the last step has ended."""


class TorchHooks:
    """The hooks of one process and what they have seen.

    Args:
        ring_path: file for step records; made at the first step.
        guard: counts the agent's faults.
        times: measures the device's side of each step; None for no such measurement.
    """

    def __init__(self, ring_path: Path, *, guard: Guard, times: DeviceTimes | None = None) -> None:
        self.num_steps = 0
        self.last_end_ns = 0
        self._guard = guard
        self._ring_path = ring_path
        self._ring: RingWriter | None = None
        self._times = times
        self._is_timed = times is not None
        self._watchers: list[Watcher] = []
        self._device_watchers: list[Watcher] = []
        self._begin_watchers: list[Watcher] = []
        self._is_cuda_in_use: Callable[[], bool] = bool
        self._active = True
        self._num_adopted = 0
        self._tracked: dict[int, TrackedOptimizer] = {}  # every living one, by identity
        self._kept: list[TrackedOptimizer] = []  # those whose optimizer is held, which are at most MAX_OPTIMIZERS
        self._modules: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._handles: list[Any] = []

    def install(self) -> None:
        """Register the global hooks of the torch that has just been imported."""
        with self._guard:
            self._is_cuda_in_use = sys.modules["torch"].cuda.is_initialized
            optimizer = sys.modules["torch.optim.optimizer"]
            module = sys.modules["torch.nn.modules.module"]
            self._handles += [
                optimizer.register_optimizer_step_pre_hook(self._before_step),
                optimizer.register_optimizer_step_post_hook(self._after_step),
                module.register_module_parameter_registration_hook(self._on_registration),
                module.register_module_module_registration_hook(self._on_registration),
            ]

    def watch(self, watcher: Watcher, *, needs_device: bool = False) -> None:
        """Call `watcher` after each step, after its end was taken; it is called no more once it has raised.

        With `needs_device` only after steps of optimizers that keep a CUDA device busy.
        """
        (self._device_watchers if needs_device else self._watchers).append(watcher)

    def watch_begin(self, watcher: Watcher) -> None:
        """Call `watcher` before each step, with the time at which the step before ended, 0 before the first."""
        self._begin_watchers.append(watcher)

    def abandon(self) -> None:
        """Take the hooks away and leave the rest as it is; in a forked child nothing of CUDA may be freed."""
        self._active = False
        with self._guard:
            for handle in self._handles:
                handle.remove()
        self._handles.clear()

    def deactivate(self) -> None:
        """Take the hooks away and let go of everything, for the end of the process."""
        self.abandon()
        self._tracked.clear()
        self._kept.clear()
        self._watchers.clear()
        self._device_watchers.clear()
        self._begin_watchers.clear()
        self._times = self._ring = None

    def optimizers(self) -> list[TrackedOptimizer]:
        """Return the optimizers that stepped, in the order of their first step; the last eight of them."""
        return sorted((tracked for tracked in self._kept if tracked.num_steps), key=lambda tracked: tracked.index)

    def parameter_names(self, *, starting: TrackedOptimizer | None = None) -> dict[int, str]:
        """Name every parameter of those optimizers, by identity; of equal names the later get their optimizer's.

        Args:
            starting: An optimizer that counts as well although its first step is still to come.
        """
        names: dict[int, str] = {}
        taken: set[str] = set()
        optimizers = self.optimizers()
        if starting is not None and not starting.num_steps:
            optimizers.append(starting)
        for tracked in optimizers:
            for parameter, own_name, place in _parameters(tracked):
                if id(parameter) not in names:
                    name = own_name or tracked.names.get(id(parameter), place)
                    candidates = (name, f"optimizer{tracked.index}.{name}")
                    names[id(parameter)] = next((one for one in candidates if one not in taken), place)
                    taken.add(names[id(parameter)])
        return names

    def devices(self) -> list[int]:
        """Return the CUDA devices that the optimizers of `optimizers()` keep busy."""
        return sorted({tracked.device for tracked in self.optimizers() if tracked.device is not None})

    def settle(self) -> DeviceTimes | None:
        """Take the device's side of the steps that it has finished; return the measurement, None if it saw no step."""
        if self._times is None or not self._times.devices():
            return None
        if self._is_timed:
            with self._guard:
                self._times.settle()
        return self._times

    def notes(self) -> list[str]:
        """Say what a reader of the report has to know about the steps."""
        notes = [
            f"optimizer {tracked.index} calls its closure again within a step: its step time includes the later calls"
            for tracked in self.optimizers()
            if tracked.repeats_closure
        ]
        if self._num_adopted > MAX_OPTIMIZERS:
            notes.append(f"{self._num_adopted} optimizers stepped: digests cover the last {MAX_OPTIMIZERS}")
        return notes

    def _on_registration(self, module: Any, _name: str, value: Any) -> None:
        with self._guard:
            self._modules[id(module)] = module
            if hasattr(value, "named_parameters"):
                self._modules[id(value)] = value

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Begin a step; one that is given a closure begins when that has made the gradients."""
        tracked = self._tracked.get(id(optimizer))
        if tracked is None or tracked.optimizer is None or len(optimizer.param_groups) != tracked.num_groups:
            with self._guard:
                tracked = self._adopt(optimizer, tracked)
            if tracked is None:
                return None
        if len(args) > 1 and callable(args[1]):  # the first positional argument is the optimizer itself
            return (args[0], self._followed(tracked, args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._followed(tracked, kwargs["closure"])}
        self._begin(tracked)
        return None

    def _followed(self, tracked: TrackedOptimizer, closure: Callable[[], Any]) -> "_Closure":
        """Return a closure that begins the step; of a step() that calls its parent's, it is the outer one's."""
        if isinstance(closure, _Closure):
            return closure
        self._begin(tracked, is_told=False)  # the closure may never be called
        return _Closure(closure, tracked, begin=self._begin)

    def _begin(self, tracked: TrackedOptimizer, *, is_told: bool = True) -> None:
        tracked.pending = True
        if tracked.device is None and self._is_cuda_in_use():
            self._find_device(tracked)
        if tracked.device is not None:
            self._time(tracked, tracked.device, is_end=False)
        if is_told and self._begin_watchers:
            self._tell(self._begin_watchers, tracked, self.last_end_ns)
        tracked.begin_ns = time.monotonic_ns()

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        end_ns = time.monotonic_ns()
        tracked = self._tracked.get(id(optimizer))
        # Not pending: the outer end of a step() that calls its parent's step(). None: too many stepped within this one.
        if tracked is None or not tracked.pending or tracked.optimizer is None:
            return
        tracked.pending = False
        tracked.num_steps = step = tracked.num_steps + 1
        self.num_steps += 1
        self.last_end_ns = end_ns
        if self._ring is not None:
            self._ring.write(tracked.begin_ns, end_ns, tracked.index, step=step)
        if tracked.device is not None:
            self._time(tracked, tracked.device, is_end=True)
            self._tell(self._device_watchers, tracked, end_ns)
        if self._watchers:
            self._tell(self._watchers, tracked, end_ns)

    def _tell(self, watchers: list[Watcher], tracked: TrackedOptimizer, end_ns: int) -> None:
        for watcher in tuple(watchers):
            with self._guard:
                watcher(tracked, end_ns)
                continue
            watchers.remove(watcher)

    def _time(self, tracked: TrackedOptimizer, device: int, *, is_end: bool) -> None:
        """Let the device note one end of the step, on the stream that is current there."""
        times = self._times
        if times is None or not self._is_timed:
            return
        with self._guard:
            cuda = sys.modules["torch"].cuda
            with nullcontext() if cuda.current_device() == device else cuda.device(device):
                if is_end:
                    times.end(tracked.index, device=device, step=tracked.num_steps, begin_ns=tracked.begin_ns)
                else:
                    times.begin(tracked.index, device=device)
            return
        self._is_timed = False

    def _find_device(self, tracked: TrackedOptimizer) -> None:
        """Find the device that an optimizer keeps busy; what has none is asked about ever more rarely."""
        if tracked.num_steps & (tracked.num_steps - 1) == 0:
            with self._guard:
                tracked.device = _device_in_use(tracked.optimizer)

    def _adopt(self, optimizer: Any, tracked: TrackedOptimizer | None) -> TrackedOptimizer | None:
        """Begin to follow an optimizer, hold it again, or name the parameters of one that has new groups."""
        if not self._active:
            return None
        if tracked is None:
            if not self._num_adopted:
                with self._guard:
                    self._ring = RingWriter(self._ring_path)
            identity = id(optimizer)
            on_death = partial(self._forget, identity)
            tracked = self._tracked[identity] = TrackedOptimizer(optimizer, index=self._num_adopted, on_death=on_death)
            self._num_adopted += 1
        tracked.optimizer = optimizer
        if tracked not in self._kept:
            if len(self._kept) == MAX_OPTIMIZERS:
                oldest = min(self._kept, key=lambda one: (one.pending, one.begin_ns))
                self._kept.remove(oldest)
                oldest.optimizer = None
            self._kept.append(tracked)
        if len(optimizer.param_groups) != tracked.num_groups:
            tracked.num_groups = len(optimizer.param_groups)
            wanted = {id(parameter) for parameter, _, _ in _parameters(tracked)}
            tracked.names.update(_qualified_names(list(self._modules.values()), wanted))
        return tracked

    def _forget(self, identity: int, _reference: Any) -> None:
        """Drop an optimizer that is no more, before another can have its identity."""
        self._tracked.pop(identity, None)


def _device_in_use(optimizer: Any) -> int | None:
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


def _parameters(tracked: TrackedOptimizer) -> Iterator[tuple[Any, str | None, str]]:
    """Yield each parameter with the name that its group gives it, and with its place."""
    for group_index, group in enumerate(tracked.optimizer.param_groups):
        own_names = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            own_name = str(own_names[index]) if own_names and len(own_names) == len(group["params"]) else None
            yield parameter, own_name, f"optimizer{tracked.index}.group{group_index}.param{index}"


def _qualified_names(modules: list[Any], wanted: set[int]) -> dict[int, str]:
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


class _TorchFinder(MetaPathFinder):
    """Finds nothing itself: it lets the other finders find torch, and hears when torch has been executed."""

    def __init__(self, hooks: TorchHooks) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                self._listen(spec.loader)
                return spec
        return None

    def _listen(self, loader: Any) -> None:
        def exec_module(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            loader.exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._hooks.install()

        if hasattr(loader, "__dict__") and hasattr(loader, "exec_module"):
            loader.__dict__["exec_module"] = exec_module


def watch_torch(hooks: TorchHooks) -> None:
    """Install `hooks` when the program has imported torch, or now if it already has."""
    if "torch" in sys.modules:
        hooks.install()
    else:
        sys.meta_path.insert(0, _TorchFinder(hooks))
