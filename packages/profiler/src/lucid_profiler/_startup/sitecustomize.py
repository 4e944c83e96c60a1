"""Lets the agent wait in a profiled process, then hands over to the sitecustomize that the program would have had."""  # noqa: INP001 - on sys.path by itself, no package

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - what is imported here no program can replace
_PACKAGE = os.path.dirname(_HERE)  # noqa: PTH120 - as above


def _await_agent() -> None:
    run_dir = os.environ.get("LUCID_RUN_DIR")
    if not run_dir:
        return
    try:
        _load_and_begin(run_dir)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the agent, the program must start unchanged
        path = os.path.join(run_dir, f"agent-{os.getpid()}.error")  # noqa: PTH118 - as above
        try:
            with open(path, "w", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - as above
                file.write(f"{type(error).__name__}: {error}")
        except OSError:
            return


def _load_and_begin(run_dir: str) -> None:
    """Load the one module of lucid's that is there from the start; the package comes in when the program needs it."""
    from _frozen_importlib import module_from_spec  # noqa: PLC0415 - only in a profiled process
    from _frozen_importlib_external import spec_from_file_location  # noqa: PLC0415

    name = "lucid_profiler.awaited"
    path = os.path.join(_PACKAGE, "awaited.py")  # noqa: PTH118 - as above
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    module.begin(run_dir, _PACKAGE)


def _run_next_sitecustomize() -> None:
    """Import the sitecustomize that comes next on the path, if there is one; its errors are the program's own."""
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != _HERE]  # noqa: PTH100
    own = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


_await_agent()
_run_next_sitecustomize()
