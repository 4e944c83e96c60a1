"""`lucid report validate`: whether reports are whole, unedited, and say what their own records come to."""

import click

from lucid_cli import arguments
from lucid_cli.export.table import row_count
from lucid_cli.output import one_line, warn, write_result
from lucid_cli.reporters.words import counted
from lucid_profiler.compare import verify_summary
from lucid_profiler.errors import ReportError
from lucid_profiler.reader import read_report
from lucid_profiler.records import End, Pair, Record, Run, Samples, State, Summary

BAD_REPORT = 7
MAX_PROBLEMS = 10

__all__ = ["command"]


@click.command("validate")
@click.argument("files", nargs=-1, required=True, type=arguments.Report())
@click.option("--allow-partial", is_flag=True, help="Accept a report whose last lines are missing.")
def command(files: tuple[str, ...], *, allow_partial: bool) -> int:
    """Check each FILE: the chain of its lines, their numbers, and its summary, which is computed again."""
    if files.count("-") > 1:
        raise click.UsageError("only one of the reports can come from standard input")
    return max([0, *(_validate(file, allow_partial=allow_partial) for file in files)])


def _validate(file: str, *, allow_partial: bool) -> int:
    places = _Places()
    try:
        report = read_report(file, allow_partial=allow_partial, with_samples=False, each=places.add)
    except ReportError as error:
        warn(str(error), kind="Error")
        return BAD_REPORT
    problems = [*verify_summary(report), *places.orphans()]
    for problem in problems[:MAX_PROBLEMS]:
        warn(str(ReportError(file, places.line_of(problem), problem)), kind="Error")
    if len(problems) > MAX_PROBLEMS:
        warn(f"{file}: and {counted(len(problems) - MAX_PROBLEMS, 'further problem')}", kind="Error")
    if problems:
        return BAD_REPORT
    for warning in report.warnings:
        warn(f"{file}: {warning}")
    found = f"{counted(len(report.runs), 'run')} in {counted(len(report.pairs), 'pair')}"
    write_result(f"{one_line(file)}: valid, {found}\n")
    return 0


class _Places:
    """The lines on which records are that a problem may name."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        self._runs: set[int] = set()
        self._sampled: set[int] = set()

    def add(self, line: int, record: Record) -> None:
        """Note one record.

        Raises:
            ValueError: the columns of samples are not equally long.
        """
        if isinstance(record, Samples):
            row_count(record)
            self._sampled.add(record.run)
        if isinstance(record, Run):
            self._runs.add(record.run)
        self._lines.setdefault(_subject(record), line)

    def line_of(self, problem: str) -> int | None:
        """Return the line of the record that a problem begins with the name of."""
        return self._lines.get(problem.partition(":")[0].partition(".")[0])

    def orphans(self) -> list[str]:
        """Return a problem for each run of which there are samples but nothing else."""
        return [f"samples of run {run}: there is no such run" for run in sorted(self._sampled - self._runs)]


def _subject(record: Record) -> str:
    """Return by which name problems call a record."""
    if isinstance(record, Pair):
        return f"pair {record.pair}"
    if isinstance(record, (State, Samples)):
        return f"{record.kind} of run {record.run}"
    return record.kind if isinstance(record, (Summary, End)) else ""
