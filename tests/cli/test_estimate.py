import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.harness import Lucid, Ran, wait_for
from lucid_cli.commands.profile_estimate import _StepCount
from lucid_cli.reporters.estimate import Part, part_words
from lucid_cli.reporters.words import counted
from lucid_profiler.ring import CAPACITY, RingWriter

# Trains until somebody ends it.
TRAIN = """
import torch
from torch import nn
from lucid_optim import MuSGD
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = MuSGD(net.parameters(), lr=0.1)
for step in range({steps}):
    optimizer.zero_grad()
    net(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    open("ready", "w").close()
open("done", "w").close()
"""
# Nearly all of its time is that of its batches.
TRAIN_SLOWLY = """
import time, torch
from lucid_optim import MuSGD
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.ones(4)
net = torch.nn.Linear(4, 1)
optimizer = MuSGD(net.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Slow(), batch_size=1):
    optimizer.zero_grad()
    net(batch).square().mean().backward()
    optimizer.step()
"""
ENDLESS = 10**9
# Leaves what the agent of a training on a CUDA device leaves; nothing else of such a program can be had without one.
PLAYS_CUDA = """
import json, os, sys
from pathlib import Path
from lucid_profiler.device_times import DeviceTimes
from lucid_profiler.ring import RingWriter

MS = 10**6
arm = os.environ["LUCID_PROFILE_ARM"]
folder, pid = Path(os.environ["LUCID_RUN_DIR"]), os.getpid()
Path(arm).write_text(os.environ["LUCID_CAPTURE_UPDATES"])
now = [10 * MS]

class Event:
    def record(self):
        self.at = now[0]
    def query(self):
        return True
    def elapsed_time(self, other):
        return (other.at - self.at) / MS

ring = RingWriter(folder / f"steps-{{pid}}.ring")
times = DeviceTimes(folder / f"device-{{pid}}.ring", make_event=Event, is_capturing=lambda: False)
for step in range(1, 13):
    now[0] += 6 * MS
    begin = now[0]
    times.begin(0, device=0)
    now[0] += MS if arm == "captured" and step > 3 else 4 * MS
    times.end(0, device=0, step=step, begin_ns=begin)
    ring.write(begin, begin + MS, 0, step=step)
times.settle()
report = {report}
lines = [
    {{"kind": "memory", "peak_rss_bytes": 1, "peak_allocated_bytes": 2, "peak_reserved_bytes": 3}},
    {{"kind": "steps", "num_steps": 12, "optimizers": [{{"index": 0, "name": "Muon", "module": "torch.optim._muon"}}]}},
    {{"kind": "capture", "capture": report and [report[arm]]}},
    {{"kind": "end", "pid": pid, "rank": None, "begin_ns": 1, "num_errors": 0, "errors": []}},
]
(folder / f"agent-{{pid}}.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
sys.exit(arm == {failing!r})
"""


# Leaves the ring of a program with two optimizers that took very many steps, and waits until somebody ends it.
PLAYS_STEPS = """
import os, time
from pathlib import Path
from lucid_profiler.ring import RingWriter

ring = RingWriter(Path(os.environ["LUCID_RUN_DIR"]) / f"steps-{{os.getpid()}}.ring")
for step in {numbers}:
    now = time.monotonic_ns()
    ring.write(now, now + 1, 0, step=step)
for step in range(1, {num_others} + 1):
    now = time.monotonic_ns()
    ring.write(now, now + 1, 1, step=step)
time.sleep(60)
"""

# Leaves the ring of a program that takes five steps, and goes on after it was interrupted.
GOES_ON = """
import os, signal, time
from pathlib import Path
from lucid_profiler.ring import RingWriter

heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
ring = RingWriter(Path(os.environ["LUCID_RUN_DIR"]) / f"steps-{os.getpid()}.ring")
for step in range(1, 6):
    ring.write(time.monotonic_ns(), time.monotonic_ns() + 1, 0, step=step)
while not heard:
    time.sleep(0.01)
open("done", "w").close()
"""


def group(**fields: Any) -> dict[str, Any]:
    """Return a group of a capture report."""
    return {"captured": False, "recordings": 0, "replays": 0, "reasons": {}, **fields}


def report(*groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the capture report of the only optimizer."""
    return {"optimizer": "MuSGD", "index": 0, "requested": True, "groups": list(groups), **fields}


NATIVE = report(group(reasons={"not_requested": 12}))
REPLAYED = report(
    group(captured=True, recordings=1, replays=9, reasons={"warming_up": 3}),
    setup_seconds=0.012,
    native_seconds=0.004,
    replay_seconds=0.001,
    break_even_steps=4,
)


def text_of(ran: Ran) -> str:
    """Return the result on one line."""
    return " ".join(ran.out.split())


def estimate(lucid: Lucid, script: str, *options: str, **settings: Any) -> Ran:
    """Estimate a script."""
    return lucid("profile", "estimate", *options, "--", "python", lucid.script(script), **settings)


def played(lucid: Lucid, reports: dict[str, Any] | None, *options: str, failing: str = "") -> Ran:
    """Estimate a program that leaves what one on a CUDA device leaves."""
    return estimate(lucid, PLAYS_CUDA.format(report=reports, failing=failing), *options)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Return the estimate of a program that does not end by itself."""
    return estimate(Lucid(tmp_path_factory.mktemp("ended")), TRAIN.format(steps=ENDLESS), "--steps", "8")


no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")


def test_an_endless_program_is_ended_after_its_steps(ended: Ran) -> None:
    """Exit 0; the result is on standard output, and says who ended the run, and that the optimizer was seen."""
    assert ended.code == 0
    text = text_of(ended)
    steps = re.search(r"s, (\d+) optimizer steps, ended by lucid after the 8 steps asked for", text)
    assert steps
    assert int(steps[1]) >= 8
    assert "optimizer MuSGD of lucid_optim.musgd" in text
    assert not (ended.report.parent / "done").exists()
    assert max(map(len, ended.out.splitlines())) <= 100


def test_the_share_is_that_of_the_times(ended: Ran) -> None:
    """Medians in their units, a share between its quartiles, and Amdahl's bound of that share."""
    share = re.search(r"share of the step, median +([\d.]+) %", ended.out)
    quartiles = re.search(r"quartiles over steps +([\d.]+) to ([\d.]+) %", ended.out)
    bound = re.search(r"at most +([\d.]+) % of a step, ([\d.]+) times as fast", ended.out)
    assert share
    assert quartiles
    assert bound
    assert float(quartiles[1]) <= float(share[1]) <= float(quartiles[2])
    assert bound[1] == share[1]
    assert float(bound[2]) == pytest.approx(1 / (1 - float(share[1]) / 100), rel=0.01)


@no_device
def test_without_a_device_nothing_is_promised(ended: Ran) -> None:
    """Every figure of the device is `-` with its reason, and the verdict cannot say."""
    text = text_of(ended)
    assert "device - (no CUDA device was used)" in text
    assert "capture - (no CUDA device was used, and capture does nothing without)" in text
    assert "set-up - (nothing was recorded)" in text
    assert "replayed - (no step was replayed)" in text
    assert "verdict cannot say: no CUDA device was used" in text


def test_what_is_waited_for_batches_is_told(lucid: Lucid, ended: Ran) -> None:
    """As a share of the time from the first step to the last, and what it means; without a loader there is none."""
    text = text_of(estimate(lucid, TRAIN_SLOWLY))
    share = re.search(
        r"data ([\d.]+) % of the time is spent waiting for batches: what a step saves may be spent waiting there", text
    )
    assert share
    assert 50 < float(share[1]) <= 100
    assert "data - (the main thread took no batch from a DataLoader of torch's)" in text_of(ended)


def test_a_short_program_runs_to_its_end(lucid: Lucid) -> None:
    """A few steps are shown, and are too few to conclude from; there is no second run."""
    ran = estimate(lucid, TRAIN.format(steps=3))
    assert ran.code == 0
    assert "3 optimizer steps, ran to its end" in text_of(ran)
    assert "verdict cannot say: fewer than 5 whole steps were seen" in text_of(ran)
    assert len(ran.err.splitlines()) == 1


def test_seconds_end_a_run_too(lucid: Lucid) -> None:
    """They count from the first optimizer step."""
    ran = estimate(lucid, TRAIN.format(steps=ENDLESS), "--seconds", "0.5")
    assert ran.code == 0
    assert "ended by lucid after 0.5 s of steps" in text_of(ran)


@pytest.mark.parametrize(
    ("numbers", "num_others", "num_steps"),
    [
        (range(1, CAPACITY + 101), 0, CAPACITY + 100),
        (range(1, CAPACITY // 2 + 101), CAPACITY // 2, CAPACITY // 2 + 100),
    ],
    ids=["more_than_the_ring_holds", "beside_another_optimizer"],
)
def test_any_number_of_steps_ends_a_run(lucid: Lucid, numbers: object, num_others: int, num_steps: int) -> None:
    """It is reached however few of the steps can still be read."""
    script = PLAYS_STEPS.format(numbers=numbers, num_others=num_others)
    ran = estimate(lucid, script, "--steps", str(num_steps), "--timeout", "20")
    assert ran.code == 0
    assert f"ended by lucid after the {counted(num_steps, 'step')} asked for" in text_of(ran)


def test_steps_are_counted_on_where_their_numbers_wrap(tmp_path: Path) -> None:
    """At 2**32; a step that is written behind a later one takes nothing back."""
    ring, count = RingWriter(tmp_path / "steps.ring", capacity=8), _StepCount(tmp_path / "steps.ring")
    numbers = [5, 4, 2**31, 2**32 - 1, 2**32 + 7, 2**32 + 6, 3 * 2**31]
    found = []
    for number in numbers:
        ring.write(1, 2, 0, step=number)
        ring.write(1, 2, 1, step=1)
        found.append(count.most())
    assert found == [5, 5, 2**31, 2**32 - 1, 2**32 + 7, 2**32 + 7, 3 * 2**31]


def test_a_time_limit_ends_a_program_politely(lucid: Lucid) -> None:
    """The program may finish what an interrupt has it do; without steps nothing can be said."""
    script = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    open('saved', 'w').close()\n"
    ran = estimate(lucid, script, "--timeout", "1.5")
    assert ran.code == 0
    assert (lucid.directory / "saved").exists()
    assert "ran to its end with status 0; lucid had interrupted it at its time limit of 1.5 s" in text_of(ran)
    assert "verdict cannot say: no optimizer step was seen" in text_of(ran)


def test_a_program_that_goes_on_ran_to_its_end(lucid: Lucid) -> None:
    """It was asked to stop, and heard it, but lucid has not ended it."""
    ran = estimate(lucid, GOES_ON, "--steps", "5", "--timeout", "20")
    assert ran.code == 0
    assert (lucid.directory / "done").exists()
    words = "ran to its end with status 0; lucid had interrupted it after the 5 steps asked for"
    assert words in text_of(ran)
    assert words in ran.err
    assert "ended by lucid" not in ran.out + ran.err


def test_a_program_that_a_signal_ended_was_ended_by_lucid(lucid: Lucid) -> None:
    """And one that says with its status that it did not come to its end."""
    for ending in ("os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"):
        ran = estimate(lucid, f"{GOES_ON}\nimport os, sys\n{ending}", "--steps", "5", "--timeout", "20")
        assert ran.code == 0
        assert "ended by lucid after the 5 steps asked for" in text_of(ran)


def test_a_program_can_be_ended_where_interrupts_are_ignored(lucid: Lucid) -> None:
    """A background job of a shell ignores them; what it starts would too."""
    process = lucid.start(
        *("profile", "estimate", "--steps", "5", "--", "python", lucid.script(TRAIN.format(steps=ENDLESS))),
        sigint=signal.SIG_IGN,
    )
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"ended by lucid after the 5 steps asked for" in b" ".join(out.split())
    assert b"was killed" not in out


def test_a_program_that_no_agent_can_enter(lucid: Lucid) -> None:
    """It runs to its end, and the reason is given."""
    ran = lucid("profile", "estimate", "--", "sh", "-c", "exit 0")
    assert ran.code == 0
    assert "0 optimizer steps, ran to its end" in text_of(ran)
    assert "verdict cannot say: no agent was loaded" in text_of(ran)


def test_a_failed_program_is_exit_code_8(lucid: Lucid) -> None:
    """Its status and last words are shown, and nothing is concluded from its steps."""
    ran = estimate(lucid, TRAIN.format(steps=8) + "raise SystemExit('no data left')\n")
    assert ran.code == 8
    assert "failed: exit status 1" in text_of(ran)
    assert "verdict cannot say: the program failed" in text_of(ran)
    assert "  | no data left" in ran.err


@pytest.mark.parametrize(("word", "code"), [("no-such-program", 127), ("./plain", 126)])
def test_a_command_that_cannot_be_started(lucid: Lucid, word: str, code: int) -> None:
    """The codes are a shell's, and there is no result."""
    (lucid.directory / "plain").write_text("text")
    ran = lucid("profile", "estimate", "--", word)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith("Error: ")


def test_an_interrupt_is_exit_code_130(lucid: Lucid) -> None:
    """The program is interrupted too, and no result is printed."""
    script = lucid.script(TRAIN.format(steps=ENDLESS))
    process = lucid.start("profile", "estimate", "--steps", "1000000000", "--", "python", script)
    wait_for(lucid.directory / "ready")
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")


@pytest.mark.parametrize("options", [("--steps", "0"), ("--seconds", "0"), ("--timeout", "nan")])
def test_limits_that_are_none_are_refused(lucid: Lucid, options: tuple[str, str]) -> None:
    """Exit 2 with one line of reason."""
    ran = lucid("profile", "estimate", *options, "--", "true")
    assert ran.code == 2
    assert options[0] in ran.err.splitlines()[-1]


def test_on_a_device_the_second_run_captures(lucid: Lucid) -> None:
    """Times of the device, set-up, break-even and the gain: 40 % of a step, three quarters of it saved."""
    ran = played(lucid, {"native": NATIVE, "captured": REPLAYED})
    assert ran.code == 0
    assert [(lucid.directory / arm).read_text() for arm in ("native", "captured")] == ["0", "1"]
    text = text_of(ran)
    assert "step, median 10.000 ms 10.000 ms optimizer, median 1.000 ms 4.000 ms" in text
    assert (
        "share of the step, median 10.0 % 40.0 % quartiles over steps 10.0 to 10.0 % 40.0 to 40.0 % steps 11 11" in text
    )
    assert (
        "capture certified: 1 of 1 group replayed, in 9 steps; native group steps: steps before a recording (3)" in text
    )
    assert "set-up 12.000 ms on the host, once; paid back after 4 replays" in text
    assert "at most 40.0 % of a step, 1.67 times as fast" in text
    assert "replayed 30.0 % of a step, 1.43 times as fast, with 1.000 ms a replayed" in text
    assert "timed on one step each" in text
    assert "verdict worth it: replays would gain about 30.0 % of a step" in text


def test_medians_over_steps_come_before_single_steps(lucid: Lucid) -> None:
    """Where the replayed steps are known, the times are those of both runs, and so is what pays the set-up back."""
    single = {**REPLAYED, "native_seconds": 0.009, "replay_seconds": 0.0001, "break_even_steps": 2}
    text = text_of(played(lucid, {"native": NATIVE, "captured": {**single, "first_replay_step": 4}}))
    assert "with 1.000 ms a replayed and 4.000 ms a native optimizer step, medians, of 9 replayed steps" in text
    assert "paid back after 4 replays" in text


def test_a_capture_that_is_refused_says_why(lucid: Lucid) -> None:
    """Not worth it as the program is, in the words of the reason; no time of a replay is invented."""
    refused = report(group(reasons={"dtype": 12}))
    text = text_of(played(lucid, {"native": NATIVE, "captured": refused}))
    assert "capture none of 1 group replayed; native group steps: parameters are not float32 (12)" in text
    assert "replayed - (no step was replayed)" in text
    assert "verdict not worth it: capture would leave every step native: parameters are not float32" in text


def test_a_set_up_that_is_never_paid_back(lucid: Lucid) -> None:
    """A replay that is no faster is not worth it."""
    slow = {**REPLAYED, "replay_seconds": 0.005, "break_even_steps": None}
    text = text_of(played(lucid, {"native": NATIVE, "captured": slow}))
    assert "never paid back: a replayed step takes no less time than a native one" in text
    assert "verdict not worth it: a replayed optimizer step takes no less time than a native one here" in text


def test_a_replay_that_was_not_timed(lucid: Lucid) -> None:
    """What is not known is `-`, and the verdict cannot say."""
    untimed = {**REPLAYED, "replay_seconds": None, "break_even_steps": None}
    text = text_of(played(lucid, {"native": NATIVE, "captured": untimed}))
    assert "paid back after - (too few steps to time both" in text
    assert "replayed - (no replay was timed)" in text
    assert "verdict cannot say: steps were replayed, but too few to time one" in text


def test_an_optimizer_that_cannot_capture_is_told_what_it_would_take(lucid: Lucid) -> None:
    """There is no second run, and an optimizer with the same update is named."""
    ran = played(lucid, None)
    assert not (lucid.directory / "captured").exists()
    assert "verdict cannot say: no optimizer of the program can capture. lucid_optim.Muon takes the place of Muon" in (
        text_of(ran)
    )
    assert "at most 40.0 % of a step is there" in text_of(ran)


def test_a_captured_run_that_fails_is_exit_code_8(lucid: Lucid) -> None:
    """What the native run told is shown all the same."""
    ran = played(lucid, {"native": NATIVE, "captured": REPLAYED}, failing="captured")
    assert ran.code == 8
    assert "share of the step, median 10.0 % 40.0 %" in text_of(ran)


def test_kernels_are_counted_in_a_run_of_their_own(lucid: Lucid) -> None:
    """A third run is traced; one that leaves no table has a reason in place of numbers."""
    ran = played(lucid, {"native": NATIVE, "captured": REPLAYED}, "--kernels")
    assert [line.split()[0] for line in ran.err.splitlines()] == ["native", "captured", "traced"]
    assert "launches - (the process left no table: no optimizer stepped)" in text_of(ran)


def test_a_program_that_had_to_be_killed_is_named() -> None:
    """Its exit handlers did not run, which explains what is missing."""
    part = Part(
        name="native",
        status="ended",
        limit="after 5 s of steps",
        was_killed=True,
        seconds=40,
        num_steps=9,
        num_processes=2,
    )
    assert part_words(part) == (
        "40.00 s, 9 optimizer steps in 2 processes, ended by lucid after 5 s of steps; it did not end when it was "
        "interrupted, and was killed"
    )


@pytest.mark.gpu
def test_a_program_on_a_gpu_is_judged(lucid: Lucid) -> None:
    """Both runs, the device's times, replays and launches are there."""
    script = TRAIN.replace("(8, 2))", "(8, 2)).cuda()").replace("randn(16, 4)", "randn(16, 4, device='cuda')")
    ran = estimate(lucid, script.format(steps=ENDLESS), "--kernels", timeout=300)
    assert ran.code == 0, ran.err
    text = text_of(ran)
    assert "capture certified: " in text
    assert " graphs, " in text
    assert re.search(r"replayed -?[\d.]+ % of a step", text)
    assert re.search(r"verdict (worth it|not worth it|cannot say): (replays would gain|a replayed)", text)
