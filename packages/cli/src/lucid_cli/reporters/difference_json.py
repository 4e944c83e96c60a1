"""The comparison of reports as one JSON object, schema lucid.diff/1.0.

Readers may rely on every key that is here; a new one raises the minor version, a changed or missing one the major.
Percentages are changes; what is infinite, because a value appears or vanishes, is null with its reason.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lucid_cli.reporters.difference_words import (
    Compared,
    Outcome,
    Refused,
    decision_words,
    parity_change,
    refusal_words,
    warnings_of,
)
from lucid_cli.reporters.sentences import base_runs, parity_code
from lucid_cli.reporters.words import change
from lucid_profiler import jsonio
from lucid_profiler.compare import Analysis, Difference, DiffRow, MetricAnalysis
from lucid_profiler.gates import GateResult
from lucid_profiler.pairs import WelchInterval
from lucid_profiler.reader import Report

SCHEMA = "lucid.diff/1.0"

__all__ = ["SCHEMA", "diff_json"]


def diff_json(outcomes: Sequence[Outcome], exit_code: int) -> str:
    """Return the object on one line with sorted keys, ending in a newline."""
    contents = {
        "schema": SCHEMA,
        "base": _report(outcomes[0].a),
        "comparisons": [_comparison(one) if isinstance(one, Compared) else _refused(one) for one in outcomes],
        "exit_code": exit_code,
    }
    return jsonio.dumps(contents).decode() + "\n"


def _report(report: Report) -> dict[str, Any]:
    header = report.header
    return {
        "path": report.path,
        "id": header.id,
        "created": header.created,
        "schema": header.schema,
        "method": header.method,
        "planned_pairs": header.pairs,
        "status": report.end.status if report.end else None,
        "complete": report.complete,
        "warnings": list(report.warnings),
    }


def _comparison(compared: Compared) -> dict[str, Any]:
    difference = compared.difference
    analyses = {"a": difference.analysis_a, "b": difference.analysis_b}
    return {
        "name": compared.name,
        "report": _report(compared.b),
        "arms": {"base": difference.analysis_a.base, "other": difference.analysis_a.other},
        "pairs": {name: _pairs(one) for name, one in analyses.items()},
        "alpha": difference.alpha,
        "identities": [asdict(identity) for identity in difference.identities],
        "lost_arms": list(difference.lost_arms),
        "added_arms": list(difference.added_arms),
        "only_in_a": list(difference.only_in_a),
        "only_in_b": list(difference.only_in_b),
        "canary": _canary(difference),
        "metrics": [_row(row, is_hidden=difference.hides_absolute) for row in difference.rows],
        "counters": [_row(row, is_hidden=False) for row in difference.counters],
        "parity": {"verdict": parity_change(difference), **{name: _parity(one) for name, one in analyses.items()}},
        "report_verdicts": {name: asdict(one.verdict) for name, one in analyses.items()},
        "warnings": warnings_of(compared),
        "gates": [_gate(result) for result in compared.gates],
        "decision": difference.decision,
        "reason": difference.reason,
        "reasons": [],
        "words": decision_words(compared),
    }


def _refused(refused: Refused) -> dict[str, Any]:
    """Return a report that is not compared with the keys of one that is."""
    return {
        "name": refused.name,
        "report": _report(refused.b),
        **dict.fromkeys(("arms", "pairs", "alpha", "canary", "parity", "report_verdicts")),
        **{
            name: []
            for name in ("lost_arms", "added_arms", "only_in_a", "only_in_b", "metrics", "counters", "warnings")
        },
        "identities": [asdict(identity) for identity in refused.refusal.identities],
        "gates": [_gate(result) for result in refused.gates],
        "decision": "refused",
        "reason": "not_comparable",
        "reasons": list(refused.refusal.reasons),
        "words": refusal_words(refused),
    }


def _pairs(analysis: Analysis) -> dict[str, Any]:
    return {
        "found": analysis.num_pairs,
        "discarded": analysis.num_discarded,
        "included": analysis.num_included,
        "excluded": [asdict(pair) for pair in analysis.excluded],
    }


def _canary(difference: Difference) -> dict[str, Any] | None:
    canary = difference.canary
    if canary is None:
        return None
    return {
        "metric": canary.metric,
        **_percents(canary.interval),
        "limit_percent": difference.canary_limit,
        "is_quiet": canary.is_quiet,
        "is_certain": canary.is_certain,
    }


def _row(row: DiffRow, *, is_hidden: bool) -> dict[str, Any]:
    return {
        "metric": row.metric,
        "unit": row.unit,
        "better": row.better,
        "exact": row.exact,
        "verdict": row.verdict,
        "reason": row.reason,
        "pairs_needed": row.pairs_needed,
        "bent_by": row.bent_by,
        "difference": _percents(row.difference),
        "amount": _amounts(None if is_hidden else row.amount),
        "base_difference": _percents(row.canary.interval if row.canary else None),
        "absolute_withheld": is_hidden,
        "a": _side(row.a, is_hidden=is_hidden),
        "b": _side(row.b, is_hidden=is_hidden),
    }


def _side(metric: MetricAnalysis, *, is_hidden: bool) -> dict[str, Any]:
    effect = metric.effect
    arms = {"base": metric.base, "other": metric.other}
    return {
        **{
            name: {"n": arm.n, **dict.fromkeys(("median", "min", "max"))} if is_hidden else asdict(arm)
            for name, arm in arms.items()
        },
        "paired": None
        if effect is None
        else {
            "n": effect.n,
            "percent": change(effect.median),
            "low_percent": change(effect.t_low),
            "high_percent": change(effect.t_high),
            "range_low_percent": change(effect.low),
            "range_high_percent": change(effect.high),
        },
        "num_missing": metric.num_missing,
        "reasons": metric.reasons,
    }


def _percents(welch: WelchInterval | None) -> dict[str, Any]:
    ends = (None, None, None) if welch is None else (welch.difference, welch.low, welch.high)
    names = ("percent", "low_percent", "high_percent")
    return {
        name: None if end is None or math.isinf(end) else change(end) for name, end in zip(names, ends, strict=True)
    }


def _amounts(welch: WelchInterval | None) -> dict[str, Any]:
    ends = (None, None, None) if welch is None else (welch.difference, welch.low, welch.high)
    return dict(zip(("value", "low", "high"), ends, strict=True))


def _parity(analysis: Analysis) -> dict[str, Any]:
    parity = analysis.parity
    return {
        "status": parity_code(analysis),
        "base_runs": base_runs(analysis),
        "parts": list(parity.covered),
        "difference": parity.difference.text if parity.difference else None,
    }


def _gate(result: GateResult) -> dict[str, Any]:
    gate = result.gate
    return {
        "text": gate.text,
        "kind": gate.kind,
        "metric": gate.metric,
        "limit": gate.limit,
        "unit": gate.unit,
        "status": result.status,
        "reason": result.reason,
        "low": _finite(result.low),
        "high": _finite(result.high),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
