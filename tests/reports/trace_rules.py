"""The rules of the trace event format, as far as lucid's traces use it, checked without lucid."""

import json
from decimal import Decimal
from typing import Any

# Source: the "Trace Event Format" document of the Chromium project,
# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
_METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}

__all__ = ["checked_trace"]


def checked_trace(data: bytes) -> dict[str, Any]:
    """Return a trace whose events keep the rules; its fractions are Decimals, so that no digit is lost.

    Raises:
        AssertionError: an event breaks a rule.
    """
    trace: dict[str, Any] = json.loads(data, parse_float=Decimal, parse_constant=_refuse)
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    named: set[tuple[str, int]] = set()
    counters: dict[tuple[int, str], Decimal] = {}
    slices: dict[tuple[int, int], list[tuple[Decimal, Decimal]]] = {}
    for event in trace["traceEvents"]:
        assert type(event["pid"]) is int
        assert event["pid"] > 0
        assert isinstance(event["name"], str)
        assert event["name"]
        if event["ph"] == "M":
            key, kind = _METADATA[event["name"]]
            assert isinstance(event["args"][key], kind)
            named.add((event["name"], event["tid"] if event["name"].startswith("thread") else event["pid"]))
            continue
        assert ("process_name", event["pid"]) in named
        begin = _time(event["ts"])
        if event["ph"] == "X":
            assert ("thread_name", event["tid"]) in named
            slices.setdefault((event["pid"], event["tid"]), []).append((begin, begin + _time(event["dur"])))
        else:
            assert event["ph"] == "C"
            assert event["args"]
            assert all(_is_number(value) for value in event["args"].values())
            assert counters.get((event["pid"], event["name"]), Decimal(0)) <= begin
            counters[event["pid"], event["name"]] = begin
    for of_a_thread in slices.values():
        _check_nesting(of_a_thread)
    return trace


def _check_nesting(slices: list[tuple[Decimal, Decimal]]) -> None:
    """Hold that of two slices of a thread one contains the other, or they do not meet."""
    open_ends: list[Decimal] = []
    for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def _time(value: Any) -> Decimal:
    assert _is_number(value)
    assert value >= 0
    return Decimal(value)


def _is_number(value: Any) -> bool:
    return type(value) in {int, Decimal} and Decimal(value).is_finite()


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")
