"""Comparing: what one report comes to, and how two reports differ. Pure; needs neither torch nor a terminal."""

from lucid_profiler.analysis import Analysis, ExcludedPair, analyze, analyze_all, pair_record, plain_analysis
from lucid_profiler.blocks import Block, blocks, counted_runs, planned_slots, unpaired_runs
from lucid_profiler.diff import Canary, Difference, DiffRow, IdentityDifference, diff
from lucid_profiler.metrics import ArmSummary, MetricAnalysis
from lucid_profiler.parity import Parity, PartParity, StateDifference
from lucid_profiler.verdict import CaptureCheck, Verdict
from lucid_profiler.verification import verify_summary

__all__ = [
    "Analysis",
    "ArmSummary",
    "Block",
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
    "analyze_all",
    "blocks",
    "counted_runs",
    "diff",
    "pair_record",
    "plain_analysis",
    "planned_slots",
    "unpaired_runs",
    "verify_summary",
]
