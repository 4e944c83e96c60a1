"""Times one optimizer step of lucid_optim against its peers and prints one table.

Every optimizer runs once a round in one process, on its own copy of the parameters of a real detector; a second
process counts launches and memory, so that nothing traces the timed one.
"""

import argparse
import datetime as dt
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, only this file's folder is on the path

from tools.bench import environment  # noqa: E402
from tools.bench.measure import Workload, build_all, capture_note, run_rounds  # noqa: E402
from tools.bench.peers import REFERENCE, Candidate, candidates, installed_version, select, too_slow  # noqa: E402
from tools.bench.probe import probe  # noqa: E402
from tools.bench.table import Row, Section, Series, measured_row, render  # noqa: E402

SHAPES_FILE = Path(__file__).with_name("shapes.json")
NO_CLOCK = "a CPU has no device clock"
NOT_PROBED = "the process that counts them found nothing"
PROBED = ("num_launches", "kept_bytes", "peak_bytes", "reserved_bytes")
PROBE_SECONDS = 900
# A profiler that tears CUPTI down after each trace can break graphs recorded before the next one.
# Source: https://github.com/pytorch/pytorch/issues/75504
KEEP_CUPTI = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
# Title of the column of launches, and what it counts.
LAUNCHES = {
    "cpu": ("ATen ops", "ATen operations dispatched in one step"),
    "cuda": ("launches", "kernel and graph launches of one step"),
}
LEGEND = (
    "MuSGD and Muon are lucid_optim's; Muons update matrices only. wall, host, device: median ms of one step until the "
    "device is done, until step() returns, and between two device events. kept, peak, reserved: MiB allocated beyond "
    "parameters and gradients after a few steps; allocated and reserved at most during one step beyond that. ratio, "
    "range: wall time over that of {reference} in the same round, median, least to most; below 1 is faster. "
    "{launches}: {meaning}. -: not known."
)


def load_shapes(path: Path) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the shapes of each set in a file of names and shapes."""
    sets = json.loads(path.read_text(encoding="utf-8"))["sets"]
    return {name: tuple(tuple(shape) for _, shape in entries) for name, entries in sets.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", metavar="SET", help="shape sets (default: nano; on cuda, all)")
    parser.add_argument("--shapes-file", type=Path, default=SHAPES_FILE, help="where the shape sets are read")
    parser.add_argument("--rounds", type=int, help="rounds that are kept (default: 6; on cuda 20)")
    parser.add_argument("--warmup", type=int, help="rounds before them that are not (default: 2; on cuda 3)")
    parser.add_argument(
        "--optimizers", nargs="+", default=[], metavar="TEXT", help="only those whose name holds a TEXT"
    )
    parser.add_argument("--channels-last", action="store_true", help="4-d parameters in channels_last memory format")
    parser.add_argument("--capture", action="store_true", help="also with capture_updates=True, as always on cuda")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every sample to FILE as JSON lines")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line and fill in what depends on the device and on what was asked for.

    Raises:
        SystemExit: With status 2, after a message, if something asked for does not exist.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    on_cuda = options.device == "cuda"
    try:
        known = load_shapes(options.shapes_file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        parser.error(f"--shapes-file: {options.shapes_file} holds no shape sets: {error}")
    if wrong := [name for name, shapes in known.items() if any(size < 0 for shape in shapes for size in shape)]:
        parser.error(f"--shapes-file: negative sizes in {', '.join(wrong)}")
    options.shapes = list(dict.fromkeys(options.shapes or [])) or (list(known) if on_cuda else list(known)[:1])
    options.rounds = (20 if on_cuda else 6) if options.rounds is None else options.rounds
    options.warmup = (3 if on_cuda else 2) if options.warmup is None else options.warmup
    if options.rounds < 1 or options.warmup < 0:
        parser.error("--rounds must be at least 1 and --warmup at least 0")
    if on_cuda and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    if unknown := [name for name in options.shapes if name not in known]:
        parser.error(f"--shapes: {', '.join(unknown)} not in {', '.join(known)}")
    try:
        options.candidates = select(candidates(capture=options.capture or on_cuda), options.optimizers)
    except ValueError as error:
        parser.error(str(error))
    options.skipped = {} if on_cuda or options.optimizers else too_slow(options.candidates)
    return options


def workloads(options: argparse.Namespace) -> list[Workload]:
    """Return one workload a shape set."""
    known = load_shapes(options.shapes_file)
    device = torch.device(options.device)
    return [
        Workload(name=name, shapes=known[name], device=device, channels_last=options.channels_last)
        for name in options.shapes
    ]


def header(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the measurements were made with."""
    on_cuda = options.device == "cuda"
    driver, driver_reason = environment.driver()
    distributions = dict.fromkeys(candidate.distribution for candidate in options.candidates)
    return {
        "kind": "header",
        "command": environment.typed_command(sys.orig_argv, Path.cwd()),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "device": options.device,
        "device_model": torch.cuda.get_device_name() if on_cuda else None,
        "driver": driver,
        "driver_reason": driver_reason,
        "cuda": torch.version.cuda,
        "processor": environment.processor(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {name: installed_version(name) for name in distributions},
        "reference": REFERENCE,
        "rounds": options.rounds,
        "warmup": options.warmup,
        "channels_last": options.channels_last,
    }


def run_probe(command: Sequence[str]) -> tuple[dict[str, dict[str, Any]], str]:
    """Run the probing process; return what it found by shape set, and why nothing where it failed."""
    try:
        process = subprocess.run(
            command, stdout=subprocess.PIPE, timeout=PROBE_SECONDS, check=True, env={**os.environ, **KEEP_CUPTI}
        )
        found: dict[str, dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        return {}, f"the process that counts them failed: {type(error).__name__}"
    return found, ""


def measure(
    workload: Workload, options: argparse.Namespace, *, probed: Mapping[str, Any], no_probe: str
) -> tuple[list[dict[str, Any]], Section]:
    """Time a shape set's rounds.

    Returns:
        A record for each optimizer that was measured, and the section of the table.
    """
    reasons = dict(options.skipped)
    entries, not_built = build_all([one for one in options.candidates if one.name not in reasons], workload)
    series, failed = run_rounds(entries, workload, rounds=options.rounds, warmup=options.warmup)
    reasons |= not_built | failed
    by_name = {entry.candidate.name: entry for entry in entries}
    records, rows = [], []
    for candidate in options.candidates:
        name = candidate.name
        if name in reasons:
            rows.append(Row(shapes=workload.name, name=name, reason=reasons[name]))
            continue
        entry, found = by_name[name], probed.get(name, {})
        row = Row(
            shapes=workload.name,
            name=entry.label,
            num_tensors=len(entry.params),
            note=capture_note(entry.optimizer) or candidate.note,
        )
        rows.append(measured_row(row, series[name], reference=series.get(REFERENCE), probe=found))
        records.append(measurement(candidate, rows[-1], series[name], found=found, no_probe=no_probe))
    num_elements = sum(math.prod(shape) for shape in workload.shapes)
    title = f"{workload.name}: {len(workload.shapes)} tensors, {num_elements:,} elements"
    return records, Section(title=title, rows=rows)


def measurement(
    candidate: Candidate, row: Row, series: Series, *, found: Mapping[str, Any], no_probe: str
) -> dict[str, Any]:
    """Return the record of one optimizer on one shape set: every sample, and a reason for what is None."""
    reasons = dict(found.get("reasons", {}))
    if not series.device_ms:
        reasons["device_ms"] = NO_CLOCK
    unknown = [name for name in PROBED if getattr(row, name) is None]
    return {
        "kind": "measurement",
        "shapes": row.shapes,
        "optimizer": candidate.name,
        "label": row.name,
        "version": installed_version(candidate.distribution),
        "num_tensors": row.num_tensors,
        **asdict(series),
        "device_ms": series.device_ms or None,
        **{name: getattr(row, name) for name in PROBED},
        "num_kernels": found.get("num_kernels"),
        "launches_by_name": found.get("launches_by_name"),
        "note": row.note,
        "reasons": {**dict.fromkeys(unknown, no_probe or NOT_PROBED), **reasons},
    }


def facts(head: Mapping[str, Any]) -> dict[str, str]:
    """Return what the head of the table states."""
    versions = [f"{name} {found}" for name, found in head["versions"].items() if found and name != "torch"]
    machine = f"{head['processor'] or 'unknown processor'}, {head['num_threads']} threads"
    if head["device"] == "cuda":
        driver = head["driver"] or "unknown"
        machine = f"{head['device_model']}, driver {driver}, CUDA {head['cuda']}; host {machine}"
    memory_format = ", channels_last" if head["channels_last"] else ""
    return {
        "device": machine,
        "versions": ", ".join([f"python {head['python']}", f"torch {head['torch']}", *versions]),
        "command": head["command"],
        "method": f"{head['rounds']} interleaved rounds after {head['warmup']} of warm-up{memory_format}",
        "date": head["date"],
    }


def render_all(head: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """Return the table."""
    launches, meaning = LAUNCHES[head["device"]]
    legend = LEGEND.format(reference=head["reference"], launches=launches, meaning=meaning)
    return render(sections, facts=facts(head), launches=launches, legend=legend)


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the samples where that was asked for, and print the table."""
    options = parse(arguments)
    if options.probe:
        wanted = [one for one in options.candidates if one.name not in options.skipped]
        found = {workload.name: probe(wanted, workload) for workload in workloads(options)}
        print(json.dumps(found))
        return
    head = header(options)
    records, sections = [head], []
    if options.output is not None:
        try:
            write(options.output, records)  # a path that cannot be written fails here, not after the measurements
        except OSError as error:
            sys.exit(f"--output: {options.output} cannot be written: {error.strerror}")
    print("counting launches and memory", file=sys.stderr)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    probed, no_probe = run_probe([sys.executable, __file__, *typed, "--probe"])
    for workload in workloads(options):
        print(f"timing {workload.name}", file=sys.stderr)
        measured, section = measure(workload, options, probed=probed.get(workload.name, {}), no_probe=no_probe)
        records += measured
        sections.append(section)
    records += [{"kind": "row", **asdict(row)} for section in sections for row in section.rows]
    if options.output is not None:
        write(options.output, records)
    print(render_all(head, sections))


if __name__ == "__main__":
    main()
