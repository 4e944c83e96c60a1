"""`lucid profile run --locate` and `--save-state`: where arms begin to differ, and the values behind their digests."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.harness import Lucid, Ran, wait_for

ROOT = Path(__file__).resolve().parents[2]
# In the captured arm one bit of one gradient is flipped in the third step.
TRAIN = """
import os, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(1, 6):
    optimizer.zero_grad()
    net(torch.randn(16, 4)).square().mean().backward()
    if step == FLIPPED and os.environ["LUCID_PROFILE_ARM"] == "captured":
        net[2].bias.grad.view(torch.int32)[1] ^= 4096  # less would be lost when it is rounded
    optimizer.step()
"""


@pytest.fixture(scope="module")
def located(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Measure one pair that differs, and look for the place."""
    lucid = Lucid(tmp_path_factory.mktemp("flipped"))
    script = lucid.script(TRAIN.replace("FLIPPED", "3"))
    return lucid.profile(sys.executable, script, options=("--locate", "--save-state", "0"))


def test_step_part_tensor_element_bits_and_distance_are_named(located: Ran) -> None:
    """The gradient of the third step, before it, in its second element, one bit apart."""
    assert located.code == 4, located.err
    (found,) = located.records("located")
    assert found["arms"] == ["native", "captured"]
    assert (found["num_equal_steps"], found["step"], found["when"]) == (2, 3, "before")
    assert "2.bias" in found["tensor"]
    assert found["index"] == [1]
    assert found["ulps"] == 4096
    assert int(found["bits"][0], 16) ^ int(found["bits"][1], 16) == 4096
    assert "located" in located.out
    assert "4,096 ULPs apart" in " ".join(located.out.split())


def test_runs_that_look_for_the_place_are_no_runs_of_the_report(located: Ran) -> None:
    """Two runs, one pair, and the report is whole."""
    assert len(located.records("run")) == 2
    assert Lucid(located.report.parent)("report", "validate", str(located.report)).code == 0


def test_kept_values_are_confirmed_by_the_independent_script(located: Ran) -> None:
    """What was hashed is what is in the files."""
    ran = subprocess.run(
        [sys.executable, ROOT / "tools" / "rehash.py", located.report, f"{located.report}.state"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2.bias" in ran.stdout


def test_equal_arms_need_no_search(lucid: Lucid) -> None:
    """Nothing is run again, and no record says so."""
    ran = lucid.profile(sys.executable, lucid.script(TRAIN.replace("FLIPPED", "0")), options=("--locate",))
    assert ran.code == 0, ran.err
    assert not ran.records("located")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--save-state", "7"), "pairs go from 0 to 0"),
        (("--save-state", "0", "--no-agent"), "--save-state needs the agent"),
        (("--locate", "--no-agent"), "--locate needs the agent"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(
    lucid: Lucid, options: tuple[str, ...], words: str
) -> None:
    """With one line, and without a report."""
    ran = lucid.profile("true", options=options)
    assert ran.code == 2
    assert words in " ".join(ran.err.split())
    assert not ran.report.exists()


def test_kept_values_are_never_overwritten(lucid: Lucid) -> None:
    """A directory of that name stays as it is."""
    kept = Path(f"{lucid.report}.state")
    kept.mkdir()
    ran = lucid.profile("true", options=("--save-state", "0"))
    assert ran.code == 2
    assert "exists already" in ran.err
    assert not list(kept.iterdir())


HANGS_WHEN_TRACED = """
import os, time
if "LUCID_KERNELS" in os.environ:
    open("traced", "w").close()
    time.sleep(60)
"""


def test_an_interrupt_in_an_extra_run_costs_no_report(lucid: Lucid) -> None:
    """The measured runs are all there: the report is complete and valid, the table says why it is missing."""
    command = (sys.executable, lucid.script(HANGS_WHEN_TRACED))
    options = ("--pairs", "1", "--discard-pairs", "0", "-o", str(lucid.report), "--kernels")
    process = lucid.start("profile", "run", *options, "--", *command)
    wait_for(lucid.directory / "traced")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"the run was interrupted" in out
    assert lucid("report", "validate", str(lucid.report)).code == 0


def test_an_extra_run_has_a_limit_too(lucid: Lucid) -> None:
    """Ten times that of a measured one, since tracing is slow."""
    ran = lucid.profile(
        sys.executable, lucid.script(HANGS_WHEN_TRACED), options=("--kernels", "--timeout", "0.4", "--interval", "0")
    )
    assert ran.code == 0, ran.err
    assert [kernels["reason"] for kernels in ran.records("kernels")] == ["run_timeout"] * 2


def test_nothing_is_said_to_be_kept_where_nothing_was(lucid: Lucid) -> None:
    """A program without state leaves neither a note nor a directory, and the next attempt is not refused."""
    for _ in range(2):
        ran = lucid.profile("true", options=("--save-state", "0"))
        assert ran.code == 0, ran.err
        assert not any("kept" in note for run in ran.records("run") for note in run["notes"])
        assert not Path(f"{lucid.report}.state").exists()
