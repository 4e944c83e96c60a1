"""Kernels and launches of one more, traced process of each arm."""

from collections.abc import Sequence

from lucid_cli.reporters.layout import columns, labelled
from lucid_cli.reporters.words import counted, reason_words
from lucid_profiler.kernels import KernelRow, KernelTable
from lucid_profiler.reader import Report
from lucid_profiler.records import Kernels

_MAX_ROWS = 8
_MAX_NAME_CHARS = 52

__all__ = ["render_kernels"]


def render_kernels(report: Report) -> list[str]:
    """Return a paragraph and a table for each arm that was traced."""
    return [line for kernels in report.kernels for line in _arm(kernels)]


def _arm(kernels: Kernels) -> list[str]:
    table = kernels.table
    if table is None:
        return labelled("kernels", f"{kernels.arm}: none, {reason_words(kernels.reason or 'unknown')}")
    lines = labelled("kernels", f"{kernels.arm}, a process of its own that is never timed: {_head(table)}")
    if table.rows is None:
        return [*lines, *labelled("", table.reason or "nothing was traced")]
    lines += _rows(table.rows)
    if table.replay_rows:
        lines += ["", *labelled("", "inside graph replays"), *_rows(table.replay_rows)]
    elif table.replay_reason:
        lines += labelled("", f"kernels inside graph replays are withheld: {table.replay_reason}")
    return lines + [line for note in table.notes for line in labelled("", note)]


def _head(table: KernelTable) -> str:
    text = f"{counted(table.num_steps, 'step')} after {table.num_warmup_steps} of warm-up"
    per_step = table.launches_per_step
    if per_step:
        text += "; launches a step: " + ", ".join(f"{value:.4g} {name}" for name, value in per_step.items())
    return text


def _rows(rows: Sequence[KernelRow]) -> list[str]:
    ordered = sorted(rows, key=lambda row: (-row.total_ns, row.name))
    cells = [["", "a step", "median", "time a step"]]
    cells += [
        [
            _shown(row.name),
            f"{row.count_per_step:.4g}",
            f"{row.median_ns / 1e3:.2f} us",
            f"{row.ns_per_step / 1e3:.1f} us",
        ]
        for row in ordered[:_MAX_ROWS]
    ]
    rest = ordered[_MAX_ROWS:]
    if rest:
        total = sum(row.ns_per_step for row in rest)
        number = sum(row.count_per_step for row in rest)
        cells.append([f"and {len(rest)} more", f"{number:.4g}", "", f"{total / 1e3:.1f} us"])
    return columns(cells)


def _shown(name: str) -> str:
    return name if len(name) <= _MAX_NAME_CHARS else name[: _MAX_NAME_CHARS - 1] + "…"
