"""CUDA graphs themselves: failures without a trace, memory, streams, threads, process ends."""

import gc
import json
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from lucid_optim import Batch, MuSGD, MuSGDRule, graphs
from support.cuda import synchronisation_forbidden
from support.reference import bits
from support.twins import Twins

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


class FaultyRule(MuSGDRule):
    """Does something at its first recordings that none survives."""

    is_capturable: ClassVar[bool] = True
    faults: ClassVar[list[str]] = []

    def prepare(self, batch: Batch, structure: Any, scalars: Mapping[str, Any]) -> list[Tensor]:
        updates = super().prepare(batch, structure, scalars)
        if self.faults and torch.cuda.is_current_stream_capturing():
            fault = self.faults.pop()
            if fault == "host read":
                updates[0].sum().item()
            elif fault == "exception":
                raise ZeroDivisionError("in the middle")
            elif fault == "out of memory":
                torch.empty(1 << 46, device=CUDA)
            elif fault == "synchronisation":
                torch.cuda.synchronize()
            elif fault == "interrupt":
                raise KeyboardInterrupt
        return updates


class Faulty(MuSGD):
    """Runs the faulty rule."""

    rule = FaultyRule()


def reserved() -> int:
    """Return the allocator's reserved bytes after giving back what nobody uses."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def assert_device_is_sound() -> None:
    """Check that nothing believes a capture to be under way: streams, generators, stream-bound memory, a new graph."""
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(3, device=CUDA)
    torch.nn.functional.dropout(torch.ones(100, device=CUDA), 0.5)
    side = torch.cuda.Stream()
    before = torch.cuda.memory_allocated()
    bound = torch.ones(1 << 20, device=CUDA)
    with torch.cuda.stream(side):
        bound.record_stream(side)
        bound + 1
    del bound
    torch.cuda.synchronize()
    torch.empty(1 << 20, device=CUDA)  # the allocator looks at its events when it is asked
    assert torch.cuda.memory_allocated() <= before
    graph = torch.cuda.CUDAGraph()
    cell = torch.zeros(4, device=CUDA)
    with torch.cuda.graph(graph):
        cell += 1
    graph.replay()
    assert cell.tolist() == [1.0] * 4


@pytest.mark.parametrize("fault", ["host read", "exception", "out of memory", "synchronisation"])
def test_a_recording_that_fails_leaves_no_trace(fault: str) -> None:
    """The step happens natively, once; afterwards the device is sound, memory is back, another optimizer records."""
    twins = Twins("cuda", Faulty)
    twins.step()
    twins.step()
    expected = "out_of_memory" if fault == "out of memory" else "recording_failed"
    before = reserved()
    FaultyRule.faults[:] = [fault]
    try:
        twins.step()
    finally:
        FaultyRule.faults.clear()
    assert_device_is_sound()
    assert reserved() <= before + (2 << 20)
    for _ in range(5):
        twins.step()
    assert twins.reasons() == {"warming_up": 2, expected: 6}
    second = Twins("cuda")
    for _ in range(5):
        second.step()
    assert second.replays() == [3, 3]
    twins.captured.release()
    for _ in range(4):
        twins.step()
    assert twins.recordings() == [1, 1]


def test_an_interrupt_while_recording_is_passed_on() -> None:
    """Ctrl-C is no reason to go on; nothing was written, the device is sound, and the next step is an ordinary one."""
    twins = Twins("cuda", Faulty)
    twins.step()
    twins.step()
    twins.give()
    before = [bits(param) for _, param in twins.pairs()]
    FaultyRule.faults[:] = ["interrupt"]
    with pytest.raises(KeyboardInterrupt):
        twins.captured.step()
    assert [bits(param) for _, param in twins.pairs()] == before
    assert_device_is_sound()
    for _ in range(3):
        twins.captured.step()
        twins.native.step()
        twins.compare()


def test_repeated_failures_keep_no_memory() -> None:
    """Twenty failing recordings leave reserved memory where the second one left it."""
    levels = []
    for _ in range(20):
        twins = Twins("cuda", Faulty)
        twins.step()
        twins.step()
        FaultyRule.faults[:] = ["host read"]
        twins.step()
        del twins
        levels.append(reserved())
    assert_device_is_sound()
    assert max(levels[2:]) - min(levels[2:]) <= 1 << 20


def record_beside(work: Callable[[], None], stop: threading.Event) -> None:
    """Record and replay five times while another thread does its work until it is told to stop."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            twins = Twins("cuda")
            for _ in range(6):
                twins.step()
    finally:
        stop.set()
        thread.join()


def test_pinned_memory_in_another_thread_does_not_matter() -> None:
    """A loader's thread allocates pinned memory all the time; recordings succeed or fall back, bytes agree."""
    stop = threading.Event()
    faults: list[BaseException] = []

    def pin() -> None:
        size = 1
        try:
            while not stop.is_set():
                size = size % 4096 + 1
                torch.empty(size * 1024).pin_memory()
        except BaseException as error:  # noqa: BLE001
            faults.append(error)

    record_beside(pin, stop)
    assert not faults
    assert_device_is_sound()


def test_a_sampling_thread_survives() -> None:
    """A thread that asks for memory and utilisation every millisecond disturbs no recording, and is not disturbed."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    stop = threading.Event()
    counts: list[int] = []

    def sample() -> None:
        number = 0
        while not stop.is_set():
            pynvml.nvmlDeviceGetMemoryInfo(handle)
            pynvml.nvmlDeviceGetUtilizationRates(handle)
            torch.cuda.mem_get_info()
            torch.cuda.memory_stats()
            number += 1
            time.sleep(0.001)
        counts.append(number)

    record_beside(sample, stop)
    assert counts[0] > 10
    assert_device_is_sound()


def test_garbage_is_not_collected_while_recording() -> None:
    """An old graph in a cycle, a threshold of 1, and a new recording; the collector is left as it was."""
    enabled: list[bool] = []
    cell = torch.zeros(1, device="cuda")

    def work() -> None:
        enabled.append(gc.isenabled())
        cell.add_(1)

    graphs.record(work, torch.device("cuda"))
    assert enabled == [False]

    class Cycle:
        pass

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(4):
            twins = Twins("cuda")
            cycle = Cycle()
            cycle.me, cycle.twins = cycle, twins  # type: ignore[attr-defined]
            for _ in range(5):
                twins.step()
            assert twins.replays() == [3, 3]
            del cycle, twins
        assert gc.isenabled()
        gc.disable()
        twins = Twins("cuda")
        for _ in range(4):
            twins.step()
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
    assert_device_is_sound()


def test_nothing_of_torch_is_replaced() -> None:
    """Classes, warning filters and the collector are the same objects after a good and after a failed recording."""

    def settings() -> tuple[Any, ...]:
        return (
            torch.cuda.CUDAGraph,
            torch.cuda.graph,
            torch.cuda.Stream,
            list(warnings.filters),
            gc.isenabled(),
            gc.get_threshold(),
            torch.cuda.current_device(),
            torch.cuda.current_stream(),
        )

    before = settings()
    for faults in ([], ["host read"]):
        twins = Twins("cuda", Faulty)
        FaultyRule.faults[:] = faults
        for _ in range(4):
            twins.step()
        FaultyRule.faults.clear()
        assert settings() == before


def test_replays_do_not_synchronise() -> None:
    """From the third step on, recording included, nothing waits for the device; scalars on it are not read back."""
    twins = Twins("cuda", lr=torch.tensor(0.05).cuda())
    for optimizer in twins.both:
        for group in optimizer.param_groups:
            group["momentum"] = torch.tensor(0.5).cuda()
    twins.step()  # uploads tables and loads kernels, which may wait
    for _ in range(7):
        twins.give()
        torch.cuda.synchronize()
        with synchronisation_forbidden():
            twins.captured.step()
        twins.native.step()
        twins.compare()
    assert twins.replays() == [6, 6]


def events(optimizer: torch.optim.Optimizer, tmp_path: Path) -> tuple[int, int, int]:
    """Return kernels and copies on the device, launches of kernels, and launches of graphs, of one step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch 2.11 warns that one cycle is recorded, which is wanted
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            optimizer.step()
            torch.cuda.synchronize()
    trace.export_chrome_trace(str(tmp_path / "trace.json"))
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [str(event.get("name")) for event in found]
    work = sum(event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"} for event in found)
    launches = sum("LaunchKernel" in name and "Graph" not in name for name in names)
    return work, launches, sum("GraphLaunch" in name for name in names)


def test_a_replay_is_a_handful_of_launches(tmp_path: Path) -> None:
    """Copies, one graph, writes: however many parameters and groups, a few launches in all."""
    twins = Twins("cuda", num_groups=4)
    for _ in range(6):
        twins.step()
    twins.give()
    _, native_launches, _ = events(twins.native, tmp_path)
    _, launches, replays = events(twins.captured, tmp_path)
    assert replays == 1
    assert launches <= 4
    assert launches * 5 < native_launches


def test_memory_is_flat_over_replays_and_recordings() -> None:
    """A hundred recordings, forced by another number of iterations, keep nothing; nor do a hundred replays."""
    twins = Twins("cuda")
    for _ in range(6):
        twins.step()
    level = reserved()
    for _ in range(100):
        twins.step()
    assert reserved() <= level + (1 << 20)
    levels, seconds = [], []
    for number in range(100):
        twins.set(0, ns_steps=2 + number % 2)
        before = twins.captured._capture.setup_seconds
        twins.give()
        for _ in range(10):  # a recording that serves less is followed by a pause
            for optimizer in twins.both:
                optimizer.step()
        if number % 5 == 0:
            levels.append(reserved())
            twins.compare()
        seconds.append(twins.captured._capture.setup_seconds - before)
    assert twins.recordings()[0] == 101
    assert max(levels[1:]) - min(levels[1:]) <= 1 << 20
    assert sorted(seconds[50:])[25] < 3 * sorted(seconds[:50])[25]  # no growth from recording to recording


@pytest.mark.parametrize("how", ["drop", "release"])
def test_memory_comes_back(how: str) -> None:
    """Dropped or released, a recording leaves reserved memory where it was before."""
    twins = Twins("cuda", shapes=[(512, 512)] * 8, num_groups=1)
    twins.step()
    twins.step()
    for optimizer in twins.both:
        optimizer.zero_grad()
    before = reserved()
    twins.step()
    twins.step()
    for optimizer in twins.both:
        optimizer.zero_grad()
    del optimizer
    assert reserved() > before
    if how == "release":
        twins.captured.release()
    else:
        native, state = twins.native, twins.captured.state_dict()
        params = [param for _, param in twins.pairs()]
        twins.captured = native
        assert len(state["state"]) == len(params)
        del native, state
    assert reserved() <= before


def test_an_enclosing_capture_succeeds() -> None:
    """A step inside the user's own capture is native there, and the user's graph replays it."""
    twins = Twins("cuda", num_groups=1)
    for _ in range(4):
        twins.step()
    pairs = twins.pairs()
    twins.give()
    whole = [torch.cuda.CUDAGraph() for _ in range(2)]
    for optimizer, graph in zip(twins.both, whole, strict=True):
        with torch.cuda.graph(graph):
            optimizer.step()
    for _ in range(3):
        for at, (first, second) in enumerate(pairs):
            value = torch.randn(first.shape).cuda()
            assert first.grad is not None
            assert second.grad is not None
            first.grad.copy_(value)
            second.grad.copy_(value)
            assert at >= 0
        for graph in whole:
            graph.replay()
        twins.compare()
    assert twins.reasons() == {"warming_up": 2, "enclosing_capture": 1}
    for _ in range(3):
        twins.step()


def test_two_optimizers_in_two_threads() -> None:
    """First recordings at the same moment, fifty steps each on streams of their own: both equal their native twins."""
    barrier = threading.Barrier(2)
    faults: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            torch.manual_seed(seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                twins = Twins("cuda", shapes=[(64, 96)] * 4 + [(64,)], num_groups=1)
                for step in range(50):
                    if step == 2:
                        barrier.wait(timeout=60)
                    twins.step()
                assert sum(twins.replays()) + sum(twins.reasons().values()) == 50
        except BaseException as error:  # noqa: BLE001
            faults.append(error)
            barrier.abort()

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert_device_is_sound()


def test_a_stopwatch_does_not_wait() -> None:
    """Its time is None while the device is busy, and a number later."""
    watch = graphs.Stopwatch()
    big = torch.randn(8192, 8192, device=CUDA)
    with graphs.measured(watch, CUDA):
        for _ in range(20):
            big = big @ big * 1e-4
    assert watch.seconds() is None
    torch.cuda.synchronize()
    seconds = watch.seconds()
    assert seconds is not None
    assert seconds > 0


SCRIPT = """
import atexit, os, sys, torch
from torch.nn import Parameter

@atexit.register
def report_last():  # registered before lucid_optim's own handler, so it runs after that
    if os.getpid() == pid and "optimizer" in globals():
        report = optimizer.capture_report()
        assert report.pool_bytes == kept > 0 and report.as_dict()["groups"][0]["replays"] >= 3

pid = os.getpid()
from lucid_optim import MuSGD
params = [Parameter(torch.randn(16, 16).cuda()) for _ in range(4)]
optimizer = MuSGD(params, lr=0.1, capture_updates=True, strict=True)
for _ in range(5):
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
assert optimizer.capture_report().groups[0].replays == 3
kept = optimizer.capture_report().pool_bytes
END
"""
FORK = """
import os, warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of threads
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
ENDS = {
    "end of script": ("", 0),
    "exception": ("raise SystemExit(7)", 7),
    "os._exit": ("import os; os._exit(3)", 3),
    "cycle": ("params[0].cycle = optimizer; optimizer.self = optimizer", 0),
    "thread": ("import threading; threading.Thread(target=optimizer.step).start()", 0),
    "dropped": ("del optimizer", 0),
    "fork": (FORK, 0),
}


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start one process for each end, all at the same time: most of their life is importing torch."""
    found = {
        end: subprocess.Popen(
            [sys.executable, "-c", SCRIPT.replace("END", code)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for end, (code, _) in ENDS.items()
    }
    yield found
    for process in found.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("end", ENDS)
def test_a_process_with_live_graphs_ends(end: str, processes: dict[str, subprocess.Popen[str]]) -> None:
    """It ends by itself, quietly, with the script's own status; a report at its very end has all figures."""
    _, stderr = processes[end].communicate(timeout=120)
    assert processes[end].returncode == ENDS[end][1], stderr
    assert not stderr


def test_a_spawned_child_records_for_itself(tmp_path: Path) -> None:
    """A captured optimizer goes to a spawned process by pickle, without its recording."""
    script = tmp_path / "spawned.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch.multiprocessing as mp
            from torch.nn import Parameter
            from lucid_optim import MuSGD

            def train(optimizer):
                for _ in range(5):
                    for param in optimizer.param_groups[0]["params"]:
                        param.grad = torch.ones_like(param)
                    optimizer.step()
                print(optimizer.capture_report().groups[0].replays)

            if __name__ == "__main__":
                optimizer = MuSGD([Parameter(torch.randn(8, 8).cuda())], lr=0.1, capture_updates=True)
                train(optimizer)
                child = mp.get_context("spawn").Process(target=train, args=(optimizer,))
                child.start()
                child.join()
                print(child.exitcode)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=180, check=False)
    assert done.stdout.split() == ["3", "3", "0"], done.stderr


def test_a_second_optimizer_on_the_same_parameters_is_seen() -> None:
    """Two optimizers in turn on one set of parameters: the certificate watches bytes' places, not their values."""
    twins = Twins("cuda", num_groups=1)
    others = [
        torch.optim.SGD([p for g in optimizer.param_groups for p in g["params"]], lr=0.01) for optimizer in twins.both
    ]
    for _ in range(8):
        twins.step()
        for other in others:
            other.step()
        twins.compare()
    assert twins.replays() == [6]
    assert bits(Parameter(torch.zeros(1))) == b"\0\0\0\0"
