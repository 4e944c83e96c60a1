import dataclasses
import errno
import gzip
import hashlib
import io
import json
import math
import os
import pickle
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucid_profiler import chain, jsonio
from lucid_profiler.codec import from_plain, to_plain
from lucid_profiler.errors import LucidError, NotComparableError, ReportError
from lucid_profiler.kernels import KernelRow, KernelTable, Launches
from lucid_profiler.monitored import DeviceEnergy, Gap, MemoryAccount, MemoryRow, MonitoredDevice, MonitorReport
from lucid_profiler.reader import Report, read_report
from lucid_profiler.records import (
    RECORD_TYPES,
    TAINTS,
    Arm,
    Header,
    Kernels,
    Record,
    Resume,
    Run,
    Samples,
    Slot,
    State,
    Summary,
    identity_digest,
)
from lucid_profiler.writer import Writer


def write_all(path: Path, records: list[Record]) -> bytes:
    """Write the records and return the file's bytes."""
    with Writer(path) as writer:
        for record in records:
            writer.write(record)
    return path.read_bytes()


def same_bits(record: Record) -> bytes:
    """Return a form in which equal bytes mean equal records, NaN and signed zero included."""
    return jsonio.dumps(to_plain(record))


def relinked(lines: list[dict[str, Any]]) -> bytes:
    """Return a report whose links and numbers are right whatever its records say."""
    out, prev = b"", ""
    for seq, fields in enumerate(lines):
        line = jsonio.dumps({**fields, "seq": seq, "prev": prev})
        prev = hashlib.sha256(line).hexdigest()[:16]
        out += line + b"\n"
    return out


def parsed(data: bytes) -> list[dict[str, Any]]:
    """Return the lines of a report as dicts."""
    return [jsonio.loads(line) for line in data.splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give a name for a report."""
    return tmp_path / "run.jsonl"


def test_monitors_and_kernels_come_back_as_they_were_written(
    path: Path, make_header: Callable[..., Header], make_run: Callable[..., Run]
) -> None:
    """Every field of what is sampled beside a run, and of a traced process."""
    missing = MemoryRow(name="used", value_bytes=None, reason="gap")
    monitor = MonitorReport(
        interval_ns=1,
        num_samples=2,
        gaps=(Gap(begin_ns=1, end_ns=2, reason="lost"),),
        events={"suspend": 1},
        distinct={"host.rss_bytes": 3},
        reasons={"gpu:GPU-1.power_draw_mw": "not_supported"},
        own_cpu_s=0.5,
        devices=(MonitoredDevice(uuid="GPU-1", parent_uuid=None),),
        energy=(DeviceEnergy(uuid="GPU-1", value_j=None, source="counter", reason="not_marked"),),
        memory=(MemoryAccount(uuid="GPU-1", mono_ns=4, rows=(missing,)),),
    )
    row = KernelRow(name="a\nb", kind="kernel", count=2, total_ns=4, median_ns=2, count_per_step=1.0, ns_per_step=2.0)
    table = KernelTable(pid=7, device="cuda", num_warmup_steps=8, num_steps=2, rows=(row,), launches=Launches(graphs=2))
    run = dataclasses.replace(make_run(0), monitor=monitor)
    kernels = Kernels(arm="native", status="ok", table=table)
    with Writer(path) as writer:
        for record in (make_header(), run, kernels):
            writer.write(record)
    report = read_report(path)
    assert report.runs == (run,)
    assert report.kernels == (kernels,)


@pytest.fixture
def good(path: Path, records: list[Record]) -> bytes:
    """Give the bytes of a whole report, which also lies at `path`."""
    return write_all(path, records)


def read(path: Path, data: bytes, *, allow_partial: bool = True) -> Report:
    """Read the given bytes as a report."""
    path.write_bytes(data)
    return read_report(str(path), allow_partial=allow_partial)


def refusal(path: Path, data: bytes) -> ReportError:
    """Return the error with which the given bytes are refused."""
    with pytest.raises(ReportError) as caught:
        read(path, data)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)
    return caught.value


def flat(report: Report) -> list[Record]:
    """Return the records of a report in the order of `RECORD_TYPES`."""
    singles = [record for record in (report.summary, report.end) if record is not None]
    return [report.header, *report.envs, *report.runs, *report.states, *report.samples, *report.pairs, *singles]


def test_every_record_comes_back_bit_for_bit(path: Path, records: list[Record], good: bytes) -> None:
    """What was written is read back: NaN, -0.0, 2**64, lone surrogates, control characters, line separators."""
    report = read_report(str(path), allow_partial=False)
    assert report.complete
    assert report.warnings == ()
    assert report.unknown == ()
    assert [same_bits(record) for record in flat(report)] == [same_bits(record) for record in records]
    assert [type(record) for record in flat(report)] == [type(record) for record in records]
    assert len(good.splitlines()) == len(records)


def test_the_line_format_is_what_other_tools_expect(good: bytes) -> None:
    """Each line is an object with kind, number and the SHA-256 of the line before, keys sorted, LF at its end."""
    assert good.endswith(b"\n")
    lines = good.removesuffix(b"\n").split(b"\n")
    for seq, line in enumerate(lines):
        fields = json.loads(line)
        assert list(fields) == sorted(fields)
        assert fields["seq"] == seq
        assert fields["prev"] == (hashlib.sha256(lines[seq - 1]).hexdigest()[:16] if seq else "")
    on_request = {"kernels", "located", "resume"}
    assert [json.loads(line)["t"] for line in lines] == [kind for kind in RECORD_TYPES if kind not in on_request]
    assert json.loads(lines[0])["schema"] == "lucid.report/1.0"
    assert json.loads(lines[3])["tensors"] == {"weight": ["00ff" * 4, "float32", [2, 1]]}


def test_the_first_format_is_read_and_written_for_good(path: Path, records: list[Record]) -> None:
    """The golden report of schema 1.0 gives the records that it was written from, and they give its bytes."""
    golden = Path(__file__).with_name("golden") / "report-1.0.jsonl"
    report = read_report(golden, allow_partial=False)
    assert [same_bits(record) for record in flat(report)] == [same_bits(record) for record in records]
    assert write_all(path, records) == golden.read_bytes()


def test_fields_added_since_are_written_only_where_they_say_something(path: Path, records: list[Record]) -> None:
    """Rank and values come back, rank 0 too; without them the bytes are those of the first files."""
    state = next(record for record in records if isinstance(record, State))
    full = dataclasses.replace(state, rank=0, values={"lr": "0.1"})
    data = write_all(path, [records[0], full])
    assert flat(read_report(path))[1] == full
    assert (parsed(data)[1]["rank"], parsed(data)[1]["values"]) == (0, {"lr": "0.1"})
    path.unlink()
    assert not {"rank", "values"} & parsed(write_all(path, [records[0], state]))[1].keys()


def test_arms_taints_and_resumes_come_back(
    path: Path, make_header: Callable[..., Header], make_run: Callable[..., Run]
) -> None:
    """Every field of a planned experiment with controls, and of one that was taken up again."""
    header = make_header(
        arms=(Arm(name="a"), Arm(name="b", different=True), Arm(name="c", control=True)),
        order="random",
        seed=0,
        taints=TAINTS,
        cool_down_s=2.5,
        require_idle=True,
    )
    run = make_run(0, taints=("throttled",))
    slots = (Slot(slot=1, pair=1, arm="a"), Slot(slot=2, pair=1, arm="b"))
    resume = Resume(block=1, created="", slots=slots, gpu_uuids=("GPU-1",), same_devices=False, host_changed=True)
    summary = Summary(analysis={"base": "a"}, further=({"base": "a", "other": "c"},))
    write_all(path, [header, run, resume, summary])
    report = read_report(path)
    assert (report.header, report.runs, report.resumes, report.summary) == (header, (run,), (resume,), summary)
    assert report.unknown == ()


@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        ((2,), (9,), "resume.block is 2, expected 1"),
        ((1, 1), (9, 10), "resume.block is 1, expected 2"),
        ((1,), (0,), "resume.slots holds numbers up to slot 0 and pair 0 a second time"),
        ((1, 2), (9, 9), "resume.slots holds numbers up to slot 9 and pair 9 a second time"),
    ],
)
def test_a_resume_numbers_on(
    blocks: tuple[int, ...], slots: tuple[int, ...], message: str, path: Path, records: list[Record]
) -> None:
    """Blocks are counted from 1, and no slot or pair has the number of an earlier one."""
    resumes = [
        Resume(block=block, created="", slots=(Slot(slot=slot, pair=slot, arm="native"),))
        for block, slot in zip(blocks, slots, strict=True)
    ]
    data = write_all(path, [records[0], *resumes])
    assert message in refusal(path, data).message


def test_a_single_bad_line_is_told_once(path: Path, good: bytes) -> None:
    """A file of one line that is no record names the line and what is wrong with it, each once."""
    error = refusal(path, b"this is no report")
    assert str(error).count("line 1") == 1
    assert error.message.startswith("there is no whole header: the line cannot be read: ")


def test_a_compressed_report_is_read(path: Path, good: bytes) -> None:
    """Packed with gzip it has the records that it has unpacked."""
    assert list(map(same_bits, flat(read(path, gzip.compress(good))))) == list(map(same_bits, flat(read(path, good))))


def test_a_report_cut_at_any_byte_gives_what_is_whole(path: Path, records: list[Record], good: bytes) -> None:
    """At every offset, inside multi-byte characters too: whole records, one warning with the line, or no header."""
    ends = [index + 1 for index, byte in enumerate(good) if byte == 10]
    for cut in range(len(good)):
        path.write_bytes(good[:cut])
        num_whole = sum(end <= cut for end in ends)
        num_used = sum(end - 1 <= cut for end in ends)
        if num_used == 0:
            with pytest.raises(ReportError, match="the file is empty" if cut == 0 else "no whole header"):
                read_report(str(path))
            continue
        report = read_report(str(path))
        assert [same_bits(record) for record in flat(report)] == [same_bits(record) for record in records[:num_used]]
        is_torn = cut not in ends
        assert report.torn_line == (num_whole + 1 if is_torn else None)
        assert sum("is the last one and not whole" in text for text in report.warnings) == is_torn
        assert not report.complete
        if is_torn:
            assert f"line {num_whole + 1} " in report.warnings[0]


def test_a_partial_report_can_be_refused(path: Path, good: bytes) -> None:
    """Where only whole reports count, a torn line and a missing end are errors with the remedy."""
    read(path, good, allow_partial=False)
    with pytest.raises(ReportError, match=r"line 8: .* last line is torn; --allow-partial"):
        read(path, good[:-1], allow_partial=False)
    with pytest.raises(ReportError, match=r"no end record; --allow-partial"):
        read(path, b"".join(good.splitlines(keepends=True)[:-1]), allow_partial=False)


def test_an_edited_byte_is_found_and_its_line_named(path: Path, good: bytes) -> None:
    """Any digit changed before the last line is an error that names the line, whatever field it is in."""
    lines = good.splitlines(keepends=True)
    start = 0
    for number, line in enumerate(lines[:-1], 1):
        for offset, byte in enumerate(line):
            if chr(byte).isdigit() and byte < 128:
                other = b"1" if byte == ord("0") else b"0"
                error = refusal(path, good[: start + offset] + other + good[start + offset + 1 :])
                assert error.line == number, (number, line[:offset], error)
        start += len(line)


@given(data=st.data())
@settings(max_examples=150)
def test_no_damage_before_the_last_line_goes_unnoticed(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Overwriting, inserting or deleting bytes before the last line never gives a report without an error."""
    path = tmp_path_factory.mktemp("damage") / "run.jsonl"
    good = write_all(path, _records_for_properties())
    last = good[:-1].rindex(b"\n")
    place = data.draw(st.integers(0, last - 1))
    length = data.draw(st.integers(0, 5))
    insert = data.draw(st.binary(max_size=5))
    bad = good[:place] + insert + good[place + length :]
    # CRLF and a leading byte-order mark are other spellings of the same report.
    if bad.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n") == good or place + length > last:
        return
    refusal(path, bad)


def _records_for_properties() -> list[Record]:
    run = {"run": 0, "pair": 0, "arm": "native", "status": "ok", "started": "", "process_ns": 1}
    header = {
        "id": "",
        "created": "",
        "tool": {"name": "lucid", "version": "0"},
        "command": [],
        "arms": [{"name": "é"}],
        "pairs": 1,
    }
    unknown: Counter[str] = Counter()
    return [
        from_plain(Header, header, unknown),
        from_plain(Run, {**run, "agent": {"loaded": False}}, unknown),
        from_plain(RECORD_TYPES["end"], {"status": "complete", "num_records": 2}, unknown),
    ]


def test_an_edited_end_is_found(path: Path, good: bytes) -> None:
    """A digit changed in the last line, which no line follows, is found there or at the line that it names."""
    start = good[:-1].rindex(b"\n") + 1
    for offset, byte in enumerate(good[start:], start):
        if chr(byte).isdigit():
            other = b"1" if byte == ord("0") else b"0"
            error = refusal(path, good[:offset] + other + good[offset + 1 :])
            assert error.line == 8 or "(or the link of the line after it)" in error.message


def test_repeated_moved_and_missing_lines_are_told_apart(path: Path, good: bytes) -> None:
    """A duplicated line, swapped lines and a cut in the middle each have their own message with the line."""
    lines = good.splitlines(keepends=True)
    error = refusal(path, b"".join([*lines[:4], lines[3], *lines[4:]]))
    assert (error.line, error.message) == (5, "the line repeats line 4")
    error = refusal(path, b"".join([*lines[:3], *lines[5:]]))
    assert error.line == 4
    assert "2 record(s) before this line are missing" in error.message
    error = refusal(path, b"".join([*lines[:3], lines[4], lines[3], *lines[5:]]))
    assert error.line == 4
    error = refusal(path, b"".join(lines[1:]))
    assert (error.line, error.message) == (1, "the first record is number 1: the beginning of the report is missing")


def test_two_joined_reports_are_refused(path: Path, good: bytes) -> None:
    """A file concatenated with itself, with or without a byte-order mark between, is an error at the joint."""
    error = refusal(path, good + good)
    assert error.line == 9
    assert "joined" in error.message
    error = refusal(path, good + b"\xef\xbb\xbf" + good)
    assert error.line == 9
    assert "byte-order mark in the middle" in error.message


def test_other_programs_line_ends_and_marks_are_accepted(path: Path, records: list[Record], good: bytes) -> None:
    """A leading byte-order mark and CRLF change nothing, and the first record is there."""
    for data in (b"\xef\xbb\xbf" + good, good.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + good.replace(b"\n", b"\r\n")):
        report = read(path, data, allow_partial=False)
        assert same_bits(report.header) == same_bits(records[0])
        assert report.warnings == ()
    assert read(path, good.replace(b"\n", b"\r\n")[:-1]).torn_line == 8


@pytest.mark.parametrize(
    ("change", "line", "message"),
    [
        (lambda good: good.replace(b"\n", b"\n\n", 1), 2, "the line is empty"),
        (lambda good: good.replace(b"\n", b"\r"), 1, "carriage return"),
        (lambda good: good.replace(b"\n", b"\n\x00\x00\n", 1), 2, "NUL bytes"),
        (lambda good: good.decode().encode("utf-16"), 1, "UTF-16"),
        (lambda good: good.decode().encode("utf-16-le"), 1, "UTF-16"),
        (lambda good: good.decode().encode("utf-16-be"), 1, "UTF-16"),
        (lambda good: b"\xff\xfe" + good.decode().encode("utf-16-le"), 1, "UTF-16"),
        (lambda good: good.replace(b"\n", b'\n"text"\n', 1), 2, "a record is an object"),
        (lambda good: good.replace(b"\n", b"\n{}\n", 1), 2, "lacks t, seq or prev"),
        (lambda good: good.replace(b"\n", b"\n\xff\xf0\n", 1), 2, "not UTF-8 at byte 0"),
        (lambda good: good.replace(b'"seq":1', b'"seq":1,"seq":1'), 2, "'seq' appears twice"),
        (lambda good: good.replace(b"\n", b"\n" + b"[" * 100_000 + b"\n", 1), 2, "nested too deeply"),
        (lambda good: b"\n" + good, 1, "the line is empty"),
        (lambda good: b"", None, "the file is empty"),
        (lambda good: b"\n", 1, "no whole header"),
        (lambda good: b"\xef\xbb\xbf", 1, "no whole header"),
        (lambda good: b"PK\x03\x04 something else", 1, "no whole header"),
    ],
)
def test_damage_is_a_clear_error(
    change: Callable[[bytes], bytes], line: int | None, message: str, path: Path, good: bytes
) -> None:
    """Blank lines, lone CR, NULs, UTF-16, duplicate keys, other bytes: an error with file and line, no crash."""
    error = refusal(path, change(good))
    assert error.line == line
    assert message in error.message


def test_zeros_after_a_crash_are_a_torn_tail(path: Path, good: bytes) -> None:
    """A tail of NUL bytes, as a crashed machine leaves it, costs nothing but itself."""
    lines = good.splitlines(keepends=True)
    report = read(path, b"".join(lines[:3]) + b"\x00" * 4096)
    assert report.torn_line == 4
    assert "NUL bytes" in report.warnings[0]
    assert len(report.runs) == 1


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("lucid.report/99.0", "upgrade lucid"),
        ("lucid.report/2.0", "upgrade lucid"),
        ("lucid.report/0.9", "no longer read"),
        ("2", "no report of lucid"),
        (2, "no report of lucid"),
        (None, "no report of lucid"),
        ("lucid.report/1.0\n", "no report of lucid"),
    ],
)
def test_another_major_version_is_refused_by_name(schema: Any, message: str, path: Path, good: bytes) -> None:
    """A future, an older, a missing or a mistyped version is an error before any field is looked at."""
    lines = parsed(good)
    lines[0] = {"t": "header", "schema": schema, "method": "paired/7", "shape": "unknown"}
    error = refusal(path, relinked(lines))
    assert error.line == 1
    assert message in error.message


def test_mixed_versions_in_one_file_are_an_error(path: Path, good: bytes) -> None:
    """A second header, of whatever version, is never read over."""
    lines = parsed(good)
    error = refusal(path, relinked([*lines[:4], {**lines[0], "schema": "lucid.report/2.0"}, *lines[4:]]))
    assert error.line == 5
    assert "second header" in error.message


def test_a_newer_minor_version_is_read_with_a_warning(path: Path, good: bytes) -> None:
    """What a later version adds is counted and named, and everything known is there."""
    lines = parsed(good)
    lines[0]["schema"] = "lucid.report/1.7"
    lines[2]["colour"] = "red"
    lines[2]["agent"]["mood"] = "good"
    lines.insert(4, {"t": "hologram", "x": 1})
    lines[-1]["num_records"] = 8
    report = read(path, relinked(lines), allow_partial=False)
    assert len(report.runs) == 1
    assert report.unknown == (("record hologram", 1), ("run.agent.mood", 1), ("run.colour", 1))
    assert "lucid.report/1.7" in report.warnings[0]
    assert "record hologram (1), run.agent.mood (1), run.colour (1)" in report.warnings[1]


def test_another_method_is_told(path: Path, good: bytes) -> None:
    """The version of the method is apart from that of the file and only warns."""
    lines = parsed(good)
    lines[0]["method"] = "paired/7"
    assert "'paired/7'" in read(path, relinked(lines)).warnings[0]


@pytest.mark.parametrize("changes", [{}, {"arm": "captured"}])
def test_the_same_run_twice_is_refused(changes: dict[str, Any], path: Path, good: bytes) -> None:
    """Two runs of one number, equal or not, are an error: never does the last one win."""
    lines = parsed(good)
    lines.insert(3, lines[2] | changes)
    error = refusal(path, relinked(lines))
    assert (error.line, error.message) == (4, "run 0 appears a second time")


@pytest.mark.parametrize("index", [5, 6])
def test_the_same_pair_or_summary_twice_is_refused(index: int, path: Path, good: bytes) -> None:
    """A pair or a summary that comes twice is an error."""
    lines = parsed(good)
    lines.insert(index, lines[index])
    assert "appears a second time" in refusal(path, relinked(lines)).message


@pytest.mark.parametrize(
    ("index", "changes", "message"),
    [
        (0, {"alpha": 0.0}, "header.alpha is 0.0"),
        (0, {"alpha": math.nan}, "header.alpha is nan"),
        (0, {"arms": [{"name": "a"}, {"name": "a"}]}, "header.arms has a name twice: a, a"),
        (2, {"status": "fine"}, "run.status is 'fine' (str), expected one of ok, failed"),
        (2, {"run": "0"}, "run.run is '0' (str), expected int"),
        (2, {"run": True}, "run.run is True (bool), expected int"),
        (2, {"agent": {}}, "run.agent lacks loaded"),
        (2, {"agent": None}, "run.agent is None"),
        (2, {"metrics": {"wall": {"value": "1", "unit": "s"}}}, "run.metrics.wall.value is '1' (str)"),
        (2, {"notes": ["a", 1]}, "run.notes[1] is 1 (int)"),
        (3, {"tensors": {"w": ["00", "float32"]}}, "state.tensors.w has 2 items, expected 3"),
        (5, {"runs": [0]}, "pair.runs has 1 items, expected 2"),
        (7, {"num_records": 6}, "the end counts 6 records, there are 7"),
    ],
)
def test_a_field_of_another_type_is_an_error_with_its_path(
    index: int, changes: dict[str, Any], message: str, path: Path, good: bytes
) -> None:
    """A record that does not say what its kind says is refused by line and field."""
    lines = parsed(good)
    lines[index].update(changes)
    error = refusal(path, relinked(lines))
    assert error.line == index + 1
    assert message in error.message


def test_a_record_after_the_end_is_an_error(path: Path, good: bytes) -> None:
    """Nothing may follow the end."""
    lines = parsed(good)
    error = refusal(path, relinked([*lines, lines[1]]))
    assert (error.line, error.message) == (9, "a record after the end of the report")


def test_a_report_is_read_from_standard_input(good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name - means standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(good)))
    report = read_report("-")
    assert report.path == "-"
    assert report.complete


def test_a_file_that_cannot_be_opened_is_a_report_error(tmp_path: Path) -> None:
    """A missing file and a directory are named, with the system's reason."""
    for name in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(ReportError, match="cannot be read") as caught:
            read_report(str(name))
        assert isinstance(caught.value.__cause__, OSError)


def test_a_line_beyond_the_limit_is_refused_without_being_held(
    path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless line stops at the limit, in the middle of the file and at its end."""
    monkeypatch.setattr(chain, "MAX_LINE_BYTES", 10_000)
    for tail in (b"", b"\n"):
        error = refusal(path, good + b"x" * 20_000 + tail)
        assert error.line == 9
        assert "longer than 10000 bytes" in error.message


def test_a_long_record_with_any_content_comes_back(path: Path, records: list[Record]) -> None:
    """A record of several megabytes, full of line ends and control characters, is one line and exact."""
    run = next(record for record in records if isinstance(record, Run))
    big = dataclasses.replace(run, output_tail="\n\r\x00\x1b\u2028é" * 300_000)
    data = write_all(path, [records[0], big])
    assert data.count(b"\n") == 2
    assert read_report(str(path)).runs[0].output_tail == big.output_tail


columns = st.dictionaries(
    st.text(max_size=5), st.lists(st.none() | st.integers() | st.floats(allow_nan=False), max_size=5).map(tuple)
)


@given(columns=columns, text=st.text(st.characters()), value=st.none() | st.integers() | st.floats())
@settings(max_examples=100)
def test_any_content_survives_the_file(columns: Any, text: str, value: float | None, tmp_path_factory: Any) -> None:
    """Arbitrary names, texts and numbers are read back as they were written."""
    path = tmp_path_factory.mktemp("any") / "run.jsonl"
    header, run, _ = _records_for_properties()
    assert isinstance(run, Run)
    samples = Samples(run=0, series=text, columns=columns)
    noted = dataclasses.replace(run, output_tail=text, notes=(text, text))
    env = from_plain(RECORD_TYPES["env"], {"scope": "host", "identity": {text: value}}, Counter())
    written: list[Record] = [header, env, noted, samples]
    write_all(path, written)
    assert [same_bits(record) for record in flat(read_report(str(path)))] == [same_bits(record) for record in written]


def test_an_existing_report_is_not_overwritten_by_chance(path: Path, good: bytes, records: list[Record]) -> None:
    """An existing file is refused and keeps its bytes; asking for it replaces it."""
    with pytest.raises(FileExistsError, match="exists already") as caught:
        Writer(path)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == good
    with Writer(path, overwrite=True) as writer:
        writer.write(records[0])
    assert path.read_bytes() == good.splitlines(keepends=True)[0]


def test_each_record_is_one_write(path: Path, records: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record reaches the system in a single write; runs, states and the end are synced."""
    writes: list[bytes] = []
    synced: list[int] = []
    real_write, real_sync = os.write, os.fsync

    def write(fd: int, data: Any) -> int:
        writes.append(bytes(data))
        return real_write(fd, data)

    def sync(fd: int) -> None:
        synced.append(len(writes))
        real_sync(fd)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fsync", sync)
    data = write_all(path, records)
    assert writes == data.splitlines(keepends=True)
    assert synced == [3, 4, 8]


def test_a_short_write_is_completed(path: Path, records: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that takes a few bytes at a time still gets whole records."""
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, bytes(data)[:100]))
    write_all(path, records)
    assert read_report(str(path), allow_partial=False).complete


def test_a_full_disk_is_an_error_that_names_the_file(records: list[Record]) -> None:
    """On a full device the record is not claimed to be written."""
    with Writer("/dev/full", overwrite=True) as writer:
        with pytest.raises(OSError, match="/dev/full") as caught:
            writer.write(records[0])
        assert caught.value.errno == errno.ENOSPC
        assert writer.num_records == 0
        with pytest.raises(OSError, match="/dev/full"):
            writer.write(records[1])


def test_a_record_that_does_not_fit_is_taken_back(
    path: Path, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record half written when the disk fills up is cut away, and a later one follows the last whole one."""
    real_write = os.write
    budget = [300]

    def write(fd: int, data: Any) -> int:
        if not budget[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real_write(fd, bytes(data)[: budget[0]])
        budget[0] -= count
        return count

    with Writer(path) as writer:
        writer.write(records[0])
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space left"):
            writer.write(records[2])
        assert writer.num_records == 1
        monkeypatch.undo()
        writer.write(records[1])
    report = read_report(str(path))
    assert (len(report.envs), len(report.runs), report.torn_line) == (1, 0, None)


def test_an_interrupt_in_a_write_keeps_the_chain(
    path: Path, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that raises out of the system call, after the bytes are down, does not break the records after it."""
    real_write = os.write

    def write(fd: int, data: Any) -> int:
        real_write(fd, data)
        raise KeyboardInterrupt(signal.SIGINT)

    with Writer(path) as writer:
        writer.write(records[0])
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(KeyboardInterrupt):
            writer.write(records[1])
        monkeypatch.undo()
        writer.write(records[2])
    report = read_report(str(path))
    assert (len(report.envs), len(report.runs), report.torn_line) == (1, 1, None)


def test_what_cannot_be_written_leaves_the_report_as_it_is(path: Path, records: list[Record]) -> None:
    """A record with a value that JSON cannot hold is refused by place, and the report goes on without it."""
    with Writer(path) as writer:
        writer.write(records[0])
        with pytest.raises(TypeError, match=r"\$\.analysis\.x is of type builtins\.object"):
            writer.write(Summary(analysis={"x": object()}))
        writer.write(records[1])
    assert read_report(str(path)).torn_line is None


def test_a_closed_writer_writes_nothing(path: Path, records: list[Record]) -> None:
    """Writing after close is an error; closing twice is not."""
    writer = Writer(path)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write(records[0])


def test_a_report_can_go_to_a_pipe(records: list[Record]) -> None:
    """Where nothing can be synced, writing works all the same."""
    end, start = os.pipe()
    try:
        with Writer(f"/dev/fd/{start}", overwrite=True) as writer:
            writer.write(records[2])
        assert os.read(end, 100_000).endswith(b"\n")
    finally:
        os.close(start)
        os.close(end)


def test_records_are_values(records: list[Record]) -> None:
    """Records are frozen, compare by content and keep their defaults out of each other."""
    header = records[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(header, "id", "other")  # noqa: B010 - mypy knows that it is frozen
    assert all(isinstance(record, RECORD_TYPES[record.kind]) for record in records)
    again = from_plain(type(header), jsonio.loads(jsonio.dumps(to_plain(header))), Counter())
    assert again == header


def test_an_identity_has_one_digest(records: list[Record]) -> None:
    """Equal identities have equal digests in any order; another value has another."""
    assert identity_digest({"a": 1, "b": None}) == identity_digest({"b": None, "a": 1})
    assert identity_digest({"a": 1}) != identity_digest({"a": 1.0})
    assert identity_digest({}) == hashlib.sha256(b"{}").hexdigest()[:16]


def test_states_and_samples_declare_their_units() -> None:
    """Every record type is documented; counts and sizes are named by unit."""
    assert all(record_type.__doc__ for record_type in RECORD_TYPES.values())
    assert {"num_tensors", "num_bytes"} <= {field.name for field in dataclasses.fields(State)}


def test_errors_say_where_and_survive_pickling() -> None:
    """A report error shows file, line and reason, is a LucidError, and crosses process borders."""
    error = ReportError("a.jsonl", 7, "the line was edited")
    assert str(error) == "a.jsonl: line 7: the line was edited"
    assert str(ReportError("a.jsonl", None, "the file is empty")) == "a.jsonl: the file is empty"
    assert isinstance(error, LucidError)
    again = pickle.loads(pickle.dumps(error))
    assert (again.path, again.line, again.message) == ("a.jsonl", 7, "the line was edited")
    assert str(NotComparableError(["x", "y"])) == "the reports cannot be compared: x; y"
