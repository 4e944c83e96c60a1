import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import lucid_profiler


class _Untouchable:
    """Fails whatever is done with it."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


def test_outside_lucid_the_functions_leave_their_arguments_alone() -> None:
    """No attribute of a state is read, and nothing is returned."""
    with lucid_profiler.fit():
        lucid_profiler.mark("train")
        lucid_profiler.loss(_Untouchable())
    lucid_profiler.state("model", _Untouchable())


def test_outside_lucid_fit_may_be_nested_and_passes_exceptions_on() -> None:
    """The interval is a context manager without effect."""
    with lucid_profiler.fit() as value, lucid_profiler.fit():
        assert value is None
    assert isinstance(lucid_profiler.fit(), nullcontext)


def test_importing_the_package_loads_nothing_heavy_and_starts_no_agent() -> None:
    """`import lucid_profiler` brings in neither torch nor its dependencies, nor the agent."""
    script = (
        "import sys; before = set(sys.meta_path); import lucid_profiler; "
        "heavy = {'torch', 'orjson', 'psutil', 'pynvml', 'numpy', 'lucid_profiler.agent', 'lucid_profiler.hooks'}; "
        "print(sorted(heavy & set(sys.modules)), set(sys.meta_path) == before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] True"
