"""Optimizers of the Muon + SGD kind with batched, replayable update preparation."""

from lucid_optim.muon import Muon, MuonRule
from lucid_optim.musgd import MuSGD, MuSGDRule
from lucid_optim.newton_schulz import NewtonSchulz, orthogonalize
from lucid_optim.optimizer import RuleOptimizer
from lucid_optim.report import REASONS, CaptureError, CaptureReport, GroupReport
from lucid_optim.rule import Batch, Hyperparameter, Phase, Rule

__version__ = "0.1.0"

__all__ = [
    "REASONS",
    "Batch",
    "CaptureError",
    "CaptureReport",
    "GroupReport",
    "Hyperparameter",
    "MuSGD",
    "MuSGDRule",
    "Muon",
    "MuonRule",
    "NewtonSchulz",
    "Phase",
    "Rule",
    "RuleOptimizer",
    "__version__",
    "orthogonalize",
]
