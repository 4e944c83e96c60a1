"""Watches torch: optimizer steps, and the modules whose registered names the digests use.

torch is never imported from here. When the program has done it, torch's own global hooks are registered; they hold
modules weakly, and optimizers too but for those that stepped last, which can be read at the end.
What is measured around a step is somebody else's: a fault there ends that measurement, not the program.
"""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import RLock, get_ident
from typing import Any
from weakref import WeakValueDictionary

from lucid_profiler.device_times import DeviceTimes
from lucid_profiler.journal import Guard
from lucid_profiler.loader_waits import LoaderWaits
from lucid_profiler.ring import RingWriter
from lucid_profiler.tracking import (
    Root,
    TrackedOptimizer,
    devices_in_use,
    followed,
    is_within_step,
    named_roots,
    num_elements,
    parameters,
)

MAX_OPTIMIZERS = 8

__all__ = ["MAX_OPTIMIZERS", "TorchHooks", "Watcher", "is_compiling"]


Watcher = Callable[[TrackedOptimizer, int], None]
"""Takes an optimizer, and the time at which the last step has ended."""


class TorchHooks:
    """The hooks of one process and what they have seen.

    Args:
        ring_path: file for step records; made at the first step.
        guard: counts the agent's faults.
        times: measures the device's side of each step; None for no such measurement.
        waits: measures the waits for batches; None for no such measurement.
    """

    def __init__(
        self, ring_path: Path, *, guard: Guard, times: DeviceTimes | None = None, waits: LoaderWaits | None = None
    ) -> None:
        self.num_steps = 0
        self.last_end_ns = 0
        self._guard = guard
        self._ring_path = ring_path
        self._ring: RingWriter | None = None
        self._times = times
        self._is_timed = times is not None
        self._waits = waits
        self._watchers: list[Watcher] = []
        self._device_watchers: list[Watcher] = []
        self._begin_watchers: list[Watcher] = []
        self._is_cuda_in_use: Callable[[], bool] = bool
        self._active = True
        self._adopting = RLock()  # which a signal's handler may ask for again
        self._num_adopted = 0
        self._num_gone = 0
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
            on_registration = _unless(is_compiling(), self._on_registration)
            self._handles += [
                optimizer.register_optimizer_step_pre_hook(self._before_step),
                optimizer.register_optimizer_step_post_hook(self._after_step),
                module.register_module_parameter_registration_hook(on_registration),
                module.register_module_module_registration_hook(on_registration),
            ]
            if self._waits is not None:
                self._waits.install()
                self._handles.append(self._waits)

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

    def hold_living(self) -> None:
        """Hold every optimizer that is alive, however many there are; for the end of the process."""
        if len(self._tracked) > MAX_OPTIMIZERS:
            gc.collect()  # which of those in cycles are still there would else be the collector's whim
        for tracked in list(self._tracked.values()):  # one that is collected meanwhile is taken out
            tracked.optimizer = tracked.alive()
            if tracked not in self._kept and tracked.optimizer is not None:
                self._kept.append(tracked)

    def optimizers(self) -> list[TrackedOptimizer]:
        """Return the optimizers that stepped and are held, in the order of their first step."""
        return sorted((tracked for tracked in self._kept if tracked.num_steps), key=lambda tracked: tracked.index)

    def parameter_names(self, *, starting: TrackedOptimizer | None = None, is_anew: bool = False) -> dict[int, str]:
        """Name every parameter of those optimizers, by identity; of equal names the later get their optimizer's.

        Args:
            starting: An optimizer that counts as well although its first step is still to come.
            is_anew: Look again for those that have a name, since another may have got the identity of one that is gone.
        """
        names: dict[int, str] = {}
        taken: set[str] = set()
        optimizers = self.optimizers()
        if starting is not None and not starting.num_steps:
            optimizers.append(starting)
        self._name([tracked for tracked in optimizers if is_anew or tracked.has_unnamed()], keeps_names=True)
        for tracked in optimizers:
            for parameter, own_name, place in parameters(tracked):
                if id(parameter) not in names:
                    found = tracked.names.get(id(parameter))
                    name = own_name or (place if found is None else found.text)
                    candidates = (name, f"optimizer{tracked.index}.{name}")
                    names[id(parameter)] = next((one for one in candidates if one not in taken), place)
                    taken.add(names[id(parameter)])
        return names

    def devices(self) -> list[int]:
        """Return the CUDA devices that the optimizers of `optimizers()` keep busy."""
        return sorted({device for tracked in self.optimizers() for device in tracked.devices})

    @property
    def num_waits(self) -> int:
        """How often the program waited for a batch."""
        return 0 if self._waits is None else self._waits.num_waits

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
        return [
            f"optimizer {tracked.index} {tracked.remark}" for tracked in self.optimizers() if tracked.remark is not None
        ]

    def uncovered(self) -> list[str]:
        """Say what was trained and can be read no more."""
        found = [f"optimizer {tracked.index} {words}" for tracked in self.optimizers() if (words := _emptied(tracked))]
        if self._num_gone:
            found.append(f"{self._num_gone} of {self._num_adopted} optimizers were gone before the end of the process")
        return found

    def _on_registration(self, module: Any, _name: str, value: Any) -> None:
        with self._guard:
            self._modules[id(module)] = module
            if hasattr(value, "named_parameters"):
                self._modules[id(value)] = value

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Begin a step; one that is given a closure begins when that has made the gradients."""
        try:
            tracked = self._tracked.get(id(optimizer))
            if tracked is None or tracked.optimizer is None or len(optimizer.param_groups) != tracked.num_groups:
                tracked = self._adopt(optimizer, tracked)
                if tracked is None:
                    return None
            # Still pending: the step before raised, or this one is called within it. Torch's wrapper calls the hooks.
            if tracked.pending:
                if is_within_step(optimizer, sys._getframe(1)):  # noqa: SLF001 - no other way to it
                    tracked.is_nested = True
                    return None
                thread = tracked.thread
                if thread != get_ident() and is_within_step(optimizer, sys._getframe(1), thread=thread):  # noqa: SLF001
                    tracked.note_threads()
            tracked.is_nested = False
            if len(args) > 1 and callable(args[1]):  # the first positional argument is the optimizer itself
                return (args[0], self._begin_behind(args[1], tracked), *args[2:]), kwargs
            if callable(kwargs.get("closure")):
                return args, {**kwargs, "closure": self._begin_behind(kwargs["closure"], tracked)}
            self._begin(tracked)
        except Exception as error:  # as a Guard does, without the cost of a context manager
            if not self._guard.takes(error):
                raise
        return None

    def _begin_behind(self, closure: Any, tracked: TrackedOptimizer) -> Any:
        """Begin the step behind the closure, or now where it cannot be followed; return what takes its place."""
        stand_in = followed(closure, tracked, begin=self._begin)
        self._begin(tracked, is_told=stand_in is None)  # also where it could: it may never be called
        return closure if stand_in is None else stand_in

    def _begin(self, tracked: TrackedOptimizer, *, is_told: bool = True) -> None:
        tracked.pending = True
        tracked.thread = get_ident()
        if not tracked.devices and self._is_cuda_in_use():
            self._find_devices(tracked)
        if tracked.devices:
            self._time(tracked, tracked.devices[0], is_end=False)
        if is_told and self._begin_watchers:
            self._tell(self._begin_watchers, tracked, self.last_end_ns)
        tracked.begin_ns = time.monotonic_ns()

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        end_ns = time.monotonic_ns()
        try:
            tracked = self._tracked.get(id(optimizer))
            # None: too many stepped within this one.
            if tracked is None or not tracked.pending or tracked.optimizer is None:
                return
            if tracked.is_nested and is_within_step(optimizer, sys._getframe(1)):  # noqa: SLF001 - as above
                return
            tracked.pending = False
            tracked.num_steps = step = tracked.num_steps + 1
            self.num_steps += 1
            self.last_end_ns = end_ns
            if self._ring is not None:
                self._ring.write(tracked.begin_ns, end_ns, tracked.index, step=step)
            tracked.num_states = len(getattr(optimizer, "state", ()))
            if not tracked.is_counted:
                with self._guard:
                    tracked.count()
            if tracked.devices:
                self._time(tracked, tracked.devices[0], is_end=True)
                self._tell(self._device_watchers, tracked, end_ns)
            if self._watchers:
                self._tell(self._watchers, tracked, end_ns)
        except Exception as error:  # as above
            if not self._guard.takes(error):
                raise

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

    def _find_devices(self, tracked: TrackedOptimizer) -> None:
        """Find the devices that an optimizer keeps busy; what has none is asked about ever more rarely."""
        if tracked.num_steps & (tracked.num_steps - 1) == 0:
            with self._guard:
                tracked.devices = devices_in_use(tracked.optimizer)

    def _adopt(self, optimizer: Any, tracked: TrackedOptimizer | None) -> TrackedOptimizer | None:
        """Begin to follow an optimizer, hold it again, or name the parameters of one that has new groups."""
        with self._adopting:  # several threads may step one
            return self._follow(optimizer, tracked or self._tracked.get(id(optimizer)))

    def _follow(self, optimizer: Any, tracked: TrackedOptimizer | None) -> TrackedOptimizer | None:
        # A class without groups passes its steps on to another optimizer, which is followed.
        if not self._active or not hasattr(optimizer, "param_groups"):
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
            self._name([tracked], keeps_names=False)
            if tracked.devices:  # of which there may be more now
                tracked.devices = devices_in_use(optimizer)
            tracked.is_counted = False
            tracked.num_groups = len(optimizer.param_groups)
        return tracked

    def _name(self, some: Sequence[TrackedOptimizer], *, keeps_names: bool) -> None:
        """Name the parameters of some optimizers; where the program's modules do not let that be done, names stay."""
        if not some:
            return
        roots: list[Root] = []
        with self._guard:
            roots = named_roots(list(self._modules.values()))
        for tracked in some:
            tracked.name(roots, keeps_names=keeps_names)

    def _forget(self, identity: int, _reference: Any) -> None:
        """Drop an optimizer that is no more, before another can have its identity."""
        tracked = self._tracked.pop(identity, None)
        self._num_gone += tracked is not None and tracked.num_steps > 0


def is_compiling() -> Callable[[], bool]:
    """Return torch's own function that says whether it traces the program; where it has none, one that says no."""
    found: Callable[[], bool] = getattr(getattr(sys.modules["torch"], "compiler", None), "is_compiling", bool)
    return found


def _emptied(tracked: TrackedOptimizer) -> str | None:
    """Say what an optimizer has lost since it stepped, groups, parameters, their values or state; None for nothing."""
    groups = tracked.optimizer.param_groups
    own = {id(one): one for one, _, _ in parameters(tracked)}.values()
    num_states = len(getattr(tracked.optimizer, "state", ()))
    if len(groups) < tracked.num_groups or not own or num_states < tracked.num_states:
        return "was emptied after its last step"
    num_left = max(tracked.num_left(), tracked.num_trained - len(own))
    if num_left > 0:
        return f"trained {num_left} parameter{'s' * (num_left > 1)} that it has no more"
    if num_elements(own) < tracked.num_elements:
        return "has parameters that are smaller than when it trained them"
    return None


def _unless(condition: Callable[[], bool], hook: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
    """Return a hook that does nothing where a condition holds: torch, when it traces a program, inlines its hooks."""

    def call(module: Any, name: str, value: Any) -> None:
        if not condition():
            hook(module, name, value)

    return call
