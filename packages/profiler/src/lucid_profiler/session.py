"""The agent's session: everything that is recorded about one process, from its start to the handlers at its exit."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lucid_profiler import snapshot
from lucid_profiler.hooks import TorchHooks
from lucid_profiler.journal import Guard, Journal

AUTOMATIC_PARTS = ("parameters", "optimizer_state")
MAX_MARKS = 10_000  # a mark in every step of a long run would fill memory and report

__all__ = ["AUTOMATIC_PARTS", "ProcessSession"]


class ProcessSession:
    """Records one process. Nothing that goes wrong in here reaches the program; it is counted in `guard`.

    Args:
        run_dir: private directory of the run.
        hooks: what watches torch in this process.
        guard: counts the agent's faults.
    """

    def __init__(self, run_dir: Path, *, hooks: TorchHooks, guard: Guard) -> None:
        self.active = True
        self._guard = guard
        self._hooks = hooks
        self._pid = os.getpid()
        self._journal = Journal(run_dir / f"agent-{self._pid}.jsonl")
        self._error_path = run_dir / f"agent-{self._pid}.error"
        self._begin_ns = time.monotonic_ns()
        self._used = False
        self._fit: list[int] = []
        self._marks: list[tuple[str, int]] = []
        self._states: dict[str, int] = {}
        self._last_state_ns = 0

    @contextmanager
    def fit(self) -> Iterator[None]:
        """Time the body; both ends follow a synchronisation of CUDA, when CUDA is in use.

        Raises:
            RuntimeError: on entering a second interval.
        """
        if self._fit:
            raise RuntimeError(
                "lucid_profiler.fit() was entered a second time: a run has one timed interval. "
                "Put one fit() around all of it, and mark() its phases"
            )
        self._used = True
        with self._guard:
            snapshot.synchronize()
        self._fit.append(time.monotonic_ns())
        try:
            yield
        finally:
            if self.active:
                with self._guard:
                    snapshot.synchronize()
                self._fit.append(time.monotonic_ns())
                self._write("fit", begin_ns=self._fit[0], end_ns=self._fit[1])

    def mark(self, name: str) -> None:
        """Begin the phase `name`."""
        self._used = True
        if len(self._marks) < MAX_MARKS:
            self._marks.append((str(name), time.monotonic_ns()))

    def state(self, part: str, value: Any) -> None:
        """Write the digest of `value`, or a note that says why there is none."""
        self._used = True
        with self._guard:
            if part in AUTOMATIC_PARTS:
                self._note(f"state({part!r}) was not recorded: the agent takes that part itself; give it another name")
            elif len(self._fit) == 1:
                self._note(
                    f"state({part!r}) inside fit() was not recorded: a digest there would be timed; call it after"
                )
            else:
                self._last_state_ns = time.monotonic_ns()
                self._states[part] = self._states.get(part, 0) + 1
                self._digest(part, lambda: snapshot.as_state(value))

    def deactivate(self) -> None:
        """Record nothing more; for forked children, whose parent goes on recording."""
        self.active = False
        self._hooks.deactivate()

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
        self._write("memory", **snapshot.memory(self._guard))
        if self._marks:
            ends_ns = [begin_ns for _, begin_ns in self._marks[1:]] + [exit_ns]
            phases = [
                {"name": name, "begin_ns": begin_ns, "end_ns": end_ns}
                for (name, begin_ns), end_ns in zip(self._marks, ends_ns, strict=True)
            ]
            self._write("phases", phases=phases)
        optimizers = self._hooks.optimizers()
        self._write("steps", num_steps=self._hooks.num_steps, optimizers=[o.describe() for o in optimizers])
        if optimizers:
            for text in self._hooks.notes():
                self._note(text)
            names = self._hooks.parameter_names()
            self._digest("parameters", lambda: snapshot.parameters(optimizers, names))
            self._digest("optimizer_state", lambda: snapshot.optimizer_state(optimizers, names))
            self._write("capture", capture=snapshot.capture(optimizers, self._guard))
        self._note_repeats()
        self._write("env", **snapshot.environment(self._guard))
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

    def _note_repeats(self) -> None:
        for part, num in self._states.items():
            if num > 1:
                self._note(f"state({part!r}) was called {num} times: the last value counts")
        if len(self._marks) == MAX_MARKS:
            self._note(f"mark() was called {MAX_MARKS:,} times or more: later marks are not recorded")
        if not self._fit and 0 < self._last_state_ns < self._hooks.last_end_ns:
            self._note("state() was called between optimizer steps: its cost is inside the timed interval; use fit()")

    def _digest(self, part: str, take: Callable[[], Any]) -> None:
        with self._guard:
            from lucid_profiler.digest import digest_state  # noqa: PLC0415 - a program that records nothing needs none

            try:
                digest = digest_state(take())
            except (TypeError, ValueError, RuntimeError) as error:
                self._note(f"no digest of {part!r}: {error}"[:500])
            else:
                self._write("state", part=part, **snapshot.plain_digest(digest))

    def _note(self, text: str) -> None:
        self._write("note", text=text)

    def _write(self, kind: str, **fields: Any) -> None:
        with self._guard:
            self._journal.write(kind, **fields)
