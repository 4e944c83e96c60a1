"""`lucid report html`: one report as one HTML file that opens without a network."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from lucid_cli import arguments
from lucid_cli.html import render_page
from lucid_cli.output import say, warn
from lucid_profiler.reader import read_report

__all__ = ["command"]


@click.command("html")
@click.argument("report", type=arguments.Report())
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Where the page goes, `-` for standard output; without it beside REPORT, with the ending .html.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
def command(report: str, *, output: str | None, overwrite: bool) -> int:
    """Write what REPORT holds as one HTML page with charts; `-` reads standard input.

    The page needs no network and holds its charts' library (5 MB); `pip install 'lucid-profile-cli[html]'` brings it.
    A report whose end is missing is shown as far as it goes, with a warning.
    """
    target = _target(report, output)
    if target is not None:
        _check(target, report, overwrite=overwrite)
    read = read_report(report)
    for warning in read.warnings:
        warn(f"{report}: {warning}")
    page = render_page(read).encode()
    if target is None:
        _write_to_stdout(page)
        return 0
    _write(target, page, overwrite=overwrite)
    say(f"{target}: {len(page) / 1e6:.1f} MB")
    return 0


def _target(report: str, output: str | None) -> Path | None:
    """Return the file to write, None for standard output."""
    if output == "-":
        return None
    if output is not None:
        return Path(output)
    if report == "-":
        raise click.UsageError("a report from standard input has no name: say with -o FILE where the page goes")
    return Path(report).with_suffix(".html")


def _check(target: Path, report: str, *, overwrite: bool) -> None:
    """Refuse what would be lost or cannot be written, before the work is done."""
    if report != "-" and target.exists() and Path(report).exists() and target.samefile(report):
        raise click.UsageError(f"{target} is the report itself; name another file with -o")
    if target.is_file() and not overwrite:
        raise _exists(target)
    if not target.parent.is_dir():
        raise click.UsageError(f"the page {target} cannot be written: there is no folder {target.parent}")


def _exists(target: Path) -> click.UsageError:
    return click.UsageError(f"{target} exists already; name another file with -o, or add --overwrite")


def _write(target: Path, page: bytes, *, overwrite: bool) -> None:
    """Write the page, whole or not at all where it is a file.

    Raises:
        UsageError: The file has come to exist meanwhile.
        OSError: It cannot be written.
    """
    if not overwrite or (target.exists() and not target.is_file()):
        try:
            with target.open("wb" if target.exists() and not target.is_file() else "xb") as file:
                file.write(page)
        except FileExistsError as error:
            raise _exists(target) from error
        return
    real = target.resolve()
    draft = real.with_name(f".{real.name}.{os.getpid()}.part")
    try:
        draft.write_bytes(page)
        draft.replace(real)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


def _write_to_stdout(page: bytes) -> None:
    try:
        sys.stdout.buffer.write(page)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # Nobody reads on: the interpreter would say so once more when it ends.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
