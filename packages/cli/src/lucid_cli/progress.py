"""What standard error shows while an experiment runs: one plain line a run, why one failed, and a line that is alive.

The live line is for terminals only. On one, it stands below the plain lines, which are the same everywhere.
"""

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from lucid_cli.output import say
from lucid_cli.plan import Purpose
from lucid_cli.remaining import Estimate, duration
from lucid_cli.reporters.words import reason_words, run_words
from lucid_profiler.records import Arm, Kernels, Run, Slot

if TYPE_CHECKING:
    from lucid_cli.frames import RunLine

_TAIL_LINES = 20

__all__ = ["Progress", "duration"]


class Progress:
    """Prints a line for each run that ends, with an estimate of the time that remains, and keeps a live line below.

    Use it as a context manager: the live line is gone afterwards, however the block is left.

    Args:
        num_slots: runs in all.
        cool_down_s: pause between two of them.
        copies_output: whether the output of the runs goes to standard error too; then there is no live line, because
            nothing can tell where on the terminal a program that draws progress of its own has left the cursor.
    """

    def __init__(self, num_slots: int, *, cool_down_s: float = 0.0, copies_output: bool = False) -> None:
        self._num_slots = num_slots
        self._num_ended = 0
        self._estimate = Estimate(num_slots, pause_s=cool_down_s)
        self._last_end_s: float | None = None
        self._line = None if copies_output else _open_line()

    def __enter__(self) -> "Progress":  # noqa: PYI034 - typing.Self is newer than the oldest Python supported
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clear()

    def began(self, slot: Slot, run_dir: Path) -> None:
        """Show a run that is about to start."""
        if self._line is not None:
            self._line.show_run(
                self._run_words(slot), run_dir, estimate=self._estimate, since_s=self._last_end_s or time.monotonic()
            )

    def started(self) -> None:
        """Keep what is shown up to date from now on: the process of a run is there."""
        if self._line is not None:
            self._line.keep_up()

    def waiting(self, text: str) -> None:
        """Show what the next run waits for."""
        self._show_or_say(text)

    def ended(self, slot: Slot, run: Run) -> None:
        """Print the line of one run, and below it the end of its output, standard error last, if it failed."""
        self._clear()
        seconds, now = run.process_ns / 1e9, time.monotonic()
        line = f"{'  '.join(self._run_words(slot))}  {seconds:.2f} s"
        self._num_ended += 1
        with_pause = seconds if self._last_end_s is None else max(seconds, now - self._last_end_s)
        self._estimate.add(with_pause, discarded=slot.discarded, succeeded=run.status == "ok")
        self._last_end_s = now
        left_s = self._estimate.left_s()
        if run.status == "ok" and left_s is not None:
            line += f"  about {duration(left_s)} left"
        elif run.status != "ok":
            line += f"  {run_words(run)}"
        say(line)
        if run.status != "ok":
            for text in run.output_tail.splitlines()[-_TAIL_LINES:]:
                say(f"  | {text}")

    def traced(self, arm: Arm, kernels: Kernels) -> None:
        """Print the line of a traced process."""
        self._clear()
        table = kernels.table
        what = f"{table.num_steps} steps counted" if table is not None else reason_words(kernels.reason or "")
        say(f"kernels of {arm.name}, not timed  {what}")

    def rerun(self, arm: Arm, purpose: Purpose) -> None:
        """Print that a run begins which is not timed, or show it for as long as it goes on."""
        what = "counting kernels" if purpose == "kernels" else "looking for the first difference"
        self._show_or_say(f"{what}, not timed  {arm.name}")

    def _run_words(self, slot: Slot) -> tuple[str, str, str]:
        pair = f"pair {slot.pair}" + (" (discarded)" if slot.discarded else "")
        return f"run {self._num_ended + 1} of {self._num_slots}", pair, slot.arm

    def _show_or_say(self, text: str) -> None:
        if self._line is None:
            say(text)
        else:
            self._line.show_text(text)

    def _clear(self) -> None:
        if self._line is not None:
            self._line.clear()


def _open_line() -> "RunLine | None":
    """Return what draws a line on standard error; None where that is no terminal that could show it."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from lucid_cli import frames  # noqa: PLC0415 - it takes 50 ms, before the first run and on terminals only
    except ImportError:
        return None
    return frames.open_line(sys.stderr)
