"""One small good report with samples of every kind, from which all damaged ones are made."""

import hashlib
from pathlib import Path
from typing import Any

from cli.reports import WALLS, write_report
from lucid_profiler import jsonio

UUID = "GPU-0a1b2c3d-0000-1111-2222-333344445555"
BEGIN_NS = 123_456_789_012_345
"""When the first run began, to the nanosecond."""
RUN_NS = 200 * 10**9
NUM_STEPS = 4
NUM_SAMPLES = 3
COMMAND = ("python", "träin.py", "--note", "first\u2028second\u0085third")

__all__ = ["BEGIN_NS", "COMMAND", "NUM_SAMPLES", "NUM_STEPS", "RUN_NS", "UUID", "good_report", "relinked"]


def good_report(path: Path) -> bytes:
    """Write the report and return its bytes, the same ones every time."""
    shares = (("load", 0.25), ("tr\u00e4in", 0.5))
    write_report(path, WALLS[:3], command=COMMAND, phases={"native": shares, "captured": shares})
    records: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        fields = jsonio.loads(line)
        if fields["t"] == "run":
            _shift(fields)
        records.append(fields)
        if fields["t"] == "run":
            records += _samples(fields["run"])
    records[-1]["num_records"] = len(records) - 1
    data = relinked(records)
    path.write_bytes(data)
    return data


def relinked(records: list[dict[str, Any]]) -> bytes:
    """Return a report whose links and numbers are right whatever its records say."""
    out, prev = b"", ""
    for seq, fields in enumerate(records):
        line = jsonio.dumps({**fields, "seq": seq, "prev": prev})
        prev = hashlib.sha256(line).hexdigest()[:16]
        out += line + b"\n"
    return out


def _shift(run: dict[str, Any]) -> None:
    """Move a run to its place on the machine's clock; one begins when the one before is over."""
    for interval in (run["wall"], *run["phases"]):
        for name in ("begin_ns", "end_ns"):
            interval[name] += BEGIN_NS + run["run"] * RUN_NS


def _samples(run: int) -> list[dict[str, Any]]:
    begin_ns = BEGIN_NS + run * RUN_NS
    steps = [begin_ns + index * 10**9 + 1 for index in range(NUM_STEPS)]
    times = [begin_ns + index * 100_000_000 + 7 for index in range(NUM_SAMPLES)]
    series: dict[str, dict[str, Any]] = {
        "steps": {"begin_ns": steps, "end_ns": [at + 5_000_001 for at in steps], "optimizer": [0] * NUM_STEPS},
        "device_steps": {
            "begin_ns": steps,
            "optimizer": [0] * NUM_STEPS,
            "step": list(range(1, NUM_STEPS + 1)),
            "optimizer_device_ns": [2_000_000, None, 2_500_000, 2_000_000],
            "step_device_ns": [None, 9_000_000, 9_000_001, 9_000_000],
        },
        "allocator": {
            "mono_ns": times,
            "step": [1, 2, 3],
            "device": [0, 0, 0],
            "allocated_bytes": [1 << 20, 2 << 20, 2 << 20],
            "reserved_bytes": [4 << 20] * 3,
            "num_ooms": [0, 0, 0],
        },
        "host": {"mono_ns": times, "late_ns": [0, 50, 60], "cpu_time_s": [1.0, 1.05, 1.25], "rss_bytes": [10, 11, 12]},
        f"gpu:{UUID}": {
            "mono_ns": times,
            "late_ns": [0, 50, 60],
            "memory_used_bytes": [1000, 2000, 2000],
            "power_draw_mw": [312_345, 313_000, None],
            "clock_sm_mhz": [1980, 1980, 1755],
            "utilization_gpu_percent": [5, 99, 99],
            "temperature_c": [40, 41, 41],
            "energy_mj": [None, None, None],
        },
        f"memory:{UUID}": {"mono_ns": times[:1], "device_used_bytes": [2000], "residue_bytes": [-3]},
    }
    return [{"t": "samples", "run": run, "series": name, "columns": columns} for name, columns in series.items()]
