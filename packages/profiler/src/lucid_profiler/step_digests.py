"""Digests of the state around every optimizer step, for a re-run that is never timed; written and read line by line.

Before a step the gradients are digested, before the first step of an optimizer its parameters and state too; after a
step the parameters and states of all optimizers. Each reads every byte of them, so a step may take many times as long.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lucid_profiler import jsonio, snapshot
from lucid_profiler.agent import DIGESTS_VARIABLE
from lucid_profiler.digest import digest_state
from lucid_profiler.errors import ReportError
from lucid_profiler.hooks import TorchHooks
from lucid_profiler.journal import Journal, is_of_a_signal
from lucid_profiler.saved_state import ProcessIdentity, StateSaver, process_identity
from lucid_profiler.tracking import TrackedOptimizer

MAX_BYTES = 512 * 2**20  # of digests of single tensors; as much again for lines that have those of whole parts alone
PART_ORDER = ("gradients", "parameters", "optimizer_state")

_NUM_DIGITS = 16  # of a tensor's digest

When = Literal["before", "after"]

__all__ = [
    "DIGESTS_VARIABLE",
    "MAX_BYTES",
    "PART_ORDER",
    "Moment",
    "PartDigest",
    "StepDigests",
    "StepSaver",
    "StepState",
    "When",
    "read_process",
    "read_steps",
    "step_files",
    "step_folder_name",
    "watch_steps",
]


class Moment(NamedTuple):
    """When a state was looked at."""

    step: int
    """Steps of all optimizers of the process, from 1."""
    when: When
    optimizer: int
    """Index of the optimizer that steps."""


class PartDigest(NamedTuple):
    """One part at one moment."""

    digest: str
    names: tuple[str, ...]
    tensors: str | None
    """16 hex digits a name, one after the other; None where the file had reached its bound."""

    def by_name(self) -> dict[str, str]:
        """Return the digest of each tensor, nothing where they are not known."""
        return {
            name: self.tensors[place * _NUM_DIGITS : (place + 1) * _NUM_DIGITS]
            for place, name in enumerate(self.names if self.tensors is not None else ())
            if self.tensors is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """What a file of step digests says of one moment."""

    moment: Moment
    parts: Mapping[str, PartDigest]
    """Empty inside the capture of a CUDA graph, where nothing may be read."""


Take = Callable[[Moment, Mapping[str, Any]], None]
"""Takes the state of one moment, part by part; the tensors are the program's own."""


def watch_steps(hooks: TorchHooks, take: Take) -> None:
    """Hand the state around every step of every optimizer to `take`."""

    def before(tracked: TrackedOptimizer, _now_ns: int) -> None:
        moment = Moment(hooks.num_steps + 1, "before", tracked.index)
        take(moment, {} if _is_capturing() else _states_before(hooks, tracked))

    def after(tracked: TrackedOptimizer, _now_ns: int) -> None:
        moment = Moment(hooks.num_steps, "after", tracked.index)
        take(moment, {} if _is_capturing() else _states_after(hooks))

    hooks.watch_begin(before)
    hooks.watch(after)


def _is_capturing() -> bool:
    torch = snapshot.loaded_torch()
    return bool(torch.cuda.is_initialized()) and bool(torch.cuda.is_current_stream_capturing())


def _states_before(hooks: TorchHooks, tracked: TrackedOptimizer) -> dict[str, Any]:
    names = hooks.parameter_names(starting=tracked)
    parameters = snapshot.parameters([tracked], names)
    states: dict[str, Any] = {"gradients": {name: parameter.grad for name, parameter in parameters.items()}}
    if not tracked.num_steps:
        states["parameters"] = parameters
        states["optimizer_state"] = snapshot.optimizer_state([tracked], names)
    return states


def _states_after(hooks: TorchHooks) -> dict[str, Any]:
    optimizers, names = hooks.optimizers(), hooks.parameter_names()
    return {
        "parameters": snapshot.parameters(optimizers, names),
        "optimizer_state": snapshot.optimizer_state(optimizers, names),
    }


class StepDigests:
    """Writes `<run_dir>/step-digests-<pid>.jsonl`, a line a moment; the file is made at the first one.

    Beyond `max_bytes` the lines lack the digests of single tensors, beyond twice that nothing more is written.

    Args:
        run_dir: Private directory of the run.
        note: Is told what could not be digested or written.
        name: Of the process's files, by default its pid.
        max_bytes: The bound.
    """

    def __init__(
        self, run_dir: Path, *, note: Callable[[str], None], name: str | None = None, max_bytes: int = MAX_BYTES
    ) -> None:
        self._path = run_dir / f"step-digests-{name or os.getpid()}.jsonl"
        self._journal = Journal(self._path)
        self._note = note
        self._max_bytes = max_bytes
        self._names: dict[str, list[str]] = {}
        self._num_bytes = 0
        self._is_open = True

    def take(self, moment: Moment, states: Mapping[str, Any]) -> None:
        """Digest the parts of one moment and write them down."""
        if not self._is_open:
            return
        try:
            self._write_moment(moment, states)
        except OSError as error:
            if is_of_a_signal(error):
                raise
            self._is_open = False
            self._note(f"the digests of step {moment.step} and later are missing: {error}"[:500])
        if self._num_bytes > 2 * self._max_bytes:
            self._is_open = False
            self._note(f"the digests of steps after {moment.step} are missing: their file has reached its bound")

    def _write_moment(self, moment: Moment, states: Mapping[str, Any]) -> None:
        if not self._num_bytes:
            identity = process_identity()
            self._write("process", rank=identity.rank, command=identity.command)
        parts = {part: found for part, state in states.items() if (found := self._digest(part, state)) is not None}
        self._write("moment", step=moment.step, when=moment.when, optimizer=moment.optimizer, parts=parts)

    def _digest(self, part: str, state: Any) -> dict[str, str] | None:
        try:
            digest = digest_state(state)
        except (TypeError, ValueError, RuntimeError) as error:
            if is_of_a_signal(error):
                raise
            self._note(f"no digest of {part!r} around a step: {error}"[:500])
            return None
        if self._num_bytes > self._max_bytes:
            return {"digest": digest.digest}
        names = list(digest.tensors)
        if self._names.get(part) != names:
            self._names[part] = names
            self._write("names", part=part, names=names)
        return {"digest": digest.digest, "tensors": "".join(tensor.digest for tensor in digest.tensors.values())}

    def _write(self, kind: str, **fields: Any) -> None:
        self._journal.write(kind, **fields)
        self._num_bytes = self._path.stat().st_size


class StepSaver:
    """Saves the values around one step: what the digests of its two moments cover.

    Args:
        saver: Of the process.
        step: The step, counted as in `Moment`.
    """

    def __init__(self, saver: StateSaver, step: int) -> None:
        self._saver = saver
        self._step = step

    def take(self, moment: Moment, states: Mapping[str, Any]) -> None:
        """Save the parts of a moment of that step."""
        if moment.step == self._step:
            saver = self._saver.below(step_folder_name(moment.step, moment.when))
            for part, state in states.items():
                saver.save(part, state)


def step_folder_name(step: int, when: When) -> str:
    """Return the name of the folder, in that of a process, with the values of one moment."""
    return f"step{step}-{when}"


def step_files(run_dir: Path) -> list[Path]:
    """Return the files of step digests that the processes of a run left."""
    return sorted(run_dir.glob("step-digests-*.jsonl"))


def read_process(path: Path) -> ProcessIdentity:
    """Return which process wrote a file of step digests.

    Raises:
        ReportError: It is damaged.
        OSError: It cannot be read.
    """
    first = next(_read_lines(path), {})
    try:
        return ProcessIdentity(rank=first["rank"], command=first["command"])
    except KeyError as error:
        raise ReportError(str(path), 1, "it does not say which process wrote it") from error


def read_steps(path: Path) -> Iterator[StepState]:
    """Yield the moments of one file, one in memory at a time; a last line without an end is left out.

    Raises:
        ReportError: A line before the last is damaged.
        OSError: It cannot be read.
    """
    names: dict[str, tuple[str, ...]] = {}
    for number, fields in enumerate(_read_lines(path), start=1):
        if (state := _take_line(path, number, fields, names)) is not None:
            yield state


def _take_line(
    path: Path, number: int, fields: Mapping[str, Any], names: dict[str, tuple[str, ...]]
) -> StepState | None:
    """Return what a line says of a moment; a line with names adds them to `names`."""
    try:
        if fields["kind"] == "names":
            names[fields["part"]] = tuple(fields["names"])
        return _step_state(fields, names) if fields["kind"] == "moment" else None
    except (KeyError, TypeError, AttributeError) as error:
        raise ReportError(str(path), number, f"it does not describe a step: {error!r:.100}") from error


def _step_state(fields: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> StepState:
    parts = {
        part: PartDigest(found["digest"], names.get(part, ()), found.get("tensors"))
        for part, found in fields["parts"].items()
    }
    return StepState(moment=Moment(fields["step"], fields["when"], fields["optimizer"]), parts=parts)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                fields = jsonio.loads(line)
            except ValueError as error:
                raise ReportError(str(path), number, str(error)) from error
            if not isinstance(fields, dict) or "kind" not in fields:
                raise ReportError(str(path), number, "it has no kind")
            yield fields
