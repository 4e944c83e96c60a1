"""How the runs of a report are made, as far as its header does not say it: kept with the facts of the machine."""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from lucid_cli.command import resolve_program
from lucid_cli.idle import target_devices
from lucid_cli.plan import Plan
from lucid_profiler.codec import from_plain
from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.records import Env

KEY = "settings"
TERMINAL = "terminal"
_BLOCK_BYTES = 1 << 20

__all__ = ["KEY", "TERMINAL", "Settings", "programs", "settings_of", "stdin_digest", "working_directory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a resume has to know.

    Attributes:
        directory: where the command is run.
        programs: by arm, the program that it runs.
        has_places: whether `{arm}` in the command stands for the name of the arm.
        stdin: digest of what the command reads, `terminal` for a terminal, None for nothing.
        gpu_uuids: devices that the command may use.
        gpu_names: their models.
        interval_s, with_nvml, with_agent, timeout_s, keep_going, num_kernel_steps, saved_pair, locate: as in a `Plan`.
    """

    directory: str
    programs: dict[str, str]
    has_places: bool = False
    stdin: str | None = None
    gpu_uuids: tuple[str, ...] = ()
    gpu_names: tuple[str, ...] = ()
    interval_s: float = 0.1
    with_nvml: bool = True
    with_agent: bool = True
    timeout_s: float | None = None
    keep_going: bool = False
    num_kernel_steps: int = 0
    saved_pair: int | None = None
    locate: bool = False

    @classmethod
    def of(cls, plan: Plan, environ: Mapping[str, str]) -> "Settings":
        """Return the settings of a plan that is run here and now.

        Raises:
            CannotStartError: a program is not there.
            EnvironmentUnusableError: there is no working directory.
        """
        devices = target_devices(environ) if plan.sampling.with_nvml else ()
        return cls(
            directory=working_directory(),
            programs=programs(plan, environ),
            has_places=plan.has_places,
            stdin=stdin_digest(plan.stdin),
            gpu_uuids=tuple(device.uuid for device in devices),
            gpu_names=tuple(device.name or "unknown" for device in devices),
            interval_s=plan.sampling.interval_s,
            with_nvml=plan.sampling.with_nvml,
            with_agent=plan.sampling.with_agent,
            timeout_s=plan.timeout_s,
            keep_going=plan.keep_going,
            num_kernel_steps=plan.num_kernel_steps,
            saved_pair=plan.saved_pair,
            locate=plan.locate,
        )


def working_directory() -> str:
    """Return the directory in which lucid was started and each command is run.

    Raises:
        EnvironmentUnusableError: it has been deleted, or cannot be reached.
    """
    try:
        return os.getcwd()  # noqa: PTH109 - text, as it is kept
    except FileNotFoundError as error:
        raise EnvironmentUnusableError(
            "the working directory has been deleted; change to one that exists (cd), and start lucid there"
        ) from error
    except OSError as error:
        raise EnvironmentUnusableError(
            f"the working directory cannot be reached ({error.strerror}); change to another (cd), and start lucid there"
        ) from error


def settings_of(host: Env) -> Settings | None:
    """Return the settings that the facts of a machine hold; None where they hold none that can be read."""
    found = host.volatile.get(KEY)
    if not isinstance(found, dict):
        return None
    try:
        return from_plain(Settings, found, Counter())
    except ValueError:
        return None


def programs(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return by arm the path of the program that its runs start; a control's are the base's.

    Raises:
        CannotStartError: one is not there.
    """
    return {
        arm.name: resolve_program(plan.command_of(arm), {**environ, **arm.env}) for arm in plan.arms if not arm.control
    }


def stdin_digest(stdin: IO[bytes] | None) -> str | None:
    """Return what tells the content of a standard input from another's."""
    if stdin is None:
        return None
    if stdin.isatty():
        return TERMINAL
    digest = hashlib.sha256()
    stdin.seek(0)
    while block := stdin.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()
