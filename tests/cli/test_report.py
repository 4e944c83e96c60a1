import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.harness import LUCID, Lucid
from cli.reports import FLIPPED, WALLS, write_report

SLOWER = tuple((native, native * 0.95) for native, _ in WALLS)
# Lists what a command has imported when it is done.
LIST_MODULES = """
import atexit, sys
atexit.register(lambda: print("modules", *sorted(sys.modules), file=sys.stderr))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a whole report."""
    path = tmp_path_factory.mktemp("report") / "whole.jsonl"
    write_report(path)
    return path.read_bytes()


@pytest.mark.parametrize(
    "args", [("report", "show", "a.jsonl"), ("report", "diff", "a.jsonl", "b.jsonl"), ("report", "validate", "a.jsonl")]
)
def test_report_commands_never_import_torch(lucid: Lucid, whole: bytes, args: tuple[str, ...]) -> None:
    """Neither torch nor numpy is loaded to read reports."""
    for name in ("a.jsonl", "b.jsonl"):
        (lucid.directory / name).write_bytes(whole)
    (lucid.directory / "sitecustomize.py").write_text(LIST_MODULES)
    ran = lucid(*args, env={"PYTHONPATH": str(lucid.directory)})
    assert ran.code == 0
    modules = next(line for line in ran.err.splitlines() if line.startswith("modules ")).split()
    assert "lucid_profiler.reader" in modules
    assert not {"torch", "numpy", "lucid_optim", "psutil", "pynvml"} & set(modules)


def test_the_orchestrator_never_imports_torch(lucid: Lucid) -> None:
    """`profile run` leaves torch to the children."""
    (lucid.directory / "sitecustomize.py").write_text(LIST_MODULES)
    ran = lucid.profile("true", env={"PYTHONPATH": str(lucid.directory)})
    modules = next(line for line in ran.err.splitlines() if line.startswith("modules ")).split()
    assert "lucid_cli.orchestrate" in modules
    assert not {"torch", "numpy", "lucid_optim"} & set(modules)


def test_help_loads_no_command(lucid: Lucid) -> None:
    """`lucid --help` names the groups and imports neither commands nor their dependencies."""
    (lucid.directory / "sitecustomize.py").write_text(LIST_MODULES)
    ran = lucid("--help", env={"PYTHONPATH": str(lucid.directory)})
    assert ran.code == 0
    assert "profile" in ran.out
    modules = next(line for line in ran.err.splitlines() if line.startswith("modules ")).split()
    assert not [name for name in modules if name.startswith("lucid_cli.commands") or name == "orjson"]


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("-h",),
        ("--version",),
        ("profile", "--help"),
        ("profile", "run", "--help"),
        ("report", "--help"),
        ("report", "show", "--help"),
        ("report", "diff", "-h"),
        ("report", "validate", "--help"),
    ],
)
def test_every_command_explains_itself(lucid: Lucid, args: tuple[str, ...]) -> None:
    """Help and version go to standard output, with status 0 and within 100 columns."""
    ran = lucid(*args)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(("Usage: lucid", "lucid "))
    assert max(len(line) for line in ran.out.splitlines()) <= 100


def test_show_reads_standard_input(lucid: Lucid, whole: bytes) -> None:
    """`-` is the report on standard input, shown like the file."""
    lucid.report.write_bytes(whole)
    with lucid.report.open("rb") as stdin:
        ran = lucid("report", "show", "-", stdin=stdin)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == lucid("report", "show", "report.jsonl").out


@pytest.mark.parametrize("lost", [1, 2, 11, 40])
def test_a_torn_tail_is_shown_with_a_warning_and_is_no_valid_report(lucid: Lucid, whole: bytes, lost: int) -> None:
    """`show` prints what is whole and exits 0; `validate` and `diff` exit 7 unless a partial report is allowed."""
    lucid.report.write_bytes(whole[:-lost])
    shown = lucid("report", "show", "report.jsonl")
    assert shown.code == 0
    assert "captured is faster" in shown.out
    assert f"line {len(whole.splitlines())}" in shown.err
    assert lucid("report", "validate", "report.jsonl").code == 7
    assert lucid("report", "diff", "report.jsonl", "report.jsonl").code == 7
    assert lucid("report", "validate", "--allow-partial", "report.jsonl").code == 0
    assert lucid("report", "diff", "--allow-partial", "report.jsonl", "report.jsonl").code == 0


def test_a_report_cut_in_the_middle_of_its_runs_still_shows_its_pairs(lucid: Lucid, whole: bytes) -> None:
    """Half a report is half a result, with the place where it stops."""
    lines = whole.splitlines(keepends=True)
    lucid.report.write_bytes(b"".join(lines[: len(lines) // 2]) + lines[len(lines) // 2][:-20])
    ran = lucid("report", "show", "report.jsonl")
    assert ran.code == 0
    assert "status    without an end" in ran.out
    assert "no end record" in ran.err


@pytest.mark.parametrize("options", [(), ("--allow-partial",)])
def test_damage_in_the_middle_is_an_error_everywhere(lucid: Lucid, whole: bytes, options: tuple[str, ...]) -> None:
    """An edited line is named with its file, and no option makes it acceptable."""
    lucid.report.write_bytes(whole.replace(b'"value":108.75}', b'"value":98.75}', 1))
    for args in (("validate", *options, "report.jsonl"), ("diff", *options, "report.jsonl", "report.jsonl")):
        ran = lucid("report", *args)
        assert ran.code == 7
        assert "report.jsonl: line " in ran.err
    assert lucid("report", "show", "report.jsonl").code == 7


def test_validate_computes_the_summary_again(lucid: Lucid) -> None:
    """A report whose chain is whole but whose summary says something else is named with the line."""
    write_report(lucid.report)
    write_report(lucid.directory / "other.jsonl", SLOWER)
    lines = lucid.report.read_bytes().splitlines()
    other = (lucid.directory / "other.jsonl").read_bytes().splitlines()
    lines[-2] = other[-2]
    lucid.report.write_bytes(_chained(lines))
    ran = lucid("report", "validate", "report.jsonl", "other.jsonl")
    assert ran.code == 7
    assert f"report.jsonl: line {len(lines) - 1}: summary" in ran.err
    assert "other.jsonl: valid, 10 runs in 5 pairs" in ran.out


def _chained(lines: list[bytes]) -> bytes:
    """Return lines whose links are made anew, as somebody who edits a report would."""
    done: list[bytes] = []
    for line in lines:
        fields = json.loads(line)
        prev = hashlib.sha256(done[-1]).hexdigest()[:16] if done else ""
        done.append(line.replace(f'"prev":"{fields["prev"]}"'.encode(), f'"prev":"{prev}"'.encode()))
    return b"".join(line + b"\n" for line in done)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "empty"),
        (b"not a report\n", "line 1"),
        (b'{"t":"header"}\n{"t":"end"}\n', "line 1"),
        (None, "cannot be read"),
    ],
)
@pytest.mark.parametrize("command", ["show", "validate"])
def test_what_is_no_report_is_refused_with_its_name(
    lucid: Lucid, content: bytes | None, cause: str, command: str
) -> None:
    """Empty, foreign and missing files give exit code 7 and one line."""
    if content is not None:
        lucid.report.write_bytes(content)
    ran = lucid("report", command, "report.jsonl")
    assert (ran.code, ran.out) == (7, "")
    assert "report.jsonl" in ran.err
    assert cause in ran.err
    assert len(ran.err.splitlines()) == 1


def test_reports_of_other_machines_are_compared_only_when_that_is_allowed(lucid: Lucid) -> None:
    """Exit code 5 with everything that differs; allowed by name, the difference is listed and the rest compared."""
    write_report(lucid.directory / "a.jsonl")
    write_report(lucid.directory / "b.jsonl", SLOWER, identity={"gpu_name": "NVIDIA H200", "driver_major": "570"})
    ran = lucid("report", "diff", "a.jsonl", "b.jsonl")
    assert (ran.code, ran.out.count("\ndiffers "), "\nrefused   b cannot be compared" in ran.out) == (5, 2, True)
    assert "gpu_name is NVIDIA L4" in ran.err
    assert "driver_major is 580" in ran.err
    assert lucid("report", "diff", "a.jsonl", "b.jsonl", "--allow", "gpu_name").code == 5
    allowed = lucid("report", "diff", "a.jsonl", "b.jsonl", "--allow", "gpu_name", "--allow", "driver_major")
    assert allowed.code == 0
    assert "allowed   gpu_name: NVIDIA L4 in a, NVIDIA H200 in b" in allowed.out
    assert "b is worse than a" in allowed.out


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_parity_failure_in_either_report_is_the_exit_code_of_diff(lucid: Lucid, side: str) -> None:
    """Exit code 4 wherever the bytes differ; showing such a report is no failure."""
    for name in ("a", "b"):
        write_report(lucid.directory / f"{name}.jsonl", states={1: FLIPPED} if name == side else None)
    ran = lucid("report", "diff", "a.jsonl", "b.jsonl")
    assert ran.code == 4
    assert "stem.weight.1" in ran.out
    shown = lucid("report", "show", f"{side}.jsonl")
    assert shown.code == 0
    assert "parity failed" in shown.out


def test_a_damaged_report_counts_before_a_parity_failure(lucid: Lucid) -> None:
    """Of several causes the one that leaves nothing to be believed is the exit code."""
    write_report(lucid.directory / "a.jsonl", states={1: FLIPPED})
    (lucid.directory / "b.jsonl").write_bytes(b"{}\n{}\n")
    assert lucid("report", "diff", "a.jsonl", "b.jsonl").code == 7


def test_only_one_report_can_come_from_standard_input(lucid: Lucid) -> None:
    """Twice `-` is a usage error."""
    assert lucid("report", "diff", "-", "-").code == 2


@pytest.mark.parametrize("args", [("show", "-"), ("validate", "-"), ("diff", "-", "a.jsonl"), ("diff", "a.jsonl", "-")])
def test_a_closed_standard_input_is_named(lucid: Lucid, args: tuple[str, ...]) -> None:
    """`-` without a standard input is a usage error in one sentence."""
    ran = lucid("report", *args, stdin=None, preexec_fn=lambda: os.close(0))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith("the report is to be read from standard input, which is closed.\n")


def test_a_key_that_no_report_has_cannot_be_allowed(lucid: Lucid) -> None:
    """A misspelt key is a usage error that lists what differs; one that happens not to differ is none."""
    write_report(lucid.directory / "a.jsonl")
    write_report(lucid.directory / "b.jsonl", SLOWER, identity={"gpu_name": "NVIDIA H200", "driver_major": "580"})
    ran = lucid("report", "diff", "a.jsonl", "b.jsonl", "--allow", "gpu_name", "--allow", "gpu")
    assert (ran.code, ran.out) == (2, "")
    assert "--allow gpu: neither report has such a key; what differs: gpu_name\n" in ran.err
    same = lucid("report", "diff", "a.jsonl", "a.jsonl", "--allow", "bogus")
    assert (same.code, same.out) == (2, "")
    assert "nothing differs" in same.err
    keys = ("gpu_name", "driver_major", "torch", "command", "method", "metric:wall", "unit:peak_rss")
    allowed = lucid("report", "diff", "a.jsonl", "b.jsonl", *(word for key in keys for word in ("--allow", key)))
    assert allowed.code == 0


def test_one_run_is_not_called_runs(lucid: Lucid) -> None:
    """Numbers agree with their nouns."""
    write_report(lucid.report, WALLS[:1])
    assert lucid("report", "validate", "report.jsonl").out == "report.jsonl: valid, 2 runs in 1 pair\n"


def test_text_is_printed_in_an_encoding_that_lacks_characters(lucid: Lucid) -> None:
    """What ASCII lacks is replaced, and nothing is lost."""
    write_report(
        lucid.report, tuple((n / 1e8, c / 1e8) for n, c in WALLS), command=("python", "caf\u00e9.py", "\udcff")
    )
    ran = lucid("report", "show", "report.jsonl", env={"PYTHONIOENCODING": "ascii"})
    assert ran.code == 0
    assert "caf?.py" in ran.out
    assert "1.208 us" in ran.out
    assert "captured is faster" in ran.out
    assert "1.208 µs" in lucid("report", "show", "report.jsonl", env={"PYTHONIOENCODING": "utf-8"}).out


def test_a_reader_that_leaves_ends_the_output_quietly(lucid: Lucid, whole: bytes) -> None:
    """A closed pipe is status 0 and no word."""
    lucid.report.write_bytes(whole)
    read, write = os.pipe()
    os.close(read)
    try:
        for args in (("report", "show", "report.jsonl"), ("--help",)):
            ran = lucid(*args, stdout=write)
            assert (ran.code, ran.err) == (0, "")
        for words, code in (
            (("report", "show", "missing.jsonl"), 7),
            (("report", "show", "report.jsonl"), 0),
            (("report", "nonsense"), 2),
            (("report",), 2),
        ):
            assert lucid(*words, stdout=write, stderr=write).code == code
            assert lucid(*words, stderr=write).code == code
    finally:
        os.close(write)


def test_a_full_disk_at_standard_output_is_an_error(lucid: Lucid, whole: bytes) -> None:
    """Lost output is never status 0."""
    lucid.report.write_bytes(whole)
    with Path("/dev/full").open("wb") as full:
        ran = lucid("report", "show", "report.jsonl", stdout=full)
    assert ran.code == 9
    assert ran.err == "Error: standard output: No space left on device\n"


def test_the_module_list_of_the_harness_is_complete(tmp_path: Path) -> None:
    """The check for torch would see it."""
    (tmp_path / "sitecustomize.py").write_text(LIST_MODULES)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import numpy"], env=environment, capture_output=True, text=True, check=True
    )
    assert "numpy" in done.stderr.split()
    assert LUCID.exists()
