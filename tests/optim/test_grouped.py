"""Matrices of all shapes at once: what a matrix gets alone, on a device or in Triton's interpreter."""

import importlib
import json
import logging
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lucid_optim import NewtonSchulz, buckets, grouped
from support.interpreted import orthogonalized_in_groups
from support.reference import bits, orthogonalized, relative_error

SHAPES = [(4, 21), (9, 85), (27, 32), (85, 85), (170, 40), (3, 200), (1, 9), (7, 1), (1, 1), (64, 32)]
SHAPES_FILE = Path(__file__).parents[2] / "tools" / "bench" / "shapes.json"
# Relative error of an iterate, with room: convolution-sized matrices end near 1e-6 and 1.5e-2.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def _triton_version() -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return (0, 0)


# Kernels compile under 3.0 too, but its interpreter does not know numpy 2, and its compiler is called differently.
needs_triton = pytest.mark.skipif(_triton_version() < (3, 6), reason="needs triton 3.6 or later on the host")

Run = Callable[..., list[Tensor]]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """Start a process whose kernels are interpreted on the host."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(int).result()  # starts it
        yield pool


@pytest.fixture(params=[pytest.param("interpreter", marks=needs_triton), pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    """Return a function from host matrices and a scheme to host results, which checks that inputs are only read."""

    def on_device(matrices: Sequence[Tensor], scheme: NewtonSchulz, **options: Any) -> list[Tensor]:
        inputs = [matrix.cuda() for matrix in matrices]
        results = grouped.orthogonalize(inputs, scheme, **options)
        assert [bits(matrix.cpu()) for matrix in inputs] == [bits(matrix) for matrix in matrices]
        allocations = {result.untyped_storage().data_ptr() for result in results}
        assert len(allocations) == 1
        assert not any(matrix.untyped_storage().data_ptr() in allocations for matrix in inputs)
        return [result.cpu() for result in results]

    def interpreted(matrices: Sequence[Tensor], scheme: NewtonSchulz, **options: Any) -> list[Tensor]:
        pool: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        answer = pool.submit(orthogonalized_in_groups, pickle.dumps((list(matrices), scheme, options))).result()
        results, inputs, num_allocations, shared = pickle.loads(answer)
        assert [bits(matrix) for matrix in inputs] == [bits(matrix) for matrix in matrices]
        assert num_allocations == 1
        assert not shared
        return list(results)

    return on_device if request.param == "cuda" else interpreted


def expected_of(matrix: Tensor, scheme: NewtonSchulz) -> Tensor:
    """Return the float64 iterate of the values that the scheme's dtype can hold."""
    return orthogonalized(matrix.to(scheme.dtype).double(), scheme.steps, clamp=scheme.norm == "clamp_eps")


@pytest.mark.parametrize(
    "scheme",
    [
        NewtonSchulz(steps=2),
        NewtonSchulz(steps=1, norm="clamp_eps"),
        NewtonSchulz(steps=2, dtype=torch.bfloat16),
        NewtonSchulz(steps=1, norm="clamp_eps", dtype=torch.bfloat16),
    ],
    ids=lambda scheme: f"{scheme.dtype}-{scheme.norm}-{scheme.steps}",
)
def test_every_shape_follows_the_reference_and_the_batches(run: Run, scheme: NewtonSchulz) -> None:
    """Wide, tall, square, one row, one column: the iterate of float64, and of the batches of equal shape."""
    matrices = [torch.randn(shape) for shape in SHAPES]
    results = run(matrices, scheme)
    batches = buckets.in_buckets([matrix.to(scheme.dtype) for matrix in matrices], scheme)
    for matrix, result, batch in zip(matrices, results, batches, strict=True):
        assert (result.shape, result.dtype, result.stride()) == (matrix.shape, scheme.dtype, matrix.stride())
        expected = expected_of(matrix, scheme)
        assert relative_error(result, expected, expected) < TOLERANCES[scheme.dtype]
        assert relative_error(result, batch.double(), expected) < TOLERANCES[scheme.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_do_not_grow_over_the_iterations(run: Run, dtype: torch.dtype) -> None:
    """The five steps of the default scheme end as near to float64 as one does."""
    scheme = NewtonSchulz(dtype=dtype)
    matrices = [torch.randn(shape) for shape in [(9, 70), (40, 21), (16, 16)]]
    for matrix, result in zip(matrices, run(matrices, scheme), strict=True):
        expected = expected_of(matrix, scheme)
        assert relative_error(result, expected, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("norm", ["add_eps", "clamp_eps"])
def test_eps_guards_small_norms(run: Run, norm: Any) -> None:
    """A norm about as small as eps is divided by as the scheme says, and -0.0 is a zero."""
    matrices = [torch.randn(5, 9) * 1e-8, torch.randn(9, 5) * 1e-6, torch.full((3, 4), -0.0)]
    scheme = NewtonSchulz(steps=1, norm=norm)
    results = run(matrices, scheme)
    for matrix, result in zip(matrices, results, strict=True):
        expected = expected_of(matrix, scheme)
        assert relative_error(result, expected, expected) < 1e-5
    assert bool((results[2] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_matrix_is_all_nan_and_leaves_its_neighbours_alone(run: Run, dtype: torch.dtype) -> None:
    """NaN and infinity fill their own matrix; the others have the bytes that they have without it."""
    scheme = NewtonSchulz(steps=1, dtype=dtype)
    good = [torch.randn(shape) for shape in [(5, 40), (40, 37), (33, 9)]]
    bad = [torch.randn(40, 70), torch.randn(37, 12)]
    bad[0][39, 2] = math.nan
    bad[1][5, 11] = -math.inf
    results = run([good[0], bad[0], good[1], bad[1], torch.zeros(6, 50), good[2]], scheme)
    assert bool(results[1].isnan().all())
    assert bool(results[3].isnan().all())
    assert bits(results[4]) == bits(torch.zeros(6, 50, dtype=dtype))
    alone = run([good[0], good[1], good[2]], scheme)
    assert [bits(results[place]) for place in (0, 2, 5)] == [bits(result) for result in alone]


def test_bytes_depend_on_nothing_but_the_matrix(run: Run) -> None:
    """Another call, other neighbours and another order give a matrix the same bytes."""
    scheme = NewtonSchulz(steps=2)
    matrices = [torch.randn(shape) for shape in [(40, 50), (3, 7), (70, 33)]]
    together = [bits(result) for result in run(matrices, scheme)]
    assert [bits(result) for result in run(matrices, scheme)] == together
    assert [bits(result) for result in run(matrices[::-1], scheme)] == together[::-1]
    assert bits(run([matrices[2]], scheme)[0]) == together[2]


def test_half_precision_goes_in_and_any_dtype_comes_out(run: Run) -> None:
    """Inputs are cast to the scheme's dtype, results to the one that is asked for."""
    matrix = torch.randn(12, 5).to(torch.float16)
    (result,) = run([matrix], NewtonSchulz(steps=2), dtype=torch.float16)
    expected = orthogonalized(matrix.double(), 2)
    assert result.dtype == torch.float16
    assert relative_error(result, expected, expected) < 1e-3


SIZES = st.integers(1, 150)


@settings(max_examples=40)
@given(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=6))
def test_a_plan_covers_every_element_once(shapes: list[tuple[int, int]]) -> None:
    """Arenas hold matrices without overlap; tiles cover each once, those of symmetric results their lower half."""
    tiling = grouped.TILINGS[torch.float32]
    plan = grouped._plan.__wrapped__(tuple(shapes), tiling, torch.device("cpu"))
    ends = [place + rows * cols for place, (rows, cols) in zip(plan.places, shapes, strict=True)]
    assert all(place % 16 == 0 for place in plan.places)
    assert all(end <= place for end, place in zip(ends, [*plan.places[1:], plan.num_elements], strict=True))
    short, long = zip(*((min(shape), max(shape)) for shape in shapes), strict=True)
    for table, rows, cols in (
        (plan.apply, tiling.apply.rows, tiling.apply.cols),
        (plan.normalized, *grouped.NORMALIZED),
    ):
        assert sorted((row[0] * 16, row[4], row[5]) for row in table.tolist()) == sorted(
            (place, i, j)
            for place, m, n in zip(plan.places, short, long, strict=True)
            for i in range(math.ceil(m / rows))
            for j in range(math.ceil(n / cols))
        )
    for table, size in ((plan.gram, tiling.gram.rows), (plan.polynomial, tiling.polynomial.rows)):
        assert sorted((row[0] * 16, row[4], row[5]) for row in table.tolist()) == sorted(
            (place, i, j)
            for place, m in zip(plan.places, short, strict=True)
            for i in range(math.ceil(m / size))
            for j in range(i + 1)
        )
    sums = sorted(row[7] + row[4] for row in plan.chunks.tolist())
    assert sums == list(range(plan.num_sums))


def test_matrices_on_the_host_go_in_batches() -> None:
    """Without a CUDA device nothing is asked of triton."""
    assert not grouped.is_available(torch.device("cpu"))
    assert not grouped.supports(NewtonSchulz(), [torch.randn(3, 4)])
    assert not grouped.supports(NewtonSchulz(), [])


def test_the_switch_is_0_or_1() -> None:
    """LUCID_GROUPED=0 switches the kernels off; another word is refused."""
    assert grouped.is_requested({})
    assert grouped.is_requested({"LUCID_GROUPED": "1"})
    assert not grouped.is_requested({"LUCID_GROUPED": "0"})
    with pytest.raises(ValueError, match="LUCID_GROUPED must be 0 or 1, got 'no'"):
        grouped.is_requested({"LUCID_GROUPED": "no"})


@pytest.mark.parametrize("fault", [ImportError("No module named 'triton'"), RuntimeError("no C compiler"), None])
def test_a_device_that_fails_is_named_once_in_the_log(
    fault: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is raised while kernels are compiled and tried, the answer is no, and the log says why."""

    def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
        if fault is not None:
            raise fault
        return "its self-test is wrong"

    monkeypatch.setattr(grouped, "_obstacle", obstacle)
    monkeypatch.setattr(grouped, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with caplog.at_level(logging.INFO, logger="lucid_optim"):
        assert not grouped.is_available(torch.device("cuda", 0))
        assert not grouped.is_available(torch.device("cuda", 0))
    (record,) = caplog.records
    assert (str(fault) if fault else "self-test is wrong") in record.getMessage()


@needs_triton
@pytest.mark.parametrize(("dtype", "capability"), [(torch.float32, 90), (torch.bfloat16, 80)])
def test_the_kernels_compile(
    dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton makes machine code of every kernel without a device at hand, none with atomic operations."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    kernels = importlib.import_module("lucid_optim.kernels")
    tiling = grouped.TILINGS[dtype]
    element = "fp32" if dtype == torch.float32 else "bf16"
    types = dict.fromkeys(("source", "target", "X", "A", "B"), f"*{element}")
    types |= {"tiles": "*i32", "partials": "*fp32"} | dict.fromkeys(("a", "b", "c", "added", "least"), "fp32")
    square = {"BLOCK": tiling.gram.rows, "BLOCK_K": tiling.gram.depth, "PRECISION": "ieee"}
    tile = {"BLOCK_M": tiling.apply.rows, "BLOCK_N": tiling.apply.cols, "BLOCK_K": tiling.apply.depth}
    for kernel, constants in (
        (kernels.sum_squares, {"CHUNK": grouped.CHUNK}),
        (kernels.normalize, {"CHUNK": grouped.CHUNK, "BLOCK_M": 32, "BLOCK_N": 64}),
        (kernels.gram, square),
        (kernels.polynomial, square),
        (kernels.apply, {**tile, "PRECISION": "ieee", "LAST": True}),
    ):
        signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = triton.compiler.ASTSource(kernel, signature, places)
        compiled = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 3})
        assert len(compiled.asm["cubin"]) > 0
        assert ".atom" not in compiled.asm["ptx"]


def detector_matrices(name: str = "nano") -> list[Tensor]:
    """Return random device matrices of the shapes of a detector's parameters."""
    entries = json.loads(SHAPES_FILE.read_text())["sets"][name]
    shapes = [(shape[0], math.prod(shape[1:])) for _, shape in entries if len(shape) >= 2]
    return [torch.randn(shape, device="cuda") for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replayed_graph_has_the_bytes_of_a_call(dtype: torch.dtype) -> None:
    """After one call the same shapes are captured; replays follow new inputs to the byte and synchronise nothing."""
    scheme = NewtonSchulz(dtype=dtype)
    matrices = detector_matrices()
    assert grouped.supports(scheme, matrices)
    buckets.orthogonalize_all(matrices, scheme)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = buckets.orthogonalize_all(matrices, scheme)
    for _ in range(3):
        for matrix in matrices:
            matrix.normal_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            eager = buckets.orthogonalize_all(matrices, scheme)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        torch.cuda.synchronize()
        assert [bits(result.cpu()) for result in captured] == [bits(result.cpu()) for result in eager]


@pytest.mark.gpu
def test_new_shapes_inside_a_capture_are_refused() -> None:
    """The tables cannot be uploaded there, and the message says what to do."""
    grouped.is_available(torch.device("cuda"))
    matrices = [torch.randn(11, 13, device="cuda"), torch.randn(17, 4, device="cuda")]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(1, device="cuda").add_(1)  # torch warns of an empty graph
        with pytest.raises(RuntimeError, match="once before the capture"):
            grouped.orthogonalize(matrices, NewtonSchulz())
    del graph
    assert grouped.orthogonalize(matrices, NewtonSchulz())[0].shape == (11, 13)


def device_work(call: Callable[[], object], tmp_path: Path) -> int:
    """Return the number of kernels, copies and fills that a call launches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch 2.11 warns that one cycle is recorded, which is wanted
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            call()
            torch.cuda.synchronize()
    trace.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return sum(event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"} for event in events)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_detector_takes_about_twenty_launches(dtype: torch.dtype, tmp_path: Path) -> None:
    """127 matrices of 40 shapes: three launches an iteration, two for the norms, a few for the copies."""
    matrices, scheme = detector_matrices(), NewtonSchulz(dtype=dtype)
    buckets.orthogonalize_all(matrices, scheme)
    launches = device_work(lambda: buckets.orthogonalize_all(matrices, scheme), tmp_path)
    assert 17 < launches <= 24


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nano", "small"])
def test_temporaries_are_two_copies_and_two_squares(name: str) -> None:
    """Beside the squares of the short sides, little more than twice the matrices' bytes is allocated."""
    matrices = detector_matrices(name)
    buckets.orthogonalize_all(matrices, NewtonSchulz())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = buckets.orthogonalize_all(matrices, NewtonSchulz())
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    num_elements = sum(matrix.numel() for matrix in matrices)
    num_squared = sum(min(matrix.shape) ** 2 for matrix in matrices)
    assert len(results) == len(matrices)
    unsplit = 2**22  # the allocator leaves up to 1 MiB at the end of a block
    assert peak < 4 * (2.2 * num_elements + 2.1 * num_squared) + unsplit


@pytest.mark.gpu
def test_other_shapes_compile_nothing_new() -> None:
    """Each kernel has one variant a dtype, the last iteration's another."""
    kernels = importlib.import_module("lucid_optim.kernels")
    if not hasattr(kernels.gram, "device_caches"):
        pytest.skip("this triton keeps its variants elsewhere")
    device = torch.cuda.current_device()
    names = ("sum_squares", "normalize", "gram", "polynomial", "apply")

    def variants() -> list[int]:
        return [len(getattr(kernels, name).device_caches[device][0]) for name in names]

    grouped.orthogonalize([torch.randn(16, 16, device="cuda")], NewtonSchulz())
    before = variants()
    for shapes in ([(1, 1)], [(3, 1), (1, 3)], [(300, 17)], SHAPES):
        for norm in ("add_eps", "clamp_eps"):
            scheme = NewtonSchulz(norm=norm, coefficients=(1.0, 0.0, 0.0), eps=1.0)
            grouped.orthogonalize([torch.randn(shape, device="cuda") for shape in shapes], scheme)
    assert variants() == before
