"""The arms of an experiment as they are typed: NAME, or NAME:KEY=VALUE,…; pure."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from lucid_cli.experiment import ARMS, CONTROL, control_arm
from lucid_cli.untimed import UNTIMED_VARIABLES
from lucid_profiler.records import Arm

_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_COMMA = re.compile(r"(?<!\\),")
_OWN = UNTIMED_VARIABLES | {"LUCID_PROFILE_ARM", "LUCID_RUN_DIR"}

__all__ = ["parse_arm", "plan_arms"]


def parse_arm(text: str) -> Arm:
    r"""Return the arm that `NAME:KEY=VALUE,…` describes; in a value `\,` is a comma.

    Raises:
        ValueError: it describes none; the message says why.
    """
    name, colon, rest = text.partition(":")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an arm: letters, digits, '.', '_' and '-' make one")
    env: dict[str, str] = {}
    for entry in _COMMA.split(rest) if colon else ():
        key, equals, value = entry.replace("\\,", ",").partition("=")
        if not equals or not _KEY.fullmatch(key):
            raise ValueError(f"{entry!r} is no KEY=VALUE; a comma inside a value is typed \\,")
        if key in env:
            raise ValueError(f"{key} is set twice")
        if key in _OWN:
            raise ValueError(f"{key} is set by lucid itself; leave it out")
        env[key] = value
    return Arm(name=name, env=env)


def plan_arms(typed: Sequence[Arm], *, different: Collection[str], with_control: bool) -> tuple[Arm, ...]:
    """Return the arms of an experiment, the base first and its control last.

    Args:
        typed: what `--arm` gave; native and captured where there is nothing.
        different: names of the arms that compute something else.
        with_control: whether the base is also measured against itself.

    Raises:
        ValueError: the options contradict each other; the message says what to do.
    """
    arms = tuple(typed) or ARMS
    names = [arm.name for arm in arms]
    if len(arms) < 2:
        raise ValueError(f"--arm {names[0]}: one arm is compared with nothing; add another --arm")
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ValueError(f"--arm {twice[0]}: there are two arms of that name; rename one")
    if with_control and CONTROL in names:
        raise ValueError(f"--arm {CONTROL}: with --control the base has that name too; rename the arm")
    if unknown := sorted(set(different) - set(names)):
        raise ValueError(f"--different {unknown[0]}: there is no such arm; the arms are {', '.join(names)}")
    if names[0] in different:
        raise ValueError(f"--different {names[0]}: that is the base; name an arm that is compared with it")
    told = tuple(replace(arm, different=True) if arm.name in different else arm for arm in arms)
    return (*told, control_arm(told[0])) if with_control else told
