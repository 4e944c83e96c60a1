from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from lucid_profiler.blocks import blocks, counted_runs, planned_slots, unpaired_runs
from lucid_profiler.compare import analyze, pair_record, verify_summary
from lucid_profiler.reader import Report
from lucid_profiler.records import End, Header, Resume, Run, Slot, State

ARMS = ("native", "captured")
Build = Callable[..., Report]
Status = Literal["complete", "interrupted", "failed"]


def slots_from(slot: int, pair: int, num_pairs: int) -> tuple[Slot, ...]:
    """Return the slots of pairs numbered on from the first ones given."""
    return tuple(
        Slot(slot=slot + 2 * index + side, pair=pair + index, arm=ARMS[side])
        for index in range(num_pairs)
        for side in (0, 1)
    )


HEADER_SLOTS = slots_from(0, 0, 4)
# Stopped after three runs: one pair is whole, the first run of the second stands alone.
FIRST = Resume(block=1, created="2026-01-03T00:00:00Z", slots=slots_from(8, 4, 3))
# Stopped again after one pair.
SECOND = Resume(block=2, created="2026-01-04T00:00:00Z", slots=slots_from(14, 7, 2), same_devices=False)


@pytest.fixture
def build(make_header: Callable[..., Header], make_run: Callable[..., Run], make_state: Callable[..., State]) -> Build:
    """Give a function that makes a report of the runs of these numbers, with a pair record where both are there."""

    def build_report(
        numbers: Sequence[int],
        resumes: tuple[Resume, ...] = (),
        *,
        runs: Mapping[int, Mapping[str, Any]] | None = None,
        states: Mapping[int, Any] | None = None,
        end: Status | None = None,
    ) -> Report:
        slots = {slot.slot: slot for slot in (*HEADER_SLOTS, *(slot for one in resumes for slot in one.slots))}
        made = [
            make_run(number, pair=slots[number].pair, seconds=1.0 - 0.1 * (number % 2) + 0.001 * number)
            for number in numbers
        ]
        made = [replace(run, **(runs or {}).get(run.run, {})) for run in made]
        values = {run.run: (states or {}).get(run.run, 1.0) for run in made}
        report = Report(
            path="a.jsonl",
            header=make_header(pairs=4, slots=HEADER_SLOTS),
            runs=tuple(made),
            states=tuple(make_state(number, value) for number, value in values.items() if value is not None),
            resumes=resumes,
            end=End(status=end, num_records=1) if end else None,
        )
        both = {run.pair: [one for one in made if one.pair == run.pair] for run in made}
        return replace(report, pairs=tuple(pair_record(report, *pair) for pair in both.values() if len(pair) == 2))

    return build_report


def test_without_a_resume_the_header_is_the_plan(build: Build) -> None:
    """One block with every run, the header's slots, nothing cut off."""
    report = build([0, 1, 2])
    assert planned_slots(report) == HEADER_SLOTS
    assert [block.resume for block in blocks(report)] == [None]
    assert (blocks(report)[0].runs, unpaired_runs(report)) == (report.runs, ())


def test_a_resumed_report_plans_what_took_place_and_what_is_to_come(build: Build) -> None:
    """Slots of earlier blocks that nothing filled were planned anew, so they are no part of the plan."""
    report = build([0, 1, 2, 8, 9, 14], (FIRST, SECOND))
    assert [slot.slot for slot in planned_slots(report)] == [0, 1, 2, 8, 9, 14, 15, 16, 17]
    assert [[run.run for run in block.runs] for block in blocks(report)] == [[0, 1, 2], [8, 9], [14]]
    assert [run.run for run in unpaired_runs(report)] == [2]


def test_a_run_that_was_cut_off_is_in_no_number(build: Build) -> None:
    """What is left of its pair changes nothing, a state that was cut off with it neither."""
    numbers = [0, 1, *range(8, 14)]
    whole = analyze(build(numbers, (FIRST,)))
    assert whole.verdict.decision == "better"
    for state in (None, 2.0, 1.0):
        got = analyze(build([0, 1, 2, *range(8, 14)], (FIRST,), states={2: state}))
        assert (got.metrics, got.parity, got.verdict) == (whole.metrics, whole.parity, whole.verdict)


@pytest.mark.parametrize(
    ("numbers", "runs", "status", "is_sound"),
    [
        ([0, 1, 2, *range(8, 14)], {}, "complete", True),
        ([0, 1, 2, *range(8, 13)], {}, "complete", False),
        ([0, 1, 2, *range(8, 13)], {}, "interrupted", True),
        ([0, 1, 2, *range(8, 14)], {}, "interrupted", False),
        ([0, 1, 2, 3, *range(8, 14)], {3: {"status": "interrupted"}}, "complete", True),
        ([0, 1, 2, 3, *range(8, 14)], {3: {"status": "failed"}}, "complete", False),
        ([0, 1, 2, 3, *range(8, 14)], {3: {"status": "failed"}}, "failed", True),
        ([0, 1, 2, *range(8, 14)], {13: {"status": "interrupted"}}, "complete", False),
        ([0, 1, 2, *range(8, 14)], {}, "failed", False),
    ],
)
def test_the_end_of_a_resumed_report_agrees_with_its_runs(
    numbers: Sequence[int], runs: dict[int, Any], status: Status, is_sound: bool, build: Build
) -> None:
    """Complete is the whole new plan; a run that lucid broke off before the resume was repeated and counts no more."""
    report = build(numbers, (FIRST,), runs=runs, end=status)
    problems = [text for text in verify_summary(report) if text.startswith("end.status")]
    assert bool(problems) is not is_sound


def test_only_runs_that_were_broken_off_before_a_resume_do_not_count(build: Build) -> None:
    """One that failed by itself counts, and so does the last block's own."""
    broken = {3: {"status": "interrupted"}, 13: {"status": "interrupted"}, 1: {"status": "failed"}}
    report = build([0, 1, 2, 3, *range(8, 14)], (FIRST,), runs=broken)
    assert [run.run for run in counted_runs(report)] == [0, 1, 2, *range(8, 14)]
