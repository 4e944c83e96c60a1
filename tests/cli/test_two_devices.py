"""Measurements on a machine with two CUDA devices: which of them a run used, by UUID, and all of its ranks."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.harness import Lucid, Ran

pytestmark = pytest.mark.two_gpus

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE = 400  # seconds; the first processes on a machine load the libraries and compile the kernels
DIGITS = (str(EXAMPLES / "train_digits.py"), "--epochs", "1", "--device", "cuda")


def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _identity(ran: Ran) -> dict[str, Any]:
    return next(dict(env["identity"]) for env in ran.records("env") if env["scope"] == "process")


def _used(run: dict[str, Any]) -> list[str]:
    return [device["uuid"] for device in run["monitor"]["devices"] if device["is_target"]]


@pytest.mark.parametrize("by", ["index", "uuid", "prefix"])
def test_the_device_that_a_run_was_given_is_the_one_that_is_sampled(lucid: Lucid, by: str) -> None:
    """The first that the program sees is the second of the driver: memory and energy are those of that one."""
    uuid = _uuid(1)
    visible = {"index": "1", "uuid": uuid, "prefix": uuid[:14]}[by]
    ran = lucid.profile(sys.executable, *DIGITS, timeout=PATIENCE, env={"CUDA_VISIBLE_DEVICES": visible})
    assert ran.code == 0, ran.err
    assert f"GPU-{_identity(ran)['gpu_uuid'].removeprefix('GPU-')}" == uuid
    for run in ran.records("run"):
        assert _used(run) == [uuid]
        assert run["metrics"]["gpu_process_memory"]["value"] > run["metrics"]["peak_reserved"]["value"]
        assert run["metrics"]["gpu_energy"]["value"] > 0
        assert [one["uuid"] for one in run["monitor"]["energy"]] == [uuid]
    (pair,) = ran.records("pair")
    assert pair["parity"]["status"] == "equal"


def test_the_ranks_of_a_run_have_a_device_each(lucid: Lucid) -> None:
    """Two processes train through NCCL, natively and captured; their states are equal, and both devices are seen."""
    ran = lucid.profile(
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(EXAMPLES / "two_ranks.py"), "--device", "cuda"),
        timeout=PATIENCE,
    )
    assert ran.code == 0, ran.err
    replays: dict[str, set[int]] = {}
    for run in ran.records("run"):
        assert run["status"] == "ok"
        assert run["agent"]["num_processes"] == 2
        assert run["agent"]["num_errors"] == 0, run["notes"]
        assert {one["uuid"] for one in run["monitor"]["energy"]} == {_uuid(0), _uuid(1)}
        assert run["metrics"]["gpu_process_memory"]["value"] > 0
        replays[run["arm"]] = {group["replays"] for one in run["capture"] for group in one["groups"]}
    assert replays["native"] == {0}
    assert min(replays["captured"]) > 20
    (pair,) = ran.records("pair")
    assert pair["parity"]["status"] == "equal"
