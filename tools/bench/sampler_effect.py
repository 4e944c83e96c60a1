"""Measures what sampling costs the training beside it: windows of steps with and without, in one process.

Windows come in pairs, in the order on-off, off-on, and so on. An effect is ln(on / off) of a pair's median step times;
the result is the mean of the effects with its 95 % t interval, held against a margin stated beforehand.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
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
from lucid_profiler.monitor.log import read_log  # noqa: E402
from lucid_profiler.monitor.process import launch  # noqa: E402
from lucid_profiler.monitor.records import End  # noqa: E402
from lucid_profiler.pairs import log_ratio, paired_effect  # noqa: E402

MARGIN = 0.003  # of the step time, stated before anything was measured
SETTLE_S = 0.3  # after the sampler has been started or stopped


def training_step(batch: int, size: int) -> Callable[[], None]:
    """Return one whole training step of the built-in detector, up to the device's being done."""
    options = parse(
        ["--preset", "gpu", "--batch", str(batch), "--size", str(size), "--num-train", str(batch), "--workers", "0"],
        has_cuda=torch.cuda.is_available(),
    )
    sources = open_sources(options)
    data = next(iter(sources.load(options).train.epoch(0)))
    torch.manual_seed(options.seed)
    model = build_detector(options.model, len(sources.names)).to("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(model, options, num_classes=len(sources.names), steps_per_epoch=100)

    def step() -> None:
        trainer.step(data)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return step


def window(step: Callable[[], None], *, num_steps: int) -> list[float]:
    """Return the seconds of so many steps."""
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return times


def measure(step: Callable[[], None], *, pairs: int, num_steps: int, interval_s: float) -> list[dict[str, Any]]:
    """Return the step times of every window, and for those with the sampler what its own log says."""
    records = []
    for pair in range(pairs):
        for is_on in (True, False) if pair % 2 == 0 else (False, True):
            record: dict[str, Any] = {"kind": "window", "pair": pair, "is_on": is_on}
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder) / "monitor.jsonl"
                monitor = launch(target_pid=os.getpid(), output=log, interval_s=interval_s) if is_on else None
                time.sleep(SETTLE_S)
                record["seconds"] = window(step, num_steps=num_steps)
                if monitor is not None:
                    monitor.stop()
                    record["monitor"] = _own_words(log)
            records.append(record)
    return records


def _own_words(log: Path) -> dict[str, Any]:
    end = next((record for record in read_log(log).records if isinstance(record, End)), None)
    if end is None:
        raise RuntimeError("the sampler did not finish its log, so nothing shows that it sampled")
    return {name: getattr(end, name) for name in ("num_samples", "num_missed", "own_cpu_s", "wall_s", "nvml_s")}


def main(arguments: list[str] | None = None) -> None:
    """Measure, write every sample where that was asked for, and print the effect with its interval."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="steps a window")
    parser.add_argument("--warmup", type=int, default=20, help="steps before the first window")
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between samples")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, default=640, help="side of the images in pixels")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every sample to FILE as JSON lines")
    options = parser.parse_args(arguments)
    step = training_step(options.batch, options.size)
    window(step, num_steps=options.warmup)
    records = measure(step, pairs=options.pairs, num_steps=options.steps, interval_s=options.interval)
    medians = {(one["pair"], one["is_on"]): statistics.median(one["seconds"]) for one in records}
    ratios = (log_ratio(medians[pair, False], medians[pair, True]) for pair in range(options.pairs))
    effects = [ratio for ratio in ratios if ratio is not None]
    effect = paired_effect(effects, alpha=0.05)
    header = environment.gpu_header(
        pairs=options.pairs, steps=options.steps, interval_s=options.interval, margin=MARGIN
    )
    if options.output is not None:
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in [header, *records])
        options.output.write_text(text, encoding="utf-8")
    print(f"{header['device_model'] or header['processor']}, torch {header['torch']}; {header['command']}")
    print(f"step {statistics.median(medians.values()) * 1e3:.2f} ms; effect of sampling every {options.interval} s:")
    print(
        f"  mean {effect.mean:+.3%}, 95 % t interval {effect.t_low:+.3%} to {effect.t_high:+.3%}, "
        f"range {min(effects):+.3%} to {max(effects):+.3%}, {options.pairs} pairs, margin {MARGIN:.1%}"
        if effect.t_low is not None and effect.t_high is not None
        else f"  {options.pairs} pairs are too few for an interval"
    )


if __name__ == "__main__":
    main()
