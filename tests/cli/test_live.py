"""The live line, on a real terminal under the installed command: what it shows, and what it leaves behind."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from cli.harness import LUCID, Lucid, wait_for_end
from lucid_cli.live import PERIOD_S, Frame, LiveLine, Part, fit, is_ascii_only, moves_cursor
from support import fake_nvml

# Takes steps of 12.5 ms by its own account, for long enough to be seen, without torch.
CHILD = """
import os, pathlib, sys, time
from lucid_profiler.ring import RingWriter
ring = RingWriter(pathlib.Path(os.environ["LUCID_RUN_DIR"]) / f"steps-{os.getpid()}.ring")
for step in range(1, 41):
    ring.write(step * 12_500_000, step * 12_500_000 + 5_000_000, 0, step=step)
time.sleep(2.4)
"""
# The first run ends while a line is drawn, the second does not end by itself.
LINGER = """
import os, pathlib, time
num = len(list(pathlib.Path().glob("pid-*")))
pathlib.Path(f"pid-{num}").write_text(str(os.getpid()))
time.sleep(300 if num else 1.5)
"""
SGR = re.compile(r"\x1b\[[\d;]*m")
ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
PLAIN = re.compile(r"(report: .*|run \d of \d  pair \d( \(discarded\))?  (native|captured)  [\d.]+ s(  .*)?|  \| .*)")


@dataclass
class Shown:
    """What a terminal was sent, and how the command ended.

    Attributes:
        code: exit code.
        out: standard output, which is a pipe.
        text: what came to the terminal.
    """

    code: int
    out: str
    text: str

    @property
    def frames(self) -> list[str]:
        """What followed each erasure of a line, without colours."""
        return [ESCAPE.sub("", piece).split("\r")[0] for piece in re.split(r"\x1b\[2?K", self.text)]

    @property
    def screen(self) -> list[str]:
        """The lines that are left, as wide as they were sent, the last one that on which the cursor is."""
        lines, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.text):
            if token == "\r":
                column = 0
            elif token == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif token.endswith("K"):
                lines[row] = lines[row][:column] if token != "\x1b[2K" else ""
            elif token.endswith("A"):
                row -= int(token[2:-1])
            elif not token.startswith("\x1b"):
                old = lines[row].ljust(column)
                lines[row] = old[:column] + token + old[column + len(token) :]
                column += len(token)
        return lines

    @property
    def is_cursor_visible(self) -> bool:
        """Whether the cursor is there."""
        return self.text.rfind("\x1b[?25l") <= self.text.rfind("\x1b[?25h")


@dataclass
class Terminal:
    """Runs the command with standard error on a terminal of its own."""

    lucid: Lucid
    columns: int = 150
    env: Mapping[str, str] = field(default_factory=dict)

    def __call__(
        self, *args: str, on_text: "Callable[[str, subprocess.Popen[bytes], int], None]" = lambda *_: None
    ) -> Shown:
        """Run `lucid` and return what it showed; `on_text` may do something with the process and the terminal."""
        ours, theirs = pty.openpty()
        resize(theirs, self.columns)
        settings = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "", "LC_CTYPE": "", "NO_COLOR": ""}
        env = {**self.lucid._env(), **settings, **self.env}
        env.pop("COLUMNS", None)
        # What a shell starts in the background would inherit it ignored.
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(
            [LUCID, *args],
            cwd=self.lucid.directory,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            start_new_session=True,
        )
        signal.signal(signal.SIGINT, before)
        os.close(theirs)
        data = b""
        deadline = time.monotonic() + 60
        while chunk := _read(ours, deadline):
            data += chunk
            on_text(data.decode("utf-8", "replace"), process, ours)
        os.close(ours)
        out, _ = process.communicate(timeout=60)
        return Shown(process.returncode, out.decode(), data.decode())

    def profile(
        self,
        child: str,
        *options: str,
        on_text: "Callable[[str, subprocess.Popen[bytes], int], None]" = lambda *_: None,
    ) -> Shown:
        """Measure one pair of runs of a program."""
        fixed = ("profile", "run", "--pairs", "1", "--discard-pairs", "0", "-o", "report.jsonl", "--overwrite")
        return self(*fixed, *options, "--", sys.executable, self.lucid.script(child), on_text=on_text)


def _read(fd: int, deadline: float) -> bytes:
    """Return what comes next; nothing once everybody has closed the other end."""
    while time.monotonic() < deadline:
        if select.select([fd], [], [], 0.1)[0]:
            try:
                return os.read(fd, 1 << 16)
            except OSError:
                return b""
    raise AssertionError("the command does not end")


def resize(fd: int, columns: int) -> None:
    """Give a terminal another width."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


@pytest.fixture
def terminal(lucid: Lucid) -> Terminal:
    """Return a wide terminal in colours."""
    return Terminal(lucid)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Measure a pair beside a fake H200 of which 40 GiB are used."""
    folder = tmp_path_factory.mktemp("live")
    return Terminal(Lucid(folder), env=fake_nvml.environment(fake_nvml.H200, folder)).profile(CHILD)


def test_a_run_is_shown_while_it_goes_on(shown: Shown) -> None:
    """Where it stands, its arm, for how long, its newest step, and the GPU's memory."""
    assert shown.code == 0, shown.text
    assert any(
        re.fullmatch(r"run 1 of 2  pair 0  native  \d+ s  step 40: 12\.5 ms  GPU 40\.0 GiB used by all", frame)
        for frame in shown.frames
    ), shown.frames


def test_from_the_second_run_on_there_is_an_estimate_and_a_bar(shown: Shown) -> None:
    """They come from the runs before it."""
    assert any(
        re.fullmatch(r"[━╸╺]{20}  run 2 of 2  pair 0  captured  \d+ s  about \d+ s left  step 40: .*", frame)
        for frame in shown.frames
    ), shown.frames


def test_of_the_line_nothing_is_left(shown: Shown) -> None:
    """On the screen remain the lines that a file would have got, and the cursor below them."""
    *lines, last = shown.screen
    assert last == ""
    assert len(lines) == 3
    assert all(PLAIN.fullmatch(line) for line in lines), lines
    assert shown.is_cursor_visible


def test_standard_output_has_the_result_alone(shown: Shown, lucid: Lucid) -> None:
    """As without a terminal."""
    assert shown.out.startswith("\ncommand") or shown.out.startswith("command")
    assert not ESCAPE.search(shown.out)
    assert "run 1 of 2" not in shown.out


def test_the_line_is_coloured(shown: Shown) -> None:
    """Where colours are wanted, else the next test would promise nothing."""
    assert SGR.search(shown.text)


def test_with_no_color_there_is_none(terminal: Terminal) -> None:
    """The line is there, without any code for colours."""
    terminal.env = {"NO_COLOR": "1"}
    shown = terminal.profile("pass")
    assert any("run 2 of 2  pair 0  captured" in frame for frame in shown.frames)
    assert not SGR.search(shown.text)


def test_in_the_c_locale_the_line_is_ascii(terminal: Terminal) -> None:
    """Also where Python writes UTF-8 there."""
    terminal.env = {"LANG": "C"}
    shown = terminal.profile("pass")
    assert any("-----" in frame and "run 2 of 2" in frame for frame in shown.frames)
    assert shown.text.isascii()


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TERM": ""}])
def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(terminal: Terminal, env: dict[str, str]) -> None:
    """As a file does."""
    terminal.env = env
    shown = terminal.profile("pass")
    lines = shown.text.split("\r\n")
    assert lines.pop() == ""
    assert len(lines) == 3
    assert all(PLAIN.fullmatch(line) for line in lines), lines


def test_the_output_of_a_run_is_not_disturbed(terminal: Terminal) -> None:
    """With --verbose there is no live line, so that a program may draw what it likes."""
    shown = terminal.profile(
        "import sys, time; print('half', end='', flush=True); time.sleep(1.2); print('\\rwhole')", "-v"
    )
    assert shown.text.count("half\rwhole\r\n") == 2
    assert not ESCAPE.search(shown.text)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_clean_terminal(terminal: Terminal, number: signal.Signals, code: int) -> None:
    """The line is gone, the last plain line ended, the cursor there."""
    sent: list[int] = []

    def interrupt(text: str, process: "subprocess.Popen[bytes]", _: int) -> None:
        if re.search(r"native  \d s", text) and not sent:
            sent.append(number)
            process.send_signal(number)

    shown = terminal.profile("import time; time.sleep(30)", on_text=interrupt)
    assert shown.code == code
    *lines, last = shown.screen
    assert last == ""
    assert all(PLAIN.fullmatch(line) for line in lines), lines
    assert lines[1].startswith("run 1 of 2")
    assert shown.is_cursor_visible


def test_a_program_that_cannot_be_started_leaves_only_the_error(terminal: Terminal) -> None:
    """It disappears between the two runs."""
    program = terminal.lucid.directory / "program"
    program.write_text('#!/bin/sh\nrm -f "$0"\n')
    program.chmod(0o755)
    shown = terminal("profile", "run", "--pairs", "1", "--discard-pairs", "0", "--", str(program))
    assert shown.code == 127
    *lines, last = shown.screen
    assert last == ""
    assert lines[-1].startswith("Error: ")
    assert not any("captured" in line for line in lines[:-1])


def test_the_line_is_never_wider_than_the_terminal(terminal: Terminal) -> None:
    """Also after the window was made narrower."""
    sizes: list[int] = []

    def shrink(text: str, _: "subprocess.Popen[bytes]", fd: int) -> None:
        if not sizes and "run 2 of 2" in text:
            sizes.append(len(text))
            resize(fd, 40)

    shown = terminal.profile(CHILD, on_text=shrink)
    later = Shown(0, "", shown.text[sizes[0] :]).frames[2:]
    assert len(later) > 2
    assert all(len(frame) < 40 for frame in later if not frame.endswith("\n")), later
    assert any(re.fullmatch(r"[━╸╺]+  run 2 of 2  captured  \d s", frame) for frame in later), later


def test_the_line_does_not_keep_a_run_from_ending_with_lucid(terminal: Terminal) -> None:
    """The kernel ends the second run too, although a line was drawn during the first."""

    def kill(text: str, process: "subprocess.Popen[bytes]", _: int) -> None:
        if re.search(r"captured  \d s", text):
            process.kill()

    shown = terminal.profile(LINGER, "--no-nvml", "--interval", "0", on_text=kill)
    assert shown.code == -signal.SIGKILL
    wait_for_end(int((terminal.lucid.directory / "pid-1").read_text()))
    assert shown.is_cursor_visible


def test_what_is_not_timed_is_shown_too(terminal: Terminal) -> None:
    """With the time that it takes already."""
    shown = terminal.profile("import time; time.sleep(1.4)", "--kernels")
    assert any(re.fullmatch(r"counting kernels, not timed  native  \d s", frame) for frame in shown.frames)
    assert not any(line.startswith("counting") for line in shown.screen)


def test_the_least_important_is_left_out_first() -> None:
    """And what remains is cut if even that is too long."""
    parts = (Part(text="run", rank=3), Part(text="pair", rank=1), Part(text="native", rank=2))
    assert fit(parts, 17) == "run  pair  native"
    assert fit(parts, 16) == "run  native"
    assert fit(parts, 10) == "run"
    assert fit(parts, 2) == "ru"


@pytest.mark.parametrize(
    ("encoding", "environ", "expected"),
    [
        ("utf-8", {"LANG": "en_US.UTF-8"}, False),
        ("utf-8", {"LANG": "C.UTF-8", "LC_CTYPE": "C.UTF-8"}, False),
        ("utf-8", {"LC_CTYPE": "C.UTF-8"}, True),
        ("utf-8", {"LANG": "C", "LC_CTYPE": "C.UTF-8"}, True),
        ("utf-8", {"LANG": "en_US.UTF-8", "LC_ALL": "POSIX"}, True),
        ("utf-8", {"LC_ALL": "C.UTF-8"}, False),
        ("utf-8", {}, True),
        ("ascii", {"LANG": "en_US.UTF-8"}, True),
        ("cp1252", {"LANG": "en_US.UTF-8"}, True),
    ],
)
def test_ascii_is_drawn_where_nothing_promises_more(encoding: str, environ: dict[str, str], expected: bool) -> None:
    """The locale decides before what Python makes of it."""
    assert is_ascii_only(encoding, environ) is expected


def test_a_stream_that_is_closed_or_none_is_no_terminal() -> None:
    """Neither raises."""
    closed = io.StringIO()
    closed.close()
    assert not moves_cursor(None, {"TERM": "xterm"})
    assert not moves_cursor(closed, {"TERM": "xterm"})


def test_a_line_that_cannot_be_made_or_drawn_ends_nothing() -> None:
    """A measurement goes on without its display."""

    def fail() -> Frame:
        raise RuntimeError

    ours, theirs = pty.openpty()
    before = sys.stderr
    stream = os.fdopen(theirs, "w")
    line = LiveLine(stream)
    line.show(fail)
    line.keep_up()
    line.clear()
    assert sys.stderr is before
    os.close(ours)
    line.show(lambda: Frame(parts=(Part(text="run", rank=0),)))
    line.keep_up()
    line.clear()
    assert sys.stderr is before
    with suppress(OSError):  # what could not be drawn is still in its buffer
        stream.close()


def test_the_line_wakes_rarely() -> None:
    """At most four times a second."""
    assert PERIOD_S >= 0.25
