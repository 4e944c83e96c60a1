"""Steps of all kinds of optimizers: each is known again, none is kept alive, and none sees that it is watched."""

import copy
import functools
import gc
import inspect
import io
import pickle
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch

from lucid_profiler import tracking
from lucid_profiler.hooks import TorchHooks
from lucid_profiler.journal import Guard
from lucid_profiler.ring import read_ring


class _Wrapping(torch.optim.Optimizer):
    """Does nothing but step another one within its own step."""

    def __init__(self, inner: torch.optim.Optimizer | None = None) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(2))], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        if self.inner is not None:
            self.inner.step()


def _sgd() -> torch.optim.SGD:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


@pytest.fixture
def hooks(tmp_path: Path) -> Iterator[TorchHooks]:
    """Give hooks that are installed and have no fault at the end."""
    guard = Guard()
    hooks = TorchHooks(tmp_path / "steps.ring", guard=guard)
    hooks.install()
    yield hooks
    hooks.abandon()
    assert guard.errors == []


def test_optimizers_in_turn_are_known_again(hooks: TorchHooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of twenty is named once and keeps its number; those that stepped last are held for the digests."""
    num_named = 0
    qualified_names = tracking.qualified_names

    def count(modules: list[Any], wanted: set[int]) -> dict[int, tracking.Name]:
        nonlocal num_named
        num_named += 1
        return qualified_names(modules, wanted)

    monkeypatch.setattr(tracking, "qualified_names", count)
    heard = []
    hooks.watch(lambda tracked, _end_ns: heard.append((tracked.index, tracked.num_steps, tracked.optimizer)))
    optimizers = [_sgd() for _ in range(20)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    optimizers[0].step()
    assert num_named == 20
    assert heard[:60] == [(index, step, one) for step in (1, 2, 3) for index, one in enumerate(optimizers)]
    assert heard[60:] == [(0, 4, optimizers[0])]
    assert [record.optimizer for record in read_ring(tmp_path / "steps.ring").records] == [*range(20)] * 3 + [0]
    assert [(one.index, one.optimizer) for one in hooks.optimizers()] == [
        (index, optimizers[index]) for index in (0, *range(13, 20))
    ]
    assert len(hooks.parameter_names()) == 8
    hooks.hold_living()
    assert [one.optimizer for one in hooks.optimizers()] == optimizers
    assert len(hooks.parameter_names()) == 20
    assert (hooks.notes(), hooks.uncovered()) == ([], [])


def test_an_optimizer_that_stepped_long_ago_may_go(hooks: TorchHooks) -> None:
    """Only the last eight are held; what comes at the place of one in memory is another."""
    alive = []
    for _ in range(50):
        optimizer = _sgd()
        alive.append(weakref.ref(optimizer))
        optimizer.step()
        del optimizer
    gc.collect()
    assert [reference() is not None for reference in alive] == [False] * 42 + [True] * 8
    assert [tracked.index for tracked in hooks.optimizers()] == [*range(42, 50)]
    assert [tracked.num_steps for tracked in hooks.optimizers()] == [1] * 8
    assert len(hooks._tracked) == 8
    hooks.hold_living()
    assert hooks.uncovered() == ["42 of 50 optimizers were gone before the end of the process"]


def test_steps_within_a_step_end_in_turn(hooks: TorchHooks) -> None:
    """Of ten optimizers that step within each other the outermost two are given up, and nothing fails."""
    optimizers = [_Wrapping()]
    while len(optimizers) < 10:
        optimizers.append(_Wrapping(optimizers[-1]))
    ended = []
    hooks.watch(lambda tracked, _end_ns: ended.append(tracked.optimizer))
    optimizers[-1].step()
    assert ended == optimizers[:8]
    optimizers[-1].step()
    assert ended[8:] == optimizers[:8]
    optimizers[3].step()
    assert ended[16:] == optimizers[:4]


class _Around(torch.optim.SGD):
    """Does something before and after its parent's step, which may be called again or fail."""

    num_inner = 1
    fails = False

    def step(self, closure: Any = None) -> Any:
        before_ns = time.monotonic_ns()
        for _ in range(self.num_inner):
            if self.fails:
                with suppress(ValueError):
                    super().step(_raise)
            super().step(closure)
        self.took = (before_ns, time.monotonic_ns())


def _raise() -> None:
    raise ValueError("no loss")


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize(("num_inner", "fails"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("is_parent_hooked", [False, True])
def test_a_step_around_its_parent_s_is_one(
    hooks: TorchHooks, tmp_path: Path, num_inner: int, fails: bool, is_parent_hooked: bool, with_closure: bool
) -> None:
    """It lasts from its own begin to its own end, also where torch has a wrapper around the parent's as well."""
    kind = type("Around", (_Around,), {"num_inner": num_inner, "fails": fails})
    if is_parent_hooked:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    begun, ended = [], []
    hooks.watch_begin(lambda tracked, _end_ns: begun.append(tracked.index))
    hooks.watch(lambda tracked, end_ns: ended.append((tracked.begin_ns, end_ns)))
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = kind([weight], lr=0.1)
    for num in range(1, 4):
        optimizer.step((lambda: None) if with_closure else None)
        assert (len(begun), len(ended)) == (num, num)
        before_ns, after_ns = optimizer.took
        begin_ns, end_ns = ended[-1]
        assert end_ns >= after_ns
        assert begin_ns > before_ns if with_closure else begin_ns <= before_ns
    assert len(read_ring(tmp_path / "steps.ring").records) == 3


def test_a_step_that_raises_is_none(hooks: TorchHooks, tmp_path: Path) -> None:
    """The next one counts from its own begin."""
    optimizer = _sgd()
    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(_raise)
    between_ns = time.monotonic_ns()
    optimizer.step()
    (record,) = read_ring(tmp_path / "steps.ring").records
    assert record.begin_ns >= between_ns
    assert [tracked.num_steps for tracked in hooks.optimizers()] == [1]


class _Asking(torch.optim.SGD):
    """Uses what it is given in all ways in which a function can be used."""

    told: Any = None

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        self.seen = (
            closure.__name__,
            str(inspect.signature(closure)),
            isinstance(closure, FunctionType | MethodType),
            closure == self.told,
        )
        self.seen_values = [closure(backward=False), closure(backward=True)]
        closure.__func__.last_use = len(self.seen_values)
        return super().step()


class _Losses:
    def loss(self, backward: bool = True) -> bool:
        return backward


def test_a_closure_is_the_program_s_own(hooks: TorchHooks) -> None:
    """Name, signature, kind, arguments, attributes and equality are those of what the program gave."""
    losses = _Losses()
    optimizer = _Asking([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.told = losses.loss
    optimizer.step(losses.loss)
    assert optimizer.seen == ("loss", "(backward: bool = True) -> bool", True, True)
    assert optimizer.seen_values == [False, True]
    assert vars(_Losses.loss) == {"last_use": 2}
    assert [tracked.num_steps for tracked in hooks.optimizers()] == [1]


class _Keeping(torch.optim.SGD):
    """Keeps what it is given, and calls it by its method."""

    kept: Any = None

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        self.kept = closure
        closure.__call__()
        return super().step()


def _module_loss() -> int:
    """Be called."""
    return 2


_module_loss.rate = 0.5  # type: ignore[attr-defined]


@functools.wraps(_module_loss)
def _wrapping_loss() -> int:
    return _module_loss()


_CLOSURES = [_module_loss, _wrapping_loss, lambda: 3, _Losses().loss, partial(_Losses().loss, backward=False)]


def _stand_in(closure: Any) -> Any:
    """Return what an optimizer was given in the place of `closure`."""
    optimizer = _Keeping([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step(closure)
    stand_in = optimizer.__dict__.pop("kept")
    assert stand_in is not closure
    return stand_in


def _shown(closure: Any) -> dict[str, Any]:
    """Return all that `closure` says of itself."""
    names = (
        "__doc__",
        "__module__",
        "__name__",
        "__qualname__",
        "__wrapped__",
        "__dict__",
        "__class__",
        "rate",
        "_begin",
    )
    return {
        **{name: getattr(closure, name, "none") for name in names},
        **{show.__name__: show(closure) for show in (repr, str, dir, vars, callable, inspect.isfunction, hash)},
        "signature": str(inspect.signature(closure)),
        "format": f"{closure}",
        "type": type(closure).__name__,
        "dict key": {closure: 1},
    }


@pytest.mark.parametrize("closure", _CLOSURES)
@pytest.mark.usefixtures("hooks")
def test_a_closure_shows_the_program_s_own(closure: Any) -> None:
    """Its words, names, attributes and looks; what it has not, the stand-in has not either."""
    assert _shown(_stand_in(closure)) == _shown(closure)


@pytest.mark.parametrize("closure", _CLOSURES)
@pytest.mark.usefixtures("hooks")
def test_a_weak_reference_to_a_closure_lives_as_long_as_what_was_given(closure: Any) -> None:
    """An optimizer may hold its caller's closure so."""
    stand_in = _stand_in(closure)
    weak = weakref.ref(stand_in)
    assert weak() is stand_in
    del stand_in
    gc.collect()
    assert weak() is None


@pytest.mark.usefixtures("hooks")
def test_a_weak_method_is_of_the_program_s_object() -> None:
    """It lives as long as that does, and calls its method."""
    losses = _Losses()
    weak = weakref.WeakMethod(_stand_in(losses.loss))
    assert weak() == losses.loss
    del losses
    gc.collect()
    assert weak() is None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("pickler", [pickle._Pickler, pickle.Pickler])
@pytest.mark.usefixtures("hooks")
def test_a_pickled_closure_is_the_program_s_own(protocol: int, pickler: Any) -> None:
    """No class of lucid's is in the pickle, and what the program holds twice it holds twice afterwards."""
    bound = partial(_module_loss)
    file = io.BytesIO()
    pickler(file, protocol).dump([_stand_in(_module_loss), _stand_in(bound), bound])
    assert b"lucid" not in file.getvalue()
    loss, first, second = pickle.loads(file.getvalue())
    assert loss is _module_loss
    assert type(first) is partial
    assert first is second


@pytest.mark.usefixtures("hooks")
def test_a_closure_that_cannot_be_pickled_says_so_in_the_same_words() -> None:
    """A function within a function has no name by which it is found."""
    closure = lambda: 1  # noqa: E731 - one that has no name
    said = []
    for one in (closure, _stand_in(closure)):
        with pytest.raises((pickle.PicklingError, AttributeError)) as caught:
            pickle.dumps(one)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("closure", _CLOSURES)
@pytest.mark.usefixtures("hooks")
def test_a_copy_of_a_closure_is_one_of_the_program_s_own(closure: Any) -> None:
    """Shallow or deep: a function is its own copy, all else is what copying it makes."""
    stand_in = _stand_in(closure)
    for copying in (copy.copy, copy.deepcopy):
        own, got = copying(closure), copying(stand_in)
        assert type(got) is type(closure)
        assert (got is closure) == (own is closure)
        assert got() == own()


@pytest.mark.usefixtures("hooks")
def test_a_closure_in_a_class_is_a_method() -> None:
    """Only a function is bound to the object that has it in its class."""

    def loss(self: Any, *, scale: int) -> tuple[str, int]:
        return type(self).__name__, scale

    loss_of = partial(loss, 1, scale=2)
    tracked = tracking.TrackedOptimizer(_sgd(), index=0, on_death=print)
    stand_ins = [tracking.followed(one, tracked, begin=print) for one in (loss, loss_of)]
    kind: Any = type("Holder", (), {"loss": stand_ins[0], "loss_of": staticmethod(stand_ins[1])})
    assert kind().loss(scale=3) == ("Holder", 3)
    assert kind.loss(self=1, scale=3) == ("int", 3)
    assert kind().loss_of() == ("int", 2)


class _OfModel(torch.optim.SGD):
    def step(self, model: torch.nn.Module) -> Any:  # type: ignore[override]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return super().step()


def test_what_is_called_but_no_function_is_left_alone(hooks: TorchHooks) -> None:
    """A module that is given to `step()` stays one; the step begins before it, and the report says so."""
    model = torch.nn.Linear(2, 2)
    optimizer = _OfModel(model.parameters(), lr=0.1)
    optimizer.step(model)
    assert [tracked.num_steps for tracked in hooks.optimizers()] == [1]
    assert "its step time includes what that does" in hooks.notes()[0]


class _Passing(torch.optim.Optimizer):
    """Passes its steps on; it has neither groups nor state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()

    def step(self, closure: Any = None) -> Any:
        self.inner.step(closure)


def test_a_wrapper_without_groups_is_not_an_optimizer(hooks: TorchHooks) -> None:
    """The steps that it passes on are counted, once."""
    inner = _sgd()
    wrapper = _Passing(inner)
    for _ in range(3):
        wrapper.step()
    assert [(tracked.optimizer, tracked.num_steps) for tracked in hooks.optimizers()] == [(inner, 3)]


def test_a_parameter_that_takes_another_s_place_has_its_own_name(hooks: TorchHooks) -> None:
    """Also where it has the identity of the one that it replaced, whose memory was free for it."""
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(2)) for name in ("first", "second")})
    for parameter in model.parameters():
        parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    params = optimizer.param_groups[0]["params"]
    params.reverse()
    model["first"], model["second"] = params
    names = hooks.parameter_names(is_anew=True)
    assert [names[id(one)] for one in params] == ["first", "second"]
    (tracked,) = hooks.optimizers()
    del params[1]
    hooks.parameter_names(is_anew=True)
    assert [name and name.text for name in tracked.names.values()] == ["first"]


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(2, 2)
        self.head = torch.nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.head(self.stem(inputs))


def _compiled_within(net: _Net) -> torch.nn.Module:
    net.stem = torch.compile(net.stem, backend="eager")  # type: ignore[assignment]
    return net


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: net,
        lambda net: torch.compile(net, backend="eager"),
        _compiled_within,
        torch.nn.DataParallel,
        lambda net: torch.compile(torch.nn.DataParallel(net), backend="eager"),
        lambda net: torch.nn.DataParallel(torch.compile(net, backend="eager")),  # type: ignore[type-var]
    ],
    ids=["plain", "compiled", "compiled within", "parallel", "compiled parallel", "parallel compiled"],
)
def test_what_wraps_a_model_is_not_in_the_names_of_its_parameters(
    hooks: TorchHooks, wrap: Callable[[_Net], torch.nn.Module]
) -> None:
    """A compiled model and one that is not train the same parameters; two arms of them are compared."""
    wrapped = wrap(_Net())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert sorted(hooks.parameter_names().values()) == ["head.bias", "head.weight", "stem.bias", "stem.weight"]


def test_threads_that_step_one_optimizer_are_told(hooks: TorchHooks) -> None:
    """Their steps overlap, so that not each has a record; a step that raised and another after it do not."""
    entered, done = threading.Event(), threading.Event()

    class Waiting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if threading.current_thread() is not threading.main_thread():
                entered.set()
                assert done.wait(60)
            if closure is not None:
                raise RuntimeError("as a step may")

    optimizer = Waiting([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with suppress(RuntimeError):
        optimizer.step(lambda: 1.0)
    optimizer.step()
    assert hooks.notes() == []
    other = threading.Thread(target=optimizer.step)
    other.start()
    assert entered.wait(60)
    optimizer.step()
    done.set()
    other.join()
    assert hooks.notes() == ["optimizer 0 is stepped by several threads at once: not all of its steps are recorded"]


def test_threads_that_meet_at_the_first_step_follow_one_optimizer(hooks: TorchHooks) -> None:
    """It has one number and one file of records."""
    optimizer, barrier = _sgd(), threading.Barrier(8)

    def step() -> None:
        barrier.wait()
        optimizer.step()

    threads = [threading.Thread(target=step) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tracked.index for tracked in hooks.optimizers()] == [0]


class _Evaluator(torch.nn.Module):
    """Holds a model, and itself in a cycle."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net
        self.run = self.forward


def test_names_do_not_depend_on_when_the_collector_comes(hooks: TorchHooks) -> None:
    """Evaluators around a model are garbage in cycles: whether they are still there must not be seen."""
    net = _Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    gc.disable()
    try:
        for _ in range(2):
            _Evaluator(net)
        assert "stem.weight" in hooks.parameter_names(is_anew=True).values()
    finally:
        gc.enable()
        gc.collect()
    assert "stem.weight" in hooks.parameter_names(is_anew=True).values()


def test_an_optimizer_over_two_models_does_not_rename_them(hooks: TorchHooks) -> None:
    """Where something is put around one of them, their places among the outermost modules are others."""
    first, second = _Net(), _Net()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    optimizer.step()
    before = hooks.parameter_names()
    assert {"_Net0.stem.weight", "_Net1.stem.weight"} <= set(before.values())
    evaluator = _Evaluator(first)
    assert hooks.parameter_names(is_anew=True) == before
    del evaluator


def test_two_wrappers_of_one_model_are_one_model(hooks: TorchHooks) -> None:
    """As where training and evaluation are compiled apart."""
    net = _Net()
    compiled: list[Any] = [torch.compile(net, backend="eager", dynamic=dynamic) for dynamic in (False, True)]
    optimizer = torch.optim.SGD(compiled[0].parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert sorted(hooks.parameter_names().values()) == ["head.bias", "head.weight", "stem.bias", "stem.weight"]


class _Closed(_Net):
    """May be asked for its parameters until it is closed."""

    is_closed = False

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_closed:
            raise RuntimeError("this model is closed")
        return super().named_parameters(*args, **kwargs)


def test_a_model_that_does_not_name_its_parameters_any_more_keeps_the_names(tmp_path: Path) -> None:
    """It is a fault of the program's class, which is counted, and costs nothing else."""
    guard = Guard()
    hooks = TorchHooks(tmp_path / "steps.ring", guard=guard)
    hooks.install()
    net = _Closed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step()
    net.is_closed = True
    assert "stem.weight" in hooks.parameter_names(is_anew=True).values()
    assert guard.errors == ["RuntimeError: this model is closed"]
    hooks.abandon()


def test_a_class_that_is_called_like_a_wrapper_is_none(hooks: TorchHooks) -> None:
    """What it keeps under the wrapper's name is no module."""
    net = type("DataParallel", (_Net,), {"module": "a name"})()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step()
    assert "stem.weight" in hooks.parameter_names().values()


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_costs_no_step(hooks: TorchHooks, tmp_path: Path) -> None:
    """Its parameters hold nothing before the first forward pass."""
    net = torch.nn.LazyLinear(2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert len(read_ring(tmp_path / "steps.ring").records) == 2
    assert sorted(hooks.parameter_names().values()) == ["bias", "weight"]


def test_a_walk_over_modules_serves_all_optimizers(hooks: TorchHooks, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is made where all have their names."""
    num_walks = 0
    named_roots = tracking.named_roots

    def count(modules: list[Any]) -> list[tracking.Root]:
        nonlocal num_walks
        num_walks += 1
        return named_roots(modules)

    net = _Net()
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters()]
    for optimizer in optimizers:
        optimizer.step()
    monkeypatch.setattr("lucid_profiler.hooks.named_roots", count)
    hooks.parameter_names()
    assert num_walks == 0
    hooks.parameter_names(is_anew=True)
    assert num_walks == 1


def test_a_step_that_raised_in_a_thread_that_waits_is_none_that_goes_on(hooks: TorchHooks) -> None:
    """Another thread may train on, and all its steps are recorded."""
    optimizer, raised, done = _sgd(), threading.Event(), threading.Event()

    def fail() -> float:
        raise MemoryError

    def run() -> None:
        with suppress(MemoryError):
            optimizer.step(fail)
        raised.set()
        assert done.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    assert raised.wait(60)
    optimizer.step()
    done.set()
    thread.join()
    assert hooks.notes() == []
