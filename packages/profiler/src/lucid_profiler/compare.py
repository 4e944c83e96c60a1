"""Comparing: what one report comes to, and how two reports differ. Pure; needs neither torch nor a terminal."""

from lucid_profiler.analysis import Analysis, ExcludedPair, analyze, pair_record, verify_summary
from lucid_profiler.diff import Canary, Difference, DiffRow, IdentityDifference, diff
from lucid_profiler.metrics import ArmSummary, MetricAnalysis
from lucid_profiler.parity import Parity, PartParity, StateDifference
from lucid_profiler.verdict import CaptureCheck, Verdict

__all__ = [
    "Analysis",
    "ArmSummary",
    "Canary",
    "CaptureCheck",
    "DiffRow",
    "Difference",
    "ExcludedPair",
    "IdentityDifference",
    "MetricAnalysis",
    "Parity",
    "PartParity",
    "StateDifference",
    "Verdict",
    "analyze",
    "diff",
    "pair_record",
    "verify_summary",
]
