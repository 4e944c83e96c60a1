import pytest

from lucid_cli.arms import parse_arm, plan_arms
from lucid_cli.experiment import ARMS
from lucid_cli.plan import Plan
from lucid_profiler.records import Arm

A, B, C = (Arm(name=name, env={"X": name}) for name in "abc")


@pytest.mark.parametrize(
    ("text", "env"),
    [
        ("arm", {}),
        ("arm:A=1", {"A": "1"}),
        ("arm:A=1,B=2", {"A": "1", "B": "2"}),
        ("arm:A=", {"A": ""}),
        ("arm:A=x=y", {"A": "x=y"}),
        ("arm:A=host:80", {"A": "host:80"}),
        (r"arm:A=1\,2,B=3", {"A": "1,2", "B": "3"}),
        (r"arm:A=\,", {"A": ","}),
        (r"arm:A=C:\dir\n", {"A": r"C:\dir\n"}),
        ("arm:A= \n", {"A": " \n"}),
        ("arm:A=\udcff", {"A": "\udcff"}),
    ],
)
def test_an_arm_is_a_name_and_what_it_sets(text: str, env: dict[str, str]) -> None:
    """Values are taken as they are, but for a comma, which a backslash keeps."""
    assert parse_arm(text) == Arm(name="arm", env=env)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no name of an arm"),
        (":A=1", "no name of an arm"),
        ("A=1", "no name of an arm"),
        ("a b:A=1", "no name of an arm"),
        ("ä", "no name of an arm"),
        ("a\n", "no name of an arm"),
        ("a:", "no KEY=VALUE"),
        ("a:A", "no KEY=VALUE"),
        ("a:A=1,", "no KEY=VALUE"),
        ("a:A=1,2", "a comma inside a value is typed"),
        ("a:=1", "no KEY=VALUE"),
        ("a:1A=1", "no KEY=VALUE"),
        ("a:A=1,A=2", "A is set twice"),
        ("a:LUCID_RUN_DIR=x", "set by lucid itself"),
        ("a:LUCID_PROFILE_ARM=x", "set by lucid itself"),
        ("a:LUCID_STEP_DIGESTS=1", "set by lucid itself"),
    ],
)
def test_what_is_no_arm_is_refused_with_the_reason(text: str, words: str) -> None:
    """The message names the part that is wrong."""
    with pytest.raises(ValueError, match=words):
        parse_arm(text)


def test_without_arms_they_are_native_and_captured() -> None:
    """With `different` where that is said, and the control behind them."""
    assert plan_arms((), different=(), with_control=False) == ARMS
    native, captured, control = plan_arms((), different=("captured",), with_control=True)
    assert (native.different, captured.different, control.control) == (False, True, True)
    assert control.env == native.env


@pytest.mark.parametrize(
    ("arms", "different", "words"),
    [
        ((A,), (), "one arm is compared with nothing; add another --arm"),
        ((A, B, A), (), "two arms of that name; rename one"),
        ((A, Arm(name="control")), (), "rename the arm"),
        ((A, B), ("c",), "no such arm; the arms are a, b"),
        ((A, B), ("a",), "that is the base"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    arms: tuple[Arm, ...], different: tuple[str, ...], words: str
) -> None:
    """The message says what to do."""
    with pytest.raises(ValueError, match=words):
        plan_arms(arms, different=different, with_control=True)


def test_the_name_takes_its_place_in_every_word() -> None:
    """Doubled braces give single ones; a plan without typed arms leaves all of them alone."""
    typed = ("{arm}/run", "--out={arm}-{arm}.txt", "{{arm}}", "{ARM}", "{}", "{{{arm}}}")
    plan = Plan(command=typed, arms=(A, B, C), slots=(), has_places=True)
    assert plan.command_of(B) == ("b/run", "--out=b-b.txt", "{arm}", "{ARM}", "{}", "{{arm}}")
    assert Plan(command=typed, arms=ARMS, slots=()).command_of(ARMS[0]) == typed


def test_a_control_is_run_as_the_base() -> None:
    """Its runs have the base's name and variables: a program must not see which it is."""
    arms = plan_arms((A, B), different=(), with_control=True)
    plan = Plan(command=("x",), arms=arms, slots=())
    assert [plan.played(arm.name).name for arm in arms] == ["a", "b", "a"]
