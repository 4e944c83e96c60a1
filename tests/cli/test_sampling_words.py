"""What a person reads of the sampling beside the runs, and what `validate` makes of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.html.rich import UUID, header, run_of, samples_of
from cli.reports import write_report
from lucid_cli import app
from lucid_cli.html import render_page
from lucid_cli.reporters.monitoring import render_memory, render_monitoring
from lucid_profiler import jsonio
from lucid_profiler.monitored import DeviceEnergy, Gap, MemoryAccount, MemoryRow, MonitorReport
from lucid_profiler.reader import Report, read_report
from lucid_profiler.records import Arm
from lucid_profiler.writer import Writer
from reports.good import relinked

S = 1_000_000_000
GIB = 2**30


def report_of(monitor: MonitorReport | None = None, **changes: Any) -> Report:
    """Return a report of one run, whose sampling came to this."""
    head = header((Arm(name="native"), Arm(name="captured")), pairs=1)
    run = run_of(head.slots[0], seconds=10.0)
    assert run.monitor is not None
    return Report(path="", header=head, runs=(replace(run, monitor=replace(monitor or run.monitor, **changes)),))


def said(report: Report) -> str:
    """Return what is said of the sampling, on one line."""
    return " ".join(" ".join(render_monitoring(report)).split())


@pytest.mark.parametrize(
    ("bound_j", "words"),
    [
        (None, "by how much it may be off is not known"),
        (0.004, "to 0.1 % or better"),
        (5.16, "to 0.6 % or better"),
        (120.0, "to 12.0 % or better"),
    ],
)
def test_energy_is_told_with_what_it_may_be_off_by(bound_j: float | None, words: str) -> None:
    """No bound is no small bound, and no bound is nothing."""
    energy = DeviceEnergy(uuid=UUID, value_j=1000.0, bound_j=bound_j, source="power_held")
    assert words in said(report_of(energy=(energy,)))


@pytest.mark.parametrize("status", ["failed", "timeout", "interrupted"])
def test_a_run_that_was_cut_off_bounds_no_energy_and_is_no_account(status: Any) -> None:
    """No figure is of it; where no other run of the arm has an account, the last one's is better than none."""
    row = MemoryRow(name="used on the device", value_bytes=7, level=0)
    accounts = [MemoryAccount(uuid=UUID, mono_ns=S, rows=(replace(row, value_bytes=size),)) for size in (7, 9)]
    whole = DeviceEnergy(uuid=UUID, value_j=1000.0, bound_j=4.0, source="counter")
    cut = DeviceEnergy(uuid=UUID, value_j=10.0, bound_j=2.0, source="power_held")
    (first,) = report_of(energy=(whole,), memory=(accounts[0],)).runs
    (last,) = report_of(energy=(cut,), memory=(accounts[1],)).runs
    last = replace(last, run=2, status=status)
    report = replace(report_of(), runs=(first, last))
    assert said(report).endswith("energy from the driver's energy counter, to 0.4 % or better")
    assert "7 B" in " ".join(render_memory(report))
    assert "9 B" in " ".join(render_memory(replace(report, runs=(last,))))


def test_a_gap_of_one_device_is_not_told_as_one_of_everything() -> None:
    """Each kind is counted by itself."""
    late, lost = Gap(begin_ns=1, end_ns=2, reason="late"), Gap(begin_ns=1, end_ns=2, reason="lost", device=UUID)
    text = said(report_of(gaps=(late, lost, late)))
    assert "2 gaps (the monitor did not get its turn in time)" in text
    assert f"1 gap of {UUID} alone (the GPU has fallen off the bus" in text


def test_what_was_lost_and_not_counted_is_not_nothing() -> None:
    """A monitor that was killed counted nothing."""
    assert "how many records were lost is not known of every run" in said(report_of(num_dropped_records=None))
    assert "lost" not in said(report_of())


def test_what_the_driver_did_not_answer_is_counted() -> None:
    """Nothing is said where that was not counted, or there was nothing."""
    assert "3 questions to the driver without an answer" in said(report_of(num_nvml_errors=3))
    assert "driver" not in said(report_of(num_nvml_errors=0))
    assert "driver" not in said(report_of())


def test_the_longest_time_between_two_readings_is_told() -> None:
    """Of what is read more rarely the more it costs."""
    cadence = {"tree": {"num": 9, "longest_ns": 2 * S}, "processes": {"num": 5, "longest_ns": S}}
    text = said(report_of(cadence=cadence))
    assert "longest time between two readings: process tree 2.0 s, processes on the GPU 1.0 s" in text


@pytest.mark.parametrize("source", ["counter", "power_held"])
def test_energy_is_told_with_its_bound(source: Any) -> None:
    """Whichever it comes from."""
    energy = DeviceEnergy(uuid=UUID, value_j=1000.0, bound_j=60.0, source=source)
    assert ", to 6.0 % or better" in said(report_of(energy=(energy,)))


def test_a_spike_that_nobody_can_account_for_is_told(tmp_path: Path) -> None:
    """In the table and on the page."""
    whole = report_of()
    (run,) = whole.runs
    assert run.monitor is not None
    account = replace(run.monitor.memory[0], unread_peak_bytes=30 * GIB, unread_peak_ns=5 * S)
    report = report_of(memory=(account,))
    assert "for a short time 30.00 GiB were used" in " ".join(" ".join(render_memory(report)).split())
    path = tmp_path / "r.jsonl"
    with Writer(path) as writer:
        writer.write(report.header)
        writer.write(report.runs[0])
        for samples in samples_of(report.runs[0]):
            writer.write(samples)
    assert "for a short time 30.00 GiB were used" in render_page(read_report(path, allow_partial=True))
    assert "for a short time" not in " ".join(render_memory(whole))


BEFORE = {"gaps": [{"begin_ns": 1, "end_ns": 2, "reason": "lost"}], "num_dropped_records": 0}
NOW = {
    "gaps": [{"begin_ns": 1, "end_ns": 2, "reason": "lost", "device": UUID}],
    "num_dropped_records": None,
    "cadence": {"tree": {"num": 1, "longest_ns": 2}},
    "num_nvml_errors": 1,
    "memory": [{"uuid": UUID, "mono_ns": 1, "rows": [], "unread_peak_bytes": 5, "unread_peak_ns": 6}],
}


@pytest.mark.parametrize("monitor", [BEFORE, NOW], ids=["before", "now"])
def test_reports_of_before_and_now_are_valid(
    monitor: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a warning of keys that nobody knows."""
    path = tmp_path / "r.jsonl"
    write_report(path)
    records = [jsonio.loads(line) for line in path.read_bytes().splitlines()]
    for record in records:
        if record["t"] == "run":
            record["monitor"] = monitor
    path.write_bytes(relinked(records))
    assert app.run(["report", "validate", str(path)]) == 0
    assert capsys.readouterr().err == ""
    assert not read_report(path).warnings


def test_a_long_reason_leaves_every_row_of_the_account_its_name_and_value() -> None:
    """As where the private pools were not asked for: the reason goes behind or below its row."""
    rows = (
        MemoryRow(name="used on the device", value_bytes=2 * GIB),
        MemoryRow(name="this run", value_bytes=GIB, level=1),
        MemoryRow(name="allocated", value_bytes=None, reason=f"cached: {'a long term ' * 9}: not_read", level=2),
        MemoryRow(name="cached", value_bytes=None, reason="allocated: private_pools: not_read", level=2),
    )
    account = MemoryAccount(uuid=UUID, mono_ns=1, rows=rows)
    lines = render_memory(report_of(memory=(account,)))
    assert all(len(line) <= 100 for line in lines)
    found = [line.split("  ") for line in map(str.strip, lines)]
    assert [words[0] for words in found if words[0] in {row.name for row in rows}] == [row.name for row in rows]
    assert any(words[0] == "used on the device" and words[-1].strip() == "2048.0 MiB" for words in found)
    assert any(words[0] == "cached" and words[-1].strip() == "private pools: not read" for words in found)
    assert "a long term a long term" in " ".join(lines)
