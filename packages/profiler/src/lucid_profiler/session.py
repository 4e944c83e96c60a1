"""The agent's session: everything that is recorded about one process, from its start to the handlers at its exit."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import NoneType
from typing import Any

from lucid_profiler import snapshot
from lucid_profiler.allocator import AllocatorReadings, interval_ns
from lucid_profiler.hooks import TorchHooks
from lucid_profiler.journal import Guard, Journal, is_of_a_signal
from lucid_profiler.monitor_mark import FIT_MARKS, mark_monitor
from lucid_profiler.nonfinite import LossCheck, ParameterCheck
from lucid_profiler.tracking import TrackedOptimizer

AUTOMATIC_PARTS = ("parameters", "optimizer_state")
MAX_MARKS = 10_000  # a mark in every step of a long run would fill memory and report
MAX_NAME_CHARS = 200
MAX_NOTES = 200

__all__ = ["AUTOMATIC_PARTS", "ProcessSession"]


def _name_problem(name: Any) -> str | None:
    """Return why `name` cannot name a part or a phase, None if it can."""
    if not isinstance(name, str):
        return f"a name must be a text, this is of type {type(name).__name__}"
    if not name:
        return "a name must not be empty"
    return f"a name has at most {MAX_NAME_CHARS} characters" if len(name) > MAX_NAME_CHARS else None


def _shown(name: Any) -> str:
    if isinstance(name, str):
        return str.__repr__(name[:40])
    return repr(name) if type(name) in (int, float, bool, NoneType) else f"a {type(name).__name__}"


class ProcessSession:
    """Records one process. Nothing that goes wrong in here reaches the program; it is counted in `guard`.

    Args:
        run_dir: private directory of the run.
        hooks: what watches torch in this process.
        guard: counts the agent's faults.
        name: of the process's files, by default its pid.
        begin_ns: when the process began, on the clock of `time.monotonic_ns`; now by default.
        environ: settings: LUCID_ALLOCATOR_INTERVAL_S in seconds, 0 for off; LUCID_PRIVATE_POOLS and LUCID_NONFINITE,
            1 for on.

    Attributes:
        keep: is given each part and its value once it is digested; None where only digests are kept.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        hooks: TorchHooks,
        guard: Guard,
        name: str | None = None,
        begin_ns: int | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.active = True
        self.keep: Callable[[str, Any], object] | None = None
        self._guard = guard
        self._hooks = hooks
        self._pid = os.getpid()
        self._run_dir = run_dir
        self._journal = Journal(run_dir / f"agent-{name or self._pid}.jsonl")
        self._error_path = run_dir / f"agent-{name or self._pid}.error"
        self._begin_ns = time.monotonic_ns() if begin_ns is None else begin_ns
        self._used = False
        self._fit_begin_ns: int | None = None
        self._fit_end_ns: int | None = None
        self._num_fits = 0
        self._num_nested = 0
        self._marks: list[tuple[str, int]] = []
        self._states: dict[str, int] = {}
        self._last_state_ns = 0
        self._noted: set[str] = set()
        self._interval_problem: str | None = None
        self._losses = LossCheck()
        self._parameters = ParameterCheck() if environ.get("LUCID_NONFINITE") == "1" else None
        self._allocator = AllocatorReadings(
            self._write,
            interval_ns=self._allocator_interval_ns(environ),
            with_private_pools=environ.get("LUCID_PRIVATE_POOLS") == "1",
        )
        hooks.watch(self._read_allocator, needs_device=True)
        if self._parameters is not None:
            hooks.watch(self._check_parameters)

    @property
    def _is_timing(self) -> bool:
        return self._fit_begin_ns is not None and self._fit_end_ns is None

    def fit(self) -> AbstractContextManager[None]:
        """Time the body; both ends follow a synchronisation of CUDA, when CUDA is in use.

        Of several intervals the first outermost one counts; the others change nothing, and a note says how many.
        """
        return _Interval(self)

    def begin_fit(self) -> bool:
        """Begin the timed interval; return whether this entry is the one that counts."""
        self._used = True
        self._num_fits += 1
        if self._fit_begin_ns is not None:
            self._num_nested += self._fit_end_ns is None
            return False
        self._wait()
        self._mark_monitor(FIT_MARKS[0])  # after the wait: what was queued before is not of the interval
        self._fit_begin_ns = time.monotonic_ns()
        return True

    def end_fit(self) -> None:
        """End the timed interval."""
        if self.active:
            self._wait()
            self._fit_end_ns = time.monotonic_ns()
            self._mark_monitor(FIT_MARKS[1])
            self._write("fit", begin_ns=self._fit_begin_ns, end_ns=self._fit_end_ns)
            self._write_phases(self._fit_end_ns)  # a process can end without its exit handlers
            self._hooks.settle()
            with self._guard:
                self._allocator.read_now(step=self._hooks.num_steps)

    def _wait(self) -> None:
        """Wait for every device on which work of the program may be queued."""
        with self._guard:
            snapshot.synchronize(snapshot.devices_in_use(self._hooks.devices(), self._guard))

    def _mark_monitor(self, name: str) -> None:
        with self._guard:
            mark_monitor(self._run_dir, name)

    def loss(self, value: Any) -> None:
        """Judge a loss, or note why it was not."""
        self._used = True
        with self._guard:
            try:
                self._losses.add(value)
            except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
                if is_of_a_signal(error):
                    raise
                self.note(f"loss({_shown(value)}) was not judged: {error}"[:500])

    def mark(self, name: Any) -> None:
        """Begin the phase `name`, or note why there is none."""
        self._used = True
        with self._guard:
            if (problem := _name_problem(name)) is not None:
                self.note(f"mark({_shown(name)}) was not recorded: {problem}")
            elif len(self._marks) < MAX_MARKS:
                self._marks.append((str.__str__(name), time.monotonic_ns()))

    def state(self, part: Any, value: Any) -> None:
        """Write the digest of `value`, or a note that says why there is none."""
        self._used = True
        with self._guard:
            if (problem := _name_problem(part)) is not None:
                self.note(f"state({_shown(part)}) was not recorded: {problem}")
            elif part in AUTOMATIC_PARTS:
                self.note(f"state({part!r}) was not recorded: the agent takes that part itself; give it another name")
            elif self._is_timing:
                self.note(
                    f"state({part!r}) inside fit() was not recorded: a digest there would be timed; call it after"
                )
            else:
                name = str.__str__(part)
                self._last_state_ns = time.monotonic_ns()
                self._states[name] = self._states.get(name, 0) + 1
                self._digest(name, lambda: snapshot.as_state(value))

    def deactivate(self) -> None:
        """Record nothing more; for forked children, whose parent goes on recording."""
        self.active = False
        self._hooks.abandon()

    def finish(self) -> None:
        """Take what is only known at the end: peaks first, then digests, counters and the environment."""
        if not self.active or os.getpid() != self._pid:
            return
        exit_ns = time.monotonic_ns()
        self.active = False
        if self._used or self._hooks.num_steps:
            with self._guard:
                self._finish(exit_ns)
        self._hooks.deactivate()
        with self._guard:
            self._journal.close()
        if self._guard.num_errors and not self._journal.complete:
            with self._guard:
                self._error_path.write_text("; ".join(self._guard.errors), encoding="utf-8", errors="replace")

    def _finish(self, exit_ns: int) -> None:
        with self._guard:
            self._hooks.hold_living()
        devices = self._hooks.devices()
        self._write("memory", **snapshot.memory(devices, self._guard))
        self._finish_measurements()
        self._write_phases(exit_ns)
        optimizers = self._hooks.optimizers()
        self._write(
            "steps",
            num_steps=self._hooks.num_steps,
            num_waits=self._hooks.num_waits,
            optimizers=[optimizer.describe() for optimizer in optimizers],
        )
        if optimizers:
            for text in self._hooks.notes():
                self.note(text)
            self._tell_uncovered(optimizers)
            names = self._hooks.parameter_names(is_anew=True)
            self._digest("parameters", lambda: snapshot.parameters(optimizers, names))
            self._digest("optimizer_state", lambda: snapshot.optimizer_state(optimizers, names))
            self._write("capture", capture=snapshot.capture(optimizers, self._guard))
            self._write_findings(names)
        else:
            self._write_findings({})
        self._note_fits()
        self._note_repeats()
        self._write("env", **snapshot.environment(devices, self._guard))
        self._write(
            "end",
            pid=self._pid,
            rank=snapshot.rank(),
            begin_ns=self._begin_ns,
            exit_ns=exit_ns,
            argv=list(sys.orig_argv),
            num_errors=self._guard.num_errors,
            errors=self._guard.errors,
        )

    def _write_phases(self, until_ns: int) -> None:
        """Write down every phase that began by then, the last one until then; the last such entry counts."""
        with self._guard:
            marks = [mark for mark in tuple(self._marks) if mark[1] <= until_ns]  # other threads may go on marking
            ends_ns = [*(begin_ns for _, begin_ns in marks[1:]), until_ns]
            phases = [
                {"name": name, "begin_ns": begin_ns, "end_ns": end_ns}
                for (name, begin_ns), end_ns in zip(marks, ends_ns, strict=False)
            ]
            if phases:
                self._write("phases", phases=phases)

    def _tell_uncovered(self, optimizers: Sequence[TrackedOptimizer]) -> None:
        """Write down what was trained and is in neither of the parts that the agent takes itself."""
        with self._guard:
            for text in self._hooks.uncovered():
                self._write("uncovered", text=text)
        for tracked in optimizers:
            with self._guard:
                for what in snapshot.undigested(tracked):
                    self._write("uncovered", text=f"state of optimizer {tracked.index}: {what}")

    def _finish_measurements(self) -> None:
        """Wait for the devices once, and take what was still under way."""
        with self._guard:
            snapshot.synchronize(self._hooks.devices())
        for device in self._hooks.devices():
            with self._guard:
                self._write("device", **snapshot.device(device))
        times = self._hooks.settle()
        if times is not None:
            self._write(
                "device_times",
                num_steps=times.num_steps,
                num_results=times.num_results,
                num_captured=times.num_captured,
                num_behind=times.num_behind,
            )
        with self._guard:
            self._allocator.read_now(step=self._hooks.num_steps)
        if self._interval_problem is not None:
            self.note(self._interval_problem)

    def _write_findings(self, names: Mapping[int, str]) -> None:
        for take in (self._losses.findings, lambda: self._parameters.findings(names) if self._parameters else []):
            with self._guard:
                for finding in take():
                    self._write("nonfinite", **dataclasses.asdict(finding))

    def _allocator_interval_ns(self, environ: Mapping[str, str]) -> int:
        try:
            return interval_ns(environ.get("LUCID_ALLOCATOR_INTERVAL_S"))
        except ValueError as error:
            self._interval_problem = f"{error}: readings were taken at the default interval"
            return interval_ns(None)

    def _read_allocator(self, tracked: TrackedOptimizer, now_ns: int) -> None:
        self._allocator.after_step(tracked.devices, step=self._hooks.num_steps, now_ns=now_ns)

    def _check_parameters(self, tracked: TrackedOptimizer, _now_ns: int) -> None:
        if self._parameters is not None:
            self._parameters.after_step(tracked.optimizer, index=tracked.index, step=tracked.num_steps)

    def _note_fits(self) -> None:
        if self._is_timing:
            self.note("fit() was entered and never left: it is not the wall")
        elif self._num_fits > 1:
            nested = f", {self._num_nested} of them inside it," if self._num_nested else ""
            self.note(
                f"fit() was entered {self._num_fits} times: only the first interval is the wall; the other "
                f"{self._num_fits - 1}{nested} changed nothing. Put one fit() around all of it, and mark() its phases"
            )

    def _note_repeats(self) -> None:
        for part, num in self._states.items():
            if num > 1:
                self.note(f"state({part!r}) was called {num} times: the last value counts")
        if len(self._marks) == MAX_MARKS:
            self.note(f"mark() was called {MAX_MARKS:,} times or more: later marks are not recorded")
        if self._fit_begin_ns is None and 0 < self._last_state_ns < self._hooks.last_end_ns:
            self.note("state() was called between optimizer steps: its cost is inside the timed interval; use fit()")

    def _digest(self, part: str, take: Callable[[], Any]) -> None:
        with self._guard:
            from lucid_profiler.digest import digest_state  # noqa: PLC0415 - a program that records nothing needs none

            try:
                state = take()
                digest = digest_state(state)
            except (TypeError, ValueError, RuntimeError) as error:
                if is_of_a_signal(error):
                    raise
                self.note(f"no digest of {part!r}: {error}"[:500])
                return
            self._write("state", part=part, **snapshot.plain_digest(digest))
            if self.keep is not None:
                self.keep(part, state)

    def note(self, text: str) -> None:
        """Write a note once; a call in every step must not fill the disk."""
        if text not in self._noted and len(self._noted) < MAX_NOTES:
            self._noted.add(text)
            self._write("note", text=text)

    def _write(self, kind: str, **fields: Any) -> None:
        with self._guard:
            self._journal.write(kind, **fields)


class _Interval(nullcontext[None]):
    """The timed interval as a context manager, which may be entered more than once, and with `async`, as its base."""

    def __init__(self, session: ProcessSession) -> None:
        super().__init__()
        self._session = session
        self._counts: list[bool] = []

    def __enter__(self) -> None:
        self._counts.append(self._session.begin_fit())

    def __exit__(self, *_error: object) -> None:
        if self._counts and self._counts.pop():
            self._session.end_fit()

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, *_error: object) -> None:
        self.__exit__()
