import copy
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lucid_profiler.errors import ReportError
from lucid_profiler.reader import read_report
from lucid_profiler.shared_digests import StateDecoder

BODY: dict[str, Any] = {
    "run": 0,
    "process": 0,
    "part": "model",
    "digest": "ab" * 32,
    "num_tensors": 1,
    "num_bytes": 4,
    "strides_digest": "cd" * 32,
    "tensors": {"w": ["00" * 8, "float32", [1]]},
}


def _body(run: int, **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(BODY), "run": run, **changes}


def test_equal_digests_are_shared_and_others_are_not() -> None:
    """Whatever else differs between two states, the fields of each are its own."""
    decoder = StateDecoder()
    first, again, other = (
        decoder.decode(body, Counter())
        for body in (_body(0), _body(1, part="ema"), _body(2, tensors={"w": ["11" * 8, "float32", [1]]}))
    )
    assert first.tensors is again.tensors
    assert (again.run, again.part, again.tensors["w"].shape) == (1, "ema", (1,))
    assert other.tensors["w"].digest == "11" * 8


@pytest.mark.parametrize("shape", [[True], [1.0], ["1"], [None]])
def test_what_only_looks_equal_is_looked_at(shape: list[Any]) -> None:
    """In Python 1 == True == 1.0; in a report each is what it is."""
    decoder = StateDecoder()
    decoder.decode(_body(0), Counter())
    with pytest.raises(ValueError, match=r"state\.tensors\.w"):
        decoder.decode(_body(1, tensors={"w": ["00" * 8, "float32", shape]}), Counter())


def test_the_memory_of_many_states_is_bounded() -> None:
    """What was not met for long is decoded again, to the same values."""
    decoder = StateDecoder()
    first = decoder.decode(_body(0), Counter())
    for index in range(200):
        decoder.decode(_body(index, tensors={f"w{index}": ["00" * 8, "float32", [1]]}), Counter())
    again = decoder.decode(_body(0), Counter())
    assert len(decoder._known) <= 64
    assert again == first
    assert again.tensors is not first.tensors


def test_reading_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    """Also when the file is damaged."""
    assert gc.isenabled()
    (tmp_path / "r.jsonl").write_text("no report\n")
    with pytest.raises(ReportError):
        read_report(tmp_path / "r.jsonl")
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(ReportError):
            read_report(tmp_path / "r.jsonl")
        assert not gc.isenabled()
    finally:
        gc.enable()
