"""`lucid report export`: a report in a form that other programs open."""

import click

from lucid_cli.arguments import Report
from lucid_cli.export.chrome import ChromeTrace
from lucid_cli.export.destination import check_destination, opened
from lucid_cli.export.table import LongTable
from lucid_cli.output import warn
from lucid_cli.reporters.words import counted
from lucid_profiler.reader import read_report

_FORMS: dict[str, type[ChromeTrace] | type[LongTable]] = {"chrome-trace": ChromeTrace, "csv": LongTable}

__all__ = ["command"]


@click.command("export")
@click.argument("file", type=Report())
@click.option(
    "--to",
    "form",
    required=True,
    type=click.Choice(list(_FORMS)),
    help="chrome-trace: a timeline, for ui.perfetto.dev; csv: a long table, for pandas and the like.",
)
@click.option("-o", "--output", default="-", metavar="FILE", help="Where it goes; standard output if not given.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
def command(file: str, *, form: str, output: str, overwrite: bool) -> int:
    """Write the report FILE in another form; `-` reads standard input.

    A report whose end is missing is exported as far as it goes, with a warning. Of a damaged one nothing is written,
    but from standard input to standard output, where the damage is only found on the way.
    """
    check_destination(output, file, overwrite=overwrite)
    if file != "-":
        read_report(file, with_samples=False)
    remarks: list[str] = []
    with opened(output, overwrite=overwrite) as sink:
        writer = _FORMS[form](sink)
        report = read_report(file, with_samples=False, each=writer.add)
        writer.finish(report)
        remarks += report.warnings  # none where nobody reads on: the writing ended before
        if isinstance(writer, ChromeTrace) and writer.num_left_out:
            remarks.append(f"{counted(writer.num_left_out, 'row')} of samples have no place on the timeline")
    for remark in remarks:
        warn(f"{file}: {remark}")
    return 0
