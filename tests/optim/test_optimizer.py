"""The contract of torch.optim.Optimizer, kept by every rule: hooks, groups, schedulers, state, errors, copies."""

import copy
import io
import math
import multiprocessing
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import lucid_yolo.optim
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from lucid_optim import Muon, MuSGD, RuleOptimizer
from support.reference import bits, pickled


def filled(optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    """Give every parameter a gradient that depends on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def small(**options: Any) -> MuSGD:
    """Return an optimizer over a matrix, a convolution and a vector that do not depend on the call."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(4, 3), (6, 2, 3, 3), (5,)]
    return MuSGD([Parameter(torch.randn(shape, generator=generator)) for shape in shapes], **{"lr": 0.1, **options})


def contents(optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Return the bytes of every parameter and buffer."""
    tensors: list[Tensor] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            tensors += [param, *optimizer.state.get(param, {}).values()]
    return [bits(tensor) for tensor in tensors]


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    """The closure's loss comes back, and it could call backward."""
    optimizer = small()
    seen: list[bool] = []

    def closure() -> float:
        seen.append(torch.is_grad_enabled())
        filled(optimizer)
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert seen == [True]
    assert all(buffer["momentum_buffer"].requires_grad is False for buffer in optimizer.state.values())


def test_all_hook_kinds_run_once_in_order() -> None:
    """Step, state_dict and load_state_dict hooks run before and after, as in any torch optimizer."""
    optimizer = small()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("step post"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("save post"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("load post"))
    filled(optimizer)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["step pre", "step post", "save pre", "save post", "load pre", "load post"]


def test_a_load_pre_hook_may_repair_what_the_checks_would_refuse() -> None:
    """State is checked after the load hooks have had their say."""
    optimizer = small()
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["w_sgd"]

    def repair(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        state["param_groups"] = [{**state["param_groups"][0], "w_sgd": 0.25}]
        return state

    optimizer.register_load_state_dict_pre_hook(repair)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["w_sgd"] == 0.25


@pytest.mark.skipif(torch.__version__ < "2.6", reason="torch optimizers take named parameters from 2.6 on")
def test_named_parameters_give_errors_their_names() -> None:
    """An error about a parameter says which one, by name where torch keeps names."""
    module = torch.nn.Linear(2, 2)
    module.weight.data = module.weight.data.to(torch.complex64)
    with pytest.raises(ValueError, match=r"group 0, parameter 0 \(weight\) of shape \(2, 2\) is torch.complex64"):
        MuSGD(list(module.named_parameters()), lr=0.1)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda _: 0.5),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=3),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 8),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=12),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.0, 0.1, step_size_up=3),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 7)],
        [3],
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_every_scheduler_drives_the_step_and_owns_the_lr(name: str, *, tensor_lr: bool) -> None:
    """The lr series is the scheduler's own, as with torch's SGD; the step follows it and never writes a tensor lr."""

    def run(build: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[float], torch.optim.Optimizer]:
        optimizer = build(torch.tensor(0.1) if tensor_lr else 0.1)
        scheduler = SCHEDULERS[name](optimizer)
        series = []
        for step in range(10):
            filled(optimizer, step)
            lr = optimizer.param_groups[0]["lr"]
            before = float(lr)
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] is lr
            assert float(lr) == before
            series.append(before)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # SequentialLR's own call of step(epoch)
                scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
        return series, optimizer

    series, ours = run(lambda lr: small(lr=lr))
    reference, _ = run(lambda lr: torch.optim.SGD(small().param_groups[0]["params"], lr=lr, momentum=0.95))
    assert series == reference
    replayed = small()
    for step, lr in enumerate(series):
        filled(replayed, step)
        replayed.param_groups[0]["lr"] = lr
        if name in {"OneCycleLR", "CyclicLR"}:  # these also cycle the momentum
            continue
        replayed.step()
    if name not in {"OneCycleLR", "CyclicLR"}:
        assert contents(replayed) == contents(ours)


def test_a_scheduler_does_not_complain_about_the_call_order() -> None:
    """The patch that torch puts on `step` survives, whether the scheduler or capture came first."""
    optimizer = small()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    filled(optimizer)
    optimizer.step()
    scheduler.step()
    optimizer.capture_updates = True
    later = lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    later.step()


@pytest.mark.parametrize("convert", [float, np.float32, np.float64, torch.tensor])
def test_hyperparameters_rewritten_at_every_step_may_be_any_kind_of_number(convert: Callable[[float], Any]) -> None:
    """Floats, numpy scalars and tensors of one value give the same bytes."""
    reference, other = small(), small()
    for step in range(4):
        for optimizer in (reference, other):
            filled(optimizer, step)
        values = {"lr": 0.25 * step, "momentum": 0.125 * step}
        for key, value in values.items():
            reference.param_groups[0][key] = value
            other.param_groups[0][key] = convert(value)
        reference.step()
        other.step()
    assert contents(reference) == contents(other)


def test_a_scaler_skips_overflowing_steps_and_unscales_the_others() -> None:
    """With GradScaler an overflow touches nothing; other steps equal the plain ones."""
    scaled, plain = small(), small()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(4):
        for optimizer in (scaled, plain):
            filled(optimizer, step)
        for param in scaled.param_groups[0]["params"]:
            param.grad = param.grad * scaler.get_scale()
        scaler.scale(torch.zeros(()))
        overflow = step == 2
        if overflow:
            scaled.param_groups[0]["params"][0].grad[0, 0] = math.inf
        before = contents(scaled)
        scaler.step(scaled)
        scaler.update()
        if overflow:
            assert contents(scaled) == before
        else:
            plain.step()
            assert contents(scaled) == contents(plain)


def test_a_detection_trainer_s_loop_equals_the_plain_one() -> None:
    """Eight labelled groups, half of them empty; scaling, clipping in place, accumulation, gradients to None.

    The bytes equal those of one plain group a parameter kind that is handed the same clipped gradients.
    """

    def trainer(labels: bool) -> tuple[MuSGD, list[Parameter]]:
        generator = torch.Generator().manual_seed(11)
        kinds: dict[str, list[tuple[int, ...]]] = {
            "weight": [(6, 4)],
            "bn": [(6,)],
            "bias": [(6,), ()],
            "muon": [(8, 4, 3, 3), (8, 1, 3, 3), (4, 8, 1, 1)],
        }
        params: list[Parameter] = []
        groups: list[dict[str, Any]] = []
        for kind, shapes in kinds.items():
            members = [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
            params += members
            extra: dict[str, Any] = (
                {"param_group": kind, "use_muon": kind == "muon", "nesterov": True} if labels else {}
            )
            decay = 5e-4 if kind in {"weight", "muon"} else 0.0
            if labels:
                groups.append({"params": [], "lr": 0.03, "weight_decay": decay, **extra})
            groups.append({"params": members, "lr": 0.01, "weight_decay": decay, **extra})
        return MuSGD(groups, lr=0.01, momentum=0.9), params

    optimizer, params = trainer(labels=True)
    plain, twins = trainer(labels=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(6):
        backward_calls = 4 if step in {2, 3} else 1
        for call in range(backward_calls):
            generator = torch.Generator().manual_seed(100 * step + call)
            for param in params:
                gradient = scaler.scale(torch.randn(param.shape, generator=generator))
                param.grad = gradient if param.grad is None else param.grad.add_(gradient)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 10.0)
        for param, twin in zip(params, twins, strict=True):
            twin.grad = None if param.grad is None else param.grad.clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        plain.step()
    assert [bits(param) for param in params] == [bits(twin) for twin in twins]


def test_tied_weights_are_one_parameter() -> None:
    """A parameter used by two layers moves once a step, by its summed gradient."""
    first, second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    net = torch.nn.Sequential(first, second)
    twin = Parameter(first.weight.detach().clone())
    optimizer, plain = MuSGD(net.parameters(), lr=0.1), MuSGD([twin], lr=0.1)
    net(torch.ones(2, 3)).sum().backward()
    assert first.weight.grad is not None
    twin.grad = first.weight.grad.clone()
    optimizer.step()
    plain.step()
    assert len(optimizer.param_groups[0]["params"]) == 1
    assert bits(first.weight) == bits(twin)


def test_another_parameter_put_into_a_group_takes_over() -> None:
    """Identity decides: the newcomer of equal shape moves from zero momentum, the one it replaced stays."""
    optimizer = small()
    filled(optimizer)
    optimizer.step()
    old = optimizer.param_groups[0]["params"][0]
    kept = bits(old)
    new, twin = Parameter(torch.ones(4, 3)), Parameter(torch.ones(4, 3))
    optimizer.param_groups[0]["params"][0] = new
    plain = MuSGD([twin], lr=0.1)
    new.grad, twin.grad = torch.full((4, 3), 2.0), torch.full((4, 3), 2.0)
    optimizer.step()
    plain.step()
    assert bits(old) == kept
    assert bits(new) == bits(twin)


def test_a_group_added_later_trains_with_its_own_options() -> None:
    """add_param_group fills in defaults, keeps unknown keys and leaves other groups alone."""
    optimizer = small()
    late = Parameter(torch.ones(3, 3))
    optimizer.add_param_group({"params": late, "lr": 0.0, "tag": ["anything"], "initial_lr": 0.1})
    filled(optimizer)
    optimizer.step()
    assert late.tolist() == [[1.0] * 3] * 3
    assert optimizer.param_groups[1]["tag"] == ["anything"]
    assert optimizer.param_groups[1]["momentum"] == 0.95


@pytest.mark.parametrize("extra", ["text", [1], {"a": 1}, torch.ones(2), lambda: None])
def test_unknown_group_keys_never_matter(extra: Any) -> None:
    """A trainer may hang labels of any type on a group, and change them at every step."""
    optimizer, plain = small(), small()
    for step in range(3):
        optimizer.param_groups[0]["label"] = extra
        optimizer.param_groups[0]["counter"] = step
        filled(optimizer, step)
        filled(plain, step)
        optimizer.step()
        plain.step()
    assert contents(optimizer) == contents(plain)


BAD_VALUES = [
    ("lr", -1.0, ValueError, "lr must be non-negative, got -1.0"),
    ("lr", math.nan, ValueError, "lr must be finite, got nan"),
    ("lr", math.inf, ValueError, "lr must be finite, got inf"),
    ("lr", "0.1", TypeError, "lr must be a number, got '0.1'"),
    ("lr", torch.ones(2), TypeError, r"lr must be a number or a one-element tensor, got a tensor of shape \(2,\)"),
    ("momentum", -0.1, ValueError, r"momentum must be in \[0, 1\), got -0.1"),
    ("momentum", 1.0, ValueError, r"momentum must be in \[0, 1\), got 1.0"),
    ("momentum", math.nan, ValueError, "momentum must be finite"),
    ("weight_decay", -1e-4, ValueError, "weight_decay must be non-negative"),
    ("weight_decay", None, TypeError, "weight_decay must be a number, got None"),
    ("w_muon", math.inf, ValueError, "w_muon must be finite"),
    ("w_sgd", -1.0, ValueError, "w_sgd must be non-negative"),
    ("ns_steps", 0, ValueError, "ns_steps must be positive, got 0"),
    ("ns_steps", 5.0, TypeError, "ns_steps must be an int, got 5.0"),
    ("ns_steps", True, TypeError, "ns_steps must be an int, got True"),
]


@pytest.mark.parametrize(("key", "value", "error", "message"), BAD_VALUES)
def test_a_bad_value_is_refused_at_every_door(key: str, value: Any, error: type[Exception], message: str) -> None:
    """Constructor, group, add_param_group and load refuse it by name, and nothing changes."""
    with pytest.raises(error, match=message):
        small(**{key: value})
    with pytest.raises(error, match="group 1: " + message):
        MuSGD([{"params": [Parameter(torch.ones(2))]}, {"params": [Parameter(torch.ones(2))], key: value}], lr=0.1)
    optimizer = small()
    filled(optimizer)
    optimizer.step()
    before, groups = contents(optimizer), len(optimizer.param_groups)
    with pytest.raises(error, match="group 1: " + message):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], key: value})
    assert len(optimizer.param_groups) == groups
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = value
    with pytest.raises(error, match="group 0: " + message):
        optimizer.load_state_dict(saved)
    assert contents(optimizer) == before
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_mistyped_argument_is_named() -> None:
    """A typo in a keyword is an error, never a silent default."""
    with pytest.raises(TypeError, match="momentun"):
        small(momentun=0.9)


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (Parameter(torch.ones(2, dtype=torch.complex64)), "only real floating-point parameters"),
        (Parameter(torch.ones(3).expand(2, 3)), "expanded tensor"),
        (Parameter(torch.eye(2).to_sparse()), "layout torch.sparse_coo"),
        (torch.ones(2, dtype=torch.int64), "only real floating-point parameters"),
    ],
)
def test_a_parameter_that_cannot_be_updated_is_refused_by_name(param: Tensor, message: str) -> None:
    """Complex, expanded, sparse and integer parameters are named at construction."""
    with pytest.raises(ValueError, match=f"group 0, parameter 1 .*{message}"):
        MuSGD([Parameter(torch.ones(2)), param], lr=0.1)


@pytest.mark.parametrize("kind", ["sparse", "complex_step", "late_type", "late_momentum", "inference", "misfit"])
def test_a_step_that_cannot_run_writes_nothing(kind: str) -> None:
    """Whatever is wrong in the last group is found before the first group is written."""
    first, last = Parameter(torch.ones(3, 3)), Parameter(torch.ones(4, 3))
    optimizer = MuSGD([{"params": [first]}, {"params": [last]}], lr=0.1)
    filled(optimizer)
    optimizer.step()
    error: type[Exception] = RuntimeError
    if kind == "sparse":
        last.grad = torch.eye(4, 3).to_sparse()
        message = "group 1, parameter 0 .*its gradient is of layout torch.sparse_coo"
    elif kind == "complex_step":
        last.data = last.data.to(torch.complex64)
        last.grad = torch.ones(4, 3, dtype=torch.complex64)
        message = "group 1, parameter 0 .*is torch.complex64; only real"
    elif kind == "late_type":
        optimizer.param_groups[1]["ns_steps"] = 5.0
        error, message = TypeError, "group 1: ns_steps must be an int, got 5.0"
    elif kind == "late_momentum":
        optimizer.param_groups[1]["momentum"] = [0.9]
        error, message = TypeError, r"group 1: momentum must be a float32 number or a one-element tensor, got \[0.9\]"
    elif kind == "inference":
        with torch.inference_mode():
            optimizer.state[last]["momentum_buffer"] = torch.zeros(4, 3)
        message = "momentum_buffer was made in inference mode"
    else:
        optimizer.state[last]["momentum_buffer"] = torch.zeros(3, 4)
        message = r"momentum_buffer has shape \(3, 4\), its parameter \(4, 3\)"
    before, buffer = bits(first), bits(optimizer.state[first]["momentum_buffer"])
    with pytest.raises(error, match=message):
        optimizer.step()
    assert bits(first) == before
    assert bits(optimizer.state[first]["momentum_buffer"]) == buffer


@pytest.mark.parametrize("foreign", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_a_state_of_another_optimizer_is_refused_whole(foreign: type[torch.optim.Optimizer]) -> None:
    """The message says which keys are missing, and the optimizer goes on unchanged."""
    optimizer = small()
    filled(optimizer)
    optimizer.step()
    before = contents(optimizer)
    other = foreign(small().param_groups[0]["params"], lr=0.1)  # type: ignore[call-arg]
    filled(other)
    other.step()
    with pytest.raises(ValueError, match=r"group 0 lacks .*'w_muon'"):
        optimizer.load_state_dict(other.state_dict())
    assert contents(optimizer) == before
    optimizer.step()


def test_foreign_state_under_familiar_groups_is_refused() -> None:
    """Moments of another optimizer are named even where the groups look right."""
    optimizer = small()
    saved = optimizer.state_dict()
    saved["state"] = {0: {"exp_avg": torch.zeros(4, 3), "exp_avg_sq": torch.zeros(4, 3)}}
    with pytest.raises(
        ValueError,
        match=r"parameter 0 of shape \(4, 3\): state holds 'exp_avg', 'exp_avg_sq' and none of 'momentum_buffer'",
    ):
        optimizer.load_state_dict(saved)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(3, 4), "has shape"),
        (torch.eye(4, 3).to_sparse(), "dense tensor"),
        ("zeros", "dense tensor, got str"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer: Any, message: str) -> None:
    """Wrong shapes and kinds of buffer are refused at load, and nothing changes."""
    optimizer = small()
    filled(optimizer)
    optimizer.step()
    before = contents(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["momentum_buffer"] = buffer
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert contents(optimizer) == before


@pytest.mark.parametrize("entry", [None, {}, {"momentum_buffer": None}])
def test_a_missing_buffer_starts_from_zero(entry: dict[str, Any] | None) -> None:
    """A parameter without an entry, or with an empty one, goes on as if it had never had a gradient."""
    optimizer, fresh = small(), small()
    filled(optimizer)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    if entry is None:
        del saved["state"][1]
    else:
        saved["state"][1] = entry
    optimizer.load_state_dict(saved)
    convolution = optimizer.param_groups[0]["params"][1]
    with torch.no_grad():
        convolution.copy_(fresh.param_groups[0]["params"][1])
    filled(optimizer, 5)
    filled(fresh, 5)
    optimizer.step()
    fresh.step()
    assert bits(convolution) == bits(fresh.param_groups[0]["params"][1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_state_saved_in_another_precision_comes_back_as_float32(dtype: torch.dtype) -> None:
    """Buffers take the parameter's dtype at load, and a second round trip changes nothing."""
    optimizer = small()
    filled(optimizer)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["momentum_buffer"] = (entry["momentum_buffer"] * 1e-6).to(dtype)
    optimizer.load_state_dict(saved)
    for param, entry in optimizer.state.items():
        assert entry["momentum_buffer"].dtype == torch.float32
        assert entry["momentum_buffer"].shape == param.shape
    once = contents(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert contents(optimizer) == once


def test_a_checkpoint_file_resumes_to_the_byte() -> None:
    """torch.save and torch.load(weights_only=True) in the middle of a run change nothing."""
    through, resumed = small(), small()
    for step in range(3):
        filled(through, step)
        filled(resumed, step)
        through.step()
        resumed.step()
    file = io.BytesIO()
    torch.save(resumed.state_dict(), file)
    file.seek(0)
    late = small()
    for param, source in zip(late.param_groups[0]["params"], resumed.param_groups[0]["params"], strict=True):
        param.data = source.detach().clone()
    late.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 6):
        filled(through, step)
        filled(late, step)
        through.step()
        late.step()
    assert contents(through) == contents(late)


def test_a_state_loaded_from_a_live_optimizer_shares_its_buffers_as_in_torch() -> None:
    """Loading without a copy shares tensors; two optimizers then advance one buffer in turn."""
    source, target = small(), small()
    filled(source)
    source.step()
    target.load_state_dict(source.state_dict())
    shared = source.state[source.param_groups[0]["params"][0]]["momentum_buffer"]
    assert target.state[target.param_groups[0]["params"][0]]["momentum_buffer"] is shared


def _step_in_child(payload: bytes, results: Any) -> None:
    torch.set_num_threads(1)
    optimizer = pickle.loads(payload)
    filled(optimizer, 9)
    optimizer.step()
    results.put((optimizer.capture_updates, contents(optimizer)))


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "spawn"])
def test_copies_keep_every_factor_and_the_capture_flag(way: str) -> None:
    """A copied optimizer steps to the same bytes and answers the same about capture."""
    optimizer = small(momentum=0.7, weight_decay=0.1, w_muon=0.3, w_sgd=0.9, ns_steps=3, capture_updates=True)
    filled(optimizer)
    optimizer.step()
    if way == "spawn":
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        child = context.Process(target=_step_in_child, args=(pickle.dumps(optimizer), results))
        child.start()
        flag, copied = results.get(timeout=60)
        child.join(60)
    else:
        twin = pickled(optimizer) if way == "pickle" else copy.deepcopy(optimizer)
        filled(twin, 9)
        twin.step()
        assert twin.capture_orthogonalization is False
        assert twin.capture_report().groups[0].reasons == {"no_cuda": 1}
        flag, copied = twin.capture_updates, contents(twin)
    filled(optimizer, 9)
    optimizer.step()
    assert flag is True
    assert copied == contents(optimizer)


def test_the_capture_flag_stays_out_of_checkpoints() -> None:
    """A loaded checkpoint never switches capture."""
    optimizer, other = small(capture_updates=True), small()
    assert not any("capture" in key for key in optimizer.state_dict()["param_groups"][0])
    other.load_state_dict(optimizer.state_dict())
    assert other.capture_updates is False


@pytest.mark.parametrize(
    ("environment", "explicit", "expected", "overridden"),
    [
        ({}, None, False, False),
        ({"LUCID_CAPTURE_UPDATES": "1"}, None, True, False),
        ({"LUCID_CAPTURE_UPDATES": "0"}, None, False, False),
        ({"LUCID_CAPTURE_UPDATES": "1"}, False, False, False),
        ({"LUCID_CAPTURE_UPDATES": "0"}, True, True, False),
        ({"LUCID_CAPTURE_UPDATES": "0", "LUCID_PROFILE_ARM": "native"}, True, False, True),
        ({"LUCID_CAPTURE_UPDATES": "1", "LUCID_PROFILE_ARM": "captured"}, False, True, True),
        ({"LUCID_CAPTURE_UPDATES": "1", "LUCID_PROFILE_ARM": "captured"}, True, True, False),
        ({"LUCID_PROFILE_ARM": "other"}, True, True, False),
    ],
)
def test_who_decides_on_capture(
    environment: dict[str, str], explicit: bool | None, *, expected: bool, overridden: bool, monkeypatch: Any
) -> None:
    """The variable is a default; inside an arm of a profile run it wins, and the report says so."""
    for name in ("LUCID_CAPTURE_UPDATES", "LUCID_PROFILE_ARM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    optimizer = small(capture_updates=explicit)
    assert optimizer.capture_updates is expected
    assert optimizer.capture_report().overridden is overridden


def test_a_variable_that_is_neither_0_nor_1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped switch is an error, not an off."""
    monkeypatch.setenv("LUCID_CAPTURE_UPDATES", "yes")
    with pytest.raises(ValueError, match="LUCID_CAPTURE_UPDATES must be 0 or 1, got 'yes'"):
        small()


@pytest.mark.parametrize("key", ["capture_updates", "capture_orthogonalization", "strict"])
def test_capture_flags_take_only_booleans(key: str) -> None:
    """A string such as "False" would otherwise switch capture on."""
    with pytest.raises(TypeError, match=f"{key} must be True"):
        small(**{key: "False"})


@pytest.mark.parametrize("key", ["capture_updates", "capture_orthogonalization"])
def test_capture_on_the_cpu_answers_native_with_a_counted_reason(key: str) -> None:
    """The report counts each native step, or orthogonalisation, under the reason why."""
    optimizer, plain = small(**{key: True}), small()
    optimizer.add_param_group({"params": []})
    for step in range(3):
        filled(optimizer, step)
        filled(plain, step)
        optimizer.step()
        plain.step()
    report = optimizer.capture_report()
    is_whole = key == "capture_updates"
    assert report.requested is is_whole
    assert [group.reasons for group in report.groups] == [{"no_cuda" if is_whole else "not_requested": 3}, {}]
    assert report.orthogonalization_reasons == ({} if is_whole else {"no_cuda": 3})
    assert report.as_dict()["groups"][0]["replays"] == 0
    assert plain.capture_report().groups[0].reasons == {"not_requested": 3}
    assert contents(optimizer)[: len(contents(plain))] == contents(plain)


class CountDispatches(TorchDispatchMode):
    """Counts operations that reach the dispatcher from Python."""

    count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if not any(part in name for part in ("aten::as_strided", "aten::unbind", "aten::detach", "aten::alias")):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("optimizer_type", [MuSGD, Muon])
def test_the_number_of_launches_does_not_grow_with_the_number_of_parameters(
    optimizer_type: type[RuleOptimizer], memory_format: torch.memory_format
) -> None:
    """A net three times as deep, of the same shapes, dispatches as many operations, apart from views."""

    def count(depth: int) -> int:
        shapes = [(8, 4, 3, 3), (4, 8, 1, 1), (8, 1, 3, 3), (16, 8), (8, 16)] * depth
        params = [
            Parameter(torch.randn(shape).to(memory_format=memory_format) if len(shape) == 4 else torch.randn(shape))
            for shape in shapes
        ]
        if optimizer_type is MuSGD:
            params += [Parameter(torch.randn(5)) for _ in range(depth)]
        optimizer = optimizer_type(params, lr=0.1)  # type: ignore[call-arg]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        counter = CountDispatches()  # type: ignore[no-untyped-call]
        with counter:
            optimizer.step()
        return int(counter.count)

    assert count(6) == count(2)


def test_a_subclass_may_yield_updates_of_its_own() -> None:
    """Overriding `_updates` replaces the preparation; each update is written before the next is asked for."""
    seen: list[list[float]] = []

    class Constant(MuSGD):
        def _updates(self, group: dict[str, Any]) -> Any:
            for param in group["params"]:
                seen.append(param.tolist())
                yield [param], [torch.ones_like(param)], -0.5
                seen.append(param.tolist())

    param = Parameter(torch.zeros(2))
    optimizer = Constant([param], lr=0.1)
    param.grad = torch.ones(2)
    optimizer.step()
    assert seen == [[0.0, 0.0], [-0.5, -0.5]]


def test_a_compiled_step_runs_as_it_is() -> None:
    """Under torch.compile the step gives the same bytes."""
    compiled, plain = small(), small()
    step = torch.compile(compiled.step, backend="eager")
    for seed in range(3):
        filled(compiled, seed)
        filled(plain, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step()
        plain.step()
    assert contents(compiled) == contents(plain)


def test_stepping_never_rebinds_gradients_or_returned_state() -> None:
    """Gradients keep identity and bytes; a state_dict's tensors are the live buffers, as in torch."""
    optimizer = small()
    filled(optimizer)
    kept = [(param.grad, bits(param.grad)) for param in optimizer.param_groups[0]["params"]]
    optimizer.step()
    for param, (gradient, before) in zip(optimizer.param_groups[0]["params"], kept, strict=True):
        assert param.grad is gradient
        assert bits(gradient) == before
    live = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]
    assert optimizer.state_dict()["state"][0]["momentum_buffer"] is live


def test_parameters_made_anew_by_the_module_are_read_where_they_are_now() -> None:
    """Rebinding `.data`, a change of layout and a round trip through half precision are followed."""
    optimizer, twin = small(), small()
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda data: data.clone(),
        lambda data: data.to(memory_format=torch.channels_last) if data.ndim == 4 else data,
        lambda data: data.half().float(),
    ]
    for step, change in enumerate(changes):
        for candidate in (optimizer, twin):
            filled(candidate, step)
            for param in candidate.param_groups[0]["params"]:
                param.data = change(param.data).clone() if candidate is twin else change(param.data)
            candidate.step()
    assert contents(optimizer) == contents(twin)


def test_groups_may_be_removed_and_their_counts_go_with_them() -> None:
    """Taking a group out of `param_groups` is no error at the next step, and no other group inherits its counts."""
    first, second, third = (Parameter(torch.ones(3, 3)) for _ in range(3))
    optimizer = MuSGD([{"params": [first]}, {"params": [second]}], lr=0.1)
    filled(optimizer)
    optimizer.step()
    optimizer.step()
    del optimizer.param_groups[0]
    before = bits(first)
    optimizer.step()
    optimizer.add_param_group({"params": [third]})
    third.grad = torch.ones(3, 3)
    optimizer.step()
    assert bits(first) == before
    assert [group.reasons for group in optimizer.capture_report().groups] == [
        {"not_requested": 4},
        {"not_requested": 1},
    ]


LATE_FAULTS: dict[str, tuple[Callable[[MuSGD, Parameter], None], type[Exception]]] = {
    "two learning rates": (lambda optimizer, _: _set(optimizer, "lr", torch.tensor([0.1, 0.2])), TypeError),
    "an array": (lambda optimizer, _: _set(optimizer, "lr", np.array([0.1, 0.2])), TypeError),
    "a complex number": (lambda optimizer, _: _set(optimizer, "lr", 1j), TypeError),
    "text": (lambda optimizer, _: _set(optimizer, "w_muon", "0.5"), TypeError),
    "no iterations": (lambda optimizer, _: _set(optimizer, "ns_steps", 0), ValueError),
    "an expanded buffer": (lambda optimizer, p: _buffer(optimizer, p, torch.zeros(1).expand(4, 3)), RuntimeError),
    "an integer buffer": (
        lambda optimizer, p: _buffer(optimizer, p, torch.zeros(4, 3, dtype=torch.int64)),
        RuntimeError,
    ),
    "a buffer elsewhere": (lambda optimizer, p: _buffer(optimizer, p, torch.zeros(4, 3, device="meta")), RuntimeError),
    "an expanded parameter": (lambda _, p: _data(p, torch.ones(1, 3).expand(4, 3)), RuntimeError),
    "a stale gradient": (lambda _, p: _data(p, torch.ones(6, 3)), RuntimeError),
}


def _set(optimizer: MuSGD, key: str, value: Any) -> None:
    optimizer.param_groups[1][key] = value


def _buffer(optimizer: MuSGD, param: Tensor, value: Tensor) -> None:
    optimizer.state[param]["momentum_buffer"] = value


def _data(param: Parameter, value: Tensor) -> None:
    param.data = value


@pytest.mark.parametrize("fault", sorted(LATE_FAULTS))
def test_a_fault_in_the_last_group_is_found_before_the_first_is_written(fault: str) -> None:
    """Values, parameters, gradients and buffers that went wrong after construction stop the step before any byte."""
    first, last = Parameter(torch.ones(3, 3)), Parameter(torch.ones(4, 3))
    optimizer = MuSGD([{"params": [first]}, {"params": [last]}], lr=0.1)
    filled(optimizer)
    optimizer.step()
    make, error = LATE_FAULTS[fault]
    make(optimizer, last)
    before = bits(first), bits(optimizer.state[first]["momentum_buffer"])
    counts = optimizer.capture_report()
    with pytest.raises(error, match="group 1"):
        optimizer.step()
    assert (bits(first), bits(optimizer.state[first]["momentum_buffer"])) == before
    assert optimizer.capture_report() == counts


@pytest.mark.parametrize("alias", ["parameter", "momentum"])
def test_a_gradient_that_is_a_transposed_view_of_what_is_written_follows_the_published_order(alias: str) -> None:
    """The second parameter's gradient shows what the first one's update left, whatever its strides."""
    results = []
    for optimizer_type in (MuSGD, lucid_yolo.optim.MuSGD):
        first, second = Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), Parameter(torch.zeros(2, 2))
        optimizer = optimizer_type([first, second], lr=1.0, w_muon=0.0, w_sgd=1.0, momentum=0.5, weight_decay=0.0)
        first.grad = torch.full((2, 2), 10.0)
        optimizer.step()
        source = first.detach() if alias == "parameter" else optimizer.state[first]["momentum_buffer"]
        second.grad = source.t()
        optimizer.step()
        results.append(bits(second))
    assert results[0] == results[1]


def test_state_of_a_subclass_survives_copies_and_checkpoints() -> None:
    """Keys that are no parameters, and keys beside the rule's own, are kept as torch keeps them."""
    param = Parameter(torch.ones(2, 2))
    optimizer = MuSGD([param], lr=0.1)
    param.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.state[param]["ema"] = param.detach().clone()
    copied = copy.deepcopy(optimizer)
    (twin,) = copied.param_groups[0]["params"]
    assert bits(copied.state[twin]["ema"]) == bits(param)
    optimizer.state["counter"] = 3  # type: ignore[index]
    assert copy.deepcopy(optimizer).state["counter"] == 3  # type: ignore[index]
    del optimizer.state["counter"]  # type: ignore[arg-type]
    optimizer.state["global"] = {"counter": 3}  # type: ignore[index]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state["global"] == {"counter": 3}  # type: ignore[index]


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_an_optimizer_that_steps_can_be_copied_whatever_its_values(way: Callable[[MuSGD], MuSGD]) -> None:
    """A scheduler may have set what the constructor would refuse; a copy is no place to complain."""
    optimizer = small(capture_orthogonalization=True)
    optimizer.param_groups[0]["momentum"] = 1.0
    twin = way(optimizer)
    assert twin.param_groups[0]["momentum"] == 1.0
    assert twin.capture_orthogonalization is True


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_momentum_is_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    """A momentum of 0.99 decays a buffer as the published optimizer does, not as 0.98828 would."""
    buffers = []
    for optimizer_type in (MuSGD, lucid_yolo.optim.MuSGD):
        param = Parameter(torch.zeros(4, dtype=dtype))
        optimizer = optimizer_type([param], lr=0.0, momentum=0.99)
        param.grad = torch.ones(4, dtype=dtype)
        for _ in range(200):
            optimizer.step()
            param.grad = torch.zeros(4, dtype=dtype)
        buffers.append(optimizer.state[param]["momentum_buffer"])
    assert bits(buffers[0]) == bits(buffers[1])


def test_meta_parameters_step() -> None:
    """A step without data goes through, for tools that only look at shapes."""
    param = Parameter(torch.empty(3, 3, device="meta"))
    optimizer = MuSGD([param], lr=0.1)
    param.grad = torch.empty(3, 3, device="meta")
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].is_meta


@pytest.mark.parametrize("buffer", [torch.ones(4, 3, dtype=torch.complex64), torch.ones(4, 3, dtype=torch.bool)])
def test_a_saved_buffer_of_another_kind_is_refused_before_it_is_cast(buffer: Tensor) -> None:
    """torch casts what it loads; an imaginary part must not vanish in that."""  # noqa: D403 - the library's name
    optimizer = small()
    saved = optimizer.state_dict()
    saved["state"] = {0: {"momentum_buffer": buffer}}
    with pytest.raises(ValueError, match="state 0: momentum_buffer is torch"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state


def test_buffers_of_different_precision_do_not_share_a_batch() -> None:
    """A half-precision buffer put in by hand leaves its float32 neighbours' bytes alone."""
    together, alone = small(), small()
    for optimizer in (together, alone):
        filled(optimizer)
        optimizer.step()
    first = together.param_groups[0]["params"][0]
    together.state[first]["momentum_buffer"] = together.state[first]["momentum_buffer"].half()
    filled(together, 3)
    filled(alone, 3)
    together.step()
    alone.step()
    for mine, other in zip(together.param_groups[0]["params"][1:], alone.param_groups[0]["params"][1:], strict=True):
        assert bits(mine) == bits(other)


def test_parameters_of_several_dtypes_share_a_group() -> None:
    """Each moves as in a group of its own."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    params = [Parameter(torch.randn(4, 4).to(dtype)) for dtype in dtypes]
    twins = [Parameter(param.detach().clone()) for param in params]
    optimizer, separate = MuSGD(params, lr=0.1), [MuSGD([twin], lr=0.1) for twin in twins]
    for param, twin in zip(params, twins, strict=True):
        param.grad = torch.randn(4, 4).to(param.dtype)
        twin.grad = param.grad.clone()
    optimizer.step()
    for one in separate:
        one.step()
    assert [bits(param) for param in params] == [bits(twin) for twin in twins]


def test_a_buffer_is_made_with_its_parameter_s_strides() -> None:
    """channels_last parameters get channels_last buffers, which a step leaves as they are."""
    param = Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    optimizer = MuSGD([param], lr=0.1)
    for _ in range(2):
        param.grad = torch.randn(4, 3, 2, 2)
        optimizer.step()
        assert optimizer.state[param]["momentum_buffer"].stride() == param.stride()


def test_two_parameters_that_share_one_buffer_advance_it_in_turn() -> None:
    """Momentum shared by hand goes one by one, as in the published loop."""
    results = []
    for optimizer_type in (MuSGD, lucid_yolo.optim.MuSGD):
        first, second = Parameter(torch.ones(3)), Parameter(torch.ones(3))
        optimizer = optimizer_type([first, second], lr=0.1, momentum=0.5)
        filled(optimizer)
        optimizer.step()
        optimizer.state[second]["momentum_buffer"] = optimizer.state[first]["momentum_buffer"]
        optimizer.step()
        results.append([bits(first), bits(second), bits(optimizer.state[first]["momentum_buffer"])])
    assert results[0] == results[1]


class FindAlpha(TorchDispatchMode):
    """Collects the `alpha` of every addition."""

    alphas: tuple[float, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "add" in func.name() and "baddbmm" not in func.name():
            self.alphas = (*self.alphas, float((kwargs or {}).get("alpha", 1)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer_type", [MuSGD, Muon])
def test_no_scalar_enters_by_a_fused_multiply_add_but_lr(optimizer_type: type[RuleOptimizer]) -> None:
    """Every addition is plain except the final write, so that floats and device scalars give the same bytes."""
    params = [Parameter(torch.randn(4, 3)), Parameter(torch.randn(3, 4))]
    optimizer = optimizer_type(params, lr=0.25)  # type: ignore[call-arg]
    for param in params:
        param.grad = torch.randn_like(param)
    finder = FindAlpha()  # type: ignore[no-untyped-call]
    with finder:
        optimizer.step()
    assert set(finder.alphas) == {1.0, -0.25}
    assert finder.alphas.count(-0.25) == 1


@pytest.mark.parametrize("zero", [0.0, -0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("optimizer_type", [MuSGD, Muon])
def test_a_decay_of_zero_is_skipped(optimizer_type: type[RuleOptimizer], zero: Any) -> None:
    """An infinite weight times no decay must not become NaN."""
    param = Parameter(torch.full((2, 2), torch.inf))
    optimizer = optimizer_type([param], lr=0.1, weight_decay=zero)  # type: ignore[call-arg]
    param.grad = torch.ones(2, 2)
    optimizer.step()
    assert param.tolist() == [[torch.inf] * 2] * 2


def test_structure_names_what_decides_the_operations() -> None:
    """Iterations and the absence of decay are structure; momentum and lr are values."""
    optimizer = small()
    (group,) = optimizer.param_groups
    rule = optimizer.rule
    assert rule.structure(group) == rule.structure({**group, "lr": 3.0, "momentum": 0.1, "weight_decay": 0.3})
    assert rule.structure({**group, "weight_decay": 0.0}) == rule.structure({**group, "weight_decay": -0.0})
    assert rule.structure({**group, "weight_decay": 0.0}) != rule.structure(group)
    assert rule.structure({**group, "ns_steps": 4}) != rule.structure(group)


def test_tensors_are_accepted_where_numbers_are() -> None:
    """One-element tensors for every real hyperparameter give the bytes of the numbers."""
    values = {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.125, "w_muon": 0.75, "w_sgd": 0.375}
    plain, tensors = small(**values), small(**{key: torch.tensor(value) for key, value in values.items()})
    for optimizer in (plain, tensors):
        filled(optimizer)
        optimizer.step()
    assert contents(plain) == contents(tensors)


def test_lazy_parameters_are_accepted_before_they_have_a_shape() -> None:
    """A LazyLinear may be handed over before its first forward."""
    layer = torch.nn.LazyLinear(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls lazy modules a feature under development
        optimizer = MuSGD(layer.parameters(), lr=0.1)
        layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state[layer.weight]["momentum_buffer"].shape == (3, 4)


def test_a_refused_group_leaves_nothing_whatever_the_error() -> None:
    """Even a number that no float can hold is refused by name."""
    optimizer = small()
    with pytest.raises(ValueError, match="group 1: lr must be finite"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], "lr": 10**400})
    assert len(optimizer.param_groups) == 1
