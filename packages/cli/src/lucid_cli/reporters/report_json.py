"""One report as one JSON object, schema lucid.show/1.0.

Readers may rely on every key that is here; a new one raises the minor version, a changed or missing one the major.
Percentages are changes; a number that JSON lacks is an object such as {"$float": "nan"}, as in reports.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lucid_cli.reporters.sentences import base_runs, parity_code, verdict_sentence, warning_sentence
from lucid_cli.reporters.words import change
from lucid_profiler import jsonio
from lucid_profiler.compare import Analysis, MetricAnalysis
from lucid_profiler.reader import Report
from lucid_profiler.records import Run

SCHEMA = "lucid.show/1.0"

__all__ = ["SCHEMA", "report_json"]


def report_json(report: Report, analyses: Sequence[Analysis]) -> str:
    """Return the object on one line with sorted keys, ending in a newline."""
    header = report.header
    contents = {
        "schema": SCHEMA,
        "report": {
            "path": report.path,
            "id": header.id,
            "created": header.created,
            "schema": header.schema,
            "method": header.method,
            "tool": asdict(header.tool),
            "command": list(header.command),
            "order": header.order,
            "primary": header.primary,
            "planned_pairs": header.pairs,
            "complete": report.complete,
            "status": report.end.status if report.end else None,
            "torn_line": report.torn_line,
            "warnings": list(report.warnings),
        },
        "arms": [asdict(arm) for arm in header.arms],
        "environments": [asdict(env) for env in report.envs],
        "comparisons": [_comparison(one, header.alpha) for one in analyses],
        "runs": [_run(run) for run in report.runs],
    }
    return jsonio.dumps(contents).decode() + "\n"


def _comparison(analysis: Analysis, alpha: float) -> dict[str, Any]:
    return {
        "arms": {"base": analysis.base, "other": analysis.other},
        "pairs": {
            "found": analysis.num_pairs,
            "discarded": analysis.num_discarded,
            "included": analysis.num_included,
            "excluded": [asdict(pair) for pair in analysis.excluded],
        },
        "metrics": [_metric(name, metric) for name, metric in analysis.metrics.items()],
        "capture": {arm: asdict(check) for arm, check in analysis.capture.items()},
        "parity": {
            "status": parity_code(analysis),
            "base_runs": base_runs(analysis),
            "parts": list(analysis.parity.covered),
            "difference": analysis.parity.difference.text if analysis.parity.difference else None,
        },
        "verdict": asdict(analysis.verdict),
        "warnings": [{"code": one.code, "words": warning_sentence(one, analysis)} for one in analysis.warnings],
        "words": verdict_sentence(analysis, alpha=alpha),
    }


def _metric(name: str, metric: MetricAnalysis) -> dict[str, Any]:
    effect = metric.effect
    paired = effect and {
        "n": effect.n,
        "percent": change(effect.median),
        "low_percent": change(effect.t_low),
        "high_percent": change(effect.t_high),
        "range_low_percent": change(effect.low),
        "range_high_percent": change(effect.high),
    }
    return {
        "metric": name,
        "unit": metric.unit,
        "better": metric.better,
        "exact": metric.exact,
        "change": metric.change,
        "base": asdict(metric.base),
        "other": asdict(metric.other),
        "ratio_of_medians": metric.ratio_of_medians,
        "paired": paired,
        "paired_reason": metric.effect_reason,
        "num_missing": metric.num_missing,
        "reasons": metric.reasons,
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "run": run.run,
        "pair": run.pair,
        "arm": run.arm,
        "discarded": run.discarded,
        "status": run.status,
        "returncode": run.returncode,
        "signal": run.signal,
        "started": run.started,
        "process_ns": run.process_ns,
        "wall": run.wall and asdict(run.wall),
        "metrics": {name: asdict(metric) for name, metric in run.metrics.items()},
        "notes": list(run.notes),
    }
