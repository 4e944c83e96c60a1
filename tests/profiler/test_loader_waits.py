import errno
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lucid_profiler import loader_waits
from lucid_profiler.collect import observe
from lucid_profiler.journal import Guard, Journal
from lucid_profiler.loader_waits import LoaderWaits, WaitTrace, read_waits, waited_ns
from lucid_profiler.records import Metric, Wall
from lucid_profiler.ring import SlotWriter

ORIGINAL = _BaseDataLoaderIter.__next__


class Slow(Dataset[int]):
    """Items that take their time."""

    def __init__(self, num: int = 4, *, seconds: float = 0.002) -> None:
        self.num = num
        self.seconds = seconds

    def __len__(self) -> int:
        """Return their number."""
        return self.num

    def __getitem__(self, index: int) -> int:
        """Return the index, after a while."""
        time.sleep(self.seconds)
        return index


class Outer(IterableDataset[int]):
    """Takes its items from another loader within its own."""

    def __iter__(self) -> Iterator[int]:
        """Yield them."""
        yield from (int(batch[0]) for batch in DataLoader(Slow(), batch_size=1))


@pytest.fixture
def waits(tmp_path: Path) -> Iterator[LoaderWaits]:
    """Return a measurement that is in place, and take it away after the test."""
    found = LoaderWaits(tmp_path / "waits-1.ring", guard=Guard())
    found.install()
    yield found
    found.remove()
    assert _BaseDataLoaderIter.__next__ is ORIGINAL


def _read(folder: Path) -> WaitTrace:
    return read_waits(folder / "waits-1.ring")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_batch_is_a_wait_and_the_values_are_the_program_s(
    waits: LoaderWaits, tmp_path: Path, num_workers: int
) -> None:
    """The last one is the wait for the end; workers, which are forked, record nothing into the file of their parent."""
    begin_ns = time.monotonic_ns()
    batches = [batch.tolist() for batch in DataLoader(Slow(), batch_size=2, num_workers=num_workers)]
    end_ns = time.monotonic_ns()
    trace = _read(tmp_path)
    assert batches == [[0, 1], [2, 3]]
    assert waits.num_waits == trace.num_waits == len(trace.waits) == 3
    assert all(begin_ns <= begin <= end <= end_ns for begin, end in trace.waits)
    if num_workers == 0:
        assert (waited_ns(trace, begin_ns, end_ns) or 0) >= 4 * 2_000_000  # the four sleeps are inside


def test_a_loader_within_a_loader_is_one_wait(waits: LoaderWaits, tmp_path: Path) -> None:
    """Its time would count twice."""
    assert len(list(DataLoader(Outer(), batch_size=4))) == 1
    assert waits.num_waits == _read(tmp_path).num_waits == 2


def test_what_other_threads_take_is_no_wait_of_the_training(waits: LoaderWaits) -> None:
    """A program that fetches ahead in a thread waits elsewhere."""
    thread = threading.Thread(target=lambda: list(DataLoader(Slow(), batch_size=2)))
    thread.start()
    thread.join()
    assert waits.num_waits == 0


def test_errors_of_a_dataset_are_the_program_s(waits: LoaderWaits) -> None:
    """They come through as they are, and the next wait is measured again."""

    class Broken(Slow):
        def __getitem__(self, index: int) -> int:
            raise ZeroDivisionError(index)

    with pytest.raises(ZeroDivisionError):
        next(iter(DataLoader(Broken(), batch_size=2)))
    assert len(list(DataLoader(Slow(), batch_size=2))) == 2
    assert waits.num_waits == 4


def test_the_method_looks_like_torch_s(waits: LoaderWaits) -> None:
    """By name and documentation, and its class is pickled as before."""
    assert (_BaseDataLoaderIter.__next__.__name__, _BaseDataLoaderIter.__next__.__doc__) == (
        "__next__",
        ORIGINAL.__doc__,
    )
    assert pickle.loads(pickle.dumps(_BaseDataLoaderIter)) is _BaseDataLoaderIter
    assert waits.num_waits == 0


def test_somebody_s_own_wrapper_stays_when_the_clock_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking the first original back would take theirs away."""
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", ORIGINAL)
    waits = LoaderWaits(tmp_path / "waits-1.ring", guard=Guard())
    waits.install()
    inner = _BaseDataLoaderIter.__next__
    num = 0

    def theirs(iterator: Any) -> Any:
        nonlocal num
        num += 1
        return inner(iterator)

    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", theirs)
    waits.remove()
    assert len(list(DataLoader(Slow(), batch_size=2))) == 2
    assert (num, waits.num_waits, (tmp_path / "waits-1.ring").exists()) == (3, 0, False)


def test_a_torch_without_such_iterators_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is nothing to say."""
    monkeypatch.delattr(torch.utils.data.dataloader, "_BaseDataLoaderIter")
    waits = LoaderWaits(tmp_path / "waits-1.ring", guard=Guard())
    waits.install()
    waits.remove()
    assert waits.num_waits == 0


def test_without_room_for_the_records_the_batches_still_come(
    waits: LoaderWaits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried once, and the waits are counted all the same."""
    tried = []

    def no_room(path: Path, *_args: Any, **_kwargs: Any) -> None:
        tried.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(loader_waits, "SlotWriter", no_room)
    assert len(list(DataLoader(Slow(), batch_size=2))) == 2
    assert (waits.num_waits, tried) == (3, [tmp_path / "waits-1.ring"])


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=20),
    capacity=st.integers(1, 25),
    first=st.integers(0, 200),
    last=st.integers(0, 200),
)
def test_waits_are_cut_to_the_interval_and_never_guessed(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], capacity: int, first: int, last: int
) -> None:
    """With every record the sum is exact; without the oldest ones it is exact too, or not known."""
    begin_ns, end_ns = 1 + min(first, last), 1 + max(first, last)
    path = tmp_path_factory.mktemp("waits") / "waits-1.ring"
    waits = LoaderWaits(path, guard=Guard(), capacity=capacity)
    now, intervals = 1, []
    for pause, length in lengths:
        intervals.append((now + pause, now + pause + length))
        now += pause + length
        waits._record(*intervals[-1])
    trace = read_waits(path)
    inside = sum(max(0, min(end, end_ns) - max(begin, begin_ns)) for begin, end in intervals)
    found = waited_ns(trace, begin_ns, end_ns)
    assert trace.num_waits == len(intervals)
    assert found == inside or (found is None and capacity < len(intervals))
    assert capacity < len(intervals) or found == inside
    if begin_ns <= intervals[0][0] and end_ns >= now:
        assert found == inside


def _metric(folder: Path, *, num_told: int | None, with_agent: bool = True) -> Metric:
    if num_told is not None:
        journal = Journal(folder / "agent-1.jsonl")
        journal.write("steps", num_steps=0, num_waits=num_told, optimizers=[])
        journal.close()
    if with_agent:
        (folder / "agent-1.loaded").touch()
    process = Wall(source="process", begin_ns=1, end_ns=101)
    return observe(folder, run=0, process=process, max_rss_bytes=None, with_agent=with_agent).metrics["data_wait"]


def test_a_run_says_how_long_it_waited(tmp_path: Path) -> None:
    """Within its wall; what is not known has a reason."""
    waits = LoaderWaits(tmp_path / "waits-1.ring", guard=Guard())
    waits._record(1, 21)
    waits._record(91, 121)  # ten of these thirty are inside
    assert _metric(tmp_path, num_told=2) == Metric(value=30 / 1e9, unit="s")


@pytest.mark.parametrize(
    ("recorded", "told", "reason"), [(0, 0, "no_loader"), (0, 3, "waits_not_recorded"), (2, 3, "waits_not_recorded")]
)
def test_waits_that_are_not_there_have_their_reason(tmp_path: Path, recorded: int, told: int, reason: str) -> None:
    """A part of them is no answer."""
    waits = LoaderWaits(tmp_path / "waits-1.ring", guard=Guard())
    for index in range(recorded):
        waits._record(10 * index + 1, 10 * index + 6)
    assert _metric(tmp_path, num_told=told) == Metric(value=None, unit="s", reason=reason)


def test_lost_waits_before_a_later_wall_are_not_known(tmp_path: Path) -> None:
    """How many of them lay in it cannot be told."""
    waits = LoaderWaits(tmp_path / "waits-1.ring", guard=Guard(), capacity=2)
    for begin_ns in (-19, 31, 51):
        waits._record(begin_ns, begin_ns + 10)
    assert _metric(tmp_path, num_told=3) == Metric(value=None, unit="s", reason="waits_lost")


def test_without_an_agent_nothing_is_said_of_waits(tmp_path: Path) -> None:
    """The reason is the agent's absence."""
    assert _metric(tmp_path, num_told=None, with_agent=False) == Metric(value=None, unit="s", reason="agent_off")


def test_a_handler_that_ends_a_record_ends_no_others(
    waits: LoaderWaits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may catch what it raised and go on."""
    loader = DataLoader(Slow(), batch_size=2)
    assert len(list(loader)) == 2
    append = SlotWriter.append

    def interrupted(writer: SlotWriter, first: int, *others: int) -> None:
        signal.raise_signal(signal.SIGUSR1)
        append(writer, first, *others)

    def preempt(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, preempt)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(SlotWriter, "append", interrupted)
            with pytest.raises(TimeoutError):
                next(iter(loader))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(list(loader)) == 2
    assert waits.num_waits == _read(tmp_path).num_waits == 6
