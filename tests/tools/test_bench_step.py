import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.bench import environment, measure, peers, probe, step, table
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "bench" / "step.py"
CPU = torch.device("cpu")
TINY = ((8, 4, 3, 3), (8,), (4, 8))


def _workload(*, channels_last: bool = False) -> measure.Workload:
    return measure.Workload(name="tiny", shapes=TINY, device=CPU, channels_last=channels_last)


def _plain_sgd(params: list[Parameter]) -> Optimizer:
    return SGD(params, lr=0.1)


def _missing(params: list[Parameter]) -> Optimizer:
    return peers.import_leaf("no_such_package.optim.muon").Muon(params)  # type: ignore[no-any-return]


class _Tiring(SGD):
    """Raises at its third step."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.num_steps == 3:
            raise RuntimeError("tired\nout")
        return super().step(closure)


def _candidate(name: str, make: peers.Make = _plain_sgd, **options: Any) -> peers.Candidate:
    return peers.Candidate(name=name, make=make, distribution="torch", **options)


def _row(name: str, **options: Any) -> table.Row:
    return table.Row(shapes="tiny", name=name, **options)


def _series(*wall_ms: float) -> table.Series:
    found = table.Series()
    for position, value in enumerate(wall_ms):
        found.add(table.Sample(wall_ms=value, host_ms=value / 2, device_ms=None), position)
    return found


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_round_runs_each_optimizer_once_and_rounds_alternate(count: int) -> None:
    """Even rounds run forwards, odd ones backwards."""
    forwards, backwards = table.round_order(count, 0), table.round_order(count, 1)
    assert forwards == list(range(count))
    assert backwards == forwards[::-1]
    assert table.round_order(count, 2) == forwards


def test_an_optimizers_mean_position_is_the_same_for_all_over_two_rounds() -> None:
    """Over any two rounds that follow each other every optimizer stands in the middle on average."""
    for index in range(5):
        assert table.round_order(5, 3).index(index) + table.round_order(5, 4).index(index) == 4


def test_a_ratio_is_taken_within_each_round() -> None:
    """The median is that of the ratios, not the ratio of the medians."""
    spread = table.ratios([1.0, 20.0, 3.0], [2.0, 20.0, 12.0])
    assert spread == table.Spread(median=0.5, least=0.25, most=1.0)


@pytest.mark.parametrize(("values", "reference"), [([], [1.0]), ([1.0], [])])
def test_there_is_no_ratio_without_both_sides(values: list[float], reference: list[float]) -> None:
    """Without samples on both sides the ratio is None, not an error."""
    assert table.ratios(values, reference) is None


def test_rounds_that_do_not_pair_are_refused() -> None:
    """Series of different lengths are not cut to the shorter one."""
    with pytest.raises(ValueError, match="argument 2 is longer"):
        table.ratios([1.0], [1.0, 2.0])


def test_a_measured_row_holds_medians_and_leaves_unknown_what_is_unknown() -> None:
    """A column that nobody measured is None, not 0."""
    found = table.measured_row(_row("a"), _series(1.0, 9.0, 2.0), reference=_series(2.0, 9.0, 2.0))
    assert (found.wall_ms, found.host_ms, found.device_ms) == (2.0, 1.0, None)
    assert (found.num_launches, found.kept_bytes, found.peak_bytes, found.reserved_bytes) == (None,) * 4
    assert found.ratio == table.Spread(median=1.0, least=0.5, most=1.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (0.00123, "0.0012"),
        (0.741, "0.741"),
        (5.4, "5.40"),
        (86.31, "86.3"),
        (12345.6, "12346"),
    ],
)
def test_a_number_shows_three_significant_digits(value: float | None, text: str) -> None:
    """Large and small values alike are shown without an exponent."""
    assert table._significant(value) == text


def test_no_line_of_the_table_is_wider_than_110_columns() -> None:
    """The widest values, notes and reasons still fit."""
    spread = table.Spread(median=0.00234, least=0.00231, most=0.00466)
    full = _row(
        "pytorch_optimizer Muon",
        num_tensors=369,
        wall_ms=12345.6,
        host_ms=12345.6,
        device_ms=12345.6,
        num_launches=123456,
        kept_bytes=2**30,
        peak_bytes=2**30,
        reserved_bytes=2**30,
        ratio=spread,
        note="why " * 50,
    )
    text = table.render(
        [table.Section(title="tiny", rows=[full, _row("peer", reason="because " * 50)])],
        facts={"device": "a processor", "command": "python " + "word " * 60},
        launches="launches",
        legend="what it means " * 30,
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= table.WIDTH
    assert any(
        line.startswith("pytorch_optimizer Muon      369  12346") and "0.0023 to 0.0047" in line for line in lines
    )
    assert any(line.startswith("peer") and "not measured: because" in line for line in lines)


@pytest.mark.parametrize(("name", "num_elements"), [("nano", 2_437_552), ("small", 9_609_632)])
def test_the_shapes_are_those_of_the_published_detectors(name: str, num_elements: int) -> None:
    """The sets hold the tensors and elements that the published models have."""
    shapes = step.load_shapes(step.SHAPES_FILE)[name]
    assert len(shapes) == 369
    assert sum(math.prod(shape) for shape in shapes) == num_elements


def test_the_shapes_file_names_its_source_and_no_parameter_twice() -> None:
    """Each entry is a name of its own with its shape."""
    document = json.loads(step.SHAPES_FILE.read_text(encoding="utf-8"))
    assert "lucid-yolo" in document["source"]
    for entries in document["sets"].values():
        assert len({name for name, _ in entries}) == len(entries)


def test_a_missing_peer_becomes_a_row_with_the_reason() -> None:
    """What is not installed costs a row, not the run."""
    options = step.parse(["--device", "cpu", "--rounds", "1", "--warmup", "0", "--optimizers", "torch SGD"])
    options.candidates = [_candidate("here"), _candidate("gone", _missing)]
    records, section = step.measure(_workload(), options, probed={}, no_probe="no probe")
    assert [record["optimizer"] for record in records] == ["here"]
    assert [found.reason for found in section.rows] == ["", "ModuleNotFoundError: No module named 'no_such_package'"]
    assert records[0]["reasons"]["kept_bytes"] == "no probe"


def test_an_optimizer_that_fails_halfway_leaves_the_others_their_rounds() -> None:
    """Only its own samples are dropped, and its row says why."""
    entries, _ = measure.build_all(
        [_candidate("steady"), _candidate("tiring", lambda params: _Tiring(params, lr=0.1))], _workload()
    )
    kept, reasons = measure.run_rounds(entries, _workload(), rounds=3, warmup=1)
    assert list(kept) == ["steady"]
    assert len(kept["steady"].wall_ms) == len(kept["steady"].positions) == 3
    assert reasons == {"tiring": "RuntimeError: tired out"}


def test_a_leaf_is_imported_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages whose own import fails still yield the module inside them."""
    package = tmp_path / "bench_heavy_package" / "optim"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise ImportError('half an ecosystem')", encoding="utf-8")
    (package / "sibling.py").write_text("ANSWER = 42", encoding="utf-8")
    (package / "leaf.py").write_text("from .sibling import ANSWER", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.import_leaf("bench_heavy_package.optim.leaf").ANSWER == 42


def test_names_filter_candidates_whatever_the_case() -> None:
    """A text that fits nothing is refused with the names that there are."""
    pool = [_candidate("MuSGD"), _candidate("torch SGD"), _candidate("torch Muon")]
    assert [found.name for found in peers.select(pool, ["SGD"])] == ["MuSGD", "torch SGD"]
    assert peers.select(pool, []) == pool
    with pytest.raises(ValueError, match="'lion'; there are MuSGD, torch SGD, torch Muon"):
        peers.select(pool, ["muon", "lion"])


def test_captured_rows_are_added_beside_the_native_ones() -> None:
    """Without the option the rows are the same but for the captured ones."""
    names = [found.name for found in peers.candidates(capture=True)]
    assert names[:4] == ["MuSGD", "Muon", "MuSGD captured", "Muon captured"]
    assert len(set(names)) == len(names)
    assert [name for name in names if "captured" not in name] == [c.name for c in peers.candidates(capture=False)]


def test_a_captured_row_says_what_became_of_the_request() -> None:
    """A native row says nothing, a captured one why it ran natively."""
    musgd, _, captured, _ = peers.candidates(capture=True)[:4]
    for one, note in ((musgd, ""), (captured, "1 native steps: capture needs CUDA parameters")):
        entry = measure.build(one, _workload())
        entry.refill(_workload().gradients(0))
        entry.optimizer.step()
        found = measure.capture_note(entry.optimizer)
        assert found.startswith(note)
        assert bool(found) == bool(note)


@pytest.mark.parametrize("name", ["MuSGD", "lucid_yolo MuSGD", "torch SGD", "torch AdamW", "Muon", "torch Muon"])
def test_an_optimizer_steps_over_its_own_copy(name: str) -> None:
    """One optimizer's step leaves the parameters of another as they were."""
    one = next(found for found in peers.CANDIDATES if found.name == name)
    first, second = measure.build(one, _workload()), measure.build(one, _workload())
    before = [param.detach().clone() for param in second.params]
    first.refill(_workload().gradients(0))
    first.optimizer.step()
    assert all(torch.equal(param, value) for param, value in zip(second.params, before, strict=True))
    assert not any(torch.equal(param, value) for param, value in zip(first.params, before, strict=True))
    assert len(first.params) == (2 if one.matrices_only else 3)


def test_gradients_differ_between_rounds_and_not_between_optimizers() -> None:
    """Values are equal, memory is not shared, strides are the parameter's."""
    entries = [measure.build(_candidate(name), _workload(channels_last=True)) for name in "ab"]
    for entry in entries:
        entry.refill(_workload().gradients(4))
    first, second = ([param.grad for param in entry.params] for entry in entries)
    other = _workload().gradients(5)
    for index, (mine, yours) in enumerate(zip(first, second, strict=True)):
        assert mine is not None
        assert yours is not None
        assert torch.equal(mine, yours)
        assert mine.data_ptr() != yours.data_ptr()
        assert mine.stride() == entries[0].params[index].stride()
        assert not torch.equal(mine, other[index])
    assert entries[0].params[0].is_contiguous(memory_format=torch.channels_last)


def test_launches_are_told_from_copies_and_from_everything_else() -> None:
    """Copies are listed and not counted; operators and kernels are neither."""
    names = ["cudaLaunchKernel"] * 3 + ["cudaGraphLaunch", "cuLaunchKernelEx", "cudaMemcpyAsync", "aten::mm", "gemm"]
    by_name = probe.submissions(names)
    assert by_name == {"cuLaunchKernelEx": 1, "cudaGraphLaunch": 1, "cudaLaunchKernel": 3, "cudaMemcpyAsync": 1}
    assert probe.num_launches(by_name) == 5


def test_a_probe_on_a_cpu_counts_operations_and_says_why_memory_is_unknown() -> None:
    """A multi-tensor operation counts as one; a missing package is a reason."""
    found = probe.probe(
        [_candidate("foreach", lambda p: SGD(p, lr=0.1, foreach=True)), _candidate("gone", _missing)], _workload()
    )
    assert found["foreach"]["num_launches"] == 1
    assert set(found["foreach"]["reasons"]) == {"kept_bytes", "peak_bytes", "reserved_bytes"}
    assert "no_such_package" in found["gone"]["reasons"]["num_launches"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release Build\nGCC version: 12.3", "580.65"),
        ("", None),
    ],
)
def test_the_drivers_version_is_found_in_what_it_says_of_itself(text: str, version: str | None) -> None:
    """Neither the machine's name nor the compiler's version is taken for it."""
    assert environment.driver_version(text) == version


def test_a_command_is_shown_without_absolute_paths(tmp_path: Path) -> None:
    """Paths below the folder become relative, others their last part."""
    typed = [
        "/usr/bin/python3",
        "tools/bench/step.py",
        str(tmp_path / "a b.jsonl"),
        "--output=/else/where.jsonl",
        "-X/y",
    ]
    assert (
        environment.typed_command(typed, tmp_path) == "python tools/bench/step.py 'a b.jsonl' --output=where.jsonl -X/y"
    )


@pytest.mark.parametrize(
    "arguments", [["--rounds", "0"], ["--shapes", "huge"], ["--optimizers", "lion"], ["--warmup", "-1"]]
)
def test_what_cannot_be_measured_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It exits with 2 and a message before anything is built."""
    with pytest.raises(SystemExit, match="2"):
        step.parse(["--device", "cpu", *arguments])
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "[]", '{"sets": {"a": [["w", [-1]]]}}', "{"])
def test_a_shapes_file_that_holds_none_is_a_usage_error(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing, empty, broken or senseless file is named in one line."""
    path = tmp_path / "shapes.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        step.parse(["--device", "cpu", "--shapes-file", str(path)])
    assert "--shapes-file: " in capsys.readouterr().err


def test_an_output_that_cannot_be_written_ends_before_anything_is_measured(tmp_path: Path) -> None:
    """The path is named, without a traceback."""
    with pytest.raises(SystemExit, match=r"missing/out\.jsonl cannot be written: No such file or directory"):
        step.main(["--device", "cpu", "--output", str(tmp_path / "missing" / "out.jsonl")])


def test_a_shape_set_named_twice_is_measured_once() -> None:
    """Names are kept in their order, each once."""
    assert step.parse(["--device", "cpu", "--shapes", "small", "nano", "small"]).shapes == ["small", "nano"]


def _run_script(tmp_path: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    shapes, output = tmp_path / "shapes.json", tmp_path / "out.jsonl"
    sets = {"tiny": [[str(index), shape] for index, shape in enumerate(TINY)]}
    shapes.write_text(json.dumps({"source": "this test", "sets": sets}), encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--shapes-file", str(shapes), "--output", str(output), *arguments]
    process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, cwd=ROOT)
    return process.stdout, [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def test_the_script_writes_every_sample_and_prints_the_table(tmp_path: Path) -> None:
    """The file holds a header, one record an optimizer and one a row; the table names them all."""
    text, (header, *records) = _run_script(tmp_path, "--device", "cpu", "--rounds", "2", "--capture")
    assert header["kind"] == "header"
    assert header["command"].startswith("python tools/bench/step.py --shapes-file shapes.json")
    assert str(tmp_path) not in json.dumps(header)
    rows = {record["name"]: record for record in records if record["kind"] == "row"}
    measured = {record["optimizer"]: record for record in records if record["kind"] == "measurement"}
    assert [record["kind"] for record in records] == ["measurement"] * len(measured) + ["row"] * len(rows)
    assert {"MuSGD", "MuSGD captured", "lucid_yolo MuSGD"} <= set(measured)
    for record in measured.values():
        assert len(record["wall_ms"]) == len(record["host_ms"]) == len(record["positions"]) == 2
        assert record["num_launches"] > 0
        assert {"device_ms", "kept_bytes", "peak_bytes", "reserved_bytes"} <= set(record["reasons"])
    assert rows["lucid_yolo MuSGD"]["ratio"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert len(rows) == len(peers.candidates(capture=True))
    assert "bfloat16" in rows["Muon"]["reason"]
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in rows)


@pytest.mark.gpu
def test_the_script_counts_launches_and_memory_on_a_device(tmp_path: Path) -> None:
    """On a device nothing of what the table shows is unknown."""
    arguments = ("--device", "cuda", "--rounds", "2", "--optimizers", "lucid", "MuSGD", "Muon")
    _, (header, *records) = _run_script(tmp_path, *arguments)
    assert header["device_model"]
    measured = {record["optimizer"]: record for record in records if record["kind"] == "measurement"}
    for name in ("MuSGD", "Muon", "lucid_yolo MuSGD"):
        record = measured[name]
        assert len(record["device_ms"]) == 2
        assert record["num_launches"] > 0
        assert record["kept_bytes"] > 0
        assert record["peak_bytes"] > 0
    assert measured["MuSGD"]["num_launches"] < measured["lucid_yolo MuSGD"]["num_launches"]
