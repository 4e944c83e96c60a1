import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cli.reports import FLIPPED, WALLS, write_report
from lucid_cli import app
from lucid_cli.reporters.difference_words import parity_words
from lucid_cli.reporters.report_tables import MAX_ROWS, markdown_tables
from lucid_profiler import jsonio
from lucid_profiler.compare import analyze_all
from lucid_profiler.reader import read_report
from lucid_profiler.records import Metric
from reports.good import relinked

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return what runs `lucid report show` in a directory with a report, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    write_report(Path("report.jsonl"))

    def ran(*args: str) -> tuple[int, str, str]:
        code = app.run(["report", "show", *args])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return ran


def test_the_table_is_what_is_shown_without_a_format(run: Run) -> None:
    """`--format table` is the default."""
    assert run("report.jsonl") == run("report.jsonl", "--format", "table")
    assert "captured is faster" in run("report.jsonl")[1]


def test_json_is_one_versioned_object_with_all_numbers(run: Run) -> None:
    """Verdict, effects, arms' values and the runs themselves are there, in base units."""
    code, out, err = run("report.jsonl", "--format", "json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    shown = json.loads(out)
    assert shown["schema"] == "lucid.show/1.0"
    assert shown["report"]["schema"] == "lucid.report/1.0"
    assert shown["report"]["complete"] is True
    (comparison,) = shown["comparisons"]
    assert comparison["arms"] == {"base": "native", "other": "captured"}
    assert comparison["verdict"]["decision"] == "better"
    assert comparison["parity"]["status"] == "equal"
    wall = next(one for one in comparison["metrics"] if one["metric"] == "wall")
    assert (wall["base"]["median"], wall["other"]["median"], wall["unit"]) == (120.85, 108.75, "s")
    assert wall["paired"]["percent"] == pytest.approx(-10.01, abs=0.01)
    assert [one["metrics"]["wall"]["value"] for one in shown["runs"][:2]] == [120.85, 108.75]
    missing = next(one for one in comparison["metrics"] if one["metric"] == "peak_allocated")
    assert (missing["base"]["median"], missing["reasons"]) == (None, {"no_cuda": 10})


def test_json_has_the_keys_that_readers_rely_on(run: Run) -> None:
    """A key that disappears needs another version of the format."""
    shown = json.loads(run("report.jsonl", "--format", "json")[1])
    assert shown.keys() == {"schema", "report", "arms", "environments", "comparisons", "runs"}
    assert shown["report"].keys() == {
        *("path", "id", "created", "schema", "method", "tool", "command", "order", "primary", "planned_pairs"),
        *("complete", "status", "torn_line", "warnings"),
    }
    assert shown["comparisons"][0].keys() == {
        *("arms", "pairs", "metrics", "capture", "parity", "verdict", "warnings", "words")
    }
    assert shown["comparisons"][0]["metrics"][0].keys() == {
        *("metric", "unit", "better", "exact", "change", "base", "other", "ratio_of_medians", "paired"),
        *("paired_reason", "num_missing", "reasons"),
    }


def test_numbers_that_json_lacks_survive(run: Run) -> None:
    """A value that is not finite is there, and is not null."""
    records = [jsonio.loads(line) for line in Path("report.jsonl").read_bytes().splitlines()]
    run_record = next(fields for fields in records if fields["t"] == "run")
    run_record["metrics"]["loss"] = {"value": float("nan"), "unit": "1"}
    Path("nan.jsonl").write_bytes(relinked(records))
    shown = json.loads(run("nan.jsonl", "--format", "json")[1])
    assert shown["runs"][0]["metrics"]["loss"]["value"] == {"$float": "nan"}


def test_csv_has_a_row_a_metric_with_all_digits(run: Run) -> None:
    """Numbers are in the metric's own unit; without a value the cells are empty."""
    code, out, err = run("report.jsonl", "--format", "csv")
    assert (code, err) == (0, "")
    rows = {row["metric"]: row for row in csv.DictReader(io.StringIO(out, newline=""))}
    assert rows.keys() == {"wall", "peak_rss", "peak_allocated"}
    wall = rows["wall"]
    assert (wall["base"], wall["other"], wall["unit"], wall["change"]) == ("native", "captured", "s", "better")
    assert (wall["base_median"], wall["other_median"], wall["base_n"]) == ("120.85", "108.75", "5")
    assert float(wall["paired_percent"]) == pytest.approx(-10.01, abs=0.01)
    assert rows["peak_allocated"]["base_median"] == ""
    assert rows["peak_allocated"]["reason"] == "no_value; no_cuda"


def test_markdown_has_the_verdict_the_metrics_and_the_notes(run: Run) -> None:
    """The verdict is the heading; what the report is of stands below the table."""
    code, out, err = run("report.jsonl", "--format", "markdown")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("### captured against native: captured is faster: -9.96 % wall on average over 5 pairs")
    assert "| wall | 120.850 s (120.542 to 122.793) | 108.750 s (108.123 to 110.967) | 0.8999 | -10.01 |" in out
    assert "- parity: equal: model" in lines
    assert "- where: NVIDIA L4, driver 580, torch 2.9.1+cu129, python 3.11.7" in lines


def test_markdown_says_of_how_many_pairs_a_value_is(tmp_path: Path) -> None:
    """A metric that some pairs lack is of fewer than the others."""
    report = write_report(tmp_path / "report.jsonl")
    missing = Metric(value=None, unit="s", reason="gap")
    runs = tuple(replace(run, metrics={**run.metrics, "cpu_time": replace(missing, value=1.0)}) for run in report.runs)
    runs = (replace(runs[0], metrics={**runs[0].metrics, "cpu_time": missing}), *runs[1:])
    shown = replace(report, runs=runs)
    (table,) = markdown_tables(shown, analyze_all(shown))
    assert [note for note in table.notes if "without a value" in note] == [
        "CPU time: 1 of 5 pairs without a value (nothing, or too little, was read at that time (1))"
    ]


def test_markdown_names_the_parts_that_differ_and_no_other(tmp_path: Path) -> None:
    """Of two parts one is equal."""
    report = write_report(tmp_path / "report.jsonl")
    states = tuple(
        replace(state, part=part, digest=f"{state.run == 1 and part == 'model':064}")
        for state in report.states
        for part in ("model", "data")
    )
    shown = replace(report, states=states)
    (table,) = markdown_tables(shown, analyze_all(shown))
    assert any(note.startswith("parity: different: model; first difference: ") for note in table.notes)
    assert parity_words(analyze_all(shown)[0]).startswith("different: model; ")


def test_markdown_names_what_went_wrong(run: Run) -> None:
    """A difference, a torn line and a missing end are in the notes."""
    write_report(Path("bad.jsonl"), states={1: FLIPPED})
    lines = Path("bad.jsonl").read_bytes().splitlines(keepends=True)
    Path("bad.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:-20])
    code, out, _ = run("bad.jsonl", "--format", "markdown")
    assert code == 0
    assert "parity failed" in out.splitlines()[0]
    assert "- status: without an end" in out
    assert f"- file: line {len(lines)} is the last one and not whole" in out


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_step_summary_is_appended_beside_the_result(form: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the file stays, the markdown follows, and the result is printed as without it."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    Path("summary.md").write_text("before\n")
    plain = run("report.jsonl", "--format", form)
    assert run("report.jsonl", "--format", form, "--step-summary") == plain
    markdown = run("report.jsonl", "--format", "markdown")[1]
    assert Path("summary.md").read_text() == "before\n\n" + markdown


def test_a_step_summary_without_its_file_is_a_usage_error(run: Run) -> None:
    """Outside GitHub Actions the option says what to use instead."""
    code, out, err = run("report.jsonl", "--step-summary")
    assert (code, out) == (2, "")
    assert "GITHUB_STEP_SUMMARY" in err


def test_a_report_of_very_many_metrics_has_bounded_markdown(run: Run) -> None:
    """The table ends after so many rows and says how many are not shown."""
    write_report(Path("many.jsonl"), WALLS[:3])
    records = [jsonio.loads(line) for line in Path("many.jsonl").read_bytes().splitlines()]
    for fields in records:
        if fields["t"] == "run":
            fields["metrics"].update({f"m{index}": {"value": 1, "unit": "1"} for index in range(1000)})
    Path("many.jsonl").write_bytes(relinked(records))
    report = read_report("many.jsonl")
    (table,) = markdown_tables(report, analyze_all(report))
    assert len(table.rows) == MAX_ROWS
    assert table.notes[0] == f"{1003 - MAX_ROWS} further metrics not shown"
    assert len(run("many.jsonl", "--format", "markdown")[1]) < 50_000
