"""The callback under a stand-in of Lightning's protocol, and under Lightning itself where it is installed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lucid_profiler import api

MODULE = "lucid_profiler.integrations.lightning"
NAMES = ("lightning.pytorch", "pytorch_lightning")


class Recorded:
    """A session that writes down what it is told; states are read at once, as an agent does."""

    def __init__(self) -> None:
        self.active = True
        self.said: list[str] = []
        self.states: dict[str, Any] = {}

    @contextmanager
    def fit(self) -> Iterator[None]:
        self.said.append("begin")
        yield
        self.said.append("end")

    def loss(self, value: Any) -> None:
        raise AssertionError("each step would cost kernels")

    def mark(self, name: str) -> None:
        self.said.append(name)

    def state(self, part: str, value: Any) -> None:
        assert self.said.count("end") == self.said.count("begin")
        take = getattr(value, "state_dict", None)
        try:
            self.states[part] = take() if take else value
        except RuntimeError as error:
            self.states[part] = str(error)


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """Yield the session of this process."""
    session = Recorded()
    api.attach(session)
    yield session
    api.attach(None)


class StandInCallback:
    """What Lightning's own base has that matters here."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Import the callback's module afresh, with a stand-in of Lightning under one of its names."""
    fake = ModuleType(name)
    fake.Callback = StandInCallback  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = import_module(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)
    return module


@pytest.fixture
def lucid(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module over a stand-in."""
    return load(monkeypatch, "pytorch_lightning")


class Fit:
    """Calls the hooks of a callback in the order in which Lightning 2.6 does."""

    def __init__(self, callback: Any, *others: Any, module: Any = None) -> None:
        self.module: Any = module or nn.Linear(2, 1)
        self.module.automatic_optimization = True
        self.callback = callback
        self.trainer = SimpleNamespace(
            callbacks=[callback, *others],
            optimizers=[torch.optim.SGD(self.module.parameters(), lr=0.1)],
            lr_scheduler_configs=[],
            sanity_checking=False,
            global_step=0,
            callback_metrics={"val/loss": torch.tensor(0.5)},
        )

    def call(self, hook: str, *args: Any) -> None:
        """Call one hook."""
        getattr(self.callback, hook)(self.trainer, self.module, *args)

    def begin(self, stage: str = "fit") -> None:
        """Call `setup` as Lightning does."""
        self.callback.setup(self.trainer, self.module, stage=stage)

    def batch(self, number: int, outputs: Any) -> None:
        """Train one batch."""
        self.call("on_train_batch_start", None, number)
        self.trainer.global_step += 1
        self.call("on_train_batch_end", outputs, None, number)

    def run(self, *, epochs: int = 1, outputs: Callable[[], Any] = lambda: {"loss": torch.tensor(1.0)}) -> None:
        """Go through a fit."""
        self.begin()
        self.trainer.sanity_checking = True
        for hook in ("on_sanity_check_start", "on_validation_start", "on_sanity_check_end"):
            self.call(hook)
        self.trainer.sanity_checking = False
        for _ in range(epochs):
            self.call("on_train_epoch_start")
            for number in range(3):
                self.batch(number, outputs())
            self.call("on_validation_start")
            self.call("on_save_checkpoint", {})
            self.call("on_train_epoch_end")
        self.call("on_train_end")
        self.call("on_fit_end")
        self.callback.teardown(self.trainer, self.module, stage="fit")


def test_without_lightning_the_import_says_in_one_line_what_to_install() -> None:
    """The line names both packages; nothing else is told."""
    script = f"import sys, torch; sys.modules.update(lightning=None, pytorch_lightning=None); import {MODULE}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: ")
    assert "pip install lightning, or pip install pytorch-lightning" in last


@pytest.mark.parametrize("name", NAMES)
def test_the_callback_is_one_of_the_lightning_that_the_program_has_imported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under either name."""
    for other in NAMES:
        monkeypatch.delitem(sys.modules, other, raising=False)
    assert issubclass(load(monkeypatch, name).LucidCallback, StandInCallback)


def test_outside_lucid_no_hook_looks_at_anything(lucid: Any) -> None:
    """Not even at what it is given."""
    callback, nothing = lucid.LucidCallback(), object()
    callback.setup(nothing, nothing, stage="fit")
    for hook in ("on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end", "on_train_end", "on_fit_end"):
        getattr(callback, hook)(nothing, nothing)
    callback.on_train_batch_end(nothing, nothing, nothing, nothing, 0)
    callback.on_validation_start(SimpleNamespace(sanity_checking=False), nothing)
    callback.on_save_checkpoint(nothing, nothing, {})
    callback.on_exception(nothing, nothing, ValueError())
    callback.teardown(nothing, nothing, stage="fit")


def test_the_wall_is_the_fit_and_its_phases_are_marked_in_their_order(lucid: Any, recorded: Recorded) -> None:
    """A phase that goes on is not marked again."""
    Fit(lucid.LucidCallback()).run(epochs=2)
    epoch = ["train", "validate", "checkpoint"]
    loading = ["load", "sanity check", "load"]
    assert recorded.said == ["begin", *loading, *epoch, *epoch, "train", "teardown", "end"]


def test_a_number_of_steps_is_the_warm_up(lucid: Any, recorded: Recorded) -> None:
    """Where it is said; the step after them is training."""
    Fit(lucid.LucidCallback(warmup_steps=2)).run()
    assert recorded.said[4:7] == ["warm-up", "train", "validate"]


def test_every_part_is_handed_over_once_the_wall_has_ended(lucid: Any, recorded: Recorded) -> None:
    """The model and the optimizer as they are, the losses as one tensor, the last metrics."""
    fit = Fit(lucid.LucidCallback())
    fit.trainer.lr_scheduler_configs = [
        SimpleNamespace(scheduler=torch.optim.lr_scheduler.LambdaLR(fit.trainer.optimizers[0], lambda _: 1.0))
    ]
    fit.run()
    assert set(recorded.states) == {"model", "optimizer", "scheduler", "losses", "metrics"}
    assert recorded.states["model"].keys() == {"weight", "bias"}
    assert recorded.states["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert recorded.states["losses"]["loss"].tolist() == [1.0] * 3
    assert recorded.states["metrics"].keys() == {"val/loss"}


def test_several_optimizers_are_told_apart_by_their_place(lucid: Any, recorded: Recorded) -> None:
    """As the trainer lists them."""
    fit = Fit(lucid.LucidCallback())
    fit.trainer.optimizers.append(torch.optim.SGD(fit.module.parameters(), lr=0.2))
    fit.run()
    learned = {place: state["param_groups"][0]["lr"] for place, state in recorded.states["optimizer"].items()}
    assert learned == {"0": 0.1, "1": 0.2}


@pytest.mark.parametrize("hook", ["on_exception", "teardown"])
def test_a_fit_that_breaks_off_ends_the_wall_and_hands_over_nothing(hook: str, lucid: Any, recorded: Recorded) -> None:
    """By an exception, or as a search does that ends its fits early."""
    fit = Fit(lucid.LucidCallback())
    fit.begin()
    fit.batch(0, {"loss": torch.tensor(1.0)})
    fit.call(hook, ValueError("broken"))
    assert recorded.said == ["begin", "load", "train", "end"]
    assert recorded.states == {}


def test_a_validation_of_its_own_is_no_fit(lucid: Any, recorded: Recorded) -> None:
    """Neither a wall nor a phase comes of `Trainer.validate`."""
    fit = Fit(lucid.LucidCallback())
    fit.begin(stage="validate")
    fit.call("on_validation_start")
    assert recorded.said == []


def test_a_second_fit_begins_without_the_losses_of_the_first(lucid: Any, recorded: Recorded) -> None:
    """Each hands over its own."""
    fit = Fit(lucid.LucidCallback())
    fit.run(epochs=2)
    fit.run()
    assert recorded.states["losses"]["num_batches"] == 3


class _Waits(TorchDispatchMode):
    """Lets no value be read: what would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func)
        assert "_to_copy" not in str(func)
        return func(*args, **(kwargs or {}))


def test_no_loss_is_read_before_the_wall_has_ended(lucid: Any, recorded: Recorded) -> None:
    """Whole blocks of them are put together where they are."""
    fit = Fit(lucid.LucidCallback())
    fit.begin()
    with _Waits():  # type: ignore[no-untyped-call]
        for number in range(600):
            fit.batch(number, {"loss": torch.full((), 0.5)})
    fit.call("on_fit_end")
    assert recorded.states["losses"]["loss"].shape == (600,)


def test_losses_beyond_the_bound_are_counted_and_not_kept(
    lucid: Any, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded, and the part says how many there were."""
    monkeypatch.setattr(lucid, "MAX_LOSSES", 2)
    Fit(lucid.LucidCallback()).run()
    assert len(recorded.states["losses"]["loss"]) == 2
    assert recorded.states["losses"]["num_batches"] == 3


def test_a_loss_that_a_manual_optimization_writes_over_is_kept_as_it_was(lucid: Any, recorded: Recorded) -> None:
    """Its memory belongs to the module."""
    fit = Fit(lucid.LucidCallback())
    fit.module.automatic_optimization = False
    loss = torch.zeros(())
    fit.run(outputs=lambda: {"loss": loss.add_(1)})
    assert recorded.states["losses"]["loss"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("outputs", [None, {}, {"loss": None}, {"loss": torch.zeros(2)}, torch.tensor(1.0)])
def test_whatever_a_step_returns_does_no_harm(outputs: Any, lucid: Any, recorded: Recorded) -> None:
    """What is no loss is passed over."""
    Fit(lucid.LucidCallback()).run(outputs=lambda: outputs)
    assert recorded.states["losses"]["num_batches"] == (3 if isinstance(outputs, torch.Tensor) else 0)


class ModelEMACallback(StandInCallback):
    """Keeps averages in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": {"weight": torch.ones(2)}, "num_updates": 3}


class WeightAveraging(StandInCallback):
    """Averages a model, and has no state of its own."""

    def __init__(self) -> None:
        self.model = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))


class SemanticCallback(ModelEMACallback):
    """Has no average by its own name, but by that of its parent."""


class SchemaMonitor(StandInCallback):
    """Has the letters in its name, and a tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": torch.ones(2)}


class BrokenEMA(StandInCallback):
    """Cannot say what it averages."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("other", "keys"),
    [
        (ModelEMACallback(), {"shadow", "num_updates"}),
        (SemanticCallback(), {"shadow", "num_updates"}),
        (WeightAveraging(), {"n_averaged", "module.weight", "module.bias"}),
    ],
)
def test_averaged_weights_of_a_callback_are_found_by_its_name(
    other: Any, keys: set[str], lucid: Any, recorded: Recorded
) -> None:
    """Its own or that of a parent; a model that it averages goes before its state."""
    Fit(lucid.LucidCallback(), other).run()
    assert recorded.states["ema"].keys() == keys


def test_names_that_only_contain_the_letters_are_no_averages(lucid: Any, recorded: Recorded) -> None:
    """Words count."""
    Fit(lucid.LucidCallback(), SchemaMonitor()).run()
    assert "ema" not in recorded.states


def test_averaged_weights_of_the_module_are_found_by_the_attribute_s_name(lucid: Any, recorded: Recorded) -> None:
    """Or by the class of the attribute."""
    module = nn.Linear(1, 1)
    module.model_ema = nn.Linear(2, 2)
    Fit(lucid.LucidCallback(), module=module).run()
    assert recorded.states["ema"].keys() == {"weight", "bias"}


def test_averaged_weights_that_are_named_go_before_those_that_are_found(lucid: Any, recorded: Recorded) -> None:
    """A mapping serves as well."""
    Fit(lucid.LucidCallback(ema={"mine": torch.ones(1)}), ModelEMACallback()).run()
    assert recorded.states["ema"].keys() == {"mine"}


def test_a_fault_of_somebody_else_s_average_does_not_end_the_fit(lucid: Any, recorded: Recorded) -> None:
    """It is told where states are told."""
    Fit(lucid.LucidCallback(), BrokenEMA()).run()
    assert recorded.states["ema"] == "broken"


@pytest.fixture(params=NAMES)
def real(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Lightning and the callback on top of it; skip where it is not installed."""
    name = request.param
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    lightning = import_module(name)
    for other in NAMES:
        if other != name:
            monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = import_module(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)
    return SimpleNamespace(lightning=lightning, callback=module.LucidCallback, module=module)


def build(lightning: Any, *, manual: bool = False) -> Any:
    """Return a module of one layer and its data, four batches of two."""

    class Layer(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.automatic_optimization = not manual
            self.fails = False

        def training_step(self, batch: Any, _index: int) -> Any:
            if self.fails:
                raise ValueError("broken")
            loss = self.layer(batch).square().mean()
            if manual:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("val/loss", self.layer(batch).square().mean(), prog_bar=True)

        def configure_optimizers(self) -> Any:
            if manual:
                return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)]

    data: Any = torch.utils.data.DataLoader(list(torch.linspace(0, 1, 24).reshape(8, 3)), batch_size=2)  # type: ignore[arg-type]
    return Layer(), data


def train(real: Any, callback: Any, folder: Path, *, module: Any = None, **settings: Any) -> Any:
    """Run a fit and return its trainer."""
    built, data = build(real.lightning, manual=settings.pop("manual", False))
    checkpoint = settings.pop("ckpt_path", None)
    trainer = real.lightning.Trainer(
        callbacks=[callback],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", "max_epochs": 2, **settings},
    )
    trainer.fit(module or built, data, data, ckpt_path=checkpoint)
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_lightning_calls_the_hooks_as_the_stand_in_does(real: Any, recorded: Recorded, tmp_path: Path) -> None:
    """Phases, wall and parts of a fit of two epochs."""
    train(real, real.callback(), tmp_path)
    assert recorded.said[:5] == ["begin", "load", "sanity check", "load", "train"]
    assert recorded.said[-2:] == ["teardown", "end"]
    assert set(recorded.said[5:-2]) == {"validate", "checkpoint", "train"}
    assert set(recorded.states) == {"model", "optimizer", "scheduler", "losses", "metrics"}
    assert recorded.states["losses"]["loss"].shape == (8,)


@pytest.mark.filterwarnings("ignore")
def test_lightning_fits_to_the_same_bytes_with_the_callback_and_without(
    real: Any, recorded: Recorded, tmp_path: Path
) -> None:
    """It draws no random number and touches no tensor of the fit."""
    weights = []
    for callback in (real.callback(), real.lightning.Callback()):
        torch.manual_seed(3)
        weights.append(train(real, callback, tmp_path).lightning_module.layer.weight.detach().clone())
    assert weights[0].view(torch.uint8).tolist() == weights[1].view(torch.uint8).tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "num_losses"),
    [
        ({"fast_dev_run": True}, 1),
        ({"accumulate_grad_batches": 2, "max_epochs": 1}, 4),
        ({"max_steps": 3}, 3),
        ({"manual": True, "max_epochs": 1}, 4),
        ({"val_check_interval": 2, "max_epochs": 1}, 4),
    ],
)
def test_lightning_s_ways_of_fitting_all_end_with_every_loss(
    settings: dict[str, Any], num_losses: int, real: Any, recorded: Recorded, tmp_path: Path
) -> None:
    """A trial run, accumulated gradients, a limit of steps, two optimizers by hand, validation within the epoch."""
    train(real, real.callback(), tmp_path, **settings)
    assert recorded.states["losses"]["num_batches"] == num_losses
    assert (recorded.said[0], recorded.said[-1]) == ("begin", "end")


@pytest.mark.filterwarnings("ignore")
def test_a_fit_that_goes_on_from_a_checkpoint_hands_over_its_own_losses(
    real: Any, recorded: Recorded, tmp_path: Path
) -> None:
    """Those of the batches that this process trained."""
    trainer = train(real, real.callback(), tmp_path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    train(real, real.callback(), tmp_path, max_epochs=3, ckpt_path=tmp_path / "one.ckpt")
    assert recorded.states["losses"]["num_batches"] == 8


@pytest.mark.filterwarnings("ignore")
def test_an_exception_in_a_fit_of_lightning_s_goes_on_to_the_caller(
    real: Any, recorded: Recorded, tmp_path: Path
) -> None:
    """And the wall has ended."""
    module, _ = build(real.lightning)
    module.fails = True
    with pytest.raises(ValueError, match="broken"):
        train(real, real.callback(), tmp_path, module=module)
    assert recorded.said[-1] == "end"
    assert recorded.states == {}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_on_a_device_no_hook_waits_for_it(
    real: Any, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA raises at whatever synchronises between the beginning of the wall and its end, a full block included."""
    monkeypatch.setattr(real.module, "_LOSSES_PER_BLOCK", 4)

    class Strict(real.callback):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            is_inner = name.startswith("on_") and name not in {"on_fit_end", "on_exception"}
            return _strictly(value) if is_inner and callable(value) else value

    train(real, Strict(), tmp_path, accelerator="gpu", devices=1)
    assert recorded.states["losses"]["loss"].shape == (8,)


def _strictly(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that fails where it would wait for the device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return hook(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call
