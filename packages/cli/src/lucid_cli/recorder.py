"""The report of an experiment while it is being written: each record goes to the file, and stays for the analysis."""

from dataclasses import replace
from typing import Any, Literal, TypeVar

from lucid_profiler.collect import Observation
from lucid_profiler.compare import analyze_all, counted_runs, pair_record, plain_analysis, planned_slots
from lucid_profiler.reader import Report
from lucid_profiler.records import (
    End,
    Env,
    Header,
    Kernels,
    Located,
    Pair,
    Record,
    Resume,
    Run,
    State,
    Summary,
    identity_digest,
)
from lucid_profiler.writer import Writer

R = TypeVar("R", bound=Record)
Identity = dict[str, Any]

_OF_PLACE = frozenset({"gpu_uuid", "cuda_visible_devices"})
"""Facts that name a device and not its kind: a report may go on on another GPU of the same model."""

__all__ = ["Recorder", "make_env"]


class Recorder:
    """Writes records, and derives those that follow from others: pairs and the summary.

    Args:
        writer: the open report.
        header: its first record, written at once unless the report stands already.
        taken_up: the report that stands in the file, and where it goes on; `continued` says more.

    Raises:
        OSError: the header cannot be written.
    """

    def __init__(self, writer: Writer, header: Header, *, taken_up: tuple[Report, Resume] | None = None) -> None:
        self._writer = writer
        self._header = header
        self._records: list[Record] = []
        self._env_digests: dict[str, str] = {}
        self._first_identities: dict[str, Identity] = {}  # by arm
        if taken_up is None:
            self._write(header)
        else:
            report, resume = taken_up
            self._records += _lasting(report)
            self._env_digests = {env.scope: env.identity_digest for env in report.envs}
            self._first_identities = _first_identities(report)
            self._write(resume)

    @classmethod
    def continued(cls, writer: Writer, report: Report, resume: Resume) -> "Recorder":
        """Take a report up again: what comes next is written behind its records, and derived from all of them.

        Args:
            writer: the report's file, opened behind its last whole record that is neither summary nor end.
            report: what stands in the file; a summary and an end that it had are gone from there and do not count.
            resume: the runs that are still to come, written at once.

        Raises:
            OSError: the record cannot be written.
        """
        return cls(writer, report.header, taken_up=(report, resume))

    def add_host(self, env: Env) -> None:
        """Write the facts of the machine."""
        self._write(env)

    def add_run(self, run: Run, observation: Observation) -> None:
        """Write one run with what was seen of it, and its pair when it completes one.

        Raises:
            OSError: the report cannot be written.
        """
        run = self._with_identity(run, observation.identity)
        self._write(run)
        if observation.identity:
            self._add_env(make_env("process", observation.identity, observation.volatile, run=run.run))
        for state in observation.states:
            self._write(state)
        for samples in observation.samples:
            # Long, and nothing is derived from them.
            self._writer.write(samples)
        both = sorted((one for one in self._all(Run) if one.pair == run.pair), key=self._is_further)
        if len(both) == 2:
            self._write(pair_record(self.report(), *both))

    def add(self, record: Kernels | Located) -> None:
        """Write what a process showed that was never timed.

        Raises:
            OSError: the report cannot be written.
        """
        self._write(record)

    def ending(
        self, status: Literal["complete", "interrupted", "failed"]
    ) -> Literal["complete", "interrupted", "failed"]:
        """Return how the measured runs ended: all of them well is complete, whatever became of others after them."""
        report = self.report()
        missing = {slot.slot for slot in planned_slots(report)} - {run.run for run in report.runs}
        is_whole = not missing and all(run.status == "ok" for run in counted_runs(report))
        return "complete" if is_whole else status

    def finish(self, status: Literal["complete", "interrupted", "failed"]) -> Report:
        """Write summary and end; return the whole report, without its samples.

        Raises:
            OSError: the report cannot be written.
        """
        first, *further = map(plain_analysis, analyze_all(self.report()))
        self._write(Summary(analysis=first, further=tuple(further)))
        self._write(End(status=status, num_records=self._writer.num_records))
        return self.report()

    def report(self) -> Report:
        """Return the report as it stands, without its samples."""
        ends = self._all(End)
        summaries = self._all(Summary)
        return Report(
            path=str(self._writer.path),
            header=self._header,
            envs=self._all(Env),
            runs=self._all(Run),
            states=self._all(State),
            kernels=self._all(Kernels),
            located=self._all(Located),
            pairs=self._all(Pair),
            resumes=self._all(Resume),
            summary=summaries[-1] if summaries else None,
            end=ends[-1] if ends else None,
            complete=bool(ends),
        )

    def _with_identity(self, run: Run, identity: Identity) -> Run:
        """Name the environment of a run, and taint it where the first good run of its arm had another.

        A run that is not ok may have ended before it saw all of its own.
        """
        if not identity:
            return run
        run = replace(run, identity_digest=identity_digest(identity))
        if run.status != "ok":
            return run
        first = self._first_identities.setdefault(run.arm, identity)
        keys = sorted(
            key for key in (first.keys() | identity.keys()) - _OF_PLACE if first.get(key) != identity.get(key)
        )
        if not keys:
            return run
        words = ", ".join(f"{key} {first.get(key)} before, {identity.get(key)} now" for key in keys)
        note = f"it had other versions or flags than the first good run of its arm: {words}"
        return replace(run, taints=(*run.taints, "changed"), notes=(*run.notes, note))

    def _is_further(self, run: Run) -> bool:
        return run.arm != self._header.arms[0].name

    def _add_env(self, env: Env) -> None:
        if self._env_digests.get(env.scope) != env.identity_digest:
            self._env_digests[env.scope] = env.identity_digest
            self._write(env)

    def _write(self, record: Record) -> None:
        self._writer.write(record)
        self._records.append(record)

    def _all(self, kind: type[R]) -> tuple[R, ...]:
        return tuple(record for record in self._records if isinstance(record, kind))


def _lasting(report: Report) -> list[Record]:
    """Return the records of a report that is to go on, samples apart, from which nothing is derived."""
    return [
        report.header,
        *report.envs,
        *report.runs,
        *report.states,
        *report.kernels,
        *report.located,
        *report.pairs,
        *report.resumes,
    ]


def make_env(
    scope: Literal["host", "process"],
    identity: dict[str, object],
    volatile: dict[str, object],
    *,
    run: int | None = None,
) -> Env:
    """Return an env record with the digest of its identity."""
    return Env(
        scope=scope,
        run=run,
        identity=identity,
        volatile=volatile,
        identity_digest=identity_digest(identity),
    )


def _first_identities(report: Report) -> dict[str, Identity]:
    """Return the environment of the first good run of each arm; runs of older files name it only by writing it."""
    envs = [env for env in report.envs if env.scope == "process"]
    named = {env.identity_digest: env.identity for env in envs}
    written = {env.run: env.identity_digest for env in envs}
    found: dict[str, Identity] = {}
    for run in report.runs:
        digest = run.identity_digest or written.get(run.run)
        if run.status == "ok" and digest in named:
            found.setdefault(run.arm, named[digest])
    return found
