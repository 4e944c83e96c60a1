import dataclasses
import math
import re
from pathlib import Path
from statistics import median

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.reports import CREATED, FLIPPED, MODEL, WALLS, write_arms, write_report
from lucid_cli.reporters.difference import render_difference
from lucid_cli.reporters.layout import WIDTH, columns, labelled
from lucid_cli.reporters.phases import MAX_PHASES
from lucid_cli.reporters.sentences import NO_CUDA
from lucid_cli.reporters.table import METRICS_PART, SETTINGS_PART, render_report
from lucid_cli.reporters.words import amount, percent, scale
from lucid_profiler.compare import analyze, diff
from lucid_profiler.digest import digest_state
from lucid_profiler.reader import Report
from lucid_profiler.records import Arm

TABLE = """\
command   python train.py
pairs     5 of 5 pairs of native and captured runs, 0 discarded; order abba, 2026-01-02 03:04 UTC
where     NVIDIA L4, driver 580, torch 2.9.1+cu129, python 3.11.7

               native           captured         ratio   paired %  range %          95 % t %
wall (fit)     120.850 s        108.750 s        0.8999  -10.01    [-10.30, -9.63]  [-10.27, -9.65]
               120.542-122.793  108.123-110.967
peak resident  850.0 MiB        900.0 MiB        1.0588  +5.88     [+5.88, +5.88]   [+5.88, +5.88]
               850.0-850.0      900.0-900.0

          Medians, with smallest-largest below. paired: median change of captured against native
          within 5 pairs; range: smallest and largest pair, which hold the true median with 93.75 %;
          t: interval of the mean change.
unknown   peak allocated: no CUDA device was used

steps     native 640, captured 640 in each run
parity    5 of 5 pairs equal, native runs agree among themselves: model
native    no replays in 5 runs; native: capture is off (3200)
captured  3190 replays of 5 recordings in 5 runs; native: warmup (10)

verdict   captured is faster: -9.96 % wall on average over 5 pairs, 95 % interval [-10.27, -9.65] %;
          equal to the last bit: model
"""


def _show(report: Report) -> str:
    return render_report(report, analyze(report))


def _verdict(text: str) -> str:
    """Return the last paragraph on one line."""
    return " ".join(text.strip().split("\n\n")[-1].split()).removeprefix("verdict ")


def test_a_report_is_shown_as_one_table_and_a_sentence(tmp_path: Path) -> None:
    """The whole text for five pairs, with the figures that their numbers give."""
    assert _show(write_report(tmp_path / "r.jsonl")) == TABLE
    changes = sorted(100 * (captured / native - 1) for native, captured in WALLS)
    assert f"{median(changes):+.2f}" == "-10.01"
    assert f"[{changes[0]:+.2f}, {changes[-1]:+.2f}]" == "[-10.30, -9.63]"


PHASES = """\
phase         native     of wall  captured  of wall
load          12.085 s   10.0 %   10.875 s  10.0 %
train         108.765 s  90.0 %   87.000 s  80.0 %
(not marked)  -          -        10.875 s  10.0 %
"""


def test_the_time_of_each_phase_is_shown_by_arm(tmp_path: Path) -> None:
    """Seconds and share of the wall, medians over the runs; what recurs is summed, what nobody marked has its row."""
    marks = {
        "native": [("load", 0.1), ("train", 0.4), ("train", 0.5)],
        "captured": [("load", 0.1), ("train", 0.8)],
    }
    blocks = _show(write_report(tmp_path / "r.jsonl", phases=marks)).split("\n\n")
    assert blocks[3] + "\n" == PHASES
    assert "of wall" not in TABLE


def test_of_many_phases_the_longest_are_shown(tmp_path: Path) -> None:
    """A name a step fills no screen; names of 200 characters fit."""
    marks = [(f"step {index}" + "x" * 190, 0.001 * index) for index in range(40)]
    text = _show(write_report(tmp_path / "r.jsonl", phases={"native": marks, "captured": marks}))
    (table,) = [block for block in text.split("\n\n") if block.startswith("phase ")]
    lines = table.splitlines()
    assert lines[-1] == f"and {40 - MAX_PHASES} shorter"
    assert [line.split("x")[0] for line in lines[1:-2]] == [f"step {index}" for index in range(40 - MAX_PHASES + 1, 40)]
    assert lines[-2].startswith("(not marked)")
    assert max(map(len, lines)) <= WIDTH


def test_the_settings_that_a_script_hands_over_are_named(tmp_path: Path) -> None:
    """Each flag with its value, read from the report itself."""
    report = write_report(tmp_path / "r.jsonl")
    digest = digest_state({"torch.use_deterministic_algorithms": True, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    state = dataclasses.replace(report.states[0], part=SETTINGS_PART, values=digest.values)
    text = _show(dataclasses.replace(report, states=(*report.states, state)))
    assert "settings  CUBLAS_WORKSPACE_CONFIG=':4096:8', torch.use_deterministic_algorithms=True\n" in text


def test_the_metrics_that_a_script_hands_over_are_named_unless_runs_differ(tmp_path: Path) -> None:
    """Numbers at the top with four digits; those of single epochs stay in the file; with two truths there is none."""
    report = write_report(tmp_path / "r.jsonl")
    digest = digest_state({"ap": 1 / 3, "num_images": 64, "epochs": [{"ap": 0.1}]})
    state = dataclasses.replace(report.states[0], part=METRICS_PART, values=digest.values)
    states = (*report.states, state)
    assert "metrics   ap=0.3333, num_images=64\n" in _show(dataclasses.replace(report, states=states))
    other = dataclasses.replace(state, run=1, digest="0" * 64)
    assert "metrics   ap" not in _show(dataclasses.replace(report, states=(*states, other)))


def test_a_difference_names_run_part_and_tensor_and_is_the_verdict(tmp_path: Path) -> None:
    """One bit in one captured run, and there is no speed verdict."""
    text = _show(write_report(tmp_path / "r.jsonl", states={2: FLIPPED}))
    assert "4 of 5 pairs equal" in text
    assert _verdict(text) == (
        "parity failed: model stem.weight.1: -1.25 in run 3 (native), -1.2500000000000002 in run 2 (captured); "
        "this is not the same computation, and no speed verdict is given"
    )


def test_a_parity_failure_is_the_verdict_even_with_too_few_pairs(tmp_path: Path) -> None:
    """Different bytes need no statistics."""
    text = _show(write_report(tmp_path / "r.jsonl", WALLS[:2], states={2: FLIPPED}))
    assert _verdict(text).startswith("parity failed")
    assert "native runs agree among themselves" in text


def test_one_native_run_shows_no_repetition(tmp_path: Path) -> None:
    """A difference may then be nondeterminism, and nothing is said to agree among itself."""
    text = _show(write_report(tmp_path / "r.jsonl", WALLS[:1], states={1: FLIPPED}))
    assert _verdict(text).endswith(
        "; the states differ, and with one native run nothing shows whether native runs repeat, so this may be "
        "nondeterminism: run more pairs; no speed verdict is given"
    )
    assert "0 of 1 pair equal, one native run, so nothing shows whether native runs repeat: model" in " ".join(
        text.split()
    )
    equal = _show(write_report(tmp_path / "r.jsonl", WALLS[:1]))
    assert "parity    1 of 1 pair equal, one native run: model\n" in equal
    for shown in (text, equal):
        assert "among themselves" not in shown
        assert "not the same computation" not in shown


@pytest.mark.parametrize(
    ("run", "beginning"),
    [
        (2, "parity failed: run 2 (captured) did not record part model, so it cannot be compared, and no speed"),
        (3, "undecidable: run 3 (native) did not record part model, so the native runs cannot be held against each"),
    ],
)
def test_a_part_that_was_not_recorded_is_no_other_computation(tmp_path: Path, run: int, beginning: str) -> None:
    """What is merely missing is said to be missing."""
    text = _verdict(_show(write_report(tmp_path / "r.jsonl", states={run: None})))
    assert text.startswith(beginning)
    assert "not the same computation" not in text


def test_one_pair_has_no_range(tmp_path: Path) -> None:
    """A single value spans nothing, and the text counts it in the singular."""
    text = _show(write_report(tmp_path / "r.jsonl", WALLS[:1], notes=("to know",)))
    assert "wall (fit)     120.850 s  108.750 s  0.8999  -10.01    -        -\n" in text
    assert "The values of 1 pair. paired: change of captured against native.\n" in text
    assert "pairs     1 of 1 pair of native and captured runs" in text
    assert "with 0 %" not in text
    assert "638 replays of 1 recording in 1 run;" in text


def test_one_run_without_replays_is_counted_in_the_singular(tmp_path: Path) -> None:
    """The sentence of the verdict counts as the rest of the text does."""
    text = _show(write_report(tmp_path / "r.jsonl", WALLS[:1], reasons={"captured": {"no_agent": 1}}))
    assert _verdict(text).startswith("no speed verdict: 1 of 1 captured run replayed nothing: ")


def test_the_number_of_pairs_in_the_statistics_is_told(tmp_path: Path) -> None:
    """Where a pair is left out, the title says how many are not."""
    text = _show(write_report(tmp_path / "r.jsonl", statuses={3: "failed"}))
    assert "pairs     5 of 5 pairs of native and captured runs, 0 discarded, 4 in the statistics; order" in text


def test_a_pair_that_was_measured_in_place_of_another_is_counted(tmp_path: Path) -> None:
    """After a resume there can be more pairs than were planned: they are not a part of the plan."""
    report = write_report(tmp_path / "r.jsonl", statuses={3: "failed"})
    report = dataclasses.replace(report, header=dataclasses.replace(report.header, pairs=4))
    assert "pairs     5 pairs (4 planned) of native and captured runs, 0 discarded, 4 in the statistics" in _show(
        report
    )


def test_an_arm_that_overrode_the_script_is_told(tmp_path: Path) -> None:
    """An explicit capture_updates that did not hold is named beside the arm's captures."""
    text = " ".join(_show(write_report(tmp_path / "r.jsonl", overridden=True)).split())
    assert text.count("the arm's setting overrode an explicit capture_updates in 5 runs") == 2
    assert "overrode" not in TABLE


def test_peak_resident_of_several_processes_is_explained(tmp_path: Path) -> None:
    """It is that of the largest one, not their sum."""
    text = _show(write_report(tmp_path / "r.jsonl", num_processes=2))
    assert "peak resident: of the largest single process." in " ".join(text.split())
    assert "single process" not in TABLE


def test_a_long_command_loses_its_middle(tmp_path: Path) -> None:
    """The title stays a title; beginning and end are kept."""
    command = ("python", "train.py", *(f"--option-{index}" for index in range(100)), "--last")
    text = _show(write_report(tmp_path / "r.jsonl", command=command)).split("\npairs")[0]
    shown = " ".join(text.split()).removeprefix("command ")
    assert len(shown) <= 300
    assert shown.startswith("python train.py --option-0 ")
    assert " … " in shown
    assert shown.endswith(" --last")


def test_the_reason_for_no_agent_names_pythonpath(tmp_path: Path) -> None:
    """A command that replaces PYTHONPATH loads no agent either."""
    text = _verdict(_show(write_report(tmp_path / "r.jsonl", reasons={"captured": {"no_agent": 1}})))
    assert "the command replaced PYTHONPATH, or it runs as a user who cannot write the run's directory (5)" in text


@pytest.mark.parametrize(
    ("settings_of_report", "beginning"),
    [
        (
            {"walls": [(captured, native) for native, captured in WALLS]},
            "captured is slower: +11.06 % wall on average over 5",
        ),
        ({"walls": ((1, 1.1), (1.1, 1), (1, 1.02))}, "inconclusive: the 95 % interval [-20.69, +27.77] % of wall"),
        ({"walls": ((1, 1), (2, 2), (3, 3))}, "inconclusive: wall is the same in every pair"),
        ({"walls": WALLS[:2]}, "no verdict: 2 of at least 3 pairs are in the statistics"),
        ({"statuses": dict.fromkeys(range(10), "failed")}, "no verdict: no pair of successful runs"),
        ({"states": dict.fromkeys(range(10))}, "no speed verdict: no run left a digest of its state"),
        ({"states": {0: FLIPPED}}, "undecidable: the native runs differ among themselves (model stem.weight.1: "),
        ({"reasons": {"captured": {"no_cuda": 640}}}, NO_CUDA),
        (
            {"reasons": {"captured": {"no_cuda": 1, "closed_world": 2}}},
            "no speed verdict: 5 of 5 captured runs replayed nothing: closed world (10), no CUDA device was used (5)",
        ),
    ],
)
def test_each_verdict_is_a_sentence(tmp_path: Path, settings_of_report: dict[str, object], beginning: str) -> None:
    """Better, worse, inconclusive, withheld and undecidable are told in words, with what would help."""
    report = write_report(tmp_path / "r.jsonl", **settings_of_report)  # type: ignore[arg-type]
    assert _verdict(_show(report)).startswith(beginning)


def test_an_inconclusive_verdict_says_how_many_pairs_would_settle_it(tmp_path: Path) -> None:
    """The number of pairs is part of the sentence."""
    text = _show(write_report(tmp_path / "r.jsonl", ((1, 1.1), (1.1, 1), (1, 1.02))))
    assert "about 815 pairs would settle it" in _verdict(text)


def test_failed_runs_excluded_pairs_and_notes_are_listed(tmp_path: Path) -> None:
    """What is not in the statistics is in the text."""
    text = _show(write_report(tmp_path / "r.jsonl", statuses={3: "failed"}, notes=("something to know",)))
    assert "failed    run 3 (pair 1, native): failed, exit status 3\n" in text
    assert "left out  pair 1: failed:3\n" in text
    assert "note      something to know (10 runs)\n" in text
    assert "within 4 pairs" in text


def test_an_incomplete_report_says_where_it_stopped(tmp_path: Path) -> None:
    """Without an end the number of runs is told."""
    report = dataclasses.replace(write_report(tmp_path / "r.jsonl"), end=None)
    assert "status    without an end, after 10 of 10 runs\n" in _show(report)


seconds = st.floats(1e-9, 1e9)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    walls=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4),
    command=st.lists(st.text(max_size=150), min_size=1, max_size=3).map(tuple),
)
def test_no_line_is_longer_than_100_columns(
    tmp_path: Path, walls: list[tuple[float, float]], command: tuple[str, ...]
) -> None:
    """Whatever the numbers and the command are, both texts fit."""
    report = write_report(tmp_path / "r.jsonl", walls, command=command)
    text = _show(report) + render_difference(diff(report, report), report, report)
    assert max(len(line) for line in text.split("\n")) <= WIDTH


def test_a_comparison_shows_circumstances_first_and_the_ratio_of_ratios(tmp_path: Path) -> None:
    """What differs is listed before the numbers, whose interval is Welch's."""
    a = write_report(tmp_path / "a.jsonl")
    walls = [
        (native, native * factor)
        for (native, _), factor in zip(WALLS, (0.88, 0.879, 0.881, 0.8805, 0.8795), strict=True)
    ]
    b = write_report(tmp_path / "b.jsonl", walls, identity={"gpu_name": "NVIDIA L40", "driver_major": "580"})
    text = render_difference(diff(a, b, allow=["gpu_name"]), a, b)
    allowed, numbers = text.index("allowed   gpu_name: NVIDIA L4 in a, NVIDIA L40 in b"), text.index("paired %")
    assert allowed < numbers
    effects = [[math.log(captured / native) for native, captured in pairs] for pairs in (WALLS, walls)]
    change = 100 * math.expm1(sum(effects[1]) / 5 - sum(effects[0]) / 5)
    assert f"wall: b against a {change:+.2f} % [" in text
    assert "  a  120.850 s (120.542-122.793)  108.750 s (108.123-110.967)  -10.01 [-10.27, -9.65]\n" in text
    assert _verdict(text).startswith(f"b is better than a: {change:+.2f} %, 95 % interval [")
    assert "canary    base arm, b against a: +0.00 % [" in text
    assert "remark" not in text


@pytest.mark.parametrize(
    ("factors", "sentence"),
    [
        ((1.01,) * 5, "canary base arm, b against a: +1.00 % ["),
        ((1.1,) * 5, "canary the base arms differ by +10.00 % ["),
        ((0.5, 0.6, 1, 2, 2.5), "canary the base arms cannot be told apart within ["),
    ],
)
def test_the_canary_says_no_more_than_is_known(tmp_path: Path, factors: tuple[float, ...], sentence: str) -> None:
    """Within the limit it is quiet; beyond it, it tells a certain difference from an uncertain one."""
    a = write_report(tmp_path / "a.jsonl")
    walls = [(native * factor, captured * factor) for (native, captured), factor in zip(WALLS, factors, strict=True)]
    b = write_report(tmp_path / "b.jsonl", walls)
    text = " ".join(render_difference(diff(a, b), a, b).split())
    assert sentence in text
    assert ("absolute values do not compare" in text) is (factors == (1.1,) * 5)
    assert "machine or day" not in text


def test_a_report_compared_with_itself_is_remarked(tmp_path: Path) -> None:
    """The same id on both sides is told first."""
    a = write_report(tmp_path / "a.jsonl")
    assert "\nremark    a and b are the same report\n" in render_difference(diff(a, a), a, a)


def test_a_metric_has_one_unit_in_both_texts(tmp_path: Path) -> None:
    """A comparison shows each report's values as the report by itself shows them."""
    a = write_report(tmp_path / "a.jsonl", [(native / 100, captured / 100) for native, captured in WALLS])
    b = write_report(tmp_path / "b.jsonl", [(native / 130, captured / 130) for native, captured in WALLS])
    both = " ".join(render_difference(diff(a, b, canary_limit=50), a, b).split())
    assert "wall (fit) 1.208 s 1.087 s" in " ".join(_show(a).split())
    assert "wall (fit) 929.615 ms 836.538 ms" in " ".join(_show(b).split())
    assert " a 1.208 s (1.205-1.228) 1.087 s (" in both
    assert " b 929.615 ms (927.246-944.562) 836.538 ms (" in both


def test_without_verdicts_a_comparison_repeats_why(tmp_path: Path) -> None:
    """Two reports of which one has no verdict give none on their difference, and no row of it says better or worse."""
    a = write_report(tmp_path / "a.jsonl")
    slower = [(native, captured * 1.2) for native, captured in WALLS]
    b = write_report(tmp_path / "b.jsonl", slower, reasons={"captured": {"no_cuda": 640}})
    whole = render_difference(diff(a, b), a, b)
    assert "worse" not in whole
    text = _verdict(whole)
    assert text.startswith("no verdict on the difference; a: captured is faster")
    assert text.endswith(f"b: {NO_CUDA}")


@pytest.mark.parametrize(
    ("unit", "value", "shown"),
    [
        ("s", 120.85, "120.850 s"),
        ("s", 0.0123, "12.300 ms"),
        ("s", 1.5e-6, "1.500 µs"),
        ("s", 36000.25, "36000.2 s"),
        ("By", 877.8 * 2**20, "877.8 MiB"),
        ("By", 80 * 2**30, "80.00 GiB"),
        ("By", 0, "0 B"),
        ("1", 2.5, "2.500 "),
        ("J", 1500.0, "1500.0 J"),
    ],
)
def test_amounts_are_scaled_to_be_read(unit: str, value: float, shown: str) -> None:
    """Units follow the size of the number."""
    scaled = scale(unit, value)
    assert f"{amount(value, scaled)} {scaled[1]}" == shown


@pytest.mark.parametrize(
    ("log_ratio", "shown"),
    [(math.log(0.9), "-10.00"), (0.0, "+0.00"), (math.log(3), "+200"), (math.log(1e-9), "-100"), (800.0, "+1.0e+306")],
)
def test_changes_are_signed_percentages(log_ratio: float, shown: str) -> None:
    """A log-ratio becomes the relative change that it stands for."""
    assert percent(log_ratio) == shown


def test_layout_keeps_its_width() -> None:
    """Cells align, rows that are too wide are stacked and lose nothing, long words wrap."""
    assert columns([["a", "b"], ["long", "c"]]) == ["a     b", "long  c"]
    rows = [["", "x" * 85, "paired %"], ["a", "1 s", "[-21.08, +27.77]"], ["b", "", "-"]]
    assert columns(rows) == [
        *("a", f"  {'x' * 85}", f"  {'':<50}  1 s", f"  {'paired %':<50}  [-21.08, +27.77]"),
        *("b", f"  {'paired %':<50}  -"),
    ]
    assert labelled("label", "") == ["label"]
    assert labelled("a_long_label", "text") == ["a_long_label  text"]
    assert [len(line) for line in labelled("label", "x" * 120)] == [100, 40]


def test_no_name_cuts_an_interval_off(tmp_path: Path) -> None:
    """With long names of arms and wide numbers every value is there, below the metric, within the same width."""
    names = ("a_base_with_a_name_of_30_chars", "another_with_a_name_of_30_char")
    walls = [(names[1], 1e5 + step, 9e4 - 100 * step) for step in range(6)]
    report = write_arms(tmp_path / "r.jsonl", [Arm(name=name) for name in names], walls)
    text = _show(report)
    assert f"\n  {names[0]}  100002.5 s (100000.0-100005.0)\n" in text
    assert "\n  range %                         [-10.50, -10.00]\n" in text
    assert re.search(r"\n  95 % t %                        \[-10\.\d\d, -10\.\d\d\]\n", text)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert "…" not in text


def test_the_model_of_the_tests_differs_in_one_bit() -> None:
    """The flipped value is the next double."""
    assert math.nextafter(MODEL["stem.weight"][1], -math.inf) == FLIPPED["stem.weight"][1]
    assert CREATED.endswith("Z")
