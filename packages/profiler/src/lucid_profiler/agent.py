"""Starts recording in a process that `lucid profile run` began; loaded by `_startup/sitecustomize.py`.

The agent prints nothing and raises nothing. Forked children record nothing, because their parent does; processes that
are started anew have an agent of their own, and write only if they train or call the public functions.
"""

import atexit
import os
from pathlib import Path

from lucid_profiler import api
from lucid_profiler.device_times import DeviceTimes
from lucid_profiler.hooks import TorchHooks, watch_torch
from lucid_profiler.journal import LOADED_SUFFIX, Guard
from lucid_profiler.session import ProcessSession

STEPS_VARIABLE = "LUCID_KERNELS"  # asks for a trace of so many steps; set for traced processes only

__all__ = ["STEPS_VARIABLE", "start"]


def start(run_dir: str) -> ProcessSession:
    """Begin the session of this process: mark the run directory, wait for torch, and finish at exit.

    Raises:
        OSError: the run directory cannot be written.
    """
    pid = os.getpid()
    path = Path(run_dir)
    (path / f"agent-{pid}{LOADED_SUFFIX}").touch(exist_ok=True)
    guard = Guard()
    hooks = TorchHooks(path / f"steps-{pid}.ring", guard=guard, times=DeviceTimes(path / f"device-{pid}.ring"))
    session = ProcessSession(path, hooks=hooks, guard=guard)
    api.attach(session)
    watch_torch(hooks)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=session.deactivate)
    atexit.register(session.finish)
    if STEPS_VARIABLE in os.environ:
        with guard:
            _trace_kernels(path, hooks, guard)
    return session


def _trace_kernels(path: Path, hooks: TorchHooks, guard: Guard) -> None:
    """Trace this process, which is none of those that are timed."""
    from lucid_profiler.kernel_trace import KernelTrace, steps_asked_for  # noqa: PLC0415 - few processes are traced

    num_steps = steps_asked_for(os.environ)
    if num_steps is None:
        return
    trace = KernelTrace(path, num_steps=num_steps, guard=guard)
    hooks.watch_begin(lambda tracked, _: trace.before_step(tracked.index))
    hooks.watch(lambda tracked, _: trace.after_step(tracked.index))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=trace.deactivate)
    atexit.register(trace.finish)  # before the session, which takes the hooks away
