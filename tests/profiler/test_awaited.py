import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import lucid_profiler
from lucid_profiler import agent
from lucid_profiler.awaited import AwaitedAgent, claim_name
from lucid_profiler.collect import Observation, observe
from lucid_profiler.entries import EndEntry
from lucid_profiler.records import Wall
from lucid_profiler.saved_state import process_folders
from lucid_profiler.step_digests import read_steps, step_files
from lucid_profiler.traces import read_traces

STARTUP = Path(lucid_profiler.__file__).parent / "_startup"
PROCESS = Wall(source="process", begin_ns=1, end_ns=3_000_000_001)
# Of what the agent imports, that which neither Python's start nor lucid_profiler's functions have loaded.
STANDARD = (
    *("ast", "bisect", "bz2", "copy", "dataclasses", "dis", "fnmatch", "inspect", "ipaddress", "linecache", "lzma"),
    *("mmap", "opcode", "pathlib", "platform", "random", "shutil", "struct", "tempfile", "token", "tokenize", "urllib"),
    *("weakref", "zlib"),
)


@dataclass(frozen=True)
class Profiled:
    """A script that ran under the agent, and what was seen of it."""

    done: "subprocess.CompletedProcess[str]"
    run_dir: Path

    @property
    def seen(self) -> Observation:
        """Return what is read of the run."""
        return observe(self.run_dir, run=0, process=PROCESS, max_rss_bytes=None)

    @property
    def files(self) -> list[str]:
        """Return what the processes of the run left, without their pid."""
        return sorted(path.name.replace(str(self.pid), "PID") for path in self.run_dir.iterdir())

    @property
    def pid(self) -> int:
        """Return the pid of the first process."""
        return min(int(path.name.split("-")[-1].split(".")[0]) for path in self.run_dir.iterdir())


def _profile(directory: Path, script: str, **env: str) -> Profiled:
    (directory / "main.py").write_text(script)
    run_dir = directory / "run"
    run_dir.mkdir()
    settings = {**os.environ, "LUCID_RUN_DIR": str(run_dir), "PYTHONPATH": str(STARTUP), **env}
    command = [sys.executable, str(directory / "main.py")]
    done = subprocess.run(command, env=settings, cwd=directory, capture_output=True, text=True, check=False)
    return Profiled(done, run_dir)


def test_a_program_begins_with_the_modules_that_it_would_have(tmp_path: Path) -> None:
    """But for two of lucid's own, and what is built into Python, which no module can take the place of."""
    script = "import sys; print(*sys.modules)"
    profiled = _profile(tmp_path, script)
    plain = subprocess.run(
        [sys.executable, tmp_path / "main.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    added = set(profiled.done.stdout.split()) - set(plain.stdout.split()) - set(sys.builtin_module_names)
    assert added == {"lucid_profiler.awaited", "sitecustomize"}
    assert set(plain.stdout.split()) <= set(profiled.done.stdout.split())
    assert profiled.seen.agent.loaded
    assert profiled.files == ["agent-PID.loaded"]


@pytest.mark.parametrize("first", ["", "import lucid_profiler\n", "import torch\n"], ids=["plain", "lucid", "torch"])
def test_modules_of_the_programs_own_are_found(tmp_path: Path, first: str) -> None:
    """Whatever they are named, also where lucid's functions or a torch that does without come first."""
    for name in STANDARD:
        (tmp_path / f"{name}.py").write_text("OWN = True")
    (tmp_path / "torch.py").write_text(f"import {', '.join(STANDARD)}")
    check = f"import {', '.join(STANDARD)}\nprint(all(module.OWN for module in ({', '.join(STANDARD)})))"
    profiled = _profile(tmp_path, first + check)
    assert (profiled.done.stdout, profiled.done.stderr) == ("True\n", "")


def test_the_agent_comes_when_torch_has_been_executed(tmp_path: Path) -> None:
    """So what torch imports is imported as without it."""
    asks = "import sys; print('lucid_profiler.agent' in sys.modules, 'pathlib' in sys.modules)\n"
    (tmp_path / "torch.py").write_text(asks)
    profiled = _profile(tmp_path, f"import torch\n{asks}")
    assert profiled.done.stdout == "False False\nTrue True\n"


def test_the_agent_comes_when_lucid_is_first_spoken_to(tmp_path: Path) -> None:
    """To import its functions brings no more than outside of lucid."""
    asks = "print('lucid_profiler.agent' in sys.modules)\n"
    profiled = _profile(tmp_path, f"import sys, lucid_profiler\n{asks}lucid_profiler.mark('train')\n{asks}")
    assert profiled.done.stdout == "False\nTrue\n"
    assert [phase.name for phase in profiled.seen.phases] == ["train"]


def test_what_the_program_says_in_its_first_handler_counts(tmp_path: Path) -> None:
    """The agent's end comes after every handler of the program's, also after those from before it came."""
    script = """
import atexit
atexit.register(lambda: lucid_profiler.state("late", {"a": 1}))
import lucid_profiler
lucid_profiler.mark("train")
"""
    profiled = _profile(tmp_path, script)
    assert (profiled.done.stderr, [state.part for state in profiled.seen.states]) == ("", ["late"])


def test_what_the_environment_asked_for_at_the_start_holds(tmp_path: Path) -> None:
    """The program may clear its environment and change its directory before the agent comes; its begin is known."""
    script = """
import os, time
now_ns = time.monotonic_ns()
os.environ.clear()
os.chdir("/")
time.sleep(0.2)
import lucid_profiler
lucid_profiler.state("metrics", {"a": 1})
print(now_ns)
"""
    profiled = _profile(tmp_path, script, LUCID_RUN_DIR="run", LUCID_SAVE_STATE="kept", LUCID_SAVE_NAME="run0-x")
    assert profiled.done.stderr == ""
    (trace,) = read_traces(profiled.run_dir)
    end = trace.last(EndEntry)
    assert end is not None
    assert 0 < (end.begin_ns or 0) < int(profiled.done.stdout)
    (folder,) = process_folders(tmp_path / "kept" / "run0-x")
    assert folder.name == f"process-{profiled.pid}"


def test_a_child_from_before_the_agent_records_nothing(tmp_path: Path) -> None:
    """Neither what it says nor that it ends, and the parent's record is whole."""
    script = """
import os, sys
child = os.fork()
import lucid_profiler
lucid_profiler.state("metrics", {"child": child == 0})
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
"""
    profiled = _profile(tmp_path, script)
    assert (profiled.done.stderr, profiled.seen.agent.num_processes) == ("", 1)
    assert [state.values for state in profiled.seen.states] == [{"child": "False"}]


EXECUTES_ITSELF = """
import os, sys, torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
is_first = len(sys.argv) == 1
for _ in range(2 if is_first else 5):
    weight.grad = torch.ones(2)
    optimizer.step()
    for _ in torch.utils.data.DataLoader(range(1)):
        pass
if is_first:
    os.execv(sys.executable, [sys.executable, __file__, "again"])
"""


def test_what_a_process_executes_in_its_place_is_a_process_of_its_own(tmp_path: Path) -> None:
    """Under the same pid nothing of either is lost, and the report notes that two recorded."""
    asked = {"LUCID_STEP_DIGESTS": "1", "LUCID_SAVE_STATE": "kept", "LUCID_SAVE_NAME": "run0-x", "LUCID_KERNELS": "1"}
    profiled = _profile(tmp_path, EXECUTES_ITSELF, **asked)
    assert profiled.done.returncode == 0
    seen = profiled.seen
    assert (seen.agent.num_processes, seen.agent.num_steps) == (2, 7)
    assert (seen.agent.num_dropped, seen.agent.num_errors) == (0, 0)
    assert any(note.startswith("2 processes recorded") for note in seen.notes)
    assert [(trace.steps.num_written, trace.waits.num_waits) for trace in read_traces(profiled.run_dir)] in (
        [(2, 4), (5, 10)],
        [(5, 10), (2, 4)],
    )
    assert {"kernels-PID.traced", "kernels-PID.1.traced", "kernels-PID.1.json"} <= set(profiled.files)
    files = {path.name.count("."): path for path in step_files(profiled.run_dir)}
    steps = {count: [state.moment.step for state in read_steps(path)] for count, path in files.items()}
    assert {count: max(found) for count, found in steps.items()} == {1: 2, 2: 5}
    (folder,) = process_folders(tmp_path / "kept" / "run0-x")
    assert folder.name == f"process-{profiled.pid}.1"


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    """Of processes that have the same pid each has a name of its own, also if the agent of one could not come."""
    (tmp_path / "agent-7.1.error").touch()
    assert [claim_name(str(tmp_path), 7) for _ in range(3)] == ["7", "7.2", "7.3"]
    assert claim_name(str(tmp_path), 8) == "8"


def test_an_agent_that_fails_is_written_down_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program goes on, and the run has no agent but a reason."""
    calls = []

    def fails(awaited: AwaitedAgent) -> None:
        calls.append(awaited)
        awaited.at_exit(calls.clear)
        raise ValueError("on purpose")

    monkeypatch.setattr(agent, "start", fails)
    awaited = AwaitedAgent(str(tmp_path))
    awaited.start()
    awaited.start()
    assert calls == [awaited]
    assert awaited._at_exit == []
    seen = observe(tmp_path, run=0, process=PROCESS, max_rss_bytes=None)
    assert (seen.agent.loaded, seen.agent.reason) == (False, "ValueError: on purpose")


def test_an_interrupt_goes_on_to_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the program's own, and the agent may still come."""

    def interrupted(_: AwaitedAgent) -> None:
        raise KeyboardInterrupt

    calls: list[AwaitedAgent] = []
    awaited = AwaitedAgent(str(tmp_path))
    monkeypatch.setattr(agent, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        awaited.start()
    monkeypatch.setattr(agent, "start", calls.append)
    awaited.start()
    awaited.start()
    assert calls == [awaited]


def test_one_handler_that_fails_keeps_no_other_from_its_work(tmp_path: Path) -> None:
    """The last that was given comes first."""
    done = []
    awaited = AwaitedAgent(str(tmp_path))
    awaited.at_exit(lambda: done.append(1))
    awaited.at_exit(lambda: 1 // 0)
    awaited.at_exit(lambda: done.append(3))
    with pytest.raises(ZeroDivisionError):
        awaited._finish()
    assert done == [3, 1]


FINDERS = {
    "old": """
class Finder:
    def find_module(self, name, path=None):
        return None
sys.meta_path.insert(1, Finder())
""",
    "hooked": """
class Hooked:
    def __init__(self, loader):
        self.loader, self.exec_module = loader, self.execute
    def create_module(self, spec):
        return self.loader.create_module(spec)
    def execute(self, module):
        self.loader.exec_module(module)
        print("hooked", module.__name__)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            spec = PathFinder.find_spec(name, path, target)
            spec.loader = Hooked(spec.loader)
            return spec
sys.meta_path.insert(sys.meta_path.index(PathFinder), Finder())
""",
    "shared": """
class Shared:
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.__spec__.real.exec_module(module)
shared = Shared()
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "other"):
            real = PathFinder.find_spec(name, path, target)
            spec = ModuleSpec(name, shared, origin=real.origin)
            spec.real = real.loader
            return spec
sys.meta_path.insert(sys.meta_path.index(PathFinder), Finder())
importlib.util.find_spec("torch")
import other
""",
    "lazy": """
spec = importlib.util.find_spec("torch")
spec.loader = importlib.util.LazyLoader(spec.loader)
torch = sys.modules["torch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch)
import lucid_profiler
lucid_profiler.mark("train")
print("still", object.__getattribute__(torch, "__class__").__name__)
torch.LOADED
""",
}


@pytest.mark.parametrize(
    ("kind", "said"), [("old", ""), ("hooked", "hooked torch\n"), ("shared", ""), ("lazy", "still _LazyModule\n")]
)
def test_the_programs_own_ways_of_importing_torch_hold(kind: str, said: str, tmp_path: Path) -> None:
    """Finders of Python 3.3, hooks of the program's own, a loader for several modules, a module that comes later."""
    (tmp_path / "torch.py").write_text("LOADED = True")
    (tmp_path / "other.py").write_text("")
    heard = "print('lucid_profiler.hooks' in sys.modules)"
    head = "import importlib.util, sys, warnings\nfrom importlib.machinery import ModuleSpec, PathFinder\n"
    head += "warnings.simplefilter('ignore')\n"
    profiled = _profile(tmp_path, f"{head}{FINDERS[kind]}\nimport torch\n{heard}")
    assert (profiled.done.stdout, profiled.done.stderr) == (f"{said}True\n", "")
