"""What this process may know of others: the permissions of /proc, and in which namespace it lives."""

import os
from pathlib import Path

from lucid_profiler.checkup.files import read_text, reason_of
from lucid_profiler.checkup.finding import Finding, Level, unknown

__all__ = ["look_at_processes"]

_HOST_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of Linux: the namespace that is no container's."""
_FILES = ("stat", "status", "io", "smaps_rollup")
_VISIBLE = frozenset({"0", "off"})


def look_at_processes(root: Path = Path("/")) -> list[Finding]:
    """Return the findings about /proc and the namespace of process numbers.

    Args:
        root: Where /proc is.
    """
    return [_access(root), _namespace(root)]


def _access(root: Path) -> Finding:
    own = root / "proc/self"
    refused = {name: read.reason for name in _FILES if (read := read_text(own / name)).text is None}
    if len(refused) == len(_FILES):
        reason = refused["stat"]
        return unknown("proc_access", reason or "unreadable", "/proc cannot be read", level="warning")
    hidden = _hidepid(root)
    value = {"refused": sorted(refused), "hidepid": hidden}
    words = "the files of one's own processes can be read"
    words += f" but for {', '.join(sorted(refused))}" if refused else ""
    words += f"; other users' processes are hidden (hidepid={hidden})" if hidden else ""
    level: Level = "warning" if refused or hidden else "ok"
    return Finding(code="proc_access", level=level, found=words, value=value)


def _hidepid(root: Path) -> str | None:
    """Return how /proc was mounted to hide the processes of other users; None where it was not."""
    # Of several mounts on one place the last one is seen.
    for line in reversed((read_text(root / "proc/self/mountinfo").text or "").splitlines()):
        place, _, rest = line.partition(" - ")
        words, kind = place.split(), rest.split()
        if len(words) > 4 and words[4] == "/proc" and kind[:1] == ["proc"]:
            options = dict(option.partition("=")[::2] for option in kind[-1].split(","))
            hidden = options.get("hidepid")
            return None if hidden in _VISIBLE else hidden
    return None


def _namespace(root: Path) -> Finding:
    try:
        name = os.readlink(root / "proc/self/ns/pid")  # noqa: PTH115 - such links name no path
    except OSError as error:
        return unknown("pid_namespace", reason_of(error), "the system does not tell the namespace")
    is_host = name == _HOST_PID_NAMESPACE
    words = "the host's own" if is_host else "a container's own"
    return Finding(code="pid_namespace", level="ok" if is_host else "note", found=f"{words}, {name}", value=name)
