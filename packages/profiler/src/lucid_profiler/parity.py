"""Parity: whether runs ended in the same state, by the digests of every part that was observed.

Base runs are held against each other first: where they differ among themselves, nothing can be said about the other
arm. Then each pair. A part that one side lacks is a difference; a part that nobody has is not observed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lucid_profiler.digest import TensorDigest, first_difference
from lucid_profiler.records import ParityStatus, State

__all__ = [
    "KNOWN_PARTS",
    "Parity",
    "PartParity",
    "StateDifference",
    "StatesByRun",
    "check_parity",
    "first_state_difference",
]

KNOWN_PARTS = ("parameters", "optimizer_state", "model", "optimizer", "scheduler", "ema", "losses", "metrics")

StatesByRun = Mapping[int, Mapping[str, Mapping[int, Sequence[State]]]]
"""Run, part, process: the states in the order in which they were recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """The first place where two runs differ."""

    part: str
    runs: tuple[int, int]
    process: int | None
    """None when the whole part is missing in one run."""
    tensor: str | None
    """None when no single tensor is to blame."""
    text: str
    """The difference in words, runs and part included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartParity:
    """What the runs say about one part of the state."""

    status: ParityStatus
    difference: StateDifference | None = None
    num_runs: int = 0
    """Successful runs that recorded it."""
    nonfinite: int = 0
    """The largest number of non-finite leaves in one state; equal NaNs are equal, and worth knowing."""
    equal_strides: bool | None = None
    """Whether the memory layout agrees as well, which parity does not ask for; None if parts are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What the runs say about the whole state."""

    status: ParityStatus
    covered: tuple[str, ...]
    """The parts that were observed: all that the status speaks of."""
    parts: dict[str, PartParity]
    difference: StateDifference | None = None
    """The first difference, the undecidable ones before the others."""


def check_parity(states: Iterable[State], *, base_runs: Sequence[int], pairs: Sequence[tuple[int, int]]) -> Parity:
    """Compare the states of runs.

    Args:
        states: Of all runs; those of runs named nowhere else are ignored.
        base_runs: The successful runs of the base arm, in order.
        pairs: Base and other run of each pair whose runs were successful, discarded pairs included.
    """
    runs = {*base_runs, *(run for pair in pairs for run in pair)}
    by_run = _by_run(state for state in states if state.run in runs)
    observed = {part for parts in by_run.values() for part in parts}
    names = [*KNOWN_PARTS, *sorted(observed - set(KNOWN_PARTS))]
    parts = {name: _check_part(name, by_run, base_runs, pairs) for name in names}
    for status in ("undecidable", "different", "equal"):
        if first := next((part for part in parts.values() if part.status == status), None):
            covered = tuple(name for name in names if name in observed)
            return Parity(status=first.status, covered=covered, parts=parts, difference=first.difference)
    return Parity(status="not_observed", covered=(), parts=parts)


def first_state_difference(
    states: Iterable[State], runs: tuple[int, int]
) -> tuple[ParityStatus, StateDifference | None]:
    """Compare two runs over every part that either recorded."""
    by_run = _by_run(state for state in states if state.run in runs)
    observed = {part for parts in by_run.values() for part in parts}
    names = [*(name for name in KNOWN_PARTS if name in observed), *sorted(observed - set(KNOWN_PARTS))]
    differences = (_difference(name, by_run, runs) for name in names)
    if first := next((difference for difference in differences if difference is not None), None):
        return "different", first
    return ("equal" if names else "not_observed"), None


def _by_run(states: Iterable[State]) -> StatesByRun:
    by_run: dict[int, dict[str, dict[int, list[State]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for state in states:
        by_run[state.run][state.part][state.process].append(state)
    return {run: {part: dict(processes) for part, processes in parts.items()} for run, parts in by_run.items()}


def _check_part(
    part: str, by_run: StatesByRun, base_runs: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> PartParity:
    states = [state for parts in by_run.values() for found in parts.get(part, {}).values() for state in found]
    if not states:
        return PartParity(status="not_observed")
    base_pairs = [(base_runs[0], other) for other in base_runs[1:]]
    undecidable = _first(part, by_run, base_pairs)
    difference = undecidable or _first(part, by_run, pairs)
    strides = {_strides(part, by_run, run) for pair in (*base_pairs, *pairs) for run in pair}
    return PartParity(
        status="undecidable" if undecidable else "different" if difference else "equal",
        difference=difference,
        num_runs=len({state.run for state in states}),
        nonfinite=max(state.nonfinite for state in states),
        equal_strides=None if () in strides else len(strides) <= 1,
    )


def _first(part: str, by_run: StatesByRun, pairs: Iterable[tuple[int, int]]) -> StateDifference | None:
    differences = (_difference(part, by_run, pair) for pair in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _strides(part: str, by_run: StatesByRun, run: int) -> tuple[tuple[int, str], ...]:
    processes = by_run.get(run, {}).get(part, {})
    return tuple((process, state.strides_digest) for process in sorted(processes) for state in processes[process])


def _difference(part: str, by_run: StatesByRun, runs: tuple[int, int]) -> StateDifference | None:
    base, other = (by_run.get(run, {}).get(part, {}) for run in runs)
    if not base or not other:
        if not base and not other:
            return None
        lacking = runs[0] if not base else runs[1]
        return _make(part, runs, None, f"run {lacking} did not record it")
    for process in sorted(base.keys() | other.keys()):
        if difference := _process_difference(part, runs, process, (base.get(process, ()), other.get(process, ()))):
            return difference
    return None


def _process_difference(
    part: str, runs: tuple[int, int], process: int, states: tuple[Sequence[State], Sequence[State]]
) -> StateDifference | None:
    bases, others = states
    if len(bases) != len(others):
        text = f"process {process} recorded it {len(bases)} and {len(others)} times"
        return _make(part, runs, process, text)
    for base, other in zip(bases, others, strict=True):
        if base.digest != other.digest:
            return _tensor_difference(base, other, runs)
    return None


def _tensor_difference(base: State, other: State, runs: tuple[int, int]) -> StateDifference:
    name = first_difference(base.tensors, other.tensors)
    if name is None:
        text = f"process {base.process}: the same tensors in another structure"
        return _make(base.part, runs, base.process, text)
    shown = [_show(state.tensors.get(name)) for state in (base, other)]
    text = f"process {base.process}: {name} is {shown[0]} and {shown[1]}"
    return _make(base.part, runs, base.process, text, tensor=name)


def _show(tensor: TensorDigest | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)} {tensor.digest}"


def _make(
    part: str, runs: tuple[int, int], process: int | None, text: str, *, tensor: str | None = None
) -> StateDifference:
    whole = f"runs {runs[0]} and {runs[1]}, {part}: {text}"
    return StateDifference(part=part, runs=runs, process=process, tensor=tensor, text=whole)
