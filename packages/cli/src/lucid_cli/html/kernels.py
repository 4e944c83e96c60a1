"""Kernels and launches of the traced processes, one table over all arms."""

from collections.abc import Sequence
from dataclasses import dataclass

from lucid_cli.html.markup import Html, details, listed, table, tag
from lucid_cli.html.section import Section, missing
from lucid_cli.reporters.words import counted, reason_words
from lucid_profiler.kernels import KernelRow, KernelTable
from lucid_profiler.reader import Report

MAX_SHOWN = 15
MAX_ROWS = 200
_MAX_NAME_CHARS = 400
_SHORT_CHARS = 60

__all__ = ["kernels_section"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """What makes rows of two arms the same row."""

    name: str
    where: str


def kernels_section(report: Report) -> Section:
    """Return the table, and what each traced process was, or why there is none."""
    parts: list[Html] = []
    if not report.kernels:
        parts.append(missing("No process was traced; --kernels of `lucid profile run` traces one of each arm."))
    arms = {one.arm: one.table for one in report.kernels if one.table is not None}
    heads = [f"{arm}: {_head(found)}" for arm, found in arms.items()]
    heads += [
        f"{one.arm}: no table, {reason_words(one.reason or 'unknown')}" for one in report.kernels if one.table is None
    ]
    if heads:
        parts.append(tag("p", "Traced processes are never timed: their times are not those of the runs."))
        parts.append(listed(heads))
    parts += _tables(arms)
    return Section(ident="kernels", title="Kernels", parts=parts)


def _head(found: KernelTable) -> str:
    words = [f"{counted(found.num_steps, 'step')} after {found.num_warmup_steps} of warm-up"]
    if found.launches_per_step:
        words.append(
            "launches a step: " + ", ".join(f"{num:.4g} {name}" for name, num in found.launches_per_step.items())
        )
    if found.rows is None:
        words.append(found.reason or "nothing was traced")
    if found.replay_reason:
        words.append(f"kernels inside graph replays are withheld: {found.replay_reason}")
    return "; ".join([*words, *found.notes])


def _tables(arms: dict[str, KernelTable]) -> list[Html]:
    rows: dict[_Key, dict[str, KernelRow]] = {}
    for arm, found in arms.items():
        for row in found.rows or ():
            rows.setdefault(_Key(name=row.name, where=row.kind), {})[arm] = row
        for row in found.replay_rows or ():
            rows.setdefault(_Key(name=row.name, where=f"{row.kind} in replays"), {})[arm] = row
    if not rows:
        return []
    ordered = sorted(rows.items(), key=lambda item: (-_longest(item[1]), item[0].name, item[0].where))
    first, rest = ordered[:MAX_SHOWN], ordered[MAX_SHOWN:MAX_ROWS]
    parts = [_table(list(arms), first, "Kernels by their time")]
    if rest:
        words = f"{len(rest)} more" + (f" of {len(ordered) - MAX_SHOWN}" if len(ordered) > MAX_ROWS else "")
        parts.append(details(words, _table(list(arms), rest, "More kernels by their time")))
    return parts


def _longest(by_arm: dict[str, KernelRow]) -> float:
    return max(row.ns_per_step for row in by_arm.values())


def _name(name: str) -> Html:
    """Return the name of a kernel, what is beyond its first words on demand."""
    shown = name.removeprefix("void ")
    if len(shown) <= _SHORT_CHARS:
        return tag("code", shown)
    return details(f"{shown[:_SHORT_CHARS]}…", tag("code", name[:_MAX_NAME_CHARS]))


def _table(arms: Sequence[str], rows: Sequence[tuple[_Key, dict[str, KernelRow]]], caption: str) -> Html:
    head = ["kernel", "kind", *(f"{arm}, {what}" for arm in arms for what in ("a step", "median, µs", "µs a step"))]
    body = []
    for key, by_arm in rows:
        cells = [_name(key.name), key.where]
        for arm in arms:
            row = by_arm.get(arm)
            cells.extend(
                ["-"] * 3
                if row is None
                else [f"{row.count_per_step:.4g}", f"{row.median_ns / 1e3:.2f}", f"{row.ns_per_step / 1e3:.1f}"]
            )
        body.append(cells)
    return table(head, body, caption=caption, num_text=2)
