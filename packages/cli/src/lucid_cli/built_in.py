"""The command that is measured where the user gives none, and what it needs to be installed."""

import sys
from importlib.util import find_spec

from lucid_profiler.errors import EnvironmentUnusableError

REQUIREMENTS = {"torch": "torch", "sklearn": "scikit-learn", "numpy": "numpy", "scipy": "scipy"}
"""By the name that is imported, the name that is installed; scikit-learn does not import without the last two."""

__all__ = ["REQUIREMENTS", "built_in_command"]


def built_in_command() -> tuple[str, ...]:
    """Return the command of the built-in fit, under the interpreter that runs lucid.

    Raises:
        EnvironmentUnusableError: a package that it needs is not installed.
    """
    missing = [package for module, package in REQUIREMENTS.items() if find_spec(module) is None]
    if missing:
        raise EnvironmentUnusableError(
            f"the built-in fit needs {' and '.join(missing)}: run `{sys.executable} -m pip install "
            f"{' '.join(missing)}`, or give a command of your own: lucid profile run -- COMMAND [ARGS]..."
        )
    return (sys.executable, "-m", "lucid_cli.workloads.detection")
