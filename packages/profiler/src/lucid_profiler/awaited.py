"""Waits in a profiled process until the program imports torch or speaks to lucid, and only then lets the agent in.

It is there before the program's own directory is on the path, and what is imported so early the program can have no
module of its own of that name. So it uses what is built into Python, or what every start of Python has imported.
"""

import _thread
import atexit
import os
import sys
import time
from _frozen_importlib_external import spec_from_file_location

TYPE_CHECKING = False  # `typing` would be one module too many
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

LOADED_SUFFIX = ".loaded"  # of the empty file that says that a process has an agent
FORKED_SUFFIX = ".forked"  # of the empty file of a forked process, which has none, and trained
STATE_VARIABLE = "LUCID_SAVE_STATE"  # asks for the values behind digests, in the directory that it names
_PACKAGE = "lucid_profiler"

__all__ = ["FORKED_SUFFIX", "LOADED_SUFFIX", "STATE_VARIABLE", "AwaitedAgent", "begin", "start_agent"]

_agent: "AwaitedAgent | None" = None


def begin(run_dir: str, package: str) -> None:
    """Wait in this process, which has just been started.

    Args:
        run_dir: private directory of the run.
        package: directory of lucid_profiler, for an interpreter that does not have it installed.

    Raises:
        OSError: the run directory cannot be written.
    """
    global _agent  # noqa: PLW0603 - a process has one agent, and the public functions take none
    _agent = AwaitedAgent(run_dir)
    sys.meta_path.append(_PackageFinder(package))
    _agent.watch()


def start_agent() -> None:
    """Let the agent in, if one waits in this process."""
    if _agent is not None:
        _agent.start()


def claim_name(run_dir: str, pid: int) -> str:
    """Return a name for the files of this process that is new in the run, and leave the mark that it has an agent.

    It is the pid, with a count where a process had the same before: another, or this one until it executed itself anew.

    Raises:
        OSError: the run directory cannot be written.
    """
    count = 0
    while True:
        name = f"{pid}.{count}" if count else f"{pid}"
        count += 1
        path = os.path.join(run_dir, f"agent-{name}")  # noqa: PTH118 - pathlib is imported later
        if os.path.exists(f"{path}.error"):  # noqa: PTH110 - as above
            continue
        try:
            os.close(os.open(path + LOADED_SUFFIX, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            continue
        return name


class AwaitedAgent:
    """The agent of this process before it is there, and what it is handed when it comes.

    Args:
        run_dir: private directory of the run.

    Attributes:
        run_dir: the same, absolute: the program may change its directory.
        name: of the process's files.
        begin_ns: when the process's Python began, on the clock of `time.monotonic_ns`.
        settings: lucid's variables at that time, the directory that one of them names absolute.

    Raises:
        OSError: the run directory cannot be written.
    """

    def __init__(self, run_dir: str) -> None:
        self.begin_ns = time.monotonic_ns()
        self.run_dir = os.path.abspath(run_dir)  # noqa: PTH100 - pathlib is imported later
        self.settings = {name: value for name, value in os.environ.items() if name.startswith("LUCID_")}
        if self.settings.get(STATE_VARIABLE):
            self.settings[STATE_VARIABLE] = os.path.abspath(self.settings[STATE_VARIABLE])  # noqa: PTH100 - as above
        self._pid = os.getpid()
        self.name = claim_name(self.run_dir, self._pid)
        self._lock = _thread.RLock()
        self._is_starting = False
        self._is_settled = False  # it has come, or will not come
        self._on_torch: list[Callable[[], object]] = []
        self._at_exit: list[Callable[[], object]] = []
        self._in_child: list[Callable[[], object]] = []
        self._finder = _TorchFinder(self)

    def watch(self) -> None:
        """Begin to listen for torch, forks and the end of the process."""
        # Registered before every handler of the program's, it runs after them.
        atexit.register(self._finish)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave)
        sys.meta_path.insert(0, self._finder)
        if _has_torch():
            self.hear_torch()

    def start(self) -> None:
        """Let the agent in, once; what is wrong with it is written down, and the program goes on."""
        if self._is_settled or os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_settled or self._is_starting:
                return
            self._is_starting = True
            try:
                from lucid_profiler.agent import start  # noqa: PLC0415 - what it imports is what is waited with

                start(self)
                self._is_settled = True
            except Exception as error:
                self._forget()
                if _is_of_a_signal(error):
                    raise
                self._is_settled = True
                self._write_fault(error)
            except BaseException:
                self._forget()
                raise
            finally:
                self._is_starting = False

    def on_torch(self, listener: "Callable[[], object]") -> None:
        """Call `listener` when torch has been imported, or now if it has been."""
        if _has_torch():
            listener()
        else:
            self._on_torch.append(listener)

    def at_exit(self, handler: "Callable[[], object]") -> None:
        """Call `handler` after all that the program registers for its end, and before those given here earlier."""
        self._at_exit.append(handler)

    def in_child(self, handler: "Callable[[], object]") -> None:
        """Call `handler` in each forked child."""
        self._in_child.append(handler)

    def hear_torch(self) -> None:
        """Let the agent in, and tell it that torch has been executed."""
        self.start()
        self._remove_finder()
        while self._on_torch:
            self._on_torch.pop(0)()

    def _finish(self) -> None:
        if os.getpid() == self._pid:
            self._is_settled = True
            _run_last_first(self._at_exit)

    def _leave(self) -> None:
        """Let no agent in, in a forked child: its parent's speaks for it. One that trains leaves a mark."""
        self._is_settled = True
        self._at_exit.clear()
        for handler in self._in_child:
            handler()
        self._on_torch[:] = [self._mark_training]
        if _has_torch():
            self.hear_torch()

    def _mark_training(self) -> None:
        """Leave a mark after the first optimizer step of a forked child."""

        def mark(*_: object) -> None:
            handle.remove()
            path = os.path.join(self.run_dir, f"agent-{os.getpid()}{FORKED_SUFFIX}")  # noqa: PTH118 - as above
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            except OSError:
                return

        register = getattr(sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)
        if register is not None:
            handle = register(mark)

    def _remove_finder(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)

    def _forget(self) -> None:
        self._on_torch.clear()
        self._at_exit.clear()
        self._in_child.clear()

    def _write_fault(self, error: Exception) -> None:
        path = os.path.join(self.run_dir, f"agent-{self.name}")  # noqa: PTH118 - as above
        try:
            with open(f"{path}.error", "w", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - as above
                file.write(f"{type(error).__name__}: {error}")
            os.unlink(path + LOADED_SUFFIX)  # noqa: PTH108 - as above
        except OSError:
            return


class _TorchFinder:
    """Finds nothing itself: it lets the other finders find torch, and hears when torch has been executed."""

    def __init__(self, agent: AwaitedAgent) -> None:
        self._agent = agent

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname != "torch":
            return None
        for finder in tuple(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)  # an old finder may have none
            spec: ModuleSpec | None = None
            if finder is not self and find_spec is not None:
                spec = find_spec(fullname, path, target)
            if spec is not None:
                self._listen(spec.loader)
                return spec
        return None

    def _listen(self, loader: "Any") -> None:
        if not hasattr(loader, "__dict__") or not hasattr(loader, "exec_module"):
            return
        execute = loader.exec_module
        before = loader.__dict__.get("exec_module")

        def exec_module(module: "ModuleType") -> None:
            if module.__name__ != "torch":  # a loader may serve several modules
                execute(module)
                return
            if before is None:
                loader.__dict__.pop("exec_module", None)
            else:
                loader.__dict__["exec_module"] = before
            execute(module)
            self._agent.hear_torch()

        loader.__dict__["exec_module"] = exec_module


class _PackageFinder:
    """Finds lucid_profiler where no other finder does: the program's Python need not have it installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, _path: "Sequence[str] | None" = None, _target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname != _PACKAGE:
            return None
        path = os.path.join(self._package, "__init__.py")  # noqa: PTH118 - as above
        return spec_from_file_location(fullname, path, submodule_search_locations=[self._package])


def _has_torch() -> bool:
    """Return whether torch has been imported to its end."""
    torch = sys.modules.get("torch")
    if torch is None or type(torch).__name__ == "_LazyModule":  # whose first attribute would import it
        return False
    return not getattr(getattr(torch, "__spec__", None), "_initializing", False)


def _is_of_a_signal(error: Exception) -> bool:
    """Return whether a handler of the program's raised `error`; before `journal` is there, none is taken for that."""
    ask = getattr(sys.modules.get(f"{_PACKAGE}.journal"), "is_of_a_signal", None)
    return ask is not None and bool(ask(error))


def _run_last_first(handlers: "list[Callable[[], object]]") -> None:
    if handlers:
        try:
            handlers.pop()()
        finally:
            _run_last_first(handlers)
