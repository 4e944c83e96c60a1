"""Times whole training steps of the built-in detector, native against captured, over batch sizes.

Both arms live in one process on the same batch and take turns; what is timed is everything from the batch on the host
to the averaged model. The larger the batch, the smaller the optimizer's share, and what capture can gain with it.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, only this file's folder is on the path

from tools.bench import environment  # noqa: E402

from lucid_cli.workloads.detection.data import open_sources  # noqa: E402
from lucid_cli.workloads.detection.model import build_detector  # noqa: E402
from lucid_cli.workloads.detection.options import parse  # noqa: E402
from lucid_cli.workloads.detection.trainer import Trainer  # noqa: E402

ARMS = ("native", "captured")


@contextmanager
def _capture(arm: str) -> Iterator[None]:
    """Set the variable that decides, for an optimizer made inside, whether it captures."""
    os.environ["LUCID_CAPTURE_UPDATES"] = str(int(arm == "captured"))
    try:
        yield
    finally:
        del os.environ["LUCID_CAPTURE_UPDATES"]


def measure(batch: int, *, size: int, rounds: int, warmup: int) -> dict[str, Any]:
    """Return the seconds of every step of both arms at one batch size, and what capture came to."""
    options = parse(
        ["--preset", "gpu", "--batch", str(batch), "--size", str(size), "--num-train", str(batch), "--workers", "0"],
        has_cuda=True,
    )
    sources = open_sources(options)
    data = next(iter(sources.load(options).train.epoch(0)))
    trainers = {}
    for arm in ARMS:
        torch.manual_seed(options.seed)
        with _capture(arm):
            model = build_detector(options.model, len(sources.names)).cuda()
            trainers[arm] = Trainer(model, options, num_classes=len(sources.names), steps_per_epoch=100)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    optimizer_seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(rounds + warmup):
        for arm in ARMS if number % 2 else ARMS[::-1]:
            trainer = trainers[arm]
            torch.cuda.synchronize()
            begin = time.perf_counter()
            trainer.step(data)
            torch.cuda.synchronize()
            whole = time.perf_counter() - begin
            begin = time.perf_counter()
            trainer.optimizer.step()  # once more on the same gradients, on its own
            torch.cuda.synchronize()
            if number >= warmup:
                seconds[arm].append(whole)
                optimizer_seconds[arm].append(time.perf_counter() - begin)
    report = trainers["captured"].optimizer.capture_report()
    return {
        "kind": "measurement",
        "batch": batch,
        "size": size,
        "seconds": seconds,
        "optimizer_seconds": optimizer_seconds,
        "replays": [group.replays for group in report.groups],
        "reasons": [group.reasons for group in report.groups],
        "pool_bytes": report.pool_bytes,
    }


def _line(record: dict[str, Any]) -> str:
    medians = {arm: statistics.median(record["seconds"][arm]) * 1e3 for arm in ARMS}
    alone = {arm: statistics.median(record["optimizer_seconds"][arm]) * 1e3 for arm in ARMS}
    ratios = [b / a for a, b in zip(record["seconds"]["native"], record["seconds"]["captured"], strict=True)]
    return (
        f"{record['batch']:5d} {medians['native']:9.2f} {medians['captured']:9.2f} {statistics.median(ratios):7.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}) {alone['native']:9.2f} {alone['captured']:9.2f}"
    )


def main() -> None:
    """Measure and print one line a batch size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--size", type=int, default=640, help="side of the images in pixels")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every sample to FILE as JSON lines")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    records: list[dict[str, Any]] = [environment.gpu_header(rounds=options.rounds, warmup=options.warmup)]
    lines = []
    for batch in options.batches:
        records.append(measure(batch, size=options.size, rounds=options.rounds, warmup=options.warmup))
        lines.append(_line(records[-1]))
        if options.output is not None:
            text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
            options.output.write_text(text, encoding="utf-8")
    head = records[0]
    print(f"{head['device_model']}, driver {head['driver']}, torch {head['torch']}; {head['command']}; {head['date']}")
    print("median ms of a whole training step, ratio captured / native by round (range), ms of optimizer.step alone")
    print(f"{'batch':>5} {'native':>9} {'captured':>9} {'ratio':>7} {'':20} {'native':>9} {'captured':>9}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
