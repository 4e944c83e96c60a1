"""Values on the command line that click alone would let pass."""

import math
import sys
from typing import Any

import click

__all__ = ["Report", "Seconds"]


class Seconds(click.FloatRange):
    """A time above 0 that ends: neither infinite nor no number at all."""

    name = "seconds"

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of seconds."""
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return seconds


class Report(click.Path):
    """The name of a report to read, `-` for standard input, which then must be open."""

    name = "report"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name as it was typed."""
        if value == "-" and sys.stdin is None:
            self.fail("the report is to be read from standard input, which is closed.", param, ctx)
        return super().convert(value, param, ctx)
