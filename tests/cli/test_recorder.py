from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.reports import MODEL, add_runs, arm_slots, make_arms_header, write_arms
from lucid_cli.recorder import Recorder
from lucid_profiler.compare import analyze_all, plain_analysis, planned_slots, verify_summary
from lucid_profiler.reader import Report, read_report
from lucid_profiler.records import TAINTS, Arm, Resume, link
from lucid_profiler.writer import Writer

ARMS = (Arm(name="a"), Arm(name="b"), Arm(name="c", different=True), Arm(name="again", control=True))
ROUND = [("b", 10.0, 9.0), ("c", 10.1, 8.0), ("again", 10.0, 10.1)]
PAIRS = [(arm, base + step, other - step) for step in (0.00, 0.03, -0.02, 0.01) for arm, base, other in ROUND]
WALLS = [wall for _, *walls in PAIRS for wall in walls]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give a name for a report."""
    return tmp_path / "r.jsonl"


def stopped(path: Path, num_runs: int) -> Report:
    """Write a report whose writer was killed after some runs, and return it as it is read."""
    slots = arm_slots(ARMS, PAIRS)
    with Writer(path, overwrite=True) as writer:
        add_runs(Recorder(writer, make_arms_header(path, ARMS, slots)), slots, WALLS[:num_runs])
    return read_report(path)


def opened(path: Path) -> Writer:
    """Open a file behind its last record."""
    lines = path.read_bytes().splitlines()
    return Writer.append(path, seq=len(lines), prev=link(lines[-1]), num_bytes=path.stat().st_size)


def test_pairs_are_of_the_base_and_one_other_arm(path: Path) -> None:
    """Each has its base run first, whatever the other arm is, and the file holds every comparison."""
    report = write_arms(path, ARMS, PAIRS)
    again = read_report(path, allow_partial=False)
    arms = {run.run: run.arm for run in again.runs}
    assert [tuple(arms[run] for run in pair.runs) for pair in again.pairs] == [("a", arm) for arm, *_ in PAIRS]
    assert verify_summary(again) == []
    assert report.summary is not None
    assert [one["other"] for one in (report.summary.analysis, *report.summary.further)] == ["b", "c", "again"]


def test_a_pair_that_began_with_the_other_arm_has_the_base_first(path: Path) -> None:
    """The order of the runs is not that of the pair's record."""
    slots = arm_slots(ARMS[1::-1], [("a", 9.0, 10.0)])
    with Writer(path) as writer:
        recorder = Recorder(writer, make_arms_header(path, ARMS[:2], slots))
        add_runs(recorder, slots, (9.0, 10.0))
        (pair,) = recorder.report().pairs
    assert pair.runs == (1, 0)


def test_a_resumed_report_is_whole_and_comes_to_the_whole(path: Path) -> None:
    """After nine of 24 runs the rest is planned anew; all pairs count, the run that stands alone does not."""
    before = stopped(path, 9)
    rest = arm_slots(ARMS, PAIRS[4:], slot=24, pair=12)
    with opened(path) as writer:
        recorder = Recorder.continued(writer, before, Resume(block=1, created="", slots=rest))
        add_runs(recorder, rest, WALLS[8:])
        assert recorder.ending("failed") == "complete"
        written = recorder.finish("complete")
    report = read_report(path, allow_partial=False)
    assert (report.runs, report.pairs, report.resumes) == (written.runs, written.pairs, written.resumes)
    assert verify_summary(report) == []
    assert len(planned_slots(report)) == len(report.runs) == 25
    uninterrupted = write_arms(path.with_name("whole.jsonl"), ARMS, PAIRS)
    for got, expected in zip(analyze_all(report), analyze_all(uninterrupted), strict=True):
        assert got.metrics == expected.metrics
        assert got.verdict.decision == expected.verdict.decision
        assert plain_analysis(got)["num_included"] == 4


def test_a_resume_can_stop_again(path: Path) -> None:
    """What is still missing of the last plan keeps the report from being complete, and a third block completes it."""
    before = stopped(path, 9)
    with opened(path) as writer:
        rest = arm_slots(ARMS, PAIRS[4:], slot=24, pair=12)
        recorder = Recorder.continued(writer, before, Resume(block=1, created="", slots=rest))
        add_runs(recorder, rest, WALLS[8:10])
        assert recorder.ending("interrupted") == "interrupted"
    between = read_report(path)
    with opened(path) as writer:
        rest = arm_slots(ARMS, PAIRS[5:], slot=40, pair=20)
        recorder = Recorder.continued(writer, between, Resume(block=2, created="", slots=rest))
        add_runs(recorder, rest, WALLS[10:])
        recorder.finish(recorder.ending("interrupted"))
    report = read_report(path, allow_partial=False)
    assert report.end is not None
    assert report.end.status == "complete"
    assert verify_summary(report) == []


def test_the_environment_is_written_again_only_where_it_changed(path: Path) -> None:
    """A process like those before the resume adds no second record of it."""
    before = stopped(path, 2)
    rest = arm_slots(ARMS, PAIRS[1:], slot=24, pair=12)
    with opened(path) as writer:
        recorder = Recorder.continued(writer, before, Resume(block=1, created="", slots=rest))
        add_runs(recorder, rest, WALLS[2:], states={24: MODEL})
        recorder.finish("complete")
    assert len(read_report(path).envs) == 1


def test_a_run_of_another_environment_than_its_arm_began_with_is_tainted(path: Path) -> None:
    """Also across a resume, and by key; arms may differ from each other, and a device from another of its model."""
    slots = arm_slots(ARMS[:2], [("b", 1.0, 1.0)] * 4)
    same, other = {"torch": "2.9", "num_threads": 1, "gpu_uuid": "x"}, {"torch": "2.9", "num_threads": 4}
    header = replace(make_arms_header(path, ARMS[:2], slots), taints=TAINTS)
    header = replace(header, slots=slots[:4])
    with Writer(path) as writer:
        add_runs(Recorder(writer, header), slots[:4], WALLS, identities=[same, other, same, other])
    before = read_report(path)
    assert [run.taints for run in before.runs] == [()] * 4
    with opened(path) as writer:
        recorder = Recorder.continued(writer, before, Resume(block=1, created="", slots=slots[4:]))
        add_runs(
            recorder, slots[4:], WALLS, identities=[{**same, "gpu_uuid": "y"}, other, {**same, "torch": "2.8"}, {}]
        )
        recorder.finish("complete")
    report = read_report(path)
    assert [run.taints for run in report.runs] == [()] * 6 + [("changed",), ()]
    assert report.runs[6].notes == (
        "it had other versions or flags than the first good run of its arm: torch 2.9 before, 2.8 now",
    )
    assert [pair.included for pair in report.pairs] == [True, True, True, False]
    assert verify_summary(report) == []


FOUR = arm_slots(ARMS[:2], [("b", 1.0, 1.0)] * 4)
REST = arm_slots(ARMS[:2], [("b", 1.0, 1.0)] * 2, slot=8, pair=4)


def _resumed_taints(
    path: Path, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[tuple[str, ...]]:
    """Return the taints of the runs after a resume, where the last run before it was interrupted."""
    header = replace(make_arms_header(path, ARMS[:2], FOUR), taints=TAINTS)
    with Writer(path) as writer:
        slots, recorder = FOUR[: len(before)], Recorder(writer, header)
        add_runs(recorder, slots, WALLS, identities=before, statuses={len(before) - 1: "interrupted"})
    with opened(path) as writer:
        recorder = Recorder.continued(writer, read_report(path), Resume(block=1, created="", slots=REST))
        add_runs(recorder, REST, WALLS, identities=after)
    return [run.taints for run in read_report(path).runs[len(before) :]]


def test_an_arm_whose_first_run_saw_nothing_begins_with_its_next(path: Path) -> None:
    """A run that was ended before its agent wrote did not have the environment of the other arm."""
    a: dict[str, Any] = {"cublas_workspace_config": ":4096:8"}
    b: dict[str, Any] = {"cublas_workspace_config": None}
    assert _resumed_taints(path, [a, {}], [a, b, a, b]) == [()] * 4


def test_a_run_that_was_interrupted_is_no_measure_for_others(path: Path) -> None:
    """It may have ended before it loaded torch."""
    half, whole = {"python": "3.11"}, {"python": "3.11", "torch": "2.9"}
    assert _resumed_taints(path, [half], [whole] * 4) == [()] * 4


def test_a_run_that_failed_is_no_measure_for_others(path: Path) -> None:
    """Nor are the others for it."""
    half, whole = {"python": "3.11"}, {"python": "3.11", "torch": "2.9"}
    with Writer(path) as writer:
        recorder = Recorder(writer, make_arms_header(path, ARMS[:2], FOUR))
        identities = [half, whole, whole, whole, half, whole, whole, whole]
        add_runs(recorder, FOUR, WALLS, identities=identities, statuses={0: "failed", 4: "failed"})
        report = recorder.report()
    assert [run.taints for run in report.runs] == [()] * 8
    assert [pair.flags for pair in report.pairs] == [("failed:0",), (), ("failed:4",), ()]


def test_a_run_of_an_older_file_has_the_environment_that_it_wrote(path: Path) -> None:
    """Its runs do not name theirs; what another run wrote is not taken for it."""
    with Writer(path) as writer:
        add_runs(Recorder(writer, make_arms_header(path, ARMS[:2], FOUR)), FOUR[:4], WALLS)
    report = read_report(path)
    older = replace(report, runs=tuple(replace(run, identity_digest="") for run in report.runs))
    with opened(path) as writer:
        recorder = Recorder.continued(writer, older, Resume(block=1, created="", slots=REST))
        add_runs(recorder, REST, WALLS, identities=[{"torch": "2.8", "python": "3.11.7"}] * 4)
    assert [run.taints for run in read_report(path).runs] == [()] * 4 + [("changed",), ()] * 2


def test_each_run_names_its_environment(path: Path) -> None:
    """Also where it stands with an earlier run; one that saw nothing names none."""
    a, b = {"num_threads": 1}, {"num_threads": 4}
    with Writer(path) as writer:
        recorder = Recorder(writer, make_arms_header(path, ARMS[:2], FOUR))
        add_runs(recorder, FOUR[:4], WALLS, identities=[a, a, {}, b])
    report = read_report(path)
    assert [env.run for env in report.envs] == [0, 3]
    first, last = (env.identity_digest for env in report.envs)
    assert [run.identity_digest for run in report.runs] == [first, first, "", last]
