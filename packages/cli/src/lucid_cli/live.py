"""The live line of a terminal, drawn by rich; imported only where standard error is a terminal.

A thread draws it twice a second while a process runs. A frame takes 0.3 ms of processor time to draw and 0.2 ms to look
at the run's files, so the line costs 0.1 % of one core, and the import 50 ms before the first run. The cursor is never
hidden: however lucid ends, the terminal stays usable.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from lucid_cli.output import printable

PERIOD_S = 0.5
_BAR_COLUMNS = 20
_MIN_BAR_COLUMNS = 8
_GAP = "  "

__all__ = ["PERIOD_S", "Frame", "LiveLine", "Part", "fit", "is_ascii_only", "moves_cursor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of the line; where the line is too long, the pieces of the lowest rank are left out first."""

    text: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the line shows.

    Attributes:
        parts: from left to right.
        done: share of the experiment that is behind; None for no bar.
    """

    parts: tuple[Part, ...]
    done: float | None = None


def moves_cursor(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Tell whether a stream is a terminal on which a line can be drawn again."""
    try:
        is_terminal = stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False
    return is_terminal and environ.get("TERM", "").lower() not in {"", "dumb", "unknown"}


def is_ascii_only(encoding: str | None, environ: Mapping[str, str]) -> bool:
    """Tell whether only ASCII should be drawn: the encoding has no more, or the locale promises no more.

    In the C locale Python writes UTF-8 all the same, and sets LC_CTYPE to say so: https://peps.python.org/pep-0538/
    """
    names = [environ.get("LC_ALL"), environ.get("LC_CTYPE"), environ.get("LANG")]
    if not names[0] and (names[1] or "").upper() in {"C.UTF-8", "C.UTF8"}:
        names[1] = None
    locale = next((name for name in names if name), "C")
    return locale in {"C", "POSIX"} or not (encoding or "").lower().replace("-", "").startswith("utf")


def fit(parts: Iterable[Part], columns: int) -> str:
    """Return the parts side by side in at most so many columns; what counts least is left out."""
    kept = list(parts)
    while len(kept) > 1 and len(_GAP.join(part.text for part in kept)) > columns:
        kept.remove(min(kept, key=lambda part: part.rank))
    return _GAP.join(part.text for part in kept)[:columns]


def _nothing() -> Frame:
    return Frame(parts=())


class _Console(Console):
    """A terminal whose cursor stays, and whose end does not end lucid."""

    def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002 - rich's signature
        """Do nothing."""
        return False

    def on_broken_pipe(self) -> None:
        """Draw no more; rich would end the process."""
        self.quiet = True


class _Line:
    """Draws a frame in one line of the terminal as wide as it is now."""

    def __init__(self, frame: Frame, *, ascii_only: bool) -> None:
        self._frame = frame
        self._ascii_only = ascii_only

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        encoding = "ascii" if self._ascii_only else options.encoding
        # A character in the last column would make some terminals begin another line.
        room = options.max_width - 1
        text = printable(fit(self._frame.parts, room), encoding)
        columns = min(_BAR_COLUMNS, room - len(text) - len(_GAP))
        if self._frame.done is not None and columns >= _MIN_BAR_COLUMNS:
            narrow = options.update(width=columns)
            narrow.encoding = encoding
            bar = ProgressBar(total=1.0, completed=self._frame.done, width=columns, complete_style="cyan")
            segments = list(console.render(bar, narrow))
            yield from segments
            # Without colours the bar ends where it is full.
            text = " " * (columns - sum(segment.cell_length for segment in segments)) + _GAP + text
        yield Text(text, no_wrap=True, overflow="crop", end="")


class LiveLine:
    """One line that is drawn again and again below whatever else is written to standard error. Raises nothing.

    The kernel ends a measured process with lucid only if lucid had one thread when it started it, so the thread that
    draws lives from `keep_up`, which is for when the process is there, to `clear`.

    Args:
        stream: standard error, a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._ascii_only = is_ascii_only(stream.encoding, os.environ)
        wants_color = not os.environ.get("NO_COLOR")  # https://no-color.org
        self._console = _Console(
            file=stream,
            force_terminal=True,
            force_interactive=True,
            color_system="auto" if wants_color else None,
            no_color=not wants_color,
            highlight=False,
            soft_wrap=True,
        )
        self._live: Live | None = None
        self._make_frame: Callable[[], Frame] = _nothing
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, make_frame: Callable[[], Frame]) -> None:
        """Draw a frame in the place of what was drawn before; `make_frame` is called by another thread later."""
        self.clear()
        self._make_frame = make_frame
        with suppress(Exception):  # a measurement goes on without its display, whatever the terminal did
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._live.start()
            self._draw(self._live, make_frame)

    def keep_up(self) -> None:
        """Have a thread draw it again and again, until it is cleared."""
        if self._live is not None and self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._keep_drawing, args=(self._live, self._make_frame), daemon=True)
            self._thread.start()

    def clear(self) -> None:
        """Take the line away; the cursor is where it began. No thread is left."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
        live, self._live = self._live, None
        if live is not None:
            with suppress(Exception):  # as above
                live.stop()

    def _keep_drawing(self, live: Live, make_frame: Callable[[], Frame]) -> None:
        with suppress(Exception):  # as above
            while not self._stopping.wait(PERIOD_S):
                self._draw(live, make_frame)

    def _draw(self, live: Live, make_frame: Callable[[], Frame]) -> None:
        live.update(_Line(make_frame(), ascii_only=self._ascii_only), refresh=True)
