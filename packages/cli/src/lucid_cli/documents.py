"""Where a finished document goes: to standard output as it is, in UTF-8, or to the end of a GitHub step summary."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from lucid_cli.output import ending_quietly, warn, write_whole
from lucid_cli.special_files import unwritable_kind

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
        write_whole(sys.stdout.buffer, text.encode("utf-8", "replace"))
        sys.stdout.buffer.flush()


def summary_path() -> str:
    """Return the file that GitHub shows as the summary of a step; ask before any work is done.

    Raises:
        UsageError: the environment names none, or what cannot be one.
    """
    path = os.environ.get(SUMMARY_VARIABLE)
    if not path:
        raise click.UsageError(
            f"--step-summary needs {SUMMARY_VARIABLE}, the file that GitHub Actions names; elsewhere use "
            "--format markdown."
        )
    if (kind := unwritable_kind(path)) is not None:
        raise click.UsageError(f"--step-summary: {path} is {kind}; let {SUMMARY_VARIABLE} name a file")
    return path


def append_step_summary(path: str, markdown: str) -> None:
    """Append markdown to a step summary, whole or not at all; what is there stays, and all of it fits GitHub's limit.

    What does not fit is cut after a whole line and says so; where nothing fits, a warning does.

    Raises:
        OSError: the file cannot be written; it names the file.
    """
    try:
        # Of a device or a pipe nothing can be read, and reading too would keep a pipe open whose reader has gone.
        mode = os.O_WRONLY if Path(path).exists() and not Path(path).is_file() else os.O_RDWR
        descriptor = os.open(path, mode | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if not _append(descriptor, markdown):
                warn(f"{path} has no room left: nothing was appended")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _append(descriptor: int, markdown: str) -> bool:
    """Append what fits; return whether anything does. Where that fails the file is as it was."""
    size = os.fstat(descriptor).st_size
    before = os.pread(descriptor, 1, size - 1) if size else b"\n"
    lead = ("" if before == b"\n" else "\n") + ("\n" if size else "")
    rest = memoryview(shortened(lead + markdown, MAX_SUMMARY_BYTES - size))
    fits = bool(rest)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with suppress(OSError):  # what is no file is not cut
            os.ftruncate(descriptor, size)
        raise
    return fits


def shortened(markdown: str, max_bytes: int) -> bytes:
    """Return markdown in UTF-8 without the lines at its end that do not fit; empty if not one does."""
    encoded = markdown.encode("utf-8", "replace")
    if len(encoded) <= max_bytes:
        return encoded
    remark = _SHORTENED.encode()
    kept, newline, _ = encoded[: max(max_bytes - len(remark), 0)].rpartition(b"\n")
    return kept + remark if newline and kept.strip() else b""
