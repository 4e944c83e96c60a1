"""What `lucid profile attach` says at the end."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cli.harness import LIMIT_S, Lucid
from lucid_cli.commands.profile_attach import summarize
from lucid_cli.reporters.words import reason_words
from lucid_profiler.monitor.log import LogReader, LogWriter
from lucid_profiler.monitor.readings import Values
from lucid_profiler.monitor.records import End, Event, Gap, Header, ReasonsChanged, Record, Sample, TargetExit
from support import fake_nvml
from support.memory import peak_bytes

S = 10**9
GPU_1, GPU_2 = "GPU-1", "GPU-2"
ONE: tuple[dict[str, Any], ...] = ({"uuid": GPU_1, "name": "NVIDIA H200"},)
TWO: tuple[dict[str, Any], ...] = (*ONE, {"uuid": GPU_2, "name": "NVIDIA H200"})
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in tick\nValueError: it is\tbroken\n'


def make_header(devices: tuple[dict[str, Any], ...] = (), *, part: int = 0) -> Header:
    """Return a header with these devices."""
    return Header(
        target={"pid": 7},
        started="2026-01-02T03:04:05Z",
        anchor={},
        interval_ns=10**8,
        tiers={},
        devices=devices,
        memory_api="v2",
        reason=None if devices else "no_driver",
        versions={},
        part=part,
    )


def make_sample(at: int, *, gpus: dict[str, Values] | None = None, **host: float | None) -> Sample:
    """Return a sample of the host with these fields."""
    values: Values = {"cpu_time_s": at / 10, "rss_bytes": (1 + at % 7) << 20, "num_processes": 2, **host}
    return Sample(mono_ns=at, late_ns=5, host=values, gpus=gpus or {})


def make_end(**fields: Any) -> End:
    """Return a last record."""
    kept: dict[str, Any] = {
        "mono_ns": 1,
        "num_samples": 3,
        "num_missed": 0,
        "late_ns": {},
        "gaps": (),
        "num_gaps": 0,
        "distinct": {},
        "own_cpu_s": 0.28,
        "wall_s": 23.5,
        "nvml_s": 0.0,
        "nvml_calls": {},
        "num_dropped_records": 0,
        "status": "stopped",
    }
    return End(**{**kept, **fields})


def lines_of(records: Iterable[Record]) -> list[str]:
    """Return the lines of a summary."""
    return summarize(records).text.splitlines()


def write_log(path: Path, num_samples: int) -> None:
    """Write a log in several parts, with everything that comes again and again."""
    header = make_header(TWO)
    log = LogWriter(path, header=lambda _: header, mono_ns=time.monotonic_ns, max_part_bytes=500_000, max_parts=1000)
    for at in range(num_samples):
        log.write(
            make_sample(at, gpus={uuid: {"memory_used_bytes": at, "power_draw_mw": 9} for uuid in (GPU_1, GPU_2)})
        )
        if at % 10 == 0:
            log.write(Gap(begin_ns=at, end_ns=at + 1, reason="late"))
            log.write(ReasonsChanged(mono_ns=at, fields={"host.pss_bytes": ("gap", "not_found")[at % 20 // 10]}))
            log.write(Event(mono_ns=at, name="note", data={"text": f"note {at}"}))
    log.write(make_end(num_samples=num_samples))
    log.close()


def test_summing_up_takes_no_more_memory_for_a_longer_log(tmp_path: Path) -> None:
    """A log of days is summed up in the memory of one of minutes."""
    short, long = tmp_path / "short.jsonl", tmp_path / "long.jsonl"
    write_log(short, 2_000)
    write_log(long, 20_000)
    assert long.with_name("long.jsonl.5").exists()
    assert (
        peak_bytes(lambda: summarize(LogReader(long)))
        < peak_bytes(lambda: summarize(LogReader(short))) + 16_384
        < 200_000
    )
    assert "CPU time 1999.90 s, at most 2 processes" in lines_of(LogReader(long))


def test_what_was_used_is_summed_up_in_one_pass() -> None:
    """Growth of CPU time, the most memory, mean power; what is null between readings counts as nothing."""
    gpu: list[Values] = [
        {"memory_used_bytes": 3 << 20, "process_memory_bytes": 2 << 20, "power_draw_mw": 100_000},
        {"memory_used_bytes": None, "process_memory_bytes": None, "power_draw_mw": None},
        {"memory_used_bytes": 2 << 20, "power_draw_mw": 300_000},
    ]
    host: list[dict[str, float | None]] = [
        {"cpu_time_s": 1.0, "rss_bytes": 5 << 20, "pss_bytes": 4 << 20, "num_processes": 1},
        {"cpu_time_s": 4.5, "rss_bytes": 1 << 20, "num_processes": 3},
        {"cpu_time_s": None, "rss_bytes": None, "num_processes": 1},
    ]
    samples = [make_sample(at, gpus={GPU_1: gpu[at]}, **host[at]) for at in range(3)]
    left = TargetExit(mono_ns=4, pid=7, status={"returncode": 3, "signal": None})
    records: list[Record] = [make_header(ONE), *samples, left, make_end()]
    assert lines_of(iter(records)) == [
        "process 7 has ended with status 3",
        "3 samples in 23.5 s; the monitor used 0.28 s of processor time, its start included (1.2 %)",
        "CPU time 3.50 s, at most 3 processes",
        "memory at most 5.0 MiB resident, 4.0 MiB with shared pages divided",
        "NVIDIA H200: 3.0 MiB used at most, 2.0 MiB of them by the process, 200 W on average",
    ]


def test_the_first_header_of_a_log_in_parts_counts() -> None:
    """Each part begins with one; devices that came later are known all the same."""
    came = Event(mono_ns=1, name="devices", data={"devices": ONE})
    values: Values = {"power_draw_mw": 100_000}
    records: list[Record] = [make_header(), came, make_sample(2, gpus={GPU_1: values}), make_header(part=1), make_end()]
    assert lines_of(records)[-1] == "NVIDIA H200: 100 W on average"


@pytest.mark.parametrize(
    ("wall_s", "words"),
    [
        (0.99, "in 1.0 s; the monitor used 0.28 s of processor time, its start included"),
        (1.0, "in 1.0 s; the monitor used 0.28 s of processor time, its start included (28.0 %)"),
    ],
)
def test_the_monitor_s_cost_is_a_time_and_a_share_only_of_a_second_and_more(wall_s: float, words: str) -> None:
    """Of a short time its start is most, and a share of it would say nothing of longer ones."""
    assert lines_of([make_header(), make_end(wall_s=wall_s)])[1] == f"3 samples {words}"


@pytest.mark.parametrize("has_end", [True, False])
def test_a_fault_of_the_monitor_is_told_with_its_last_line(
    capsys: pytest.CaptureFixture[str], *, has_end: bool
) -> None:
    """Whether or not it could still write its last record; what came of the process after it nobody knows."""
    fault = Event(mono_ns=3, name="fault", data={"text": TRACEBACK})
    summary = summarize([make_header(), make_sample(1), fault, *[make_end(status="fault")] * has_end])
    assert summary.fault == "ValueError: it is\tbroken"
    told = summary.text.splitlines()
    assert told[:2] == [
        "what became of process 7 was not recorded",
        "the monitor failed: ValueError: it is\tbroken",
    ]
    assert "CPU time 0.00 s, at most 2 processes" in told
    assert capsys.readouterr().err == ""


def test_a_fault_without_words_is_told() -> None:
    """The record of the fault itself may have found no room on the disk."""
    for records in ([make_end(status="fault")], [Event(mono_ns=3, name="fault", data={})]):
        summary = summarize([make_header(), *records])
        assert summary.fault == "why was not recorded"
        assert "the monitor failed: why was not recorded" in summary.text


def test_a_log_that_just_ends_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """A monitor that was killed is warned of, and one that was stopped is neither."""
    assert summarize([make_header(), make_sample(1)]).fault is None
    assert "the log has no end" in capsys.readouterr().err
    assert summarize([make_header(), make_sample(1), make_end()]).fault is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("has_sampled", [True, False])
def test_what_of_the_host_was_not_read_is_told_with_its_reason(*, has_sampled: bool) -> None:
    """Neither line is dropped; where no sample was taken at all, their number says so."""
    null = {"cpu_time_s": None, "rss_bytes": None, "num_processes": None}
    why = ReasonsChanged(mono_ns=1, fields={"host.cpu_time_s": "no_permission", "host.rss_bytes": "gap"})
    told = lines_of([make_header(), why, *[make_sample(1, **null)] * has_sampled, make_end()])
    assert [line for line in told if "CPU" in line or "memory" in line] == [
        f"CPU time was not read: {reason_words('no_permission')}",
        f"memory was not read: {reason_words('gap')}",
    ] * has_sampled


def test_a_reason_that_no_record_gives_is_not_made_up() -> None:
    """Where a full disk took the record of the reasons, the value was not read all the same."""
    told = lines_of([make_header(), make_sample(1, cpu_time_s=None), make_end()])
    assert "CPU time was not read: not recorded" in told


def test_a_gpu_of_which_nothing_was_read_is_told_with_its_reasons() -> None:
    """Each reason once; of a GPU that the process may not use nothing is expected."""
    null: Values = {"memory_used_bytes": None, "process_memory_bytes": None, "power_draw_mw": None}
    reasons = {"memory_used_bytes": "lost", "process_memory_bytes": "lost", "power_draw_mw": "not_supported"}
    why = ReasonsChanged(mono_ns=1, fields={f"gpu:{GPU_1}.{field}": reason for field, reason in reasons.items()})
    hidden = {"uuid": GPU_2, "name": "NVIDIA H200", "is_target": False}
    told = lines_of([make_header((*ONE, hidden)), why, make_sample(1, gpus={GPU_1: null}), make_end()])
    words = f"{reason_words('lost')}, {reason_words('not_supported')}"
    assert told[-1] == f"NVIDIA H200 ({GPU_1}): memory and power were not read: {words}"
    assert GPU_2 not in "".join(told)


def test_of_several_gpus_each_line_names_which() -> None:
    """Model and UUID, also where it was not read for a while; a GPU without a name is named once."""
    devices = (*TWO, {"uuid": "GPU-3", "name": None})
    values: Values = {"power_draw_mw": 50_000}
    gap = Gap(begin_ns=0, end_ns=2 * S, reason="lost", device=GPU_2)
    sample = make_sample(1, gpus=dict.fromkeys((GPU_1, GPU_2, "GPU-3"), values))
    told = lines_of([make_header(devices), sample, gap, make_end()])
    assert told[-4:] == [
        f"NVIDIA H200 ({GPU_1}): 50 W on average",
        f"NVIDIA H200 ({GPU_2}): 50 W on average",
        "GPU-3: 50 W on average",
        f"NVIDIA H200 ({GPU_2}): not read for 2.0 s ({reason_words('lost')})",
    ]


def test_what_attach_could_not_read_is_in_its_sum() -> None:
    """For each device and reason the whole time, and what was missing altogether."""
    gaps: list[Event | Gap] = [
        Gap(begin_ns=0, end_ns=2 * S, reason="lost", device=GPU_1),
        Gap(begin_ns=5 * S, end_ns=6 * S + 3 * 10**8, reason="lost", device=GPU_1),
        Event(mono_ns=8 * S, name="suspend", data={"size_ns": 60 * S}),
        Gap(begin_ns=79 * 10**8, end_ns=8 * S, reason="suspend"),
        Gap(begin_ns=7 * S, end_ns=8 * S, reason="disk_full", num_records=3),
    ]
    *_, of_device, of_all = lines_of([make_header(ONE), *gaps])
    assert of_device.startswith(f"{GPU_1}: not read for 3.3 s (the GPU has fallen off the bus")
    assert of_all == "everything: not read for 60.0 s (the machine slept)"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("late", "the monitor did not get its turn in time"),
        ("slow_driver", "calls of the driver took longer than the interval"),
        ("clock_on_strike", "clock on strike"),
    ],
)
def test_a_gap_of_any_reason_has_words(reason: str, words: str) -> None:
    """One that a newer monitor has is shown as it is called."""
    gap = Gap(begin_ns=0, end_ns=S, reason=reason)
    assert lines_of([make_header(), gap, make_end()])[-1] == f"everything: not read for 1.0 s ({words})"


def test_attach_exits_9_where_its_monitor_failed(lucid: Lucid) -> None:
    """What it had read is on standard output first; here a binding of the driver that nobody expects ends it."""
    broken = lucid.directory / "broken"
    broken.mkdir()
    (broken / "pynvml.py").write_text("raise RuntimeError('this binding is broken')")
    path = os.pathsep.join(filter(None, [str(broken), os.environ.get("PYTHONPATH")]))
    ran = lucid("profile", "attach", str(os.getpid()), "-o", "log.jsonl", env={"PYTHONPATH": path})
    assert ran.code == 9
    assert "the monitor failed: RuntimeError: this binding is broken\n" in ran.out
    assert ran.err.endswith("Error: the monitor failed, so the log ends early: RuntimeError: this binding is broken\n")


def test_attach_tells_two_gpus_apart(lucid: Lucid, tmp_path: Path) -> None:
    """One that answers, and one of the same model that can tell neither its memory nor its power."""
    silent: dict[str, Any] = dict.fromkeys(("memory", "memory_v2", "power_usage", "compute_processes"))
    devices = fake_nvml.device(uuid=GPU_1), fake_nvml.device(uuid=GPU_2, pci="00000000:02:00.0", **silent)
    env = fake_nvml.environment(fake_nvml.scenario(*devices), tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        attach = lucid.start("profile", "attach", str(process.pid), "-o", "log.jsonl", env=env)
        log = lucid.directory / "log.jsonl"
        deadline = time.monotonic() + LIMIT_S
        while not log.exists() or b'"kind":"sample"' not in log.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.communicate(b"\n")
        out, _ = attach.communicate(timeout=LIMIT_S)
    told = out.decode()
    assert attach.returncode == 0
    assert f"NVIDIA H200 ({GPU_1}): 40.00 GiB used at most, 412 W on average\n" in told
    assert f"NVIDIA H200 ({GPU_2}): memory and power were not read: {reason_words('not_supported')}\n" in told
