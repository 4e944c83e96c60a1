"""`lucid report validate`: whether reports are whole, unedited, and say what their own records come to."""

from pathlib import Path

import click

from lucid_cli import arguments
from lucid_cli.output import warn, write_result
from lucid_cli.reporters.words import counted
from lucid_profiler import jsonio
from lucid_profiler.compare import verify_summary
from lucid_profiler.errors import ReportError
from lucid_profiler.reader import Report, read_report

BAD_REPORT = 7

__all__ = ["command"]


@click.command("validate")
@click.argument("files", nargs=-1, required=True, type=arguments.Report())
@click.option("--allow-partial", is_flag=True, help="Accept a report whose last lines are missing.")
def command(files: tuple[str, ...], *, allow_partial: bool) -> int:
    """Check each FILE: the chain of its lines, their numbers, and its summary, which is computed again."""
    return max([0, *(_validate(file, allow_partial=allow_partial) for file in files)])


def _validate(file: str, *, allow_partial: bool) -> int:
    try:
        report = read_report(file, allow_partial=allow_partial)
        _check_derived(report)
    except ReportError as error:
        warn(str(error), kind="Error")
        return BAD_REPORT
    for warning in report.warnings:
        warn(f"{file}: {warning}")
    write_result(f"{file}: valid, {counted(len(report.runs), 'run')} in {counted(len(report.pairs), 'pair')}\n")
    return 0


def _check_derived(report: Report) -> None:
    """Compare pairs and summary with a new computation.

    Raises:
        ReportError: they differ; it names the line.
    """
    problems = verify_summary(report)
    if problems:
        raise ReportError(report.path, _line_of(report, problems[0]), problems[0])


def _line_of(report: Report, problem: str) -> int | None:
    """Return the number of the line that a problem begins with the name of; standard input is not read again."""
    if report.path == "-":
        return None
    subject = problem.partition(":")[0].partition(".")[0].split()
    kind, number = subject[0], subject[-1]
    with Path(report.path).open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            fields = jsonio.loads(line.strip().removeprefix(b"\xef\xbb\xbf"))
            if fields.get("t") == kind and str(fields.get("run" if kind == "state" else "pair", kind)) == number:
                return line_number
    return None
