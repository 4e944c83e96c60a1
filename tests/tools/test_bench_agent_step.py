import json
from pathlib import Path

import pytest
from tools.bench import agent_step


def test_every_step_of_both_kinds_of_process_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A round has one process with the agent and one without, in turn; the printed medians are of them."""
    agent_step.main(["--rounds", "2", "--steps", "15", "--output", str(tmp_path / "out.jsonl")])
    header, in_ring, *records = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (header["rounds"], header["steps"]) == (2, 15)
    assert [(one["round"], one["with_agent"]) for one in records] == [(0, False), (0, True), (1, True), (1, False)]
    assert {len(one["seconds"]) for one in records} == {15}
    assert (in_ring["kind"], len(in_ring["seconds"])) == ("record", agent_step.NUM_BATCHES)
    assert min(in_ring["seconds"]) > 0
    assert "medians of 2 rounds" in capsys.readouterr().out


def test_a_process_in_which_the_agent_is_not_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps it out would read a cost of nothing."""
    monkeypatch.setattr(agent_step, "child_env", lambda base, _arm, _run_dir: dict(base))
    with pytest.raises(RuntimeError, match="the agent is not in the process"):
        agent_step.run(5, with_agent=True)
