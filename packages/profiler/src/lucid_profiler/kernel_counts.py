"""Counts the events of a trace: kernels by name, launches, and whether the records of graph replays can be believed.

Pure. A graph's replays must all leave what its first one left; a table of kernels inside replays that contradicts
itself is withheld, with the numbers that do.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lucid_profiler.kernels import Event, EventKind, GraphCount, KernelRow, KernelTable, Launches, RowKind

MAX_EVENTS = 2_000_000

__all__ = ["MAX_EVENTS", "count_events"]


def count_events(
    events: Sequence[Event], blank: KernelTable, *, num_steps: int, max_events: int = MAX_EVENTS
) -> KernelTable:
    """Count the events of the first `num_steps` whole steps.

    Args:
        events: Any order; those of kind `step` say where the steps begin.
        blank: The table without counts; `device` says what is counted.
        num_steps: Steps that ended before the trace did.
        max_events: When the steps hold more, later whole steps are left out and their events counted as dropped.
    """
    steps = sorted((event for event in events if event.kind == "step"), key=_by_begin)[:num_steps]
    if not steps:
        return replace(blank, reason="no step was traced to its end", num_events=len(events))
    by_step, unowned = _by_step(events, steps)
    sizes = [len(found) for found in by_step]
    kept, num_dropped = _whole_steps(sizes, max_events)
    table = replace(
        blank,
        num_steps=kept,
        num_events=len(events),
        num_dropped_events=num_dropped,
        notes=(*blank.notes, *_cap_notes(sizes, kept)),
    )
    if not kept:
        return replace(table, reason=f"the first step alone has {sizes[0]:,} events, more than {max_events:,}")
    if table.device == "cpu":
        operators = _own_times([event for found in by_step[:kept] for event in found if event.kind == "operator"])
        return replace(table, rows=_rows(operators, kept), replay_rows=())
    return _count_device(by_step[:kept], unowned, table)


def _by_begin(event: Event) -> int:
    return event.begin_ns


def _by_step(events: Sequence[Event], steps: Sequence[Event]) -> tuple[list[list[Event]], list[Event]]:
    """Return the events of each step in the order of their begin, and the records that no launch owns.

    A record belongs to the step of its launch, whenever the device came to it.
    """
    begins_ns = [step.begin_ns for step in steps]
    end_ns = steps[-1].begin_ns + steps[-1].duration_ns
    by_step: list[list[Event]] = [[] for _ in steps]
    outside: list[Event] = []
    launched_in: dict[int, list[Event]] = {}
    for event in events:
        if event.kind == "step" or event.kind in _RECORDS:
            continue
        step = bisect_right(begins_ns, event.begin_ns) - 1
        found = by_step[step] if step >= 0 and event.begin_ns < end_ns else outside
        found.append(event)
        if event.kind in _LAUNCHES:
            launched_in[event.correlation] = found
    unowned: list[Event] = []
    for record in events:
        if record.kind in _RECORDS:
            launched_in.get(record.correlation, unowned).append(record)
    return [sorted(found, key=_by_begin) for found in by_step], unowned


def _whole_steps(sizes: Sequence[int], max_events: int) -> tuple[int, int]:
    """Return how many of the first steps fit, and how many events the others have."""
    total = 0
    for kept, size in enumerate(sizes):
        total += size
        if total > max_events:
            return kept, sum(sizes[kept:])
    return len(sizes), 0


def _cap_notes(sizes: Sequence[int], kept: int) -> tuple[str, ...]:
    if kept == len(sizes):
        return ()
    return (f"too many events: {kept} of {len(sizes)} steps were counted",)


def _own_times(operators: Sequence[Event]) -> list[Event]:
    """Return the operators with the time that each spent outside the operators that it called in its thread."""
    own_ns = [operator.duration_ns for operator in operators]
    order = sorted(range(len(operators)), key=lambda i: (operators[i].begin_ns, -operators[i].duration_ns))
    open_by_thread: defaultdict[int, list[int]] = defaultdict(list)
    for index in order:
        operator = operators[index]
        stack = open_by_thread[operator.thread]
        while stack and operators[stack[-1]].begin_ns + operators[stack[-1]].duration_ns <= operator.begin_ns:
            stack.pop()
        if stack:
            own_ns[stack[-1]] -= operator.duration_ns
        stack.append(index)
    return [
        Event(one.kind, one.name, one.correlation, one.begin_ns, max(0, own), one.thread)
        for one, own in zip(operators, own_ns, strict=True)
    ]


def _rows(events: Iterable[Event], num_steps: int) -> tuple[KernelRow, ...]:
    """Return a row for each kind and name, the longest total first."""
    durations: defaultdict[tuple[RowKind, str], list[int]] = defaultdict(list)
    for event in events:
        durations[_ROW_KINDS[event.kind], event.name].append(event.duration_ns)
    rows = [
        KernelRow(
            name=name,
            kind=kind,
            count=len(found),
            total_ns=sum(found),
            median_ns=int(median(found)),
            count_per_step=len(found) / num_steps,
            ns_per_step=sum(found) / num_steps,
        )
        for (kind, name), found in durations.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.kind, row.name)))


@dataclass(frozen=True, slots=True)
class _Replay:
    step: int
    slot: int
    """Place among the graph launches of its step."""
    records: Sequence[Event]

    @property
    def graph(self) -> tuple[str, int]:
        """The identity where all records tell the same one, else the place in the step."""
        told = {record.graph for record in self.records}
        if len(told) == 1 and 0 not in told:
            return "graph", told.pop()
        return "place", self.slot


def _count_device(by_step: Sequence[Sequence[Event]], unowned: Sequence[Event], table: KernelTable) -> KernelTable:
    events = [event for found in by_step for event in found]
    records: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in _RECORDS:
            records[event.correlation].append(event)
    calls = {kind: {event.correlation for event in events if event.kind == kind} for kind in _LAUNCHES}
    if not records and not any(calls.values()):
        reason = "the tracer showed neither launches nor records of the device: another tool may hold CUPTI"
        return replace(table, reason=reason)
    replays = _replays(by_step, records)
    graphs = _graphs(replays)
    reason_not = _replay_reason(replays, graphs, unowned)
    in_replays = [record for replay in replays for record in replay.records]
    eager = [record for call, found in records.items() if call not in calls["launch_graph"] for record in found]
    num_without_record = len(calls["launch_kernel"] - records.keys())
    return replace(
        table,
        rows=_rows(eager, table.num_steps),
        replay_rows=None if reason_not else _rows(in_replays, table.num_steps),
        replay_reason=reason_not,
        launches=Launches(
            kernels=len(calls["launch_kernel"]),
            graphs=len(calls["launch_graph"]),
            memcpys=len(calls["launch_memcpy"]),
            memsets=len(calls["launch_memset"]),
        ),
        graphs=tuple(GraphCount(num_replays=len(g), num_nodes=len(g[0].records)) for g in graphs.values()),
        num_records=len(eager) + len(in_replays) + len(unowned),
        num_unowned=len(unowned),
        num_without_record=num_without_record,
        notes=(*table.notes, *_loss_notes(num_without_record, len(calls["launch_kernel"]), len(unowned))),
    )


def _loss_notes(num_without_record: int, num_launches: int, num_unowned: int) -> list[str]:
    notes = []
    if num_without_record:
        notes.append(f"{num_without_record} of {num_launches} kernel launches left no record: times are a lower bound")
    if num_unowned:
        notes.append(f"{num_unowned} records belong to no launch that the tracer showed: they are in no row")
    return notes


def _replays(by_step: Sequence[Sequence[Event]], records: Mapping[int, Sequence[Event]]) -> list[_Replay]:
    found = []
    for step, events in enumerate(by_step):
        calls = [event for event in events if event.kind == "launch_graph"]
        found += [_Replay(step, slot, records.get(call.correlation, ())) for slot, call in enumerate(calls)]
    return found


def _graphs(replays: Iterable[_Replay]) -> dict[tuple[str, int], list[_Replay]]:
    """Return the replays of each graph, in the order of their first one."""
    graphs: dict[tuple[str, int], list[_Replay]] = {}
    for one in replays:
        graphs.setdefault(one.graph, []).append(one)
    return graphs


def _replay_reason(
    replays: Sequence[_Replay], graphs: Mapping[tuple[str, int], Sequence[_Replay]], unowned: Sequence[Event]
) -> str | None:
    """Say in words and numbers why the records inside replays cannot be believed; None if they agree.

    Source: https://github.com/pytorch/kineto/issues/1165
    """
    if num_empty := sum(not one.records for one in replays):
        return f"{num_empty} of {len(replays)} replays have no records"
    if any(how == "place" for how, _ in graphs) and (reason := _unequal_steps(replays)):
        return reason
    for number, replayed in enumerate(graphs.values()):
        if reason := _disagreement(replayed):
            return f"graph {number} of {len(graphs)}: {reason}"
    return _stray_reason(replays, graphs, unowned)


def _unequal_steps(replays: Sequence[_Replay]) -> str | None:
    per_step = Counter(one.step for one in replays)
    fewest, most = min(per_step.values()), max(per_step.values())
    if fewest == most:
        return None
    return f"the graphs cannot be told apart: some steps have {fewest} replays, some {most}"


def _disagreement(replays: Sequence[_Replay]) -> str | None:
    sizes = Counter(len(one.records) for one in replays)
    num_nodes = len(replays[0].records)
    if len(sizes) > 1:
        shown = ", ".join(f"{num} of {size}" for size, num in sorted(sizes.items()))
        return f"{num_nodes} records in its first replay, but of {len(replays)} replays there are {shown} records"
    first = Counter((record.kind, record.name) for record in replays[0].records)
    num_other = sum(Counter((record.kind, record.name) for record in one.records) != first for one in replays)
    if num_other:
        return f"{num_other} of {len(replays)} replays have {num_nodes} records of other names than its first"
    num_untimed = sum(_is_untimed(record) for one in replays for record in one.records)
    return f"{num_untimed} of {num_nodes * len(replays)} records have no valid time" if num_untimed else None


def _is_untimed(record: Event) -> bool:
    return record.begin_ns <= 0 or record.duration_ns < 0 or (record.kind == "kernel" and not record.duration_ns)


def _stray_reason(
    replays: Sequence[_Replay], graphs: Mapping[tuple[str, int], Sequence[_Replay]], unowned: Sequence[Event]
) -> str | None:
    names = {record.name for one in replays for record in one.records}
    num_stray = sum(record.name in names for record in unowned)
    if not num_stray:
        return None
    expected = sum(len(found) * len(found[0].records) for found in graphs.values())
    return f"replays × nodes are {expected} records, but there are {expected + num_stray}"


_ROW_KINDS: Mapping[EventKind, RowKind] = {
    "kernel": "kernel",
    "memcpy": "memcpy",
    "memset": "memset",
    "operator": "operator",
}
_RECORDS: frozenset[EventKind] = frozenset({"kernel", "memcpy", "memset"})
_LAUNCHES: frozenset[EventKind] = frozenset({"launch_kernel", "launch_graph", "launch_memcpy", "launch_memset"})
