"""Times one captured step over numbers of param groups and branches, with the memory that each recording adds.

Every line is one optimizer of its own, two native steps and then replays, in one process.
"""

import argparse
import json
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, only this file's folder is on the path

from tools.bench import environment  # noqa: E402
from tools.bench.step import SHAPES_FILE, load_shapes  # noqa: E402

from lucid_optim import MuSGD  # noqa: E402


def measure(name: str, *, groups: int, branches: int, steps: int) -> dict[str, Any]:
    """Return milliseconds and MiB of one combination."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).cuda()) for shape in load_shapes(SHAPES_FILE)[name]]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = MuSGD(
        [{"params": params[at::groups]} for at in range(groups)],
        lr=0.01,
        capture_updates=True,
        capture_branches=branches,
        strict=True,
    )
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    wall, host = [], []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        host.append((time.perf_counter() - begin) * 1e3)
        torch.cuda.synchronize()
        wall.append((time.perf_counter() - begin) * 1e3)
    torch.cuda.empty_cache()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    report = optimizer.capture_report()
    return {
        "kind": "measurement",
        "shapes": name,
        "groups": groups,
        "branches": branches,
        "wall_ms": wall,
        "host_ms": host,
        "allocated_mib": (after[0] - before[0]) / 2**20,
        "reserved_mib": (after[1] - before[1]) / 2**20,
        "pool_mib": report.pool_bytes / 2**20,
        "setup_seconds": report.setup_seconds,
        "replays": [group.replays for group in report.groups],
    }


def main() -> None:
    """Measure and print one line a combination."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--shapes", nargs="+", default=["nano", "small"])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--branches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every sample to FILE as JSON lines")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    records: list[dict[str, Any]] = [environment.gpu_header()]
    print(f"{'shapes':7} groups branches  wall ms  host ms  allocated  reserved MiB")
    for name, groups, branches in product(options.shapes, options.groups, options.branches):
        if branches > groups and branches != options.branches[0]:
            continue  # as many branches as groups are used
        record = measure(name, groups=groups, branches=branches, steps=options.steps)
        records.append(record)
        wall, host = (statistics.median(record[key][8:]) for key in ("wall_ms", "host_ms"))
        print(
            f"{name:7} {groups:6} {branches:8} {wall:8.3f} {host:8.3f} {record['allocated_mib']:10.1f} "
            f"{record['reserved_mib']:9.1f}",
            flush=True,
        )
    if options.output is not None:
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
