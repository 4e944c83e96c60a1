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
from lucid_profiler.loader_waits import LoaderWaits
from lucid_profiler.session import ProcessSession

STEPS_VARIABLE = "LUCID_KERNELS"  # asks for a trace of so many steps; set for traced processes only
STATE_VARIABLE = "LUCID_SAVE_STATE"  # asks for the values behind digests, in the directory that it names
DIGESTS_VARIABLE = "LUCID_STEP_DIGESTS"  # asks for digests around every step; set for processes that are never timed

__all__ = ["DIGESTS_VARIABLE", "STATE_VARIABLE", "STEPS_VARIABLE", "start"]


def start(run_dir: str) -> ProcessSession:
    """Begin the session of this process: mark the run directory, wait for torch, and finish at exit.

    Raises:
        OSError: the run directory cannot be written.
    """
    pid = os.getpid()
    path = Path(run_dir)
    (path / f"agent-{pid}{LOADED_SUFFIX}").touch(exist_ok=True)
    guard = Guard()
    hooks = TorchHooks(
        path / f"steps-{pid}.ring",
        guard=guard,
        times=DeviceTimes(path / f"device-{pid}.ring"),
        waits=LoaderWaits(path / f"waits-{pid}.ring", guard=guard),
    )
    session = ProcessSession(path, hooks=hooks, guard=guard)
    api.attach(session)
    watch_torch(hooks)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=session.deactivate)
    atexit.register(session.finish)
    if STEPS_VARIABLE in os.environ:
        with guard:
            _trace_kernels(path, hooks, guard)
    if STATE_VARIABLE in os.environ or DIGESTS_VARIABLE in os.environ:
        with guard:
            _keep_states(path, hooks, session)
    return session


def _keep_states(path: Path, hooks: TorchHooks, session: ProcessSession) -> None:
    """Save the values behind digests, or digest and save around steps, as the environment asks."""
    from lucid_profiler import saved_state, step_digests  # noqa: PLC0415 - few processes keep states

    if os.environ.get(DIGESTS_VARIABLE) == "1":
        step_digests.watch_steps(hooks, step_digests.StepDigests(path, note=session.note).take)
    saver = saved_state.saver_asked_for(os.environ, session.note)
    if saver is None:
        return
    step = saved_state.save_step_asked_for(os.environ)
    if step is None:
        session.keep = saver.save
        return
    step_digests.watch_steps(hooks, step_digests.StepSaver(saver, step).take)

    def say_if_missed() -> None:
        if session.active and 0 < hooks.num_steps < step:
            session.note(f"nothing was saved of step {step}: the process took {hooks.num_steps} steps")

    atexit.register(say_if_missed)  # before the session closes its journal


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
