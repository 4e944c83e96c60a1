import gzip
import importlib.util
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cli.harness import Lucid
from lucid_cli import app
from lucid_profiler import chain, jsonio
from lucid_profiler.errors import ReportError
from lucid_profiler.reader import Report, read_report
from lucid_profiler.records import Record
from reports.damage import DAMAGES, HARMLESS, Damage
from reports.good import good_report, relinked

BAD_REPORT = 7
COMMANDS = {
    "show": ("show", "bad.jsonl"),
    "validate": ("validate", "bad.jsonl"),
    "diff": ("diff", "good.jsonl", "bad.jsonl"),
    "export": ("export", "bad.jsonl", "--to", "chrome-trace"),
}
FORGIVING = ("show", "export")
"""Commands that use what is whole of a torn report."""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of the good report."""
    return good_report(tmp_path_factory.mktemp("good") / "good.jsonl")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: bytes) -> Run:
    """Return what runs `lucid report` in a directory with the good report, in this process."""
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_bytes(good)

    def ran(*args: str) -> tuple[int, str, str]:
        code = app.run(["report", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ran


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
@pytest.mark.parametrize("command", COMMANDS)
def test_each_damage_has_its_exit_code_and_message(damage: Damage, command: str, run: Run, good: bytes) -> None:
    """Every command names file and line of every damage, in one line; of a torn report it uses what it may."""
    bad = damage.change(good)
    assert bad != good
    Path("bad.jsonl").write_bytes(bad)
    code, out, err = run(*COMMANDS[command])
    is_used = damage.is_partial and command in FORGIVING
    assert code == (0 if is_used else BAD_REPORT)
    assert bool(out) == is_used
    if damage.line is None:
        where = "bad.jsonl: "
    elif damage.line > 0:
        where = f"bad.jsonl: line {damage.line}"
    else:
        where = "bad.jsonl: line "
    assert where in err
    assert damage.text in err
    assert len(err.splitlines()) == 1 or is_used


@pytest.mark.parametrize("damage", [one for one in DAMAGES if one.is_partial], ids=lambda damage: damage.name)
def test_what_is_whole_of_a_torn_report_can_be_allowed(damage: Damage, run: Run, good: bytes) -> None:
    """With --allow-partial `validate` and `diff` go as far as the report goes, with a warning."""
    Path("bad.jsonl").write_bytes(damage.change(good))
    code, out, err = run("validate", "--allow-partial", "bad.jsonl")
    assert code == 0
    assert "bad.jsonl: valid, " in out
    assert "Warning: bad.jsonl: " in err


@pytest.mark.parametrize("damage", [one for one in DAMAGES if not one.is_partial], ids=lambda damage: damage.name)
def test_no_option_makes_damage_acceptable(damage: Damage, run: Run, good: bytes) -> None:
    """What is wrong before the last line stays wrong."""
    Path("bad.jsonl").write_bytes(damage.change(good))
    for args in (("validate", "bad.jsonl"), ("diff", "good.jsonl", "bad.jsonl")):
        assert run(*args, "--allow-partial")[0] == BAD_REPORT


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("command", COMMANDS)
def test_other_spellings_of_a_report_are_the_report(name: str, command: str, run: Run, good: bytes) -> None:
    """Byte-order mark, CRLF, gzip and a newer minor version change no result."""
    Path("bad.jsonl").write_bytes(good)
    plain = run(*COMMANDS[command])
    Path("bad.jsonl").write_bytes(HARMLESS[name](good))
    code, out, _ = run(*COMMANDS[command])
    assert code == plain[0] == 0
    assert out.replace("lucid.report/1.99", "lucid.report/1.0") == plain[1]


def test_every_cut_of_the_last_lines_is_torn_and_nothing_else(run: Run, good: bytes) -> None:
    """At each byte of the last line `show` gives the result and names the line, `validate` refuses."""
    num_lines = len(good.splitlines())
    begin = good[:-1].rindex(b"\n") + 1
    for cut in range(begin + 1, len(good)):
        Path("bad.jsonl").write_bytes(good[:cut])
        code, out, err = run("show", "bad.jsonl")
        assert code == 0
        assert "captured is faster" in out
        assert f"bad.jsonl: line {num_lines} is the last one and not whole" in err
        assert run("validate", "bad.jsonl")[0] == BAD_REPORT


def _read(path: Path) -> tuple[Report | None, list[Record], str]:
    """Return a report, None if there is none, its records, and the first thing that is said of it."""
    records: list[Record] = []
    try:
        report = read_report(path, each=lambda _, record: records.append(record))
    except ReportError as error:
        return None, records, error.message
    return report, records, report.warnings[0]


def test_every_cut_of_a_gzip_file_is_torn_and_nothing_else(tmp_path: Path, good: bytes) -> None:
    """A gzip file that ends too early gives the lines that are whole, or says that there are none."""
    path = tmp_path / "bad.jsonl"
    packed = gzip.compress(good)
    num_records = 0
    for cut in range(2, len(packed), 7):
        path.write_bytes(packed[:cut])
        report, records, problem = _read(path)
        assert "the compressed data end before their end" in problem
        assert report is None or not report.complete
        assert (report is None) == (not records)
        assert len(records) >= num_records
        num_records = len(records)
    assert num_records == len(good.splitlines())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("command", [("validate", "-"), ("show", "-"), ("export", "-", "--to", "csv")])
def test_standard_input_is_a_file_like_any_other(
    command: tuple[str, ...], packed: bool, run: Run, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-` is unpacked too, and its damage is named with its line."""
    for data, code in ((good, 0), (good.replace(b'"value":120.85', b'"value":110.85', 1), BAD_REPORT)):
        stream = io.BytesIO(gzip.compress(data) if packed else data)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        ran = run(*command)
        assert ran[0] == code
        assert ("-: line 3: the line was edited" in ran[2]) == bool(code)


def test_a_pair_that_does_not_follow_is_named_with_its_line_also_from_standard_input(
    run: Run, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever edits a number and makes the chain anew is found by computing it again."""
    records = [jsonio.loads(line) for line in good.splitlines()]
    line = next(index for index, fields in enumerate(records, 1) if fields["t"] == "pair")
    records[line - 1]["effects"]["wall"] = -0.5
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(relinked(records))))
    code, _, err = run("validate", "-")
    assert code == BAD_REPORT
    assert f"-: line {line}: pair 0.effects.wall" in err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"columns": {"begin_ns": [1, 2], "end_ns": [3]}}, "samples of steps: columns have 1, 2 rows"),
        ({"run": 99}, "samples of run 99: there is no such run"),
    ],
)
def test_samples_that_cannot_be_are_found_by_validate(
    change: dict[str, Any], problem: str, run: Run, good: bytes
) -> None:
    """Columns of different lengths and samples of no run are named with their line."""
    records = [jsonio.loads(line) for line in good.splitlines()]
    records[3].update(change)
    Path("bad.jsonl").write_bytes(relinked(records))
    code, _, err = run("validate", "bad.jsonl")
    assert code == BAD_REPORT
    assert f"bad.jsonl: line 4: {problem}" in err
    assert run("show", "bad.jsonl")[0] == 0


def test_reports_are_read_without_their_samples_as_with_them(tmp_path: Path, good: bytes) -> None:
    """Leaving the columns unread changes nothing but the samples."""
    path = tmp_path / "good.jsonl"
    path.write_bytes(good)
    whole, without = read_report(path), read_report(path, with_samples=False)
    assert len(whole.samples) == 6 * len(whole.runs)
    assert without.samples == ()
    assert (without.runs, without.pairs, without.summary) == (whole.runs, whole.pairs, whole.summary)
    assert without.complete


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that unpacks to more than the limit, or to one endless line, stops there with the remedy."""
    path = tmp_path / "bomb.jsonl"
    monkeypatch.setattr(chain, "MAX_LINE_BYTES", 100_000)
    path.write_bytes(gzip.compress(b"\x00" * 10_000_000))
    with pytest.raises(ReportError, match="line 1: the line is longer than 100000 bytes"):
        read_report(path)
    monkeypatch.setattr(chain, "MAX_UNPACKED_BYTES", 10_000)
    path.write_bytes(gzip.compress(good))
    with pytest.raises(ReportError, match="unpacks to more than 10000 bytes; if it is a report, unpack it first"):
        read_report(path)
    path.write_bytes(good)
    assert read_report(path).complete


def _zstandard() -> ModuleType | None:
    names = [name for name in ("compression.zstd", "backports.zstd") if _is_there(name)]
    return importlib.import_module(names[0]) if names else None


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_zstandard_is_unpacked_where_python_can(tmp_path: Path, good: bytes) -> None:
    """Whole, cut off and damaged, as with gzip."""
    zstd = _zstandard()
    if zstd is None:
        pytest.skip("neither Python 3.14 nor backports.zstd")
    path = tmp_path / "good.jsonl.zst"
    packed: bytes = zstd.compress(good)
    path.write_bytes(packed)
    assert read_report(path).complete
    path.write_bytes(packed[:-10])
    with pytest.raises(ReportError, match="the compressed data end before their end"):
        read_report(path, allow_partial=False)
    path.write_bytes(packed + b"something else")
    with pytest.raises(ReportError, match="the compressed data are damaged"):
        read_report(path)


def test_zstandard_without_its_package_says_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence that names the two remedies."""
    for name in ("compression.zstd", "backports.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    Path("bad.jsonl").write_bytes(b"\x28\xb5\x2f\xfd and more")
    code, _, err = run("show", "bad.jsonl")
    assert code == BAD_REPORT
    assert "install backports.zstd, or unpack it with unzstd" in err
    assert len(err.splitlines()) == 1


def test_only_one_report_to_validate_comes_from_standard_input(run: Run) -> None:
    """Twice `-` is a usage error: the second one would be empty."""
    assert run("validate", "-", "-")[0] == 2


def test_a_line_of_fifty_megabytes_is_read_within_bounds(lucid: Lucid, good: bytes) -> None:
    """A record as long as that is shown by a process that may not use 500 MB."""
    records = [jsonio.loads(line) for line in good.splitlines()]
    records[2]["output_tail"] = "é\n\u2028" * 8_000_000
    lucid.report.write_bytes(relinked(records))
    assert lucid.report.stat().st_size > 50_000_000
    ran = lucid("report", "show", "report.jsonl", preexec_fn=_bounded)
    assert (ran.code, ran.err) == (0, "")


def _bounded() -> None:
    import resource  # noqa: PLC0415 - only in the child

    resource.setrlimit(resource.RLIMIT_DATA, (500_000_000, 500_000_000))
