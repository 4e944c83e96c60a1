import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cli.harness import Lucid, Ran
from cli.reports import FLIPPED, WALLS, write_report

NOISE = (1.0, 1.001, 0.999, 1.0005, 0.9995)
SAME = tuple((native, captured * noise) for (native, captured), noise in zip(WALLS, NOISE, strict=True))
FASTER = tuple((native, captured * 0.97) for native, captured in SAME)
SLOWER = tuple((native, captured * 1.03) for native, captured in SAME)
OPEN = tuple((native, captured * noise**20) for (native, captured), noise in zip(WALLS, NOISE, strict=True))
OTHER_MACHINE = tuple((native * 1.085, captured * 1.085) for native, captured in SAME)
ADORNED = "sp ace|pipe`tick<b>&\x1b[31m\u2028.jsonl"


@pytest.fixture
def reports(lucid: Lucid) -> Lucid:
    """Give the command in a directory with reports: a, and others named by what they are to it."""
    series = {"a": WALLS, "same": SAME, "faster": FASTER, "slower": SLOWER, "open": OPEN, "moved": OTHER_MACHINE}
    for name, walls in series.items():
        write_report(lucid.directory / f"{name}.jsonl", walls)
    write_report(lucid.directory / "broken.jsonl", SLOWER, states={1: FLIPPED})
    write_report(
        lucid.directory / "elsewhere.jsonl", SLOWER, identity={"gpu_name": "NVIDIA H200", "driver_major": "580"}
    )
    (lucid.directory / "torn.jsonl").write_bytes((lucid.directory / "slower.jsonl").read_bytes()[:-1])
    return lucid


def compare(lucid: Lucid, *args: str, **settings: Any) -> Ran:
    """Run `lucid report diff` with the report a first."""
    return lucid("report", "diff", "a.jsonl", *args, **settings)


GATE, EXPECT = ("--gate", "wall<=+1%"), ("--expect", "wall<=-1%")
WITHOUT = ("--gate", "peak_allocated<=+1%")
STRICT = ("--fail-on-inconclusive",)


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("same.jsonl",), 0),
        (("slower.jsonl",), 0),
        (("moved.jsonl",), 0),
        (("open.jsonl", *STRICT), 6),
        (("faster.jsonl", *STRICT), 0),
        (("slower.jsonl", *STRICT), 0),
        (("same.jsonl", *STRICT, "--margin", "wall=1"), 0),
        (("same.jsonl", *GATE), 0),
        (("faster.jsonl", *GATE), 0),
        (("slower.jsonl", *GATE), 3),
        (("open.jsonl", *GATE), 0),
        (("open.jsonl", *GATE, *STRICT), 6),
        (("same.jsonl", *GATE, *STRICT), 0),
        (("faster.jsonl", *EXPECT), 0),
        (("same.jsonl", *EXPECT), 3),
        (("open.jsonl", *EXPECT), 3),
        (("open.jsonl", *GATE, *EXPECT, *STRICT), 3),
        (("faster.jsonl", "slower.jsonl", *GATE), 3),
        (("same.jsonl", *WITHOUT), 5),
        (("slower.jsonl", *GATE, *WITHOUT), 5),
        (("moved.jsonl", "--gate", "wall<=+1s"), 5),
        (("moved.jsonl", "--gate", "wall<=+1s", "--canary-limit", "9%"), 0),
        (("same.jsonl", "--gate", "peak_rss<=+64MiB"), 0),
        (("same.jsonl", "--gate", "peak_rss<=0"), 2),
        (("same.jsonl", "--gate", "peak_rss<=0B"), 0),
        (("broken.jsonl",), 4),
        (("broken.jsonl", *GATE), 4),
        (("broken.jsonl", "slower.jsonl", *GATE), 4),
        (("broken.jsonl", *GATE, *WITHOUT), 5),
        (("broken.jsonl", *STRICT), 4),
        (("elsewhere.jsonl", *GATE), 5),
        (("same.jsonl", "elsewhere.jsonl"), 5),
        (("elsewhere.jsonl", *GATE, "--allow", "gpu_name"), 3),
        (("torn.jsonl", *GATE), 7),
        (("elsewhere.jsonl", "torn.jsonl", *GATE), 7),
        (("torn.jsonl", *GATE, "--allow-partial"), 3),
        (("missing.jsonl",), 7),
        ((), 2),
        (("same.jsonl", "--gate", "wall<=1%"), 2),
        (("same.jsonl", "--gate", "wall<=+1MiB"), 2),
        (("same.jsonl", "--expect", "faster"), 2),
        (("same.jsonl", "--margin", "wall"), 2),
        (("same.jsonl", "--margin", "wall=0"), 2),
        (("same.jsonl", "--margin", "wal=1"), 2),
        (("same.jsonl", "--canary-limit", "-1"), 2),
        (("same.jsonl", "--format", "yaml"), 2),
        (("same.jsonl", "--step-summary"), 2),
    ],
)
def test_every_outcome_has_its_exit_code(reports: Lucid, args: tuple[str, ...], code: int) -> None:
    """Of several the most serious one: 7, 5, 4, 3, 6; without limits a finished comparison is 0 whatever it found."""
    ran = compare(reports, *args, env={"GITHUB_STEP_SUMMARY": ""})
    assert ran.code == code, ran.err
    assert "Traceback" not in ran.err
    is_refused = code == 5 and "elsewhere.jsonl" in args
    assert bool(ran.err) is (code in {2, 7} or is_refused or "torn.jsonl" in args)


@pytest.mark.parametrize("form", ["table", "markdown", "json", "csv"])
def test_all_forms_give_the_same_exit_code(reports: Lucid, form: str) -> None:
    """A gate does not depend on how the result is printed, and is told in every form."""
    ran = compare(reports, "slower.jsonl", *GATE, "--format", form)
    assert ran.code == 3
    assert "wall<=+1%" in (ran.err if form == "csv" else ran.out).replace("&lt;", "<")


def test_the_table_has_arms_effects_difference_and_verdict(reports: Lucid) -> None:
    """Medians with their ranges, each report's paired effect with its interval, and what b is to a."""
    out = compare(reports, "faster.jsonl", *EXPECT).out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "native captured paired % [95 %]" in lines
    assert "a 120.850 s (120.542-122.793) 108.750 s (108.123-110.967) -10.01 [-10.27, -9.65]" in lines
    assert any(line.startswith("wall: b against a -3.00 % [-3.") and line.endswith(": better") for line in lines)
    assert any(line.startswith("expect wall<=-1%: passed [-3.") for line in lines)
    assert lines[-1].startswith("verdict b is better than a: -3.00 %, 95 % interval [-3.")
    assert max(map(len, out.splitlines())) <= 100


def test_several_reports_are_called_by_letters(reports: Lucid) -> None:
    """Each is compared with the first, in the order of the command line."""
    out = compare(reports, "faster.jsonl", "slower.jsonl").out
    assert out.index("\nverdict   b is better than a") < out.index("\nverdict   c is worse than a")
    assert "\nc         slower.jsonl: 5 pairs" in out


def test_a_loud_canary_withholds_absolute_values_in_every_form(reports: Lucid) -> None:
    """Where the native arms differ by 8.5 % no median is shown; ratios are, and are no improvement."""
    table = compare(reports, "moved.jsonl").out
    assert "absolute values do not compare" in " ".join(table.split())
    assert "120.850 s" not in table
    assert "120.850 s" in compare(reports, "moved.jsonl", "--canary-limit", "9").out
    assert "120.850 s" not in compare(reports, "moved.jsonl", "--format", "markdown").out
    found = json.loads(compare(reports, "moved.jsonl", "--format", "json").out)["comparisons"][0]
    assert found["decision"] == "inconclusive"
    assert found["canary"]["is_quiet"] is False
    wall = found["metrics"][0]
    assert (wall["absolute_withheld"], wall["a"]["base"]["median"], wall["amount"]["value"]) == (True, None, None)
    assert wall["a"]["paired"]["percent"] == pytest.approx(-10.012, abs=1e-3)
    rows = list(csv.DictReader(io.StringIO(compare(reports, "moved.jsonl", "--format", "csv").out)))
    assert (rows[0]["a_base_median"], rows[0]["a_base_n"], rows[0]["amount"]) == ("", "5", "")


def test_the_json_is_one_versioned_object(reports: Lucid) -> None:
    """Its schema, every comparison with metrics, counters, parity and limits, and the exit code."""
    ran = compare(reports, "faster.jsonl", "slower.jsonl", *GATE, "--format", "json")
    found = json.loads(ran.out)
    assert ran.out.count("\n") == 1
    assert (found["schema"], found["exit_code"], found["base"]["path"]) == ("lucid.diff/1.0", 3, "a.jsonl")
    assert [one["decision"] for one in found["comparisons"]] == ["better", "worse"]
    assert [one["gates"][0]["status"] for one in found["comparisons"]] == ["passed", "failed"]
    first = found["comparisons"][0]
    assert [row["metric"] for row in first["metrics"]] == ["wall", "peak_rss"]
    assert [row["metric"] for row in first["counters"]] == [
        "capture_recordings",
        "capture_replays",
        "capture_native_steps",
    ]
    assert first["parity"]["verdict"] == "same"
    wall = first["metrics"][0]
    assert wall["difference"]["low_percent"] < wall["difference"]["percent"] < wall["difference"]["high_percent"] < 0
    assert (wall["unit"], wall["better"], wall["verdict"]) == ("s", "lower", "better")


def test_the_csv_has_one_row_a_metric_with_every_digit(reports: Lucid) -> None:
    """Numbers are as they were recorded, in the metric's own unit, and parity is a row."""
    out = compare(reports, "faster.jsonl", "--format", "csv").out
    rows = list(csv.DictReader(io.StringIO(out), strict=True))
    assert [row["metric"] for row in rows][:2] == ["wall", "peak_rss"]
    assert rows[-1]["metric"] == "parity"
    assert rows[-1]["verdict"] == "same"
    assert (rows[0]["a_base_median"], rows[0]["unit"], rows[0]["verdict"]) == ("120.85", "s", "better")


@pytest.mark.parametrize("form", ["table", "markdown", "json", "csv"])
def test_no_form_carries_what_a_name_carries(reports: Lucid, form: str) -> None:
    """A file's name is neither markup nor an escape sequence nor a line of its own."""
    (reports.directory / ADORNED).write_bytes((reports.directory / "faster.jsonl").read_bytes())
    env = {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "PYTHONIOENCODING": "utf-8"}
    ran = compare(reports, ADORNED, "--format", form, env=env)
    assert ran.code == 0
    assert "\x1b" not in ran.out
    if form == "markdown":
        assert "- b: sp ace\\|pipe\\`tick&lt;b&gt;&amp;\\\\x1b[31m\\\\u2028.jsonl: 5 pairs" in ran.out
        assert "<b>" not in ran.out
    if form == "json":
        assert json.loads(ran.out)["comparisons"][0]["report"]["path"] == ADORNED


def test_json_and_csv_are_utf_8_whatever_the_terminal_has(reports: Lucid) -> None:
    """Files made by redirection do not depend on the locale."""
    (reports.directory / "é.jsonl").write_bytes((reports.directory / "faster.jsonl").read_bytes())
    for form in ("json", "csv", "markdown"):
        assert "é.jsonl" in compare(reports, "é.jsonl", "--format", form, env={"PYTHONIOENCODING": "ascii"}).out


@pytest.mark.parametrize("form", ["markdown", "json", "csv"])
def test_a_full_disk_and_a_closed_pipe_are_told_apart(reports: Lucid, form: str) -> None:
    """Lost output is 9 with a reason; a reader that left is nobody's fault."""
    with Path("/dev/full").open("wb") as full:
        ran = compare(reports, "same.jsonl", "--format", form, stdout=full)
    assert (ran.code, ran.err) == (9, "Error: standard output: No space left on device\n")
    read, write = os.pipe()
    os.close(read)
    try:
        ran = compare(reports, "slower.jsonl", *GATE, "--format", form, stdout=write)
    finally:
        os.close(write)
    assert ran.code == 3
    assert "Traceback" not in ran.err


def test_the_step_summary_is_appended_and_the_result_printed(reports: Lucid) -> None:
    """What other steps wrote stays; the summary is the markdown form; the exit code is the same."""
    summary = reports.directory / "summary.md"
    summary.write_text("# before\n")
    env = {"GITHUB_STEP_SUMMARY": str(summary)}
    ran = compare(reports, "slower.jsonl", *GATE, "--step-summary", env=env)
    assert ran.code == 3
    assert "verdict   b is worse than a" in ran.out
    markdown = compare(reports, "slower.jsonl", *GATE, "--format", "markdown").out
    assert summary.read_text() == f"# before\n\n{markdown}"


def test_a_summary_that_cannot_be_written_is_an_error(reports: Lucid) -> None:
    """The result is printed, and the lost summary is 9."""
    ran = compare(reports, "same.jsonl", "--step-summary", env={"GITHUB_STEP_SUMMARY": "nowhere/summary.md"})
    assert ran.code == 9
    assert "verdict" in ran.out
    assert "nowhere/summary.md" in ran.err


def test_one_report_of_several_can_come_from_standard_input(reports: Lucid) -> None:
    """It is called `-`; two of them are a usage error."""
    with (reports.directory / "faster.jsonl").open("rb") as stdin:
        ran = compare(reports, "slower.jsonl", "-", stdin=stdin)
    assert ran.code == 0
    assert "\nc         -: 5 pairs" in ran.out
    assert compare(reports, "-", "-").code == 2
