"""`python -m lucid_cli.workloads.detection` trains the built-in detector."""

import sys

import torch

from lucid_cli.workloads.detection.errors import WorkloadError
from lucid_cli.workloads.detection.fit import fit
from lucid_cli.workloads.detection.options import parse


def main() -> int:
    """Run the fit that the command line asks for, and return the exit status."""
    options = parse(has_cuda=torch.cuda.is_available())
    try:
        fit(options)
    except WorkloadError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
