"""The report of an experiment while it is being written: each record goes to the file, and stays for the analysis."""

from dataclasses import asdict
from typing import Literal, TypeVar

from lucid_profiler.collect import Observation
from lucid_profiler.compare import analyze, pair_record
from lucid_profiler.reader import Report
from lucid_profiler.records import (
    End,
    Env,
    Header,
    Kernels,
    Located,
    Pair,
    Record,
    Run,
    State,
    Summary,
    identity_digest,
)
from lucid_profiler.writer import Writer

R = TypeVar("R", bound=Record)

__all__ = ["Recorder", "make_env"]


class Recorder:
    """Writes records, and derives those that follow from others: pairs and the summary.

    Args:
        writer: the open report.
        header: its first record, written at once.

    Raises:
        OSError: the header cannot be written.
    """

    def __init__(self, writer: Writer, header: Header) -> None:
        self._writer = writer
        self._header = header
        self._records: list[Record] = []
        self._env_digests: dict[str, str] = {}
        self._write(header)

    def add_host(self, env: Env) -> None:
        """Write the facts of the machine."""
        self._write(env)

    def add_run(self, run: Run, observation: Observation) -> None:
        """Write one run with what was seen of it, and its pair when it completes one.

        Raises:
            OSError: the report cannot be written.
        """
        self._write(run)
        if observation.identity:
            self._add_env(make_env("process", observation.identity, observation.volatile, run=run.run))
        for state in observation.states:
            self._write(state)
        for samples in observation.samples:
            # Long, and nothing is derived from them.
            self._writer.write(samples)
        runs = {other.arm: other for other in self._all(Run) if other.pair == run.pair}
        base, other = (runs.get(arm.name) for arm in self._header.arms)
        if base is not None and other is not None:
            self._write(pair_record(self.report(), base, other))

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
        runs = self._all(Run)
        is_whole = len(runs) == len(self._header.slots) and all(run.status == "ok" for run in runs)
        return "complete" if is_whole else status

    def finish(self, status: Literal["complete", "interrupted", "failed"]) -> Report:
        """Write summary and end; return the whole report, without its samples.

        Raises:
            OSError: the report cannot be written.
        """
        self._write(Summary(analysis=asdict(analyze(self.report()))))
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
            summary=summaries[-1] if summaries else None,
            end=ends[-1] if ends else None,
            complete=bool(ends),
        )

    def _add_env(self, env: Env) -> None:
        if self._env_digests.get(env.scope) != env.identity_digest:
            self._env_digests[env.scope] = env.identity_digest
            self._write(env)

    def _write(self, record: Record) -> None:
        self._writer.write(record)
        self._records.append(record)

    def _all(self, kind: type[R]) -> tuple[R, ...]:
        return tuple(record for record in self._records if isinstance(record, kind))


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
