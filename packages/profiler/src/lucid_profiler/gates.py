"""Limits on the difference of two reports, such as `wall<=+1%`: what they say, and whether they hold. Pure.

A limit is a change of b against a, of the arms' paired effect: in percent the ratio of the paired ratios, in a unit the
difference of what the other arm adds. A gate fails only if the whole interval is past the limit, an expectation holds
only if the whole interval is within it.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from lucid_profiler.between import ROUNDING
from lucid_profiler.diff import Difference
from lucid_profiler.diff_rows import DiffRow
from lucid_profiler.pairs import WelchInterval

__all__ = ["Gate", "GateKind", "GateResult", "GateStatus", "judge_gate", "parse_gate", "without_verdict"]

GateKind = Literal["gate", "expect"]
GateStatus = Literal["passed", "failed", "inconclusive", "no_verdict"]

_GATE = re.compile(r"\s*([^\s<>=]+)\s*(<=|>=)\s*([+-]?)(\d+(?:\.\d*)?|\.\d+)\s*(%|[A-Za-zµ]*)\s*", re.ASCII)
# Name: the unit of the record that it is one of, and how many of those it is.
_UNITS: dict[str, tuple[str, float]] = {
    "": ("1", 1.0),
    "B": ("By", 1.0),
    "kB": ("By", 1e3),
    "MB": ("By", 1e6),
    "GB": ("By", 1e9),
    "KiB": ("By", 2.0**10),
    "MiB": ("By", 2.0**20),
    "GiB": ("By", 2.0**30),
    "ns": ("s", 1e-9),
    "us": ("s", 1e-6),
    "µs": ("s", 1e-6),
    "ms": ("s", 1e-3),
    "s": ("s", 1.0),
    "mJ": ("J", 1e-3),
    "J": ("J", 1.0),
    "kJ": ("J", 1e3),
    "mW": ("W", 1e-3),
    "W": ("W", 1.0),
    "MHz": ("MHz", 1.0),
}
_FORM = "write METRIC<=LIMIT or METRIC>=LIMIT, LIMIT being a change such as +1%, -5%, +64MiB or -20ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One limit, as it was written."""

    text: str
    kind: GateKind
    metric: str
    is_upper: bool
    """Whether the difference may be at most the limit; else it must be at least that."""
    limit: float
    """In `unit`."""
    unit: str
    """`%`, or a unit of the table above; empty for counts."""

    @property
    def size(self) -> float:
        """The limit in the scale of the difference: a logarithm for percent, else the record's unit."""
        if self.unit != "%":
            return self.limit * _UNITS[self.unit][1]
        return math.log1p(self.limit / 100) if self.limit > -100 else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """Whether one limit holds between two reports."""

    gate: Gate
    status: GateStatus
    reason: str
    """A code: where the interval lies, or why there is no verdict."""
    low: float | None
    """The interval in the gate's unit; None without a verdict, and of amounts that are withheld."""
    high: float | None


def parse_gate(text: str, kind: GateKind) -> Gate:
    """Read a limit.

    Raises:
        ValueError: If it has another form; the message has the remedy.
    """
    match = _GATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no limit: {_FORM}")
    metric, relation, sign, digits, unit = match.groups()
    size = float(digits)
    if not sign and size:
        raise ValueError(f"{text!r} has no sign: a limit is a change, so write +{digits}{unit} or -{digits}{unit}")
    if unit != "%" and unit not in _UNITS:
        raise ValueError(f"{text!r} has an unknown unit {unit!r}; known are %, {', '.join(filter(None, _UNITS))}")
    limit = -size if sign == "-" else size
    if unit == "%" and limit < -100:
        raise ValueError(f"{text!r} asks for a change below -100 %, which nothing can have")
    return Gate(text=text, kind=kind, metric=metric, is_upper=relation == "<=", limit=limit, unit=unit)


def judge_gate(gate: Gate, difference: Difference) -> GateResult:
    """Hold a limit against the difference of two reports.

    Raises:
        ValueError: If its unit is none of the metric's.
    """
    rows = {row.metric: row for row in (*difference.rows, *difference.counters)}
    row = rows.get(gate.metric)
    if row is None:
        lost = gate.metric in {*difference.only_in_a, *difference.only_in_b}
        return without_verdict(gate, "only_in_one_report" if lost else "not_recorded")
    if gate.unit != "%" and _UNITS[gate.unit][0] != row.unit:
        known = ", ".join(["%", *(name for name, (unit, _) in _UNITS.items() if unit == row.unit and name)])
        raise ValueError(f"{gate.text!r}: {gate.metric} is not measured in {gate.unit or 'counts'}; write {known}")
    if (obstacle := _obstacle(gate, row, canary_limit=difference.canary_limit)) is not None:
        return without_verdict(gate, obstacle)
    interval = row.difference if gate.unit == "%" else row.amount
    if interval is None:
        return without_verdict(gate, row.a.effect_reason or row.b.effect_reason or "too_few_pairs")
    status, reason = _status(gate, interval)
    is_withheld = gate.unit != "%" and difference.hides_absolute and row in difference.rows
    low, high = (None, None) if is_withheld else _in_unit(gate, interval)
    return GateResult(gate=gate, status=status, reason=reason, low=low, high=high)


def _obstacle(gate: Gate, row: DiffRow, *, canary_limit: float) -> str | None:
    """Return why a limit on a row has no verdict."""
    if row.bent_by is not None and row.verdict != "not_comparable":
        return row.bent_by
    if gate.unit == "%":
        return row.reason if row.verdict == "not_comparable" else None
    if row.verdict == "not_comparable" and row.reason not in {"zero_baseline", "not_positive", "no_ratio"}:
        return row.reason
    if row.amount is None:
        return "non_finite_amount" if row.a.unit == row.b.unit else "other_unit"
    return None if _has_quiet_base(row, canary_limit) else "canary"


def _has_quiet_base(row: DiffRow, canary_limit: float) -> bool:
    """Return whether the base arms are near enough to compare amounts; without logarithms, by their medians."""
    if row.canary is not None:
        return row.canary.is_quiet
    a, b = row.a.base.median, row.b.base.median
    if a is None or b is None:
        return False
    return a == b or abs(b / a - 1 if a else math.inf) <= canary_limit / 100 + ROUNDING


def without_verdict(gate: Gate, reason: str) -> GateResult:
    """Return that a limit is not judged, with the code of why."""
    return GateResult(gate=gate, status="no_verdict", reason=reason, low=None, high=None)


def _in_unit(gate: Gate, interval: WelchInterval) -> tuple[float, float]:
    if gate.unit == "%":
        ends = (interval.low, interval.high)
        low, high = (100 * math.expm1(min(end, 700.0)) if end < math.inf else end for end in ends)
        return low, high
    scale = _UNITS[gate.unit][1]
    return interval.low / scale, interval.high / scale


def _status(gate: Gate, interval: WelchInterval) -> tuple[GateStatus, str]:
    size = gate.size
    room = ROUNDING * max(1.0, abs(size)) if math.isfinite(size) else 0.0
    is_within = interval.high <= size + room if gate.is_upper else interval.low >= size - room
    is_past = interval.low > size + room if gate.is_upper else interval.high < size - room
    if is_within:
        return "passed", "whole_interval_within"
    if is_past:
        return "failed", "whole_interval_past"
    return ("failed", "not_shown") if gate.kind == "expect" else ("inconclusive", "interval_includes_limit")
