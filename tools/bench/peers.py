"""The optimizers that the step benchmark compares: how each is made, and which parameters it takes.

MuSGDs, SGD and AdamW update every parameter; Muons update the matrices alone, so that their rows compare with one
another. Learning rate and momentum are constant and everything else is each implementation's default, unless said.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

import lucid_optim

__all__ = [
    "CANDIDATES",
    "REFERENCE",
    "Candidate",
    "Make",
    "candidates",
    "import_leaf",
    "installed_version",
    "select",
    "too_slow",
]

LR = 0.01
MOMENTUM = 0.95
REFERENCE = "lucid_yolo MuSGD"

Make = Callable[[list[Parameter]], Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One row of the table before anything is known of it.

    Attributes:
        name: The row's name.
        make: Builds the optimizer over parameters of its own; whatever it raises is the row's reason.
        distribution: Where its version is looked up.
        matrices_only: Whether it is given the parameters of two dimensions or more only.
        flattened: Whether its parameters are given as `(shape[0], rest)`.
        bfloat16: Whether it iterates in bfloat16.
        variant: What differs from the implementation's defaults, for the table.
        note: What the row needs said of the implementation.
    """

    name: str
    make: Make
    distribution: str
    matrices_only: bool = False
    flattened: bool = False
    bfloat16: bool = False
    variant: str = ""
    note: str = ""


def import_leaf(name: str) -> ModuleType:
    """Import a module without running the `__init__` of the packages around it.

    Some packages import half an ecosystem at their top, of which their optimizer needs nothing. The packages stay bare
    for the rest of the process.

    Args:
        name: Dotted name of a module.

    Raises:
        ModuleNotFoundError: If the module, or one that it needs, is not installed.
    """
    path: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            spec = PathFinder.find_spec(package, path)
            if spec is None or spec.submodule_search_locations is None:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
            sys.modules[package] = _bare(spec)
        path = sys.modules[package].__path__
    return importlib.import_module(name)


def _bare(spec: ModuleSpec) -> ModuleType:
    module = ModuleType(spec.name)
    module.__spec__ = spec
    module.__file__ = spec.origin
    module.__path__ = list(spec.submodule_search_locations or ())
    return module


def installed_version(distribution: str) -> str | None:
    """Return a distribution's version, or None where it is not installed."""
    if distribution == "torch":
        return torch.__version__
    if distribution == "lucid-optim":
        return lucid_optim.__version__
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _fused(make: Callable[..., Optimizer]) -> Make:
    """Ask for the fused implementation, and take the default one where this torch has none for the device."""

    def build(params: list[Parameter]) -> Optimizer:
        try:
            return make(params, fused=True)
        except (RuntimeError, TypeError):
            return make(params)

    return build


def _sgd(params: list[Parameter], **options: Any) -> Optimizer:
    return SGD(params, lr=LR, momentum=MOMENTUM, nesterov=True, **options)


def _adamw(params: list[Parameter], **options: Any) -> Optimizer:
    return AdamW(params, lr=LR, **options)


def _lucid_musgd(*, capture: bool) -> Make:
    return lambda params: lucid_optim.MuSGD(params, lr=LR, momentum=MOMENTUM, capture_updates=capture)


def _lucid_muon(*, capture: bool) -> Make:
    return lambda params: lucid_optim.Muon(params, lr=LR, momentum=MOMENTUM, capture_updates=capture)


def _lucid_yolo(params: list[Parameter]) -> Optimizer:
    optimizer: Optimizer = importlib.import_module("lucid_yolo.optim").MuSGD(params, lr=LR, momentum=MOMENTUM)
    return optimizer


def _torch_muon(params: list[Parameter]) -> Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(f"torch {torch.__version__} has no torch.optim.Muon; it came with 2.9")
    return torch.optim.Muon(params, lr=LR, momentum=MOMENTUM)


def _timm(params: list[Parameter]) -> Optimizer:
    optimizer: Optimizer = import_leaf("timm.optim.muon").Muon(params, lr=LR, momentum=MOMENTUM, nesterov=True)
    return optimizer


def _pytorch_optimizer(params: list[Parameter]) -> Optimizer:
    group = {"params": params, "use_muon": True}
    optimizer: Optimizer = importlib.import_module("pytorch_optimizer").Muon([group], lr=LR, momentum=MOMENTUM)
    return optimizer


def _heavyball(params: list[Parameter]) -> Optimizer:
    heavyball = importlib.import_module("heavyball")
    heavyball.utils.compile_mode = None
    optimizer: Optimizer = heavyball.Muon(params, lr=LR, betas=(MOMENTUM, 0.99))
    return optimizer


def _keller_jordan(params: list[Parameter]) -> Optimizer:
    optimizer: Optimizer = importlib.import_module("muon").SingleDeviceMuon(params, lr=LR, momentum=MOMENTUM)
    return optimizer


def _ultralytics(params: list[Parameter]) -> Optimizer:
    # As its trainer routes them: matrices to the mix, the rest to SGD.
    groups = [
        {"params": [param for param in params if param.ndim in {2, 4}], "use_muon": True},
        {"params": [param for param in params if param.ndim not in {2, 4}], "use_muon": False},
    ]
    optimizer: Optimizer = import_leaf("ultralytics.optim.muon").MuSGD(
        groups, lr=LR, momentum=MOMENTUM, weight_decay=5e-4, nesterov=True, muon=0.2, sgd=1.0
    )
    return optimizer


def _dion(params: list[Parameter]) -> Optimizer:
    optimizer: Optimizer = importlib.import_module("dion").Muon(params, lr=LR, mu=MOMENTUM, flatten=True)
    return optimizer


def _muon(
    name: str, make: Make, distribution: str, *, flattened: bool = False, variant: str = "", note: str = ""
) -> Candidate:
    return Candidate(
        name=name,
        make=make,
        distribution=distribution,
        matrices_only=True,
        flattened=flattened,
        bfloat16=True,
        variant=variant,
        note=note,
    )


CAPTURED = (
    Candidate(name="MuSGD captured", make=_lucid_musgd(capture=True), distribution="lucid-optim"),
    _muon("Muon captured", _lucid_muon(capture=True), "lucid-optim"),
)

CANDIDATES = (
    Candidate(name="MuSGD", make=_lucid_musgd(capture=False), distribution="lucid-optim"),
    _muon("Muon", _lucid_muon(capture=False), "lucid-optim"),
    Candidate(name=REFERENCE, make=_lucid_yolo, distribution="lucid-yolo"),
    Candidate(
        name="ultralytics MuSGD",
        make=_ultralytics,
        distribution="ultralytics",
        bfloat16=True,
        note="another update under the same name: two buffers, bfloat16",
    ),
    Candidate(name="torch SGD", make=_fused(_sgd), distribution="torch"),
    Candidate(name="torch AdamW", make=_fused(_adamw), distribution="torch"),
    _muon("torch Muon", _torch_muon, "torch", flattened=True, variant="2-D"),
    _muon("timm Muon", _timm, "timm", note="sends depthwise and very long matrices to AdamW"),
    _muon("pytorch_optimizer Muon", _pytorch_optimizer, "pytorch_optimizer"),
    _muon(
        "heavyball Muon",
        _heavyball,
        "heavyball",
        variant="eager",
        note="its torch.compile is off: it would tune kernels for minutes before the first step",
    ),
    _muon("KellerJordan Muon", _keller_jordan, "muon-optimizer", flattened=True, variant="2-D"),
    _muon("dion Muon", _dion, "dion"),
)


def candidates(*, capture: bool) -> tuple[Candidate, ...]:
    """Return every candidate, the captured ones after the native ones of the same package where they are asked for."""
    return (*CANDIDATES[:2], *(CAPTURED if capture else ()), *CANDIDATES[2:])


def select(pool: Sequence[Candidate], filters: Sequence[str]) -> list[Candidate]:
    """Keep the candidates whose name holds one of the filters, whatever the case; all where there is no filter.

    Raises:
        ValueError: If a filter fits no candidate; the message lists the names.
    """
    for text in filters:
        if not any(text.lower() in candidate.name.lower() for candidate in pool):
            raise ValueError(f"no optimizer is named {text!r}; there are {', '.join(c.name for c in pool)}")
    return [
        candidate
        for candidate in pool
        if not filters or any(text.lower() in candidate.name.lower() for text in filters)
    ]


def too_slow(pool: Sequence[Candidate]) -> dict[str, str]:
    """Return, by name, why a candidate is left out on a CPU unless it was asked for."""
    reason = "bfloat16 takes seconds a step on most CPUs; --optimizers runs it"
    return {candidate.name: reason for candidate in pool if candidate.bfloat16}
