"""The arithmetic and the layout of the step benchmark: order of a round, medians, ratios, rows, text. Pure."""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["WIDTH", "Row", "Sample", "Section", "Series", "Spread", "measured_row", "ratios", "render", "round_order"]

WIDTH = 110
MIB = 2**20
UNKNOWN = "-"
NAME_WIDTH = 23
# Title and width of the columns after the name; the launches' title depends on the device.
COLUMNS = (
    ("tensors", 7),
    ("wall", 6),
    ("host", 6),
    ("device", 6),
    ("", 8),
    ("kept", 6),
    ("peak", 6),
    ("reserved", 8),
    ("ratio", 6),
    ("range", 18),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The times of one step.

    Attributes:
        wall_ms: Until the device was done.
        host_ms: Until `step` returned.
        device_ms: Between two events on the device; None where it has no clock.
    """

    wall_ms: float
    host_ms: float
    device_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The raw samples of one optimizer, one a round.

    Attributes:
        wall_ms: See `Sample`.
        host_ms: See `Sample`.
        device_ms: See `Sample`; empty where the device has no clock.
        positions: When in its round each step ran, from 0.
    """

    wall_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    device_ms: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, sample: Sample, position: int) -> None:
        """Append a round's sample."""
        self.wall_ms.append(sample.wall_ms)
        self.host_ms.append(sample.host_ms)
        if sample.device_ms is not None:
            self.device_ms.append(sample.device_ms)
        self.positions.append(position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median and the range around it."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; what is not known is None.

    Attributes:
        shapes: Name of the shape set.
        name: The optimizer, and in parentheses what differs from its defaults.
        num_tensors: Parameters that it updates.
        wall_ms: Median over the rounds.
        host_ms: Likewise.
        device_ms: Likewise.
        num_launches: Kernel and graph launches of one step; on a CPU, ATen operations.
        kept_bytes: Allocated after a few steps, beyond parameters and gradients.
        peak_bytes: Allocated at most during one more step, beyond what was before it.
        reserved_bytes: Likewise reserved from the device.
        ratio: Per-round wall time over the reference's.
        note: What ran, where that needs saying.
        reason: Why nothing was measured; empty where it was.
    """

    shapes: str
    name: str
    num_tensors: int | None = None
    wall_ms: float | None = None
    host_ms: float | None = None
    device_ms: float | None = None
    num_launches: int | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    ratio: Spread | None = None
    note: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The rows of one shape set under a title."""

    title: str
    rows: list[Row]


def round_order(count: int, round_number: int) -> list[int]:
    """Return the order in which a round runs `count` optimizers: forwards in even rounds, backwards in odd ones."""
    order = list(range(count))
    return order if round_number % 2 == 0 else order[::-1]


def ratios(values: Sequence[float], reference: Sequence[float]) -> Spread | None:
    """Return the median and the range of the rounds' ratios, or None without a reference.

    Args:
        values: One sample a round.
        reference: The reference's samples of the same rounds.
    """
    if not values or not reference:
        return None
    by_round = [value / other for value, other in zip(values, reference, strict=True)]
    return Spread(median=statistics.median(by_round), least=min(by_round), most=max(by_round))


def measured_row(
    row: Row, series: Series, *, reference: Series | None = None, probe: Mapping[str, int | None] | None = None
) -> Row:
    """Return a row with its measurements filled in.

    Args:
        row: Names the shape set and the optimizer.
        series: The optimizer's samples.
        reference: The reference optimizer's samples, where there are any.
        probe: `num_launches`, `kept_bytes`, `peak_bytes` and `reserved_bytes`, as far as they are known.
    """
    counts = probe or {}
    return Row(
        shapes=row.shapes,
        name=row.name,
        num_tensors=row.num_tensors,
        wall_ms=statistics.median(series.wall_ms),
        host_ms=statistics.median(series.host_ms),
        device_ms=statistics.median(series.device_ms) if series.device_ms else None,
        num_launches=counts.get("num_launches"),
        kept_bytes=counts.get("kept_bytes"),
        peak_bytes=counts.get("peak_bytes"),
        reserved_bytes=counts.get("reserved_bytes"),
        ratio=ratios(series.wall_ms, reference.wall_ms) if reference else None,
        note=row.note,
    )


def _significant(value: float | None) -> str:
    """Return three significant digits, at most four of them behind the point, never in scientific notation."""
    if value is None:
        return UNKNOWN
    decimals = 2 if value <= 0 else min(4, max(0, 2 - math.floor(math.log10(value))))
    return f"{value:.{decimals}f}"


def _whole(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _mib(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value / MIB:.1f}"


def _line(name: str, cells: Sequence[str]) -> str:
    padded = [cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)]
    return " ".join([name.ljust(NAME_WIDTH), *padded]).rstrip()


def _indented(text: str) -> str:
    return "  " + textwrap.shorten(text, WIDTH - 2, placeholder=" ...")


def _row_lines(row: Row) -> list[str]:
    """Return a row's line and, where it has one, the line of its note."""
    if row.reason:
        text = f"not measured: {row.reason}"
        return [f"{row.name:<{NAME_WIDTH}} {textwrap.shorten(text, WIDTH - NAME_WIDTH - 1, placeholder=' ...')}"]
    spread = row.ratio
    line = _line(
        row.name,
        [
            _whole(row.num_tensors),
            *(_significant(value) for value in (row.wall_ms, row.host_ms, row.device_ms)),
            _whole(row.num_launches),
            *(_mib(value) for value in (row.kept_bytes, row.peak_bytes, row.reserved_bytes)),
            UNKNOWN if spread is None else _significant(spread.median),
            UNKNOWN if spread is None else f"{_significant(spread.least)} to {_significant(spread.most)}",
        ],
    )
    return [line, _indented(row.note)] if row.note else [line]


def render(sections: Sequence[Section], *, facts: Mapping[str, str], launches: str, legend: str) -> str:
    """Return the table as text of at most `WIDTH` columns.

    Args:
        sections: One a shape set.
        facts: What the head of the table states, by label.
        launches: Title of the column of launches.
        legend: What the columns mean, for the foot.
    """
    label_width = max(map(len, facts), default=0) + 1
    lines: list[str] = []
    for label, text in facts.items():
        lines += textwrap.wrap(
            text, WIDTH, initial_indent=label.ljust(label_width), subsequent_indent=" " * label_width
        ) or [label]
    for section in sections:
        lines += ["", section.title, _line("optimizer", [title or launches for title, _ in COLUMNS])]
        for row in section.rows:
            lines += _row_lines(row)
    return "\n".join([*lines, "", *textwrap.wrap(legend, WIDTH)])
