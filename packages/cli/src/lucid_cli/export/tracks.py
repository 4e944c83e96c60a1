"""Which counter of a timeline each column of a report's samples belongs to, and in which unit it is shown there.

Names carry their unit, so a column that a later version adds finds its place by itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["PLACES", "TIMES", "Track", "source_of", "time_column", "track_of", "tracks_of"]

TIMES = ("mono_ns", "begin_ns")
"""Columns that say when; the first that a series has counts."""
PLACES = frozenset({*TIMES, "end_ns", "optimizer", "step", "device"})
"""Columns that say when or of what a row is, and not how much."""
_UUID_CHARS = 12  # of `GPU-0a1b2c3d-…`: enough to tell the devices of one machine apart
# Suffix of a name, unit, and how many of the column's units make one of it.
_UNITS = (
    ("_bytes", "bytes", 1),
    ("_percent", "%", 1),
    ("_mw", "W", 1000),
    ("_mj", "J", 1000),
    ("_mhz", "MHz", 1),
    ("_ns", "ms", 1_000_000),
    ("_s", "s", 1),
    ("_c", "°C", 1),
)
_GROUPS = {
    "read_bytes": "file access",
    "write_bytes": "file access",
    "late_ns": "sampling lateness",
    "clocks_event_reasons": "clocks event reasons",
    "num_alloc_retries": "allocator trouble",
    "num_ooms": "allocator trouble",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A counter: columns of one kind and unit that are drawn together."""

    name: str
    columns: tuple[tuple[str, str, int], ...]
    """Column, its name on the track, and the divisor that brings it into the track's unit."""


def time_column(columns: Iterable[str]) -> str | None:
    """Return the column that says when; None if there is none."""
    names = set(columns)
    return next((name for name in TIMES if name in names), None)


def source_of(series: str) -> str:
    """Return what a series is of, short enough for the label of a track."""
    kind, _, uuid = series.partition(":")
    uuid = uuid.partition(":")[0][:_UUID_CHARS]
    return {"gpu": uuid, "memory": f"account {uuid}"}.get(kind, kind)


def track_of(column: str) -> tuple[str, str, int]:
    """Return a column's track within its series, its name there, and the divisor.

    >>> track_of("power_draw_mw")
    ('power [W]', 'draw', 1000)
    >>> track_of("process_memory_bytes")
    ('memory [bytes]', 'process_memory', 1)
    >>> track_of("num_threads")
    ('num_threads', 'value', 1)
    """
    suffix, unit, divisor = next((one for one in _UNITS if column.endswith(one[0])), ("", "", 1))
    name = column.removesuffix(suffix)
    group = _GROUPS.get(column)
    if group is None and not unit:
        return column, "value", 1
    if group is None:
        group, _, rest = ("memory", "", name) if unit == "bytes" else name.partition("_")
        name = (rest or name).removeprefix("memory_") if unit == "bytes" else rest or "value"
    return f"{group} [{unit}]" if unit else group, name, divisor


def tracks_of(columns: Iterable[str], source: str) -> tuple[Track, ...]:
    """Return the tracks of a series' columns, in their order."""
    found: dict[str, list[tuple[str, str, int]]] = {}
    for column in columns:
        if column not in PLACES:
            track, name, divisor = track_of(column)
            found.setdefault(track, []).append((column, name, divisor))
    return tuple(Track(name=f"{source} {name}".strip(), columns=tuple(parts)) for name, parts in found.items())
