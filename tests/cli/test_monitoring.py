"""`lucid profile run` with its monitor: on a fake driver, without one, switched off, and with a traced process."""

import sys
from pathlib import Path

import pytest

from cli.harness import Lucid, Ran
from support import fake_nvml
from support.fake_nvml import UUID

# Steps for long enough that a second-long mean exists, without torch.
IDLE = """
import time
import lucid_profiler
time.sleep(1)  # as long as an import of torch
with lucid_profiler.fit():
    time.sleep(1.6)
"""
TRAIN = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(40):
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
GPU_METRICS = {"gpu_energy", "gpu_power", "gpu_utilization", "gpu_clock_sm", "gpu_process_memory"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Measure one pair beside a fake H200."""
    folder = tmp_path_factory.mktemp("fake")
    lucid = Lucid(folder)
    env = fake_nvml.environment(fake_nvml.H200, folder)
    return lucid.profile(sys.executable, lucid.script(IDLE), env=env)


def test_the_devices_series_and_metrics_are_in_the_report(ran: Ran) -> None:
    """Each run has samples of GPU and host, and the wall's means."""
    assert ran.code == 0, ran.err
    for run in ran.records("run"):
        monitor = run["monitor"]
        assert [device["uuid"] for device in monitor["devices"]] == [UUID]
        assert monitor["num_samples"] > 10
        assert monitor["memory_api"] == "v2"
        metrics = run["metrics"]
        assert metrics["gpu_power"]["value"] == pytest.approx(412.345)
        assert metrics["gpu_utilization"]["value"] == pytest.approx(0.87)
        assert metrics["gpu_clock_sm"]["value"] == 1980
        assert metrics["gpu_process_memory"]["value"] is None
        assert metrics["cpu_time"]["value"] < 5
    series = {samples["series"] for samples in ran.records("samples")}
    assert {"host", f"gpu:{UUID}", f"gpu:{UUID}:slow"} <= series


def test_energy_is_counted_between_the_ends_of_fit(ran: Ran) -> None:
    """The agent marks them, so the driver's counter answers; the fake card draws 412 W without a pause."""
    for run in ran.records("run"):
        (energy,) = run["monitor"]["energy"]
        assert energy["source"] == "counter"
        wall_s = (run["wall"]["end_ns"] - run["wall"]["begin_ns"]) / 1e9
        assert energy["value_j"] == pytest.approx(412.345 * wall_s, abs=2 * 412.345 * 0.1 + 5)
        assert run["metrics"]["gpu_energy"]["value"] == energy["value_j"]


def test_the_table_names_what_was_sampled_and_what_it_cost(ran: Ran) -> None:
    """In words, beside the metrics."""
    assert "GPU power" in ran.out
    assert "sampled   " in ran.out
    assert "its own CPU share" in " ".join(ran.out.split())
    assert "the driver's energy counter" in " ".join(ran.out.split())


def test_without_a_driver_the_reason_is_named(lucid: Lucid) -> None:
    """The same metrics, null; the host is sampled all the same."""
    ran = lucid.profile(sys.executable, "-c", "pass", env={"LD_LIBRARY_PATH": ""})
    assert ran.code == 0, ran.err
    for run in ran.records("run"):
        assert all(run["metrics"][name]["value"] is None for name in GPU_METRICS)
        assert all(run["metrics"][name]["reason"] for name in GPU_METRICS)


@pytest.mark.parametrize(
    ("option", "reason", "has_host"), [(("--no-nvml",), "nvml_off", True), (("--interval", "0"), "monitor_off", False)]
)
def test_sampling_can_be_switched_off(
    option: tuple[str, ...], reason: str, has_host: bool, lucid: Lucid, tmp_path: Path
) -> None:
    """The driver alone, or everything; the report says so."""
    env = fake_nvml.environment(fake_nvml.H200, tmp_path)
    ran = lucid.profile(sys.executable, "-c", "import time; time.sleep(1.8)", options=option, env=env)
    assert ran.code == 0, ran.err
    for run in ran.records("run"):
        assert run["metrics"]["gpu_power"]["reason"] == reason
        assert (run["metrics"]["cpu_time"]["value"] is not None) is has_host


def test_the_agent_can_be_switched_off(lucid: Lucid) -> None:
    """The process has nothing of lucid's; its wall is the process's, and nothing is compared."""
    script = (
        "import sys, os; assert not [n for n in sys.modules if 'lucid' in n]; assert 'LUCID_RUN_DIR' not in os.environ"
    )
    ran = lucid.profile(sys.executable, "-c", script, options=("--no-agent",))
    assert ran.code == 0, ran.err
    for run in ran.records("run"):
        assert run["agent"]["reason"] == "agent_off"
        assert run["wall"]["source"] == "process"
    assert "the agent was switched off" in " ".join(ran.out.split())


def test_a_traced_process_of_each_arm_is_never_among_the_runs(lucid: Lucid) -> None:
    """It comes after them, and its table is a record of its own."""
    ran = lucid.profile(sys.executable, lucid.script(TRAIN), options=("--kernels",))
    assert ran.code == 0, ran.err
    assert len(ran.records("run")) == 2
    tables = ran.records("kernels")
    assert [table["arm"] for table in tables] == ["native", "captured"]
    for table in tables:
        assert table["table"]["num_steps"] == 20
        assert table["table"]["device"] == "cpu"
        assert any("addmm" in row["name"] for row in table["table"]["rows"])
    assert "never timed" in " ".join(ran.out.split())


def test_no_timed_process_is_traced_by_inheritance(lucid: Lucid) -> None:
    """What asks for a trace, or for saved values, does not come through from the surroundings."""
    names = ("LUCID_KERNELS", "LUCID_SAVE_STATE", "LUCID_SAVE_NAME", "LUCID_SAVE_STEP", "LUCID_STEP_DIGESTS")
    script = f"import os; assert not set(os.environ) & set({names})"
    ran = lucid.profile(sys.executable, "-c", script, env=dict.fromkeys(names, "5"))
    assert ran.code == 0, ran.err


def test_what_a_monitor_takes_to_start_is_not_measured(lucid: Lucid, tmp_path: Path) -> None:
    """Its package is slow to load here: neither the wall nor the limit of a run waits for it."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import sys, time\nif 'lucid_profiler.monitor' in ' '.join(sys.orig_argv): time.sleep(1.5)\n"
    )
    env = {"PYTHONPATH": str(slow)}
    ran = lucid.profile("sleep", "0.05", env=env)
    assert ran.code == 0, ran.err
    for run in ran.records("run"):
        assert run["process_ns"] < 1_400_000_000
        assert run["metrics"]["cpu_time"]["reason"] == "ended_first"
        assert not run["notes"]
    late = lucid.profile("sleep", "1", options=("--timeout", "0.5"), env=env)
    assert late.code == 8, late.err
    assert late.records("run")[0]["status"] == "timeout"


@pytest.mark.parametrize("interval", ["nan", "-1", "0.0005", "inf", "7200"])
def test_an_interval_that_cannot_be_kept_is_refused(lucid: Lucid, interval: str) -> None:
    """Before anything runs."""
    ran = lucid.profile("true", options=("--interval", interval))
    assert ran.code == 2
    assert not ran.report.exists()


def test_kernels_need_the_agent(lucid: Lucid) -> None:
    """Nothing else could trace the process."""
    ran = lucid.profile("true", options=("--kernels", "--no-agent"))
    assert ran.code == 2
    assert "--kernels needs the agent" in ran.err


def test_no_monitor_is_left_behind(ran: Ran) -> None:
    """Neither process nor directory."""
    mine = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"lucid_profiler.monitor" in _read(path) and str(ran.report.parent).encode() in _read(path)
    ]
    assert not mine


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
