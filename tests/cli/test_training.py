import pytest

from cli.harness import Lucid, Ran

# A plain script: nothing in it knows of lucid but the optimizer's import.
TRAIN = """
import torch
from torch import nn
from lucid_optim import MuSGD

def main():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = MuSGD(net.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    finish(net)

def finish(net):
    pass

if __name__ == "__main__":
    main()
"""
FLIP_ONE_BIT = """
import os

def finish(net):
    if os.environ["LUCID_PROFILE_ARM"] == "captured":
        with torch.no_grad():
            net[2].bias.view(torch.int32)[1] ^= 1

"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Return one pair of a script whose captured run flips a bit after the last step."""
    lucid = Lucid(tmp_path_factory.mktemp("flipped"))
    return lucid.profile("python", lucid.script(TRAIN.replace("if __name__", FLIP_ONE_BIT + "if __name__")))


def test_one_flipped_bit_is_exit_code_4_with_the_tensors_name(ran: Ran) -> None:
    """The first difference names run, part and tensor, on standard output and in the report."""
    assert ran.code == 4
    (pair,) = ran.records("pair")
    assert pair["parity"]["status"] == "different"
    assert "2.bias" in pair["parity"]["difference"]
    text = " ".join(ran.out.split())
    assert "parity failed: parameters 2.bias: float32[2] " in text
    assert "in run 0 (native), float32[2] " in text


def test_one_native_run_proves_no_other_computation(ran: Ran) -> None:
    """With a single native run the sentence says that this may be nondeterminism."""
    text = " ".join(ran.out.split())
    assert "0 of 1 pair equal, one native run, so nothing shows whether native runs repeat" in text
    assert "this may be nondeterminism: run more pairs" in text
    assert "not the same computation" not in text
    assert "agree among themselves" not in text


def test_everything_but_the_flipped_tensor_agrees_to_the_last_bit(ran: Ran) -> None:
    """An unmodified script's parameters and optimizer state are digested by name."""
    states = {(state["run"], state["part"]): state for state in ran.records("state")}
    assert states[0, "optimizer_state"]["digest"] == states[1, "optimizer_state"]["digest"]
    native, captured = (states[run, "parameters"]["tensors"] for run in (0, 1))
    assert set(native) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert [name for name in native if native[name] != captured[name]] == ["2.bias"]


def test_steps_times_and_capture_counters_are_recorded(ran: Ran) -> None:
    """The wall goes from the first step to the last, and the optimizer says why it ran native."""
    for run in ran.records("run"):
        assert run["wall"]["source"] == "steps"
        assert run["agent"]["num_steps"] == 5
        assert run["metrics"]["optimizer_time_median"]["value"] > 0
        (capture,) = run["capture"]
        assert capture["optimizer"] == "MuSGD"
        assert capture["requested"] is (run["arm"] == "captured")
    steps = [samples for samples in ran.records("samples") if samples["series"] == "steps"]
    assert [len(samples["columns"]["begin_ns"]) for samples in steps] == [5, 5]
    assert "captured  no replays in 1 run; native: no CUDA device was used (5)" in ran.out
