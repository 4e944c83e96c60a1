"""A Lightning callback that tells lucid what a `Trainer.fit` does: its wall, its phases, and what it ended with.

It records through lucid's public functions alone, waits for no device, and outside `lucid profile` it does nothing.
Both names of Lightning serve, `lightning.pytorch` and `pytorch_lightning`.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import lucid_profiler
from lucid_profiler.journal import is_of_a_signal

MAX_LOSSES = 1_000_000  # 4 MB of float32
_LOSSES_PER_BLOCK = 256
_NAMES = ("lightning.pytorch", "pytorch_lightning")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_AVERAGING = frozenset({"ema", "average", "averaged", "averaging"})

__all__ = ["MAX_LOSSES", "LucidCallback"]


def _lightning() -> Any:
    """Return Lightning under the name that the program uses, else under the one that is installed.

    Raises:
        ImportError: If neither is.
    """
    for name in sorted(_NAMES, key=lambda name: name not in sys.modules):
        if sys.modules.get(name) or find_spec(name.partition(".")[0]):
            return import_module(name)
    raise ImportError(
        "lucid_profiler.integrations.lightning needs Lightning: pip install lightning, or pip install pytorch-lightning"
    )


_Callback: Any = _lightning().Callback
torch: Any = sys.modules["torch"]


class _Late:
    """A state that is only put together where lucid asks for it, so that its faults are noted and never raised."""

    def __init__(self, take: Callable[[], Any]) -> None:
        self.state_dict = take


class _Losses:
    """Losses where they came to be; every so many become one tensor, so that few blocks of memory are held."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._pending: list[Any] = []
        self._blocks: list[Any] = []

    def add(self, loss: Any) -> None:
        """Keep a loss, a tensor of one element that nothing else writes to."""
        self.num_seen += 1
        if self.num_seen > MAX_LOSSES:
            return
        if self._pending and self._pending[0].device != loss.device:
            self._close_block()
        self._pending.append(loss.reshape(()))
        if len(self._pending) == _LOSSES_PER_BLOCK:
            self._close_block()

    def state_dict(self) -> dict[str, Any]:
        """Return the losses `(n,)` on the host, and how many there were."""
        self._close_block()
        losses = torch.cat([block.cpu() for block in self._blocks]) if self._blocks else torch.empty(0)
        return {"loss": losses, "num_batches": self.num_seen}

    def _close_block(self) -> None:
        if self._pending:
            self._blocks.append(torch.stack(self._pending))
            self._pending = []


class LucidCallback(_Callback):  # type: ignore[misc]
    """Marks the phases of a fit and hands its final state to `lucid profile`.

    The run's wall is the interval from this callback's `setup` to its `on_fit_end`; put it first among the callbacks,
    so that the work of the others counts. Phases: "load", "sanity check", "warm-up", "train", "validate",
    "checkpoint" and "teardown". Parts: "model", "optimizer", "scheduler", "ema", "losses" (of this process's batches)
    and "metrics" (the last `callback_metrics`). A fit that raises ends the wall and hands over nothing.

    Args:
        ema: the averaged weights: something with `state_dict()`, or a mapping of tensors. By default what the other
            callbacks and the attributes of the module have under a name with the word ema, average, averaged or
            averaging in it, that of its class included.
        warmup_steps: how many optimizer steps are the phase "warm-up"; Lightning itself knows of none. The steps of
            several optimizers count together, as in `trainer.global_step`.
    """

    def __init__(self, *, ema: Any = None, warmup_steps: int = 0) -> None:
        super().__init__()
        self._ema = ema
        self._warmup_steps = warmup_steps
        self._interval: AbstractContextManager[None] | None = None
        self._losses = _Losses()
        self._is_warm = False
        self._phase = ""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's interface
        """Begin the wall, in a fit under `lucid profile`."""
        self._end()
        interval = lucid_profiler.fit()
        # Outside lucid `fit()` is this class, and every other hook returns at once.
        if str(getattr(stage, "value", stage)) != "fit" or isinstance(interval, nullcontext):
            return
        self._losses, self._is_warm, self._phase = _Losses(), self._warmup_steps <= 0, ""
        self._interval = interval
        interval.__enter__()
        self._enter("load")

    def on_sanity_check_start(self, *_: Any) -> None:
        """Say that validation is being tried out."""
        self._enter("sanity check")

    def on_sanity_check_end(self, *_: Any) -> None:
        """Go back to loading."""
        self._enter("load")

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        """Say that training goes on."""
        self._enter_training(trainer)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Say that training goes on, after a validation or a checkpoint within the epoch."""
        self._enter_training(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:  # noqa: ARG002
        """Keep the loss, where it is."""
        if self._interval is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # Of an automatic optimization Lightning hands out a copy; the other may be written to again.
            self._losses.add(loss.detach() if pl_module.automatic_optimization else loss.detach().clone())

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Say that validation begins."""
        if not trainer.sanity_checking:
            self._enter("validate")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Say that validation and its checkpoint are over."""
        self._enter_training(trainer)

    def on_save_checkpoint(self, *_: Any) -> None:
        """Say that a checkpoint is written, until the next hook."""
        self._enter("checkpoint")

    def on_train_end(self, *_: Any) -> None:
        """Say that the trainer cleans up."""
        self._enter("teardown")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End the wall and hand over every part whose bytes must agree."""
        if self._end():
            lucid_profiler.state("model", pl_module)
            lucid_profiler.state("optimizer", _one_or_all(trainer.optimizers))
            if trainer.lr_scheduler_configs:
                lucid_profiler.state("scheduler", _one_or_all([one.scheduler for one in trainer.lr_scheduler_configs]))
            if (ema := self._averaged(trainer, pl_module)) is not None:
                lucid_profiler.state("ema", ema)
            lucid_profiler.state("losses", self._losses)
            lucid_profiler.state("metrics", _Late(lambda: dict(trainer.callback_metrics)))
            self._losses = _Losses()

    def on_exception(self, *_: Any) -> None:
        """End the wall; what a broken fit leaves is no result."""
        self._end()

    def teardown(self, *_: Any, **__: Any) -> None:
        """End the wall of a fit that was left before its end, as a search for a learning rate does."""
        self._end()

    def _end(self) -> bool:
        """End the wall; return whether there was one."""
        interval, self._interval = self._interval, None
        if interval is not None:
            interval.__exit__(None, None, None)
        return interval is not None

    def _enter(self, phase: str) -> None:
        if self._interval is not None and phase != self._phase:
            self._phase = phase
            lucid_profiler.mark(phase)

    def _enter_training(self, trainer: Any) -> None:
        if self._interval is None:
            return
        if not self._is_warm:
            self._is_warm = trainer.global_step >= self._warmup_steps
        self._enter("train" if self._is_warm else "warm-up")

    def _averaged(self, trainer: Any, pl_module: Any) -> Any:
        """Return the averaged weights; None if there are none."""
        if self._ema is not None:
            return self._ema
        callbacks = [callback for callback in trainer.callbacks if callback is not self]
        found = [average for callback in callbacks for average in _averages_of_callback(callback)]
        return _one_or_all(found or list(_averages_of_module(pl_module)))


def _one_or_all(states: list[Any]) -> Any:
    """Return a single state as it is, several by their place; None of none."""
    if len(states) < 2:
        return states[0] if states else None
    return _Late(lambda: {str(place): state.state_dict() for place, state in enumerate(states)})


def _is_averaging(name: str) -> bool:
    return any(word.lower() in _AVERAGING for word in _WORD.findall(name))


def _averages_of_callback(callback: Any) -> Iterator[Any]:
    """Yield what a callback averages: the models that it holds, else its own state where that has tensors."""
    if any(_is_averaging(kind.__name__) for kind in type(callback).__mro__):
        models = [value for value in vars(callback).values() if isinstance(value, torch.optim.swa_utils.AveragedModel)]
        if models:
            yield from models
        elif _has_tensors(callback):
            yield callback


def _averages_of_module(pl_module: Any) -> Iterator[Any]:
    """Yield the attributes of a module that are averages by their own name or that of their class."""
    attributes = {**vars(pl_module), **dict(pl_module.named_children())}
    for name, value in attributes.items():
        if (_is_averaging(name) or _is_averaging(type(value).__name__)) and _has_tensors(value):
            yield value


def _has_tensors(value: Any) -> bool:
    """Return whether the state of an object has a tensor in it, one mapping deep at most."""
    take = getattr(value, "state_dict", None)
    try:
        state = take() if callable(take) else None
    except Exception as error:  # somebody else's fault must not end a fit; lucid asks again, and notes it
        if is_of_a_signal(error):
            raise
        return True
    if not isinstance(state, Mapping):
        return False
    inner = [item for one in state.values() for item in (one.values() if isinstance(one, Mapping) else (one,))]
    return any(isinstance(item, torch.Tensor) for item in inner)
