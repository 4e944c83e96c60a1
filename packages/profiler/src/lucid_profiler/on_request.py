"""What only some processes are asked for by the environment: kept values, digests around steps, a trace of kernels.

Their files have the name that `awaited` has found for the process.
"""

from pathlib import Path

from lucid_profiler.agent import DIGESTS_VARIABLE, STEPS_VARIABLE
from lucid_profiler.awaited import STATE_VARIABLE, AwaitedAgent
from lucid_profiler.hooks import TorchHooks
from lucid_profiler.journal import Guard
from lucid_profiler.kernel_trace import KernelTrace, steps_asked_for
from lucid_profiler.saved_state import save_step_asked_for, saver_asked_for
from lucid_profiler.session import ProcessSession
from lucid_profiler.step_digests import StepDigests, StepSaver, watch_steps

__all__ = ["add_requested"]


def add_requested(awaited: AwaitedAgent, *, hooks: TorchHooks, guard: Guard, session: ProcessSession) -> None:
    """Do what the environment asks for; a fault is counted in `guard` and ends only what it concerns."""
    if STEPS_VARIABLE in awaited.settings:
        with guard:
            _trace_kernels(awaited, hooks, guard)
    if not awaited.settings.keys().isdisjoint((STATE_VARIABLE, DIGESTS_VARIABLE)):
        with guard:
            _keep_states(awaited, hooks, session)


def _keep_states(awaited: AwaitedAgent, hooks: TorchHooks, session: ProcessSession) -> None:
    """Save the values behind digests, or digest and save around steps, as the environment asks."""
    if awaited.settings.get(DIGESTS_VARIABLE) == "1":
        digests = StepDigests(Path(awaited.run_dir), note=session.note, name=awaited.name)
        watch_steps(hooks, digests.take)
    saver = saver_asked_for(awaited.settings, session.note, process=awaited.name)
    if saver is None:
        return
    step = save_step_asked_for(awaited.settings)
    if step is None:
        session.keep = saver.save
        return
    watch_steps(hooks, StepSaver(saver, step).take)

    def say_if_missed() -> None:
        if session.active and 0 < hooks.num_steps < step:
            session.note(f"nothing was saved of step {step}: the process took {hooks.num_steps} steps")

    awaited.at_exit(say_if_missed)  # before the session closes its journal


def _trace_kernels(awaited: AwaitedAgent, hooks: TorchHooks, guard: Guard) -> None:
    """Trace this process, which is none of those that are timed."""
    num_steps = steps_asked_for(awaited.settings)
    if num_steps is None:
        return
    trace = KernelTrace(Path(awaited.run_dir), name=awaited.name, num_steps=num_steps, guard=guard)
    hooks.watch_begin(lambda tracked, _: trace.before_step(tracked.index))
    hooks.watch(lambda tracked, _: trace.after_step(tracked.index))
    awaited.in_child(trace.deactivate)
    awaited.at_exit(trace.finish)  # before the session, which takes the hooks away
