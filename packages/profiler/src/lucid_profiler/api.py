"""The functions that a script calls, and the session of this process that they speak to, if there is one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from lucid_profiler import awaited

__all__ = ["Session", "attach", "attach_compiler", "fit", "loss", "mark", "state"]


class Session(Protocol):
    """What the functions below need of the agent's session."""

    active: bool

    def fit(self) -> AbstractContextManager[None]:
        """Return the timed interval."""

    def loss(self, value: Any) -> None:
        """Judge `value`."""

    def mark(self, name: str) -> None:
        """Begin the phase `name`."""

    def state(self, part: str, value: Any) -> None:
        """Record the digest of `value`."""


_session: Session | None = None
_is_compiling: Callable[[], bool] = bool
"""Whether torch traces the program: it inlines these functions, and could not inline what they do for a session."""


def fit() -> AbstractContextManager[None]:
    """Return a context manager around the work that is to be timed.

    Under lucid its two ends are the run's wall interval. When CUDA is in use they are taken after a synchronisation of
    the current device, if the process has a context there, and of every other on which it has memory. A run has one
    timed interval: the first outermost one. Entering it again, inside or after the first, changes nothing, and the
    report notes how often; put one `fit()` around all epochs and `mark()` the phases. It never raises, and outside
    lucid nothing happens. Neither this nor any of the functions below does anything inside a function that
    `torch.compile` has compiled.
    """
    if _is_compiling():
        return nullcontext()
    session = _found()
    if session is None or not session.active:
        return nullcontext()
    return session.fit()


def loss(value: Any) -> None:
    """Hand over the loss of a step: the report says in which one it first was not finite.

    Call it once a step, also inside `fit()`. A tensor on a device is judged there, by a few small kernels on the
    current stream; nothing waits for them, and the value is not kept. Inside the capture of a CUDA graph nothing is
    judged. Steps are numbered by the calls, from 1. This function never raises.

    Args:
        value: a tensor of any shape, or a number; it is only read.
    """
    if _is_compiling():
        return
    session = _found()
    if session is not None and session.active:
        session.loss(value)


def mark(name: str) -> None:
    """Say that the run is in the phase `name` from here on, until the next mark or the end of the process.

    A phase that is begun again goes on: the report adds up what has the same name. Nothing is synchronised, so work
    that is queued on a device counts in the phase that waits for it. A name is a text of 1 to 200 characters; the
    report notes a call with another one. This function never raises.
    """
    if _is_compiling():
        return
    session = _found()
    if session is not None and session.active:
        session.mark(name)


def state(part: str, value: Any) -> None:
    """Record the digest of one part of the training state, such as "model", "ema" or "losses".

    Call it after `fit()`: a digest takes time, so inside the timed interval it is refused, and the report notes that.
    When a part is given more than once, the last value counts. This function never raises.

    Args:
        part: name of the part, a text of 1 to 200 characters; "parameters" and "optimizer_state" are taken by the agent
            itself.
        value: a mapping of tensors, numbers and texts, nested or not, a tensor, or an object with `state_dict()`.
    """
    if _is_compiling():
        return
    session = _found()
    if session is not None and session.active:
        session.state(part, value)


def attach(session: Session | None) -> None:
    """Make `session` the one that the functions above speak to."""
    global _session  # noqa: PLW0603 - a process has one session, and the public functions take none
    _session = session


def attach_compiler(is_compiling: Callable[[], bool]) -> None:
    """Do nothing in the functions above where `is_compiling` is true: torch's own, which its compiler knows."""
    global _is_compiling  # noqa: PLW0603 - as above
    _is_compiling = is_compiling


def _found() -> Session | None:
    """Return the session of this process; an agent that still waits comes in now."""
    if _session is None:
        awaited.start_agent()
    return _session
