import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tools.evidence_tables import NOT_MEASURED, TABLES, Compared, UnusableError, main

from cli.reports import FLIPPED, WALLS, write_report
from lucid_profiler.compare import analyze
from lucid_profiler.digest import TensorDigest
from lucid_profiler.monitored import DeviceEnergy, MemoryAccount, MemoryRow, MonitorReport
from lucid_profiler.reader import Report
from lucid_profiler.records import Metric, Run
from tools import evidence_tables

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def compared(report: Report) -> Compared:
    """Return the comparison of both arms."""
    return Compared(report=report, analysis=analyze(report))


def with_runs(report: Report, change: Callable[[Run], Run]) -> Compared:
    """Return the comparison of a report whose runs are changed."""
    return compared(replace(report, runs=tuple(change(run) for run in report.runs)))


def page(folder: Path, *words: str, body: str = "") -> Path:
    """Write a page of one block a word."""
    blocks = [f"<!-- figures: {word} -->\n{body}<!-- end of figures -->\n" for word in words]
    file = folder / "page.md"
    file.write_text("# A page\n\n" + "\nBetween.\n".join(blocks))
    return file


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """Return the report of a published measurement."""
    return write_report(tmp_path / "fit.jsonl", phases={"native": [("train", 0.75)], "captured": [("train", 0.5)]})


def test_the_table_of_a_fit_has_medians_ranges_and_the_ratio(report: Report) -> None:
    """As the published table."""
    lines = TABLES["fit"](compared(report))
    assert lines[0] == "| 5 pairs | native | captured | ratio of medians |"
    assert "| 120.850 (120.542\N{EN DASH}122.793) | 108.750 (108.123\N{EN DASH}110.967) | 0.8999 |" in lines[2]


def test_a_metric_that_some_pairs_lack_says_of_how_many_it_is(report: Report) -> None:
    """The head counts all pairs."""
    missing = Metric(value=None, unit="s", reason="gap")
    changed = with_runs(
        report, lambda run: replace(run, metrics={**run.metrics, **({"wall": missing} if run.pair > 1 else {})})
    )
    lines = TABLES["fit"](changed)
    assert lines[0].startswith("| 5 pairs |")
    assert lines[2].startswith("| wall, s, median (range) of 2 pairs |")


def test_the_paired_figures_have_the_change_of_all_pairs_and_of_each(report: Report) -> None:
    """Median, smallest and largest, interval; then seconds and change a pair."""
    lines = TABLES["paired"](compared(report))
    assert lines[2].startswith("| wall | 5 | -10.01 | -9.96 | [-10.30, -9.63] |")
    assert lines[-5] == "| 0 | 120.850 | 108.750 | -10.01 |"
    assert len(lines[-5:]) == len(WALLS)


def test_the_table_of_parity_names_the_pair_that_differs(tmp_path: Path) -> None:
    """A flipped bit in one captured run is one cell."""
    report = write_report(tmp_path / "flipped.jsonl", states={2: FLIPPED})
    cells = TABLES["parity"](compared(report))[2].strip("| ").split(" | ")
    assert cells[0] == "model"
    assert cells[2:7].count("**different**") == 1
    assert cells[2:7].count("equal") == 4


@pytest.mark.parametrize(("run", "column"), [(2, 2), (3, 1)])
def test_of_a_pair_that_was_cut_off_nothing_is_claimed(tmp_path: Path, run: int, column: int) -> None:
    """Neither a difference of states that nobody reached, nor a change of half a wall."""
    report = write_report(tmp_path / "cut.jsonl", statuses={run: "interrupted"}, states={run: None})
    cells = TABLES["parity"](compared(report))[2].strip("| ").split(" | ")
    assert cells[2:7] == ["equal", "-", "equal", "equal", "equal"]
    each = TABLES["paired"](compared(report))[-4].strip("| ").split(" | ")
    assert each[0] == f"1 (interrupted:{run})"
    assert each[column] == each[3] == "-"
    assert each[3 - column] != "-"


def test_values_that_are_no_tensors_are_counted_too(report: Report) -> None:
    """A part of numbers alone is compared as well."""
    states = tuple(
        replace(state, num_tensors=0, tensors={"a": TensorDigest("0", "int", ()), "b": TensorDigest("1", "str", ())})
        for state in report.states
    )
    assert TABLES["parity"](compared(replace(report, states=states)))[2].startswith("| model | 0 + 2 | equal |")


def test_one_native_run_agrees_with_no_other(report: Report) -> None:
    """With a second one it does."""
    of_all, of_one = (
        TABLES["parity"](compared(replace(report, pairs=pairs))) for pairs in (report.pairs, report.pairs[:1])
    )
    assert (of_all[2].strip("| ").split(" | ")[-1], of_one[2].strip("| ").split(" | ")[-1]) == ("yes", "-")


def test_of_another_computation_no_parity_is_shown(report: Report) -> None:
    """It says so."""
    arms = (report.header.arms[0], replace(report.header.arms[1], different=True))
    lines = TABLES["parity"](compared(replace(report, header=replace(report.header, arms=arms))))
    assert lines == ["captured is declared to be another computation: its states are not compared."]


def test_the_optimizer_s_part_is_its_time_over_the_step_s(report: Report) -> None:
    """On the device, and nothing where no time was taken."""

    def timed(run: Run) -> Run:
        seconds = 0.02 if run.arm == "native" else 0.002
        times = {
            "optimizer_device_median": Metric(value=seconds, unit="s"),
            "step_device_median": Metric(value=0.1, unit="s"),
        }
        return replace(run, metrics={**run.metrics, **times})

    lines = TABLES["share"](with_runs(report, timed))
    assert lines[2:] == ["| on the device | 20.0% (20.0%\N{EN DASH}20.0%) | 2.0% (2.0%\N{EN DASH}2.0%) |"]


def test_what_is_left_of_a_step_is_told_in_milliseconds(report: Report) -> None:
    """On the host: the optimizer may get faster and the rest slower."""

    def timed(run: Run) -> Run:
        seconds = (0.02, 0.1) if run.arm == "native" else (0.002, 0.09)
        names = ("optimizer_time_median", "step_time_median")
        times = {name: Metric(value=value, unit="s") for name, value in zip(names, seconds, strict=True)}
        return replace(run, metrics={**run.metrics, **times})

    *_, optimizer, rest = TABLES["share"](with_runs(report, timed))
    dash = "\N{EN DASH}"
    assert (
        optimizer == f"| the optimizer's part of a step on the host, ms | 20.0 (20.0{dash}20.0) | 2.0 (2.0{dash}2.0) |"
    )
    assert rest == f"| the rest of a step on the host, ms | 80.0 (80.0{dash}80.0) | 88.0 (88.0{dash}88.0) |"


def test_a_step_that_holds_its_closure_has_no_part_of_the_optimizer_s(report: Report) -> None:
    """Forward and backward would count as the optimizer's."""
    note = "optimizer 0 was given a closure: its step time includes the closure"
    (line,) = TABLES["share"](with_runs(report, lambda run: replace(run, notes=(note,))))
    assert "not known" in line


def monitored(run: Run) -> Run:
    """Return a run beside which something was sampled."""
    rows = (
        MemoryRow(name="used on the device", value_bytes=(1000 if run.arm == "native" else 1100) * MIB),
        MemoryRow(name="this run", value_bytes=None, reason="pid_namespace", level=1),
    )
    monitor = MonitorReport(
        energy=(DeviceEnergy(uuid="GPU-1", value_j=50.0 + run.run, bound_j=2.5, source="counter"),),
        memory=(
            MemoryAccount(
                uuid="GPU-1",
                mono_ns=1,
                rows=rows,
                residue_share=0.015,
                warning="it does not add up" if run.arm == "native" else None,
                num_times=9,
                num_times_warned=4,
            ),
        ),
    )
    metrics = {**run.metrics, "gpu_energy": Metric(value=50.0 + run.run, unit="J")}
    return replace(run, monitor=monitor, metrics=metrics)


def test_the_memory_of_both_arms_stands_side_by_side_with_what_is_not_known(report: Report) -> None:
    """A term without a value has its reason."""
    lines = TABLES["memory"](with_runs(report, monitored))
    assert lines[2] == "| used on the device | 1000.0 | 1100.0 |"
    assert lines[3].startswith("| \N{EN DASH} this run | - (")
    assert lines[4] == "| not explained, of what is used | 1.5% | 1.5% |"
    assert lines[5:] == ["", "Native: it does not add up; at 4 of 9 times a residue was that large."]


def test_energy_comes_with_the_bound_and_the_source_of_its_readings(report: Report) -> None:
    """A row an arm."""
    lines = TABLES["energy"](with_runs(report, monitored))
    assert lines[2].startswith("| native | ")
    assert lines[2].endswith(" | 2.5 | counter |")


def test_the_capture_s_counts_and_reasons_are_those_of_the_runs(report: Report) -> None:
    """Summed over the runs in the statistics."""
    lines = TABLES["capture"](compared(report))
    assert lines[2] == "| native | MuSGD | 1 | 5 | 0 | 0 | capture is off (3200) |"
    assert lines[3] == "| captured | MuSGD | 1 | 5 | 5 | 3190 | warmup (10) |"


def test_phases_have_seconds_and_share_and_a_row_for_the_rest(report: Report) -> None:
    """What lies in no phase is told."""
    lines = TABLES["phases"](compared(report))
    assert lines[2] == "| train | 90.638 s, 75.0% | 54.375 s, 50.0% |"
    assert lines[3].startswith("| (not marked) | ")


def test_where_it_was_measured_has_no_path_of_that_machine(tmp_path: Path) -> None:
    """Of a path only the name."""
    command = ("/opt/venv/bin/python", "/data/train.py", "--epochs", "3")
    report = write_report(tmp_path / "paths.jsonl", command=command)
    lines = "\n".join(TABLES["where"](compared(report)))
    assert "`python train.py --epochs 3`" in lines
    assert "NVIDIA L4, driver 580" in lines


def test_the_settings_of_the_runs_stand_where_it_was_measured(report: Report) -> None:
    """As the runs handed them over; of two values both."""
    settings = [
        replace(state, part="settings", values={"data": "'generated'", "epochs": str(state.run % 2)})
        for state in report.states
    ]
    lines = TABLES["where"](compared(replace(report, states=(*report.states, *settings))))
    assert lines[-1] == "| settings | data generated, epochs 0 / 1 |"


def test_a_report_that_was_taken_up_again_or_cut_short_says_so(tmp_path: Path) -> None:
    """Where it was measured."""
    report = write_report(tmp_path / "short.jsonl", statuses={9: "interrupted"})
    assert report.end is not None
    ended = replace(report, end=replace(report.end, status="interrupted"))
    assert "| ended | interrupted |" in TABLES["where"](compared(ended))


def test_what_rehashing_said_is_quoted_from_beside_the_report(report: Report, tmp_path: Path) -> None:
    """Its last line, and that there is none."""
    assert TABLES["rehash"](compared(report)) == [f"{NOT_MEASURED} `fit.rehash.txt`."]
    kept = tmp_path / "fit.rehash.txt"
    kept.write_text("\n".join([*rehashed(report, 1), "all equal\n"]))
    assert TABLES["rehash"](compared(report))[0] == "> all equal"
    kept.write_text("different  run 1 process 0  model\ndifferent\n")
    assert TABLES["rehash"](compared(report))[0] == "> different"


@pytest.mark.parametrize("data", [b"", b"\xff"])
def test_a_rehash_that_cannot_be_read_is_one_error(data: bytes, report: Report, tmp_path: Path) -> None:
    """As a report is."""
    (tmp_path / "fit.rehash.txt").write_bytes(data)
    with pytest.raises(UnusableError, match=r"^fit\.rehash\.txt: "):
        TABLES["rehash"](compared(report))


def rehashed(report: Report, pair: int) -> list[str]:
    """Return what rehashing says of the values of a pair."""
    states = [state for state in report.states if state.run in report.pairs[pair].runs]
    return [
        f"equal      run {state.run} process 0  {state.part}  {what}"
        for state in states
        for what in (*(f"{name}  float64[2]" for name in state.tensors), "2 tensors and values")
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [],
        lambda lines: lines[:-1],
        lambda lines: [*lines, lines[0]],
        lambda lines: [lines[0], lines[0], *lines[2:]],
        lambda lines: [lines[0].replace("equal", "different"), *lines[1:]],
        lambda lines: [line for line in lines if " run 2 " in line],
        lambda lines: [line.replace("run 2", "run 5") for line in lines],
    ],
    ids=["nothing", "one less", "one twice", "one for another", "one different", "half of a pair", "of two pairs"],
)
def test_rehashing_that_does_not_have_every_value_of_a_pair_is_refused(
    change: Callable[[list[str]], list[str]], report: Report, tmp_path: Path
) -> None:
    """Whatever its last line says."""
    lines = rehashed(report, 1)
    assert {" run 2 ", " run 3 "} == {word for word in (" run 2 ", " run 3 ") if any(word in line for line in lines)}
    (tmp_path / "fit.rehash.txt").write_text("\n".join([*change(lines), "all equal\n"]))
    with pytest.raises(UnusableError, match=r"^fit\.rehash\.txt: it does not have every value of a pair of "):
        TABLES["rehash"](compared(report))


def test_a_part_of_a_report_is_no_evidence(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut anywhere, it is refused with the remedy."""
    whole = (tmp_path / "fit.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    file = page(tmp_path, "fit.jsonl fit")
    for part in (whole[:-40], b"".join(lines[:-1]), b"".join(lines[:5]), lines[0]):
        (tmp_path / "fit.jsonl").write_bytes(part)
        assert main(["--check", str(file)]) == 2
        assert "--resume" in capsys.readouterr().err


def test_every_table_is_made_of_any_report(report: Report) -> None:
    """Also of one without a device; each of its rows has as many cells as its head."""
    for name, table in TABLES.items():
        lines = [line for line in table(compared(report)) if line.startswith("|")]
        widths = {line.count(" | ") for line in lines if "---" not in line}
        assert name == "paired" or len(widths) <= 1, name


def test_a_written_page_passes_its_check(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is around the blocks stays, and each block names its report and the command."""
    file = page(tmp_path, "fit.jsonl fit paired", "fit.jsonl capture")
    assert main(["--write", str(file)]) == 0
    assert main(["--check", str(file)]) == 0
    text = file.read_text()
    assert text.startswith("# A page\n\n<!-- figures: fit.jsonl fit paired -->\n| 5 pairs |")
    assert text.count("From [fit.jsonl](fit.jsonl), `make evidence-tables`.") == 2
    assert "\nBetween.\n" in text


def test_a_figure_that_the_report_does_not_give_fails_the_check(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block is named, the page left as it is."""
    file = page(tmp_path, "fit.jsonl fit")
    main(["--write", str(file)])
    file.write_text(file.read_text().replace("0.8999", "0.8000"))
    assert main(["--check", str(file)]) == 1
    assert "the figures of fit.jsonl fit" in capsys.readouterr().err
    assert "0.8000" in file.read_text()


def test_a_report_that_is_not_there_is_told_and_nothing_is_claimed(tmp_path: Path) -> None:
    """Until it is: then the page has to have its figures."""
    file = page(tmp_path, "fit.jsonl fit", body=f"{NOT_MEASURED} `fit.jsonl`.\n")
    assert main(["--check", str(file)]) == 0
    write_report(tmp_path / "fit.jsonl")
    assert main(["--check", str(file)]) == 1


@pytest.mark.parametrize(
    "text",
    [
        "no block at all\n",
        "<!-- figures: fit.jsonl fit -->\nno end\n",
        "<!-- figures: fit.jsonl fitt -->\n<!-- end of figures -->\n",
        "<!-- figures: fit.jsonl -->\n<!-- end of figures -->\n",
        "<!-- figures: page.md fit -->\n<!-- end of figures -->\n",
    ],
)
def test_what_cannot_be_used_is_an_error_of_one_line(
    text: str, report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page without blocks, a block without an end, no such table, no table, no report."""
    file = tmp_path / "page.md"
    file.write_text(text)
    assert main(["--check", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_page_of_this_repository_says_what_its_reports_give() -> None:
    """And the tool runs as a script."""
    script = ROOT / "tools" / "evidence_tables.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert evidence_tables.PAGE.exists()
