"""The findings of a check-up as text: good ones in a line each, the others with why they matter and what to do."""

import textwrap
from collections.abc import Iterator

from lucid_cli.reporters.layout import WIDTH
from lucid_cli.reporters.words import counted
from lucid_profiler.checkup.examine import Checkup
from lucid_profiler.checkup.finding import AREAS, Finding

_CODE_COLUMN = 10
_TEXT_COLUMN = 30

__all__ = ["render_checkup"]


def render_checkup(checkup: Checkup) -> str:
    """Return a check-up as lines of at most 100 columns, areas in their order, and what it all comes to at the end."""
    lines: list[str] = []
    for area in AREAS:
        findings = [finding for finding in checkup.findings if finding.area == area]
        if findings:
            lines += [area, *(line for finding in findings for line in _finding(finding, checkup)), ""]
    return "\n".join([*lines, _conclusion(checkup)]) + "\n"


def _finding(finding: Finding, checkup: Checkup) -> Iterator[str]:
    found = finding.found
    if finding.subject is not None and _is_one_of_several(finding, checkup):
        found = f"{finding.subject}: {found}"
    head = f"  {finding.level:<{_CODE_COLUMN - 2}}{finding.code:<{_TEXT_COLUMN - _CODE_COLUMN}}"
    first, *more = _wrapped(found)
    yield head + first
    if finding.level != "ok":
        more += _wrapped(f"why: {finding.why}") + _wrapped(f"do: {finding.remedy}")
    yield from (" " * _TEXT_COLUMN + line for line in more)


def _is_one_of_several(finding: Finding, checkup: Checkup) -> bool:
    return sum(other.code == finding.code for other in checkup.findings) > 1


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH - _TEXT_COLUMN, break_on_hyphens=False) or [""]


def _conclusion(checkup: Checkup) -> str:
    counts = checkup.counts
    words = [counted(counts[level], level) for level in ("problem", "warning", "note")]
    usable = "usable" if checkup.is_usable else "not usable"
    return f"{usable}: {', '.join(words)}, {counts['ok']} ok"
