"""`lucid report show`: what one report comes to, also when the report is not whole."""

import click

from lucid_cli.arguments import Report
from lucid_cli.output import warn, write_result
from lucid_cli.reporters.table import render_report
from lucid_profiler.compare import analyze
from lucid_profiler.reader import read_report

__all__ = ["command"]


@click.command("show")
@click.argument("file", type=Report())
def command(file: str) -> int:
    """Show what the report FILE comes to; `-` reads standard input.

    A report whose end is missing is shown as far as it goes, with a warning.
    """
    report = read_report(file)
    for warning in report.warnings:
        warn(f"{file}: {warning}")
    write_result(render_report(report, analyze(report)))
    return 0
