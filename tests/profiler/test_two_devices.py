"""The agent in a process that uses two CUDA devices, or another than the current one."""

import json
from pathlib import Path

import pytest

from lucid_profiler.entries import AllocatorEntry, DeviceEntry, DeviceTimesEntry, MemoryEntry
from support.under_agent import run_under_agent

pytestmark = pytest.mark.two_gpus

MIB = 2**20

ON_THE_SECOND = """
import json, torch
import lucid_profiler

net = torch.nn.Linear(64, 64).to("cuda:1")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
inputs = torch.randn(8, 64, device="cuda:1")
before = torch._C._cuda_hasPrimaryContext(0)
with lucid_profiler.fit():
    for _ in range(20):
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()
lucid_profiler.state("model", net)
print(json.dumps([before, torch._C._cuda_hasPrimaryContext(0), torch.cuda.current_device()]))
"""

ON_BOTH = """
import json, torch
from lucid_optim import MuSGD

first = torch.nn.Linear(64, 64).to("cuda:1")
second = torch.nn.Linear(64, 64).to("cuda:0")
held = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")
optimizer = MuSGD([*first.parameters(), *second.parameters()], lr=0.01)
inputs = torch.randn(8, 64, device="cuda:1")
for _ in range(20):
    optimizer.zero_grad()
    second(first(inputs).to("cuda:0")).square().mean().backward()
    optimizer.step()
print(json.dumps([torch.cuda.max_memory_allocated(index) for index in range(2)]))
"""


def test_a_device_that_is_only_the_current_one_is_left_alone(tmp_path: Path) -> None:
    """What trains on the second device gets no context on the first, is timed, and named by its own."""
    ran = run_under_agent(tmp_path, ON_THE_SECOND)
    said, trace = json.loads(ran.stdout), ran.trace
    assert said[1:] == [said[0], 0]
    assert [entry.device for entry in trace.all(DeviceEntry)] == [1]
    assert {entry.device for entry in trace.all(AllocatorEntry)} == {1}
    times = trace.last(DeviceTimesEntry)
    assert times is not None
    assert (times.num_steps, times.num_results) == (20, 20)
    assert all((record.optimizer_ns or 0) > 0 for record in trace.device_times.records)
    assert len(trace.steps.records) == 20


def test_an_optimizer_on_two_devices_has_both_in_the_records(tmp_path: Path) -> None:
    """Readings and names of each; the peak is that of the one which held most, although the other's time is taken."""
    ran = run_under_agent(tmp_path, ON_BOTH, LUCID_ALLOCATOR_INTERVAL_S="0.001")
    said, trace = json.loads(ran.stdout), ran.trace
    assert [entry.device for entry in trace.all(DeviceEntry)] == [0, 1]
    assert {entry.device for entry in trace.all(AllocatorEntry)} == {0, 1}
    memory = trace.last(MemoryEntry)
    assert memory is not None
    assert memory.peak_allocated_bytes == max(said) > 64 * MIB
    times = trace.last(DeviceTimesEntry)
    assert times is not None
    assert times.num_results == 20
