"""`lucid report diff`: what changed between reports, if they can be compared, and whether it stays within limits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from lucid_cli import arguments
from lucid_cli.documents import append_step_summary, summary_path, write_document
from lucid_cli.output import warn, write_result
from lucid_cli.reporters.difference import render_compared
from lucid_cli.reporters.difference_words import Compared, Outcome, Refused, limit_words
from lucid_profiler.between import margin_logs
from lucid_profiler.comparability import identity_differences
from lucid_profiler.diff import CANARY_LIMIT, Difference, Refusal, refused, try_each
from lucid_profiler.gates import Gate, GateKind, GateResult, judge_gate, parse_gate, without_verdict
from lucid_profiler.reader import Report, read_report

GATE_FAILED = 3
PARITY_FAILED = 4
NO_VERDICT = 5
INCONCLUSIVE = 6
_FORMATS = ("table", "json", "markdown", "csv")
_HEADER_KEYS = (
    *("schema", "method", "command", "primary", "arms", "controls", "alpha", "wall_source"),
    *("rules", "taints", "pairs", "order", "data"),
)

__all__ = ["command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What was asked on the command line, beside the reports."""

    allow: tuple[str, ...]
    allow_partial: bool
    margins: dict[str, float]
    canary_limit: float
    gates: tuple[Gate, ...]
    expectations: tuple[Gate, ...]
    fail_on_inconclusive: bool
    form: str
    step_summary: bool


def _percent(_ctx: click.Context, _param: click.Parameter, text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not 0 <= percent < math.inf:
        raise click.BadParameter(f"{text!r} is no percentage from 0 on, such as 2.")
    return percent


def _limits(kind: GateKind) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], tuple[Gate, ...]]:
    def parse(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> tuple[Gate, ...]:
        try:
            return tuple(parse_gate(text, kind) for text in texts)
        except ValueError as error:
            raise click.BadParameter(f"{error}.") from error

    return parse


def _margins(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> dict[str, float]:
    margins: dict[str, float] = {}
    for text in texts:
        metric, _, percent = (part.strip() for part in text.partition("="))
        if metric in margins:
            raise click.BadParameter(f"{metric} has two margins; give one.")
        try:
            margins[metric] = float(percent.removesuffix("%"))
            margin_logs(margins[metric])
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is no METRIC=PERCENT above 0 and below 100, such as wall=1.") from error
    return margins


@click.command("diff")
@click.argument("a", type=arguments.Report())
@click.argument("others", metavar="B [C]...", type=arguments.Report(), nargs=-1, required=True)
@click.option("--allow", multiple=True, metavar="KEY", help="Compare although KEY differs; may be repeated.")
@click.option("--allow-partial", is_flag=True, help="Use a report whose last lines are missing as far as it goes.")
@click.option(
    "--margin",
    "margins",
    multiple=True,
    metavar="METRIC=PERCENT",
    callback=_margins,
    help="Call a metric the same if its whole interval is within so many percent.",
)
@click.option(
    "--canary-limit",
    default=f"{CANARY_LIMIT:g}",
    show_default=True,
    metavar="PERCENT",
    callback=_percent,
    help="Withhold absolute values if the base arms of the reports differ by more.",
)
@click.option(
    "--gate",
    "gates",
    multiple=True,
    metavar="LIMIT",
    callback=_limits("gate"),
    help="Exit with 3 if the whole interval is past a limit such as 'wall<=+1%' or 'peak_reserved<=+64MiB'.",
)
@click.option(
    "--expect",
    "expectations",
    multiple=True,
    metavar="LIMIT",
    callback=_limits("expect"),
    help="Exit with 3 unless the whole interval is within a limit such as 'wall<=-5%'.",
)
@click.option("--fail-on-inconclusive", is_flag=True, help="Exit with 6 if limits, or else the verdict, stay open.")
@click.option(
    "--format", "form", type=click.Choice(_FORMATS), default="table", show_default=True, help="How to print the result."
)
@click.option("--step-summary", is_flag=True, help="Append the result to the summary of this GitHub Actions step, too.")
def command(*, a: str, others: tuple[str, ...], **options: Any) -> int:
    """Compare what the reports B, C, … come to with the report A.

    Differences in what was measured, and where, come first; those that make a comparison meaningless end it with exit
    code 5 unless they are allowed by name.
    """
    if [a, *others].count("-") > 1:
        raise click.UsageError("only one of the reports can come from standard input")
    return _run((a, *others), _Options(**options))


def _run(paths: Sequence[str], options: _Options) -> int:
    summary = summary_path() if options.step_summary else None
    first, *others = (_read(path, allow_partial=options.allow_partial) for path in paths)
    if options.allow:
        _check_allowed(options.allow, first, others)
    tried = try_each(first, others, options.allow, margins=options.margins, canary_limit=options.canary_limit)
    if differences := [found for _, found in tried if isinstance(found, Difference)]:
        _check_margins(options.margins, differences)
    outcomes = _outcomes(first, tried, limits=(*options.gates, *options.expectations))
    exit_code = _exit_code(outcomes, fail_on_inconclusive=options.fail_on_inconclusive)
    _write(outcomes, options.form, exit_code)
    if summary is not None:
        append_step_summary(summary, _markdown(outcomes))
    if (error := refused(tried, has_paths=len(others) > 1)) is not None:
        warn(str(error), kind="Error")
    return exit_code


def _read(path: str, *, allow_partial: bool) -> Report:
    report = read_report(path, allow_partial=allow_partial, with_samples=False)
    for warning in report.warnings:
        warn(f"{report.path}: {warning}")
    return report


def _check_allowed(allow: tuple[str, ...], first: Report, others: Sequence[Report]) -> None:
    """Refuse a key that names nothing in any report: a slip of the pen would look like a permission.

    Raises:
        UsageError: it names the key, and those that differ.
    """
    differing = list(dict.fromkeys(one.key for other in others for one in identity_differences(first, other, ())))
    known = {*differing, *(key for report in (first, *others) for key in _keys(report))}
    unknown = [key for key in allow if key not in known]
    if unknown:
        listed = f"what differs: {', '.join(differing)}" if differing else "nothing differs"
        raise click.UsageError(f"--allow {unknown[0]}: neither report has such a key; {listed}")


def _keys(report: Report) -> set[str]:
    metrics = {name for run in report.runs for name in run.metrics}
    return {
        *_HEADER_KEYS,
        *(key for env in report.envs for key in env.identity),
        *(f"{kind}:{name}" for kind in ("unit", "metric") for name in metrics),
    }


def _check_margins(margins: dict[str, float], found: Sequence[Difference]) -> None:
    """Refuse a margin for what no comparison has.

    Raises:
        UsageError: it names the metric, and those that there are.
    """
    rows = list(dict.fromkeys(row.metric for one in found for row in (*one.rows, *one.counters)))
    for metric in margins:
        if metric not in rows:
            raise click.UsageError(f"--margin {metric}: no such metric is compared; there are {', '.join(rows)}")


def _outcomes(
    first: Report, tried: Sequence[tuple[Report, Difference | Refusal]], *, limits: Sequence[Gate]
) -> tuple[Outcome, ...]:
    num_arms = len({found.analysis_b.other for _, found in tried if isinstance(found, Difference)})
    names = {id(report): _name(place) for place, report in enumerate({id(one): one for one, _ in tried}.values())}
    outcomes: list[Outcome] = []
    for report, found in tried:
        name = names[id(report)]
        if isinstance(found, Refusal):
            gates = tuple(without_verdict(gate, "not_compared") for gate in limits)
            outcomes.append(Refused(name=name, a=first, b=report, refusal=found, gates=gates))
        else:
            name += f" ({found.analysis_b.other})" if num_arms > 1 else ""
            gates = tuple(_judged(gate, found) for gate in limits)
            outcomes.append(Compared(name=name, a=first, b=report, difference=found, gates=gates))
    return tuple(outcomes)


def _judged(gate: Gate, difference: Difference) -> GateResult:
    try:
        return judge_gate(gate, difference)
    except ValueError as error:
        raise click.UsageError(f"--{gate.kind} {error}.") from error


def _name(place: int) -> str:
    """Return what the further reports are called: b to z, then two letters."""
    place += 1
    return chr(ord("a") + place) if place < 26 else f"{_name(place // 26 - 1)}{chr(ord('a') + place % 26)}"


def _exit_code(outcomes: Sequence[Outcome], *, fail_on_inconclusive: bool) -> int:
    """Return the code of the most serious of what was found, in the order in which the codes take precedence."""
    compared = [one for one in outcomes if isinstance(one, Compared)]
    limits = [result for one in compared for result in one.gates]
    if len(compared) < len(outcomes) or any(
        _is_without_verdict(result, one) for one in compared for result in one.gates
    ):
        return NO_VERDICT
    if any(_parity_failed(one) for one in compared):
        return PARITY_FAILED
    if any(result.status == "failed" for result in limits):
        return GATE_FAILED
    is_open = (
        any(result.status == "inconclusive" for result in limits)
        if limits
        else any(one.difference.decision in {"inconclusive", "withheld"} for one in compared)
    )
    return INCONCLUSIVE if fail_on_inconclusive and is_open else 0


def _parity_failed(compared: Compared) -> bool:
    both = (compared.difference.analysis_a, compared.difference.analysis_b)
    return any(one.parity.status == "different" and not one.is_different for one in both)


def _is_without_verdict(result: GateResult, compared: Compared) -> bool:
    """Return whether a limit has no verdict, and not because states differ, which has an exit code of its own."""
    both = (compared.difference.analysis_a, compared.difference.analysis_b)
    parity_codes = {one.verdict.reason for one in both if one.verdict.decision == "parity_failed"}
    return result.status == "no_verdict" and result.reason not in parity_codes


def _write(outcomes: Sequence[Outcome], form: str, exit_code: int) -> None:
    if form == "table":
        write_result(render_compared(outcomes))
    elif form == "markdown":
        write_document(_markdown(outcomes))
    elif form == "csv":
        _write_csv(outcomes)
    else:
        # Each form is loaded when it is asked for: most calls need one of them.
        from lucid_cli.reporters.difference_json import diff_json  # noqa: PLC0415

        write_document(diff_json(outcomes, exit_code))


def _markdown(outcomes: Sequence[Outcome]) -> str:
    from lucid_cli.reporters.difference_tables import markdown_tables  # noqa: PLC0415 - see _write
    from lucid_cli.reporters.tabular import markdown  # noqa: PLC0415

    return markdown(markdown_tables(outcomes))


def _write_csv(outcomes: Sequence[Outcome]) -> None:
    from lucid_cli.reporters.difference_tables import csv_table  # noqa: PLC0415 - see _write
    from lucid_cli.reporters.tabular import csv_text  # noqa: PLC0415

    write_document(csv_text(csv_table(outcomes)))
    for one in outcomes:
        for result, words in limit_words(one):
            if result.status != "passed":
                warn(f"{one.name}: {result.gate.kind} {words}")
