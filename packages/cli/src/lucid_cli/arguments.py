"""Values on the command line that click alone would let pass."""

import math
import sys
from typing import Any

import click

MIN_INTERVAL_S = 0.01
MAX_INTERVAL_S = 3600
MAX_SECONDS_S = 30 * 24 * 3600

__all__ = ["Interval", "Report", "Seconds"]


class Seconds(click.FloatRange):
    """A time that ends within somebody's patience: neither infinite nor no number at all.

    Args:
        is_open: whether 0 is too short.
        max_s: the longest.
    """

    name = "seconds"

    def __init__(self, *, is_open: bool = True, max_s: int = MAX_SECONDS_S) -> None:
        super().__init__(min=0, min_open=is_open, max=max_s)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of seconds."""
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return seconds


class Interval(Seconds):
    """A time between two samples, or 0 for none where that is allowed.

    Args:
        or_none: whether it is.
    """

    def __init__(self, *, or_none: bool = False) -> None:
        super().__init__(is_open=not or_none, max_s=MAX_INTERVAL_S)
        self._or_none = or_none

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of seconds."""
        seconds = super().convert(value, param, ctx)
        if seconds and seconds < MIN_INTERVAL_S:
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return seconds

    def _describe_range(self) -> str:
        """Return what click shows in the help and in its own messages: there is a hole between 0 and the rest."""
        return f"{'0, or ' if self._or_none else ''}from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S}"


class Report(click.Path):
    """The name of a report to read, `-` for standard input, which then must be open."""

    name = "report"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name as it was typed."""
        if value == "-" and sys.stdin is None:
            self.fail("the report is to be read from standard input, which is closed.", param, ctx)
        return super().convert(value, param, ctx)
