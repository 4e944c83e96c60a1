"""Where the runs took place: what the arms set, what changed between runs, and all facts."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lucid_cli.html.markup import Html, details, table, tag
from lucid_cli.html.section import Section
from lucid_cli.reporters.table import environment_words
from lucid_profiler.reader import Report
from lucid_profiler.records import Env

MAX_VALUE_CHARS = 300
MAX_ROWS = 200
Facts = Literal["identity", "volatile"]

__all__ = ["environment_section"]


def environment_section(report: Report) -> Section:
    """Return what differs first, and all facts on demand."""
    parts: list[Html] = [tag("p", environment_words(report)), *_arms(report)]
    changed = _changes(report.envs, "identity")
    parts.append(tag("h3", "What changed between the runs"))
    if changed:
        parts.append(
            table(["fact", "from", "value"], changed, caption="Facts that changed between the runs", num_text=3)
        )
    else:
        parts.append(tag("p", "Nothing that makes results comparable changed from the first run to the last."))
    if moved := _changes(report.envs, "volatile"):
        shown = table(["reading", "from", "value"], moved, caption="Readings that changed between the runs", num_text=3)
        parts += [tag("h3", "Readings that may change"), shown]
    parts.append(details("All facts", _all(report.envs)))
    return Section(ident="environment", title="Environment", parts=parts)


def _arms(report: Report) -> list[Html]:
    names = sorted({name for arm in report.header.arms for name in arm.env})
    if not names:
        return [tag("p", "The arms set no environment variables.")]
    arms = report.header.arms
    rows = [[name, *(_value(arm.env[name]) if name in arm.env else "not set" for arm in arms)] for name in names]
    head = ["variable", *(arm.name for arm in arms)]
    caption = "Environment variables that differ between the arms"
    return [tag("h3", "What the arms set"), table(head, rows, caption=caption, num_text=len(head))]


def _changes(envs: Sequence[Env], facts: Facts) -> list[list[str]]:
    rows = []
    for scope in ("host", "process"):
        of_scope = [env for env in envs if env.scope == scope]
        found: list[Mapping[str, Any]] = [getattr(env, facts) for env in of_scope]
        for name in sorted({name for one in found for name in one}):
            values = [_value(one.get(name)) for one in found]
            if len(set(values)) > 1:
                rows += [[f"{scope}: {name}", _since(env), value] for env, value in zip(of_scope, values, strict=True)]
    return rows[:MAX_ROWS]


def _since(env: Env) -> str:
    return "the start" if env.run is None else f"run {env.run}"


def _all(envs: Sequence[Env]) -> Html:
    rows = [
        [f"{env.scope}: {name}", _since(env), _value(value)]
        for env in envs
        for name, value in sorted({**env.identity, **env.volatile}.items())
    ]
    return table(["fact", "from", "value"], rows[: 2 * MAX_ROWS], caption="All facts", num_text=3)


def _value(value: Any) -> str:
    return "not known" if value is None else str(value)[:MAX_VALUE_CHARS]
