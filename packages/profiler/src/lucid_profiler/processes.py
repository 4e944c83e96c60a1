"""Which process of one run is the same as which of another: by rank, or by what they ended with.

Without ranks the processes of a run are a set: who started first is a race. Processes with equal states belong
together, and of the others those that have most in common, so that a single one that differs is named.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from lucid_profiler.records import State

__all__ = ["Parts", "Processes", "by_run", "match"]

Parts = Mapping[str, Sequence[State]]
"""Part: the states of one process in the order in which they were recorded."""
Processes = Mapping[int, Parts]
"""The processes of one run by number."""


def by_run(states: Iterable[State]) -> dict[int, Processes]:
    """Sort states by run, process and part."""
    found: dict[int, dict[int, dict[str, list[State]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for state in states:
        found[state.run][state.process][state.part].append(state)
    return {run: {process: dict(parts) for process, parts in sorted(of.items())} for run, of in found.items()}


def match(base: Processes, other: Processes) -> list[tuple[int | None, int | None]]:
    """Pair the processes of two runs by number, in the order of the first; those without a counterpart come last."""
    ranks = _ranks(base), _ranks(other)
    if ranks[0] is not None and ranks[1] is not None:
        pairs = [(ranks[0][rank], ranks[1][rank]) for rank in ranks[0].keys() & ranks[1].keys()]
    else:
        pairs = _equal(base, other)
        pairs += _alike(_without(base, [pair[0] for pair in pairs]), _without(other, [pair[1] for pair in pairs]))
    lost = [(process, None) for process in _without(base, [pair[0] for pair in pairs])]
    new = [(None, process) for process in _without(other, [pair[1] for pair in pairs])]
    return [*sorted(pairs), *lost, *new]


def _ranks(processes: Processes) -> dict[int, int] | None:
    """Return the number of each rank's process; None where a process has no rank, or not one of its own."""
    ranks = [next((state.rank for states in parts.values() for state in states), None) for parts in processes.values()]
    known = {rank: process for rank, process in zip(ranks, processes, strict=True) if rank is not None}
    return known if len(known) == len(processes) else None


def _without(processes: Processes, taken: Sequence[int]) -> Processes:
    return {process: parts for process, parts in processes.items() if process not in taken}


def _equal(base: Processes, other: Processes) -> list[tuple[int, int]]:
    """Pair the processes whose states are all equal."""
    waiting = defaultdict(list)
    for process, parts in other.items():
        waiting[_content(parts)].append(process)
    found = ((process, waiting[_content(parts)]) for process, parts in base.items())
    return [(process, equal.pop(0)) for process, equal in found if equal]


def _content(parts: Parts) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((part, tuple(state.digest for state in parts[part])) for part in sorted(parts))


def _alike(base: Processes, other: Processes) -> list[tuple[int, int]]:
    """Pair processes that have most in common: equal parts first, then equal tensors, then equal numbers."""
    candidates = sorted(
        (*_overlap(base[a], other[b]), a != b, a, b) for a in base for b in other if base[a] and other[b]
    )
    pairs: dict[int, int] = {}
    for *_, a, b in candidates:
        if a not in pairs and b not in pairs.values():
            pairs[a] = b
    return list(pairs.items())


def _overlap(base: Parts, other: Parts) -> tuple[int, int]:
    """Return how many parts and how many tensors are equal, each negative, so that more comes first."""
    num_parts = num_tensors = 0
    for part in base.keys() & other.keys():
        for a, b in zip(base[part], other[part], strict=False):
            num_parts += a.digest == b.digest
            num_tensors += len(a.tensors.items() & b.tensors.items())
    return -num_parts, -num_tensors
