"""`lucid report show`: what one report comes to, also when the report is not whole."""

import click

from lucid_cli.arguments import Report
from lucid_cli.documents import append_step_summary, summary_path, write_document
from lucid_cli.output import warn, write_result
from lucid_cli.reporters.report_json import report_json
from lucid_cli.reporters.report_tables import csv_table, markdown_tables
from lucid_cli.reporters.table import render_report
from lucid_cli.reporters.tabular import csv_text, markdown
from lucid_profiler.compare import analyze_all
from lucid_profiler.reader import read_report

_FORMATS = ("table", "json", "markdown", "csv")

__all__ = ["command"]


@click.command("show")
@click.argument("file", type=Report())
@click.option(
    "--format", "form", type=click.Choice(_FORMATS), default="table", show_default=True, help="How to print the result."
)
@click.option("--step-summary", is_flag=True, help="Append the result to the summary of this GitHub Actions step, too.")
def command(file: str, *, form: str, step_summary: bool) -> int:
    """Show what the report FILE comes to; `-` reads standard input.

    A report whose end is missing is shown as far as it goes, with a warning.
    """
    summary = summary_path() if step_summary else None
    report = read_report(file, with_samples=False)
    for warning in report.warnings:
        warn(f"{file}: {warning}")
    analyses = analyze_all(report)
    if form == "table":
        write_result(render_report(report, analyses[0]))
    elif form == "json":
        write_document(report_json(report, analyses))
    elif form == "csv":
        write_document(csv_text(csv_table(analyses)))
    else:
        write_document(markdown(markdown_tables(report, analyses)))
    if summary is not None:
        append_step_summary(summary, markdown(markdown_tables(report, analyses)))
    return 0
