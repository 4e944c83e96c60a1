"""The one error of the workload: what a user can put right."""

from lucid_profiler.errors import LucidError

__all__ = ["WorkloadError"]


class WorkloadError(LucidError):
    """Settings, files or packages that a fit cannot run with; the message says what is wrong and what to do."""
