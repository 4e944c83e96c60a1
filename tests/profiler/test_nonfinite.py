import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lucid_profiler.nonfinite import Finding, LossCheck, ParameterCheck, _FirstBad

NAN, INF = float("nan"), float("inf")


def _losses(*values: Any) -> Finding:
    check = LossCheck()
    for value in values:
        check.add(value)
    (finding,) = check.findings()
    return finding


def _optimizer(*tensors: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(tensor, requires_grad=False) for tensor in tensors], lr=0.1)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize(
    "bad",
    [
        NAN,
        -INF,
        np.float32(NAN),
        torch.tensor(INF),
        torch.tensor([1.0, NAN]),
        torch.tensor(NAN, dtype=torch.bfloat16),
        torch.tensor(NAN, requires_grad=True),
        torch.tensor(complex(0.0, INF)),
    ],
)
def test_the_first_loss_that_is_not_finite_is_found(bad: Any) -> None:
    """The number of its call, whatever comes after it."""
    assert _losses(1.0, 2, bad, 1.0, NAN) == Finding(what="loss", name=None, step=3, num_checked=5, num_skipped=0)


@pytest.mark.parametrize("value", [0.0, 10**400, True, np.float64(1e300), torch.tensor(3), torch.zeros(0), 65504.0])
def test_a_finite_loss_is_not_found(value: Any) -> None:
    """Nor is one that only a float could not hold."""
    assert _losses(value).step is None


def test_without_a_loss_there_is_no_finding() -> None:
    """Nothing was handed over, which is not the same as all finite."""
    assert LossCheck().findings() == []


@pytest.mark.parametrize("value", [None, "much", {}, object()])
def test_what_is_no_loss_is_refused_and_counted(value: Any) -> None:
    """The calls are numbered all the same."""
    check = LossCheck()
    with pytest.raises((TypeError, ValueError)):
        check.add(value)
    check.add(NAN)
    assert check.findings() == [Finding(what="loss", name=None, step=2, num_checked=1, num_skipped=1)]


def test_a_loss_that_wraps_others_is_not_asked_for_its_values() -> None:
    """Those of a DTensor are with other processes, which may never be asked."""
    check = LossCheck()
    with pytest.raises(TypeError, match="a TwoTensor may be spread over processes; hand over its local tensor"):
        check.add(TwoTensor(torch.ones(1), torch.ones(1)))
    assert check.findings() == [Finding(what="loss", name=None, step=None, num_checked=0, num_skipped=1)]


def test_a_loss_keeps_no_graph() -> None:
    """The tensor is read, not kept, and its gradient is as without."""
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * 3).sum()
    check = LossCheck()
    check.add(loss)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.booleans(), min_size=3, max_size=3)), min_size=1, max_size=8
    )
)
def test_folding_keeps_the_first_step_and_its_first_place(steps: list[tuple[int, list[bool]]]) -> None:
    """As a search through all steps finds it, over two streams with places of their own."""
    places = ((0, 2, 5), (1, 3, 4))
    first = _FirstBad()
    for step, (stream, bad) in enumerate(steps, start=1):
        first.fold(torch.tensor(bad), places[stream], stream=stream, step=step)
    found = [
        (step, place)
        for step, (stream, bad) in enumerate(steps, start=1)
        for place, is_bad in zip(places[stream], bad, strict=True)
        if is_bad
    ]
    assert first.read() == min(found, default=None)


def test_folding_is_exact_for_late_steps() -> None:
    """Half a billion steps and a place beyond every model are told apart."""
    first = _FirstBad()
    first.fold(torch.tensor([False, True]), (0, 2**31), stream=0, step=2**29)
    assert first.read() == (2**29, 2**31)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_the_first_parameter_that_is_not_finite_is_found(value: float, dtype: torch.dtype) -> None:
    """Its step and its name, whatever becomes of others later."""
    optimizer = _optimizer(torch.ones(3), torch.ones(2, 2, dtype=dtype), torch.ones(()))
    parameters = _parameters(optimizer)
    check = ParameterCheck()
    for step in range(1, 6):
        if step == 3:
            parameters[1][1, 0] = value
        if step == 4:
            parameters[0][2] = NAN
        check.after_step(optimizer, index=0, step=step)
    names = {id(parameter): f"p{place}" for place, parameter in enumerate(parameters)}
    assert check.findings(names) == [
        Finding(what="parameters", optimizer=0, name="p1", step=3, num_checked=5, num_skipped=0)
    ]


def test_of_several_in_one_step_the_first_is_named() -> None:
    """Also where they differ in dtype, and so are judged apart."""
    tensors = [torch.ones(2), torch.full((2,), NAN, dtype=torch.float64), torch.full((2,), NAN)]
    optimizer = _optimizer(*tensors)
    check = ParameterCheck()
    check.after_step(optimizer, index=0, step=1)
    names = {id(parameter): f"p{place}" for place, parameter in enumerate(_parameters(optimizer))}
    assert check.findings(names)[0].name == "p1"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((64,), 3e38),
        torch.full((64,), 65504.0, dtype=torch.float16),
        torch.zeros(0),
        torch.zeros(2, 0),
        torch.ones(2, dtype=torch.int64),
    ],
)
def test_large_and_empty_parameters_are_finite(tensor: torch.Tensor) -> None:
    """No sum overflows, and what holds nothing is no fault."""
    optimizer = _optimizer(tensor, torch.ones(2))
    check = ParameterCheck()
    check.after_step(optimizer, index=0, step=1)
    assert check.findings({}) == [
        Finding(what="parameters", optimizer=0, name=None, step=None, num_checked=1, num_skipped=0)
    ]


class Own(torch.Tensor):
    """A subclass whose operations are its own."""


def test_parameters_of_subclasses_are_counted_not_touched() -> None:
    """Their operations may be anything."""
    odd = torch.full((2,), NAN).as_subclass(Own)
    optimizer = torch.optim.SGD([odd, nn.Parameter(torch.ones(2))], lr=0.1)
    check = ParameterCheck()
    check.after_step(optimizer, index=0, step=1)
    (finding,) = check.findings({})
    assert (finding.step, finding.num_unjudged) == (None, 1)


def test_a_parameter_whose_storage_was_freed_is_counted_not_read() -> None:
    """Also a part of one that begins behind it; to read it is fatal."""
    whole = torch.full((4,), NAN)
    optimizer = torch.optim.SGD([nn.Parameter(whole), nn.Parameter(whole[2:]), nn.Parameter(torch.ones(2))], lr=0.1)
    whole.untyped_storage().resize_(0)
    check = ParameterCheck()
    check.after_step(optimizer, index=0, step=1)
    (finding,) = check.findings({})
    assert (finding.step, finding.num_checked, finding.num_unjudged) == (None, 1, 2)


def test_a_parameter_that_cannot_be_told_any_more_is_not_named() -> None:
    """After parameters were exchanged, the step is known and the name is not."""
    optimizer = _optimizer(torch.full((2,), NAN))
    check = ParameterCheck()
    check.after_step(optimizer, index=0, step=1)
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(2))
    check.after_step(optimizer, index=0, step=2)
    (finding,) = check.findings({id(_parameters(optimizer)[0]): "p0"})
    assert (finding.step, finding.name) == (1, None)


def test_what_is_freed_lends_its_name_to_no_other() -> None:
    """Of models in turn those that are known at the end are named, and none by what came at the place of another."""
    check = ParameterCheck()
    kept: list[tuple[int, torch.optim.Optimizer]] = []
    for fold in range(60):
        optimizer = _optimizer(torch.ones(3), torch.ones(3), torch.full((3,), NAN if fold % 2 else 1.0), torch.ones(3))
        check.after_step(optimizer, index=fold, step=1)
        kept.append((fold, optimizer))
        if len(kept) > 8:
            kept.pop(0)[1].param_groups.clear()  # frees its parameters now
    names = {id(one): f"{fold}.p{place}" for fold, own in kept for place, one in enumerate(_parameters(own))}
    named = {finding.optimizer: finding.name for finding in check.findings(names) if finding.step is not None}
    assert named == {fold: f"{fold}.p2" if fold >= 52 else None for fold in range(1, 60, 2)}


def _at(identity: int) -> nn.Parameter:
    """Return a new parameter, at the place in memory of a freed one if that place is free."""
    made: list[nn.Parameter] = []
    while len(made) < 1000 and (not made or id(made[-1]) != identity):
        made.append(nn.Parameter(torch.ones(2)))
    return made[-1]


@pytest.mark.parametrize("is_judged_again", [False, True])
def test_a_parameter_at_the_place_of_another_in_memory_is_not_it(is_judged_again: bool) -> None:
    """Of those that were exchanged since, after the last step or before it, the step is known and the name is not."""
    optimizer = _optimizer(torch.full((2,), NAN))
    check = ParameterCheck()
    check.after_step(optimizer, index=0, step=1)
    parameters = optimizer.param_groups[0]["params"]
    identity = id(parameters.pop())
    parameters.append(_at(identity))
    if is_judged_again:
        check.after_step(optimizer, index=0, step=2)
    (finding,) = check.findings({id(parameters[0]): "another"})
    assert (finding.step, finding.name) == (1, None)


def test_an_optimizer_that_stepped_long_before_is_not_held() -> None:
    """Of 70 the first 64 are judged, and of those one is among the last eight; once all is found none is held."""
    check = ParameterCheck()
    optimizers = [_optimizer(torch.full((2,), NAN)) for _ in range(70)]
    for index, optimizer in enumerate([*optimizers, optimizers[0]]):
        check.after_step(optimizer, index=index % 70, step=1 + index // 70)
    alive = [weakref.ref(_parameters(optimizer)[0]) for optimizer in optimizers]
    names = {id(_parameters(optimizer)[0]): "p" for optimizer in optimizers}
    del optimizer, optimizers
    gc.collect()
    assert [index for index, reference in enumerate(alive) if reference() is not None] == [63]
    names = {identity: name for identity, name in names.items() if identity != id(alive[63]())}
    assert {finding.name for finding in check.findings(names)} == {None}
    assert not any(reference() is not None for reference in alive)


def test_the_program_may_swap_what_is_judged() -> None:
    """Torch refuses that for tensors with weak references."""
    optimizer = _optimizer(torch.ones(2))
    (parameter,) = _parameters(optimizer)
    check = ParameterCheck()
    check.after_step(optimizer, index=0, step=1)
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.full((2,), NAN)))
    check.after_step(optimizer, index=0, step=2)
    (finding,) = check.findings({id(parameter): "p"})
    assert (finding.step, finding.name) == (2, "p")


def test_each_optimizer_has_a_finding_of_its_own() -> None:
    """With the number of its own step."""
    check = ParameterCheck()
    check.after_step(_optimizer(torch.ones(2)), index=0, step=1)
    check.after_step(_optimizer(torch.full((2,), NAN)), index=3, step=1)
    assert [(finding.optimizer, finding.step) for finding in check.findings({})] == [(0, None), (3, 1)]


@pytest.mark.parametrize("is_inference", [False, True])
def test_modes_of_the_program_do_not_matter(is_inference: bool) -> None:
    """Inference mode in one step and not in the next, autograd on or off."""
    optimizer = _optimizer(torch.ones(2))
    check = ParameterCheck()
    with torch.inference_mode(is_inference):
        check.after_step(optimizer, index=0, step=1)
    _parameters(optimizer)[0][0] = math.inf
    check.after_step(optimizer, index=0, step=2)
    assert check.findings({})[0].step == 2
