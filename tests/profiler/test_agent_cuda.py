"""The agent beside a program on a CUDA device: what it measures there, and that nothing waits for it."""

import json
from pathlib import Path
from statistics import median

import pytest

from lucid_profiler.entries import (
    AllocatorEntry,
    CaptureEntry,
    DeviceEntry,
    DeviceTimesEntry,
    NonfiniteEntry,
    NoteEntry,
)
from support.under_agent import Ran, run_under_agent

pytestmark = pytest.mark.gpu

# Fifty steps of which each keeps the device busy for a known part, then one inside a capture, then more steps.
MEASURED = """
import json, time, warnings, torch
import lucid_profiler

CYCLES = 4_000_000

class Sleeper(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    @torch.no_grad()
    def step(self, closure=None):
        torch.cuda._sleep(CYCLES)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.01)

def sleep_ns(cycles):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) * 1e6)

net = torch.nn.Linear(512, 512).cuda()
optimizer = Sleeper(net.parameters())
inputs = torch.randn(64, 512).cuda()

def step():
    optimizer.zero_grad()
    torch.cuda._sleep(2 * CYCLES)
    loss = net(inputs).square().mean()
    loss.backward()
    optimizer.step()
    lucid_profiler.loss(loss.detach())

step()
sleep_ns(CYCLES)
update_ns = sleep_ns(CYCLES)
with lucid_profiler.fit():
    warnings.simplefilter("ignore")
    torch.cuda.set_sync_debug_mode("error")
    begin_ns = time.monotonic_ns()
    for _ in range(50):
        step()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    wall_ns = time.monotonic_ns() - begin_ns
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        net(inputs).square().mean().backward()
        optimizer.step()
    for _ in range(3):
        graph.replay()
    for _ in range(10):
        step()
held = torch.cuda.memory_reserved()
print(json.dumps({"update_ns": update_ns, "wall_ns": wall_ns, "reserved_bytes": held}))
"""

DIVERGES = """
import warnings, torch
import lucid_profiler
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).cuda()
half = torch.nn.Parameter(torch.full((32,), 60000.0).half().cuda())
optimizer = torch.optim.SGD([*net.parameters(), half], lr=0.001, foreach=True)
inputs, bad = torch.randn(4, 64).cuda(), torch.tensor(float("nan")).cuda()
side = torch.cuda.Stream()

def step(number):
    optimizer.zero_grad()
    loss = net(inputs).square().mean()
    loss.backward()
    if number == 7:
        net[1].weight.grad.view(-1)[100:101].add_(bad)
    optimizer.step()
    lucid_profiler.loss(loss)

warnings.simplefilter("ignore")
for number in range(1, 13):
    if number == 2:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    if number % 2:
        step(number)
    else:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(number)
        torch.cuda.current_stream().wait_stream(side)
torch.cuda.set_sync_debug_mode("default")
"""

# CUDA is initialised and nothing lies on it; the parameters are on the host.
ON_THE_HOST = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for number in range(6):
    weight.grad = torch.ones(2)
    optimizer.step()
    print(torch.cuda.is_initialized(), end=" ")
    if number == 2:
        torch.cuda.init()
        had_context = torch._C._cuda_hasPrimaryContext(0)
assert torch.cuda.memory_reserved() == 0
assert torch._C._cuda_hasPrimaryContext(0) == had_context
"""

CAPTURES = """
import torch
from lucid_optim import MuSGD
net = torch.nn.Linear(32, 32).cuda()
optimizer = MuSGD(net.parameters(), lr=0.01)
inputs = torch.randn(4, 32).cuda()
for _ in range(10):
    optimizer.zero_grad()
    net(inputs).square().mean().backward()
    optimizer.step()
"""

FORKS = """
import gc, os, warnings, torch
warnings.simplefilter("ignore")  # Python advises against forks beside threads
net = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    net(torch.ones(2, 8).cuda()).sum().backward()
    optimizer.step()
for _ in range(5):
    step()
child = os.fork()
if child == 0:
    gc.collect()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for _ in range(5):
    step()
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Return the run of a script that forbids synchronisation in fifty steps, and captures one."""
    directory = tmp_path_factory.mktemp("measured")
    return run_under_agent(directory, MEASURED, LUCID_ALLOCATOR_INTERVAL_S="0.01", LUCID_PRIVATE_POOLS="1")


def test_the_device_times_of_all_steps_but_the_captured_are_known(measured: Ran) -> None:
    """One step was inside a capture: it is counted, has no record, and the step after it no step time."""
    assert measured.trace.last(DeviceTimesEntry) == DeviceTimesEntry(
        num_steps=62, num_results=61, num_captured=1, num_behind=0
    )
    records = measured.trace.device_times.records
    assert [record.step for record in records] == [number for number in range(1, 63) if number != 52]
    assert [record.step for record in records if record.step_ns is None] == [1, 53]
    assert len(measured.trace.steps.records) == 62


def test_device_times_are_those_of_the_work(measured: Ran) -> None:
    """The update takes at least what its kernel takes, and all steps together take the wall time."""
    said = json.loads(measured.stdout)
    records = [record for record in measured.trace.device_times.records if 2 < record.step <= 51]
    updates_ns = [record.optimizer_ns or 0 for record in records]
    steps_ns = [record.step_ns or 0 for record in records]
    assert median(updates_ns) > 0.5 * said["update_ns"]
    assert all(0 < update_ns < step_ns for update_ns, step_ns in zip(updates_ns, steps_ns, strict=True))
    # A forward pass sleeps for twice as long as an update.
    assert median(steps_ns) > 1.5 * median(updates_ns)
    assert 0.8 * said["wall_ns"] < sum(steps_ns) < 1.05 * said["wall_ns"]


def test_results_belong_to_the_steps_of_the_host(measured: Ran) -> None:
    """Each has the begin of its step's own record."""
    begins_ns = {record.step: record.begin_ns for record in measured.trace.steps.records}
    assert all(begins_ns[record.step] == record.begin_ns for record in measured.trace.device_times.records)


def test_allocator_readings_are_consistent(measured: Ran) -> None:
    """Peaks are not below what is held, reserved not below allocated, and the last reading is the program's own."""
    readings = measured.trace.all(AllocatorEntry)
    assert len(readings) >= 3
    for one in readings:
        allocated, reserved = one.allocated_bytes or 0, one.reserved_bytes or 0
        assert 0 < allocated <= (one.peak_allocated_bytes or 0)
        assert allocated <= reserved <= (one.peak_reserved_bytes or 0)
        assert (one.device, one.num_alloc_retries, one.num_ooms) == (0, 0, 0)
    assert readings[-1].reserved_bytes == json.loads(measured.stdout)["reserved_bytes"]
    assert [one.mono_ns for one in readings] == sorted(one.mono_ns for one in readings)


def test_private_pools_are_known_once_a_graph_is_there(measured: Ran) -> None:
    """None of it before the capture, some of the reserved memory while the graph is kept."""
    readings = [one for one in measured.trace.all(AllocatorEntry) if one.private_pools_bytes is not None]
    assert len(readings) >= 2
    assert readings[0].private_pools_bytes == 0
    pools, allocated = readings[-1].private_pools_bytes or 0, readings[-1].private_pools_allocated_bytes or 0
    assert 0 < pools <= (readings[-1].reserved_bytes or 0)
    assert allocated <= pools


def test_the_device_in_use_is_named(measured: Ran) -> None:
    """By the index of its readings, and by what other tools know it by."""
    (device,) = measured.trace.all(DeviceEntry)
    assert (device.device, len(device.uuid or "")) == (0, 36)
    assert device.name
    assert (device.total_bytes or 0) > max(one.reserved_bytes or 0 for one in measured.trace.all(AllocatorEntry))


def test_a_loss_on_the_device_is_judged_without_waiting(measured: Ran) -> None:
    """All calls, also those under a ban on synchronisation."""
    assert measured.trace.all(NonfiniteEntry) == [NonfiniteEntry(what="loss", num_checked=61)]


def test_the_first_step_that_was_not_finite_is_found(tmp_path: Path) -> None:
    """Over two streams and two dtypes, without a synchronisation; large finite halves are not mistaken for infinite."""
    ran = run_under_agent(tmp_path, DIVERGES, LUCID_NONFINITE="1")
    loss, parameters = ran.trace.all(NonfiniteEntry)
    assert (loss.what, loss.step, loss.num_checked) == ("loss", 8, 12)
    assert (parameters.name, parameters.step, parameters.num_checked) == ("1.weight", 7, 12)
    assert parameters.num_unjudged == 0


def test_nothing_of_ours_begins_to_use_cuda(tmp_path: Path) -> None:
    """With parameters on the host nothing is initialised, and no memory is taken where the program has none."""
    ran = run_under_agent(tmp_path, ON_THE_HOST, LUCID_NONFINITE="1", LUCID_PRIVATE_POOLS="1")
    assert ran.stdout.split() == [*["False"] * 3, *["True"] * 3]
    assert not list(ran.run_dir.glob("device-*"))
    assert not ran.trace.all(AllocatorEntry)
    assert not ran.trace.all(NoteEntry)


def test_the_first_replay_of_an_optimizer_is_told(tmp_path: Path) -> None:
    """Two steps warm up, the third is replayed, and each has a device time of its own."""
    ran = run_under_agent(tmp_path, CAPTURES, LUCID_CAPTURE_UPDATES="1")
    capture = ran.trace.last(CaptureEntry)
    assert capture is not None
    assert capture.capture is not None
    (report,) = capture.capture
    assert (report["index"], report["first_replay_step"], report["num_replays"]) == (0, 3, 8)
    assert len(ran.trace.device_times.records) == 10
    assert all((record.optimizer_ns or 0) > 0 for record in ran.trace.device_times.records)


def test_a_fork_of_a_program_on_the_device_ends_in_peace(tmp_path: Path) -> None:
    """The child frees nothing of CUDA's, and the parent goes on measuring."""
    ran = run_under_agent(tmp_path, FORKS)
    assert len(ran.trace.device_times.records) == 10
