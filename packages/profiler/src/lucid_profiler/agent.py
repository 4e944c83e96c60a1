"""Starts recording in a process that `lucid profile run` began; let in by `awaited` when the program needs it.

The agent prints nothing and raises nothing. Forked children record nothing, because their parent does; processes that
are started anew have an agent of their own, and write only if they train or call the public functions. So has the
program that a process executes in its own place, under the same pid.
"""

from functools import partial
from pathlib import Path

from lucid_profiler import api
from lucid_profiler.awaited import STATE_VARIABLE, AwaitedAgent
from lucid_profiler.device_times import DeviceTimes
from lucid_profiler.hooks import TorchHooks, is_compiling
from lucid_profiler.journal import Guard
from lucid_profiler.loader_waits import LoaderWaits
from lucid_profiler.session import ProcessSession

STEPS_VARIABLE = "LUCID_KERNELS"  # asks for a trace of so many steps; set for traced processes only
DIGESTS_VARIABLE = "LUCID_STEP_DIGESTS"  # asks for digests around every step; set for processes that are never timed

__all__ = ["DIGESTS_VARIABLE", "STEPS_VARIABLE", "start"]


def start(awaited: AwaitedAgent) -> None:
    """Begin the session of this process: wait for torch, and finish at exit."""
    path, name = Path(awaited.run_dir), awaited.name
    guard = Guard()
    hooks = TorchHooks(
        path / f"steps-{name}.ring",
        guard=guard,
        times=DeviceTimes(path / f"device-{name}.ring"),
        waits=LoaderWaits(path / f"waits-{name}.ring", guard=guard),
    )
    session = ProcessSession(
        path, hooks=hooks, guard=guard, name=name, begin_ns=awaited.begin_ns, environ=awaited.settings
    )
    awaited.in_child(session.deactivate)
    awaited.at_exit(session.finish)
    if not awaited.settings.keys().isdisjoint((STEPS_VARIABLE, STATE_VARIABLE, DIGESTS_VARIABLE)):
        with guard:
            from lucid_profiler.on_request import add_requested  # noqa: PLC0415 - few processes are asked for more

            add_requested(awaited, hooks=hooks, guard=guard, session=session)
    awaited.on_torch(hooks.install)
    awaited.on_torch(partial(_attach_compiler, guard))
    api.attach(session)


def _attach_compiler(guard: Guard) -> None:
    with guard:
        api.attach_compiler(is_compiling())
