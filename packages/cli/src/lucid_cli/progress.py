"""What standard error shows while an experiment runs: one plain line a run, and why one failed."""

from statistics import mean

from lucid_cli.output import say
from lucid_cli.reporters.words import reason_words, run_words
from lucid_profiler.records import Arm, Kernels, Run, Slot

_TAIL_LINES = 20

__all__ = ["Progress", "duration"]


class Progress:
    """Prints a line for each run that ends, with an estimate of the time that remains.

    Args:
        num_slots: runs in all.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._seconds: list[float] = []

    def ended(self, slot: Slot, run: Run) -> None:
        """Print the line of one run, and below it the end of its output, standard error last, if it failed."""
        self._seconds.append(run.process_ns / 1e9)
        num_left = self._num_slots - len(self._seconds)
        pair = f"pair {slot.pair}" + (" (discarded)" if slot.discarded else "")
        line = f"run {slot.slot + 1} of {self._num_slots}  {pair}  {run.arm}  {self._seconds[-1]:.2f} s"
        if run.status == "ok" and num_left:
            line += f"  about {duration(num_left * mean(self._seconds))} left"
        elif run.status != "ok":
            line += f"  {run_words(run)}"
        say(line)
        if run.status != "ok":
            for text in run.output_tail.splitlines()[-_TAIL_LINES:]:
                say(f"  | {text}")

    def traced(self, arm: Arm, kernels: Kernels) -> None:
        """Print the line of a traced process."""
        table = kernels.table
        what = f"{table.num_steps} steps counted" if table is not None else reason_words(kernels.reason or "")
        say(f"kernels of {arm.name}, not timed  {what}")

    def rerun(self, arm: Arm) -> None:
        """Print that a run begins which looks for the first difference."""
        say(f"looking for the first difference, not timed  {arm.name}")


def duration(seconds: float) -> str:
    """Return a time for reading: seconds below two minutes, minutes below two hours, then hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
