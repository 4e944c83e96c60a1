"""All areas looked at once, in order."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lucid_profiler.checkup.catalogue import CATALOGUE
from lucid_profiler.checkup.container import look_at_container
from lucid_profiler.checkup.driver import look_at_driver
from lucid_profiler.checkup.environment import environment_findings
from lucid_profiler.checkup.finding import LEVELS, Finding, Level
from lucid_profiler.checkup.host import look_at_host
from lucid_profiler.checkup.interpreter import ask_interpreter
from lucid_profiler.checkup.places import look_at_places
from lucid_profiler.checkup.processes import look_at_processes

__all__ = ["Checkup", "check_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What everything came to.

    Attributes:
        python: The interpreter that was asked, as the user named it.
        requires_gpu: Whether a GPU was asked for.
        findings: In the order of the catalogue.
    """

    python: str
    requires_gpu: bool
    findings: tuple[Finding, ...]

    @property
    def is_usable(self) -> bool:
        """Tell whether anything can be measured."""
        return not self.counts["problem"]

    @property
    def counts(self) -> dict[Level, int]:
        """Return how many findings there are of each level."""
        levels = [finding.level for finding in self.findings]
        return {level: levels.count(level) for level in LEVELS}

    def plain(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "kind": "lucid.doctor",
            "version": 1,
            "python": self.python,
            "requires_gpu": self.requires_gpu,
            "usable": self.is_usable,
            "counts": dict(self.counts),
            "findings": [finding.plain() for finding in self.findings],
        }


def check_up(
    python: str,
    *,
    optimizer: str,
    environ: Mapping[str, str],
    directory: Path,
    requires_gpu: bool = False,
    root: Path = Path("/"),
) -> Checkup:
    """Look at everything once; this takes some seconds and changes nothing.

    Args:
        python: The interpreter of the program, a path or a name in PATH.
        optimizer: Class of the optimizer that captures, `module:name`.
        environ: Environment that the program would get.
        directory: Where reports are written.
        requires_gpu: A program that could not use a GPU cannot be measured.
        root: Where /proc and /sys are.
    """
    driver_findings, driver = look_at_driver(environ, proc=root / "proc")
    host_findings = [
        *look_at_host(root),
        *look_at_container(root),
        *look_at_places(directory, environ),
        *look_at_processes(root),
    ]
    # Last, since loading torch is a load of its own.
    told = ask_interpreter(python, optimizer=optimizer, environ=environ)
    findings = [
        *driver_findings,
        *host_findings,
        *environment_findings(
            told, python=python, environ=environ, directory=directory, driver=driver, requires_gpu=requires_gpu
        ),
    ]
    order = {code: number for number, code in enumerate(CATALOGUE)}
    return Checkup(
        python=python,
        requires_gpu=requires_gpu,
        # Sorting is stable: the findings about one device stay in the devices' order.
        findings=tuple(sorted(findings, key=lambda finding: order[finding.code])),
    )
