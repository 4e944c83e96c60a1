"""Parity: whether runs ended in the same state, by the digests of every part that was observed.

Base runs are held against each other first: where they differ among themselves, nothing can be said about the other
arm. Then each pair. A part that one side lacks is a difference; a part that nobody has is not observed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lucid_profiler.digest import first_difference
from lucid_profiler.processes import Processes, by_run, match
from lucid_profiler.records import ParityStatus, State

__all__ = ["KNOWN_PARTS", "Parity", "PartParity", "StateDifference", "check_parity"]

KNOWN_PARTS = ("parameters", "optimizer_state", "model", "optimizer", "scheduler", "ema", "losses", "metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """The first place where two runs differ."""

    part: str
    runs: tuple[int, int]
    process: int | None
    """Of the first run, of the second where the first has none; None when the whole part is missing in one run."""
    tensor: str | None
    """None when no single tensor is to blame."""
    text: str
    """The difference in words, part, runs and arms included."""
    is_renamed: bool = False
    """Whether the values are equal, under other names."""

    @property
    def is_missing(self) -> bool:
        """Whether one run merely did not record the part."""
        return self.process is None


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
    """The first difference, the undecidable ones before the others, and what is merely missing last."""
    num_base_runs: int = 0
    """Successful base runs with a state: with one alone, nothing shows whether base runs repeat."""

    @property
    def deciding(self) -> tuple[str, ...]:
        """The parts that made the status: where some differ those, and not the ones that are equal."""
        return tuple(name for name in self.covered if self.parts[name].status == self.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """Two runs, with their processes matched."""

    runs: tuple[int, int]
    names: tuple[str, str]
    """The runs in words, with their arms."""
    processes: tuple[Processes, Processes]
    matched: Sequence[tuple[int | None, int | None]]


def check_parity(
    states: Iterable[State],
    *,
    base_runs: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    arms: Mapping[int, str] | None = None,
) -> Parity:
    """Compare the states of runs.

    Args:
        states: Of all runs; those of runs named nowhere else are ignored.
        base_runs: The successful runs of the base arm, in order.
        pairs: Base and other run of each pair whose runs were successful, discarded pairs included.
        arms: The arm of each run, for the texts.
    """
    runs = {*base_runs, *(run for pair in pairs for run in pair)}
    of_runs = by_run(state for state in states if state.run in runs)
    found = [state for of in of_runs.values() for parts in of.values() for each in parts.values() for state in each]
    base = [_compare((base_runs[0], other), of_runs, arms) for other in base_runs[1:]]
    others = [_compare(pair, of_runs, arms) for pair in pairs]
    names = [*KNOWN_PARTS, *sorted({state.part for state in found} - set(KNOWN_PARTS))]
    parts = {name: _check_part(name, [state for state in found if state.part == name], base, others) for name in names}
    num_base_runs = sum(run in of_runs for run in base_runs)
    for status in ("undecidable", "different", "equal"):
        if with_status := [part for part in parts.values() if part.status == status]:
            return Parity(
                status=with_status[0].status,
                covered=tuple(name for name in names if parts[name].status != "not_observed"),
                parts=parts,
                difference=_first(part.difference for part in with_status),
                num_base_runs=num_base_runs,
            )
    return Parity(status="not_observed", covered=(), parts=parts)


def _compare(runs: tuple[int, int], of_runs: Mapping[int, Processes], arms: Mapping[int, str] | None) -> _Comparison:
    base, other = (of_runs.get(run, {}) for run in runs)
    names = [f"run {run} ({arms[run]})" if arms and run in arms else f"run {run}" for run in runs]
    return _Comparison(
        runs=runs, names=(names[0], names[1]), processes=(base, other), matched=tuple(match(base, other))
    )


def _check_part(
    part: str, states: Sequence[State], base: Sequence[_Comparison], others: Sequence[_Comparison]
) -> PartParity:
    if not states:
        return PartParity(status="not_observed")
    undecidable = _first(_difference(part, comparison) for comparison in base)
    difference = undecidable or _first(_difference(part, comparison) for comparison in others)
    strides = {_strides(part, of) for comparison in (*base, *others) for of in comparison.processes}
    return PartParity(
        status="undecidable" if undecidable else "different" if difference else "equal",
        difference=difference,
        num_runs=len({state.run for state in states}),
        nonfinite=max(state.nonfinite for state in states),
        equal_strides=None if () in strides else len(strides) <= 1,
    )


def _first(differences: Iterable[StateDifference | None]) -> StateDifference | None:
    """Return the first difference; one in which a part is merely missing only if there is no other."""
    found = [difference for difference in differences if difference is not None]
    return min(found, key=lambda difference: difference.is_missing, default=None)


def _strides(part: str, processes: Processes) -> tuple[str, ...]:
    """Return the layout of every state of a part, in an order that no start decides."""
    return tuple(sorted(state.strides_digest for parts in processes.values() for state in parts.get(part, ())))


def _difference(part: str, comparison: _Comparison) -> StateDifference | None:
    counts = [sum(part in parts for parts in processes.values()) for processes in comparison.processes]
    if not all(counts):
        lacking = comparison.names[0 if not counts[0] else 1]
        return _make(part, comparison, None, f"{lacking} did not record part {part}") if any(counts) else None
    for matched in comparison.matched:
        if difference := _process_difference(part, comparison, matched, counts):
            return difference
    return None


def _process_difference(
    part: str, comparison: _Comparison, matched: tuple[int | None, int | None], counts: Sequence[int]
) -> StateDifference | None:
    base, other = (
        processes[number].get(part, ()) if number is not None else ()
        for processes, number in zip(comparison.processes, matched, strict=True)
    )
    process = next((number for number in matched if number is not None), None)
    if len(base) != len(other):
        if counts[0] != counts[1]:
            numbers = [f"{count} process{'es' if count > 1 else ''}" for count in counts]
            whose = [f"{number} of {name}" for number, name in zip(numbers, comparison.names, strict=True)]
            return _make(part, comparison, process, f"{part}: recorded by {whose[0]}, {whose[1]}")
        words = _places(
            [f"{len(states)} time{'s' * (len(states) != 1)}" for states in (base, other)], comparison, matched
        )
        return _make(part, comparison, process, f"{part}: recorded {words}")
    unequal = ((a, b) for a, b in zip(base, other, strict=True) if a.digest != b.digest)
    for a, b in unequal:
        name = first_difference(a.tensors, b.tensors)
        if name is not None:
            if (renamed := _renamed(a, b)) is not None:
                text = f"{part}: the same values under other names, {_places(renamed, comparison, matched)}"
                return replace(_make(part, comparison, process, text), is_renamed=True)
            text = f"{part} {name}: {_places(_shown(a, b, name), comparison, matched)}"
            return _make(part, comparison, process, text, tensor=name)
        what = "the same tensors in another structure" if a.tensors else "other values"
        return _make(part, comparison, process, f"{part}: {what} {_places(['', ''], comparison, matched)}")
    return None


def _renamed(base: State, other: State) -> list[str] | None:
    """Return the first name that only one state has, of each, where both hold the same; None where they do not."""
    own = [sorted(mine.tensors.keys() - its.tensors.keys()) for mine, its in ((base, other), (other, base))]
    if not all(own) or Counter(base.tensors.values()) != Counter(other.tensors.values()):
        return None
    return [names[0] for names in own]


def _shown(base: State, other: State, name: str) -> list[str]:
    """Say what two states hold under a name: the values where they are known and tell, else type, shape and digest."""
    values = [state.values.get(name) for state in (base, other)]
    tensors = [state.tensors.get(name) for state in (base, other)]
    shown = []
    for value, tensor in zip(values, tensors, strict=True):
        if tensor is None:
            shown.append("missing")
        elif value is not None and values[0] != values[1]:
            shown.append(value)
        else:
            shown.append(f"{tensor.dtype}{list(tensor.shape)} {tensor.digest}")
    return shown


def _places(words: Sequence[str], comparison: _Comparison, matched: tuple[int | None, int | None]) -> str:
    """Put each word beside its run, and beside its process where there are several."""
    has_several = any(len(processes) > 1 for processes in comparison.processes)
    numbers = [f" process {number}" if has_several and number is not None else "" for number in matched]
    named = zip(words, comparison.names, numbers, strict=True)
    return ", ".join(f"{word} in {name}{number}".strip() for word, name, number in named)


def _make(
    part: str, comparison: _Comparison, process: int | None, text: str, *, tensor: str | None = None
) -> StateDifference:
    return StateDifference(part=part, runs=comparison.runs, process=process, tensor=tensor, text=text)
