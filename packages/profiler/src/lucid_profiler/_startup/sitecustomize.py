"""Starts the agent in a profiled process, then hands over to the sitecustomize that the program would have had."""  # noqa: INP001 - on sys.path by itself, no package

import importlib
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would slow every start


def _load_package() -> None:
    """Make lucid_profiler importable where the program's Python does not have it installed."""
    import importlib.util  # noqa: PLC0415 - only where it is needed

    if importlib.util.find_spec("lucid_profiler") is not None:
        return
    package = os.path.dirname(_HERE)  # noqa: PTH120
    spec = importlib.util.spec_from_file_location(
        "lucid_profiler",
        os.path.join(package, "__init__.py"),  # noqa: PTH118
        submodule_search_locations=[package],
    )
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["lucid_profiler"] = module
        spec.loader.exec_module(module)


def _start_agent() -> None:
    run_dir = os.environ.get("LUCID_RUN_DIR")
    if not run_dir:
        return
    try:
        _load_package()
        from lucid_profiler.agent import start  # noqa: PLC0415 - only in a profiled process

        start(run_dir)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the agent, the program must start unchanged
        path = os.path.join(run_dir, f"agent-{os.getpid()}.error")  # noqa: PTH118
        try:
            with open(path, "w", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                file.write(f"{type(error).__name__}: {error}")
        except OSError:
            return


def _run_next_sitecustomize() -> None:
    """Import the sitecustomize that comes next on the path, if there is one; its errors are the program's own."""
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != _HERE]  # noqa: PTH100
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


_start_agent()
_run_next_sitecustomize()
