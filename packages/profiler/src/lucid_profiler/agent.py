"""Starts recording in a process that `lucid profile run` began; loaded by `_startup/sitecustomize.py`.

The agent prints nothing and raises nothing. Forked children record nothing, because their parent does; processes that
are started anew have an agent of their own, and write only if they train or call the public functions.
"""

import atexit
import os
from pathlib import Path

from lucid_profiler import api
from lucid_profiler.hooks import TorchHooks, watch_torch
from lucid_profiler.journal import LOADED_SUFFIX, Guard
from lucid_profiler.session import ProcessSession

__all__ = ["start"]


def start(run_dir: str) -> ProcessSession:
    """Begin the session of this process: mark the run directory, wait for torch, and finish at exit.

    Raises:
        OSError: the run directory cannot be written.
    """
    pid = os.getpid()
    path = Path(run_dir)
    (path / f"agent-{pid}{LOADED_SUFFIX}").touch(exist_ok=True)
    guard = Guard()
    hooks = TorchHooks(path / f"steps-{pid}.ring", guard=guard)
    session = ProcessSession(path, hooks=hooks, guard=guard)
    api.attach(session)
    watch_torch(hooks)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=session.deactivate)
    atexit.register(session.finish)
    return session
