"""Runs the tests that need a CUDA device and writes down on what they ran, or compares that with the sources.

The evidence names the sources by one SHA-256: over the files of `packages/optim/src` that git would track, Python files
in the order of their POSIX paths, each as path, NUL, length in decimal, NUL, bytes.
"""

import argparse
import datetime as dt
import hashlib
import json
import os
import platform
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = "packages/optim/src"
EVIDENCE = ROOT / "docs" / "evidence" / "gpu-tests.json"
sys.path.insert(0, str(ROOT))  # run as a script, only this file's folder is on the path


def digest(root: Path = ROOT) -> str:
    """Return the SHA-256 of the optimizer's sources."""
    total = hashlib.sha256()
    files = {path.relative_to(root).as_posix(): path for path in (root / SOURCES).rglob("*.py")}
    for name in sorted(files):
        content = files[name].read_bytes()
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


class _Counts:
    """Counts outcomes as pytest reports them."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: when it ran, or when it was skipped or failed around that."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1


def run(output: Path, arguments: list[str]) -> int:
    """Run the tests, write the evidence whatever came out, and return pytest's exit code."""
    import torch  # noqa: PLC0415 - the comparison does without
    from tools.bench import environment  # noqa: PLC0415

    os.environ["LUCID_REQUIRE_GPU"] = "1"  # a skipped test proves nothing
    counts = _Counts()
    code = pytest.main(["-m", "gpu", *arguments], plugins=[counts])
    evidence: dict[str, Any] = {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": environment.driver()[0],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": shlex.join(["python", "tools/gpu_tests.py", *arguments]),
        "tests": [argument for argument in arguments if argument.startswith("tests/")] or ["tests"],
        "passed": counts.outcomes["passed"],
        "skipped": counts.outcomes["skipped"],
        "failed": counts.outcomes["failed"],
        "exit_code": int(code),
        "sources": SOURCES,
        "sha256": digest(),
    }
    output.write_text(json.dumps(evidence, indent=2) + "\n", encoding="utf-8")
    return int(code)


def sentence(evidence: dict[str, Any]) -> str:
    """Return what the evidence says, as the README quotes it."""
    return (
        f"{evidence['device']}, driver {evidence['driver']}, torch {evidence['torch']}, Python {evidence['python']}, "
        f"{evidence['date'][:10]}: {evidence['passed']} passed, {evidence['failed']} failed, "
        f"{evidence['skipped']} skipped (of {', '.join(evidence['tests'])})"
    )


def check() -> int:
    """Print whether the evidence is of the present sources; return 0 if it is and nothing failed, else 1."""
    try:
        evidence = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"gpu evidence: none ({error}); run `make test-gpu` on a machine with a GPU")
        return 1
    is_current = evidence["sha256"] == digest()
    is_good = evidence["failed"] == evidence["skipped"] == evidence["exit_code"] == 0 and evidence["passed"] > 0
    state = "of these sources" if is_current else "OF OTHER SOURCES, run `make test-gpu` again"
    print(f"gpu evidence {state}: {sentence(evidence)}")
    return 0 if is_current and is_good else 1


def main() -> int:
    """Run or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare the evidence with the sources; needs no GPU")
    parser.add_argument("--output", type=Path, default=EVIDENCE, metavar="FILE", help="where the evidence is written")
    options, arguments = parser.parse_known_args()
    return check() if options.check else run(options.output, arguments)


if __name__ == "__main__":
    sys.exit(main())
