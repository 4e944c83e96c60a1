"""Times the orthogonalisation of a detector's matrices: one launch a stage against batches of equal shape.

Prints one table; the numbers behind it go to a file as JSON lines. `--tune` also tries other tilings of the kernels.
"""

import argparse
import datetime as dt
import gc
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

# A profiler that tears CUPTI down after each trace can break graphs recorded before the next one.
# Source: https://github.com/pytorch/pytorch/issues/75504
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
os.environ.setdefault("TEARDOWN_CUPTI", "0")

import torch
from tools.bench import environment
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lucid_optim import NewtonSchulz, buckets, grouped
from lucid_optim.grouped import TILINGS, Launch, Tiling

SHAPES_FILE = Path(__file__).with_name("shapes.json")
KERNELS = ("sum_squares", "normalize", "gram", "polynomial", "apply")
STAGES = ("gram", "polynomial", "apply")
GRADIENT_SCALE = 0.01
REPLAYS_PER_SAMPLE = 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# (rows, cols, depth, num_warps, num_stages); those that are not square are tried for `apply` alone.
# Left out: tiles that spill registers (64x64x64 in float32, 64x64x32 on two warps).
VARIANTS: dict[str, Sequence[tuple[Literal["ieee", "tf32x3"], tuple[int, int, int, int, int]]]] = {
    "float32": [
        ("ieee", (32, 32, 32, 1, 3)),
        ("ieee", (32, 32, 32, 2, 3)),
        ("ieee", (32, 32, 32, 4, 3)),
        ("ieee", (32, 32, 64, 4, 3)),
        ("ieee", (64, 64, 16, 4, 3)),
        ("ieee", (64, 64, 32, 4, 2)),
        ("ieee", (64, 64, 32, 4, 3)),
        ("ieee", (64, 64, 32, 8, 3)),
        ("ieee", (32, 64, 32, 2, 3)),
        ("ieee", (32, 64, 32, 4, 3)),
        ("ieee", (64, 128, 16, 8, 3)),
        ("tf32x3", (32, 32, 32, 4, 3)),
        ("tf32x3", (64, 64, 32, 4, 3)),
        ("tf32x3", (64, 64, 32, 8, 3)),
        ("tf32x3", (32, 64, 32, 4, 3)),
    ],
    "bfloat16": [
        ("ieee", (32, 32, 64, 4, 3)),
        ("ieee", (64, 64, 32, 4, 3)),
        ("ieee", (64, 64, 64, 4, 3)),
        ("ieee", (64, 128, 64, 4, 3)),
    ],
}


@dataclass(slots=True, kw_only=True)
class Arm:
    """One way to orthogonalise, and what was measured of it. Times in milliseconds, a median each.

    Attributes:
        name: Of the way.
        call: Orthogonalises the matrices.
        facts: What is known by name; `failed_*` says what could not be measured and why.
    """

    name: str
    call: Callable[[], list[Tensor]]
    facts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def _noted(facts: dict[str, Any], what: str) -> Iterator[None]:
    """Turn whatever a measurement raises into a fact, so that the others go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a compiler or a driver may raise anything
        facts[f"failed_{what}"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]


def matrices_of(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Return random matrices with the shapes of a detector's parameters, as large as gradients are."""
    entries = json.loads(SHAPES_FILE.read_text(encoding="utf-8"))["sets"][name]
    shapes = [(shape[0], math.prod(shape[1:])) for _, shape in entries if len(shape) >= 2]
    generator = torch.Generator(device="cuda").manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, device="cuda").mul_(GRADIENT_SCALE) for shape in shapes]
    return [matrix.to(dtype) for matrix in drawn]


def _errors(results: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
    """Return relative Frobenius errors: the worst matrix's, and that of all taken as one vector."""
    squares = [
        (float((result.double() - exact).square().sum()), float(exact.square().sum()))
        for result, exact in zip(results, expected, strict=True)
    ]
    worst = max(math.sqrt(distance / size) for distance, size in squares)
    return {
        "error_worst": worst,
        "error_all": math.sqrt(sum(distance for distance, _ in squares) / sum(size for _, size in squares)),
    }


def _peak_bytes(call: Callable[[], object]) -> int:
    """Return what a call allocates at most, results included, beyond what was there."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _device_microseconds(call: Callable[[], object]) -> dict[str, list[float]]:
    """Return the time of every kernel and copy of three calls, by kernel."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in trace.events() or []:
        if event.device_type.name == "CUDA":
            name = next((kernel for kernel in KERNELS if event.name.startswith(kernel)), "other")
            found[name].append(event.time_range.elapsed_us())
    return dict(found)


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    torch.cuda.synchronize()
    return graph


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS_PER_SAMPLE):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS_PER_SAMPLE


def _call_ms(call: Callable[[], object]) -> tuple[float, float]:
    """Return the host's time, and the time until the device is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    results = call()
    host = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    del results
    return (host - begin) * 1e3, (end - begin) * 1e3


def _measure_replays(arms: Sequence[Arm], num_rounds: int) -> None:
    """Replay the arms in turn, a few replays a sample, and keep each one's median."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for arm in arms:
        with _noted(arm.facts, "capture"):
            graphs[arm.name] = _captured(arm.call)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(num_rounds):
        for name, graph in graphs.items():
            samples[name].append(_replay_ms(graph))
    for arm in arms:
        if arm.name in samples:
            arm.facts["replay_ms"] = statistics.median(samples[arm.name])
            arm.facts["replay_ms_least"] = min(samples[arm.name])


def _measure_calls(arms: Sequence[Arm], num_rounds: int) -> None:
    for arm in arms:
        with _noted(arm.facts, "calls"):
            _call_ms(arm.call)
            times = [_call_ms(arm.call) for _ in range(num_rounds)]
            arm.facts["host_ms"] = statistics.median(host for host, _ in times)
            arm.facts["wall_ms"] = statistics.median(wall for _, wall in times)
            arm.facts["peak_bytes"] = _peak_bytes(arm.call)


def _measure_kernels(arm: Arm) -> None:
    with _noted(arm.facts, "profile"):
        found = _device_microseconds(arm.call)
        arm.facts["num_launches"] = round(sum(map(len, found.values())) / 3)
        arm.facts["kernel_us"] = {name: statistics.median(times) for name, times in found.items() if name != "other"}
        arm.facts["kernels_us"] = sum(sum(times) for times in found.values()) / 3


def _first_call(arm: Arm, expected: Sequence[Tensor]) -> None:
    with _noted(arm.facts, "call"):
        begin = time.perf_counter()
        results = arm.call()
        torch.cuda.synchronize()
        arm.facts["first_call_s"] = time.perf_counter() - begin
        arm.facts |= _errors(results, expected)


def compare(name: str, dtype: torch.dtype, num_rounds: int) -> list[Arm]:
    """Measure both ways on one set of shapes."""
    matrices, scheme = matrices_of(name, dtype), NewtonSchulz(dtype=dtype)
    expected = buckets.in_buckets([matrix.double() for matrix in matrices], NewtonSchulz(dtype=torch.float64))
    arms = [
        Arm(name="buckets", call=lambda: buckets.in_buckets(matrices, scheme)),
        Arm(name="grouped", call=lambda: grouped.orthogonalize(matrices, scheme)),
    ]
    for arm in arms:
        _first_call(arm, expected)
    _measure_calls(arms, num_rounds)
    for arm in arms:
        _measure_kernels(arm)
    _measure_replays(arms, num_rounds)
    return arms


def _tiling(
    dtype: torch.dtype, precision: Literal["ieee", "tf32x3"], numbers: tuple[int, int, int, int, int]
) -> Tiling:
    rows, cols, depth, num_warps, num_stages = numbers
    launch = Launch(rows=rows, cols=cols, depth=depth, num_warps=num_warps, num_stages=num_stages)
    square = {} if rows != cols else {"gram": launch, "polynomial": launch}
    return replace(TILINGS[dtype], apply=launch, precision=precision, **square)


def _best(arms: Sequence[Arm], tilings: dict[str, Tiling], precision: str) -> Tiling | None:
    """Take each kernel's launch from the tiling under which that kernel was fastest."""
    tried = [arm for arm in arms if tilings[arm.name].precision == precision and arm.facts.get("kernel_us")]
    if not tried:
        return None
    chosen = {
        stage: getattr(tilings[min(tried, key=lambda arm: arm.facts["kernel_us"].get(stage, math.inf)).name], stage)
        for stage in STAGES
    }
    return Tiling(**chosen, precision="tf32x3" if precision == "tf32x3" else "ieee")


def tune(name: str, dtype_name: str, num_rounds: int) -> list[Arm]:
    """Measure other tilings on one set of shapes, and last what is best of each kernel, put together."""
    dtype = DTYPES[dtype_name]
    matrices, scheme = matrices_of(name, dtype), NewtonSchulz(dtype=dtype)
    expected = buckets.in_buckets([matrix.double() for matrix in matrices], NewtonSchulz(dtype=torch.float64))
    tilings: dict[str, Tiling] = {"default": TILINGS[dtype]}
    for precision, numbers in VARIANTS[dtype_name]:
        rows, cols, depth, num_warps, num_stages = numbers
        label = f"{precision} {rows}x{cols}x{depth} w{num_warps} s{num_stages}"
        tilings[label] = _tiling(dtype, precision, numbers)

    def arm_of(label: str) -> Arm:
        tiling = tilings[label]
        arm = Arm(name=label, call=lambda: grouped.orthogonalize(matrices, scheme, tiling=tiling))
        _first_call(arm, expected)
        if "first_call_s" in arm.facts:
            _measure_kernels(arm)
        arm.facts["tiling"] = asdict(tiling)
        return arm

    arms = [arm_of(label) for label in list(tilings)]
    for precision in sorted({tiling.precision for tiling in tilings.values()}):
        best = _best(arms, tilings, precision)
        if best is not None:
            tilings[f"best {precision}"] = best
            arms.append(arm_of(f"best {precision}"))
    _measure_replays([arm for arm in arms if "first_call_s" in arm.facts], num_rounds)
    return arms


def _environment() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "command": environment.typed_command(sys.orig_argv, Path.cwd()),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "driver": environment.driver()[0],
        "torch": torch.__version__,
    }
    with _noted(facts, "triton"):
        facts["triton"] = version("triton")
    return facts | {"cuda": torch.version.cuda, "python": platform.python_version()}


def _line(title: str, arm: Arm) -> str:
    facts = arm.facts

    def shown(key: str, form: str, factor: float = 1.0) -> str:
        return format(float(facts[key]) * factor, form) if key in facts else "-"

    stages = " ".join(f"{facts.get('kernel_us', {}).get(stage, math.nan):7.1f}" for stage in KERNELS)
    failed = " ".join(f"{key}: {text}" for key, text in facts.items() if key.startswith("failed_"))
    return (
        f"{title:<16} {arm.name:<26} {shown('replay_ms', '.3f'):>8} {shown('host_ms', '.2f'):>7} "
        f"{shown('wall_ms', '.2f'):>7} {shown('num_launches', '.0f'):>8} {stages} "
        f"{shown('error_all', '.1e'):>8} {shown('error_worst', '.1e'):>8} {shown('peak_bytes', '.1f', 2**-20):>7} "
        f"{shown('first_call_s', '.2f'):>7} {failed}"
    )


HEADER = (
    f"{'set dtype':<16} {'way':<26} {'replay':>8} {'host':>7} {'wall':>7} {'launches':>8} "
    f"{'squares':>7} {'divide':>7} {'gram':>7} {'poly':>7} {'apply':>7} "
    f"{'error':>8} {'worst':>8} {'MiB':>7} {'first s':>7}\n"
    "replay: of a CUDA graph; host, wall: of a call; ms, medians. squares to apply: us of one launch, median. "
    "error: relative, against float64, of all matrices and of the worst. MiB: allocated at most by a call."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; return 1 without a CUDA device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("output", type=Path, nargs="?", metavar="FILE", help="write every number to FILE as JSON lines")
    parser.add_argument("--shapes", nargs="+", default=["nano", "small"], metavar="SET", help="shape sets")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES), help="of the iteration")
    parser.add_argument("--rounds", type=int, default=20, help="samples a median is taken of")
    parser.add_argument("--tune", action="store_true", help="also try other tilings")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 1
    begin = time.perf_counter()
    records: list[dict[str, Any]] = [_environment()]
    lines = []
    # Compilation is part of what is measured: no earlier run's cache may shorten it.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for dtype_name in options.dtypes:
            start = time.perf_counter()
            available = grouped.is_available(torch.device("cuda"), DTYPES[dtype_name])
            compiled = {"dtype": dtype_name, "available": available, "self_test_s": time.perf_counter() - start}
            records.append(compiled)
            lines.append(f"{dtype_name}: available {available}, compiled and tried in {compiled['self_test_s']:.1f} s")
            for name in options.shapes:
                title = f"{name} {dtype_name}"
                arms: list[Arm] = []
                failure: dict[str, Any] = {}
                with _noted(failure, title):
                    arms += compare(name, DTYPES[dtype_name], options.rounds)
                    if options.tune and available:
                        arms += tune(name, dtype_name, max(options.rounds // 2, 3))
                records += [{"set": name, "dtype": dtype_name, "way": arm.name, **arm.facts} for arm in arms]
                records += [failure] if failure else []
                lines += [_line(title, arm) for arm in arms] + [f"{key}: {text}" for key, text in failure.items()]
                print(f"{title}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    if options.output:
        options.output.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    print(json.dumps(records[0]), HEADER, *lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
