"""Where a finished document goes: to standard output as it is, in UTF-8, or to the end of a GitHub step summary."""

import os
import sys

import click

from lucid_cli.output import ending_quietly, warn

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
# https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits
MAX_SUMMARY_BYTES = 1 << 20
_SHORTENED = "\n\nShortened: the summary of a step holds at most 1 MiB.\n"

__all__ = ["MAX_SUMMARY_BYTES", "append_step_summary", "shortened", "summary_path", "write_document"]


def write_document(text: str) -> None:
    """Write a document to standard output byte for byte. A reader that has gone away ends it quietly.

    Raises:
        OSError: standard output cannot be written, for instance because a disk is full.
    """
    if sys.stdout is None:
        return
    with ending_quietly(sys.stdout):
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.buffer.flush()


def summary_path() -> str:
    """Return the file that GitHub shows as the summary of a step; ask before any work is done.

    Raises:
        UsageError: the environment names none.
    """
    path = os.environ.get(SUMMARY_VARIABLE)
    if not path:
        raise click.UsageError(
            f"--step-summary needs {SUMMARY_VARIABLE}, the file that GitHub Actions names; elsewhere use "
            "--format markdown."
        )
    return path


def append_step_summary(path: str, markdown: str) -> None:
    """Append markdown to a step summary in one write; what is there stays, and all of it fits GitHub's limit.

    What does not fit is cut after a whole line and says so; where nothing fits, a warning does.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        before = os.pread(descriptor, 1, size - 1) if size else b"\n"
        lead = ("" if before == b"\n" else "\n") + ("\n" if size else "")
        fitting = shortened(lead + markdown, MAX_SUMMARY_BYTES - size)
        if fitting:
            os.write(descriptor, fitting)
        else:
            warn(f"{path} has no room left: nothing was appended")
    finally:
        os.close(descriptor)


def shortened(markdown: str, max_bytes: int) -> bytes:
    """Return markdown in UTF-8 without the lines at its end that do not fit; empty if not one does."""
    encoded = markdown.encode("utf-8", "replace")
    if len(encoded) <= max_bytes:
        return encoded
    remark = _SHORTENED.encode()
    kept, newline, _ = encoded[: max(max_bytes - len(remark), 0)].rpartition(b"\n")
    return kept + remark if newline and kept.strip() else b""
