"""`lucid profile estimate`: from one or two short runs, whether capturing is worth a measurement."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from lucid_cli.arguments import Seconds
from lucid_cli.built_in import built_in_command
from lucid_cli.child import Ended, run_child
from lucid_cli.command import resolve_program
from lucid_cli.descendants import adopting_orphans
from lucid_cli.experiment import CAPTURED, NATIVE
from lucid_cli.interrupts import Interrupts
from lucid_cli.orchestrate import child_env
from lucid_cli.output import say, write_result
from lucid_cli.reporters.estimate import Part, Shown, part_words, render_estimate
from lucid_cli.reporters.words import counted
from lucid_profiler import jsonio
from lucid_profiler.collect import Observation, observe
from lucid_profiler.collect_kernels import read_kernels
from lucid_profiler.entries import CaptureEntry
from lucid_profiler.estimate import (
    Capture,
    Known,
    device_share,
    host_share,
    judge,
    main_optimizer,
    read_capture,
    with_medians,
)
from lucid_profiler.kernel_trace import NUM_STEPS, NUM_WARMUP_STEPS, STEPS_VARIABLE
from lucid_profiler.records import Arm, Kernels, Wall
from lucid_profiler.ring import RingTail
from lucid_profiler.traces import ProcessTrace, read_traces, start_order

CHILD_FAILED = 8
DEFAULT_STEPS = 30
_POLL_S = 0.2
_POLL_SHARE = 20  # a pause is so many times as long as the look at the rings before it
_TAIL_LINES = 20
_STEP_WRAP = 2**32  # of a step's number in a ring

__all__ = ["DEFAULT_STEPS", "command"]


@click.command("estimate", context_settings={"allow_interspersed_args": False, "max_content_width": 100})
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"End a run after so many optimizer steps.  [default: {DEFAULT_STEPS}, none with --seconds]",
)
@click.option("--seconds", type=Seconds(), metavar="SECONDS", help="End a run so long after its first optimizer step.")
@click.option(
    "--timeout", type=Seconds(), metavar="SECONDS", help="End a run so long after its start, whatever it did."
)
@click.option("--kernels", is_flag=True, help="Trace one more run on a CUDA device, and count the launches of a step.")
@click.option("-v", "--verbose", is_flag=True, help="Copy the command's output to standard error.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[[--] COMMAND [ARGS]...]")
def command(words: tuple[str, ...], **options: Any) -> int:
    """Run COMMAND for some steps, and say whether capturing its optimizer is worth it.

    COMMAND is run exactly as typed, natively, and where it uses a CUDA device and an optimizer that can capture, once
    more with capture on. Each run is interrupted, as Ctrl-C does, once it has taken its steps; what it writes until
    then, it writes. Without a COMMAND the built-in fit is run. The result goes to standard output, progress to
    standard error.
    """
    typed = words or built_in_command()
    resolve_program(typed, os.environ)
    steps = options["steps"] or (None if options["seconds"] else DEFAULT_STEPS)
    limits = _Limits(steps=steps, seconds=options["seconds"], timeout_s=options["timeout"])
    with Interrupts() as interrupts, _heard_by_children(), adopting_orphans():
        runner = _Runner(typed, limits, interrupts=interrupts, copy_output=options["verbose"])
        shown = _estimate(runner, with_kernels=options["kernels"])
    if interrupts.first is not None:
        return 128 + interrupts.first
    write_result(render_estimate(shown))
    return CHILD_FAILED if any(part.status == "failed" for part in shown.parts) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """What ends a run: steps of one optimizer, seconds since its first step, seconds since its start."""

    steps: int | None = None
    seconds: float | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """One run: how it ended, what the agents saw, and the trace of its first process."""

    part: Part
    seen: Observation
    first: ProcessTrace
    kernels: Kernels
    captures: tuple[Capture, ...]
    optimizers: tuple[Mapping[str, Any], ...]


@contextmanager
def _heard_by_children() -> Iterator[None]:
    """Let a run be interrupted although lucid was started with SIGINT ignored, which it would inherit."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: None)  # as deaf as before; a handler is not inherited
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class _StepCount:
    """Counts the steps of each optimizer of a process, from the numbers that its ring gives them.

    Args:
        path: the ring; it may still be in the making.
    """

    def __init__(self, path: Path) -> None:
        self.tail = RingTail(path)
        self._nums: dict[int, int] = {}

    def most(self) -> int:
        """Return how often the optimizer has stepped that stepped most often.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a file.
        """
        for optimizer, step in self.tail.newest_steps().items():
            known = self._nums.get(optimizer, 0)
            ahead = (step - known) % _STEP_WRAP
            # Of threads that step in turn, the later number may be written first.
            self._nums[optimizer] = known + (ahead if ahead < _STEP_WRAP // 2 else 0)
        return max(self._nums.values(), default=0)


class _Watch:
    """Interrupts a run once it has reached a limit; a thread that looks at the files of its agents.

    Attributes:
        reached: the limit in words; None as long as there was none.
    """

    def __init__(self, run_dir: Path, limits: _Limits, *, interrupts: Interrupts) -> None:
        self.reached: str | None = None
        self._run_dir = run_dir
        self._limits = limits
        self._interrupts = interrupts
        self._counts: dict[Path, _StepCount] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, _pid: int) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End looking, and forget a signal that came too late for the run: the next one must not get it."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        while not self._interrupts.events.empty():
            self._interrupts.events.get_nowait()

    def _look(self) -> None:
        begin = time.monotonic()
        pause_s = _POLL_S
        while not self._stopped.wait(pause_s):
            now = time.monotonic()
            limit = self._limit(now - begin)
            # A second signal would kill a run that the user has interrupted and that still saves its work.
            if limit is not None and self._interrupts.first is None:
                self.reached = limit
                self._interrupts.events.put(signal.SIGINT)
                return
            pause_s = max(_POLL_S, _POLL_SHARE * (time.monotonic() - now))

    def _limit(self, age_s: float) -> str | None:
        if self._limits.timeout_s is not None and age_s >= self._limits.timeout_s:
            return f"at its time limit of {self._limits.timeout_s:g} s"
        for path in self._run_dir.glob("steps-*.ring"):
            with suppress(OSError, ValueError):  # a file that is being made
                count = self._counts.setdefault(path, _StepCount(path))
                num_steps = count.most()
                if self._limits.steps is not None and num_steps >= self._limits.steps:
                    return f"after the {counted(self._limits.steps, 'step')} asked for"
                age_s = (time.monotonic_ns() - (count.tail.first_begin_ns or time.monotonic_ns())) / 1e9
                if self._limits.seconds is not None and age_s >= self._limits.seconds:
                    return f"after {self._limits.seconds:g} s of steps"
        return None


class _Runner:
    """Runs the command, each time in a fresh process that a limit ends."""

    def __init__(self, typed: tuple[str, ...], limits: _Limits, *, interrupts: Interrupts, copy_output: bool) -> None:
        self.typed = typed
        self.limits = limits
        self._interrupts = interrupts
        self._copy_output = copy_output

    @property
    def is_interrupted(self) -> bool:
        """Whether the user wants no more runs."""
        return self._interrupts.first is not None

    def run(self, arm: Arm, *, num_traced: int = 0) -> _Ran:
        """Run the command in an arm, and trace so many steps of it."""
        variables, limits = {}, self.limits
        if num_traced:
            variables = {STEPS_VARIABLE: str(num_traced)}
            # One step more than are traced, whose begin ends the last of them.
            limits = replace(limits, steps=num_traced + NUM_WARMUP_STEPS + 2, seconds=None)
        with tempfile.TemporaryDirectory(prefix="lucid-", ignore_cleanup_errors=True) as folder:
            run_dir = Path(folder)
            watch = _Watch(run_dir, limits, interrupts=self._interrupts)
            try:
                ended = run_child(
                    self.typed,
                    {**child_env(os.environ, arm, run_dir), **variables},
                    interrupts=self._interrupts,
                    copy_output=self._copy_output,
                    on_start=watch.start,
                )
            finally:
                watch.stop()
            ran = _read(run_dir, arm.name if not num_traced else "traced", ended=ended, reached=watch.reached)
        _report(ran.part, ended)
        return ran


def _read(run_dir: Path, name: str, *, ended: Ended, reached: str | None) -> _Ran:
    wall = Wall(source="process", begin_ns=ended.begin_ns, end_ns=ended.end_ns)
    seen = observe(run_dir, run=0, process=wall, max_rss_bytes=ended.max_rss_bytes)
    traces = sorted(read_traces(run_dir), key=start_order)
    first = traces[0] if traces else ProcessTrace()
    was_asked = ended.ending == "interrupted" and reached is not None
    was_ended = was_asked and ended.returncode != 0
    is_failure = not was_asked and (ended.returncode != 0 or ended.ending != "by_itself")
    entry = first.last(CaptureEntry)
    captures = [read_capture(report) for report in (entry.capture if entry is not None else None) or ()]
    part = Part(
        name=name,
        status="failed" if is_failure else "ended" if was_ended else "ok",
        limit=reached if was_asked else None,
        was_killed=ended.signal == "SIGKILL",
        returncode=ended.returncode,
        signal=ended.signal,
        seconds=(ended.end_ns - ended.begin_ns) / 1e9,
        num_steps=seen.agent.num_steps,
        num_processes=seen.agent.num_processes,
    )
    return _Ran(
        part=part,
        seen=seen,
        first=first,
        kernels=read_kernels(run_dir, arm=name, status="failed" if is_failure else "ok"),
        captures=tuple(capture for capture in captures if capture is not None),
        optimizers=tuple(_optimizers(run_dir)),
    )


def _optimizers(run_dir: Path) -> Iterator[Mapping[str, Any]]:
    """Yield what the journals say of each optimizer itself: index, name and module of its class."""
    for path in sorted(run_dir.glob("agent-*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            with suppress(ValueError):  # observing has counted it
                fields = jsonio.loads(line)
                if isinstance(fields, dict) and fields.get("kind") == "steps":
                    yield from (one for one in fields.get("optimizers") or () if isinstance(one, dict))


def _report(part: Part, ended: Ended) -> None:
    say(f"{part.name}  {part_words(part)}")
    if part.status == "failed":
        for text in ended.output_tail.splitlines()[-_TAIL_LINES:]:
            say(f"  | {text}")


def _estimate(runner: _Runner, *, with_kernels: bool) -> Shown:
    """Run what is needed, and judge it."""
    native = runner.run(NATIVE)
    parts = [native.part]
    is_usable = native.part.status != "failed" and not runner.is_interrupted
    used_cuda = _used_cuda(native)
    can_capture = bool(native.captures) if _has_finished(native) else None
    captured = traced = None
    if is_usable and used_cuda and can_capture is not False:
        captured = runner.run(CAPTURED)
        parts.append(captured.part)
    if is_usable and used_cuda and with_kernels and not runner.is_interrupted:
        traced = runner.run(NATIVE, num_traced=NUM_STEPS)
        parts.append(traced.part)
    index = main_optimizer(native.first.steps.records, native.captures)
    host = host_share(native.first.steps.records, index)
    device = device_share(native.first.device_times.records, index)
    report = _capture_of(captured, index)
    if report is not None and captured is not None:
        report = with_medians(report, device, captured.first.device_times.records)
    known = Known(
        share=device or host,
        share_reason=_share_reason(native),
        used_cuda=used_cuda,
        can_capture=can_capture,
        native=_capture_of(native, index),
        captured=report,
        captured_reason=_captured_reason(captured),
    )
    judgement = judge(known)
    if native.part.status == "failed":
        judgement = replace(judgement, decision="cannot_say", reason="program_failed")
    return Shown(
        command=runner.typed,
        parts=tuple(parts),
        known=known,
        host=host,
        device=device,
        judgement=judgement,
        optimizer=next((one for one in native.optimizers if one.get("index") == index), None),
        num_optimizers=len({step.optimizer for step in native.first.steps.records}),
        kernels=traced.kernels if traced is not None else None,
        kernels_reason="kernels_off" if not with_kernels else "no_cuda" if used_cuda is False else "not_traced",
        data_wait=native.seen.metrics["data_wait"],
        wall_s=(native.seen.wall.end_ns - native.seen.wall.begin_ns) / 1e9,
        notes=native.seen.notes,
    )


def _has_finished(ran: _Ran) -> bool:
    """Return whether the process came to its exit handlers, which write down what only they know."""
    return ran.first.last(CaptureEntry) is not None


def _used_cuda(ran: _Ran) -> bool | None:
    peak = ran.seen.metrics["peak_allocated"]
    if peak.value is not None or ran.first.device_times.records:
        return True
    return False if peak.reason == "no_cuda" else None


def _share_reason(ran: _Ran) -> str:
    if not ran.seen.agent.loaded:
        return "no_agent"
    return "too_few_steps" if ran.first.steps.records else "no_steps"


def _capture_of(ran: _Ran | None, index: int | None) -> Capture | None:
    captures = ran.captures if ran is not None else ()
    return next((capture for capture in captures if capture.index == index), None)


def _captured_reason(ran: _Ran | None) -> str:
    if ran is None:
        return "not_recorded"
    if ran.part.status == "failed":
        return "captured_failed"
    return "not_recorded" if _has_finished(ran) else "not_finished"
