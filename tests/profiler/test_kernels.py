"""The counting of traced events, the file of a table, and the trace of a process without a GPU."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lucid_profiler.errors import ReportError
from lucid_profiler.journal import Guard
from lucid_profiler.kernel_counts import count_events
from lucid_profiler.kernel_trace import KernelTrace, classify, plain_events, steps_asked_for
from lucid_profiler.kernels import (
    SCHEMA,
    Event,
    EventKind,
    KernelRow,
    KernelTable,
    Launches,
    cupti_loaded,
    read_table,
    was_traced,
    write_table,
)

STEP_NS = 1_000_000


class Trace:
    """A trace written down event by event; every step lasts `STEP_NS`, and what it launches follows the launch."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.events = [
            Event("step", f"ProfilerStep#{step + 8}", 0, 1 + step * STEP_NS, STEP_NS) for step in range(num_steps)
        ]
        self._last = 0
        self._places: Counter[int] = Counter()

    def launch(self, step: int, kind: EventKind, records: Iterable[tuple[EventKind, str, int]], graph: int = 0) -> None:
        """Add a launch in a step, and its records of (kind, name, duration) far later on the device."""
        self._last += 1
        self._places[step] += 10
        begin_ns = 1 + step * STEP_NS + self._places[step]
        self.events.append(Event(kind, "call", self._last, begin_ns, 5))
        for record_kind, name, duration_ns in records:
            self.events.append(Event(record_kind, name, self._last, begin_ns + 50 * STEP_NS, duration_ns, graph=graph))

    def replay(self, step: int, *names: str, graph: int = 0) -> None:
        """Add a replay of a graph that runs these kernels for 7 ns each."""
        self.launch(step, "launch_graph", [("kernel", name, 7) for name in names], graph)

    def count(self, **options: Any) -> KernelTable:
        """Count all steps."""
        return count_events(self.events, blank(), **({"num_steps": self.num_steps} | options))


def blank(**changes: Any) -> KernelTable:
    """Return a table without counts."""
    fields: dict[str, Any] = {"pid": 1, "device": "cuda", "num_warmup_steps": 8}
    return KernelTable(**(fields | changes))


def counts(rows: tuple[KernelRow, ...] | None) -> dict[str, tuple[int, int]]:
    """Return count and total by name."""
    assert rows is not None
    return {row.name: (row.count, row.total_ns) for row in rows}


def reason_of(trace: Trace) -> str:
    """Return why the replays are withheld, while everything else stays."""
    trace.launch(0, "launch_kernel", [("kernel", "eager", 3)])
    table = trace.count()
    assert table.replay_rows is None
    assert counts(table.rows) == {"eager": (1, 3)}
    assert table.launches is not None
    assert table.launches.kernels == 1
    assert table.replay_reason is not None
    return table.replay_reason


def test_kernels_are_counted_by_name_in_total_and_for_a_step() -> None:
    """Count, total, median and the share of a step; the longest total comes first."""
    trace = Trace(2)
    for duration_ns in (10, 20, 60):
        trace.launch(0, "launch_kernel", [("kernel", "short", duration_ns)])
    trace.launch(1, "launch_kernel", [("kernel", "long", 400)])
    table = trace.count()
    assert table.rows == (
        KernelRow(
            name="long", kind="kernel", count=1, total_ns=400, median_ns=400, count_per_step=0.5, ns_per_step=200.0
        ),
        KernelRow(name="short", kind="kernel", count=3, total_ns=90, median_ns=20, count_per_step=1.5, ns_per_step=45),
    )
    assert table.replay_rows == ()
    assert table.reason is table.replay_reason is None
    assert table.notes == ()


def test_launches_are_told_apart() -> None:
    """Kernels, graphs, copies and fills each have their count."""
    trace = Trace(2)
    for step in range(2):
        trace.launch(step, "launch_kernel", [("kernel", "k", 1)])
        trace.launch(step, "launch_memcpy", [("memcpy", "Memcpy HtoD (Pinned -> Device)", 1)])
        trace.launch(step, "launch_memset", [("memset", "Memset (Device)", 1)])
        trace.launch(step, "launch_memset", [("memset", "Memset (Device)", 1)])
        trace.replay(step, "k", "l")
    table = trace.count()
    assert table.launches == Launches(kernels=2, graphs=2, memcpys=2, memsets=4)
    assert table.launches_per_step == {"kernels": 1, "graphs": 1, "memcpys": 1, "memsets": 2}
    assert counts(table.rows) == {"k": (2, 2), "Memcpy HtoD (Pinned -> Device)": (2, 2), "Memset (Device)": (4, 4)}
    assert counts(table.replay_rows) == {"k": (2, 14), "l": (2, 14)}
    assert table.num_records == 12


def test_equal_names_of_a_copy_and_a_kernel_stay_apart() -> None:
    """A name is counted within its kind."""
    trace = Trace(1)
    trace.launch(0, "launch_kernel", [("kernel", "same", 1)])
    trace.launch(0, "launch_memcpy", [("memcpy", "same", 2)])
    rows = trace.count().rows
    assert rows is not None
    assert [(row.kind, row.total_ns) for row in rows] == [("memcpy", 2), ("kernel", 1)]


def test_replays_that_agree_are_in_the_table() -> None:
    """Each graph has its replays and its nodes."""
    trace = Trace(3)
    for step in range(3):
        trace.replay(step, "a", "b", "a")
    table = trace.count()
    assert table.replay_reason is None
    assert [(graph.num_replays, graph.num_nodes) for graph in table.graphs] == [(3, 3)]
    assert counts(table.replay_rows) == {"a": (6, 42), "b": (3, 21)}
    assert table.rows == ()


def test_one_replay_that_is_short_of_records_withholds_them() -> None:
    """The reason has the numbers; eager kernels and launches stay."""
    trace = Trace(3)
    trace.replay(0, "a", "b")
    trace.replay(1, "a")
    trace.replay(2, "a", "b")
    assert reason_of(trace) == (
        "graph 0 of 1: 2 records in its first replay, but of 3 replays there are 1 of 1, 2 of 2 records"
    )


def test_a_replay_without_any_record_withholds_them() -> None:
    """Not even the kernels of the other replays are believed."""
    trace = Trace(2)
    trace.replay(0, "a")
    trace.replay(1)
    assert reason_of(trace) == "1 of 2 replays have no records"


def test_replays_of_other_kernels_than_the_first_withhold_them() -> None:
    """The same number of records is not enough."""
    trace = Trace(2)
    trace.replay(0, "a", "b")
    trace.replay(1, "a", "a")
    assert reason_of(trace) == "graph 0 of 1: 1 of 2 replays have 2 records of other names than its first"


def test_records_without_a_time_withhold_the_replays() -> None:
    """A kernel that took no time did not run as the record says."""
    trace = Trace(1)
    trace.launch(0, "launch_graph", [("kernel", "a", 0), ("kernel", "b", 7), ("memset", "m", 0)])
    assert reason_of(trace) == "graph 0 of 1: 1 of 3 records have no valid time"


def test_records_beyond_the_nodes_withhold_the_replays() -> None:
    """A record of a graph's kernel that no launch owns means that replays × nodes do not add up."""
    trace = Trace(2)
    trace.replay(0, "a", "b")
    trace.replay(1, "a", "b")
    trace.events.append(Event("kernel", "b", 999, 5, 5))
    assert reason_of(trace) == "replays × nodes are 4 records, but there are 5"


def test_a_record_that_no_launch_owns_is_in_no_row_and_noted() -> None:
    """Its name being unknown to the replays, they stay."""
    trace = Trace(1)
    trace.replay(0, "a")
    trace.events.append(Event("kernel", "stray", 999, 5, 5))
    table = trace.count()
    assert counts(table.replay_rows) == {"a": (1, 7)}
    assert table.rows == ()
    assert table.num_unowned == 1
    assert table.notes == ("1 records belong to no launch that the tracer showed: they are in no row",)


def test_a_kernel_launch_without_a_record_is_noted() -> None:
    """What the tracer lost is counted."""
    trace = Trace(1)
    trace.launch(0, "launch_kernel", [("kernel", "k", 1)])
    trace.launch(0, "launch_kernel", [])
    table = trace.count()
    assert table.num_without_record == 1
    assert table.notes == ("1 of 2 kernel launches left no record: times are a lower bound",)


@pytest.mark.parametrize("ids", [(0, 0), (11, 12)])
def test_two_interleaved_graphs_are_checked_each_by_itself(ids: tuple[int, int]) -> None:
    """With or without an identity in the records, a graph of two nodes and one of three do not disagree."""
    trace = Trace(3)
    for step in range(3):
        trace.replay(step, "a", "b", graph=ids[0])
        trace.replay(step, "a", "b", "c", graph=ids[1])
    table = trace.count()
    assert [(graph.num_replays, graph.num_nodes) for graph in table.graphs] == [(3, 2), (3, 3)]
    assert counts(table.replay_rows) == {"a": (6, 42), "b": (6, 42), "c": (3, 21)}


def test_graphs_with_identities_need_no_equal_steps() -> None:
    """One that is replayed in every second step is still known."""
    trace = Trace(4)
    for step in range(4):
        if step % 2:
            trace.replay(step, "rare", "rare", graph=5)
        trace.replay(step, "a", graph=9)
    table = trace.count()
    assert [(graph.num_replays, graph.num_nodes) for graph in table.graphs] == [(4, 1), (2, 2)]


def test_graphs_without_identities_in_unequal_steps_cannot_be_told_apart() -> None:
    """Their place in the step says nothing then."""
    trace = Trace(3)
    for step in range(3):
        trace.replay(step, "a")
    trace.replay(2, "a")
    assert reason_of(trace) == "the graphs cannot be told apart: some steps have 1 replays, some 2"


@given(
    nodes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    num_steps=st.integers(1, 6),
    told=st.booleans(),
    short=st.none() | st.integers(0, 23),
)
def test_whatever_the_graphs_either_all_records_are_in_rows_or_none(
    nodes: list[int], num_steps: int, told: bool, short: int | None
) -> None:
    """Rows of replays hold replays × nodes records, unless one replay lost a record: then there are no rows."""
    trace = Trace(num_steps)
    num_replays = num_steps * len(nodes)
    for number in range(num_replays):
        place = number % len(nodes)
        size = nodes[place] - (number == short)
        trace.replay(number // len(nodes), *(f"k{index}" for index in range(size)), graph=told * (place + 1))
    table = trace.count()
    is_short = short is not None and short < num_replays
    # A graph's only replay, short of a record but not empty, contradicts nothing.
    if is_short and (num_steps > 1 or nodes[(short or 0) % len(nodes)] == 1):
        assert table.replay_rows is None
    elif not is_short:
        assert table.replay_rows is not None
        assert sum(row.count for row in table.replay_rows) == num_steps * sum(nodes)
        assert {(g.num_replays, g.num_nodes) for g in table.graphs} == {(num_steps, size) for size in nodes}


def test_records_belong_to_the_step_of_their_launch() -> None:
    """What an earlier or later step launched is not counted, whenever the device came to it."""
    trace = Trace(3)
    for step in range(3):
        trace.launch(step, "launch_kernel", [("kernel", f"of step {step}", 1)])
    trace.events.append(Event("launch_kernel", "before", 77, 0, 1))
    trace.events.append(Event("kernel", "of warm-up", 77, 10, 1))
    table = trace.count(num_steps=2)
    assert counts(table.rows) == {"of step 0": (1, 1), "of step 1": (1, 1)}
    assert table.num_steps == 2
    assert table.num_unowned == 0


def test_without_steps_there_is_a_reason_and_no_row() -> None:
    """Neither with no event at all, nor with events of an unfinished step."""
    for events in ([], Trace(1).events[1:], [Event("operator", "aten::mm", 0, 1, 1)]):
        table = count_events(events, blank(), num_steps=20)
        assert table.rows is table.replay_rows is None
        assert table.reason == "no step was traced to its end"
        assert table.num_steps == 0
        assert table.launches_per_step is None


def test_a_trace_without_anything_of_the_device_has_a_reason() -> None:
    """As when another tool holds CUPTI."""
    table = Trace(2).count()
    assert table.rows is None
    assert table.reason is not None
    assert "CUPTI" in table.reason


def test_beyond_the_cap_whole_steps_are_left_out_and_counted() -> None:
    """The steps that fit are counted as if they were all."""
    trace = Trace(4)
    for step in range(4):
        trace.launch(step, "launch_kernel", [("kernel", "k", 1)])
    table = trace.count(max_events=5)
    assert table.num_steps == 2
    assert table.num_dropped_events == 4
    assert counts(table.rows) == {"k": (2, 2)}
    assert table.notes == ("too many events: 2 of 4 steps were counted",)


def test_a_first_step_beyond_the_cap_leaves_no_row() -> None:
    """The reason has both numbers."""
    trace = Trace(1)
    for _ in range(3):
        trace.launch(0, "launch_kernel", [("kernel", "k", 1)])
    table = trace.count(max_events=5)
    assert table.rows is None
    assert table.reason == "the first step alone has 6 events, more than 5"
    assert table.num_dropped_events == 6


def test_an_operator_has_the_time_that_it_spent_itself() -> None:
    """Without that of the operators that it called in its own thread; so the rows add up."""
    operators = [
        Event("operator", "outer", 0, 100, 100, thread=1),
        Event("operator", "inner", 0, 110, 30, thread=1),
        Event("operator", "innermost", 0, 115, 5, thread=1),
        Event("operator", "inner", 0, 140, 30, thread=1),
        Event("operator", "elsewhere", 0, 120, 50, thread=2),
        Event("operator", "next", 0, 200, 10, thread=1),
    ]
    table = count_events([*Trace(1).events, *operators], blank(device="cpu"), num_steps=1)
    assert counts(table.rows) == {
        "outer": (1, 40),
        "inner": (2, 55),
        "innermost": (1, 5),
        "elsewhere": (1, 50),
        "next": (1, 10),
    }
    assert table.launches is None
    assert table.replay_rows == ()


AWKWARD_NAMES = st.text(max_size=30) | st.sampled_from(
    ["", "void f<(int)3, 'x', \"y\">(\\)\n", "caf\udce9", "\ud800", "$float", "\x00", "核"]
)


@given(names=st.lists(AWKWARD_NAMES, min_size=1, max_size=6))
def test_whatever_the_names_a_table_comes_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    """Names are text of any kind; equal ones share a row."""
    trace = Trace(1)
    for name in names:
        trace.launch(0, "launch_kernel", [("kernel", name, 3)])
    table = trace.count()
    assert counts(table.rows) == {name: (num, 3 * num) for name, num in Counter(names).items()}
    path = tmp_path_factory.mktemp("kernels") / "kernels-1.json"
    write_table(table, path)
    assert read_table(path) == table
    assert [other.name for other in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is no table of kernels"),
        (b"{", "it is no table of kernels"),
        (b"[]", "it has the schema None"),
        (b'{"schema":"lucid.kernels/99"}', "it has the schema 'lucid.kernels/99'"),
        (b'{"schema":"lucid.kernels/1","pid":"1"}', "it is no table of kernels"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """With its path and what is wrong."""
    path = tmp_path / "kernels-1.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=words):
        read_table(path)
    assert SCHEMA == "lucid.kernels/1"


@pytest.mark.parametrize(
    ("name", "on_device", "activity", "kind"),
    [
        ("ProfilerStep#9", False, "user_annotation", "step"),
        ("ProfilerStep#9", False, None, "step"),
        ("ProfilerStep#9", True, None, None),
        ("ProfilerStep#9", True, "gpu_user_annotation", None),
        ("Optimizer.step#SGD.step", True, None, None),
        ("cudaLaunchKernel", False, "cuda_runtime", "launch_kernel"),
        ("cudaLaunchKernelExC", False, None, "launch_kernel"),
        ("cudaLaunchCooperativeKernel", False, None, "launch_kernel"),
        ("cuLaunchKernelEx", False, "cuda_driver", "launch_kernel"),
        ("hipExtModuleLaunchKernel", False, None, "launch_kernel"),
        ("cudaGraphLaunch", False, "cuda_runtime", "launch_graph"),
        ("cudaMemcpyAsync", False, None, "launch_memcpy"),
        ("cudaMemsetAsync", False, None, "launch_memset"),
        ("cudaStreamSynchronize", False, "cuda_runtime", None),
        ("cudaLaunchHostFunc", False, None, None),
        ("custom::cudaLaunchKernel", False, "cpu_op", "operator"),
        ("cudaish", False, None, "operator"),
        ("aten::mm", False, "cpu_op", "operator"),
        ("aten::mm", False, None, "operator"),
        ("Activity Buffer Request", False, "overhead", None),
        ("void cutlass::Kernel<x>(y)", True, "kernel", "kernel"),
        ("Memcpy DtoH (Device -> Pageable)", True, None, "memcpy"),
        ("Memcpy DtoH (Device -> Pageable)", True, "gpu_memcpy", "memcpy"),
        ("Memset (Device)", True, "gpu_memset", "memset"),
        ("Memset (Device)", True, None, "memset"),
        ("Stream Sync", True, "cuda_sync", None),
        ("cudaLaunchKernel", True, None, "kernel"),
    ],
)
def test_events_are_classified(name: str, on_device: bool, activity: str | None, kind: EventKind | None) -> None:
    """By the kind of activity where torch tells it, else by the name."""
    assert classify(name, on_device=on_device, activity=activity, is_annotation=False) == kind


def test_ranges_that_a_person_named_are_no_kernels() -> None:
    """Neither on the device nor on the host."""
    for on_device in (True, False):
        assert classify("cudaLaunchKernel", on_device=on_device, activity=None, is_annotation=True) is None


class TracedEvent:
    """An event as torch's tracer gives it; older ones have neither `activity_type` nor `metadata_json`."""

    def __init__(self, name: str | bytes, device: str, **methods: object) -> None:
        self._name = name
        self._device = device
        for method, value in methods.items():
            setattr(self, method, lambda value=value: value)

    def name(self) -> str:
        return self._name if isinstance(self._name, str) else self._name.decode()

    def device_type(self) -> object:
        return SimpleNamespace(name=self._device)

    def correlation_id(self) -> int:
        return 4

    def start_ns(self) -> int:
        return 5

    def duration_ns(self) -> int:
        return 6

    def start_thread_id(self) -> int:
        return 7


def test_events_of_older_and_newer_torch_become_the_same() -> None:
    """The identity of a graph is read where it is told."""
    older = TracedEvent("k", "CUDA")
    newer = TracedEvent("k", "CUDA", activity_type="kernel", metadata_json='"stream": 7, "graph id": 12', x=1)
    assert list(plain_events([older, newer], device="cuda")) == [
        Event("kernel", "k", 4, 5, 6, 7, 0),
        Event("kernel", "k", 4, 5, 6, 7, 12),
    ]


def test_a_name_that_is_no_text_does_not_stop_the_others() -> None:
    """Its bytes are shown."""
    events = list(plain_events([TracedEvent(b"k\xff", "CUDA")], device="cuda"))
    assert [event.name for event in events] == ["k\\xff"]


def test_each_device_has_its_own_events() -> None:
    """Operators are counted on a CPU only, records and launches with CUDA only."""
    events = [
        TracedEvent("aten::mm", "CPU", activity_type="cpu_op"),
        TracedEvent("cudaLaunchKernel", "CPU", activity_type="cuda_runtime"),
        TracedEvent("k", "CUDA", activity_type="kernel"),
        TracedEvent("ProfilerStep#8", "CPU", activity_type="user_annotation", is_user_annotation=True),
    ]
    assert [event.kind for event in plain_events(events, device="cpu")] == ["operator", "step"]
    assert [event.kind for event in plain_events(events, device="cuda")] == ["launch_kernel", "kernel", "step"]


@pytest.mark.parametrize(("text", "steps"), [(None, None), ("", None), (" ", None), ("1", 1), (" 20 ", 20)])
def test_the_environment_asks_for_steps(text: str | None, steps: int | None) -> None:
    """Unset and empty ask for nothing."""
    assert steps_asked_for({} if text is None else {"LUCID_KERNELS": text}) == steps


@pytest.mark.parametrize("text", ["0", "-1", "1001", "x", "1.5", "²", "9" * 5000])
def test_a_number_of_steps_that_is_none_is_refused(text: str) -> None:
    """With what was expected; a trace has a size."""
    with pytest.raises(ValueError, match=r"LUCID_KERNELS is .* expected a number of steps from 1 to 1000"):
        steps_asked_for({"LUCID_KERNELS": text})


@pytest.mark.parametrize("options", [{"num_steps": 0}, {"num_steps": 1001}, {"num_warmup_steps": 0}])
def test_a_trace_refuses_numbers_out_of_range(tmp_path: Path, options: Mapping[str, Any]) -> None:
    """Before anything is traced."""
    with pytest.raises(ValueError, match="both must be from 1 to 1000"):
        KernelTrace(tmp_path, **options)


def test_cupti_is_loaded_or_not_or_not_known(tmp_path: Path) -> None:
    """From the mapped files."""
    maps = tmp_path / "maps"
    assert cupti_loaded(maps) is None
    maps.write_bytes(b"7f00 r-xp /usr/lib/libc.so.6\n")
    assert cupti_loaded(maps) is False
    maps.write_bytes(b"7f00 r-xp /usr/lib/libcupti.so.13\n")
    assert cupti_loaded(maps) is True


def train(run_dir: Path, num_iterations: int, **options: Any) -> KernelTable:
    """Trace steps of two optimizers, each announced twice as an overridden `step` would, and return the table."""
    trace = KernelTrace(run_dir, **options)
    net = torch.nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2)]
    for _ in range(num_iterations):
        net(torch.ones(2, 4)).sum().backward()
        for index, optimizer in enumerate(optimizers):
            trace.before_step(index)
            trace.before_step(index)
            optimizer.step()
            trace.after_step(index)
            trace.after_step(index)
    trace.finish()
    trace.finish()
    (path,) = run_dir.glob("kernels-*.json")
    return read_table(path)


def test_a_process_without_a_gpu_has_operators(tmp_path: Path) -> None:
    """Of whole steps of the first optimizer, after the warm-up; each holds one forward, backward and both updates."""
    table = train(tmp_path, 12, num_steps=5, num_warmup_steps=2)
    assert table.reason is None
    assert (table.device, table.num_warmup_steps, table.num_steps) == ("cpu", 2, 5)
    rows = {row.name: row for row in table.rows or ()}
    assert rows["aten::addmm"].count == 5
    assert rows["aten::addmm"].count_per_step == 1
    assert {row.kind for row in rows.values()} == {"operator"}
    assert all(row.total_ns >= row.median_ns >= 0 for row in rows.values())
    assert not any("#" in name for name in rows)
    assert table.versions["torch"] == torch.__version__
    assert table.num_dropped_events == 0
    assert was_traced(tmp_path)


def test_a_program_that_ends_before_the_counted_steps_leaves_the_reason(tmp_path: Path) -> None:
    """It was traced all the same."""
    table = train(tmp_path, 2, num_steps=5, num_warmup_steps=4)
    assert table.rows is None
    assert table.reason == "2 steps ended, and counting begins after 4 and one more"
    assert was_traced(tmp_path)


def test_a_program_that_ends_within_the_counted_steps_has_those(tmp_path: Path) -> None:
    """Only the whole ones."""
    table = train(tmp_path, 5, num_steps=20, num_warmup_steps=2)
    assert table.num_steps == 3
    assert {row.name: row.count for row in table.rows or ()}["aten::addmm"] == 3


def test_a_window_that_takes_too_long_is_cut_and_noted(tmp_path: Path) -> None:
    """At the end of the step in which that is seen."""
    table = train(tmp_path, 12, num_steps=8, num_warmup_steps=2, max_window_s=-1.0)
    assert table.num_steps == 1
    assert table.notes == ("stopped after -1 s: fewer steps than asked for",)


def test_a_program_with_a_profiler_of_its_own_is_left_alone(tmp_path: Path) -> None:
    """The trace is not made, the program's is."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        table = train(tmp_path, 5)
    assert own.events()
    assert table.reason == "the program uses torch.profiler itself"
    assert not was_traced(tmp_path)


def test_a_process_without_steps_was_not_traced(tmp_path: Path) -> None:
    """Its table says why there is nothing in it."""
    trace = KernelTrace(tmp_path)
    trace.finish()
    (path,) = tmp_path.glob("kernels-*.json")
    assert read_table(path).reason == "no optimizer stepped"
    assert not was_traced(tmp_path)


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    """The process that it came from does."""
    trace = KernelTrace(tmp_path)
    trace.deactivate()
    trace.before_step(0)
    trace.after_step(0)
    trace.finish()
    assert list(tmp_path.iterdir()) == []


class Device:
    """CUDA as the trace asks for it, with a profiler whose trace holds one replay a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.is_capturing = False
        self.pools = [(0, 0)]
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=self._events))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.calls.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"segment_pool_id": pool} for pool in self.pools])
        monkeypatch.setattr(torch.profiler, "profile", self._profile)

    def _profile(self, **options: Any) -> "Device":
        self.calls.append(", ".join(activity.name for activity in options["activities"]))
        return self

    def start(self) -> None:
        self.calls.append("start")

    def step(self) -> None:
        self.calls.append("step")

    def stop(self) -> None:
        self.calls.append("stop")

    def _events(self) -> list[TracedEvent]:
        return [TracedEvent("ProfilerStep#2", "CPU"), TracedEvent("cudaGraphLaunch", "CPU"), TracedEvent("k", "CUDA")]


def test_with_cuda_the_counted_steps_begin_with_an_idle_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was launched in the warm-up is still running then; the trace has both activities."""
    device = Device(monkeypatch)
    trace = KernelTrace(tmp_path, num_steps=2, num_warmup_steps=2)
    for _ in range(4):
        trace.before_step(0)
        trace.after_step(0)
    assert device.calls == ["CPU, CUDA", "start", "step", "synchronize", "step", "step", "step", "stop"]
    (path,) = tmp_path.glob("kernels-*.json")
    table = read_table(path)
    assert table.device == "cuda"
    assert table.launches == Launches(graphs=1)
    assert counts(table.replay_rows) == {"k": (1, 6)}


def test_a_step_inside_a_capture_is_one_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the trace happens while a stream records."""
    device = Device(monkeypatch)
    trace = KernelTrace(tmp_path, num_steps=2, num_warmup_steps=2)
    for is_capturing in (False, True, True, False):
        device.is_capturing = False
        trace.before_step(0)
        device.is_capturing = is_capturing
        trace.after_step(0)
    assert device.calls == ["CPU, CUDA", "start", "step", "synchronize", "step"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"is_capturing": True}, "inside a capture"), ({"pools": [(0, 0), (0, 1)]}, "a private memory pool exists")],
)
def test_a_trace_that_would_come_after_a_capture_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Any], words: str
) -> None:
    """With the reason; the process counts as not traced."""
    device = Device(monkeypatch)
    vars(device).update(changes)
    trace = KernelTrace(tmp_path)
    trace.before_step(0)
    trace.after_step(0)
    trace.finish()
    assert device.calls == []
    (path,) = tmp_path.glob("kernels-*.json")
    assert words in (read_table(path).reason or "")
    assert not was_traced(tmp_path)


class BrokenProfiler:
    """A profiler that fails in one of its calls."""

    def __init__(self, broken: str) -> None:
        self._broken = broken

    def __getattr__(self, name: str) -> Callable[[], None]:
        def call() -> None:
            if name == self._broken:
                raise RuntimeError(f"cannot {name}")

        return call


@pytest.mark.parametrize("broken", ["start", "step", "stop"])
def test_a_tracer_that_fails_does_not_stop_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The fault is counted and is the reason, and the process counts as traced."""
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: BrokenProfiler(broken))
    guard = Guard()
    trace = KernelTrace(tmp_path, num_steps=2, num_warmup_steps=1, guard=guard)
    for _ in range(5):
        trace.before_step(0)
        trace.after_step(0)
    trace.finish()
    (path,) = tmp_path.glob("kernels-*.json")
    assert read_table(path).reason == f"the tracer failed: RuntimeError: cannot {broken}"
    assert guard.num_errors >= 1
    assert was_traced(tmp_path)


def test_a_directory_that_cannot_be_written_means_no_trace(tmp_path: Path) -> None:
    """A process of which nobody could say that it was traced is not traced."""
    guard = Guard()
    trace = KernelTrace(tmp_path / "absent", guard=guard)
    trace.before_step(0)
    assert not trace.is_tracing
    assert guard.num_errors == 2
