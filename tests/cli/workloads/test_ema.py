"""The averaged model against a float64 loop."""

import copy
import math

import torch
from torch import nn

from lucid_cli.workloads.detection.ema import Ema
from support.reference import bits


def small_net() -> nn.Module:
    """Return a net with weights, running statistics and an integer counter."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_the_average_follows_its_formula() -> None:
    """Every floating tensor follows decay * (1 - exp(-n / tau)); the counter is copied; the live model is untouched."""
    net = small_net()
    ema = Ema(net, decay=0.9, tau=3.0)
    expected = {name: value.double() for name, value in net.state_dict().items()}
    for step in range(1, 6):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter))
        net(torch.randn(8, 3))
        before = {name: bits(value) for name, value in net.state_dict().items()}
        ema.update(net)
        assert {name: bits(value) for name, value in net.state_dict().items()} == before
        decay = 0.9 * (1 - math.exp(-step / 3.0))
        for name, value in net.state_dict().items():
            expected[name] = (
                decay * expected[name] + (1 - decay) * value.double() if value.is_floating_point() else value.double()
            )
    for name, value in ema.model.state_dict().items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert int(ema.model.state_dict()["1.num_batches_tracked"]) == 5


def test_the_copy_takes_no_gradients_and_no_training_mode() -> None:
    """The averaged model is for evaluation only."""
    ema = Ema(small_net())
    assert not ema.model.training
    assert not any(parameter.requires_grad for parameter in ema.model.parameters())


def test_a_reloaded_average_goes_on_to_the_byte() -> None:
    """Saving and loading in between changes nothing."""
    net = small_net()
    through, resumed = Ema(net), Ema(net)
    net(torch.randn(8, 3))
    through.update(net)
    resumed.update(net)
    other = Ema(small_net())
    other.load_state_dict(copy.deepcopy(resumed.state_dict()))
    net(torch.randn(8, 3))
    through.update(net)
    other.update(net)
    assert other.num_updates == 2
    for left, right in zip(through.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert bits(left) == bits(right)
