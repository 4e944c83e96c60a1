"""`lucid report diff`: what changed between two reports, if they can be compared."""

import click

from lucid_cli import arguments
from lucid_cli.output import warn, write_result
from lucid_cli.reporters.difference import render_difference
from lucid_profiler.compare import diff
from lucid_profiler.reader import Report, read_report

PARITY_FAILED = 4
_HEADER_KEYS = ("method", "command", "primary", "arms", "pairs", "order")

__all__ = ["command"]


@click.command("diff")
@click.argument("a", type=arguments.Report())
@click.argument("b", type=arguments.Report())
@click.option("--allow", multiple=True, metavar="KEY", help="Compare although KEY differs; may be repeated.")
@click.option("--allow-partial", is_flag=True, help="Use a report whose last lines are missing as far as it goes.")
def command(a: str, b: str, *, allow: tuple[str, ...], allow_partial: bool) -> int:
    """Compare what the reports A and B come to, A being the base.

    Differences in what was measured, and where, come first; those that make a comparison meaningless end it with exit
    code 5 unless they are allowed by name.
    """
    if a == b == "-":
        raise click.UsageError("only one of the reports can come from standard input")
    first, second = (read_report(path, allow_partial=allow_partial) for path in (a, b))
    for report in (first, second):
        for warning in report.warnings:
            warn(f"{report.path}: {warning}")
    if allow:
        _check_allowed(allow, first, second)
    difference = diff(first, second, allow=allow)
    write_result(render_difference(difference, first, second))
    failed = "different" in {difference.analysis_a.parity.status, difference.analysis_b.parity.status}
    return PARITY_FAILED if failed else 0


class _Everything(frozenset[str]):
    """Allows every key."""

    def __contains__(self, key: object) -> bool:
        return True


def _check_allowed(allow: tuple[str, ...], first: Report, second: Report) -> None:
    """Refuse a key that names nothing in either report: a slip of the pen would look like a permission.

    Raises:
        UsageError: it names the key, and those that differ.
        NotComparableError: the reports have nothing in common, whatever is allowed.
    """
    differing = [identity.key for identity in diff(first, second, allow=_Everything()).identities]
    known = {*differing, *_keys(first), *_keys(second)}
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
