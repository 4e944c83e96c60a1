"""The monitor's loop: ticks at their deadlines, requests, the end of the target and of whoever launched it."""

import gc
import os
import selectors
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lucid_profiler import __version__
from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.address import Lock, make_private, socket_path
from lucid_profiler.monitor.clocks import Clock, SystemClock
from lucid_profiler.monitor.gpu_reader import GpuReader, NoGpus
from lucid_profiler.monitor.protocol import VERBS
from lucid_profiler.monitor.records import SCHEMA
from lucid_profiler.monitor.sampler import Sampler
from lucid_profiler.monitor.server import Server
from lucid_profiler.monitor.target import Target, open_pidfd
from lucid_profiler.monitor.watchdog import Watchdog

IDLE_LIMIT_NS = 10_000_000_000  # for the request that names the target
MAX_INTERVAL_S = 3600.0
MIN_INTERVAL_S = 0.001
_LONGEST_WAIT_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

__all__ = ["Daemon", "Start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a start request asks for.

    Raises:
        ValueError: a value cannot be used; the message says which.
    """

    pid: int
    output: Path
    start_ticks: int | None = None
    interval_s: float = 0.1
    with_nvml: bool = True

    def __post_init__(self) -> None:
        if type(self.pid) is not int or self.pid <= 0:
            raise ValueError(f"pid is {self.pid!r}; it must be a number above 0")
        if type(self.interval_s) not in {int, float} or not MIN_INTERVAL_S <= self.interval_s <= MAX_INTERVAL_S:
            raise ValueError(f"interval_s is {self.interval_s!r}; it must be from {MIN_INTERVAL_S} to {MAX_INTERVAL_S}")
        if not self.output.is_absolute():
            raise ValueError(f"output is {str(self.output)!r}; it must be an absolute path")

    @classmethod
    def parse(cls, request: dict[str, Any]) -> "Start":
        """Return what a request asks for.

        Raises:
            ValueError: it cannot be used.
        """
        return cls(
            pid=request.get("pid", 0),
            output=Path(str(request.get("output", ""))),
            start_ticks=request.get("start_ticks"),
            interval_s=request.get("interval_s", cls.__dataclass_fields__["interval_s"].default),
            with_nvml=request.get("with_nvml") is not False,
        )


class Daemon:
    """Follows one target, and ends with it.

    Args:
        control: connection to whoever launched it, which is also how their end is noticed; None without one.
        launcher_pid: their process; None where the daemon may outlive it.
        directory: private directory to listen in; None to answer on `control` only.
        clock: the clocks of the machine.

    Raises:
        EnvironmentUnusableError: another daemon listens in the directory, or it is not private.
        OSError: it cannot be used.
    """

    def __init__(
        self,
        *,
        control: socket.socket | None,
        launcher_pid: int | None = None,
        directory: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = SystemClock() if clock is None else clock
        self._selector = selectors.DefaultSelector()
        self._is_bound_to_launcher = directory is None
        self._server = Server(
            self._selector, self._handle, mono_ns=self._clock.mono_ns, on_trusted_end=self._on_control_end
        )
        self._directory = directory
        self._lock: Lock | None = None
        self._signals: socket.socket | None = None
        self._watchdog: Watchdog | None = None
        self._launcher_fd: int | None = None
        self._start: Start | None = None
        self._target: Target | None = None
        self._sampler: Sampler | None = None
        self._has_begun = False
        self._ending: str | None = None
        self._idle_limit_ns = self._clock.mono_ns() + IDLE_LIMIT_NS
        if directory is not None:
            make_private(directory)
            self._lock = Lock(directory)
            self._server.listen(socket_path(directory))
        if control is not None:
            self._server.adopt(control)
        if launcher_pid is not None and self._is_bound_to_launcher:
            self._watch_launcher(launcher_pid)

    def run(self) -> None:
        """Serve until the target ends, somebody says stop, or nobody is left who could."""
        wakeups = self._catch_signals()
        try:
            while self._ending is None:
                self._step()
            self._finish(self._ending)
        except Exception:  # noqa: BLE001 - nobody sees this process's standard error: a fault belongs into the log
            with suppress(Exception):
                self._note_fault(traceback.format_exc())
        finally:
            signal.set_wakeup_fd(-1)
            self._close()
            for end in wakeups:
                end.close()

    def _step(self) -> None:
        ready = self._selector.select(self._wait_s())
        for key, _ in ready:
            # A tick that is due comes before whatever else is waiting.
            self._tick()
            if self._ending is None:
                key.data()
        # Not after requests that files told of: one would wait for two ticks, which a slow driver draws out.
        if self._server.is_behind or not ready:
            self._tick()
        if self._ending is None:
            self._server.catch_up()
        now_ns = self._clock.mono_ns()
        self._server.expire(now_ns)
        if self._sampler is None and now_ns >= self._idle_limit_ns:
            self._ending = "idle"

    def _tick(self) -> None:
        if self._sampler is not None and self._ending is None:
            self._begin()
            self._sampler.tick()

    def _wait_s(self) -> float:
        if self._server.is_behind:
            return 0.0
        deadlines = [self._idle_limit_ns] if self._sampler is None else [self._sampler.next_ns]
        if self._server.next_deadline_ns is not None:
            deadlines.append(self._server.next_deadline_ns)
        return min(max(0.0, (min(deadlines) - self._clock.mono_ns()) / 1e9), _LONGEST_WAIT_S)

    def _catch_signals(self) -> tuple[socket.socket, socket.socket]:
        """Let a signal end the loop, also while it waits."""
        receiver, sender = socket.socketpair()
        receiver.setblocking(False)
        sender.setblocking(False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: self._end_with("signal"))
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._selector.register(receiver, selectors.EVENT_READ, lambda: receiver.recv(64))
        self._signals = receiver
        return receiver, sender

    def _watch_launcher(self, pid: int) -> None:
        try:
            self._launcher_fd = open_pidfd(pid)
        except OSError:
            self._ending = "launcher_exit"
            return
        self._selector.register(self._launcher_fd, selectors.EVENT_READ, lambda: self._end_with("launcher_exit"))

    def _on_control_end(self) -> None:
        if self._is_bound_to_launcher or self._sampler is None:
            self._end_with("launcher_exit")

    def _on_target_end(self) -> None:
        if self._sampler is not None:
            self._sampler.note_exit()
        self._end_with("target_exit")

    def _end_with(self, status: str) -> None:
        if self._ending is None:
            self._ending = status

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        verbs: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "hello": self._hello,
            "start": self._start_following,
            "stop": self._stop,
            "status": self._status,
            "mark": self._mark,
            "flush": self._flush,
        }
        verb = request.get("verb")
        answer: dict[str, Any]
        try:
            if not isinstance(verb, str) or verb not in verbs:
                raise ValueError(f"the verb {verb!r} is none of {', '.join(VERBS)}")  # noqa: TRY301 - answered below
            answer = {"ok": True, **verbs[verb](request)}
        except (EnvironmentUnusableError, ValueError, TypeError) as error:
            answer = {"ok": False, "error": str(error)}
        except OSError as error:
            answer = {"ok": False, "error": f"{error.filename or 'system'}: {error.strerror or error}"}
        return answer if "id" not in request else {**answer, "id": request["id"]}

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("schema", SCHEMA) != SCHEMA:
            raise ValueError(f"this daemon speaks {SCHEMA}, not {request['schema']!r}: stop it, and start it anew")
        return {"schema": SCHEMA, "version": __version__, "verbs": list(VERBS)}

    def _start_following(self, request: dict[str, Any]) -> dict[str, Any]:
        start = Start.parse(request)
        if self._start is not None:
            if self._start != start:
                raise ValueError(f"this daemon follows process {self._start.pid} already; stop it first")
            return {"already": True}
        with ExitStack() as opened:
            target = Target(start.pid, start_ticks=start.start_ticks)
            opened.callback(target.close)
            self._sampler = Sampler(
                target,
                start.output,
                gpus=NoGpus("gap" if start.with_nvml else "nvml_off"),
                clock=self._clock,
                interval_ns=round(start.interval_s * 1e9),
            )
            opened.pop_all()
        self._start, self._target = start, target
        self._selector.register(target.fd, selectors.EVENT_READ, self._on_target_end)
        self._watchdog = Watchdog(self._causes(target), last_words=self._give_up)
        return {"already": False, "target": dict(target.brief())}

    def _causes(self, target: Target) -> dict[int, str]:
        """Return the descriptors whose being readable means that this process has to end, and why then."""
        causes = {target.fd: "target_exit"}
        if self._launcher_fd is not None:
            causes[self._launcher_fd] = "launcher_exit"
        if self._signals is not None:
            causes[self._signals.fileno()] = "signal"
        return causes

    def _give_up(self, cause: str, since_ns: int) -> None:
        """Leave what a regular end leaves, without the loop, which does not come to it."""
        with suppress(OSError):
            if self._directory is not None:
                socket_path(self._directory).unlink()
        if self._lock is not None:
            self._lock.release()
        if self._sampler is not None:
            self._sampler.abandon(self._ending or cause, since_ns=since_ns)

    def _begin(self) -> None:
        """Open the devices, which may take seconds, and write the first records; only after the start was answered."""
        if self._has_begun or self._sampler is None or self._start is None or self._target is None:
            return
        self._has_begun = True
        if self._start.with_nvml:
            environ = self._target.environ()
            self._sampler.use(_open_gpus(self._clock, environ))
        # What is alive now stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        self._sampler.begin()

    def _following(self) -> Sampler:
        if self._sampler is None:
            raise ValueError("this daemon follows no process yet")
        self._begin()
        return self._sampler

    def _stop(self, _request: dict[str, Any]) -> dict[str, Any]:
        self._end_with("stopped")
        return {} if self._sampler is None else self._sampler.status()

    def _status(self, _request: dict[str, Any]) -> dict[str, Any]:
        if self._sampler is None or self._start is None:
            return {"target": None}
        return {**self._sampler.status(), "output": str(self._start.output), "interval_s": self._start.interval_s}

    def _mark(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of a mark is {name!r}; it must be a text")
        return self._following().mark(name)

    def _flush(self, _request: dict[str, Any]) -> dict[str, Any]:
        self._following().flush()
        return {}

    def _hurry(self) -> None:
        if self._watchdog is not None:
            self._watchdog.hurry()

    def _finish(self, status: str) -> None:
        self._hurry()
        if self._sampler is not None:
            self._begin()
            self._sampler.finish(status)
            self._sampler = None

    def _note_fault(self, text: str) -> None:
        self._hurry()
        if self._sampler is not None:
            self._sampler.note_fault(text)
            self._sampler.finish("fault")
            self._sampler = None

    def _close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        self._server.stop_listening()
        if self._lock is not None:
            self._lock.release()
        # Who asked for the end sees by this that it has come.
        self._server.close()
        self._selector.close()
        if self._target is not None:
            self._target.close()
        if self._launcher_fd is not None:
            os.close(self._launcher_fd)


def _open_gpus(clock: Clock, environ: dict[str, str] | None) -> GpuReader:
    from lucid_profiler.monitor.gpu import Gpus  # noqa: PLC0415 - without NVML, its binding is never loaded

    return Gpus.open(clock=clock.mono_ns, environ=environ)
