import json
import math
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from cli.reports import FLIPPED, WALLS, write_arms, write_report
from lucid_cli.reporters.layout import WIDTH
from lucid_cli.reporters.report_json import report_json
from lucid_cli.reporters.sentences import difference_warnings, verdict_sentence
from lucid_cli.reporters.table import render_report
from lucid_profiler.compare import analyze, analyze_all, diff
from lucid_profiler.reader import Report
from lucid_profiler.records import Arm, Resume, Wall

BASE, TUNED, CONTROL = Arm(name="muon"), Arm(name="tuned"), Arm(name="again", control=True)
SGD = Arm(name="sgd", different=True)
NOISE = (0.0, 0.3, -0.2, 0.1, -0.3, 0.2)
FASTER = [("tuned", 100 + step, 90 - step) for step in NOISE]
OTHER = [("sgd", 100 + step, 80 - step) for step in NOISE]
QUIET = [("again", 100.0, 100 + step) for step in NOISE]
LOUD = [("again", 100.0, 110 + step) for step in NOISE]

FURTHER = """\
compared  sgd with muon: 6 of 6 pairs of muon and sgd runs, 0 discarded

            muon            sgd            ratio   paired %  range %           95 % t %
wall (fit)  100.050 s       79.950 s       0.7991  -20.09    [-20.54, -19.46]  [-20.47, -19.59]
            99.700-100.300  79.700-80.300

          Medians, with smallest-largest below. paired: median change of sgd against muon within 6
          pairs; range: smallest and largest pair, which hold the true median with 96.88 %; t:
          interval of the mean change.

parity    not asked of sgd, which computes something else, muon runs agree among themselves: model
sgd       no replays in 6 runs; native: no optimizer of the command reports captures (6)

warning   order: muon began 6 pairs and sgd 0, so what a first run leaves to the second was not
          tested: that takes two of each

verdict   sgd is faster, not the same computation: -20.03 % wall on average over 6 pairs, 95 %
          interval [-20.47, -19.59] %

warning   order: muon began 6 pairs and again 0, so what a first run leaves to the second was not
          tested: that takes two of each

control   muon against itself: +0.02 % [-0.23, +0.26] % wall, n = 6: what the machine does to equal
          runs
"""


def _show(report: Report) -> str:
    return render_report(report, analyze(report))


def _flat(text: str) -> str:
    return " ".join(text.split())


def _with_source(report: Report, source: Literal["fit", "process"], *, runs: Container[int]) -> Report:
    """Return a report in which the walls of some runs are of a source."""
    wall = Wall(source=source, begin_ns=0, end_ns=1)
    changed = (replace(run, wall=wall) if run.run in runs else run for run in report.runs)
    return replace(report, runs=tuple(changed))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give a name for a report."""
    return tmp_path / "r.jsonl"


def test_comparisons_follow_each_other(path: Path) -> None:
    """The first has what concerns the whole report; each further one its table and verdict, a control its line."""
    text = _show(write_arms(path, [BASE, TUNED, SGD, CONTROL], [*FASTER, *OTHER, *QUIET]))
    assert text.endswith(f"model\n\n{FURTHER}")
    first = text.removesuffix(FURTHER)
    assert "pairs     6 of 6 pairs of muon and tuned runs, 0 discarded; order abba" in first
    assert "verdict   tuned is faster: " in first
    assert "steps     muon 640, tuned 640, sgd 640, again 640 in each run" in _flat(first).replace(
        "steps ", "steps     "
    )
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_base_that_differs_from_itself_is_told_above_the_verdict(path: Path) -> None:
    """The warning has the control's interval, the verdict says that it is none, and the noise floor is shown."""
    text = _flat(_show(write_arms(path, [BASE, TUNED, CONTROL], [*FASTER, *LOUD])))
    warning = (
        "warning control: over 6 pairs muon differs from itself by +10.02 % [+9.77, +10.26] % in wall: the machine"
    )
    verdict = "verdict inconclusive: the 95 % interval ["
    assert 0 < text.index(warning) < text.index(verdict)
    assert "but the base differs from itself: the machine shows a difference where there is none; find what" in text
    assert text.endswith(
        "control muon against itself: +10.02 % [+9.77, +10.26] % wall, n = 6: what the machine does to equal runs"
    )


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        (QUIET[:1], "muon against itself: +0.00 % wall, n = 1: what the machine does to equal runs"),
        ([], "no verdict: no pair of successful runs is in the statistics"),
    ],
)
def test_few_control_pairs_have_no_interval(
    pairs: Sequence[tuple[str, float, float]], sentence: str, path: Path
) -> None:
    """One pair is one number, and no pair is none."""
    report = write_arms(path, [BASE, TUNED, CONTROL], [*FASTER, *pairs])
    assert verdict_sentence(analyze_all(report)[1]) == sentence


def test_walls_of_unequal_work_are_told_with_the_remedy(path: Path) -> None:
    """In words and in JSON; the row names both sources."""
    made = write_arms(path, [BASE, TUNED], FASTER)
    assert "\nwall (fit) " in _show(made)
    report = _with_source(made, "process", runs=range(1, 12, 2))
    assert verdict_sentence(analyze(report)) == (
        "no speed verdict: the wall spans fit() in muon runs and the whole process in tuned runs, so the walls do not "
        "compare; mark the same work in every arm with lucid_profiler.fit()"
    )
    assert "\nwall (fit/process) " in _show(report)
    (shown,) = json.loads(report_json(report, analyze_all(report)))["comparisons"]
    assert (shown["verdict"]["decision"], shown["verdict"]["reason"]) == ("withheld", "walls_differ")
    assert shown["words"] == verdict_sentence(analyze(report))


def test_only_runs_in_the_statistics_name_the_source_of_the_wall(path: Path) -> None:
    """A run of a pair that is left out may have had any."""
    report = write_arms(path, [BASE, TUNED], FASTER, header={"taints": ("throttled",)}, taints={3: ("throttled",)})
    assert "\nwall (fit) " in _show(_with_source(report, "process", runs=[2, 3]))


def test_pairs_of_another_setup_are_in_no_count_of_parity(path: Path) -> None:
    """They are left out, and neither their states nor their number speaks of the others."""
    taints = {10: ("changed",), 11: ("changed",)}
    header = {"taints": ("changed",)}
    text = _show(write_arms(path, [BASE, TUNED], FASTER, header=header, taints=taints, states={11: FLIPPED}))
    assert "parity    5 of 5 pairs equal, muon runs agree among themselves: model\n" in text
    assert "left out  pair 5: changed:10, changed:11\n" in text
    assert "verdict   tuned is faster: " in text


def test_an_order_that_could_not_be_tested_is_told_above_the_verdict(path: Path) -> None:
    """The base began all pairs."""
    text = _flat(_show(write_arms(path, [BASE, TUNED], FASTER)))
    warning = (
        "warning order: muon began 6 pairs and tuned 0, so what a first run leaves to the second was not tested: that "
        "takes two of each"
    )
    assert 0 < text.index(warning) < text.index("verdict tuned is faster: ")


def test_a_verdict_has_the_number_to_which_its_interval_belongs(path: Path) -> None:
    """Most pairs are a little slower and a few much faster: the mean decides, so the mean is told."""
    effects = [0.002] * 6 + [-0.5] * 5
    pairs = [("tuned", 100.0, 100 * math.exp(effect)) for effect in effects]
    sentence = verdict_sentence(analyze(write_arms(path, [BASE, TUNED], pairs)))
    assert sentence.startswith(
        "tuned is faster: -20.24 % wall on average over 11 pairs, 95 % interval [-33.12, -4.88] %"
    )


def test_a_control_that_ended_otherwise_is_named(path: Path) -> None:
    """The base does not repeat, which every comparison says."""
    text = _flat(_show(write_arms(path, [BASE, TUNED, CONTROL], [*FASTER, *QUIET], states={13: FLIPPED})))
    assert text.count("undecidable: the muon runs differ among themselves (model stem.weight.1: ") == 2
    assert "in run 13 (again)" in text


def test_a_different_arm_that_is_slower_is_said_to_be_another_computation(path: Path) -> None:
    """Whatever the direction, no word says that it is equal to the last bit."""
    report = write_arms(path, [BASE, SGD], [("sgd", other, base) for _, base, other in OTHER], states={1: FLIPPED})
    sentence = verdict_sentence(analyze(report))
    assert sentence.startswith("sgd is slower, not the same computation: +25.")
    assert "last bit" not in _show(report)


def test_taints_are_told_whether_or_not_they_leave_a_pair_out(path: Path) -> None:
    """Left out by the header's rule, or kept and told."""
    taints = {3: ("throttled",), 5: ("suspended",), 6: ("foreign",), 7: ("foreign",)}
    header = {"taints": ("throttled", "foreign")}
    text = _show(write_arms(path, [BASE, TUNED], FASTER, header=header, taints=taints))
    assert "left out  pair 1: throttled:3\n" in text
    assert "bent      pair 2: suspended:5; it stays in the statistics\n" in text
    assert "bent      pair 3: foreign:6, foreign:7; it stays in the statistics\n" in text
    assert "0 discarded, 5 in the statistics; order" in text


def test_the_order_names_its_seed_and_the_pauses(path: Path) -> None:
    """What was planned is in the title."""
    header = {"order": "random", "seed": 7, "cool_down_s": 2.5}
    text = _flat(_show(write_arms(path, [BASE, TUNED], FASTER, header=header)))
    assert "; order random (seed 7), 2.5 s between runs, 2026-01-02 03:04 UTC" in text


def test_blocks_are_shown(path: Path) -> None:
    """Which runs were measured without a break, where, and how many were cut off."""
    report = write_arms(path, [BASE, TUNED], FASTER)
    resume = Resume(
        block=1,
        created="2026-01-03T05:06:07Z",
        slots=tuple(slot for slot in report.header.slots if slot.slot > 6),
        same_devices=False,
    )
    pairs = tuple(pair for pair in report.pairs if pair.pair != 3)
    resumed = replace(report, resumes=(resume,), pairs=pairs, runs=(*report.runs[:7], *report.runs[8:]))
    text = _flat(_show(resumed))
    assert (
        "blocks 2: runs 0-6, runs 8-11 (resumed 2026-01-03 05:06 UTC on another GPU of the same model) "
        "1 run of pairs that were cut off, in no statistic where"
    ) in text
    assert "blocks" not in _show(report)


def test_the_warnings_of_both_reports_are_sentences(tmp_path: Path) -> None:
    """A comparison of two reports can say what bends either of them."""
    quiet = write_report(tmp_path / "a.jsonl")
    walls = [(native * 1.02**pair, captured * 1.02**pair) for pair, (native, captured) in enumerate(WALLS)]
    bent = write_report(tmp_path / "b.jsonl", walls)
    found = difference_warnings(diff(quiet, bent))
    assert [text[:9] for text in found] == ["b: drift:"]
    assert difference_warnings(diff(quiet, quiet)) == []
