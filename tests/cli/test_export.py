import csv
import io
import math
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from cli.harness import Lucid
from lucid_cli import app
from lucid_cli.export.chrome import MAX_LANES, ChromeTrace
from lucid_cli.export.table import COLUMNS
from lucid_profiler import jsonio
from lucid_profiler.reader import read_report
from reports.good import BEGIN_NS, NUM_SAMPLES, NUM_STEPS, RUN_NS, UUID, good_report, relinked
from reports.trace_rules import checked_trace

Run = Callable[..., tuple[int, bytes, str]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of the good report."""
    return good_report(tmp_path_factory.mktemp("good") / "good.jsonl")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], good: bytes) -> Run:
    """Return what runs `lucid report export` in a directory with the good report, in this process."""
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_bytes(good)

    def ran(*args: str) -> tuple[int, bytes, str]:
        code = app.run(["report", "export", *args])
        captured = capfdbinary.readouterr()
        return code, captured.out, captured.err.decode()

    return ran


@pytest.fixture
def trace(run: Run) -> dict[str, Any]:
    """Return the good report as a timeline, checked."""
    code, out, err = run("good.jsonl", "--to", "chrome-trace")
    assert (code, err) == (0, "")
    return checked_trace(out)


def _events(trace: dict[str, Any], kind: str, **wanted: Any) -> list[dict[str, Any]]:
    events = [event for event in trace["traceEvents"] if event["ph"] == kind]
    return [event for event in events if wanted.items() <= event.items()]


def test_each_run_is_a_process_with_its_arm_and_pair(trace: dict[str, Any]) -> None:
    """Processes are named and ordered as the runs were."""
    names = [event["args"]["name"] for event in _events(trace, "M", name="process_name")]
    assert names == [
        "run 0: native, pair 0",
        "run 1: captured, pair 0",
        "run 2: captured, pair 1",
        "run 3: native, pair 1",
        "run 4: native, pair 2",
        "run 5: captured, pair 2",
    ]
    assert [event["args"]["sort_index"] for event in _events(trace, "M", name="process_sort_index")] == list(range(6))


def test_all_runs_lie_on_one_timeline_to_the_nanosecond(trace: dict[str, Any]) -> None:
    """Stamps are the monotonic ones in microseconds, with all of their digits."""
    begins = [event["ts"] for event in _events(trace, "X", name="wall")]
    assert begins == [Decimal(BEGIN_NS + run * RUN_NS) / 1000 for run in range(6)]
    step = _events(trace, "X", name="optimizer step")[0]
    assert (step["ts"], step["dur"]) == (Decimal(BEGIN_NS + 1) / 1000, Decimal(5_000_001) / 1000)
    assert step["args"] == {"begin_ns": BEGIN_NS + 1, "end_ns": BEGIN_NS + 5_000_002, "step": 1}


def test_phases_and_steps_are_slices_of_threads_of_their_own(trace: dict[str, Any]) -> None:
    """Of each run; names with other letters come through."""
    assert len(_events(trace, "X", name="optimizer step")) == 6 * NUM_STEPS
    assert len(_events(trace, "X", name="load")) == len(_events(trace, "X", name="träin")) == 6
    threads = {event["args"]["name"] for event in _events(trace, "M", name="thread_name", pid=1)}
    assert threads == {"wall", "phases", "steps of optimizer 0"}


def test_what_was_sampled_are_counters_in_readable_units(trace: dict[str, Any]) -> None:
    """Memory, power, clocks, utilisation, temperature, allocator, resident memory and CPU of one run."""
    counters: dict[str, list[dict[str, Any]]] = {}
    for event in _events(trace, "C", pid=1):
        counters.setdefault(event["name"], []).append(event["args"])
    gpu = UUID[:12]
    assert counters[f"{gpu} memory used"] == [{"bytes": 1000}, {"bytes": 2000}]
    assert counters[f"{gpu} power draw"] == [{"W": Decimal("312.345")}, {"W": 313}]
    assert counters[f"{gpu} clock sm"] == [{"MHz": 1980}, {"MHz": 1755}]
    assert counters[f"{gpu} utilization gpu"] == [{"%": 5}, {"%": 99}]
    assert counters[f"{gpu} temperature"] == [{"°C": 40}, {"°C": 41}]
    assert counters["allocator, device 0 memory allocated"][0] == {"bytes": 1 << 20}
    assert counters["allocator, device 0 memory reserved"][0] == {"bytes": 4 << 20}
    assert counters["host memory rss"] == [{"bytes": 10}, {"bytes": 11}, {"bytes": 12}]
    assert counters["host CPU busy"] == [{"cores": Decimal("0.5")}, {"cores": 2}]
    assert counters["device_steps, optimizer 0 optimizer device"] == [
        {"ms": 2},
        {"ms": Decimal("2.5")},
        {"ms": 2},
    ]
    assert counters[f"account {gpu} memory device_used"] == [{"bytes": 2000}]
    assert counters[f"account {gpu} memory residue"] == [{"bytes": -3}]
    assert not [name for name in counters if "energy" in name]


def test_a_trace_says_what_it_is_of(trace: dict[str, Any]) -> None:
    """Its version, the report and the clock are beside the events."""
    about = trace["otherData"]
    assert about["format"] == "lucid.trace/1.0"
    assert about["schema"] == "lucid.report/1.0"
    assert "CLOCK_MONOTONIC" in about["clock"]


def _short(value: object) -> str:
    return str(value)[:8]


def _trace_of(records: list[dict[str, Any]], path: Path) -> tuple[dict[str, Any], ChromeTrace]:
    path.write_bytes(relinked(records))
    out = io.BytesIO()
    writer = ChromeTrace(out)
    writer.finish(read_report(path, each=writer.add))
    return checked_trace(out.getvalue()), writer


def test_slices_that_overlap_get_lanes_of_their_own(tmp_path: Path, good: bytes) -> None:
    """Phases that overlap keep the rules of the format; beyond the last lane they are counted and left out."""
    records = [jsonio.loads(line) for line in good.splitlines()[:3]]
    records[2]["phases"] = [{"name": f"p{i}", "begin_ns": 10 + i, "end_ns": 1000 + i} for i in range(MAX_LANES + 2)]
    found, writer = _trace_of(records, tmp_path / "a.jsonl")
    assert [event["name"] for event in _events(found, "X") if event["name"] != "wall"] == [
        f"p{i}" for i in range(MAX_LANES)
    ]
    assert writer.num_left_out == 2


def test_a_gap_of_one_device_names_it(tmp_path: Path, good: bytes) -> None:
    """The rest was sampled meanwhile; a gap of everything names none."""
    records = [jsonio.loads(line) for line in good.splitlines()]
    run = next(record for record in records if record["t"] == "run")
    times = {"begin_ns": BEGIN_NS, "end_ns": BEGIN_NS + 5, "reason": "lost"}
    run["monitor"] = {"gaps": [{**times, "device": UUID}, times]}
    found, _ = _trace_of(records, tmp_path / "gaps.jsonl")
    names = [event["name"] for event in _events(found, "X") if event["args"].get("reason") == "lost"]
    assert sorted(names) == ["gap", f"gap of {UUID}"]


@pytest.mark.parametrize(
    ("series", "columns", "num_left_out"),
    [
        ("steps", {"begin_ns": [5, None, -1], "end_ns": [4, 9, 3], "optimizer": [0, 0, 0]}, 3),
        ("steps", {"begin_ns": [5], "end_ns": [6], "optimizer": [10**6]}, 1),
        ("host", {"mono_ns": [None, 1.5], "rss_bytes": [1, 2]}, 2),
        ("later", {"seconds": [1, 2], "rss_bytes": [1, 2]}, 2),
        ("host", {"mono_ns": [1], "rss_bytes": [float("nan")], "pss_bytes": [float("inf")]}, 0),
        ("host", {"mono_ns": [3, 3], "cpu_time_s": [1, 2]}, 0),
    ],
)
def test_what_has_no_place_on_the_timeline_is_counted_and_left_out(
    series: str, columns: dict[str, list[Any]], num_left_out: int, tmp_path: Path, good: bytes
) -> None:
    """Slices that end before they begin, rows without a time, and numbers that JSON lacks never spoil a trace."""
    records = [jsonio.loads(line) for line in good.splitlines()[:3]]
    records.append({"t": "samples", "run": 0, "series": series, "columns": columns})
    found, writer = _trace_of(records, tmp_path / "a.jsonl")
    assert writer.num_left_out == num_left_out
    assert not _events(found, "C")


@pytest.mark.parametrize("optimizer", [math.inf, -math.inf, math.nan, None, 1.5, 10**400], ids=_short)
def test_what_is_no_number_of_an_optimizer_is_none(optimizer: float | None, tmp_path: Path, good: bytes) -> None:
    """Its steps are those of the first one; a number beyond all threads has no place."""
    records = [jsonio.loads(line) for line in good.splitlines()[:3]]
    columns = {"begin_ns": [5], "end_ns": [6], "optimizer": [optimizer]}
    records.append({"t": "samples", "run": 0, "series": "steps", "columns": columns})
    device = {"mono_ns": [7], "optimizer": [optimizer], "optimizer_device_ns": [1_000_000]}
    records.append({"t": "samples", "run": 0, "series": "device_steps", "columns": device})
    found, writer = _trace_of(records, tmp_path / "a.jsonl")
    is_number = type(optimizer) is int
    assert writer.num_left_out == int(is_number)
    threads = {event["args"]["name"] for event in _events(found, "M", name="thread_name")}
    assert ("steps of optimizer 0" in threads) is not is_number
    (counter,) = {event["name"] for event in _events(found, "C")}
    assert (counter == "device_steps optimizer device") is not is_number


@pytest.mark.parametrize("form", ["chrome-trace", "csv"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1.7e308, -1.7e308, 10**400, 2**63, -(10**400)], ids=_short)
def test_no_number_stops_an_export(value: float, form: str, run: Run, good: bytes) -> None:
    """Whatever column it is in: it has its row in the table, and the timeline keeps its rules."""
    records = [jsonio.loads(line) for line in good.splitlines()[:3]]
    columns = ("mono_ns", "cpu_time_s", "power_draw_mw", "rss_bytes", "num_threads", "device")
    for column in columns:
        rows = {name: [1, 2, 3] for name in columns} | {"device": [0, 0, 0], column: [0, value, 10**6]}
        records.append({"t": "samples", "run": 0, "series": f"by {column}", "columns": rows})
    for begin_ns, end_ns in ((5, value), (value, 6)):
        steps = {"begin_ns": [begin_ns], "end_ns": [end_ns], "optimizer": [0]}
        records.append({"t": "samples", "run": 0, "series": "steps", "columns": steps})
    Path("odd.jsonl").write_bytes(relinked(records))
    code, out, err = run("odd.jsonl", "--to", form)
    assert (code, "Traceback" in err) == (0, False)
    if form == "csv":
        cells = [row[-1] for row in csv.reader(io.StringIO(out.decode(), newline=""))]
        assert cells.count(str(value)) == len(columns)
    else:
        checked_trace(out)


def test_a_column_that_a_later_version_adds_is_a_counter(tmp_path: Path, good: bytes) -> None:
    """Its name says its unit."""
    records = [jsonio.loads(line) for line in good.splitlines()[:3]]
    columns = {"mono_ns": [1], "fan_speed_percent": [30], "num_clowns": [2]}
    records.append({"t": "samples", "run": 0, "series": f"gpu:{UUID}:slow", "columns": columns})
    found, _ = _trace_of(records, tmp_path / "a.jsonl")
    counters = {event["name"]: event["args"] for event in _events(found, "C")}
    assert counters == {"GPU-0a1b2c3d fan speed": {"%": 30}, "GPU-0a1b2c3d num_clowns": {"value": 2}}


def test_a_counter_has_one_series(tmp_path: Path, good: bytes) -> None:
    """Readers take a counter's series from its first event, so what is known at other times is another counter."""
    records = [jsonio.loads(line) for line in good.splitlines()[:3]]
    host = {"mono_ns": [1, 2, 3], "rss_bytes": [10, None, 12], "pss_bytes": [None, 8, None]}
    slow = {"mono_ns": [4], "memory_total_bytes": [99]}
    records.append({"t": "samples", "run": 0, "series": "host", "columns": host})
    records.append({"t": "samples", "run": 0, "series": f"gpu:{UUID}", "columns": {**slow, "memory_used_bytes": [7]}})
    records.append({"t": "samples", "run": 0, "series": f"gpu:{UUID}:slow", "columns": slow})
    found, _ = _trace_of(records, tmp_path / "a.jsonl")
    series: dict[str, set[frozenset[str]]] = {}
    for event in _events(found, "C"):
        series.setdefault(event["name"], set()).add(frozenset(event["args"]))
    assert series.keys() >= {"host memory rss", "host memory pss", "GPU-0a1b2c3d memory total"}
    assert {len(args) for sets in series.values() for args in sets} == {1}
    assert {len(sets) for sets in series.values()} == {1}


def test_names_stand_in_the_trace_as_they_are_shown(run: Run) -> None:
    """Perfetto shows escapes in the names of counters as they stand."""
    _, out, _ = run("good.jsonl", "--to", "chrome-trace")
    assert "°C".encode() in out
    assert b"\\u" not in out


def test_what_utf_8_cannot_hold_is_escaped(tmp_path: Path, good: bytes) -> None:
    """A command may hold bytes that are no text."""
    records = [jsonio.loads(line) for line in good.splitlines()[:3]]
    records[2]["phases"] = [{"name": "a\udcffb", "begin_ns": 10, "end_ns": 1000}]
    found, _ = _trace_of(records, tmp_path / "a.jsonl")
    assert "a\udcffb" in [event["name"] for event in _events(found, "X")]


def test_the_table_has_a_row_for_every_number(run: Run, good: bytes) -> None:
    """Whatever was sampled, measured or marked is there once, with all of its digits; what is not known is empty."""
    code, out, err = run("good.jsonl", "--to", "csv")
    assert (code, err) == (0, "")
    rows = list(csv.reader(io.StringIO(out.decode(), newline="")))
    assert tuple(rows[0]) == COLUMNS
    records = [jsonio.loads(line) for line in good.splitlines()]
    samples = [fields for fields in records if fields["t"] == "samples"]
    times = {"mono_ns", "begin_ns"}
    expected = sum(len(values) for fields in samples for name, values in fields["columns"].items() if name not in times)
    runs = [fields for fields in records if fields["t"] == "run"]
    expected += sum(len(fields["metrics"]) + len(fields["phases"]) for fields in runs)
    assert len(rows) - 1 == expected
    at_ns = str(BEGIN_NS + 7)
    assert ["0", "native", "0", "0", f"gpu:{UUID}", "0", at_ns, "power_draw_mw", "312345"] in rows
    assert ["0", "native", "0", "0", f"gpu:{UUID}", "0", at_ns, "energy_mj", ""] in rows
    assert ["0", "native", "0", "0", "metrics", "", "", "wall", "120.85"] in rows
    assert ["0", "native", "0", "0", "phases", "0", str(BEGIN_NS), "load", "30212500000"] in rows
    assert ["1", "captured", "0", "0", "steps", "3", str(BEGIN_NS + RUN_NS + 3 * 10**9 + 1), "optimizer", "0"] in rows


def test_rows_are_numbered_through_a_series_of_several_records(tmp_path: Path, run: Run, good: bytes) -> None:
    """The number of a row does not begin anew with each record."""
    records = [jsonio.loads(line) for line in good.splitlines()[:4]]
    Path("twice.jsonl").write_bytes(relinked([*records, records[3]]))
    _, out, _ = run("twice.jsonl", "--to", "csv")
    rows = [row for row in csv.DictReader(io.StringIO(out.decode(), newline="")) if row["column"] == "optimizer"]
    assert [row["row"] for row in rows] == [str(number) for number in range(2 * NUM_STEPS)]


def test_no_cell_is_a_formula(run: Run, good: bytes) -> None:
    """A name that a spreadsheet would compute is text; a negative number stays one."""
    records = [jsonio.loads(line) for line in good.splitlines()[:3]]
    records[2]["metrics"]["=cmd()"] = {"value": -1, "unit": "1"}
    Path("a.jsonl").write_bytes(relinked(records))
    _, out, _ = run("a.jsonl", "--to", "csv")
    assert b"'=cmd(),-1\r\n" in out


@pytest.mark.parametrize("form", ["chrome-trace", "csv"])
def test_a_file_has_what_standard_output_has(form: str, run: Run) -> None:
    """With -o the bytes go to a file, and nothing to standard output."""
    _, out, _ = run("good.jsonl", "--to", form)
    assert run("good.jsonl", "--to", form, "-o", "out") == (0, b"", "")
    assert Path("out").read_bytes() == out
    assert sorted(map(str, Path().iterdir())) == ["good.jsonl", "out"]


def test_a_file_is_not_overwritten_by_chance(run: Run) -> None:
    """An existing file is a usage error with the remedy; asked for, it is replaced and keeps its permissions."""
    Path("out").write_text("mine")
    Path("out").chmod(0o640)
    code, out, err = run("good.jsonl", "--to", "csv", "-o", "out")
    assert (code, out) == (2, b"")
    assert "out exists already; name another file with -o, or add --overwrite" in err
    assert Path("out").read_text() == "mine"
    assert run("good.jsonl", "--to", "csv", "-o", "out", "--overwrite")[0] == 0
    assert Path("out").read_bytes().startswith(b"run,arm,")
    assert Path("out").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("good.jsonl", "is the report itself"),
        (".", "is a directory"),
        ("missing/out", "no directory that can be written to"),
    ],
)
def test_a_destination_that_cannot_be_is_a_usage_error(output: str, words: str, run: Run, good: bytes) -> None:
    """The report itself, a directory and a missing directory are refused before anything is read."""
    code, _, err = run("good.jsonl", "--to", "csv", "-o", output, "--overwrite")
    assert code == 2
    assert words in err
    assert Path("good.jsonl").read_bytes() == good


def test_damage_leaves_no_file(run: Run, good: bytes) -> None:
    """Of a damaged report nothing is written, and a file of that name stays as it was."""
    Path("bad.jsonl").write_bytes(good.replace(b"312345", b"312346", 1))
    Path("out").write_text("mine")
    assert run("bad.jsonl", "--to", "csv", "-o", "out", "--overwrite")[0] == 7
    assert Path("out").read_text() == "mine"
    assert sorted(map(str, Path().iterdir())) == ["bad.jsonl", "good.jsonl", "out"]


def test_samples_before_their_run_are_damage(run: Run, good: bytes) -> None:
    """They have no arm and no pair."""
    records = [jsonio.loads(line) for line in good.splitlines()[:4]]
    Path("bad.jsonl").write_bytes(relinked([records[0], records[3], records[2]]))
    code, _, err = run("bad.jsonl", "--to", "csv", "-o", "out")
    assert code == 7
    assert "bad.jsonl: line 2: samples of run 0 come before the run" in err


def test_a_torn_report_is_exported_as_far_as_it_goes(run: Run, good: bytes) -> None:
    """With a warning that names the line; the trace is whole."""
    Path("torn.jsonl").write_bytes(b"".join(good.splitlines(keepends=True)[:10])[:-5])
    code, out, err = run("torn.jsonl", "--to", "chrome-trace")
    assert code == 0
    assert "torn.jsonl: line 10 is the last one and not whole" in err
    assert len(_events(checked_trace(out), "M", name="process_name")) == 1


def test_a_reader_that_leaves_ends_the_export_quietly(lucid: Lucid, good: bytes) -> None:
    """A closed pipe is status 0 and no word; a full disk is an error that names what is full."""
    lucid.report.write_bytes(good)
    read, write = os.pipe()
    os.close(read)
    try:
        ran = lucid("report", "export", "report.jsonl", "--to", "csv", stdout=write)
    finally:
        os.close(write)
    assert (ran.code, ran.err) == (0, "")
    with Path("/dev/full").open("wb") as full:
        ran = lucid("report", "export", "report.jsonl", "--to", "csv", stdout=full)
    assert (ran.code, ran.err) == (9, "Error: standard output: No space left on device\n")
    ran = lucid("report", "export", "report.jsonl", "--to", "csv", "-o", "/dev/full")
    assert (ran.code, ran.err) == (9, "Error: /dev/full: No space left on device\n")


def test_export_loads_neither_torch_nor_numpy(lucid: Lucid, good: bytes) -> None:
    """As every command that reads reports."""
    lucid.report.write_bytes(good)
    (lucid.directory / "sitecustomize.py").write_text(
        "import atexit, sys\natexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr))\n"
    )
    ran = lucid("report", "export", "report.jsonl", "--to", "csv", env={"PYTHONPATH": str(lucid.directory)})
    assert ran.code == 0
    assert "lucid_cli.export.table" in ran.err.split()
    assert not {"torch", "numpy", "lucid_optim", "psutil", "pynvml"} & set(ran.err.split())


def test_the_checker_of_traces_finds_what_breaks_the_rules() -> None:
    """Slices that cross, counters without numbers and events of unnamed processes are found."""
    name = {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "a"}}
    thread = {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "a"}}
    one = {"ph": "X", "pid": 1, "tid": 2, "ts": 1, "dur": 5, "name": "a"}
    bad = (
        [one],
        [name, one],
        [name, thread, one, {**one, "ts": 3}],
        [name, {"ph": "C", "pid": 1, "ts": 1, "name": "a", "args": {}}],
        [name, {"ph": "C", "pid": 1, "ts": 1, "name": "a", "args": {"x": "1"}}],
        [name, thread, {**one, "dur": -1}],
    )
    for events in bad:
        with pytest.raises(AssertionError):
            checked_trace(jsonio.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    fine = [name, thread, one, {**one, "ts": 2, "dur": 1}]
    assert checked_trace(jsonio.dumps({"displayTimeUnit": "ms", "traceEvents": fine}))


def test_the_good_report_has_every_series(good: bytes) -> None:
    """What these tests are made from is a whole report with samples."""
    assert good.count(b'"t":"samples"') == 36
    assert NUM_SAMPLES == 3
