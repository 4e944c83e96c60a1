import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from lucid_cli.idle import MAX_SHARE, check_idle, look_between_runs, target_devices
from lucid_profiler.errors import EnvironmentUnusableError
from support import fake_nvml
from support.fake_nvml import UUID

OTHER = "GPU-99999999-2222-3333-4444-555555555555"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processors be idle, whatever else runs."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(psutil, "cpu_percent", lambda _interval: 0.0)


def _install(monkeypatch: pytest.MonkeyPatch, folder: Path, **calls: Any) -> None:
    fake_nvml.install(fake_nvml.scenario(fake_nvml.device(**calls)), folder, monkeypatch)


def test_an_idle_machine_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first run and between runs."""
    _install(monkeypatch, tmp_path)
    check_idle({}, with_nvml=True)
    assert look_between_runs({}, with_nvml=True) == []


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_process_on_a_gpu_is_named_with_it(is_seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that cannot be seen from here."""
    _install(monkeypatch, tmp_path, compute_processes=[[os.getpid() if is_seen else 2**21, 2**30]])
    assert look_between_runs({}, with_nvml=True) == [f"1 process on {UUID}"]
    with pytest.raises(EnvironmentUnusableError, match=f"not idle: 1 process on {UUID}; wait until it is"):
        check_idle({}, with_nvml=True)


def test_a_gpu_that_the_command_may_not_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is the driver where it is not to be asked."""
    busy = fake_nvml.device(uuid=OTHER, pci="00000000:02:00.0", compute_processes=[[os.getpid(), 2**30]])
    fake_nvml.install(fake_nvml.scenario(fake_nvml.device(), busy), tmp_path, monkeypatch)
    environ = {"CUDA_VISIBLE_DEVICES": "0"}
    assert [device.uuid for device in target_devices(environ)] == [UUID]
    assert look_between_runs(environ, with_nvml=True) == []
    assert look_between_runs({}, with_nvml=True) == [f"1 process on {OTHER}"]
    assert look_between_runs({}, with_nvml=False) == []


def test_load_on_the_processors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of the last minute counts before the first run."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (8 * MAX_SHARE, 9.0, 9.0))
    check_idle({}, with_nvml=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 0.0, 0.0))
    with pytest.raises(EnvironmentUnusableError, match=r"a load of 2\.50 on 8 processors in the last minute"):
        check_idle({}, with_nvml=False)


def test_between_runs_only_the_present_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of a minute still holds the run before."""
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    assert look_between_runs({}, with_nvml=False) == []
    monkeypatch.setattr(psutil, "cpu_percent", lambda _interval: 26.0)
    assert look_between_runs({}, with_nvml=False) == ["its processors are busy 26 % of the time"]
