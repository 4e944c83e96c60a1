import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import lucid_profiler
from lucid_profiler import jsonio, snapshot
from lucid_profiler.codec import from_plain, to_plain
from lucid_profiler.collect import NO_ROOM, Observation, observe
from lucid_profiler.device_times import DeviceTimes, read_device_times
from lucid_profiler.entries import AllocatorEntry, DeviceTimesEntry, NonfiniteEntry
from lucid_profiler.hooks import TorchHooks
from lucid_profiler.journal import Guard
from lucid_profiler.records import State, Wall
from lucid_profiler.ring import read_ring
from lucid_profiler.traces import ProcessTrace, read_traces

STARTUP = Path(lucid_profiler.__file__).parent / "_startup"
PROCESS = Wall(source="process", begin_ns=1, end_ns=3_000_000_001)

# Trains inside a function, so that nothing but the optimizer keeps the parameters when the script ends.
TRAIN_IN_MAIN = """
import sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
    def forward(self, x):
        return sum(head(self.stem(x)) for head in self.heads)

def main():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(12, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    print(net.stem.bias.detach().numpy().tobytes().hex())
    sys.exit(3)

main()
"""

# Two outermost modules, named groups, a late group, a closure, an overridden step, and every misuse of the API.
USES_EVERYTHING = """
import time, torch
import lucid_profiler
from torch import nn

class Twice(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        if closure is not None:
            closure()
        return loss

made, judge, late = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 2, bias=False)
first = Twice(made.parameters(), lr=0.1)
# Optimizers take named parameters from torch 2.6 on; before, the names come from the module.
named = list(judge.named_parameters()) if torch.__version__ >= "2.6" else judge.parameters()
second = torch.optim.Adam(named, lr=0.1)
free = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)

def closure():
    loss = made(torch.ones(1, 2)).sum() + late(torch.ones(1, 2)).sum()
    loss.backward()
    return loss

lucid_profiler.mark("train")
with lucid_profiler.fit():
    for index in range(4):
        first.step(closure)
        judge(torch.ones(1, 2)).sum().backward()
        second.step()
        if index == 1:
            first.add_param_group({"params": late.parameters()})
    lucid_profiler.state("ema", {"x": torch.ones(2)})
    free.param_groups[0]["params"][0].grad = torch.ones(3)
    free.step()
    with lucid_profiler.fit():
        pass
    late_ns = time.monotonic_ns()
lucid_profiler.mark("validate")
after_ns = time.monotonic_ns()
for epoch in range(3):
    with lucid_profiler.fit():
        pass
print(late_ns, after_ns)
lucid_profiler.state("losses", torch.tensor([1.0, float("nan")]))
lucid_profiler.state("losses", torch.tensor([1.0, 2.0]))
lucid_profiler.state("model", judge)
lucid_profiler.state("parameters", {})
lucid_profiler.state("metrics", {"function": print})
raise RuntimeError("the script's own error")
"""

ONE_PARAMETER = """
import torch
parameter = torch.zeros(1, requires_grad=True)
parameter.grad = torch.ones(1)
optimizer = torch.optim.SGD([parameter], lr=0.1)
"""

# What compiled models do with modules, and the public functions in the middle of it: no graph may break.
COMPILED = """
import contextlib
import torch
import lucid_profiler
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.last = None
    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        self.last = self.layers[1]
        lucid_profiler.mark("inside")
        with lucid_profiler.fit():
            x = nn.Sequential(self.layers[2], nn.Identity())(self.tail[:2](x))
        lucid_profiler.loss(x)
        lucid_profiler.state("x", x)
        return x

def train(compile):
    torch.manual_seed(0)
    net = Net()
    step = compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        step(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    return net.layers[0].weight.detach().numpy().tobytes()

compiled = train(lambda net: torch.compile(net, backend="eager", fullgraph=True))
# The plain model calls them for nothing.
lucid_profiler.mark = lucid_profiler.loss = lucid_profiler.state = lambda *_: None
lucid_profiler.fit = contextlib.nullcontext
assert compiled == train(lambda net: net)
"""

FITS_IN_ASYNC = """
import asyncio, torch
import lucid_profiler

async def train():
    async with lucid_profiler.fit() as entered:
        assert entered is None
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.grad = torch.ones(2)
        optimizer.step()

asyncio.run(train())
assert lucid_profiler.fit().enter_result is None
"""

LEAVES_WITHOUT_HANDLERS = """
import os, torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(5):
    weight.grad = torch.ones(2)
    optimizer.step()
os._exit(7)
"""


@dataclass(frozen=True)
class Profiled:
    """A script that ran under the agent, and what was seen of it."""

    done: "subprocess.CompletedProcess[str]"
    seen: Observation
    run_dir: Path

    @property
    def trace(self) -> ProcessTrace:
        """Return what the one process that recorded left."""
        (trace,) = read_traces(self.run_dir)
        return trace

    def state(self, part: str) -> State:
        """Return the one state of a part."""
        (state,) = [state for state in self.seen.states if state.part == part]
        return state


def _profile(
    directory: Path,
    script: str,
    *,
    python: tuple[str, ...] = (sys.executable,),
    pythonpath: tuple[str, ...] = (),
    **env: str,
) -> Profiled:
    path = directory / "script.py"
    path.write_text(script)
    run_dir = directory / "run"
    run_dir.mkdir()
    settings = {
        **os.environ,
        "LUCID_RUN_DIR": str(run_dir),
        "LUCID_PROFILE_ARM": "captured",
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *pythonpath]),
        **env,
    }
    done = subprocess.run(
        [*python, str(path)], env=settings, cwd=directory, capture_output=True, text=True, check=False
    )
    return Profiled(done, observe(run_dir, run=0, process=PROCESS, max_rss_bytes=None), run_dir)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """Return the run of an unmodified script whose model lives in a function."""
    return _profile(tmp_path_factory.mktemp("trained"), TRAIN_IN_MAIN)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """Return the run of a script that uses, and misuses, the whole API."""
    return _profile(tmp_path_factory.mktemp("everything"), USES_EVERYTHING)


def test_an_unmodified_script_keeps_its_exit_status_and_output(trained: Profiled) -> None:
    """The agent prints nothing and changes no status."""
    assert trained.done.returncode == 3
    assert trained.done.stderr == ""
    assert len(trained.done.stdout.strip()) == 64


def test_parameters_are_digested_under_their_module_paths(trained: Profiled) -> None:
    """Names come from the registered modules although the model is gone at the end."""
    names = {"stem.weight", "stem.bias", "heads.0.weight", "heads.0.bias", "heads.1.weight", "heads.1.bias"}
    parameters = trained.state("parameters")
    assert set(parameters.tensors) == names
    assert parameters.tensors["stem.weight"][1:] == ("float32", (8, 4))
    assert {f"optimizer0.state.{name}.momentum_buffer" for name in names} < set(
        trained.state("optimizer_state").tensors
    )


def test_a_compiled_model_is_compiled_as_without_the_agent(tmp_path: Path) -> None:
    """Its one graph stays whole, its bytes are the same, and what it calls of ours inside does nothing."""
    profiled = _profile(tmp_path, COMPILED)
    assert (profiled.done.returncode, profiled.done.stderr) == (0, "")
    assert profiled.seen.agent.num_steps == 6
    assert profiled.seen.agent.num_errors == 0
    assert {state.part for state in profiled.seen.states} == {"parameters", "optimizer_state"}


def test_the_interval_can_be_entered_in_a_coroutine(tmp_path: Path) -> None:
    """As what there is without an agent can be."""
    profiled = _profile(tmp_path, FITS_IN_ASYNC)
    assert (profiled.done.returncode, profiled.done.stderr) == (0, "")
    assert profiled.seen.wall.source == "fit"


def test_each_step_is_recorded_once_although_workers_are_forked(trained: Profiled) -> None:
    """Forked workers share the agent's memory and record nothing."""
    (steps,) = trained.seen.samples
    assert len(steps.columns["begin_ns"]) == 6
    assert (trained.seen.agent.num_steps, trained.seen.agent.num_processes) == (6, 1)
    assert (trained.seen.agent.num_errors, trained.seen.agent.num_dropped, trained.seen.notes) == (0, 0, ())


def test_without_fit_the_wall_goes_from_the_first_step_to_the_last(trained: Profiled) -> None:
    """The interval is bounded by the step records themselves."""
    (steps,) = trained.seen.samples
    begin_ns, end_ns = steps.columns["begin_ns"][0], steps.columns["end_ns"][-1]
    assert trained.seen.wall == Wall(source="steps", begin_ns=int(begin_ns or 0), end_ns=int(end_ns or 0))


def test_waits_for_batches_are_of_the_wall(trained: Profiled, everything: Profiled) -> None:
    """Those of a loader with processes; a script that uses none says so."""
    wait = trained.seen.metrics["data_wait"].value
    assert wait is not None
    assert 0 < wait <= (trained.seen.metrics["wall"].value or 0)
    assert everything.seen.metrics["data_wait"].reason == "no_loader"


def test_metrics_without_cuda_have_reasons(trained: Profiled) -> None:
    """What cannot be known is None with its reason, and host memory is known."""
    metrics = trained.seen.metrics
    assert (metrics["peak_allocated"].value, metrics["peak_allocated"].reason) == (None, "no_cuda")
    assert (metrics["peak_rss"].value or 0) > 50 << 20
    assert (metrics["step_time_median"].value or 0) >= (metrics["optimizer_time_median"].value or 0) > 0
    assert trained.seen.identity["torch"].startswith("2.")


def test_a_script_that_raises_still_has_its_digests(everything: Profiled) -> None:
    """An exception ends the script with its own traceback and status, and the states are taken."""
    assert everything.done.returncode == 1
    assert everything.done.stderr.endswith("RuntimeError: the script's own error\n")
    assert {state.part for state in everything.seen.states} == {"parameters", "optimizer_state", "losses", "model"}


def test_names_of_several_models_do_not_meet(everything: Profiled) -> None:
    """Named groups keep their names; others get the class and place of their outermost module, or their own place."""
    assert set(everything.state("parameters").tensors) == {
        "Linear0.weight",
        "Linear0.bias",
        "Linear1.weight",
        "weight",
        "bias",
        "optimizer2.group0.param0",
    }


def test_an_overridden_step_counts_once(everything: Profiled) -> None:
    """A step that calls its parent's step is one step."""
    assert everything.seen.agent.num_steps == 9
    (steps,) = everything.seen.samples
    assert steps.columns["optimizer"] == (0, 1, 0, 1, 0, 1, 0, 1, 2)


def test_fit_is_the_wall_and_marks_are_phases(everything: Profiled) -> None:
    """The marked interval wins over the steps; a phase lasts until the next mark."""
    assert everything.seen.wall.source == "fit"
    train, validate = everything.seen.phases
    assert (train.name, validate.name) == ("train", "validate")
    assert train.begin_ns < everything.seen.wall.begin_ns < everything.seen.wall.end_ns < train.end_ns
    assert train.end_ns == validate.begin_ns < validate.end_ns


def test_the_first_outermost_interval_is_the_wall(everything: Profiled) -> None:
    """Neither one inside it nor one after it moves its ends, and the script goes on."""
    late_ns, after_ns = map(int, everything.done.stdout.split())
    assert late_ns < everything.seen.wall.end_ns < after_ns


def test_an_interval_that_is_never_left_is_noted(tmp_path: Path) -> None:
    """It is not the wall, and the program ends as it would."""
    profiled = _profile(tmp_path, "import lucid_profiler\nlucid_profiler.fit().__enter__()\nprint('ran')")
    assert (profiled.done.stdout, profiled.done.stderr, profiled.done.returncode) == ("ran\n", "", 0)
    assert profiled.seen.wall == PROCESS
    assert profiled.seen.notes == ("fit() was entered and never left: it is not the wall",)


def test_one_interval_object_may_be_entered_again(tmp_path: Path) -> None:
    """As outside lucid, nested and repeated; leaving by an exception passes it on and ends the interval."""
    script = """
        import lucid_profiler
        timed = lucid_profiler.fit()
        try:
            with timed, timed:
                raise KeyError("own")
        except KeyError:
            print("passed on")
        with timed:
            lucid_profiler.state("metrics", {"accuracy": 0.5})
    """
    profiled = _profile(tmp_path, textwrap.dedent(script))
    assert (profiled.done.stdout, profiled.done.stderr) == ("passed on\n", "")
    assert profiled.seen.wall.source == "fit"
    assert profiled.state("metrics").values == {"accuracy": "0.5"}


MISNAMED = """
import enum, lucid_profiler

class Phase(str, enum.Enum):
    TRAIN = "train"

class Hostile:
    def __str__(self):
        raise ValueError("own")
    __repr__ = __str__

for name in (5, "", None, b"x", Hostile(), "x" * 201, ["x"]):
    for _ in range(300):
        lucid_profiler.mark(name)
        lucid_profiler.state(name, {})
lucid_profiler.mark(Phase.TRAIN)
lucid_profiler.state(Phase.TRAIN, {"a": 1})
print("ran")
"""


def test_a_name_that_is_none_is_noted_with_its_reason(tmp_path: Path) -> None:
    """Whatever is given as a name, the script goes on, the report is readable, and says what was not recorded."""
    profiled = _profile(tmp_path, MISNAMED)
    assert (profiled.done.stdout, profiled.done.stderr) == ("ran\n", "")
    assert profiled.seen.agent.num_errors == 0
    assert [phase.name for phase in profiled.seen.phases] == ["train"]
    assert [state.part for state in profiled.seen.states] == ["train"]
    for call in ("mark", "state"):
        assert f"{call}(5) was not recorded: a name must be a text, this is of type int" in profiled.seen.notes
        assert f"{call}('') was not recorded: a name must not be empty" in profiled.seen.notes
        assert f"{call}(a Hostile) was not recorded: a name must be a text, this is of type Hostile" in (
            profiled.seen.notes
        )
    assert len(profiled.seen.notes) == 14


TWO_WORKERS = """
import subprocess, sys, time
WORKER = "import lucid_profiler, sys; lucid_profiler.state('model', {'seed': int(sys.argv[1])})"
if __name__ == "__main__":
    for seed in sys.argv[1:] or ORDER:
        subprocess.run([sys.executable, "-c", WORKER, str(seed)], check=True)
"""


def test_processes_are_numbered_by_what_they_ended_with(tmp_path: Path) -> None:
    """Two workers that start in the other order leave the same states under the same numbers."""
    numbered = []
    for order in ((1, 2), (2, 1)):
        directory = tmp_path / str(order[0])
        directory.mkdir()
        seen = _profile(directory, TWO_WORKERS.replace("ORDER", repr(order))).seen
        assert seen.agent.num_processes == 2
        assert {state.rank for state in seen.states} == {None}
        numbered.append([(state.process, state.values["seed"]) for state in seen.states])
    assert numbered[0] == numbered[1]
    assert [process for process, _ in numbered[0]] == [0, 1]


def test_ranks_number_the_processes(tmp_path: Path) -> None:
    """With a rank each, the rank is the number, whatever the states are; with one twice, there are no ranks."""
    script = TWO_WORKERS.replace("ORDER", "(1, 2)").replace(
        "str(seed)]", "str(seed)], env=dict(os.environ, RANK=RANKS)"
    )
    for ranks, expected in (("str(7 - seed)", {"1": 6, "2": 5}), ("'0'", None)):
        directory = tmp_path / str(len(ranks))
        directory.mkdir()
        states = _profile(directory, "import os\n" + script.replace("RANKS", ranks)).seen.states
        if expected is None:
            assert {state.rank for state in states} == {None}
        else:
            assert {state.values["seed"]: state.rank for state in states} == expected
            assert {state.values["seed"]: state.process for state in states} == expected


GOOD_STATE = {
    "kind": "state",
    "part": "model",
    "digest": "ab" * 32,
    "strides_digest": "cd" * 32,
    "num_tensors": 1,
    "num_bytes": 4,
    "nonfinite": 0,
    "tensors": {"weight": ["00" * 8, "float32", [1]]},
}
GOOD_CAPTURE = {"optimizer": "Own", "requested": True, "groups": [{"captured": True, "replays": 3, "more": []}]}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({**GOOD_STATE, "part": 5}, "StateEntry.part is 5 (int)"),
        ({**GOOD_STATE, "num_bytes": "4"}, "num_bytes is '4' (str)"),
        ({**GOOD_STATE, "tensors": {"weight": [1, "float32", [1]]}}, "tensors.weight[0] is 1 (int)"),
        ({"kind": "state", "part": "model"}, "lacks digest"),
        ({"kind": "phases", "phases": [{"name": 5, "begin_ns": 1, "end_ns": 2}]}, "name is 5 (int)"),
        ({"kind": "fit", "begin_ns": 1.5, "end_ns": 2}, "begin_ns is 1.5 (float)"),
        ({"kind": "memory", "peak_rss_bytes": "much"}, "peak_rss_bytes is 'much' (str)"),
        ({"kind": "note", "text": ["x"]}, "text is ['x'] (list)"),
        ({"kind": "end", "rank": "0"}, "rank is '0' (str)"),
        ({"kind": "env", "identity": 5}, "identity is 5 (int)"),
        ({"kind": "capture", "capture": [5]}, "it is of type int"),
        ({"kind": "capture", "capture": [{**GOOD_CAPTURE, "requested": "yes"}]}, "requested is 'yes' (str)"),
        ({"kind": "capture", "capture": [{"requested": True}]}, "lacks optimizer"),
        ({"text": "no kind"}, "it has no kind"),
        ([1], "it has no kind"),
        (None, "Expecting value"),
    ],
)
def test_a_journal_line_that_no_record_can_hold_is_dropped_and_noted(tmp_path: Path, line: Any, problem: str) -> None:
    """The report stays readable, whatever an optimizer or another version of the agent wrote."""
    lines = [GOOD_STATE, {"kind": "capture", "capture": [GOOD_CAPTURE]}, line, {"kind": "end", "rank": 0}]
    data = [b"not json" if entry is None else jsonio.dumps(entry) for entry in lines]
    (tmp_path / "agent-7.jsonl").write_bytes(b"".join(entry + b"\n" for entry in data))
    (tmp_path / "agent-7.loaded").touch()
    seen = observe(tmp_path, run=0, process=PROCESS, max_rss_bytes=None)
    assert seen.agent.num_errors == 1
    (note,) = seen.notes
    assert "was dropped" in note
    assert problem in note
    for state in seen.states:
        assert from_plain(State, jsonio.loads(jsonio.dumps(to_plain(state))), Counter()) == state
    assert [state.part for state in seen.states] == ["model"]
    assert seen.wall == PROCESS


def test_one_bad_capture_report_costs_no_other(tmp_path: Path) -> None:
    """Each optimizer's report stands for itself, and keys that lucid does not know are ignored."""
    line = jsonio.dumps({"kind": "capture", "capture": [{"optimizer": 5}, GOOD_CAPTURE]})
    (tmp_path / "agent-7.jsonl").write_bytes(line + b"\n")
    seen = observe(tmp_path, run=0, process=PROCESS, max_rss_bytes=None)
    assert [(report.optimizer, report.groups[0].replays) for report in seen.capture or ()] == [("Own", 3)]


def test_a_state_too_large_for_a_line_keeps_its_digest(tmp_path: Path) -> None:
    """With tens of megabytes of names, single tensors are not named, and the report can be read."""
    names = {f"{index:0200d}": ["00" * 8, "float32", [1]] for index in range(80_000)}
    (tmp_path / "agent-7.jsonl").write_bytes(jsonio.dumps({**GOOD_STATE, "tensors": names}) + b"\n")
    (state,) = observe(tmp_path, run=0, process=PROCESS, max_rss_bytes=None).states
    assert (state.digest, state.tensors) == ("ab" * 32, {})


def test_peak_resident_is_that_of_the_largest_process(tmp_path: Path) -> None:
    """Of several processes the largest counts, of those that the kernel knows too; of one, its own."""
    for pid, peak in (("7", 100), ("8", 300)):
        entries = ({"kind": "memory", "peak_rss_bytes": peak}, {"kind": "end", "begin_ns": int(pid)})
        (tmp_path / f"agent-{pid}.jsonl").write_bytes(b"".join(jsonio.dumps(entry) + b"\n" for entry in entries))
    peaks = [observe(tmp_path, run=0, process=PROCESS, max_rss_bytes=kernel) for kernel in (None, 200, 400)]
    assert [seen.metrics["peak_rss"].value for seen in peaks] == [300, 300, 400]
    (tmp_path / "agent-8.jsonl").unlink()
    assert observe(tmp_path, run=0, process=PROCESS, max_rss_bytes=400).metrics["peak_rss"].value == 100


@pytest.mark.parametrize(
    "note",
    [
        "state('ema') inside fit() was not recorded: a digest there would be timed; call it after",
        "state('losses') was called 2 times: the last value counts",
        "state('parameters') was not recorded: the agent takes that part itself; give it another name",
        "no digest of 'metrics': function is of type builtins.builtin_function_or_method, which has no digest",
        "optimizer 0 calls its closure again within a step: its step time includes the later calls",
        (
            "fit() was entered 5 times: only the first interval is the wall; the other 4, 1 of them inside it, changed "
            "nothing. Put one fit() around all of it, and mark() its phases"
        ),
    ],
)
def test_what_a_reader_has_to_know_is_noted(everything: Profiled, note: str) -> None:
    """Calls that had no effect, or another one than expected, are named in the report."""
    assert note in everything.seen.notes


def test_the_last_state_of_a_part_counts(everything: Profiled) -> None:
    """A later value replaces an earlier one, and an object with a state_dict is taken at its word."""
    assert everything.state("losses").nonfinite == 0
    assert set(everything.state("model").tensors) == {"weight", "bias"}


def test_after_an_abrupt_exit_the_steps_are_readable(tmp_path: Path) -> None:
    """Without exit handlers there are steps, a status, and no digests."""
    profiled = _profile(tmp_path, LEAVES_WITHOUT_HANDLERS)
    assert profiled.done.returncode == 7
    assert (profiled.seen.agent.num_steps, profiled.seen.states) == (5, ())
    assert profiled.seen.wall.source == "steps"
    assert profiled.seen.metrics["peak_allocated"].reason == "not_finished"


def test_the_phases_of_an_interval_outlive_an_abrupt_exit(tmp_path: Path) -> None:
    """They are written down with the interval, the last one until its end."""
    profiled = _profile(
        tmp_path,
        "import os, lucid_profiler\nwith lucid_profiler.fit():\n    lucid_profiler.mark('load')\n"
        "    lucid_profiler.mark('train')\nos._exit(0)",
    )
    wall, (load, train) = profiled.seen.wall, profiled.seen.phases
    assert wall.source == "fit"
    assert (load.name, train.name) == ("load", "train")
    assert wall.begin_ns <= load.begin_ns <= load.end_ns == train.begin_ns <= train.end_ns == wall.end_ns


def test_marks_of_other_threads_do_not_spoil_the_end_of_an_interval(tmp_path: Path) -> None:
    """What is marked while the phases are written comes too late for them, and nothing reaches the program."""
    profiled = _profile(
        tmp_path,
        "import os, sys, threading, lucid_profiler\nsys.setswitchinterval(1e-6)\nmark = lucid_profiler.mark\n"
        "with lucid_profiler.fit():\n    [mark('main') for _ in range(9000)]\n"
        "    threading.Thread(target=lambda: [mark('other') for _ in range(900)]).start()\nos._exit(0)",
    )
    assert profiled.done.returncode == 0, profiled.done.stderr
    assert len(profiled.seen.phases) >= 9000
    assert all(phase.begin_ns <= phase.end_ns <= profiled.seen.wall.end_ns for phase in profiled.seen.phases)


def test_an_agent_that_has_no_room_from_the_start_is_told_from_one_without_steps(tmp_path: Path) -> None:
    """Nothing of it is in the journal, not even that there were steps."""
    profiled = _profile(
        tmp_path,
        ONE_PARAMETER + "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\noptimizer.step()",
    )
    assert profiled.done.returncode == 0
    assert profiled.seen.metrics["peak_allocated"].reason == "agent_cut_off"


def test_of_what_another_process_could_not_write_the_first_is_not_accused(tmp_path: Path) -> None:
    """Each file of errors has the name of its process."""
    profiled = _profile(
        tmp_path,
        ONE_PARAMETER + "optimizer.step()\nimport os, subprocess, sys\n"
        'child = \'import resource, lucid_profiler as l; l.state("a", 1); '
        'resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); l.state("b", 1)\'\n'
        "subprocess.run([sys.executable, '-c', child], check=True)\nos._exit(0)",
    )
    assert f"agent: {NO_ROOM}" in profiled.seen.notes
    assert profiled.seen.metrics["peak_allocated"].reason == "not_finished"


def test_an_agent_that_can_write_no_more_is_told_from_an_abrupt_exit(tmp_path: Path) -> None:
    """It is an error with its likely cause, also where not even the error could be written down."""
    profiled = _profile(
        tmp_path,
        ONE_PARAMETER + "[optimizer.step() for _ in range(3)]\nimport resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    )
    assert profiled.done.returncode == 0
    assert profiled.seen.metrics["peak_allocated"].reason == "agent_cut_off"
    assert f"agent: {NO_ROOM}" in profiled.seen.notes
    assert profiled.seen.agent.num_errors == 1
    assert profiled.seen.agent.num_steps == 3


def test_a_script_without_torch_is_timed_as_a_process(tmp_path: Path) -> None:
    """The agent is loaded, records nothing, and the process is the interval."""
    profiled = _profile(tmp_path, "import sys; sys.exit('no torch' if 'torch' in sys.modules else 0)")
    assert profiled.done.returncode == 0
    assert profiled.seen.agent.loaded
    assert profiled.seen.agent.num_processes == 0
    assert profiled.seen.wall == PROCESS
    assert profiled.seen.metrics["wall"].value == 3.0
    assert profiled.seen.metrics["step_time_median"].reason == "no_steps"
    assert profiled.seen.metrics["peak_rss"].reason == "hidden_by_own_memory"


def test_steps_without_room_for_their_records_are_counted_as_lost(tmp_path: Path) -> None:
    """The program goes on, and the report says neither that there was no step nor how long it took."""
    full = "import lucid_profiler.hooks as hooks\nhooks.RingWriter = lambda path: open('/dev/full/none')\n"
    profiled = _profile(tmp_path, full + TRAIN_IN_MAIN)
    assert profiled.done.returncode == 3  # its own
    assert (profiled.seen.agent.num_steps, profiled.seen.agent.num_dropped) == (6, 6)
    assert profiled.seen.metrics["step_time_median"].reason == "steps_not_recorded"
    assert any("NotADirectoryError" in note for note in profiled.seen.notes)


def test_states_need_no_torch(tmp_path: Path) -> None:
    """A script may hand over plain values."""
    profiled = _profile(tmp_path, "import lucid_profiler\nlucid_profiler.state('metrics', {'accuracy': [0.5, 0.75]})")
    assert set(profiled.state("metrics").tensors) == {"accuracy.0", "accuracy.1"}
    assert profiled.seen.metrics["peak_rss"].value


def test_an_interpreter_without_lucid_or_its_dependencies_is_observed(tmp_path: Path) -> None:
    """The measured program may live in an environment of its own, which has neither lucid nor orjson."""
    script = """
        import importlib.util, sys
        import lucid_profiler
        assert importlib.util.find_spec("lucid_optim") is None
        sys.modules["orjson"] = None
        lucid_profiler.state("metrics", {"loss": float("nan"), "accuracy": 0.75})
    """
    bare = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    profiled = _profile(tmp_path, textwrap.dedent(script), python=(str(bare),))
    assert profiled.done.returncode == 0, profiled.done.stderr
    assert profiled.seen.agent.num_errors == 0
    assert set(profiled.state("metrics").tensors) == {"accuracy", "loss"}
    assert profiled.state("metrics").nonfinite == 1


@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_an_isolated_python_has_no_agent(tmp_path: Path, flag: str) -> None:
    """Flags that keep Python from reading PYTHONPATH keep the agent out, and the script runs."""
    profiled = _profile(tmp_path, "print('ran')", python=(sys.executable, flag))
    assert profiled.done.stdout == "ran\n"
    assert not profiled.seen.agent.loaded
    assert profiled.seen.agent.reason == "no_agent"
    assert profiled.seen.metrics["optimizer_time_median"].reason == "no_agent"


def test_the_programs_own_sitecustomize_runs(tmp_path: Path) -> None:
    """The one that comes next on the path is imported, and the agent's directory is off it."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("ORIGIN = 'own'")
    script = "import sitecustomize, sys; print(sitecustomize.ORIGIN, [p for p in sys.path if 'startup' in p])"
    profiled = _profile(tmp_path, script, pythonpath=(str(own),))
    assert profiled.done.stdout == "own []\n"
    assert profiled.seen.agent.loaded


def test_an_error_in_the_programs_own_sitecustomize_is_its_own(tmp_path: Path) -> None:
    """Python reports it as it would without lucid, and goes on."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import a_module_that_is_missing")
    profiled = _profile(tmp_path, "print('ran')", pythonpath=(str(own),))
    assert profiled.done.stdout == "ran\n"
    assert "Error in sitecustomize" in profiled.done.stderr
    assert profiled.seen.agent.loaded


def test_an_agent_that_cannot_start_is_named_and_the_script_runs(tmp_path: Path) -> None:
    """A fault of the agent is in the report, not in the program."""
    broken = tmp_path / "broken"
    (broken / "lucid_profiler").mkdir(parents=True)
    (broken / "lucid_profiler" / "__init__.py").write_text("raise ValueError('broken on purpose')")
    (broken / "torch.py").touch()
    profiled = _profile(tmp_path, "import torch; print('ran')", pythonpath=(str(broken),))
    assert (profiled.done.stdout, profiled.done.stderr) == ("ran\n", "")
    assert profiled.seen.agent.reason == "ValueError: broken on purpose"
    assert profiled.seen.agent.num_errors == 1


DIVERGES = """
import torch, lucid_profiler
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(1, 8):
    optimizer.zero_grad()
    loss = net(torch.ones(1, 2)).sum()
    loss.backward()
    if step == 4:
        net[1].weight.grad[0, 1] = float("inf")
    optimizer.step()
    lucid_profiler.loss(loss)
lucid_profiler.loss("much")
"""


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """Return the run of a script whose parameters become infinite, with a setting that cannot be read."""
    directory = tmp_path_factory.mktemp("diverged")
    return _profile(directory, DIVERGES, LUCID_NONFINITE="1", LUCID_ALLOCATOR_INTERVAL_S="often")


def test_the_first_step_that_was_not_finite_is_found(diverged: Profiled) -> None:
    """The loss by its call, a parameter by its name and step."""
    assert (diverged.done.stderr, diverged.seen.agent.num_errors) == ("", 0)
    assert diverged.trace.all(NonfiniteEntry) == [
        NonfiniteEntry(what="loss", step=5, num_checked=7, num_skipped=1),
        NonfiniteEntry(what="parameters", optimizer=0, name="1.weight", step=4, num_checked=7),
    ]
    assert "loss('much') was not judged: could not convert string to float: 'much'" in diverged.seen.notes


def test_what_was_not_asked_for_is_not_judged(trained: Profiled, everything: Profiled) -> None:
    """Without a setting, and without a loss, there is no finding."""
    assert not trained.trace.all(NonfiniteEntry)
    assert not everything.trace.all(NonfiniteEntry)


def test_without_cuda_the_device_is_not_measured(trained: Profiled) -> None:
    """Neither times nor allocator readings, and no file for them."""
    assert not list(trained.run_dir.glob("device-*"))
    assert trained.trace.device_times.records == ()
    assert not trained.trace.all(AllocatorEntry)
    assert not trained.trace.all(DeviceTimesEntry)


def test_a_setting_that_cannot_be_read_is_noted(diverged: Profiled) -> None:
    """The default holds, and the run goes on."""
    (note,) = [note for note in diverged.seen.notes if "ALLOCATOR" in note]
    assert note == (
        "LUCID_ALLOCATOR_INTERVAL_S is 'often', not a number of seconds from 0 (off) on: "
        "readings were taken at the default interval"
    )


def _step(hooks: TorchHooks, optimizer: torch.optim.Optimizer) -> None:
    hooks._before_step(optimizer, (optimizer,), {})
    hooks._after_step(optimizer, (optimizer,), {})


def test_a_fault_of_a_measurement_ends_that_measurement(tmp_path: Path) -> None:
    """It is counted once, steps are recorded as before, and other measurements go on."""
    guard, seen = Guard(), []

    def fails(_tracked: object, _end_ns: int) -> None:
        raise ZeroDivisionError("on purpose")

    hooks = TorchHooks(tmp_path / "steps.ring", guard=guard)
    hooks.watch(fails)
    hooks.watch(lambda tracked, end_ns: seen.append((tracked.num_steps, end_ns)))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for _ in range(3):
        _step(hooks, optimizer)
    assert (guard.num_errors, guard.errors) == (1, ["ZeroDivisionError: on purpose"])
    assert seen == [(record.step, record.end_ns) for record in read_ring(tmp_path / "steps.ring").records]
    assert len(seen) == 3


class _Nested(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class _Deaf(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step()


class _Eager(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@dataclass(frozen=True)
class _Closed:
    """Three steps with a closure: what watchers of begins saw, and when the gradients were there."""

    hooks: TorchHooks
    had_gradients: list[bool]
    made_ns: list[int]
    begins_ns: list[int]


def _steps_with_closure(folder: Path, kind: type[torch.optim.SGD], *, by_name: bool = False) -> _Closed:
    hooks = TorchHooks(folder / "steps.ring", guard=Guard())
    weight = torch.nn.Parameter(torch.ones(2))
    had_gradients: list[bool] = []
    made_ns: list[int] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        made_ns.append(time.monotonic_ns())
        return loss

    hooks.install()
    try:
        hooks.watch_begin(lambda _tracked, _end_ns: had_gradients.append(weight.grad is not None))
        optimizer = kind([weight], lr=0.1)
        torch.optim.SGD([weight], lr=0.1)  # its class is hooked as well once there is one
        for _ in range(3):
            optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            weight.grad = None
    finally:
        hooks.abandon()
    records = read_ring(folder / "steps.ring").records
    return _Closed(hooks, had_gradients, made_ns, [record.begin_ns for record in records])


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, _Nested])
def test_a_step_with_a_closure_begins_when_the_gradients_are_there(
    tmp_path: Path, kind: type[torch.optim.SGD], by_name: bool
) -> None:
    """Forward and backward in the closure are no part of it, and who is told of begins is told once, after them."""
    seen = _steps_with_closure(tmp_path, kind, by_name=by_name)
    assert seen.had_gradients == [True] * 3
    assert len(seen.begins_ns) == len(seen.made_ns) == 3
    assert all(made_ns <= begin_ns for made_ns, begin_ns in zip(seen.made_ns, seen.begins_ns, strict=True))
    assert seen.hooks.notes() == []


def test_a_closure_that_is_never_called_costs_no_step(tmp_path: Path) -> None:
    """The step begins where it was called."""
    seen = _steps_with_closure(tmp_path, _Deaf)
    assert (len(seen.begins_ns), seen.made_ns, seen.hooks.notes()) == (3, [], [])


def test_a_closure_that_is_called_again_is_told(tmp_path: Path) -> None:
    """Only its first call comes before the step."""
    seen = _steps_with_closure(tmp_path, _Eager)
    assert len(seen.had_gradients) == len(seen.begins_ns) == 3
    assert "its step time includes the later calls" in seen.hooks.notes()[0]


def test_a_watcher_of_devices_hears_of_no_other_step(tmp_path: Path) -> None:
    """Where CUDA is not in use it is never called."""
    calls = []
    hooks = TorchHooks(tmp_path / "steps.ring", guard=Guard())
    hooks.watch(lambda tracked, _end_ns: calls.append(tracked), needs_device=True)
    _step(hooks, torch.optim.SGD([torch.zeros(1)], lr=0.1))
    assert calls == []


class _Event:
    """An event of a device that is always done."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: object) -> float:
        return 0.25


def test_each_step_of_an_optimizer_on_a_device_is_measured_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first step on, once the program has memory on the device, with the host's begin."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 512)
    guard, devices = Guard(), []
    times = DeviceTimes(tmp_path / "device.ring", make_event=_Event, is_capturing=lambda: False)
    hooks = TorchHooks(tmp_path / "steps.ring", guard=guard, times=times)
    hooks._is_cuda_in_use = lambda: True
    hooks.watch(lambda tracked, _end_ns: devices.append(tracked.devices), needs_device=True)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for _ in range(3):
        _step(hooks, optimizer)
    assert (guard.errors, devices, hooks.devices()) == ([], [(3,)] * 3, [3])
    begins_ns = [record.begin_ns for record in read_ring(tmp_path / "steps.ring").records]
    assert [record.begin_ns for record in read_device_times(tmp_path / "device.ring").records] == begins_ns
    assert hooks.settle() is times


def test_a_device_that_fails_ends_its_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is counted once, and steps are recorded as before."""

    def fails() -> int:
        raise RuntimeError("CUDA error: on purpose")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 512)
    guard = Guard()
    times = DeviceTimes(tmp_path / "device.ring", make_event=_Event, is_capturing=lambda: False)
    hooks = TorchHooks(tmp_path / "steps.ring", guard=guard, times=times)
    hooks._is_cuda_in_use = lambda: True
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    _step(hooks, optimizer)
    monkeypatch.setattr(torch.cuda, "current_device", fails)
    for _ in range(3):
        _step(hooks, optimizer)
    assert (guard.num_errors, guard.errors) == (1, ["RuntimeError: CUDA error: on purpose"])
    assert read_ring(tmp_path / "steps.ring").num_written == 4
    assert times.num_results == 1


@pytest.mark.parametrize(
    ("groups", "num_steps", "expected"),
    [
        ([], 5, None),
        ([{"replays": 0, "recordings": 0, "reasons": {"no_cuda": 5}}], 5, None),
        ([{"replays": 5, "recordings": 1, "reasons": {}}], 5, 1),
        ([{"replays": 3, "recordings": 1, "reasons": {"warming_up": 2}}], 5, 3),
        (
            [
                {"replays": 3, "recordings": 1, "reasons": {"warming_up": 2}},
                {"replays": 0, "recordings": 0, "reasons": {"dtype": 5}},
            ],
            5,
            3,
        ),
        ([{"replays": 2, "recordings": 1, "reasons": {"warming_up": 2, "autocast": 1}}], 5, None),
        ([{"replays": 2, "recordings": 2, "reasons": {"warming_up": 3}}], 5, None),
        ([{"replays": 2, "recordings": 1, "reasons": {"warming_up": 2}}], 5, None),
    ],
)
def test_the_first_replay_is_told_only_where_the_counts_tell_it(
    groups: list[dict[str, Any]], num_steps: int, expected: int | None
) -> None:
    """Native steps between replays, a second recording or a group that came late leave it open."""
    assert snapshot.first_replay_step(groups, num_steps) == expected


TRAINS_IN_A_CHILD = """
import os, warnings, torch, lucid_profiler
warnings.simplefilter("ignore")  # Python advises against forks beside threads
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
def step():
    weight.grad = torch.ones(2)
    optimizer.step()
    lucid_profiler.loss(float("nan") if child == 0 else 1.0)
child = None
step()
child = os.fork()
for _ in range(3):
    step()
if child == 0:
    with lucid_profiler.fit():
        lucid_profiler.mark("child")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

LOADS_WITH_WORKERS = """
import torch, lucid_profiler
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            weight.grad = torch.ones(1)
            optimizer.step()
            lucid_profiler.loss(float("nan"))
            lucid_profiler.mark("worker")
        return float(index)
optimizer.step()
for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
    optimizer.step()
lucid_profiler.loss(1.0)
"""


@pytest.mark.parametrize(
    ("script", "num_steps"), [(TRAINS_IN_A_CHILD, 4), (LOADS_WITH_WORKERS, 5)], ids=["fork", "loader"]
)
def test_a_forked_child_that_steps_records_nothing(tmp_path: Path, script: str, num_steps: int) -> None:
    """Its steps, losses and phases are its own, and the parent's measurements are as without it."""
    profiled = _profile(tmp_path, script, LUCID_NONFINITE="1")
    assert (profiled.done.returncode, profiled.done.stderr) == (0, "")
    assert (profiled.seen.agent.num_processes, profiled.seen.agent.num_steps) == (1, num_steps)
    assert (profiled.seen.agent.num_errors, profiled.seen.phases) == (0, ())
    assert {entry.step for entry in profiled.trace.all(NonfiniteEntry)} == {None}


@pytest.mark.parametrize("pythonpath", ["", str(STARTUP)], ids=["installed", "on the path"])
def test_without_a_run_directory_nothing_is_loaded_or_hooked(tmp_path: Path, pythonpath: str) -> None:
    """Python imports no module of lucid's, and torch has no hook of its."""
    script = (
        "import sys, torch\n"
        "import torch.optim.optimizer as optimizer, torch.nn.modules.module as module\n"
        "hooks = [*optimizer._global_optimizer_pre_hooks, *optimizer._global_optimizer_post_hooks,\n"
        "         *module._global_parameter_registration_hooks, *module._global_module_registration_hooks]\n"
        "print([name for name in sys.modules if name.startswith('lucid_')], hooks,\n"
        "      [finder for finder in sys.meta_path if 'lucid' in type(finder).__module__])"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith(("LUCID_", "PYTHONPATH"))}
    env |= {"PYTHONPATH": pythonpath} if pythonpath else {}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[] [] []\n", "")


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    """What a fork does with the API leaves no trace, and the parent's record stays whole."""
    script = (
        "import os, sys, lucid_profiler\n"
        "lucid_profiler.state('metrics', {'accuracy': 0.5})\n"
        "child = os.fork()\n"
        "lucid_profiler.state('metrics', {'accuracy': 0.0 if child == 0 else 0.75})\n"
        "if child == 0: sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    profiled = _profile(tmp_path, script)
    assert profiled.seen.agent.num_processes == 1
    assert profiled.seen.notes == ("state('metrics') was called 2 times: the last value counts",)


def test_a_directory_that_cannot_be_written_leaves_the_script_alone(tmp_path: Path) -> None:
    """Without a run directory the program runs as it would."""
    profiled = _profile(tmp_path, "print('ran')", LUCID_RUN_DIR=str(tmp_path / "missing"))
    assert (profiled.done.stdout, profiled.done.stderr, profiled.done.returncode) == ("ran\n", "", 0)


def test_a_journal_that_cannot_be_written_is_named_and_the_script_runs(tmp_path: Path) -> None:
    """A missing dependency of the agent costs the record, not the run."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "orjson.py").write_text("raise ImportError('broken on purpose')")
    script = "import lucid_profiler; lucid_profiler.state('metrics', {'accuracy': 0.5}); print('ran')"
    profiled = _profile(tmp_path, script, pythonpath=(str(broken),))
    assert (profiled.done.stdout, profiled.done.stderr) == ("ran\n", "")
    assert profiled.seen.agent.loaded
    assert profiled.seen.agent.num_errors > 0
    assert "ImportError: broken on purpose" in " ".join(profiled.seen.notes)


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a Python without lucid beside the tested one")
def test_a_python_without_lucid_still_has_the_agent(tmp_path: Path) -> None:
    """The program's Python need not have the package installed."""
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    script = "import lucid_profiler, sys; lucid_profiler.mark('train'); print(sys.prefix)"
    profiled = _profile(tmp_path, script, python=(str(base),))
    assert (profiled.done.stdout, profiled.done.stderr) == (f"{sys.base_prefix}\n", "")
    assert profiled.seen.agent.loaded
