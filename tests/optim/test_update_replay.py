"""A replayed step has the bytes of the native one: twins on the same gradients, on a CPU stand-in and on CUDA.

With the stand-in of `support.eager_graphs` these tests cover certification and bookkeeping; on a device (`gpu`) they
cover the graphs themselves.
"""

import gc
import random
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from lucid_optim import Muon, MuSGD
from support import eager_graphs
from support.reference import bits
from support.twins import SHAPES, Twins

MATRICES = [shape for shape in SHAPES if len(shape) >= 2]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device whose steps can be recorded."""
    if request.param == "cpu":
        eager_graphs.install(monkeypatch)
    name: str = request.param
    return name


def make_twins(kind: str, device: str, **options: Any) -> Twins:
    """Return twins of either optimizer; Muon takes no vectors."""
    return Twins(device, Muon, shapes=MATRICES, **options) if kind == "Muon" else Twins(device, **options)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", ["MuSGD", "Muon"])
def test_every_step_has_the_native_bytes(kind: str, memory_format: torch.memory_format, device: str) -> None:
    """Two native steps, then replays only, equal after each of the first fifty."""
    twins = make_twins(kind, device, memory_format=memory_format)
    for _ in range(50 if device == "cuda" else 12):
        twins.step()
    assert twins.recordings() == [1, 1]
    assert twins.replays() == [48, 48] if device == "cuda" else [10, 10]
    assert twins.reasons() == {"warming_up": 2}


@pytest.mark.parametrize("branches", [1, 2, 8])
@pytest.mark.parametrize("kind", ["MuSGD", "Muon"])
def test_branches_do_not_change_bytes(kind: str, branches: int, device: str) -> None:
    """However many groups are prepared side by side, the bytes are the native ones."""
    twins = make_twins(kind, device, num_groups=4, captured={"capture_branches": branches})
    for _ in range(20 if device == "cuda" else 5):
        twins.step()
    assert twins.recordings() == [1, 1, 1, 1]


@pytest.mark.parametrize("branches", [0, 9, -1, 2.0, True])
def test_the_number_of_branches_is_checked(branches: Any) -> None:
    """It is an int from 1 to 8."""
    with pytest.raises(ValueError, match="capture_branches must be an int from 1 to 8"):
        MuSGD([Parameter(torch.ones(2))], lr=0.1, capture_branches=branches)


@pytest.mark.gpu
def test_three_hundred_steps_of_a_schedule() -> None:
    """Warm-up of lr and momentum, clipping in place, decay: equal after 300 steps and at every one before."""
    twins = Twins("cuda", num_groups=3)
    schedulers = [LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 60)) for optimizer in twins.both]
    for step in range(300):
        for optimizer in twins.both:
            for group in optimizer.param_groups:
                group["momentum"] = min(0.95, 0.8 + step / 200)
        twins.give()
        for optimizer in twins.both:
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 10.0)
        twins.step_as_is()
        for scheduler in schedulers:
            scheduler.step()
    assert twins.recordings() == [1, 1, 1]
    assert twins.replays() == [298, 298, 298]


def without(twins: Twins, *hidden: int | None) -> Callable[[int, Tensor], Tensor | None]:
    """Make random gradients for all parameters but some."""
    return lambda at, param: None if at in hidden else twins.random(param.detach())


CONVERSIONS: dict[str, Callable[[float], Any]] = {
    "float": float,
    "int or float": lambda value: int(value) if value == int(value) else value,
    "numpy": np.float64,
    "numpy float32": np.float32,
    "host tensor": torch.tensor,
    "device tensor": lambda value: torch.tensor(value).cuda() if torch.cuda.is_available() else torch.tensor(value),
}


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_rewritten_scalars_are_live(convert: str, device: str) -> None:
    """lr, momentum, decay and both weights, rewritten at every step from the first, replay from one recording."""
    twins = Twins(device)
    make = CONVERSIONS[convert]
    for step in range(12):
        for optimizer in twins.both:
            for group in optimizer.param_groups:
                group["lr"] = make(0.5 / (1 + step))
                group["momentum"] = make(min(0.96875, step / 8))
                group["weight_decay"] = make(0.1 + step / 16)
                group["w_muon"] = make(0.3 + step / 4)
                group["w_sgd"] = make(1.0 - step / 32)
        twins.step()
    assert twins.recordings() == [1, 1]
    assert twins.replays() == [10, 10]


@pytest.mark.parametrize("key", ["lr", "momentum", "weight_decay", "w_muon", "w_sgd"])
def test_one_scalar_at_a_time_is_live(key: str, device: str) -> None:
    """Whatever changes alone is read by the next replay, signed zeros and tiny values too."""
    twins = Twins(device)
    for value in [0.5, 0.5, 0.5, 0.25, 1e-30, 0.75, 0.75, 0.7499999999]:
        for optimizer in twins.both:
            optimizer.param_groups[1][key] = value
        twins.step()
    assert twins.recordings() == [1, 1]


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_the_sign_of_a_zero_scalar_is_uploaded(zeros: tuple[float, float], device: str) -> None:
    """A momentum of -0.0 gives other bytes than one of 0.0."""
    twins = Twins(device, momentum=zeros[0])
    for step in range(6):
        for optimizer in twins.both:
            optimizer.param_groups[0]["momentum"] = zeros[step % 2]
        twins.step(lambda at, param: torch.full_like(param, -0.0) if at % 2 else -torch.ones_like(param))
    assert twins.replays() == [4, 4]


def test_schedulers_drive_both_alike(device: str) -> None:
    """Nested schedulers with a tensor lr; the series of values is the native twin's, and no order is complained of."""
    twins = Twins(device)
    schedulers = []
    for optimizer in twins.both:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.4)  # one each: torch 2.4 fills them in place
        first, second = LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 8)
        schedulers.append(SequentialLR(optimizer, [first, second], [4]))
    for _ in range(10):
        twins.step()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The epoch parameter")  # of torch 2.4, about its own call
            for scheduler in schedulers:
                scheduler.step()
        lrs = [float(optimizer.param_groups[0]["lr"]) for optimizer in twins.both]
        assert lrs[0] == lrs[1]
    assert twins.replays() == [8, 8]


VALUES = {
    "nan": float("nan"),
    "inf": float("inf"),
    "minus inf": float("-inf"),
    "minus zero": -0.0,
    "denormal": 1e-42,
    "huge": 3e38,
}


@pytest.mark.parametrize("value", VALUES)
def test_unusual_gradients_have_the_native_bytes(value: str, device: str) -> None:
    """One unusual matrix or vector at a time, before and after recording; its neighbours stay as they were."""
    twins = Twins(device)
    number = VALUES[value]
    for step in range(8):

        def make(at: int, param: Tensor, step: int = step) -> Tensor:
            return torch.full_like(param, number) if at == step else twins.random(param.detach())

        twins.step(make)
    assert twins.replays() == [6, 6]


def test_one_unusual_entry_has_the_native_bytes(device: str) -> None:
    """A single NaN, infinity or denormal inside otherwise ordinary gradients."""
    twins = Twins(device)
    for number in [*VALUES.values(), 0.0]:

        def make(at: int, param: Tensor, number: float = number) -> Tensor:
            gradient = twins.random(param.detach())
            if at < 3:
                gradient[0, 0] = number
            return gradient

        twins.step(make)


@pytest.mark.parametrize("decays", [[0.1, 0.0, -0.0, 0.1], [0.0, -0.0, 0.0, -0.0]])
def test_decay_comes_and_goes(decays: list[float], device: str) -> None:
    """Decay on, off and of either sign of zero; only on and off are recorded anew."""
    twins = Twins(device, weight_decay=decays[0])
    for decay in decays:
        for optimizer in twins.both:
            optimizer.param_groups[0]["weight_decay"] = decay
        for _ in range(4):
            twins.step()
    changes = sum((a == 0) != (b == 0) for a, b in pairwise(decays))
    assert twins.recordings() == [1 + changes] * 2
    assert twins.reasons() == {"warming_up": 2} | ({"changed_structure": changes} if changes else {})
    assert twins.reasons(1).get("held_back", 0) == changes


def test_gradients_set_to_none_and_to_zero(device: str) -> None:
    """Gradients land elsewhere at every step, or stay and are zeroed in place; each step reads its own."""
    twins = Twins(device)
    kept: list[Tensor] = []
    for step in range(12):
        if step % 3 == 2:
            for optimizer in twins.both:
                optimizer.zero_grad(set_to_none=False)
            for first, second in twins.pairs():
                more = twins.random(first.detach())
                for param in (first, second):
                    assert param.grad is not None
                    param.grad += more
            twins.step_as_is()
        else:
            for optimizer in twins.both:
                optimizer.zero_grad(set_to_none=True)
            kept = [torch.empty(17 * step + at, device=device) for at in range(step)]
            twins.step()
    assert len(kept) == 10
    assert twins.replays() == [10, 10]


def test_accumulated_gradients(device: str) -> None:
    """One, then four, then one backward call a step, through a model with autograd's own gradients."""
    twins = Twins(device, shapes=[(8, 6), (8,), (4, 8), (4,)], num_groups=1)
    torch.manual_seed(3)
    for step in range(12):
        for optimizer in twins.both:
            optimizer.zero_grad()
        for _ in range(4 if 4 <= step < 8 else 1):
            images = torch.randn(5, 6).to(device)
            for optimizer in twins.both:
                first, bias, second, out = optimizer.param_groups[0]["params"]
                (torch.tanh(images @ first.T + bias) @ second.T + out).square().mean().backward()
        pairs = twins.pairs()
        for mine, its in pairs:
            assert its.grad is not None
            assert mine.grad is not None
            its.grad.copy_(mine.grad)  # twins are handed the same gradients
        twins.step_as_is()
    assert twins.replays() == [10]


@pytest.mark.gpu
def test_a_scaler_s_overflow_skips_both() -> None:
    """An infinity before unscaling skips the step, one put in after it does not; scale and growth agree."""
    twins = Twins("cuda", num_groups=1)
    scalers = [torch.amp.GradScaler("cuda", init_scale=65536.0, growth_interval=3) for _ in range(2)]
    for scaler in scalers:
        scaler.scale(torch.ones((), device="cuda"))
    for step in range(12):
        twins.give()
        for number, (optimizer, scaler) in enumerate(zip(twins.both, scalers, strict=True)):
            params = optimizer.param_groups[0]["params"]
            for param in params:
                param.grad *= scaler.get_scale()
            if step in {3, 7}:
                params[2].grad.view(-1)[1] = float("inf")
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 10.0)
            if step == 5:
                params[0].grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            assert number in {0, 1}
        twins.compare()
        assert scalers[0].state_dict() == scalers[1].state_dict()
    assert twins.replays() == [8]


@pytest.mark.gpu
def test_streams_that_rotate() -> None:
    """Gradients come from one stream, the step runs on another, its results are read on a third, all changing."""
    twins = Twins("cuda", num_groups=2)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for step in range(200):
        backward, stepping, reading = (streams[(step + at) % 3] for at in range(3))
        with torch.cuda.stream(backward):
            twins.give()
        stepping.wait_stream(backward)
        with torch.cuda.stream(stepping):
            for optimizer in twins.both:
                optimizer.step()
        reading.wait_stream(stepping)
        with torch.cuda.stream(reading):
            if step % 10 == 9:
                twins.compare()
        for stream in streams:
            stream.wait_stream(reading)
    assert twins.replays() == [198, 198]


@pytest.mark.gpu
def test_unordered_streams_do_not_share_owned_inputs() -> None:
    """A step on a second stream waits for the step before, which is still to begin when it is submitted.

    The native twin steps with full waits, so it says what should come out.
    """
    twins = Twins("cuda", shapes=[(256, 1024)] * 6, num_groups=1)
    for _ in range(4):
        twins.step()
    other = torch.cuda.Stream()
    for _ in range(3):
        given = []
        for _ in range(2):
            twins.give()
            twins.native.step()
            given.append([param.grad for _, param in twins.pairs()])
        torch.cuda.synchronize()
        for stream, gradients in zip((torch.cuda.current_stream(), other), given, strict=True):
            for (_, param), gradient in zip(twins.pairs(), gradients, strict=True):
                param.grad = gradient
            with torch.cuda.stream(stream):
                if stream != other:
                    torch.cuda._sleep(50_000_000)
                twins.captured.step()
        torch.cuda.synchronize()
        twins.compare()
    assert twins.replays() == [8]


def test_a_group_dict_is_replaced(device: str) -> None:
    """A fresh dict with the same parameters is read, with the same values and with others."""
    twins = Twins(device)
    for value in (0.05, 0.05, 0.05, 0.05, 0.2, 0.3):
        for optimizer in twins.both:
            optimizer.param_groups[0] = {**optimizer.param_groups[0], "momentum": 0.9 - value}
        twins.step()
    assert twins.replays()[1] == 4


@pytest.mark.parametrize("same", [True, False])
def test_a_buffer_is_replaced_by_hand(same: bool, device: str) -> None:
    """The new buffer is read and written, the old one keeps its bytes, and the report says whose state changed."""
    twins = Twins(device)
    for _ in range(4):
        twins.step()
    old = []
    for optimizer in twins.both:
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        old.append(state["momentum_buffer"])
        state["momentum_buffer"] = state["momentum_buffer"].clone() if same else state["momentum_buffer"] * 3
    before = [tensor.clone() for tensor in old]
    for _ in range(4):
        twins.step()
    assert all(torch.equal(a, b) for a, b in zip(old, before, strict=True))
    assert twins.reasons() == {"warming_up": 2, "changed_state": 1}
    assert twins.reasons(1) == {"warming_up": 2, "held_back": 1}
    assert twins.captured.capture_report().groups[1].held_back_by == {0: 1}
    assert twins.recordings() == [2, 2]


def test_a_state_entry_is_replaced_by_hand(device: str) -> None:
    """A new dict for a parameter counts as much as a new buffer in the old one."""
    twins = Twins(device)
    for step in range(8):
        if step == 4:
            for optimizer in twins.both:
                param = optimizer.param_groups[0]["params"][0]
                optimizer.state[param] = {"momentum_buffer": torch.ones_like(param.detach())}
        twins.step()
    assert twins.reasons() == {"warming_up": 2, "changed_state": 1}


def test_buffers_that_move_at_every_step_stay_native(device: str) -> None:
    """Buffers pushed to host memory and back are never those of a certificate."""
    twins = Twins(device)
    for _ in range(8):
        twins.step()
        for optimizer in twins.both:
            for entry in optimizer.state.values():
                entry["momentum_buffer"] = entry["momentum_buffer"].cpu().clone().to(device)
    assert twins.replays() == [0, 0]


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda data: data.clone(),
    "other strides": lambda data: (
        data.clone(memory_format=torch.preserve_format).mT.contiguous().mT
        if data.ndim == 2
        else data.clone(memory_format=torch.channels_last if data.ndim == 4 else torch.preserve_format)
    ),
    "half and back": lambda data: data.half().float(),
    "host and back": lambda data: data.cpu().clone().to(data.device),
}


@pytest.mark.parametrize("move", MOVES)
def test_parameters_move(move: str, device: str) -> None:
    """`p.data` of other addresses or strides is never served by the old recording."""
    twins = Twins(device)
    for step in range(12):
        if step in {4, 8}:
            kept = []
            for pair in twins.pairs():
                for param in pair:
                    kept.append(param.data)
                    param.data = MOVES[move](param.data)
        twins.step()
    assert twins.reasons()["changed_parameters"] == 2
    assert sum(twins.replays()) > 0


def test_strides_change_under_one_address(device: str) -> None:
    """A square parameter transposed in place keeps address, shape and dtype; only its strides tell."""
    twins = Twins(device, shapes=[(8, 8), (8,)], num_groups=1)
    for step in range(8):
        if step == 4:
            for param in twins.pairs()[0]:
                param.data = param.data.t()
        twins.step()
    assert twins.reasons() == {"warming_up": 2, "changed_parameters": 1}


def test_strides_of_a_buffer_change_under_one_address(device: str) -> None:
    """Likewise for a buffer, whose object stays the same."""
    twins = Twins(device, shapes=[(8, 8), (8,)], num_groups=1)
    for step in range(8):
        if step == 4:
            for optimizer, param in zip(twins.both, twins.pairs()[0], strict=True):
                buffer = optimizer.state[param]["momentum_buffer"]
                buffer.set_(buffer.untyped_storage(), 0, (8, 8), (1, 8))
        twins.step()
    assert twins.reasons() == {"warming_up": 2, "changed_state": 1}


def test_a_parameter_is_exchanged(device: str) -> None:
    """Another Parameter on the same memory is another parameter: identity decides, not the address."""
    twins = Twins(device)
    for step in range(8):
        if step == 4:
            for optimizer in twins.both:
                params = optimizer.param_groups[0]["params"]
                params[0] = Parameter(params[0].data)
        twins.step()
    assert twins.reasons()["changed_parameters"] == 1


def test_freezing_and_new_groups(device: str) -> None:
    """A layer loses its gradient, a group joins later, a frozen layer keeps an old gradient: all as natively."""
    twins = Twins(device)
    for step in range(20):
        if step == 6:
            for optimizer in twins.both:
                torch.manual_seed(step)
                optimizer.add_param_group({"params": [Parameter(torch.randn(6, 4).to(device))], "momentum": 0.5})
        if step == 14:
            for pair in twins.pairs()[:1]:
                for param in pair:
                    param.requires_grad_(False)
        twins.step(without(twins, 1 if step >= 10 else None))
    assert twins.reasons() == {"warming_up": 3, "changed_gradients": 1}
    assert twins.replays() == [16, 16, 12]


def test_a_group_without_gradients_takes_no_part(device: str) -> None:
    """Nothing is counted for it, and the others are replayed."""
    twins = Twins(device, num_groups=3)
    for _ in range(5):
        twins.step(without(twins, 6, 7, 8))
    assert twins.replays() == [3, 3, 0]
    assert twins.reasons(2) == {}


def test_loading_drops_recordings(device: str) -> None:
    """One's own state, a deep copy, and a state on the host; each is followed by a recording of its own."""
    twins = Twins(device)
    for step in range(20):
        if step in {4, 8, 12}:
            for optimizer in twins.both:
                state = optimizer.state_dict()
                if step == 8:
                    state = copied(state)
                if step == 12:
                    state = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu().half(), copied(state))
                optimizer.load_state_dict(state)
            assert twins.captured.capture_report().pool_bytes == 0
        twins.step()
    assert twins.captured.state[twins.pairs()[0][1]]["momentum_buffer"].dtype == torch.float32


def copied(state: Any) -> Any:
    """Return a deep copy."""
    return torch.utils._pytree.tree_map_only(Tensor, torch.clone, state)


def test_buffers_shared_with_another_optimizer(device: str) -> None:
    """Stepped in turn, two optimizers on the same buffers leave what two native ones leave."""
    first, second = Twins(device), Twins(device)
    for _ in range(3):
        first.step()
        second.step()
    for one, other in zip(first.both, second.both, strict=True):
        for mine, its in zip(
            [p for g in one.param_groups for p in g["params"]],
            [p for g in other.param_groups for p in g["params"]],
            strict=True,
        ):
            one.state[mine]["momentum_buffer"] = other.state[its]["momentum_buffer"]
    for _ in range(5):
        first.step()
        second.step()
    assert first.replays()[0] > 1
    assert second.replays()[0] > 1


def test_gradients_in_one_flat_bucket(device: str) -> None:
    """Gradients may share storage among themselves; halfway some get their own; the bucket is not written."""
    twins = Twins(device)
    sizes = [param.numel() for param, _ in twins.pairs()]
    for step in range(8):
        flat = torch.randn(sum(sizes) + 3).to(device)
        buckets = [flat.clone() for _ in range(2)]
        for number, bucket in enumerate(buckets):
            at = 3
            for place, pair in enumerate(twins.pairs()):
                param = pair[number]
                piece = bucket[at : at + param.numel()].view(param.shape)
                param.grad = piece.clone() if step >= 4 and place % 2 else piece
                at += param.numel()
        twins.step_as_is()
        assert all(torch.equal(bucket, flat) for bucket in buckets)
    assert twins.replays() == [6, 6]


@pytest.mark.parametrize("target", ["parameter", "buffer"])
def test_a_gradient_on_written_memory_is_native(target: str, device: str) -> None:
    """A gradient that is a view of a parameter or a buffer makes its step native, for that step."""
    twins = Twins(device, shapes=[(8, 8), (8, 8), (5,)], num_groups=1)
    for step in range(9):
        twins.give()
        if step in {4, 6}:
            for number, optimizer in enumerate(twins.both):
                params = [pair[number] for pair in twins.pairs()]
                written = params[1].data if target == "parameter" else optimizer.state[params[1]]["momentum_buffer"]
                params[0].grad = written.view(8, 8)
        for optimizer in twins.both:
            optimizer.step()
        twins.compare()
    assert twins.reasons() == {"warming_up": 2, "shared_memory": 2}
    assert twins.recordings() == [1]


def test_overlapping_parameters_are_native(device: str) -> None:
    """Views of one base are updated one by one in their order, never from a recording."""
    twins = Twins(device, shapes=[(8, 8), (8, 8)], num_groups=1)
    for number, optimizer in enumerate(twins.both):
        base = torch.arange(96.0).to(device).view(12, 8)
        first, second = (pair[number] for pair in twins.pairs())
        first.data, second.data = base[:8], base[4:]
        assert optimizer.param_groups[0]["params"][0] is first
    for _ in range(5):
        twins.step()
    assert twins.replays() == [0]
    assert twins.reasons()["shared_memory"] == 4


def test_a_parameter_listed_twice_is_native(device: str) -> None:
    """It gets the momentum twice, as natively."""
    twins = Twins(device, shapes=[(8, 8), (5,)], num_groups=1)
    for optimizer in twins.both:
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[0]["params"][0])
    for _ in range(5):
        twins.step()
    assert twins.replays() == [0]


def test_overlap_across_groups_is_native(device: str) -> None:
    """A buffer of one group that is a parameter of another keeps both native."""
    twins = Twins(device, shapes=[(8, 8), (8, 8)], num_groups=2)
    twins.step()
    for number, optimizer in enumerate(twins.both):
        first, second = (pair[number] for pair in twins.pairs())
        optimizer.state[first]["momentum_buffer"] = second.data
    for _ in range(5):
        twins.step()
    assert twins.replays() == [0, 0]
    assert twins.reasons(1)["shared_memory"] >= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_run_natively_beside_a_recording(dtype: torch.dtype, device: str) -> None:
    """A group of another dtype is named; the float32 group beside it is replayed all the same."""
    twins = Twins(device)
    for optimizer in twins.both:
        torch.manual_seed(1)
        optimizer.add_param_group({"params": [Parameter(torch.randn(4, 6).to(device, dtype))]})
    for _ in range(8):
        twins.step()
    assert twins.replays() == [6, 6, 0]
    assert twins.reasons(2) == {"dtype": 8}


def test_a_gradient_that_reaches_written_memory_by_its_strides_is_native(device: str) -> None:
    """Its address was seen before, of another layout that reached nobody's memory."""

    def layout(storage: Tensor, place: int, strides: tuple[int, int]) -> Tensor:
        return storage.as_strided((4, 4), strides, place)

    native, captured = (torch.linspace(-1, 1, 64, device=device) for _ in range(2))
    both = []
    for storage in (native, captured):
        param = Parameter(layout(storage, 32, (4, 1)))
        both.append((storage, param, MuSGD([param], lr=0.1, capture_updates=storage is captured)))
    for place, strides in [(0, (4, 1))] * 4 + [(1, (12, 1)), (0, (12, 1)), (0, (12, 1)), (0, (4, 1)), (0, (4, 1))]:
        for storage, param, optimizer in both:
            param.grad = layout(storage, place, strides)
            optimizer.step()
        assert bits(native) == bits(captured)
    (group,) = both[1][2].capture_report().groups
    assert group.reasons == {"warming_up": 2, "shared_memory": 3}
    assert group.replays == 4


def test_a_float64_gradient_is_native(device: str) -> None:
    """A gradient of another dtype, where torch lets it be set, is not copied into a float32 input."""
    twins = Twins(device, shapes=[(8, 8), (5,)], num_groups=1)
    for step in range(7):
        twins.give()
        if step == 4:
            for pair in twins.pairs()[:1]:
                for param in pair:
                    with_other_dtype(param)
        for optimizer in twins.both:
            optimizer.step()
        twins.compare()
    assert twins.reasons() == {"warming_up": 2, "gradient": 1}


def with_other_dtype(param: Tensor) -> None:
    """Give a parameter a float64 gradient; torch checks the dtype only when a gradient is set."""
    gradient = param.grad
    assert gradient is not None
    gradient.data = gradient.double() / 3


@pytest.mark.parametrize("where", ["parameter", "buffer"])
def test_gaps_in_memory_are_native(where: str, device: str) -> None:
    """A parameter or a buffer that is a strided slice runs natively under its reason."""
    twins = Twins(device, shapes=[(8, 8), (5,)], num_groups=1)
    twins.step()
    for number, optimizer in enumerate(twins.both):
        param = twins.pairs()[0][number]
        if where == "parameter":
            param.data = torch.ones(8, 16, device=device)[:, ::2]
        else:
            optimizer.state[param]["momentum_buffer"] = torch.ones(8, 16, device=device)[:, ::2]
    for _ in range(4):
        twins.step()
    assert twins.reasons()["layout"] >= 3


def test_gradients_with_other_strides_are_copied_right(device: str) -> None:
    """Row-major gradients of channels_last weights, transposed ones, expanded ones, odd strides of 1x1 weights."""
    twins = Twins(device, memory_format=torch.channels_last)
    for step in range(10):

        def make(at: int, param: Tensor, step: int = step) -> Tensor:
            value = twins.random(param.detach())
            if param.ndim == 4 and step % 2:
                return value.contiguous()
            return value.t().contiguous().t() if param.ndim == 2 and (step + at) % 3 == 0 else value

        twins.give(make)
        for first, second in twins.pairs():
            if first.ndim == 4 and first.shape[2] == 1 and step % 3 == 1:
                for param in (first, second):
                    assert param.grad is not None
                    n, c = param.shape[:2]
                    param.grad = param.grad.contiguous().as_strided((n, c, 1, 1), (c, 1, 7, 9))
            if first.ndim == 1 and step == 7:
                for param in (first, second):
                    assert param.grad is not None
                    param.grad = param.grad[:1].clone().expand(param.shape)
        twins.step_as_is()
    assert twins.replays() == [8, 8]


def test_a_lazily_negated_gradient_is_native(device: str) -> None:
    """A tensor with the negative bit lies in memory with the other sign."""
    twins = Twins(device, shapes=[(8, 8), (5,)], num_groups=1)
    for step in range(7):
        twins.give()
        if step == 4:
            for pair in twins.pairs()[:1]:
                for param in pair:
                    assert param.grad is not None
                    param.grad = torch._neg_view(param.grad)
        for optimizer in twins.both:
            optimizer.step()
        twins.compare()
    assert twins.reasons() == {"warming_up": 2, "gradient": 1}


def test_autograd_learns_that_parameters_were_written(device: str) -> None:
    """A replay raises the version of each parameter as the native step does, so that a stale graph is noticed."""
    twins = Twins(device, shapes=[(8, 8), (5,)], num_groups=1)
    for _ in range(6):
        versions = [[param._version for param in pair] for pair in twins.pairs()]
        twins.step()
        changes = [
            [param._version - before for param, before in zip(pair, old, strict=True)]
            for pair, old in zip(twins.pairs(), versions, strict=True)
        ]
        assert all(native > 0 and captured > 0 for native, captured in changes)


def test_a_gradient_tensor_subclass_is_native(device: str) -> None:
    """Its operations are its own; copying it is not known to be all that it wants."""

    class Marked(Tensor):
        pass

    twins = Twins(device, shapes=[(8, 8), (5,)], num_groups=1)
    for step in range(6):
        twins.give()
        if step == 4:
            for pair in twins.pairs()[:1]:
                for param in pair:
                    assert param.grad is not None
                    param.grad = param.grad.as_subclass(Marked)
        for optimizer in twins.both:
            optimizer.step()
    assert twins.reasons() == {"warming_up": 2, "gradient": 1}


def test_ns_steps_is_recorded_anew(device: str) -> None:
    """Another number of iterations is another recording, and the first one again after that."""
    twins = Twins(device)
    for count in (5, 3, 5):
        for optimizer in twins.both:
            for group in optimizer.param_groups:
                group["ns_steps"] = count
        for _ in range(4):
            twins.step()
    assert twins.recordings() == [3, 3]
    assert twins.reasons() == {"warming_up": 2, "changed_structure": 2}


def test_a_float_count_raises_as_natively(device: str) -> None:
    """`ns_steps=5.0` is the native TypeError after recording as before, and nothing is written."""
    twins = Twins(device)
    for _ in range(4):
        twins.step()
    for optimizer in twins.both:
        optimizer.param_groups[1]["ns_steps"] = 5.0
    twins.give()
    errors = []
    for optimizer in twins.both:
        with pytest.raises(TypeError, match="ns_steps") as caught:
            optimizer.step()
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    twins.compare()
    for optimizer in twins.both:
        optimizer.param_groups[1]["ns_steps"] = 5
    twins.step()
    assert twins.recordings() == [1, 1]


def test_the_sign_of_a_structural_zero_is_recorded_anew(device: str) -> None:
    """An eps of -0.0 is equal to 0.0 and divides otherwise."""
    twins = Twins(device, Muon, shapes=MATRICES, eps=0.0)
    for eps in (0.0, -0.0):
        for optimizer in twins.both:
            for group in optimizer.param_groups:
                group["eps"] = eps
        for _ in range(4):
            twins.step(lambda at, param: torch.zeros_like(param) if at == 0 else twins.random(param.detach()))
    assert twins.recordings() == [2, 2]


@pytest.mark.parametrize("key", ["nesterov", "adjust_lr_fn", "ns_coefficients"])
def test_muon_s_flags_are_recorded_anew(key: str, device: str) -> None:
    """What decides Muon's operations is part of its signature."""
    twins = Twins(device, Muon, shapes=MATRICES)
    others = {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_coefficients": (3.0, -4.0, 2.0)}
    for step in range(8):
        if step == 4:
            for optimizer in twins.both:
                optimizer.param_groups[0][key] = others[key]
        twins.step()
    assert twins.recordings() == [2, 2]
    assert twins.reasons()["changed_structure"] == 1


def test_toggling_at_every_step_never_records(device: str) -> None:
    """A structure that changes step by step costs no recordings."""
    twins = Twins(device)
    for step in range(10):
        for optimizer in twins.both:
            optimizer.param_groups[0]["ns_steps"] = 3 + step % 2
        twins.step()
    assert twins.recordings() == [0, 0]


def test_gradient_values_kept_by_the_user_stay(device: str) -> None:
    """Gradients and saved state kept over ten steps change only as they would natively."""
    twins = Twins(device)
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(10):
        twins.step()
        for _, param in twins.pairs():
            assert param.grad is not None
            kept.append((param.grad, param.grad.clone()))
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)
    mine, its = (optimizer.state_dict()["state"] for optimizer in twins.both)
    twins.step()
    assert all(torch.equal(mine[key]["momentum_buffer"], its[key]["momentum_buffer"]) for key in mine)


def test_a_closure_is_called_once_a_step(device: str) -> None:
    """Neither warming up nor recording evaluates the model."""
    twins = Twins(device, shapes=[(4, 4)], num_groups=1)
    calls = [0, 0]
    for _ in range(6):
        twins.give()
        for number, optimizer in enumerate(twins.both):

            def closure(number: int = number) -> float:
                calls[number] += 1
                return 1.0

            assert optimizer.step(closure) == 1.0
        twins.compare()
    assert calls == [6, 6]


def test_random_histories_have_the_native_bytes(device: str) -> None:
    """Thirty steps of random changes of every kind, for several seeds."""
    for seed in range(4):
        choose = random.Random(seed)
        twins = Twins(device, num_groups=choose.choice([1, 2, 4]))
        for _ in range(30):
            change = choose.randrange(14)
            number = choose.randrange(len(twins.native.param_groups))
            value = choose.random()
            for optimizer in twins.both:
                group = optimizer.param_groups[number]
                if change == 0:
                    group["ns_steps"] = 2 + int(value * 4)
                elif change == 1:
                    group["weight_decay"] = 0.0 if value < 0.5 else value
                elif change == 2:
                    group["momentum"] = value
                elif change == 3:
                    optimizer.load_state_dict(optimizer.state_dict())
                elif change == 4:
                    optimizer.state[group["params"][0]].pop("momentum_buffer", None)
                elif change == 5:
                    group["params"][0].data = group["params"][0].data.clone()
            hidden = choose.randrange(20)
            twins.step(without(twins, hidden))
    gc.collect()
