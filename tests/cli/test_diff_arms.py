import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.reports import FLIPPED, write_arms
from lucid_cli import app
from lucid_profiler.compare import diff
from lucid_profiler.diff import Difference, Refusal, try_each
from lucid_profiler.errors import NotComparableError
from lucid_profiler.reader import Report
from lucid_profiler.records import Arm

BASE, FAST, SLOW = Arm(name="base"), Arm(name="fast", env={"F": "0.8"}), Arm(name="slow", env={"F": "1.3"})
SGD = Arm(name="sgd", different=True)
SECONDS = {"base": 100.0, "fast": 80.0, "slow": 130.0, "sgd": 90.0}
STEPS = (0.0, 0.3, -0.2, 0.1, -0.3)
FORMS = ("table", "markdown", "json", "csv")

Run = Callable[..., tuple[int, str, str]]


def measured(path: str, arms: Sequence[Arm], **settings: float) -> Report:
    """Write a report of these arms, whose seconds are those of their names, or others where `settings` says so."""
    seconds = SECONDS | settings
    pairs = [(arm.name, seconds[arms[0].name] + step, seconds[arm.name] - step) for arm in arms[1:] for step in STEPS]
    return write_arms(Path(path), arms, pairs)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return what runs `lucid report diff` in a directory of its own, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def ran(*args: str) -> tuple[int, str, str]:
        code = app.run(["report", "diff", *args])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return ran


def test_arms_are_compared_by_their_names(run: Run) -> None:
    """Two reports of the same arms in another order measured the same, and no arm is held against another one."""
    measured("a.jsonl", [BASE, FAST, SLOW])
    measured("b.jsonl", [BASE, SLOW, FAST])
    code, out, err = run("a.jsonl", "b.jsonl", "--margin", "wall=5", "--format", "json")
    assert (code, err) == (0, "")
    found = json.loads(out)["comparisons"]
    assert [(one["name"], one["arms"]["other"], one["decision"]) for one in found] == [
        ("b (fast)", "fast", "same"),
        ("b (slow)", "slow", "same"),
    ]
    assert found[0]["identities"] == []


def test_another_base_is_refused_whatever_is_allowed(run: Run) -> None:
    """What is the base in one report and an arm in the other makes every ratio another one."""
    first = measured("a.jsonl", [BASE, FAST, SLOW])
    swapped = measured("b.jsonl", [FAST, BASE, SLOW])
    with pytest.raises(NotComparableError, match="arms: the base is base in the first report and fast in the second"):
        diff(first, swapped, allow=["arms"])
    code, out, _ = run("a.jsonl", "b.jsonl")
    assert (code, "refused   b cannot be compared with a: arms: the base is base" in out, "--allow" in out) == (
        *(5, True, False),
    )


@pytest.mark.parametrize(
    "other",
    [
        Arm(name="fast", env={"F": "0.9"}),
        Arm(name="fast", env={"F": "0.8"}, different=True),
        Arm(name="fast", env={"F": "0.8"}, control=True),
        Arm(name="faster", env={"F": "0.8"}),
    ],
)
def test_arms_are_what_their_names_settings_and_kinds_say(other: Arm, run: Run) -> None:
    """An arm with another variable, of another kind, or of another name is another arm."""
    first, second = measured("a.jsonl", [BASE, FAST]), measured("b.jsonl", [BASE, other], faster=80.0)
    with pytest.raises(NotComparableError, match=r"arms is base base, fast \(F=0\.8\) in the first report and base"):
        diff(first, second)
    assert run("a.jsonl", "b.jsonl")[0] == 5


@pytest.mark.parametrize("form", FORMS)
def test_reports_that_differ_in_their_controls_alone_are_compared(form: str, run: Run) -> None:
    """A control says what the machine does, not what was measured: it is noted, with its pairs."""
    again = Arm(name="again", control=True)
    measured("a.jsonl", [BASE, FAST])
    measured("b.jsonl", [BASE, FAST, again], again=100.0)
    code, out, err = run("a.jsonl", "b.jsonl", "--allow", "controls", "--format", form)
    assert (code, err) == (0, "")
    if form == "json":
        (comparison,) = json.loads(out)["comparisons"]
        assert [(one["key"], one["tier"]) for one in comparison["identities"]] == [("controls", "noted")]
    elif form != "csv":
        assert "controls: none in a, again, 5 pairs in b" in out
    assert run("b.jsonl", "b.jsonl", "--format", form)[1].count("controls") == 0


def test_a_refusal_for_want_of_pairs_has_no_empty_table(run: Run) -> None:
    """Nothing differs in the circumstances, so there is nothing to list."""
    measured("a.jsonl", [BASE, FAST])
    write_arms(Path("b.jsonl"), [BASE, FAST], [], header={"pairs": 5})
    code, out, err = run("a.jsonl", "b.jsonl", "--format", "markdown")
    assert (code, err) == (5, "Error: the reports cannot be compared: the second report has no runs\n")
    assert out.startswith("### b cannot be compared with a: the second report has no runs\n\n- a: a.jsonl: 5")
    assert "|" not in out


def test_a_lost_arm_is_listed_and_compared_with_nothing(run: Run) -> None:
    """Allowed by name, what both have is compared; where that is no arm, nothing can be."""
    first = measured("a.jsonl", [BASE, FAST, SLOW])
    second = measured("b.jsonl", [BASE, FAST, SGD])
    ((_, found),) = try_each(first, [second], ["arms"])
    assert isinstance(found, Difference)
    assert (found.analysis_b.other, found.lost_arms, found.added_arms) == ("fast", ("slow",), ("sgd",))
    code, out, _ = run("a.jsonl", "b.jsonl", "--allow", "arms")
    assert code == 0
    assert "\nlost      arm slow\nadded     arm sgd\n" in out
    assert "slow is" not in out
    measured("c.jsonl", [BASE, SGD])
    code, out, err = run("a.jsonl", "c.jsonl", "--allow", "arms")
    assert (code, "no arm beside the base is in both: fast, slow against sgd" in err) == (5, True)
    assert "\nrefused   b cannot be compared with a: no arm beside the base is in both" in out


@pytest.mark.parametrize("form", FORMS)
def test_an_arm_that_computes_something_else_is_never_called_equal(form: str, run: Run) -> None:
    """Its parity is not asked, and what speaks of it says that it is another computation."""
    measured("a.jsonl", [BASE, SGD])
    measured("b.jsonl", [BASE, SGD], sgd=85.0)
    code, out, _ = run("a.jsonl", "b.jsonl", "--format", form)
    assert code == 0
    if form == "json":
        (found,) = json.loads(out)["comparisons"]
        assert found["parity"]["verdict"] == "not_comparable"
        assert (found["parity"]["a"]["status"], found["parity"]["a"]["base_runs"]) == ("not_asked", "agree")
        assert found["words"].endswith("(sgd is not the same computation as base)")
    elif form == "csv":
        row = list(csv.DictReader(io.StringIO(out)))[-1]
        assert (row["verdict"], row["reason"]) == ("not_comparable", "a not_asked, b not_asked")
    else:
        words = " ".join(out.split())
        assert "not asked (base runs agree): model" in words
        assert "(sgd is not the same computation as base)" in words
        assert "equal: model" not in words


@pytest.mark.parametrize("form", ["table", "markdown", "json"])
def test_show_never_calls_another_computation_equal(form: str, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """The base's runs repeat, which is all that was asked."""
    del run  # for its directory
    measured("a.jsonl", [BASE, SGD])
    assert app.run(["report", "show", "a.jsonl", "--format", form]) == 0
    out = capfd.readouterr().out
    if form == "json":
        parity = json.loads(out)["comparisons"][0]["parity"]
        assert (parity["status"], parity["base_runs"]) == ("not_asked", "agree")
    else:
        assert "not asked" in out
        assert "equal" not in out


@pytest.mark.parametrize(
    ("flipped", "num", "expected"),
    [
        ({}, 5, ("equal", "agree")),
        ({}, 1, ("equal", "not_repeated")),
        ({1: FLIPPED}, 5, ("different", "agree")),
        ({2: FLIPPED}, 5, ("undecidable", "differ")),
        (dict.fromkeys(range(10)), 5, ("not_observed", "not_observed")),
    ],
)
def test_the_object_says_whether_the_base_repeats(
    flipped: dict[int, Any], num: int, expected: tuple[str, str], run: Run
) -> None:
    """Beside the parity of the pairs, for a difference in pairs is none of the base's runs."""
    pairs = [("fast", 100 + step, 80 - step) for step in STEPS[:num]]
    write_arms(Path("a.jsonl"), [BASE, FAST], pairs, states=flipped)
    parity = json.loads(run("a.jsonl", "a.jsonl", "--format", "json")[1])["comparisons"][0]["parity"]["a"]
    assert (parity["status"], parity["base_runs"]) == expected


def test_pairs_that_are_left_out_are_counted_and_named(run: Run) -> None:
    """In the title of the report, as remarks, and in the object."""
    pairs = [("fast", 100 + step, 80 - step) for step in STEPS]
    measured("a.jsonl", [BASE, FAST])
    write_arms(Path("b.jsonl"), [BASE, FAST], pairs, header={"taints": ("throttled",)}, taints={3: ("throttled",)})
    _, table, _ = run("a.jsonl", "b.jsonl")
    assert "a         a.jsonl: 5 pairs, " in table
    assert "b         b.jsonl: 4 of 5 pairs, " in table
    assert "\nremark    b: pair 1 of fast is left out: throttled:3\n" in table
    assert "\nnoted     taints: none in a, throttled in b\n" in table
    markdown = run("a.jsonl", "b.jsonl", "--format", "markdown")[1]
    assert "- remark: b: pair 1 of fast is left out: throttled:3\n" in markdown
    (found,) = json.loads(run("a.jsonl", "b.jsonl", "--format", "json")[1])["comparisons"]
    assert found["report"]["planned_pairs"] == 5
    assert found["pairs"]["b"] == {
        "found": 5,
        "discarded": 0,
        "included": 4,
        "excluded": [{"pair": 1, "reasons": ["throttled:3"]}],
    }


def test_a_report_that_is_not_whole_is_remarked(run: Run) -> None:
    """With --allow-partial the result itself says what it rests on."""
    measured("a.jsonl", [BASE, FAST])
    whole = Path("a.jsonl").read_bytes().splitlines(keepends=True)
    Path("b.jsonl").write_bytes(b"".join(whole[:-2]))
    _, out, _ = run("a.jsonl", "b.jsonl", "--allow-partial")
    assert "\nremark    b: the report is without an end, after 10 runs\n" in out
    found = json.loads(run("a.jsonl", "b.jsonl", "--allow-partial", "--format", "json")[1])
    assert found["comparisons"][0]["report"]["status"] is None


@pytest.mark.parametrize("form", FORMS)
def test_a_refusal_is_told_in_every_form(form: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs and that nothing was compared is the result, on standard error there is one line."""
    measured("a.jsonl", [BASE, FAST])
    measured("b.jsonl", [BASE, Arm(name="fast")])
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    code, out, err = run("a.jsonl", "b.jsonl", "--format", form, "--gate", "wall<=+1%", "--step-summary")
    assert code == 5
    assert "Error: the reports cannot be compared: arms is base base, fast (F=0.8) in the first" in err
    if form == "json":
        found = json.loads(out)
        (comparison,) = found["comparisons"]
        assert (found["exit_code"], comparison["decision"], comparison["metrics"]) == (5, "refused", [])
        assert [(one["key"], one["tier"]) for one in comparison["identities"]] == [("arms", "fatal")]
        assert comparison["gates"][0]["status"] == "no_verdict"
    elif form == "csv":
        (row,) = csv.DictReader(io.StringIO(out))
        assert (row["b"], row["verdict"], row["reason"].split()[0]) == ("b.jsonl", "refused", "arms")
        assert "Warning: b: gate wall<=+1%: no verdict: the reports are not compared\n" in err
    else:
        assert "b cannot be compared with a: it differs in arms; to compare anyway: --allow arms" in out
    assert Path("summary.md").read_text().startswith("### b cannot be compared with a: it differs in arms;")


def test_one_refused_report_suppresses_no_other(run: Run) -> None:
    """What can be compared is, under the letters of the command line."""
    first, good = measured("a.jsonl", [BASE, FAST]), measured("c.jsonl", [BASE, FAST], fast=70.0)
    odd = measured("b.jsonl", [BASE, Arm(name="fast")])
    assert [type(found) for _, found in try_each(first, [odd, good])] == [Refusal, Difference]
    code, out, err = run("a.jsonl", "b.jsonl", "c.jsonl", "--format", "json")
    assert code == 5
    assert [(one["name"], one["decision"]) for one in json.loads(out)["comparisons"]] == [
        ("b", "refused"),
        ("c", "better"),
    ]
    assert err.startswith("Error: the reports cannot be compared: b.jsonl: arms is ")


def test_limits_in_csv_name_the_report_and_the_arm(run: Run) -> None:
    """Rows have no place for them, and a warning without a name could be of any."""
    measured("a.jsonl", [BASE, FAST, SLOW])
    measured("b.jsonl", [BASE, FAST, SLOW], slow=150.0)
    code, _, err = run("a.jsonl", "b.jsonl", "--gate", "wall<=+1%", "--format", "csv")
    assert code == 3
    assert err.startswith("Warning: b (slow): gate wall<=+1%: failed [")


def test_a_limit_on_an_unknown_metric_names_the_known_ones(run: Run) -> None:
    """The names that limits and margins know are those of the records, which the table does not show."""
    measured("a.jsonl", [BASE, FAST])
    code, out, _ = run("a.jsonl", "a.jsonl", "--gate", "time<=+1%")
    assert (code, "time<=+1%: no verdict: neither report has values; there are wall\n" in out) == (5, True)


def test_a_metric_has_one_margin(run: Run) -> None:
    """Two of them are a slip of the pen, and the last does not win."""
    measured("a.jsonl", [BASE, FAST])
    code, out, err = run("a.jsonl", "a.jsonl", "--margin", "wall=1", "--margin", "wall = 2%")
    assert (code, out) == (2, "")
    assert "wall has two margins" in err
