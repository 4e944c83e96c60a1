"""The smaller capture: the orthogonalisation alone, for classes whose preparation is their own."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from lucid_optim import graphs
from lucid_optim.buckets import orthogonalize_all
from lucid_optim.context import forbidding_mode, needs_graph, numeric_modes
from lucid_optim.newton_schulz import NewtonSchulz
from lucid_optim.report import REASONS

__all__ = ["OrthogonalizationCapture"]

logger = logging.getLogger("lucid_optim")

# A step asks for as many orthogonalisations as it has batches; more than this many kinds are no pattern.
MAX_RECORDINGS = 32


class _Recording:
    """Owned inputs and the graph that orthogonalises them."""

    def __init__(self, updates: Sequence[Tensor], scheme: Callable[[Tensor], Tensor]) -> None:
        self._device = updates[0].device
        with graphs.building(self._device):
            self._home = graphs.Home(self._device)
            self._inputs = [torch.empty_like(update, requires_grad=False) for update in updates]
            self._graph = graphs.record(lambda: orthogonalize_all(self._inputs, scheme), self._device)

    def replay(self, updates: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors; the graph's own are overwritten by the next replay."""
        with graphs.in_order(self._device):
            torch._foreach_copy_(self._inputs, list(updates))
            self._graph.replay()
            results = [torch.empty_like(result) for result in self._graph.result]
            torch._foreach_copy_(results, self._graph.result)
        return results

    def reset(self) -> None:
        self._home.await_last_use()
        self._graph.reset()

    def __del__(self) -> None:
        try:  # noqa: SIM105 - at the end of the interpreter contextlib may be gone
            self._home.await_last_use()
        except Exception:  # noqa: BLE001, S110 - half made, or the interpreter is ending
            pass


class OrthogonalizationCapture:
    """`orthogonalize_all`, replayed from a recording where the same kind of call has come before.

    Attributes:
        recordings: Recordings made.
        replays: Calls that replayed one.
        reasons: Calls that did not, counted by a key of `REASONS`.
    """

    def __init__(self) -> None:
        self.recordings = 0
        self.replays = 0
        self.reasons: Counter[str] = Counter()
        # A recording, or why there is none.
        self._known: OrderedDict[Hashable, _Recording | str] = OrderedDict()

    def __call__(self, updates: Sequence[Tensor], scheme: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Orthogonalise; arguments and results as for `orthogonalize_all`.

        The results never alias those of another call, whether this one was replayed or not.
        """
        if not updates:
            return orthogonalize_all(updates, scheme)
        recording = self._recording(updates, scheme)
        if isinstance(recording, str):
            self.reasons[recording] += 1
            return orthogonalize_all(updates, scheme)
        self.replays += 1
        return recording.replay(updates)

    def _recording(self, updates: Sequence[Tensor], scheme: Callable[[Tensor], Tensor]) -> _Recording | str:
        """Return the recording that serves a call, or the key of `REASONS` for why none does."""
        reason = _ineligibility(updates) if type(scheme) is NewtonSchulz else "scheme"
        if reason is not None:
            return reason
        key = _kind(updates, scheme)
        found = self._known.get(key)
        if found == "warming_up":
            found = self._record(updates, scheme)
        elif found is None:
            found = "warming_up"
        else:
            return found
        self._known[key] = found
        if len(self._known) > MAX_RECORDINGS:
            _, oldest = self._known.popitem(last=False)
            if isinstance(oldest, _Recording):
                oldest.reset()
        return found

    def release(self) -> None:
        """Drop all recordings and give their memory back."""
        for recording in self._known.values():
            if isinstance(recording, _Recording):
                recording.reset()
        self._known.clear()

    def _record(self, updates: Sequence[Tensor], scheme: Callable[[Tensor], Tensor]) -> _Recording | str:
        try:
            recording = _Recording(updates, scheme)
        except graphs.RecordingError as error:
            logger.warning(
                "an orthogonalisation runs natively: %s: %s (%s)", error.reason, REASONS[error.reason], error
            )
            return error.reason
        self.recordings += 1
        return recording


def _ineligibility(updates: Sequence[Tensor]) -> str | None:
    """Return the key of `REASONS` that keeps these updates out of a recording, or None."""
    device = updates[0].device
    if not graphs.can_capture(device):
        return "no_cuda"
    if any(type(update) is not Tensor for update in updates):
        return "subclass"
    return "autograd" if needs_graph(updates) else forbidding_mode(device)


def _kind(updates: Sequence[Tensor], scheme: Callable[[Tensor], Tensor]) -> Hashable:
    """Return what must agree for a recording to serve a call."""
    layouts = tuple((update.shape, update.stride(), update.dtype) for update in updates)
    return updates[0].device, layouts, repr(scheme), numeric_modes()
