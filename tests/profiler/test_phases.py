"""Where the time of a run goes, from the phases that its script marked."""

from dataclasses import replace

from lucid_profiler.phases import PhaseTime, phase_times, within_wall
from lucid_profiler.records import AgentHealth, Phase, Run, Wall


def run_of(*marks: tuple[str, int], fit: tuple[int, int] = (0, 100), end: int = 100) -> Run:
    """Return a run with marks at these seconds, each until the next one, the last one until `end`."""
    ends = [*(second for _, second in marks), end][1:]
    phases = tuple(
        Phase(name=name, begin_ns=begin * 10**9, end_ns=stop * 10**9)
        for (name, begin), stop in zip(marks, ends, strict=True)
    )
    return Run(
        run=0,
        pair=0,
        arm="native",
        status="ok",
        started="2026-01-02T03:04:05Z",
        process_ns=end * 10**9,
        agent=AgentHealth(loaded=True),
        wall=Wall(source="fit", begin_ns=fit[0] * 10**9, end_ns=fit[1] * 10**9),
        phases=phases,
    )


def seconds_of(*runs: Run) -> dict[str | None, float]:
    """Return the seconds of each phase."""
    return {phase.name: phase.seconds for phase in phase_times(runs)}


def test_marks_that_recur_are_summed() -> None:
    """Train, validate, train, validate: each name once, in the order of its first mark, with its share."""
    found = phase_times([run_of(("load", 0), ("train", 10), ("validate", 40), ("train", 50), ("validate", 90))])
    assert found == (
        PhaseTime(name="load", seconds=10, share=0.1),
        PhaseTime(name="train", seconds=70, share=0.7),
        PhaseTime(name="validate", seconds=20, share=0.2),
    )


def test_the_median_run_counts_and_an_absent_phase_is_no_time() -> None:
    """Three runs, of which one never wrote a checkpoint."""
    runs = [
        run_of(("train", 0), ("checkpoint", 90)),
        run_of(("train", 0), ("checkpoint", 96)),
        run_of(("train", 0)),
    ]
    assert seconds_of(*runs) == {"train": 96, "checkpoint": 4}


def test_phases_are_cut_to_the_wall_and_the_rest_is_in_no_phase() -> None:
    """A mark before the interval and the end of the process after it add nothing; what no mark covers has no name."""
    run = run_of(("import", 0), ("train", 40), ("train", 60), end=120, fit=(10, 100))
    assert seconds_of(run) == {"import": 30, "train": 60}
    assert seconds_of(run_of(("train", 40), fit=(10, 100))) == {"train": 60, None: 30}
    assert seconds_of(run_of(("early", 0), ("train", 5), fit=(10, 100))) == {"train": 90}


def test_every_phase_is_cut_by_itself_and_none_is_lost() -> None:
    """What begins before the interval or ends after it is shorter, what lies outside has no length but its place."""
    run = run_of(("early", 0), ("train", 5), ("save", 90), ("exit", 110), end=120, fit=(10, 100))
    cut = [(phase.name, phase.begin_ns // 10**9, phase.end_ns // 10**9) for phase in within_wall(run)]
    assert cut == [("early", 10, 10), ("train", 10, 90), ("save", 90, 100), ("exit", 100, 100)]
    assert within_wall(replace(run, wall=None)) == run.phases


def test_a_wall_without_length_has_no_phases() -> None:
    """Nothing is divided by 0."""
    assert phase_times([run_of(("train", 0), fit=(5, 5))]) == ()


def test_without_marks_there_are_no_phases() -> None:
    """Neither is a rest invented."""
    assert phase_times([run_of()]) == ()
    assert phase_times([]) == ()
    assert phase_times([replace(run_of(("train", 0)), wall=None)]) == ()
