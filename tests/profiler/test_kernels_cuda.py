"""The table of kernels and the empty context on a CUDA device, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from lucid_profiler.context import measure_context
from lucid_profiler.kernels import KernelTable, read_table, was_traced

pytestmark = pytest.mark.gpu

# Seconds; the first process on a machine loads much.
PATIENCE = 240
MIB = 2**20
NUM_STEPS = 6

# Each iteration trains eagerly, and replays one graph of two kernels and another of three.
TRAIN = """
import sys
from pathlib import Path
import torch
from lucid_profiler.kernel_trace import KernelTrace

run_dir, first_capture, num_steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
trace = KernelTrace(run_dir, num_steps=num_steps, num_warmup_steps=4)
net = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=False)
inputs, held = torch.ones(8, 64, device="cuda"), torch.zeros(1000, device="cuda")
graphs, outputs = [], []

def record():
    for num_nodes in (2, 3):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(num_nodes - 1):
                held.add_(1)
            outputs.append(held.sin())
        graphs.append(graph)

for iteration in range(num_steps + 8):
    if iteration == first_capture:
        record()
    for graph in graphs:
        graph.replay()
    optimizer.zero_grad(set_to_none=True)
    net(inputs).square().sum().backward()
    trace.before_step(0)
    optimizer.step()
    trace.after_step(0)
trace.finish()
torch.cuda.synchronize()
assert all(output.isfinite().all() for output in [held, *outputs])
"""


def _trace(run_dir: Path, *, first_capture: int) -> KernelTable:
    """Run the training with its graphs recorded in an iteration, and return what it left."""
    command = [sys.executable, "-c", TRAIN, str(run_dir), str(first_capture), str(NUM_STEPS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ran.returncode == 0, ran.stderr
    (path,) = run_dir.glob("kernels-*.json")
    return read_table(path)


def test_kernels_launches_and_replays_of_a_training(tmp_path: Path) -> None:
    """Eager kernels and launches are there; those inside replays add up, or are withheld with numbers."""
    table = _trace(tmp_path, first_capture=2)
    assert table.reason is None
    assert (table.device, table.num_steps, table.cupti_loaded) == ("cuda", NUM_STEPS, True)
    assert was_traced(tmp_path)
    assert table.launches is not None
    assert table.launches.graphs == 2 * NUM_STEPS
    eager = [row for row in table.rows or () if row.kind == "kernel"]
    assert eager
    assert sum(row.count for row in eager) + table.num_without_record == table.launches.kernels
    assert all(row.total_ns >= row.median_ns > 0 for row in eager)
    assert not any(row.name.startswith(("ProfilerStep", "Optimizer.")) for row in eager)
    if table.replay_rows is None:
        assert any(letter.isdigit() for letter in table.replay_reason or "")
    else:
        assert [(graph.num_replays, graph.num_nodes) for graph in table.graphs] == [(NUM_STEPS, 2), (NUM_STEPS, 3)]
        assert sorted(row.count for row in table.replay_rows) == [2 * NUM_STEPS, 3 * NUM_STEPS]


def test_a_capture_before_the_first_step_is_not_traced(tmp_path: Path) -> None:
    """The program runs as it would, and the reason is there."""
    table = _trace(tmp_path, first_capture=0)
    assert table.rows is None
    assert "private memory pool" in (table.reason or "")
    assert not was_traced(tmp_path)


def test_an_empty_context_has_a_size() -> None:
    """By the driver's own figures of the device; a second measurement gives about the same."""
    import pynvml  # noqa: PLC0415 - only where there is a driver

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        by_uuid = {pynvml.nvmlDeviceGetUUID(handle): handle for handle in handles}

        def read_used(uuid: str) -> int:
            return int(pynvml.nvmlDeviceGetMemoryInfo(by_uuid[uuid]).used)

        first, second = (
            measure_context(sys.executable, tuple(by_uuid), read_used=read_used, timeout_s=PATIENCE) for _ in range(2)
        )
    finally:
        pynvml.nvmlShutdown()
    assert (first.reason, second.reason) == (None, None), first.detail
    assert first.method == second.method == "device"
    assert first.bytes is not None
    assert second.bytes is not None
    assert 50 * MIB < first.bytes < 4096 * MIB
    assert abs(first.bytes - second.bytes) < 32 * MIB
