"""When steps are captured and when not: contexts, overrides, failures, life cycle, reports."""

import copy
import functools
import gc
import json
import logging
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from lucid_optim import (
    REASONS,
    Batch,
    CaptureError,
    Hyperparameter,
    MuSGD,
    MuSGDRule,
    NewtonSchulz,
    Phase,
    Rule,
    RuleOptimizer,
    context,
    foreach,
    graphs,
    private,
    recording,
)
from lucid_optim.certificate import Layouts
from lucid_optim.checks import non_negative
from lucid_optim.rule import live
from support import eager_graphs
from support.reference import bits, pickled
from support.twins import Twins


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device whose steps can be recorded."""
    if request.param == "cpu":
        eager_graphs.install(monkeypatch)
    name: str = request.param
    return name


class Quiet(TorchDispatchMode):
    """Sees every operation and changes none."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


CONTEXTS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "autocast": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "inference_mode": lambda device: torch.inference_mode(),
    "dispatch_mode": lambda device: Quiet(),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_forbidding_context_is_native_for_its_step(name: str, device: str) -> None:
    """Both twins step inside the context, bytes agree, and the recording serves again afterwards."""
    twins = Twins(device)
    for step in range(10):
        twins.give()
        with CONTEXTS[name](device) if step in {4, 6} else nullcontext():
            for optimizer in twins.both:
                optimizer.step()
        twins.compare()
    assert twins.reasons() == {"warming_up": 2, name: 2}
    assert twins.recordings() == [1, 1]


def test_a_traced_step_is_native(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While something traces, the operations themselves are wanted."""
    twins = Twins(device)
    for step in range(6):
        with monkeypatch.context() as patch:
            if step == 4:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
            twins.step()
    assert twins.reasons() == {"warming_up": 2, "compiling": 1}


def test_a_compiled_caller_gets_the_same_bytes(device: str) -> None:
    """`torch.compile` around the step leaves it as it is."""
    twins = Twins(device, shapes=[(8, 8), (5,)], num_groups=1)
    stepping = [torch.compile(optimizer.step, backend="eager") for optimizer in twins.both]
    for _ in range(5):
        twins.give()
        for step in stepping:
            step()
        twins.compare()


def test_a_default_device_does_not_matter(device: str) -> None:
    """`torch.set_default_device` installs a mode of its own, which is no reason to run natively."""
    torch.set_default_device(device)
    try:
        twins = Twins(device)
        for _ in range(5):
            twins.step()
    finally:
        torch.set_default_device(None)
    assert twins.replays() == [3, 3]


MODES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "tf32": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False),
    ),
    "bf16 reductions": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
    ),
    "fp16 reductions": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", True),
    ),
    "deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(mode=True, warn_only=True),
        lambda: torch.use_deterministic_algorithms(mode=False),
    ),
}


@pytest.mark.parametrize("name", MODES)
def test_a_numeric_mode_is_recorded_anew(name: str, device: str) -> None:
    """A mode that may change bytes is part of the signature."""
    twins = Twins(device)
    begin, end = MODES[name]
    for step in range(8):
        if step == 4:
            begin()
        try:
            twins.step()
        finally:
            if step == 7:
                end()
    assert twins.reasons() == {"warming_up": 2, "changed_modes": 1}
    assert twins.recordings() == [2, 2]


@pytest.mark.parametrize("variable", ["CUBLAS_WORKSPACE_CONFIG=:16:8", "LUCID_GROUPED=0"])
def test_a_variable_that_chooses_kernels_is_recorded_anew(
    variable: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are the variables that decide which workspaces cuBLAS may use, and whether matrices go in groups."""
    twins = Twins(device)
    for step in range(8):
        if step == 4:
            monkeypatch.setenv(*variable.split("="))
        twins.step()
    assert twins.reasons() == {"warming_up": 2, "changed_modes": 1}


def test_the_preferred_blas_is_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another BLAS library gives other bytes."""
    before = context.numeric_modes()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: "another")
    assert context.numeric_modes() != before


def test_modes_are_read_without_raising() -> None:
    """After `fp32_precision` has been set, reading `allow_tf32` raises; the modes are still read, and differ."""
    before = context.numeric_modes()
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    matmul = torch.backends.cuda.matmul
    kept = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert context.numeric_modes() != before
    finally:
        matmul.fp32_precision = kept


class Logging(MuSGD):
    """Reads a norm back while it prepares."""

    norms: ClassVar[list[float]] = []

    def _updates(self, group: dict[str, Any]) -> Iterator[Any]:
        for update in super()._updates(group):
            self.norms.append(float(update.updates[0].norm()))
            yield update


class Patient(MuSGD):
    """Adds something of its own beside the machinery."""

    def describe(self) -> str:
        return "patient"


class Stepping(MuSGD):
    """Overrides the step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class ScaledRule(MuSGDRule):
    """Overrides one method and makes no promise of its own."""

    def prepare(self, batch: Batch, structure: Any, scalars: Mapping[str, Any]) -> list[Tensor]:
        return super().prepare(batch, structure, scalars)


class Scaled(MuSGD):
    """Runs an overridden rule."""

    rule = ScaledRule()


@pytest.mark.parametrize("kind", [Logging, Stepping, Scaled])
def test_overriding_classes_run_natively(kind: type[MuSGD], device: str) -> None:
    """Whoever overrides the step, its updates or the rule may do what no recording can."""
    twins = Twins(device, kind)
    for _ in range(5):
        twins.step()
    assert twins.reasons() == {"overridden": 5}


def test_an_overriding_instance_runs_natively(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method replaced on the instance counts as much."""
    twins = Twins(device)
    for optimizer in twins.both:
        monkeypatch.setattr(optimizer, "_updates", partial(type(optimizer)._updates, optimizer))
    for _ in range(4):
        twins.step()
    assert twins.reasons() == {"overridden": 4}


def test_other_subclasses_are_captured(device: str) -> None:
    """A subclass that leaves the machinery alone is captured, and so is a step that a scheduler has wrapped."""
    twins = Twins(device, Patient)
    schedulers = [StepLR(optimizer, 3) for optimizer in twins.both]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            twins.step()
            for scheduler in schedulers:
                scheduler.step()
    assert twins.replays() == [4, 4]


def test_hooks_run_once_a_step_outside_any_recording(device: str) -> None:
    """A hook may read back what it likes."""
    twins = Twins(device)
    calls: list[str] = []
    for optimizer in twins.both:
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(
            lambda self, *_: calls.append(f"after {float(self.param_groups[0]['params'][0].detach().sum().cpu()):.3f}")
        )
    for _ in range(5):
        twins.step()
    assert len(calls) == 20
    assert [call.split()[0] for call in calls] == ["before", "after"] * 10


class TwoPhaseRule(Rule):
    """Two buffers, two preparations, a write between them: the second one reads what the first has written."""

    hyperparameters: ClassVar[Mapping[str, Hyperparameter]] = {
        "lr": Hyperparameter(check=non_negative, tensor=True),
        "momentum": Hyperparameter(check=non_negative, tensor=True),
    }
    is_capturable: ClassVar[bool] = True

    def buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("fast", "slow")

    def scalars(self, group: dict[str, Any]) -> dict[str, Any]:
        momentum = live(group["momentum"])
        return {"momentum": momentum, "complement": 1 - momentum}

    def structure(self, group: dict[str, Any]) -> tuple[object, ...]:
        return ()

    def prepare(self, batch: Batch, structure: Any, scalars: Mapping[str, Any]) -> list[Tensor]:
        fast = batch.state["fast"]
        foreach.mul_(fast, scalars["momentum"])
        foreach.add_(fast, batch.grads)
        return foreach.mul(fast, scalars["complement"])

    def again(self, batch: Batch, structure: Any, scalars: Mapping[str, Any]) -> list[Tensor]:
        slow = batch.state["slow"]
        foreach.mul_(slow, scalars["momentum"])
        foreach.add_(slow, batch.params)
        return foreach.mul(slow, scalars["momentum"])

    def phases(self, structure: Any) -> tuple[Phase, ...]:
        return (
            Phase(prepare=self.prepare, factor=lambda group: -group["lr"]),
            Phase(prepare=self.again, factor=lambda group: -0.5 * group["lr"]),
        )


class TwoPhase(RuleOptimizer):
    """Runs the rule of two phases."""

    rule = TwoPhaseRule()

    def __init__(self, params: Any, lr: float, momentum: float = 0.5, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum}, **options)


def test_a_rule_of_two_phases_is_captured(device: str) -> None:
    """A user's own rule, with a write between two preparations, is replayed by the same machinery."""
    twins = Twins(device, TwoPhase, num_groups=3)
    for step in range(8):
        for optimizer in twins.both:
            optimizer.param_groups[1]["momentum"] = step / 10
        twins.step()
    assert twins.replays() == [6, 6, 6]


class HandOnRule(Rule):
    """Plain SGD: its only phase hands the gradients on."""

    hyperparameters: ClassVar[Mapping[str, Hyperparameter]] = {"lr": Hyperparameter(check=non_negative)}
    is_capturable: ClassVar[bool] = True

    def buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ()

    def scalars(self, group: dict[str, Any]) -> dict[str, Any]:
        return {}

    def structure(self, group: dict[str, Any]) -> tuple[object, ...]:
        return ()

    def prepare(self, batch: Batch, structure: Any, scalars: Mapping[str, Any]) -> list[Tensor]:
        return batch.grads


class HandOn(RuleOptimizer):
    """Runs it."""

    rule = HandOnRule()

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        super().__init__(params, {"lr": lr}, **options)


def test_a_native_group_s_learning_rate_on_replayed_memory_is_native(device: str) -> None:
    """The group cannot be recorded itself; after the replay of another one it would read what that has written."""
    both = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        first = Parameter(torch.randn(5, dtype=torch.float64, device=device))
        second = Parameter(torch.full((4, 4), 0.1, device=device))
        groups = [{"params": [first], "lr": second.data.view(-1)[0]}, {"params": [second], "lr": 0.01}]
        both.append((first, second, MuSGD(groups, lr=0.1, capture_updates=is_captured)))
    for step in range(6):
        for first, second, optimizer in both:
            generator = torch.Generator("cpu").manual_seed(step)
            first.grad = torch.randn(5, generator=generator, dtype=torch.float64, device="cpu").to(device)
            second.grad = torch.randn(4, 4, generator=generator, device="cpu").to(device)
            optimizer.step()
        assert bits(both[0][0]) == bits(both[1][0])
        assert bits(both[0][1]) == bits(both[1][1])
    report = both[1][2].capture_report()
    assert report.groups[0].reasons.keys() >= {"shared_memory"}
    assert [group.replays for group in report.groups] == [0, 0]


class IdlePhaseRule(TwoPhaseRule):
    """Its second phase computes nothing: it writes what lies in a buffer."""

    is_capturable: ClassVar[bool] = True

    def again(self, batch: Batch, structure: Any, scalars: Mapping[str, Any]) -> list[Tensor]:
        return batch.state["fast"]


class IdlePhase(TwoPhase):
    """Runs it."""

    rule = IdlePhaseRule()


def test_no_recording_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where gradients are copied before the graph, and the rule computes nothing."""
    eager_graphs.install(monkeypatch)
    nums: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nums[-1] += func._schema.is_mutable
            return func(*args, **(kwargs or {}))

    def record(work: Callable[[], Any], device: torch.device) -> Any:
        def counted() -> Any:
            nums.append(0)
            with Counting():  # type: ignore[no-untyped-call]
                return work()

        return eager_graphs.EagerRecorded(counted)

    monkeypatch.setattr(graphs, "record", record)
    for make in (HandOn, IdlePhase):
        nums.clear()
        twins = Twins("cpu", make)
        for _ in range(4):
            twins.step()
        assert twins.replays() == [2, 2]
        assert nums
        assert all(nums)


def test_a_phase_without_operations_is_captured(device: str) -> None:
    """Of an empty graph torch would warn, which aborts where warnings are errors, as they are here."""
    twins = Twins(device, IdlePhase)
    for _ in range(5):
        twins.step()
    assert twins.replays() == [3, 3]


@pytest.mark.parametrize("reason", ["recording_failed", "out_of_memory"])
def test_a_failed_recording_is_a_native_step(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step happens once, no exception, the reason is counted and logged once; `release` allows another attempt."""
    failing = [reason]
    eager_graphs.install(monkeypatch, failing=failing)
    twins = Twins("cpu")
    with caplog.at_level(logging.WARNING, logger="lucid_optim"):
        for _ in range(6):
            twins.step()
    assert twins.reasons() == {"warming_up": 2, reason: 4}
    assert [record.message.count(reason) for record in caplog.records] == [1]
    assert REASONS[reason] in caplog.text
    twins.captured.release()
    for _ in range(4):
        twins.step()
    assert twins.recordings() == [1, 1]


def test_strict_raises_instead_of_falling_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written, with the reason and its remedy; what belongs to capturing does not raise."""
    eager_graphs.install(monkeypatch, failing=["recording_failed"])
    twins = Twins("cpu", captured={"strict": True})
    twins.step()
    twins.step()
    twins.give()
    with pytest.raises(CaptureError, match="group 0 cannot be captured: recording_failed") as caught:
        twins.captured.step()
    assert caught.value.reason == "recording_failed"
    for optimizer in twins.both:
        optimizer.zero_grad()
    twins.compare()
    twins.captured.release()
    for step in range(6):
        if step == 3:
            for optimizer in twins.both:
                optimizer.param_groups[0]["ns_steps"] = 2
        twins.step()
    twins.give()
    before = [bits(param) for _, param in twins.pairs()]
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CaptureError, match="end autocast"):
        twins.captured.step()
    assert [bits(param) for _, param in twins.pairs()] == before


def test_strict_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes at every step is named in the end, and so is an optimizer that cannot be captured at all."""
    eager_graphs.install(monkeypatch)
    twins = Twins("cpu", captured={"strict": True})

    def toggle() -> None:
        for step in range(10):
            for optimizer in twins.both:
                optimizer.param_groups[0]["ns_steps"] = 2 + step % 2
            twins.step()

    with pytest.raises(CaptureError, match="changed_structure"):
        toggle()
    monkeypatch.undo()
    plain = Twins("cpu", captured={"strict": True})
    plain.give()
    with pytest.raises(CaptureError, match="no_cuda"):
        plain.captured.step()


def test_a_fallback_is_logged_once_a_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of native steps do not fill a log."""
    eager_graphs.install(monkeypatch)
    twins = Twins("cpu", shapes=[(4, 4)], num_groups=1)
    with caplog.at_level(logging.WARNING, logger="lucid_optim"):
        for _ in range(6):
            twins.give()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for optimizer in twins.both:
                    optimizer.step()
    assert len(caplog.records) == 1
    assert "autocast" in caplog.text


def test_the_report_counts_and_computes(device: str) -> None:
    """Copied bytes, pool, set-up, both times and the break-even; all of it plain JSON."""
    twins = Twins(device)
    for _ in range(12):
        twins.step()
    if device == "cuda":
        torch.cuda.synchronize()
    report = twins.captured.capture_report()
    sizes = [sum(4 * param.numel() for param in group["params"]) for group in twins.captured.param_groups]
    assert [group.copied_bytes for group in report.groups] == sizes
    assert report.pool_bytes >= sum(sizes)
    assert report.setup_seconds > 0
    assert report.native_seconds is not None
    assert report.replay_seconds is not None
    gain = report.native_seconds - report.replay_seconds
    assert report.break_even_steps == (None if gain <= 0 else -(-report.setup_seconds // gain))
    assert all(group.captured for group in report.groups)
    assert json.loads(json.dumps(report.as_dict()))["groups"][0]["replays"] == 10
    assert set(report.groups[0].reasons) <= set(REASONS)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_record_for_themselves(how: str, device: str) -> None:
    """A copy carries the flags and the state, no recording, and steps as a native copy does."""
    twins = Twins(device)
    for _ in range(4):
        twins.step()
    clones = []
    for optimizer in twins.both:
        clone = copy.deepcopy(optimizer) if how == "deepcopy" else pickled(optimizer)
        clones.append(clone)
    assert clones[1].capture_updates
    assert clones[1].capture_report().groups[0].recordings == 0
    twins.native, twins.captured = clones
    for _ in range(5):
        twins.step()
    assert twins.replays() == [3, 3]
    assert len(pickle.dumps(clones[1])) < 40_000


def test_adding_a_group_drops_the_recording(device: str) -> None:
    """Nothing is kept of a recording whose groups are not all any more."""
    twins = Twins(device)
    for _ in range(4):
        twins.step()
    assert twins.captured.capture_report().pool_bytes > 0
    for optimizer in twins.both:
        optimizer.add_param_group({"params": [Parameter(torch.ones(3, 3, device=device))]})
    assert twins.captured.capture_report().pool_bytes == 0
    for _ in range(4):
        twins.step()
    assert twins.recordings() == [2, 2, 1]


def test_release_gives_everything_back_and_may_record_again(device: str) -> None:
    """After `release` there is no recording; the next steps make one."""
    twins = Twins(device)
    for _ in range(4):
        twins.step()
    twins.captured.release()
    assert twins.captured.capture_report().pool_bytes == 0
    for _ in range(3):
        twins.step()
    assert twins.recordings() == [2, 2]
    twins.captured.release()
    twins.captured.release()


def test_no_recording_outlives_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping the optimizer is enough, without a collection, and re-recording keeps one at a time."""
    eager_graphs.install(monkeypatch)
    gc.collect()  # what earlier tests have left in cycles would otherwise count
    before = eager_graphs.EagerRecorded.alive
    twins = Twins("cpu")
    for step in range(30):
        twins.set(0, ns_steps=2 + step // 3 % 2)
        twins.step()
        assert eager_graphs.EagerRecorded.alive - before <= 1
    assert twins.recordings()[0] > 2
    del twins
    assert eager_graphs.EagerRecorded.alive == before


class Owned(MuSGD):
    """Yields updates of its own, made with the machinery's orthogonalisation."""

    def _updates(self, group: dict[str, Any]) -> Iterator[Any]:
        for update in super()._updates(group):
            kept = [tensor.clone() for tensor in update.updates]
            yield update
            for tensor, copy_ in zip(update.updates, kept, strict=True):
                assert torch.equal(tensor, copy_)


@pytest.mark.parametrize("kind", [MuSGD, Owned])
def test_the_orthogonalisation_alone_is_replayed(kind: type[MuSGD], device: str) -> None:
    """It serves overriding classes too, its bytes are the native ones, and the report counts it."""
    twins = Twins(device, kind, captured={"capture_updates": False, "capture_orthogonalization": True})
    for step in range(8):
        for optimizer in twins.both:
            optimizer.param_groups[0]["momentum"] = step / 10
        twins.step()
    report = twins.captured.capture_report()
    assert report.orthogonalization_recordings == 2
    assert report.orthogonalization_replays == 14
    assert report.orthogonalization_reasons == {"warming_up": 2}
    assert [group.replays for group in report.groups] == [0, 0]


def test_replayed_orthogonalisations_never_alias(device: str) -> None:
    """What a call returned keeps its bytes over later calls, and inputs are not written."""
    optimizer = Twins(device, captured={"capture_orthogonalization": True, "capture_updates": False}).captured
    scheme = NewtonSchulz()
    kept = []
    for _ in range(6):
        updates = [torch.randn(6, 9, device=device), torch.randn(9, 6, device=device)]
        before = [bits(update) for update in updates]
        results = optimizer._orthogonalize(updates, scheme)
        assert [bits(update) for update in updates] == before
        kept += [(result, bits(result)) for result in results]
    assert all(bits(result) == value for result, value in kept)
    assert optimizer.capture_report().orthogonalization_replays == 5


def test_orthogonalisations_under_autograd_are_not_replayed(device: str) -> None:
    """A replay has no gradient."""
    optimizer = Twins(device, captured={"capture_orthogonalization": True, "capture_updates": False}).captured
    scheme = NewtonSchulz()
    for _ in range(4):
        optimizer._orthogonalize([torch.randn(6, 9, device=device, requires_grad=True)], scheme)
    assert optimizer.capture_report().orthogonalization_reasons == {"autograd": 4}


def test_many_kinds_of_orthogonalisation_are_bounded(device: str) -> None:
    """A program that never repeats itself keeps no pile of recordings."""
    optimizer = Twins(device, captured={"capture_orthogonalization": True, "capture_updates": False}).captured
    scheme = NewtonSchulz()
    for size in range(2, 42):
        for _ in range(2):
            optimizer._orthogonalize([torch.randn(2, size, device=device)], scheme)
    assert optimizer.capture_report().orthogonalization_recordings == 40
    assert len(optimizer._orthogonalize._known) == 32


def test_layouts_hold_with_and_without_torch_s_own_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison in Python gives the same answers where torch's private one is missing or says no."""
    weight = torch.zeros(8, 4, 1, 1)
    good = [weight, torch.zeros(3)]
    variants: dict[str, tuple[list[Tensor], bool]] = {
        "others of the kind": ([torch.ones(8, 4, 1, 1), torch.ones(3)], True),
        "odd strides of size-1 dimensions": ([weight.as_strided((8, 4, 1, 1), (4, 1, 7, 9)), torch.zeros(3)], True),
        "requires grad": ([weight, torch.zeros(3, requires_grad=True)], True),
        "another dtype": ([weight, torch.zeros(3).double()], False),
        "another device": ([weight, torch.zeros(3, device="meta")], False),
        "another shape": ([weight, torch.zeros(4)], False),
        "another stride": ([weight, torch.zeros(6)[::2]], False),
        "another layout": ([weight, torch.zeros(3).to_sparse()], False),
        "another type": ([weight, Parameter(torch.zeros(3))], False),
        "one less": ([weight], False),
    }
    for guards in (private.tensor_guards, lambda tensors: None):
        monkeypatch.setattr("lucid_optim.certificate.tensor_guards", guards)
        layouts = Layouts(good)
        for name, (tensors, expected) in variants.items():
            assert layouts.hold(tensors) is expected, name
        assert layouts.hold(good)


def test_gradients_are_let_go_after_the_step(device: str) -> None:
    """Once the user drops the gradients, nobody holds them: neither a native optimizer nor a captured one."""
    twins = Twins(device)
    for _ in range(6):
        twins.step()
        kept = [weakref.ref(param.grad) for pair in twins.pairs() for param in pair]
        for optimizer in twins.both:
            optimizer.zero_grad()
        assert not any(reference() is not None for reference in kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype, device: str) -> None:
    """Owned scalars are float32, whatever new tensors are by default."""
    twins = Twins(device, momentum=0.937, weight_decay=0.0123)
    for step in range(6):
        twins.give()
        torch.set_default_dtype(dtype)
        try:
            for optimizer in twins.both:
                optimizer.param_groups[0]["momentum"] = 0.9 + step / 999
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        twins.compare()
    assert twins.replays() == [4, 4]


def test_a_learned_learning_rate_is_native(device: str) -> None:
    """A hyperparameter that shares memory with a parameter is read natively: before the write or after, as ever."""
    twins = Twins(device, shapes=[(), (6, 4)], num_groups=2, lr=0.1)
    for optimizer in twins.both:
        learned = optimizer.param_groups[0]["params"][0]
        learned.data.fill_(0.05)
        optimizer.param_groups[1]["lr"] = learned.detach()
    for _ in range(6):
        twins.step()
    assert twins.replays() == [0, 0]
    assert twins.reasons(1)["shared_memory"] == 5


class OtherRule(MuSGDRule):
    """Another rule under the same structure."""

    is_capturable: ClassVar[bool] = True

    def prepare(self, batch: Batch, structure: Any, scalars: Mapping[str, Any]) -> list[Tensor]:
        return [update + update for update in super().prepare(batch, structure, scalars)]


@pytest.mark.parametrize("how", ["rule", "method of the class", "method of the instance"])
def test_an_exchanged_rule_is_another_rule(how: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording of the old rule is never replayed for the new one."""
    twins = Twins(device)
    rule = MuSGDRule()
    for optimizer in twins.both:
        optimizer.rule = rule  # type: ignore[misc]  # one that no other test shares
    for step in range(8):
        if step == 4:
            if how == "rule":
                for optimizer in twins.both:
                    optimizer.rule = OtherRule()  # type: ignore[misc]
            elif how == "method of the class":
                monkeypatch.setattr(MuSGDRule, "prepare", doubled(MuSGDRule.prepare))
            else:
                rule.prepare = doubled(rule.prepare)  # type: ignore[method-assign]
        twins.step()
    assert twins.reasons().get("overridden" if how == "method of the instance" else "changed_structure")


def doubled(prepare: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Return a preparation of twice the updates."""
    return lambda *arguments: [update + update for update in prepare(*arguments)]


class Wrapped(MuSGD):
    """Pretends with `__wrapped__` to be what it replaces."""

    @functools.wraps(MuSGD._updates)
    def _updates(self, group: dict[str, Any]) -> Iterator[Any]:  # type: ignore[override]
        for update in super()._updates(group):
            yield update._replace(updates=[one + one for one in update.updates])


def test_a_wrapper_of_the_updates_is_an_override(device: str) -> None:
    """Only wrappers of `step` are torch's own."""
    twins = Twins(device, Wrapped)
    for _ in range(4):
        twins.step()
    assert twins.reasons() == {"overridden": 4}


def test_memory_that_ends_outside_the_capture_is_a_native_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails while a recording is put together is counted, the step happens once, natively."""
    eager_graphs.install(monkeypatch)
    twins = Twins("cpu")
    twins.step()
    twins.step()
    with monkeypatch.context() as patch:
        patch.setattr(recording, "_Inputs", raising)
        twins.step()
    for _ in range(3):
        twins.step()
    assert twins.reasons() == {"warming_up": 2, "out_of_memory": 4}


def raising(*_: Any) -> Any:
    """Run out of memory."""
    raise torch.cuda.OutOfMemoryError("no more")


def test_an_orthogonalisation_that_cannot_be_recorded_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise for the smaller capture, and a scheme of the user's own is never recorded."""
    eager_graphs.install(monkeypatch, failing=["out_of_memory"])
    optimizer = Twins("cpu", captured={"capture_orthogonalization": True, "capture_updates": False}).captured
    for _ in range(4):
        optimizer._orthogonalize([torch.randn(6, 9)], NewtonSchulz())
    optimizer._orthogonalize([torch.randn(6, 9)], lambda batch: batch * 2)
    reasons = optimizer.capture_report().orthogonalization_reasons
    assert reasons == {"warming_up": 1, "out_of_memory": 3, "scheme": 1}


def test_kinds_of_orthogonalisation_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other strides, another scheme or another mode is another recording."""
    eager_graphs.install(monkeypatch)
    optimizer = Twins("cpu", captured={"capture_orthogonalization": True, "capture_updates": False}).captured
    scheme = NewtonSchulz()
    for _ in range(3):
        optimizer._orthogonalize([torch.randn(6, 6)], scheme)
        optimizer._orthogonalize([torch.randn(6, 6).T], scheme)
        optimizer._orthogonalize([torch.randn(6, 6)], NewtonSchulz(steps=3))
    monkeypatch.setenv("LUCID_GROUPED", "0")
    for _ in range(3):
        optimizer._orthogonalize([torch.randn(6, 6)], scheme)
    assert optimizer.capture_report().orthogonalization_recordings == 4


def test_a_strict_optimizer_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it has raised, constant settings let it warm up again; steps without gradients do not count."""
    eager_graphs.install(monkeypatch)
    twins = Twins("cpu", captured={"strict": True})
    for _ in range(6):
        twins.captured.step()
        twins.native.step()
    for step in range(3):
        twins.set(0, ns_steps=2 + step % 2)
        twins.step()
    twins.give()
    twins.set(0, ns_steps=9)
    with pytest.raises(CaptureError, match="changed_structure"):
        twins.captured.step()
    twins.native.zero_grad()
    for _ in range(4):
        twins.step()
    assert twins.replays()[0] > 0


def test_a_pattern_that_never_pays_is_recorded_more_and_more_seldom(device: str) -> None:
    """Gradients that come and go every two steps cost a recording now and then, not one each time, which were 49."""
    twins = Twins(device, shapes=[(4, 4), (5,), (3,)], num_groups=2)
    for step in range(100):
        twins.step(lambda at, param, hide=step // 2 % 2: None if at == 1 and hide else twins.random(param.detach()))  # type: ignore[misc]
    assert twins.recordings()[0] <= 20


def test_one_odd_gradient_does_not_exclude_a_group_for_ever(device: str) -> None:
    """A group whose gradient was odd when certificates were issued is certified anew once it is plain."""
    twins = Twins(device, shapes=[(8, 8), (5,)], num_groups=2)
    for step in range(12):
        twins.give()
        if step < 3:
            for param in twins.pairs()[0]:
                assert param.grad is not None
                param.grad = torch._neg_view(param.grad)
        for optimizer in twins.both:
            optimizer.step()
        twins.compare()
    assert twins.replays()[0] > 4


def test_an_obsolete_recording_gives_way(device: str) -> None:
    """A parameter listed twice after recording is named as what it is, and the old recording does not stay for ever."""
    twins = Twins(device, shapes=[(8, 8), (5,)], num_groups=1)
    for step in range(30):
        if step == 4:
            for optimizer in twins.both:
                optimizer.param_groups[0]["params"].append(optimizer.param_groups[0]["params"][0])
        twins.step()
    assert twins.reasons()["shared_memory"] > 20
    assert twins.captured.capture_report().pool_bytes == 0


def test_the_kind_of_number_is_no_structure(device: str) -> None:
    """A weight decay as a float, then as a numpy number, replays from one recording."""
    twins = Twins(device)
    for step in range(8):
        twins.set(0, weight_decay=0.1 if step % 2 else np.float64(0.1))
        twins.step()
    assert twins.recordings() == [1, 1]


@pytest.mark.parametrize("lr", [1e-46, -1e-46, 0.0, -0.0])
def test_what_is_zero_in_float32_writes_nothing(lr: float, device: str) -> None:
    """Native and captured agree on what zero is, also where updates are infinite."""
    twins = Twins(device)
    for step in range(6):
        twins.set(0, lr=lr)
        twins.step(lambda at, param, step=step: torch.full_like(param, float("inf")) if step == 4 else param.detach())  # type: ignore[misc]
    assert twins.replays() == [4, 4]


@pytest.mark.parametrize("value", [torch.tensor(True), True, b"0.1", 1e39, torch.tensor(0.1, device="meta")])
def test_values_that_no_step_can_use_are_found_first(value: Any, device: str) -> None:
    """The last group's lr is looked at before the first group is touched, natively and captured."""
    twins = Twins(device)
    for _ in range(4):
        twins.step()
    twins.set(1, lr=value)
    twins.give()
    for optimizer in twins.both:
        with pytest.raises(TypeError, match="group 1: lr must be a float32 number"):
            optimizer.step()
    twins.compare()


def test_flags_set_later_count(device: str) -> None:
    """The flags are attributes: whoever sets one after construction is obeyed, and reports say so."""
    twins = Twins(device, captured={"capture_updates": False})
    twins.captured.capture_orthogonalization = True
    for _ in range(4):
        twins.step()
    assert twins.captured.capture_report().orthogonalization_replays == 6
    twins.captured.capture_updates = True
    for _ in range(4):
        twins.step()
    assert twins.replays() == [2, 2]


def test_counts_survive_a_load(device: str) -> None:
    """Loading state is no new beginning for the report."""
    twins = Twins(device)
    for step in range(8):
        if step == 4:
            for optimizer in twins.both:
                optimizer.load_state_dict(optimizer.state_dict())
        twins.step()
    assert twins.recordings() == [2, 2]
    assert sum(twins.reasons().values()) + twins.replays()[0] == 8


class Growing(MuSGDRule):
    """Has a second buffer from some step on."""

    is_capturable: ClassVar[bool] = True

    def buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer", "second") if group.get("grown") else ("momentum_buffer",)


class Grown(MuSGD):
    """Runs the growing rule."""

    rule = Growing()


def test_buffers_that_depend_on_the_group_are_made_when_asked_for(device: str) -> None:
    """A group that starts to keep another buffer is looked at anew, natively and captured."""
    twins = Twins(device, Grown)
    for step in range(8):
        twins.set(0, grown=step >= 4)
        twins.step()
    assert twins.reasons()["changed_structure"] == 1
    assert "second" in twins.captured.state[twins.captured.param_groups[0]["params"][0]]


LATE: dict[str, Callable[[Tensor], Tensor]] = {
    "int64": lambda gradient: gradient.long(),
    "bool": lambda gradient: gradient > 0,
    "complex": lambda gradient: torch.complex(gradient, gradient),
}


@pytest.mark.parametrize("kind", LATE)
def test_a_familiar_group_is_still_checked(kind: str, device: str) -> None:
    """A gradient that changes its dtype after many good steps is the error that it would have been at the first."""
    twins = Twins(device, shapes=[(4, 4), (5,)], num_groups=1)
    for _ in range(5):
        twins.step()
    twins.give()
    for param in twins.pairs()[0]:
        assert param.grad is not None
        param.grad.data = LATE[kind](param.grad)
    for optimizer in twins.both:
        with pytest.raises(RuntimeError, match="gradient is of dtype"):
            optimizer.step()
    twins.compare()


@pytest.mark.parametrize("kind", LATE)
def test_a_familiar_group_of_the_cpu_is_still_checked(kind: str) -> None:
    """Likewise where nothing can be captured."""
    param = Parameter(torch.ones(4, 4))
    optimizer = MuSGD([param], lr=0.1)
    for _ in range(5):
        param.grad = torch.ones(4, 4)
        optimizer.step()
    before = bits(param)
    param.grad = torch.ones(4, 4)
    param.grad.data = LATE[kind](param.grad)
    with pytest.raises(RuntimeError, match="gradient is of dtype"):
        optimizer.step()
    assert bits(param) == before


def test_a_sparse_gradient_of_an_empty_parameter_is_still_found(device: str) -> None:
    """Parameters without elements take no part in a step, but in its checks."""
    twins = Twins(device, shapes=[(4, 4), (0, 3)], num_groups=1)
    for _ in range(5):
        twins.step()
    twins.give()
    for param in twins.pairs()[1]:
        param.grad = torch.zeros(0, 3, device=device).to_sparse()
    for optimizer in twins.both:
        with pytest.raises(RuntimeError, match="layout"):
            optimizer.step()
    twins.compare()


def test_versions_are_raised_one_by_one_where_torch_takes_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.4 takes one tensor at a time, and says so with a RuntimeError."""
    tensors = [torch.zeros(2), torch.zeros(3)]
    private.bump_versions(tensors)
    original = torch.autograd.graph.increment_version

    def one_at_a_time(tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            raise RuntimeError("increment_version expect a Tensor as input")  # noqa: TRY004 - torch 2.4 does
        original(tensor)

    monkeypatch.setattr(private, "increment_version", one_at_a_time)
    private.bump_versions(tensors)
    assert [tensor._version for tensor in tensors] == [2, 2]


def test_strict_never_waits_on_its_own_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings that did not pay make an optimizer wait, under a reason of its own; a strict one records at once."""
    eager_graphs.install(monkeypatch)
    for strict in (False, True):
        twins = Twins("cpu", shapes=[(4, 4), (5,)], num_groups=1, captured={"strict": strict})
        for step in range(60):
            twins.set(0, ns_steps=2 + step // 5 % 2)
            twins.step()
        assert (twins.reasons().get("waiting", 0) == 0) is strict
        assert twins.replays()[0] > (40 if strict else 5)


def test_a_group_that_was_taken_out_is_let_go(device: str) -> None:
    """Its parameters and gradients go with it, natively and captured."""
    twins = Twins(device, num_groups=3)
    for _ in range(5):
        twins.step()
    gone = []
    for optimizer in twins.both:
        params = optimizer.param_groups.pop()["params"]
        gone += list(map(weakref.ref, params))
        while params:
            optimizer.state.pop(params.pop())
    for _ in range(3):
        twins.step()
    gc.collect()
    assert not any(reference() is not None for reference in gone)


def test_a_strict_error_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps the exception does not keep the inputs of the recording that failed."""
    eager_graphs.install(monkeypatch, failing=["out_of_memory"])
    twins = Twins("cpu", captured={"strict": True})
    twins.step()
    twins.step()
    inputs: list[weakref.ref[Tensor]] = []

    class Watched(recording._Inputs):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            inputs.extend(map(weakref.ref, self.tensors))

    monkeypatch.setattr(recording, "_Inputs", Watched)
    twins.give()
    with pytest.raises(CaptureError) as caught:
        twins.captured.step()
    assert inputs
    assert caught.value.__context__ is None
    assert not any(reference() is not None for reference in inputs)


def test_an_odd_first_step_is_followed_by_an_ordinary_one(device: str) -> None:
    """A certificate is not issued on a step whose gradients made it go one by one: other kernels ran there."""
    twins = Twins(device, shapes=[(8, 8), (8, 8), (5,)], num_groups=1)
    for _ in range(4):
        twins.step()
    twins.captured.release()
    twins.give()
    for number in range(2):
        params = [pair[number] for pair in twins.pairs()]
        params[0].grad = params[1].data.view(8, 8)
    for optimizer in twins.both:
        optimizer.step()
    twins.compare()
    for _ in range(4):
        twins.step()
    assert twins.reasons()["warming_up"] == 4
    assert twins.replays() == [5]
