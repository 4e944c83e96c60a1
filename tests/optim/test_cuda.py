"""The native step on a CUDA device: same mathematics, no synchronisation, launches counted by shape."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from lucid_optim import Muon, MuSGD
from support.cuda import synchronisation_forbidden
from support.reference import MuSGDReference, bits, relative_error

pytestmark = pytest.mark.gpu

SHAPES = [(16, 8), (8, 16), (16, 8, 3, 3), (32, 1, 3, 3), (8, 32, 1, 1), (7,), ()]


@pytest.fixture(autouse=True)
def _full_float32() -> Iterator[None]:
    """Keep TF32 out of comparisons with float64."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def params_on_device(depth: int = 1, memory_format: torch.memory_format = torch.contiguous_format) -> list[Parameter]:
    """Return parameters of every shape, `depth` of each."""
    return [
        Parameter(
            torch.randn(shape).cuda().to(memory_format=memory_format) if len(shape) == 4 else torch.randn(shape).cuda()
        )
        for shape in SHAPES * depth
    ]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_native_step_follows_the_reference(memory_format: torch.memory_format) -> None:
    """Ten steps on the device move every parameter as float64 on the host does, strides kept."""
    params = params_on_device(memory_format=memory_format)
    references = [MuSGDReference(param.detach().cpu()) for param in params]
    begins = [param.detach().cpu().double() for param in params]
    strides = [param.stride() for param in params]
    optimizer = MuSGD(params, lr=0.05, weight_decay=0.1)
    for _ in range(10):
        for param, reference in zip(params, references, strict=True):
            param.grad = torch.randn(param.shape).cuda()
            reference.step(param.grad.cpu(), lr=0.05, weight_decay=0.1)
        optimizer.step()
    for param, reference, begin, stride in zip(params, references, begins, strides, strict=True):
        assert param.stride() == stride
        assert relative_error(param.cpu(), reference.value, reference.value - begin) < 1e-3


def test_two_native_runs_have_the_same_bytes() -> None:
    """Equal inputs give equal parameters and buffers, twenty steps long."""
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        params = params_on_device(depth=2)
        optimizer = MuSGD(params, lr=0.05)
        for _ in range(20):
            for param in params:
                param.grad = torch.randn(param.shape).cuda()
            optimizer.step()
        runs.append([bits(tensor) for param in params for tensor in (param, optimizer.state[param]["momentum_buffer"])])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("lr", ["float", "cuda", "cpu"])
def test_a_step_reads_nothing_back(lr: str) -> None:
    """With a float lr, or one on either device, no step synchronises, and a tensor lr is not written."""
    params = params_on_device()
    value: Any = {"float": 0.1, "cuda": torch.tensor(0.1).cuda(), "cpu": torch.tensor(0.1)}[lr]
    optimizer = MuSGD(params, lr=value)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    torch.cuda.synchronize()
    with synchronisation_forbidden():
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] is value
    assert float(value) == pytest.approx(0.1)


def test_live_scalars_on_the_device_have_the_bytes_of_floats() -> None:
    """Momentum and decay as 0-d float32 device tensors give what the same values as floats give."""
    results = []
    for convert in (float, lambda value: torch.tensor(value).cuda()):
        torch.manual_seed(5)
        params = params_on_device()
        optimizer = MuSGD(params, lr=0.125)
        for step in range(5):
            optimizer.param_groups[0]["momentum"] = convert(0.25 + 0.1 * step)
            optimizer.param_groups[0]["weight_decay"] = convert(0.01)
            optimizer.param_groups[0]["w_sgd"] = convert(0.3)
            for param in params:
                param.grad = torch.randn(param.shape).cuda()
            optimizer.step()
        results.append([bits(param) for param in params])
    assert results[0] == results[1]


def kernel_launches(optimizer: torch.optim.Optimizer, tmp_path: Path) -> int:
    """Return the number of kernels and copies that one step launches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch 2.11 warns that one cycle is recorded, which is wanted
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            optimizer.step()
            torch.cuda.synchronize()
    trace.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return sum(event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"} for event in events)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", ["MuSGD", "Muon"])
def test_kernel_launches_do_not_grow_with_the_number_of_parameters(
    kind: str, memory_format: torch.memory_format, tmp_path: Path
) -> None:
    """A net three times as deep, of the same shapes, launches as many kernels."""

    def count(depth: int) -> int:
        params = params_on_device(depth=depth, memory_format=memory_format)
        if kind == "Muon":
            params = [param for param in params if param.ndim >= 2]
        optimizer: torch.optim.Optimizer = MuSGD(params, lr=0.1) if kind == "MuSGD" else Muon(params, lr=0.1)
        for param in params:
            param.grad = torch.randn_like(param)
        for _ in range(2):
            optimizer.step()
        return kernel_launches(optimizer, tmp_path)

    shallow = count(2)
    assert shallow > 20
    assert count(6) <= shallow + 4  # a multi-tensor kernel takes about a hundred tensors


def test_a_scaler_skips_an_overflow_and_leaves_every_byte() -> None:
    """An infinite gradient under GradScaler touches neither parameters nor momentum."""
    params = params_on_device()
    optimizer = MuSGD(params, lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)
    for step in range(4):
        for param in params:
            param.grad = torch.randn_like(param) * scaler.get_scale()
        if step == 2:
            assert params[0].grad is not None
            params[0].grad[0, 0] = torch.inf
        scaler.scale(torch.zeros((), device="cuda"))
        before = [bits(param) for param in params]
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 10.0)
        scaler.step(optimizer)
        scaler.update()
        assert ([bits(param) for param in params] == before) is (step == 2)


def test_state_loaded_from_the_host_moves_to_the_device() -> None:
    """A checkpoint loaded to the CPU resumes on the device to the byte."""
    params = params_on_device()
    twins = [Parameter(param.detach().clone()) for param in params]
    optimizer, twin = MuSGD(params, lr=0.1), MuSGD(twins, lr=0.1)
    for candidate in (optimizer, twin):
        torch.manual_seed(1)
        for param in candidate.param_groups[0]["params"]:
            param.grad = torch.randn(param.shape).cuda()
        candidate.step()
    saved = twin.state_dict()
    saved["state"] = {
        key: {name: buffer.cpu() for name, buffer in entry.items()} for key, entry in saved["state"].items()
    }
    twin.load_state_dict(saved)
    for candidate in (optimizer, twin):
        candidate.step()
    assert [bits(param) for param in params] == [bits(param) for param in twins]
