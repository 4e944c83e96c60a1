import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lucid_optim
from lucid_profiler.checkup import container, environment, host, places, processes
from lucid_profiler.checkup.catalogue import CATALOGUE
from lucid_profiler.checkup.driver import DriverFacts, look_at_driver
from lucid_profiler.checkup.finding import AREAS, Finding, unknown
from lucid_profiler.checkup.gpu import EVENTS
from lucid_profiler.checkup.interpreter import Told, ask_interpreter
from lucid_profiler.checkup.probe import try_capture
from lucid_profiler.checkup.settings import Answer
from support import eager_graphs, fake_nvml
from support.fake_nvml import GIB, UUID, device, scenario

OTHER = "GPU-22222222-2222-3333-4444-555555555555"
MIG = "MIG-11111111-aaaa"
IDLE: dict[str, Any] = {
    "utilization": [0, 0],
    "reasons": 1,
    "memory": [141 * GIB, 140 * GIB, 1 * GIB],
    "memory_v2": [141 * GIB, 1 * GIB, 140 * GIB, 0],
}
INSTANCE = {"uuid": MIG, "gi": 1, "ci": 0, "calls": {"memory_v2": [70 * GIB, 0, 70 * GIB, 0], "compute_processes": []}}
NO_GPU = DriverFacts(num_gpus=0, cuda=Answer(reason="no_driver"))
ONE_GPU = DriverFacts(num_gpus=1, cuda=Answer(value=(13, 0)))
OPTIMIZER = "lucid_optim:MuSGD"
SETTINGS: dict[str, Any] = {
    "cuda_build": "13.0",
    "hip_build": None,
    "num_devices": 1,
    "devices": ["NVIDIA H200"],
    "cuda_error": None,
    "cudnn_version": 91002,
    "cudnn_benchmark": False,
    "cudnn_deterministic": True,
    "matmul_precision": "ieee",
    "matmul_tf32": None,
    "deterministic_algorithms": True,
}
CAPTURED = {"is_equal": True, "num_replays": 13, "num_steps": 16, "reasons": {"warming_up": 3}}

Look = Callable[..., dict[str, Finding]]


def by_code(findings: list[Finding]) -> dict[str, Finding]:
    """Return findings by their codes, of which none appears twice."""
    found = {finding.code: finding for finding in findings}
    assert len(found) == len(findings)
    return found


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Give a function that plays a machine's GPUs and looks at them; the process file system is empty."""

    def look_at(*devices: Mapping[str, Any], environ: Mapping[str, str] | None = None, **entries: Any) -> Any:
        fake_nvml.install(scenario(*devices, **{"clock": "manual", **entries}), tmp_path, monkeypatch)
        return by_code(look_at_driver(environ or {}, proc=tmp_path)[0])

    return look_at


def write(root: Path, **files: str) -> None:
    """Write small files below a root; `__` in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def told(**steps: Mapping[str, Any]) -> Told:
    """Return what a healthy interpreter tells, with changes to some of its steps."""
    healthy: dict[str, dict[str, Any]] = {
        "python": {"version": "3.12.1", "executable": "/env/bin/python"},
        "torch": {"version": "2.11.0+cu130"},
        "settings": SETTINGS,
        "optimizer": {"version": "0.1.0", "error": None},
        "capture": CAPTURED,
        "end": {},
    }
    return Told(steps={name: {**healthy[name], **steps.get(name, {})} for name in healthy})


def judge(
    said: Told,
    *,
    driver: DriverFacts = ONE_GPU,
    requires_gpu: bool = False,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Finding]:
    """Return the findings about an interpreter by their codes."""
    return by_code(
        environment.environment_findings(
            said,
            python="python",
            environ=environ or {},
            directory=Path("/project"),
            driver=driver,
            requires_gpu=requires_gpu,
        )
    )


def test_an_idle_gpu_has_no_warning(look: Look) -> None:
    """Everything is read, under its own code; what the driver does not tell is a note with its reason."""
    found = look(device(**IDLE))
    assert {code: finding.level for code, finding in found.items()} == {
        "nvml": "ok",
        "gpus_visible": "ok",
        "gpu_readings": "ok",
        "gpu_processes": "ok",
        "gpu_clocks": "ok",
        "gpu_power_cap": "note",
        "gpu_persistence": "ok",
        "gpu_ecc": "ok",
        "gpu_mig": "ok",
    }
    assert found["nvml"].found == "driver 580.159.04, CUDA up to 13.0; 0: NVIDIA H200"
    assert (found["gpu_power_cap"].value, found["gpu_power_cap"].reason) == (
        {"limit_mw": 700_000, "default_mw": None},
        "not_supported",
    )
    assert {finding.subject for code, finding in found.items() if code.startswith("gpu_")} == {UUID}


@pytest.mark.parametrize(
    ("code", "calls", "level", "words"),
    [
        ("gpu_ecc", {"ecc_mode": [0, 0]}, "ok", "off"),
        ("gpu_ecc", {"ecc_mode": [1, 0]}, "warning", "on, and off after a reset"),
        ("gpu_ecc", {"ecc_mode": None}, "note", "unknown: this device or this version of the driver does not offer it"),
        ("gpu_mig", {"mig_mode": [0, 1]}, "warning", "off, and on after a reset"),
        ("gpu_persistence", {"persistence_mode": 0}, "warning", "off"),
        ("gpu_clocks", {"reasons": 0x4}, "warning", "SM 1980 MHz, memory 3201 MHz; held down by: power cap"),
        ("gpu_clocks", {"reasons": 0x60}, "warning", "held down by: too hot (software), too hot (hardware)"),
        ("gpu_clocks", {"reasons": 0x2}, "note", "held down by: clocks set by an administrator"),
        ("gpu_clocks", {"reasons": 0x4000}, "warning", "held down by: unknown cause 0x4000"),
        ("gpu_clocks", {"reasons": {"error": 4}}, "note", "unknown: the driver or the kernel refuses this"),
        (
            "gpu_readings",
            {"power_usage": {"error": 4}},
            "warning",
            "10 of 11 readings; without power_draw_mw: the driv",
        ),
        ("gpu_readings", {"power_usage": None}, "note", "10 of 11 readings; without power_draw_mw: this device"),
        ("gpu_processes", {"compute_processes": [[7, GIB // 8]]}, "warning", "1 that cannot be seen from here"),
        ("gpu_processes", {"memory_v2": [141 * GIB, GIB, 100 * GIB, 40 * GIB]}, "warning", "40.0 GiB in use"),
        ("gpu_processes", {"utilization": [60, 1]}, "warning", "busy 60 % of the time"),
        ("gpu_processes", {"compute_processes": {"error": 4}}, "warning", "unknown: the driver or the kernel"),
        ("gpu_processes", {"compute_processes": [[7, 90 * GIB]]}, "warning", "unknown: the driver gave a value"),
        ("gpu_processes", {"compute_processes": None}, "note", "unknown: this device"),
        ("gpu_power_cap", {"enforced_power_limit": {"error": 4}}, "note", "unknown: the driver or the kernel refuses"),
    ],
)
def test_each_setting_has_a_level_and_words(look: Look, code: str, calls: Any, level: str, words: str) -> None:
    """What is not as it should be is a warning that says its value; what cannot be read is never called good."""
    finding = look(device(**{**IDLE, **calls}))[code]
    assert finding.level == level
    assert words in finding.found


def test_other_processes_that_can_be_seen_are_counted(look: Look, tmp_path: Path) -> None:
    """An entry of the driver's list that runs here is another process, since none of ours uses the GPU."""
    (tmp_path / "77").mkdir()
    finding = look(device(**{**IDLE, "compute_processes": [[77, GIB // 8]]}))["gpu_processes"]
    assert (finding.level, finding.found) == ("warning", "1 other process on the GPU")


@pytest.mark.parametrize(("limit", "level"), [(700_000, "ok"), (500_000, "warning")])
def test_a_power_cap_below_the_product_s_own_is_a_warning(
    look: Look, monkeypatch: pytest.MonkeyPatch, limit: int, level: str
) -> None:
    """The limit that is in force is set against the default one."""
    monkeypatch.setattr("pynvml.nvmlDeviceGetPowerManagementDefaultLimit", lambda _: 700_000)
    finding = look(device(**{**IDLE, "enforced_power_limit": limit}))["gpu_power_cap"]
    assert (finding.level, finding.found) == (level, f"{limit / 1000:g} W of 700 W")


@pytest.mark.parametrize(
    ("code", "reason", "level"), [(9, "no_driver", "note"), (18, "driver_mismatch", "warning"), (4, None, "warning")]
)
def test_a_driver_that_does_not_open_is_the_only_finding(look: Look, code: int, reason: str | None, level: str) -> None:
    """A machine without a driver is no warning; one whose driver refuses is."""
    found = look(device(), init={"error": code})
    assert list(found) == ["nvml"]
    assert (found["nvml"].reason, found["nvml"].level) == (reason or "no_permission", level)


def test_only_visible_gpus_are_looked_at(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's choice is shown, and the other GPU is left alone."""
    second = device(uuid=OTHER, pci="00000000:02:00.0", **IDLE)
    found = look(device(), second, environ={"CUDA_VISIBLE_DEVICES": OTHER})
    assert found["gpus_visible"].found == f"1 of 2 under CUDA_VISIBLE_DEVICES={OTHER!r}"
    assert found["gpu_ecc"].subject == OTHER


def test_a_program_that_sees_no_gpu_is_warned(look: Look) -> None:
    """An empty choice leaves no device, which is said."""
    found = look(device(**IDLE), environ={"CUDA_VISIBLE_DEVICES": ""})
    assert (found["gpus_visible"].level, set(found)) == ("warning", {"nvml", "gpus_visible"})


def test_numbers_of_unequal_gpus_are_said_to_be_unknown(look: Look) -> None:
    """CUDA's own order is not the driver's, so that no GPU is claimed to be the one."""
    fake = [device(**IDLE), device(uuid=OTHER, name="NVIDIA L4", pci="00000000:02:00.0", **IDLE)]
    findings = look_at(look, fake, {"CUDA_VISIBLE_DEVICES": "0"})
    (finding,) = [finding for finding in findings if finding.code == "gpus_visible"]
    assert (finding.level, finding.reason) == ("note", "device_order")


def look_at(look: Look, devices: list[dict[str, Any]], environ: dict[str, str]) -> list[Finding]:
    """Return findings of which several may have one code."""
    with pytest.raises(AssertionError):  # the fixture takes one finding a code
        look(*devices, environ=environ)
    return look_at_driver(environ)[0]


def test_a_divided_gpu_is_judged_with_its_instance(look: Look) -> None:
    """Settings and clocks are the GPU's, processes the instance's; what belongs to the other side is no warning."""
    findings = look_at(look, [device(mig=[INSTANCE], **IDLE)], {})
    levels = {(finding.code, finding.subject): finding.level for finding in findings}
    assert levels["gpu_mig", UUID] == "note"
    assert levels["gpu_processes", MIG] == "ok"
    assert levels["gpu_readings", UUID] == levels["gpu_readings", MIG] == "note"
    assert ("gpu_processes", UUID) not in levels
    assert ("gpu_clocks", MIG) not in levels


def test_mig_without_an_instance_is_a_warning(look: Look) -> None:
    """A program would see no device there."""
    finding = look(device(**{**IDLE, "mig_mode": [1, 1]}))["gpu_mig"]
    assert (finding.level, finding.found) == ("warning", "on, without an instance that the program would see")


def test_every_bit_of_the_clock_events_is_one_bit() -> None:
    """No cause hides another."""
    assert all(bit & (bit - 1) == 0 for bit in EVENTS)


@pytest.mark.parametrize(("name", "level"), [("performance", "ok"), ("powersave", "warning")])
def test_the_governor_of_the_usable_processors_counts(tmp_path: Path, name: str, level: str) -> None:
    """Only one of them may run at its full clock by itself."""
    for cpu in os.sched_getaffinity(0):
        write(tmp_path, **{f"sys__devices__system__cpu__cpu{cpu}__cpufreq__scaling_governor": f"{name}\n"})
    finding = by_code(host.look_at_host(tmp_path))["cpu_governor"]
    assert (finding.level, finding.value) == (level, [name])


def test_what_the_kernel_does_not_show_is_unknown(tmp_path: Path) -> None:
    """An empty file system gives notes and warnings with reasons, and never a good value."""
    found = by_code([*host.look_at_host(tmp_path), *container.look_at_container(tmp_path)])
    found |= by_code(processes.look_at_processes(tmp_path))
    unread = ("cpu_governor", "clock_source", "cpu_limit", "memory_limit", "proc_access", "pid_namespace")
    assert all(found[code].reason and found[code].value is None and found[code].level != "ok" for code in unread)


@pytest.mark.parametrize(("load", "level"), [(0.1, "ok"), (1000.0, "warning")])
def test_the_load_is_set_against_the_processors(monkeypatch: pytest.MonkeyPatch, load: float, level: str) -> None:
    """Other work is a warning."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert by_code(host.look_at_host())["cpu_load"].level == level


@pytest.mark.parametrize(("name", "level"), [("tsc", "ok"), ("kvm-clock", "ok"), ("hpet", "warning")])
def test_a_slow_clock_source_is_a_warning(tmp_path: Path, name: str, level: str) -> None:
    """Those that need a device's register are slow."""
    write(tmp_path, sys__devices__system__clocksource__clocksource0__current_clocksource=name)
    assert by_code(host.look_at_host(tmp_path))["clock_source"].level == level


def test_limits_of_version_2_come_from_every_group_on_the_way(tmp_path: Path) -> None:
    """The tightest one counts, also if it is the parent's; cache that can be taken back is not used."""
    write(tmp_path, proc__self__cgroup="0::/outer/inner\n")
    group = tmp_path / "sys/fs/cgroup/outer"
    write(group, **{"inner__cpu.max": "max 100000", "inner__memory.max": str(8 * GIB), "inner__memory.current": "5"})
    write(group, **{"cpu.max": "150000 100000", "cpu.stat": "nr_periods 9\nnr_throttled 3\n"})
    write(group, **{"memory.max": str(4 * GIB), "memory.current": str(3 * GIB)})
    write(group, **{"memory.stat": f"anon 1\ninactive_file {2 * GIB}\n"})
    assert container.cpu_quotas(tmp_path) == [container.Quota(num_cpus=1.5, num_throttled=3)]
    assert container.memory_limits(tmp_path) == [
        container.MemoryLimit(bytes=4 * GIB, used_bytes=GIB),
        container.MemoryLimit(bytes=8 * GIB, used_bytes=5),
    ]


def test_limits_of_version_1_are_found_where_the_container_sees_them(tmp_path: Path) -> None:
    """The group's path is the host's; inside, only the root of each controller exists."""
    write(tmp_path, proc__self__cgroup="4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/\n")
    root = tmp_path / "sys/fs/cgroup"
    write(root, **{"cpu,cpuacct__cpu.cfs_quota_us": "50000\n", "cpu,cpuacct__cpu.cfs_period_us": "100000\n"})
    write(root, **{"memory__memory.limit_in_bytes": f"{2 * GIB}\n", "memory__memory.usage_in_bytes": f"{GIB}\n"})
    found = by_code(container.look_at_container(tmp_path))
    assert (found["cpu_limit"].level, found["cpu_limit"].value["quota_cpus"]) == ("warning", 0.5)
    assert found["memory_limit"].found == "2.0 GiB, of which 1.0 GiB in use"
    assert by_code(host.look_at_host(tmp_path))["memory_free"].found == "1.0 GiB available below the container's limit"


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    """Version 1's largest number and version 2's `max` are none; a path that leaves the tree is not followed."""
    write(tmp_path, proc__self__cgroup="4:cpu:/\n3:memory:/\n0::/../../up\n")
    root = tmp_path / "sys/fs/cgroup"
    write(root, **{"cpu__cpu.cfs_quota_us": "-1", "memory__memory.limit_in_bytes": str(2**63 - 4096)})
    write(root, **{"cpu.max": "max 100000", "memory.max": "max"})
    assert (container.cpu_quotas(tmp_path), container.memory_limits(tmp_path)) == ([], [])
    assert {finding.level for finding in container.look_at_container(tmp_path)} == {"ok"}


def test_temporary_files_go_where_python_would_put_them(tmp_path: Path) -> None:
    """The first candidate that is a directory; a variable that names none is passed over."""
    environ = {"TMPDIR": str(tmp_path / "absent"), "TMP": str(tmp_path)}
    assert places.temporary_directory(environ, tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("free", "reports", "temporary"),
    [(2**40, "ok", "ok"), (2**29, "warning", "warning"), (2**20, "warning", "problem")],
)
def test_little_room_is_a_warning_and_none_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, reports: str, temporary: str
) -> None:
    """Without temporary files nothing can be measured; a report may be written elsewhere."""
    real = os.statvfs(tmp_path)
    blocks = free // real.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], blocks, *real[5:10])))
    found = by_code(places.look_at_places(tmp_path, {"TMPDIR": str(tmp_path)}))
    assert (found["disk_reports"].level, found["disk_temp"].level) == (reports, temporary)


def test_looking_at_places_writes_nothing(tmp_path: Path) -> None:
    """A directory's time of change stays."""
    before = tmp_path.stat().st_mtime_ns
    places.look_at_places(tmp_path, {"TMPDIR": str(tmp_path)})
    assert tmp_path.stat().st_mtime_ns == before


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nowhere to put temporary files is a problem."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = by_code(places.look_at_places(tmp_path, {}))
    assert (found["disk_reports"].level, found["disk_temp"].level) == ("warning", "problem")
    assert found["disk_reports"].found == "the current directory cannot be written"


def proc(root: Path, *, options: str, namespace: str) -> Path:
    """Write a process file system that was mounted with these options."""
    own = {f"proc__self__{name}": "1" for name in ("stat", "status", "io", "smaps_rollup")}
    write(root, **own, proc__self__mountinfo=f"22 27 0:21 / /proc rw,nosuid shared:5 - proc proc {options}\n")
    (root / "proc/self/ns").mkdir()
    (root / "proc/self/ns/pid").symlink_to(namespace)
    return root


@pytest.mark.parametrize(
    ("options", "level"), [("rw", "ok"), ("rw,hidepid=0", "ok"), ("rw,hidepid=invisible,gid=5", "warning")]
)
def test_a_proc_that_hides_processes_is_a_warning(tmp_path: Path, options: str, level: str) -> None:
    """Other users' programs are then not seen."""
    proc(tmp_path, options=options, namespace="pid:[4026531836]")
    assert by_code(processes.look_at_processes(tmp_path))["proc_access"].level == level


def test_files_of_proc_that_are_refused_are_named(tmp_path: Path) -> None:
    """What cannot be read is said by name."""
    (proc(tmp_path, options="rw", namespace="pid:[4026531836]") / "proc/self/io").unlink()
    finding = by_code(processes.look_at_processes(tmp_path))["proc_access"]
    assert (finding.level, finding.value["refused"]) == ("warning", ["io"])


@pytest.mark.parametrize(("number", "level"), [(4026531836, "ok"), (4026532999, "note")])
def test_a_container_s_namespace_is_a_note(tmp_path: Path, number: int, level: str) -> None:
    """Only the host's own has the number that Linux gives the first one."""
    proc(tmp_path, options="rw", namespace=f"pid:[{number}]")
    assert by_code(processes.look_at_processes(tmp_path))["pid_namespace"].level == level


def interpreter(folder: Path, text: str) -> str:
    """Write a program that is run in an interpreter's place and return its name."""
    path = folder / "interpreter"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


def bare_interpreter(folder: Path) -> str:
    """Write a Python without packages and return its name."""
    path = folder / "bare"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return str(path)


LINE = 'print(\'{"kind":"lucid.checkup","step":"python","told":{"version":"3.12"}}\', flush=True)'


def ask(python: str, **settings: Any) -> Told:
    """Ask an interpreter with the environment of the tests."""
    return ask_interpreter(python, optimizer=OPTIMIZER, environ=dict(os.environ), **settings)


def test_an_interpreter_tells_its_torch() -> None:
    """This one has torch and an optimizer; on a kind of device without graphs nothing is replayed."""
    said = ask(sys.executable, device="cpu")
    assert (said.reason, said.detail) == (None, "")
    assert said.steps["torch"]["version"] == str(torch.__version__)
    assert said.steps["optimizer"] == {"version": lucid_optim.__version__, "error": None}
    assert (said.steps["capture"]["is_equal"], said.steps["capture"]["num_replays"]) == (True, 0)
    assert said.steps["capture"]["reasons"] == {"no_cuda": 16}


def test_an_interpreter_without_packages_tells_that(tmp_path: Path) -> None:
    """Nothing of lucid needs to be installed there, nor what lucid itself depends on."""
    said = ask(bare_interpreter(tmp_path))
    assert (said.reason, said.steps["torch"]["is_missing"]) == (None, True)


def test_modules_of_the_current_directory_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with the name of a module that is looked for is not run."""
    monkeypatch.chdir(tmp_path)
    for name in ("torch", "argparse", "runpy", "importlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    assert ask(bare_interpreter(tmp_path)).steps["torch"]["is_missing"]


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        ("import sys; sys.exit('no such option')", "child_failed", "no such option"),
        ("raise SystemExit(3)", "child_failed", "it ended with status 3 and said nothing"),
        ("import os; os.kill(os.getpid(), 11)", "child_failed", "it was ended by SIGSEGV"),
        ("print('{}'); print(b'\\xff'); print('[1'); print('null')", "child_failed", "status 0 and said nothing"),
    ],
)
def test_a_program_that_is_no_interpreter_is_a_reason(tmp_path: Path, text: str, reason: str, detail: str) -> None:
    """Its own last words are kept; what it prints is not taken for an answer."""
    said = ask(interpreter(tmp_path, text))
    assert (said.steps, said.reason) == ({}, reason)
    assert detail in said.detail


@pytest.mark.parametrize("name", ["/no/such/python", "no-such-python", "/", "with\0zero"])
def test_an_interpreter_that_cannot_be_started_is_a_reason(name: str) -> None:
    """Nothing is raised, whatever the name."""
    said = ask(name)
    assert said.reason == "not_started"
    assert said.detail


def test_what_was_told_before_a_crash_is_kept(tmp_path: Path) -> None:
    """Each step is known as soon as it was told, whatever stands around it."""
    said = ask(interpreter(tmp_path, f"print('hello')\n{LINE}\nimport os; os.abort()"))
    assert said.steps == {"python": {"version": "3.12"}}
    assert (said.reason, "SIGABRT" in said.detail) == ("child_failed", True)


def test_an_interpreter_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    """A child that keeps the pipe open neither survives nor keeps us waiting."""
    child = f"import subprocess, sys, time\n{LINE}\nchild = subprocess.Popen(['sleep', '600'])\n"
    note = f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\ntime.sleep(600)"
    said = ask(interpreter(tmp_path, child + note), timeout_s=5.0)
    assert (said.reason, "python" in said.steps) == ("timeout", True)
    path = Path("/proc", (tmp_path / "child").read_text(), "stat")
    deadline = time.monotonic() + 10
    while path.exists() and path.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_lucid_s_own_variables_do_not_reach_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a run would start an agent, or decide what is captured."""
    for name in ("LUCID_RUN_DIR", "LUCID_PROFILE_ARM", "LUCID_CAPTURE_UPDATES"):
        monkeypatch.setenv(name, "1")
    said = ask(interpreter(tmp_path, "import os, sys\nsys.exit(str([n for n in os.environ if 'LUCID' in n]))"))
    assert said.detail == "[]"


def test_a_tiny_capture_has_the_bytes_of_the_native_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for graphs steps are replayed, and the digests agree."""
    eager_graphs.install(monkeypatch)
    came_to = try_capture(lucid_optim.MuSGD, "cpu")
    assert came_to["is_equal"]
    assert came_to["num_replays"] > 0
    assert came_to["num_replays"] + sum(came_to["reasons"].values()) == came_to["num_steps"]


def test_a_capture_with_other_bytes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed bit in one parameter is enough."""

    class Wrong(lucid_optim.MuSGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.capture_updates:
                with torch.no_grad():
                    self.param_groups[0]["params"][-1].view(torch.int32)[0] ^= 1

    assert not try_capture(Wrong, "cpu")["is_equal"]


@pytest.mark.gpu
def test_a_capture_on_the_device_replays_and_agrees() -> None:
    """The whole way, in a process of its own."""
    capture = ask(sys.executable).steps["capture"]
    assert capture["is_equal"]
    assert capture["num_replays"] > 0


def test_a_healthy_environment_is_all_good() -> None:
    """No note and no warning where there is nothing to say."""
    found = judge(told(), environ={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert {finding.level for finding in found.values()} == {"ok"}
    assert set(found) == {code for code, entry in CATALOGUE.items() if entry.area == "python"}


@pytest.mark.parametrize(
    ("code", "steps", "level", "words"),
    [
        ("torch", {"torch": {"version": "2.3.1"}}, "warning", "torch 2.3.1"),
        ("cuda", {"settings": {"num_devices": 0, "cuda_error": "too old"}}, "warning", "no device: too old"),
        ("cuda", {"settings": {"num_devices": 0, "cuda_build": None}}, "warning", "built without CUDA, no device"),
        ("cuda_driver", {"settings": {"cuda_build": "14.0"}}, "warning", "torch was built for CUDA 14.0, the driver"),
        ("cuda_driver", {"settings": {"cuda_build": "13.2"}}, "note", "13.2, the driver knows 13.0"),
        ("cuda_driver", {"settings": {"cuda_build": "12.8"}}, "ok", "12.8, the driver knows 13.0"),
        ("cudnn", {"settings": {"cudnn_benchmark": True}}, "warning", "benchmark on"),
        ("cudnn", {"settings": {"cudnn_deterministic": False}}, "note", "deterministic off"),
        ("cudnn", {"settings": {"cudnn_version": None}}, "note", "unknown: torch has no cuDNN here"),
        ("determinism", {"settings": {"deterministic_algorithms": False}}, "note", "algorithms off at start"),
        ("float32_precision", {"settings": {"matmul_precision": "tf32"}}, "note", "are rounded to TF32"),
        ("float32_precision", {"settings": {"matmul_precision": None, "matmul_tf32": True}}, "note", "to TF32"),
        ("optimizer", {"optimizer": {"error": "E", "is_missing": True}}, "warning", "not installed there"),
        ("optimizer", {"optimizer": {"error": "E: x", "is_missing": False}}, "warning", "cannot be imported: E: x"),
        ("capture", {"capture": {"is_equal": False}}, "problem", "bytes DIFFER"),
        ("capture", {"capture": {"num_replays": 0, "reasons": {"dtype": 16}}}, "warning", "0 of 16 steps replayed"),
        ("capture", {"capture": {"reason": "raised", "error": "OutOfMemory"}}, "warning", "it raised OutOfMemory"),
        ("capture", {"capture": {"reason": "no_cuda"}}, "note", "unknown: not tried, torch sees no CUDA device"),
    ],
)
def test_what_an_interpreter_tells_has_a_level(code: str, steps: Any, level: str, words: str) -> None:
    """Each fact is judged by itself, and its value is in the words."""
    finding = judge(told(**steps))[code]
    assert finding.level == level
    assert words in finding.found


@pytest.mark.parametrize(
    ("executable", "shown"), [("/project/.venv/bin/python", ".venv/bin/python"), ("/env/bin/python", "/env/bin/python")]
)
def test_an_interpreter_of_the_project_is_shown_from_there(executable: str, shown: str) -> None:
    """The text is short where it can be; the value has the whole path."""
    finding = judge(told(python={"executable": executable}))["interpreter"]
    assert finding.found == f"Python 3.12.1, {shown}"
    assert finding.value["executable"] == executable


@pytest.mark.parametrize(
    ("steps", "code"), [({}, "interpreter"), ({"python": {"version": "3", "executable": "p"}}, "torch")]
)
def test_an_interpreter_that_tells_too_little_is_a_problem(steps: Any, code: str) -> None:
    """The first step that is missing carries the reason; nothing is said of what comes after it."""
    found = judge(Told(steps=steps, reason="timeout", detail="no end within 1 s"))
    assert (found[code].level, found[code].reason) == ("problem", "timeout")
    assert not {"settings", "capture", "optimizer"} & set(found)


def test_torch_that_cannot_be_used_is_a_problem() -> None:
    """Not installed, not importable, or ending the process when it looks for CUDA."""
    python = {"version": "3.12.1", "executable": "p"}
    for torch_step in ({"version": None, "is_missing": True}, {"version": None, "is_missing": False, "error": "E"}):
        assert judge(Told(steps={"python": python, "torch": torch_step}))["torch"].level == "problem"
    crashed = Told(steps={"python": python, "torch": {"version": "2.11"}}, reason="child_failed", detail="SIGSEGV")
    assert judge(crashed)["cuda"].level == "problem"


@pytest.mark.parametrize(("requires_gpu", "level"), [(False, "note"), (True, "problem")])
def test_a_machine_without_a_gpu_is_a_problem_where_one_is_asked_for(requires_gpu: bool, level: str) -> None:
    """Else it is only said."""
    said = told(settings={"num_devices": 0, "cuda_build": None})
    assert judge(said, driver=NO_GPU, requires_gpu=requires_gpu)["cuda"].level == level


@pytest.mark.parametrize(
    ("environ", "level"),
    [({}, "note"), ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, "ok"), ({"CUBLAS_WORKSPACE_CONFIG": ":2:1"}, "warning")],
)
def test_the_workspace_of_cublas_is_one_that_repeats(environ: dict[str, str], level: str) -> None:
    """Unset is a note, since the script may set it; anything else but the two is a warning."""
    assert judge(told(), environ=environ)["cublas_workspace"].level == level


@pytest.mark.parametrize(("text", "level"), [("0", "ok"), ("1", "warning")])
def test_variables_that_slow_cuda_down_are_warned_of(text: str, level: str) -> None:
    """A zero switches nothing on."""
    assert judge(told(), environ={"CUDA_LAUNCH_BLOCKING": text})["slow_variables"].level == level


def test_every_code_has_an_area_a_reason_to_matter_and_a_remedy() -> None:
    """Texts are there, in one line, and each area has some."""
    assert {entry.area for entry in CATALOGUE.values()} == set(AREAS)
    for entry in CATALOGUE.values():
        assert len(entry.why) > 20
        assert len(entry.remedy) > 20
        assert "|" not in entry.why + entry.remedy


def test_a_code_that_is_not_listed_is_refused() -> None:
    """A finding without a remedy cannot be made."""
    with pytest.raises(ValueError, match="no code of the catalogue"):
        unknown("novel", "gap", "words")


def test_the_modules_load_no_torch() -> None:
    """All but the probe's steps run in the command's own process."""
    program = "import sys, lucid_profiler.checkup.examine, lucid_profiler.checkup.probe; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
