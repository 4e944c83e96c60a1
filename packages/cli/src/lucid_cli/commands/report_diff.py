"""`lucid report diff`: what changed between two reports, if they can be compared."""

import click

from lucid_cli.output import warn, write_result
from lucid_cli.reporters.difference import render_difference
from lucid_profiler.compare import diff
from lucid_profiler.reader import read_report

PARITY_FAILED = 4

__all__ = ["command"]


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--allow", multiple=True, metavar="KEY", help="Compare although KEY differs; may be repeated.")
@click.option("--allow-partial", is_flag=True, help="Use a report whose last lines are missing as far as it goes.")
def command(a: str, b: str, *, allow: tuple[str, ...], allow_partial: bool) -> int:
    """Compare what the reports A and B come to, A being the base.

    Differences in what was measured, and where, come first; those that make a comparison meaningless end it with exit
    code 5 unless they are allowed by name.
    """
    if a == b == "-":
        raise click.UsageError("only one of the reports can come from standard input")
    first, second = (read_report(path, allow_partial=allow_partial) for path in (a, b))
    for report in (first, second):
        for warning in report.warnings:
            warn(f"{report.path}: {warning}")
    difference = diff(first, second, allow=allow)
    write_result(render_difference(difference, first, second))
    failed = "different" in {difference.analysis_a.parity.status, difference.analysis_b.parity.status}
    return PARITY_FAILED if failed else 0
