"""`lucid report html`: one report as one HTML file that opens without a network."""

from pathlib import Path

import click

from lucid_cli import arguments
from lucid_cli.export.destination import check_destination, opened
from lucid_cli.html import drawn_series, render_page
from lucid_cli.output import one_line, say, warn
from lucid_profiler.reader import read_report

__all__ = ["command"]


@click.command("html")
@click.argument("report", type=arguments.Report())
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where the page goes, `-` for standard output; without it beside REPORT, with the ending .html.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
def command(report: str, *, output: str | None, overwrite: bool) -> int:
    """Write what REPORT holds as one HTML page with charts; `-` reads standard input.

    The page needs no network and holds its charts' library (5 MB); `pip install 'lucid-profile-cli[html]'` brings it.
    A report whose end is missing is shown as far as it goes, with a warning.
    """
    target = _target(report) if output is None else output
    check_destination(target, report, overwrite=overwrite)
    series = drawn_series()
    read = read_report(report, with_samples=False, each=lambda _, record: series.add(record))
    for warning in read.warnings:
        warn(f"{report}: {warning}")
    page = render_page(read, series).encode()
    with opened(target, overwrite=overwrite) as sink:
        sink.write(page)
    if target != "-":
        say(f"{one_line(target)}: {len(page) / 1e6:.1f} MB")
    return 0


def _target(report: str) -> str:
    """Return the file beside a report that its page goes to."""
    if report == "-":
        raise click.UsageError("a report from standard input has no name: say with -o FILE where the page goes")
    return str(Path(report).parent / f"{Path(report).stem}.html")
