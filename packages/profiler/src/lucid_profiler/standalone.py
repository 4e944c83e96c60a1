"""Runs a module of this package in an interpreter that need not have it installed, with nothing else of ours there."""

from pathlib import Path

# Until the version is checked these lines must be Python that an older one understands.
_CODE = """
import sys
if sys.version_info < (3, 10):
    sys.exit("Python %d.%d is older than 3.10" % tuple(sys.version_info[:2]))
sys.path[:] = [entry for entry in sys.path if entry]
import importlib.util, os, runpy
package, name = sys.argv.pop(1), sys.argv.pop(1)
spec = importlib.util.spec_from_file_location(
    "lucid_profiler", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
)
sys.modules["lucid_profiler"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""

__all__ = ["standalone_command"]


def standalone_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package.

    Args:
        python: The interpreter.
        module: Full name of the module, which is run as a script.
        arguments: Its own.
    """
    return [python, "-c", _CODE, str(Path(__file__).parent), module, *arguments]
