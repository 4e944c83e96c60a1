"""What `--dry-run` prints: the runs in their order, what each arm sets, and how long it will take; no side effects."""

import shlex
from collections.abc import Mapping, Sequence

from lucid_cli.orchestrate import child_env
from lucid_cli.plan import Plan
from lucid_cli.progress import duration
from lucid_cli.reporters.words import counted
from lucid_profiler.records import Arm, Header, Slot

__all__ = ["render_plan"]


def render_plan(plan: Plan, header: Header, *, environ: Mapping[str, str], run_s: float | None) -> str:
    """Return the plan in words, one line a run.

    Args:
        plan: what would be run.
        header: what the report would say of it.
        environ: lucid's own environment.
        run_s: how long a run is expected to take, None if that is not known.
    """
    lines = [f"{counted(len(plan.slots), 'run')}, nothing of it started, nothing written", ""]
    lines += [f"order     {_order(header)}"]
    lines += [f"rule      {rule}" for rule in header.rules]
    lines += [f"time      {_time(plan, run_s)}", ""]
    for arm in plan.arms:
        lines += _arm_lines(plan, arm, environ)
    lines += ["", "slot  pair  arm", *(_slot_line(slot) for slot in plan.slots)]
    return "\n".join(lines) + "\n"


def _order(header: Header) -> str:
    return header.order if header.seed is None else f"{header.order}, seed {header.seed}"


def _time(plan: Plan, run_s: float | None) -> str:
    num, pauses_s = len(plan.slots), plan.cool_down_s * max(0, len(plan.slots) - 1)
    pauses = f", pauses of {duration(pauses_s)} in it" if pauses_s else ""
    if run_s is not None:
        return f"about {duration(num * run_s + pauses_s)}: {num} times {duration(run_s)}{pauses}"
    if plan.timeout_s is not None:
        return f"at most {duration(num * plan.timeout_s + pauses_s)}: {num} times the limit of --timeout{pauses}"
    known = f"; pauses alone take {duration(pauses_s)}" if pauses_s else ""
    return f"not known; --expect-seconds says how long one run takes{known}"


def _arm_lines(plan: Plan, arm: Arm, environ: Mapping[str, str]) -> list[str]:
    if arm.control:
        return [f"arm       {arm.name}: {plan.arms[0].name} once more"]
    note = ", not the same computation: parity is not asked" if arm.different else ""
    lines = [f"arm       {arm.name}{note}", f"          $ {_shown(plan.command_of(arm))}"]
    env = child_env(environ, arm, None)
    changed = {key: value for key, value in env.items() if environ.get(key) != value}
    lines += [f"          {key}={_quoted(value)}" for key, value in sorted(changed.items())]
    lines += [f"          {key} is unset" for key in sorted(environ.keys() - env.keys())]
    if plan.sampling.with_agent:
        lines.append("          LUCID_RUN_DIR and an entry at the front of PYTHONPATH, for the agent")
    return lines


def _slot_line(slot: Slot) -> str:
    return f"{slot.slot:4d}  {slot.pair:4d}  {slot.arm}{'  (discarded)' if slot.discarded else ''}"


def _shown(command: Sequence[str]) -> str:
    return " ".join(_quoted(word) for word in command)


def _quoted(word: str) -> str:
    return shlex.quote(word.encode("utf-8", "backslashreplace").decode())
