"""The built-in fit on a CUDA device: from process to process it ends in the same bytes."""

import sys

import pytest

from cli.harness import Lucid

pytestmark = pytest.mark.gpu

PARTS = ("model", "optimizer", "scheduler", "ema", "losses", "metrics")
SMALL = ["--size", "320", "--num-train", "24", "--num-val", "8", "--epochs", "2", "--warmup-epochs", "1"]


def test_two_native_fits_of_the_gpu_preset_end_in_the_same_bytes(lucid: Lucid) -> None:
    """Nano in bfloat16, with loader workers and colours shifted on the device: all parts are observed and equal."""
    command = (sys.executable, "-m", "lucid_cli.workloads.detection", "--preset", "gpu", *SMALL, "--workers", "2")
    ran = lucid.profile("env", "LUCID_CAPTURE_UPDATES=0", *command, timeout=180)
    assert ran.code == 0, ran.err
    digests = [
        {state["part"]: state["digest"] for state in ran.records("state") if state["run"] == run} for run in (0, 1)
    ]
    assert {*PARTS, "parameters", "optimizer_state", "settings"} <= digests[0].keys()
    assert digests[0] == digests[1]
    for record in ran.records("run"):
        assert record["metrics"]["peak_allocated"]["value"] > 0
        assert record["agent"]["num_steps"] == 12
    assert "lucid_cli.workloads.detection" in ran.records("header")[0]["command"]
