"""What a measurement was made with: command, machine, versions. What cannot be read is None."""

import datetime as dt
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["driver", "driver_version", "gpu_header", "processor", "typed_command"]


def _short(found: re.Match[str], folder: Path) -> str:
    path = Path(found[2])
    return (found[1] or "") + (str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name)


def typed_command(arguments: Sequence[str], folder: Path) -> str:
    """Return a command line as it was typed, absolute paths shortened.

    Args:
        arguments: As `sys.orig_argv`.
        folder: Paths below it are shown relative to it, others by their last part.
    """
    tail = [re.sub(r"^(-[^=]*=)?(/.*)$", lambda found: _short(found, folder), text) for text in arguments[1:]]
    return shlex.join(["python", *tail])


def processor() -> str | None:
    """Return the processor's model."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or None


def driver_version(text: str) -> str | None:
    """Return the version in what the NVIDIA driver says of itself, or None where there is none."""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else None


def driver() -> tuple[str | None, str | None]:
    """Return the version of the NVIDIA driver, or None and why it cannot be read."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return None, f"{type(error).__name__}: {error.strerror}"
    version = driver_version(text)
    return version, None if version else "its version file has no version"


def gpu_header(**more: Any) -> dict[str, Any]:
    """Return the first record of a measurement on the current CUDA device, if any, with further facts of its own."""
    import torch  # noqa: PLC0415 - what is above does without

    version, reason = driver()
    return {
        "kind": "header",
        "command": typed_command(sys.orig_argv, Path.cwd()),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "device_model": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": version,
        "driver_reason": reason,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        **more,
    }
