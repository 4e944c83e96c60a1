"""One measurement on a CUDA device: device memory, the device's identity, parity, and no synchronisation of ours."""

import sys
from pathlib import Path

import pytest

from cli.harness import Lucid

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_digits.py"

# Seconds; the first process on a machine compiles the kernels.
PATIENCE = 240

STEPS_UNDER_GUARD = """
import torch
from lucid_optim import MuSGD
torch.manual_seed(0)
net = torch.nn.Linear(8, 8).cuda()
optimizer = MuSGD(net.parameters(), lr=0.1)
inputs = torch.randn(4, 8).cuda()
for step in range(5):
    if step == 2:  # a captured optimizer records in this step
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    optimizer.zero_grad()
    net(inputs).square().mean().backward()
    optimizer.step()
torch.cuda.set_sync_debug_mode("default")
"""


def test_the_example_is_measured_on_the_device(lucid: Lucid) -> None:
    """Both arms train to the same bytes, one natively, one with replays; peaks and the GPU are in the report."""
    ran = lucid.profile(sys.executable, str(EXAMPLE), "--epochs", "1", "--device", "cuda", timeout=PATIENCE)
    assert ran.code == 0, ran.err
    runs = ran.records("run")
    assert [run["status"] for run in runs] == ["ok", "ok"]
    for run in runs:
        allocated, reserved = run["metrics"]["peak_allocated"], run["metrics"]["peak_reserved"]
        assert allocated["unit"] == reserved["unit"] == "By"
        assert 0 < allocated["value"] <= reserved["value"]
        assert run["agent"]["num_errors"] == 0, run["notes"]
        assert run["wall"]["source"] == "fit"
    groups = {run["arm"]: run["capture"][0]["groups"] for run in runs}
    assert [group["replays"] for group in groups["native"]] == [0] * len(groups["native"])
    assert all(group["replays"] > 10 and group["reasons"] == {"warming_up": 2} for group in groups["captured"])
    identity = next(env["identity"] for env in ran.records("env") if env["scope"] == "process")
    assert identity["gpu_name"]
    assert len(identity["gpu_uuid"]) >= 36
    (pair,) = ran.records("pair")
    assert pair["parity"]["status"] == "equal"
    parts = {state["part"] for state in ran.records("state")}
    assert {"parameters", "optimizer_state", "model", "optimizer", "losses", "metrics"} <= parts


def test_the_agent_never_synchronises_a_step(lucid: Lucid) -> None:
    """A script that forbids synchronisation while it steps runs under the agent as it does without."""
    script = lucid.script(STEPS_UNDER_GUARD)
    ran = lucid.profile(sys.executable, script, timeout=PATIENCE)
    assert ran.code == 0, ran.err
    for run in ran.records("run"):
        assert run["agent"]["num_steps"] == 5
        assert run["agent"]["num_errors"] == 0, run["notes"]
        assert run["metrics"]["peak_allocated"]["value"] > 0
