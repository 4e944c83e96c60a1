"""What the live line says while a run goes on or is waited for."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from lucid_cli.live import Frame, LiveLine, Part, moves_cursor
from lucid_cli.remaining import Estimate, duration
from lucid_profiler.glance import Glance, Glancer

__all__ = ["RunLine", "open_line"]


def open_line(stream: TextIO) -> "RunLine | None":
    """Return what draws a line on a terminal; None where no line can be drawn twice."""
    return RunLine(stream) if moves_cursor(stream, os.environ) else None


class RunLine(LiveLine):
    """The live line of an experiment."""

    def show_text(self, text: str) -> None:
        """Show what is done, and for how long already."""
        self.show(_text_frames(text))

    def show_run(self, words: tuple[str, str, str], run_dir: Path, *, estimate: Estimate, since_s: float) -> None:
        """Show a run: where it stands in the experiment, and what it shows of itself.

        Args:
            words: its place, its pair and its arm.
            run_dir: where its agents and its monitor write.
            estimate: knows the runs before it.
            since_s: when the run before it ended, on the clock of `time.monotonic`; now for the first.
        """
        self.show(_run_frames(words, run_dir, estimate=estimate, since_s=since_s))


def _text_frames(text: str) -> Callable[[], Frame]:
    begin_s = time.monotonic()

    def frame() -> Frame:
        return Frame(parts=(Part(text=text, rank=1), *_elapsed(begin_s, rank=0)))

    return frame


def _run_frames(
    words: tuple[str, str, str], run_dir: Path, *, estimate: Estimate, since_s: float
) -> Callable[[], Frame]:
    place, pair, arm = words
    begin_s = time.monotonic()
    glancer = Glancer(run_dir)

    def frame() -> Frame:
        seen = glancer.look()
        since_last_s = time.monotonic() - since_s
        left_s = estimate.left_s(since_last_s)
        left = "" if left_s is None else f"about {duration(left_s)} left"
        texts = [(left, 3), (_step_words(seen), 2), (_memory_words(seen), 1)]
        parts = [Part(text=place, rank=6), Part(text=pair, rank=0), Part(text=arm, rank=5)]
        parts += [*_elapsed(begin_s, rank=4), *(Part(text=text, rank=rank) for text, rank in texts if text)]
        return Frame(parts=tuple(parts), done=estimate.done(since_last_s))

    return frame


def _elapsed(begin_s: float, *, rank: int) -> tuple[Part, ...]:
    """Return how long something lasts already; nothing within the first second."""
    seconds = time.monotonic() - begin_s
    return (Part(text=duration(int(seconds)), rank=rank),) if seconds >= 1 else ()


def _step_words(seen: Glance) -> str:
    if seen.step is None:
        return ""
    if seen.step_ns is None:
        return f"step {seen.step}"
    size, unit = (1e9, "s") if seen.step_ns >= 1e9 else (1e6, "ms")
    return f"step {seen.step}: {seen.step_ns / size:.3g} {unit}"


def _memory_words(seen: Glance) -> str:
    num_bytes = seen.memory_bytes if seen.memory_bytes is not None else seen.used_bytes
    if num_bytes is None:
        return ""
    amount = f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
    return f"GPU {amount}" if seen.memory_bytes is not None else f"GPU {amount} used by all"
