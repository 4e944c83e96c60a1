"""`python -m lucid_cli.workloads.detection` trains the built-in detector."""

import sys
from types import TracebackType

from lucid_cli.workloads.detection.errors import WorkloadError


def main() -> int:
    """Run the fit that the command line asks for, and return the exit status."""
    sys.excepthook = _without_interrupts
    # Imported here, where an interrupt is quiet already and a package that is missing is one line.
    try:
        import torch  # noqa: PLC0415

        from lucid_cli.workloads.detection.fit import fit  # noqa: PLC0415
        from lucid_cli.workloads.detection.options import parse  # noqa: PLC0415
    except ModuleNotFoundError as error:
        return _fail(f"the built-in fit needs {error.name}: run `{sys.executable} -m pip install {error.name}`")
    try:
        fit(parse(has_cuda=torch.cuda.is_available()))
    except WorkloadError as error:
        return _fail(str(error))
    return 0


def _fail(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)  # noqa: T201
    return 1


def _without_interrupts(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback, but not of Ctrl-C, after which Python ends itself by the signal."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    sys.exit(main())
