"""`lucid doctor`: what stands in the way of a measurement on this machine, and what to do about it."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from lucid_cli.output import say, write_result
from lucid_cli.reporters.checkup import render_checkup
from lucid_cli.settings import working_directory
from lucid_profiler import jsonio
from lucid_profiler.checkup.examine import check_up

UNUSABLE = 9
OPTIMIZER = "lucid_optim:MuSGD"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

__all__ = ["command"]


@click.command("doctor")
@click.option(
    "--python",
    metavar="PYTHON",
    help="Interpreter of the program that is to be measured.  [default: the one that runs lucid]",
)
@click.option("--require-gpu", is_flag=True, help="Count it as a problem if torch cannot use a GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(*, python: str | None, require_gpu: bool, as_json: bool) -> int:
    """Look for what stands in the way of a measurement, and say what to do about it.

    Driver, GPUs, host and the Python environment are looked at; nothing is changed. Exits 9 where there is a problem,
    so that nothing can be measured; warnings do not count.
    """
    if python == "":
        raise click.UsageError("--python is empty; name an interpreter, such as --python .venv/bin/python")
    say("doctor: loading torch in a process of its own, some seconds ...")
    try:
        with _stoppable():
            checkup = check_up(
                python or sys.executable,
                optimizer=OPTIMIZER,
                environ=os.environ,
                directory=Path(working_directory()),
                requires_gpu=require_gpu,
            )
    except _StoppedError as stopped:
        return 128 + stopped.number
    write_result(jsonio.dumps(checkup.plain()).decode() + "\n" if as_json else render_checkup(checkup))
    return 0 if checkup.is_usable else UNUSABLE


class _StoppedError(Exception):
    """A signal, raised where it came, so that what was started is ended on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _stoppable() -> Iterator[None]:
    """Raise `_StoppedError` on SIGINT, SIGTERM and SIGHUP; those that lucid was started with ignored stay ignored."""

    def stop(number: int, _frame: object) -> None:
        raise _StoppedError(number)

    numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
