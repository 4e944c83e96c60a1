"""Captured updates on two CUDA devices: each has its own recordings, and the current device is nobody's default."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lucid_optim import Muon, MuSGD
from support.reference import bits
from support.twins import Twins

pytestmark = pytest.mark.two_gpus

SHAPES = [(16, 8), (8, 16), (16, 8, 3, 3), (32, 1, 3, 3), (7,), ()]


def test_updates_are_captured_on_another_than_the_current_device() -> None:
    """Bytes are the native ones, nothing is allocated on the current device, and it stays the current one."""
    torch.cuda.synchronize(0)
    before = torch.cuda.memory_allocated(0)
    twins = Twins("cuda:1")
    for _ in range(12):
        twins.step()
    assert twins.recordings() == [1, 1]
    assert twins.replays() == [10, 10]
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before


@pytest.mark.parametrize("options", [{"capture_updates": False, "capture_orthogonalization": True}, {"strict": True}])
@pytest.mark.parametrize("make", [MuSGD, Muon])
def test_every_way_of_capture_works_there(make: type[MuSGD] | type[Muon], options: dict[str, bool]) -> None:
    """The orthogonalisation alone, and a capture that complains where it cannot be."""
    matrices = [shape for shape in SHAPES if len(shape) >= 2]
    twins = Twins("cuda:1", make, shapes=matrices, captured=options)
    for _ in range(8):
        twins.step()
    assert torch.cuda.current_device() == 0


def test_optimizers_of_two_devices_step_in_turn() -> None:
    """Each replays its own recording, whichever device is the current one."""
    pairs = [Twins(f"cuda:{index}") for index in range(2)]
    for step in range(12):
        with torch.cuda.device(step % 2):
            for twins in pairs:
                twins.step()
    assert [twins.replays() for twins in pairs] == [[10, 10], [10, 10]]


def _values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _trained(*devices: str, capture: bool, num_steps: int = 8) -> tuple[MuSGD, list[bytes]]:
    """Train equal parameters, one group on each device, and return the bytes of all of them."""
    params = [[Parameter(value.to(device)) for value in _values()] for device in devices]
    optimizer = MuSGD([{"params": group} for group in params], lr=0.05, weight_decay=0.01, capture_updates=capture)
    generator = torch.Generator().manual_seed(4)
    for _ in range(num_steps):
        gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        for group in params:
            for parameter, gradient in zip(group, gradients, strict=True):
                parameter.grad = gradient.to(parameter.device)
        optimizer.step()
    return optimizer, [bits(parameter) for group in params for parameter in group]


def test_of_groups_on_two_devices_those_of_one_are_captured() -> None:
    """The others step natively and say why; all have the native bytes."""
    _, native = _trained("cuda:0", "cuda:1", capture=False)
    optimizer, captured = _trained("cuda:0", "cuda:1", capture=True)
    assert captured == native
    first, second = optimizer.capture_report().groups
    assert (first.replays, second.replays) == (6, 0)
    assert second.reasons["other_device"] > 0


@pytest.mark.parametrize("capture", [False, True])
def test_devices_of_one_model_agree_to_the_last_bit(*, capture: bool) -> None:
    """The same steps on either device give the same bytes."""
    if torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("the two devices are of different models")
    assert _trained("cuda:0", capture=capture)[1] == _trained("cuda:1", capture=capture)[1]
