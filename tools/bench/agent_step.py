"""Measures what the agent costs a step: one optimizer's steps in processes with it and without it, by turns.

The optimizer is the smallest there is, one number, so that what the agent adds is most of the difference: a record in
its ring and, where there is a device, two CUDA events and a look at older ones. The record alone is timed as well.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, only this file's folder is on the path

from tools.bench import environment  # noqa: E402

from lucid_cli.orchestrate import child_env  # noqa: E402
from lucid_profiler.records import Arm  # noqa: E402
from lucid_profiler.ring import RingWriter  # noqa: E402

NUM_BATCHES = 50
RECORDS_PER_BATCH = 1_000

STEPS = """
import json, sys, time, torch
num_steps = int(sys.argv[1])
device = "cuda" if torch.cuda.is_available() else "cpu"
parameter = torch.zeros(1, device=device, requires_grad=True)
parameter.grad = torch.ones_like(parameter)
optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=False)
seconds = []
for index in range(num_steps + num_steps // 5):  # the first fifth warms up
    begin = time.perf_counter()
    optimizer.step()
    seconds.append(time.perf_counter() - begin)
    if device == "cuda" and index % 100 == 99:
        torch.cuda.synchronize()
print(json.dumps(seconds[-num_steps:]))
"""


def run(num_steps: int, *, with_agent: bool) -> list[float]:
    """Return the seconds of so many steps in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        arm = Arm(name="agent" if with_agent else "none")
        done = subprocess.run(
            [sys.executable, "-c", STEPS, str(num_steps)],
            env=child_env(os.environ, arm, Path(folder) if with_agent else None),
            capture_output=True,
            check=True,
        )
        has_agent = any(Path(folder).iterdir())
    if has_agent is not with_agent:
        raise RuntimeError(f"the agent {'is not' if with_agent else 'is'} in the process")
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def time_records() -> list[float]:
    """Return the seconds that a step's record takes on its way into the ring, means of batches."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        ring = RingWriter(Path(folder) / "ring")
        for _ in range(NUM_BATCHES):
            begin = time.perf_counter()
            for step in range(RECORDS_PER_BATCH):
                ring.write(1, 2, 0, step=step)
            seconds.append((time.perf_counter() - begin) / RECORDS_PER_BATCH)
    return seconds


def main(arguments: list[str] | None = None) -> None:
    """Measure, write every sample where that was asked for, and print the medians and what the agent adds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5, help="processes with the agent, and as many without")
    parser.add_argument("--steps", type=int, default=5000, help="steps of each process")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every sample to FILE as JSON lines")
    options = parser.parse_args(arguments)
    records: list[dict[str, Any]] = []
    of_a_record = time_records()
    for index in range(options.rounds):
        for with_agent in (False, True) if index % 2 == 0 else (True, False):
            seconds = run(options.steps, with_agent=with_agent)
            records.append({"kind": "process", "round": index, "with_agent": with_agent, "seconds": seconds})
    header = environment.gpu_header(rounds=options.rounds, steps=options.steps)
    in_ring = {"kind": "record", "records_per_batch": RECORDS_PER_BATCH, "seconds": of_a_record}
    if options.output is not None:
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in [header, in_ring, *records])
        options.output.write_text(text, encoding="utf-8")
    medians = {(one["round"], one["with_agent"]): statistics.median(one["seconds"]) * 1e6 for one in records}
    added = [medians[index, True] - medians[index, False] for index in range(options.rounds)]
    without = [medians[index, False] for index in range(options.rounds)]
    print(f"{header['device_model'] or header['processor']}, torch {header['torch']}; {header['command']}")
    print(
        f"a step without the agent {statistics.median(without):.1f} us ({min(without):.1f}-{max(without):.1f}); "
        f"the agent adds {statistics.median(added):.1f} us ({min(added):.1f}-{max(added):.1f}), "
        f"medians of {options.rounds} rounds; its record alone takes {statistics.median(of_a_record) * 1e6:.2f} us "
        f"({min(of_a_record) * 1e6:.2f}-{max(of_a_record) * 1e6:.2f})"
    )


if __name__ == "__main__":
    main()
