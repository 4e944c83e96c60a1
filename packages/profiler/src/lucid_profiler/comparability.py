"""Whether two reports measure the same thing: what of their circumstances differs, and what of that forbids comparing.

Circumstances are the header's plan, the identities of its environments, the settings that a script handed over and the
digest of its data, and where the walls come from. Readings that change from minute to minute are in none of them.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lucid_profiler import jsonio
from lucid_profiler.pairing import included_pairs
from lucid_profiler.reader import Report
from lucid_profiler.records import Arm, Wall

__all__ = [
    "DATA_PART",
    "SETTINGS_PART",
    "IdentityDifference",
    "described",
    "identity_differences",
    "lost_metric",
    "value_words",
]

SETTINGS_PART = "settings"
"""The part of the state as which a script says what it was told; its values are compared one by one."""
DATA_PART = "data"
"""The part as which a script hands over what it was trained on; its digest is compared."""
# What changes neither the meaning nor, as a rule, the size of an effect: worth showing, not worth refusing.
_NOTED = frozenset(
    {
        *("controls", "pairs", "order", "rules", "taints"),
        *("gpu_uuid", "cuda_visible_devices", "num_cpus", "num_usable_cpus", "memory_total_bytes"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityDifference:
    """One thing that is not the same in both reports."""

    key: str
    """The name by which it can be allowed."""
    a: tuple[Any, ...]
    """Its values in the first report; empty if it was not recorded."""
    b: tuple[Any, ...]
    tier: Literal["fatal", "allowed", "noted"]


def identity_differences(a: Report, b: Report, allow: Collection[str]) -> list[IdentityDifference]:
    """Return what differs between two reports, in the order in which it is recorded."""
    identity_a, identity_b = _identity(a), _identity(b)
    # A unit is compared where both have the metric; a metric that one lacks is told apart from it.
    keys = [
        key
        for key in {**identity_a, **identity_b}
        if not key.startswith("unit:") or (key in identity_a and key in identity_b)
    ]
    both = [_tiered(key, identity_a.get(key, ()), identity_b.get(key, ()), allow=allow) for key in keys]
    return [found for found in both if jsonio.dumps(found.a) != jsonio.dumps(found.b)]


def lost_metric(name: str, allow: Collection[str]) -> IdentityDifference:
    """Return that a metric of the first report has no value in the second."""
    return _tiered(f"metric:{name}", (name,), (), allow=allow)


def described(difference: IdentityDifference) -> str:
    """Return a difference in words."""
    if difference.key.startswith("metric:"):
        return f"{difference.key} has values in the first report and none in the second"
    a, b = (
        " and ".join(value_words(difference.key, value) for value in values) or "not recorded"
        for values in (difference.a, difference.b)
    )
    return f"{difference.key} is {a} in the first report and {b} in the second"


def value_words(key: str, value: Any) -> str:
    """Return one value of a circumstance as text: arms by their names, with what makes them one."""
    if key == "controls":
        return ", ".join(map(_control_words, value)) or "none"
    if key == "arms":
        return ", ".join(f"{'base ' if not place else ''}{_arm_words(arm)}" for place, arm in enumerate(value))
    if key in {"rules", "taints"}:
        return "; ".join(value) or "none"
    return "unknown" if value is None else str(value)


def _control_words(control: dict[str, Any]) -> str:
    num = control["pairs"]
    return f"{_arm_words(control)}, {num} pair{'' if num == 1 else 's'}"


def _arm_words(arm: dict[str, Any]) -> str:
    about = [*(["different"] if arm["different"] else []), *(f"{name}={value}" for name, value in arm["env"].items())]
    return f"{arm['name']} ({', '.join(about)})" if about else arm["name"]


def _tiered(key: str, a: tuple[Any, ...], b: tuple[Any, ...], *, allow: Collection[str]) -> IdentityDifference:
    tier: Literal["fatal", "allowed", "noted"] = "noted" if key in _NOTED else "allowed" if key in allow else "fatal"
    return IdentityDifference(key=key, a=a, b=b, tier=tier)


def _identity(report: Report) -> dict[str, tuple[Any, ...]]:
    """Return everything that should be the same in another report, by key: all values that occur, each once."""
    values: dict[str, dict[bytes, Any]] = {}
    for key, value in _facts(report):
        values.setdefault(key, {})[jsonio.dumps(value)] = value
    return {key: tuple(found[line] for line in sorted(found)) for key, found in values.items()}


def _facts(report: Report) -> Iterator[tuple[str, Any]]:
    header = report.header
    yield "schema", _major(header.schema)
    yield "method", header.method
    yield "command", list(header.command)
    yield "primary", header.primary
    yield "arms", _arms(report)
    yield "controls", _controls(report)
    yield "alpha", header.alpha
    yield "rules", list(header.rules)
    yield "taints", sorted(header.taints)
    yield "pairs", header.pairs
    yield "order", header.order
    for wall in _walls(report):
        yield "wall_source", wall.source
    for run in report.runs:
        for name, metric in run.metrics.items():
            yield f"unit:{name}", [metric.unit, metric.better]
    for env in report.envs:
        yield from ((key, _identity_value(key, value)) for key, value in env.identity.items())
    for state in report.states:
        if state.part == SETTINGS_PART:
            yield from ((f"{SETTINGS_PART}.{name}", value) for name, value in state.values.items())
        elif state.part == DATA_PART:
            yield DATA_PART, state.digest


def _walls(report: Report) -> Iterator[Wall]:
    """Yield the walls of the runs that the statistics use; another interval of the same work is another quantity."""
    for arm in report.header.arms[1:]:
        yield from (run.wall for pair in included_pairs(report, arm.name) for run in pair if run.wall is not None)


def _identity_value(key: str, value: Any) -> Any:
    """Return a card's UUID in one form: the driver writes `GPU-` before it, torch does not."""
    is_uuid = key == "gpu_uuid" and isinstance(value, str)
    return ", ".join(one.removeprefix("GPU-") for one in value.split(", ")) if is_uuid else value


def _arms(report: Report) -> list[dict[str, Any]]:
    """Return what is measured: the base, then the others by their names, for their order is that of the runs alone."""
    others = [arm for arm in report.header.arms[1:] if not arm.control]
    return [_arm(arm) for arm in (*report.header.arms[:1], *sorted(others, key=lambda arm: arm.name))]


def _controls(report: Report) -> list[dict[str, Any]]:
    """Return what tells of the machine alone: the arms that repeat the base, and in how many planned pairs."""
    slots = [slot for slot in report.header.slots if not slot.discarded]
    return [
        {**_arm(arm), "pairs": len({slot.pair for slot in slots if slot.arm == arm.name})}
        for arm in sorted(report.header.arms[1:], key=lambda arm: arm.name)
        if arm.control
    ]


def _arm(arm: Arm) -> dict[str, Any]:
    return {"name": arm.name, "env": dict(arm.env), "different": arm.different, "control": arm.control}


def _major(schema: str) -> str:
    """Return a schema without its minor version, which readers may ignore."""
    return schema.rpartition(".")[0]
