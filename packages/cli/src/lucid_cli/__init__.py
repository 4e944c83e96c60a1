"""The `lucid` command; importing this package loads nothing else, so that Ctrl-C is quiet from the beginning."""

import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from lucid_cli.app import cli

__all__ = ["__version__", "cli", "main"]
__version__ = "0.1.0"

_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Wherever it comes, also while modules are imported. A command with something to clear up catches it itself.
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    gc.disable()  # what imports make stays; a command that was found has it enabled again
    from lucid_cli import app, output  # noqa: PLC0415 - they take a third of a second

    exit_code = app.run(sys.argv[1:])
    output.flush()
    sys.exit(exit_code)


def __getattr__(name: str) -> Any:
    if name == "cli":
        from lucid_cli.app import cli  # noqa: PLC0415 - see main

        return cli
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
