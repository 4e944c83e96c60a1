import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lucid_profiler
from lucid_profiler.digest import digest_state
from lucid_profiler.errors import ReportError
from lucid_profiler.locate import (
    ElementDifference,
    element_difference,
    first_difference,
    locate_element,
    locate_step,
    ulp_distance,
)
from lucid_profiler.saved_state import StateSaver
from lucid_profiler.step_digests import Moment, PartDigest, StepDigests, StepState

STARTUP = Path(lucid_profiler.__file__).parent / "_startup"


def part(state: Any, *, with_tensors: bool = True) -> PartDigest:
    """Return a part as a file of step digests gives it."""
    digest = digest_state(state)
    tensors = "".join(tensor.digest for tensor in digest.tensors.values()) if with_tensors else None
    return PartDigest(digest.digest, tuple(digest.tensors), tensors)


def moment(step: int, when: Any = "after", optimizer: int = 0, **states: Any) -> StepState:
    """Return one moment."""
    parts = {name: part(state) for name, state in states.items()}
    return StepState(moment=Moment(step, when, optimizer), parts=parts)


def steps(num_steps: int, **last: Any) -> list[StepState]:
    """Return the moments after so many steps, the last of them with other values."""
    found = [moment(step, parameters={"a": 1.0, "b": float(step)}) for step in range(1, num_steps)]
    return [*found, moment(num_steps, **(last or {"parameters": {"a": 1.0, "b": float(num_steps)}}))]


def test_equal_runs_agree_in_every_step() -> None:
    """Nothing differs, and the number of steps says how far that was seen."""
    located = first_difference(steps(4), iter(steps(4)))
    assert (located.num_steps, located.difference, located.num_unseen) == (4, None, 0)


def test_the_first_step_part_and_tensor_are_named() -> None:
    """Later differences do not matter."""
    b = [*steps(3, parameters={"a": 1.0, "b": 7.0}), moment(4, parameters={"a": 5.0, "b": 5.0})]
    located = first_difference(steps(4), b)
    assert located.num_steps == 2
    difference = located.difference
    assert difference is not None
    assert (difference.step, difference.when, difference.part, difference.tensor) == (3, "after", "parameters", "b")
    assert difference.text == "after step 3: parameters b"


def test_gradients_come_before_what_follows_from_them() -> None:
    """Within a moment the parts have an order of their own."""
    a, b = ([moment(1, "before", parameters={"w": v}, gradients={"w": v})] for v in (1.0, 2.0))
    difference = first_difference(a, b).difference
    assert difference is not None
    assert difference.part == "gradients"


def test_a_tensor_that_one_run_lacks_is_named() -> None:
    """With the run."""
    located = first_difference(steps(2), steps(2, parameters={"a": 1.0, "b": 2.0, "c": 0.0}))
    assert located.difference is not None
    assert located.difference.text == "after step 2: parameters c, which the first run lacks"


def test_another_structure_of_equal_tensors_is_told() -> None:
    """No tensor is to blame."""
    located = first_difference([moment(1, parameters={"a": [1.0]})], [moment(1, parameters={"a": (1.0,)})])
    assert located.difference is not None
    assert (located.difference.tensor, located.difference.text) == (
        None,
        "after step 1: parameters: the same tensors in another structure",
    )


def test_beyond_the_bound_the_part_is_named() -> None:
    """Where digests of single tensors were no longer written."""
    a, b = (
        StepState(moment=Moment(9, "after", 0), parts={"parameters": part({"a": value}, with_tensors=False)})
        for value in (1.0, 2.0)
    )
    difference = first_difference([a], [b]).difference
    assert difference is not None
    assert (difference.part, difference.tensor, difference.text) == ("parameters", None, "after step 9: parameters")


@pytest.mark.parametrize(("a", "b", "which"), [(3, 5, "first"), (5, 3, "second")])
def test_a_run_that_ends_early_is_told(a: int, b: int, which: str) -> None:
    """With the number of steps that both have."""
    located = first_difference(steps(a), steps(b))
    assert located.difference is not None
    assert (located.difference.step, located.difference.part) == (4, None)
    assert located.difference.text == f"the {which} run ends after 3 steps, the other goes on"


def test_other_steps_are_told() -> None:
    """When another optimizer steps."""
    difference = first_difference([moment(1)], [moment(1, optimizer=2)]).difference
    assert difference is not None
    assert difference.text == (
        "the runs take other steps: after step 1 of optimizer 0 in the first, after step 1 of optimizer 2 in the second"
    )


def test_what_one_run_could_not_read_is_counted() -> None:
    """It is no difference."""
    located = first_difference([moment(1), *steps(3)[1:]], steps(3))
    assert (located.num_steps, located.difference, located.num_unseen) == (3, None, 1)


def every_place(numbers: "np.ndarray[Any, Any]") -> dict[int, int]:
    """Return the place of each 16-bit pattern among all numbers of its type, found by sorting them."""
    finite_or_infinite = sorted({float(value) for value in numbers if not math.isnan(value)})
    places = {value: place for place, value in enumerate(finite_or_infinite)}
    return {bits: places[float(v)] for bits, v in enumerate(numbers) if not math.isnan(v)}


HALF = every_place(np.arange(2**16, dtype="<u2").view("<f2").astype("<f8"))
BRAIN = every_place((np.arange(2**16, dtype="<u4") << 16).astype("<u4").view("<f4"))


@given(st.sampled_from([("float16", HALF), ("bfloat16", BRAIN)]), st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_the_distance_of_short_floats_is_that_of_the_sorted_numbers(
    kind: tuple[str, dict[int, int]], a: int, b: int
) -> None:
    """Zeros, subnormal numbers and infinities included; a NaN is at no distance."""
    dtype, places = kind
    expected = abs(places[a] - places[b]) if a in places and b in places else None
    assert ulp_distance(a, b, dtype) == expected


@given(
    st.one_of(
        st.floats(width=32, allow_nan=False).map(lambda value: np.array([value], "<f4")),
        st.floats(width=64, allow_nan=False).map(lambda value: np.array([value], "<f8")),
        st.sampled_from([np.array([value], kind) for value in (0.0, -0.0, 1.0, -2.0) for kind in ("<f4", "<f8")]),
        st.sampled_from([np.array([np.finfo(kind).max], kind) for kind in ("<f4", "<f8")]),
    ),
    st.integers(0, 40),
)
def test_the_distance_is_the_number_of_next_numbers(value: "np.ndarray[Any, Any]", count: int) -> None:
    """As numpy steps from one to the next, through zero and up to infinity, where it stays."""
    end, num_taken = value, 0
    with np.errstate(all="ignore"):
        while num_taken < count and end[0] != math.inf:
            end, num_taken = np.nextafter(end, np.array([math.inf], value.dtype)), num_taken + 1
    bits = [int(each.view(f"u{value.dtype.itemsize}")[0]) for each in (value, end)]
    assert ulp_distance(bits[0], bits[1], value.dtype.name) == num_taken
    assert ulp_distance(bits[1], bits[0], value.dtype.name) == num_taken


def locate_in(tmp_path: Path, a: Any, b: Any, tensor: str | None = None) -> ElementDifference | None:
    """Save two states and compare them."""
    for name, state in (("a", a), ("b", b)):
        assert StateSaver(tmp_path / name, note=print).save("model", state)
    return element_difference(tmp_path / "a", tmp_path / "b", part="model", tensor=tensor)


def from_bits(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of six elements whose element [1, 0] has these bits."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    width = dtype.itemsize
    tensor = torch.zeros(3, 2, dtype=widths[width])
    signed = int.from_bytes(bits.to_bytes(width, "little"), "little", signed=width > 1)
    tensor[1, 0] = signed
    return tensor.view(dtype)


FLOATS = [
    (torch.float32, 0x3F800000, 0x3F800003, "1.0", "1.0000003576278687", 3),
    (torch.float32, 0x00000000, 0x80000000, "0.0", "-0.0", 0),
    (torch.float32, 0x7F7FFFFF, 0x7F800000, "3.4028234663852886e+38", "inf", 1),
    (torch.float32, 0x00000001, 0x80000001, "1.401298464324817e-45", "-1.401298464324817e-45", 2),
    (torch.float32, 0x7FC00000, 0x7FC00001, "nan", "nan", None),
    (torch.float32, 0x3F800000, 0x7FC00000, "1.0", "nan", None),
    (torch.float64, 0x3FF0000000000000, 0x3FF0000000000001, "1.0", "1.0000000000000002", 1),
    (torch.float64, 0xFFF0000000000000, 0x7FF0000000000000, "-inf", "inf", 2 * 0x7FF0000000000000),
    (torch.float16, 0x3C00, 0xBC00, "1.0", "-1.0", 2 * 0x3C00),
    (torch.bfloat16, 0x3F80, 0x3F81, "1.0", "1.0078125", 1),
    (torch.bfloat16, 0x7F80, 0xFF81, "inf", "nan", None),
]


@pytest.mark.parametrize(("dtype", "a", "b", "value_a", "value_b", "ulps"), FLOATS)
def test_the_first_element_is_named_with_its_bits(
    tmp_path: Path, dtype: torch.dtype, a: int, b: int, value_a: str, value_b: str, ulps: int | None
) -> None:
    """Index, both values, both patterns and their distance."""
    found = locate_in(tmp_path, {"w": from_bits(a, dtype)}, {"w": from_bits(b, dtype)})
    digits = 2 * dtype.itemsize
    assert found == ElementDifference(
        part="model",
        tensor="w",
        dtype=str(dtype)[6:],
        index=(1, 0),
        values=(value_a, value_b),
        bits=(f"0x{a:0{digits}x}", f"0x{b:0{digits}x}"),
        ulps=ulps,
    )


@pytest.mark.parametrize(
    ("dtype", "a", "b", "difference"),
    [
        (torch.int64, -(2**63), 2**63 - 1, 2**64 - 1),
        (torch.int32, 5, -2, -7),
        (torch.int8, -1, 127, 128),
        (torch.uint8, 255, 0, -255),
    ],
)
def test_integers_have_a_plain_difference(tmp_path: Path, dtype: torch.dtype, a: int, b: int, difference: int) -> None:
    """The second minus the first, whatever the type could hold."""
    found = locate_in(tmp_path, torch.tensor([0, a], dtype=dtype), torch.tensor([0, b], dtype=dtype))
    assert found is not None
    assert (found.tensor, found.index, found.values) == ("(value)", (1,), (str(a), str(b)))
    assert (found.ulps, found.difference) == (None, difference)


def test_other_types_have_their_bits(tmp_path: Path) -> None:
    """Truth values in words, 8-bit floats as their patterns."""
    found = locate_in(tmp_path, torch.tensor([True]), torch.tensor([False]))
    assert found is not None
    assert (found.values, found.bits, found.ulps, found.difference) == (("True", "False"), ("0x01", "0x00"), None, None)
    found = locate_in(tmp_path, from_bits(0x38, torch.float8_e4m3fn), from_bits(0x39, torch.float8_e4m3fn))
    assert found is not None
    assert (found.values, found.index) == (("0x38", "0x39"), (1, 0))
    assert found.text == "model (value)[1, 0] (float8_e4m3fn): 0x38 against 0x39"


def test_a_complex_number_names_its_component(tmp_path: Path) -> None:
    """The one that differs first."""
    a = torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex64)
    b = torch.complex(a.real, torch.nextafter(a.imag, torch.tensor([2.0, 9.0])))
    found = locate_in(tmp_path, {"z": a}, {"z": b})
    assert found is not None
    assert (found.index, found.component, found.ulps) == ((1,), "imag", 1)
    assert (
        found.text
        == "model z[1].imag (complex64): 4.0 (0x40800000) against 4.000000476837158 (0x40800001), 1 ULP apart"
    )


def test_values_that_lie_apart_in_memory_are_indexed_as_seen(tmp_path: Path) -> None:
    """The index is that of the tensor, not of its storage."""
    a = torch.arange(12.0).reshape(3, 4).T
    b = a.clone()
    b[2, 1] += 1
    found = locate_in(tmp_path, a, b)
    assert found is not None
    assert (found.index, found.values) == ((2, 1), ("6.0", "7.0"))


@pytest.mark.parametrize("place", [0, 65_535, 65_536, 99_999])
def test_an_element_far_in_is_found(tmp_path: Path, place: int) -> None:
    """In whichever chunk it is."""
    a = torch.zeros(100_000, dtype=torch.uint8)
    b = a.clone()
    b[place:] = 1
    found = locate_in(tmp_path, a, b)
    assert found is not None
    assert found.index == (place,)


def test_equal_bytes_have_no_difference(tmp_path: Path) -> None:
    """NaNs of one pattern are equal, and strides do not matter."""
    tensor = torch.tensor([[math.nan, -0.0], [1.0, 2.0]])
    assert locate_in(tmp_path, {"a": tensor}, {"a": tensor.T.contiguous().T}) is None


PLAIN = [
    (0.1, 0.2, "(float): 0.1 (0x3fb999999999999a) against 0.2 (0x3fc999999999999a), 4,503,599,627,370,496 ULPs apart"),
    (3, 10, "(int): 3 against 10, a difference of +7"),
    (1 << 300, (1 << 300) - 1, f"(int): 0x1{'0' * 56}… against 0x{'f' * 57}…"),
    (True, False, "(bool): True (0x01) against False (0x00)"),
    ("adam", "sgd\n", r"(str): 'adam' against 'sgd\n'"),
    (b"\x00", b"\x01", r"(bytes): b'\x00' against b'\x01'"),
    (None, 1, "(none and int): none against 1"),
    ((), [], "(tuple and list): tuple against list"),
    (
        1 + 2j,
        1 + 3j,
        ".imag (complex): 2.0 (0x4000000000000000) against 3.0 (0x4008000000000000), 2,251,799,813,685,248 ULPs apart",
    ),
    (1.0, 1, "(float and int): 1.0 against 1"),
]


@pytest.mark.parametrize(("a", "b", "text"), PLAIN, ids=repr)
def test_a_value_beside_the_tensors_is_shown(tmp_path: Path, a: Any, b: Any, text: str) -> None:
    """As Python writes it, with bits and distance where it has some."""
    found = locate_in(tmp_path, {"x": a}, {"x": b})
    assert found is not None
    assert found.text == f"model x{'' if text.startswith('.') else ' '}{text}"


UNLIKE = [
    ({"a": torch.zeros(2)}, {"a": torch.zeros(3)}, "float32[2] against float32[3]"),
    ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}, "float32[2] against int32[2]"),
    ({"a": torch.zeros(0, 2)}, {"a": torch.zeros(2, 0)}, "float32[0, 2] against float32[2, 0]"),
    ({"a": 1, "b": 2}, {"a": 1}, "2 against missing"),
    ({"a": 1}, {"c": 1}, "1 against c: 1"),
]


@pytest.mark.parametrize(("a", "b", "text"), UNLIKE)
def test_leaves_that_cannot_be_compared_are_described(tmp_path: Path, a: Any, b: Any, text: str) -> None:
    """Another type or shape, or none at all."""
    found = locate_in(tmp_path, a, b)
    assert found is not None
    assert text in found.text
    assert found.index is None


def test_one_tensor_can_be_asked_for(tmp_path: Path) -> None:
    """Others that differ are passed over."""
    a, b = ({"a": torch.tensor([value]), "b": torch.tensor([-value])} for value in (1.0, 2.0))
    found = locate_in(tmp_path, a, b, tensor="b")
    assert found is not None
    assert (found.tensor, found.values) == ("b", ("-1.0", "-2.0"))


def test_processes_are_matched_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the numbers that the system gave them; of several that differ the earliest step counts."""
    for name, pids in (("a", (7, 8)), ("b", (9, 1))):
        (tmp_path / name).mkdir()
        for rank, pid in enumerate(pids):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
            digests = StepDigests(tmp_path / name, note=print)
            for step in range(1, 4):
                has_changed = name == "b" and step > 2 - rank
                digests.take(Moment(step, "after", 0), {"parameters": {"w": [rank, step, has_changed]}})
    located = locate_step(tmp_path / "a", tmp_path / "b")
    assert located.difference is not None
    assert (located.difference.step, located.difference.tensor) == (2, "w.2")
    assert located.difference.process is not None
    assert located.difference.process.rank == 1


SCRIPT = """
import sys, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 7):
    optimizer.zero_grad()
    net(torch.randn(2, 3)).square().mean().backward()
    optimizer.step()
    if step == 4 and sys.argv[1] == "broken":
        with torch.no_grad():
            net[0].bias.view(torch.int32)[2] += 3
"""


def run(directory: Path, arm: str, **env: str) -> Path:
    """Run the script under the agent; return its directory."""
    script, run_dir = directory / "script.py", directory / f"run-{arm}-{len(env)}"
    script.write_text(SCRIPT)
    run_dir.mkdir()
    settings = {**os.environ, "LUCID_RUN_DIR": str(run_dir), "PYTHONPATH": str(STARTUP), **env}
    subprocess.run([sys.executable, str(script), arm], env=settings, cwd=directory, check=True)
    return run_dir


def test_a_changed_bit_is_located_from_step_to_element(tmp_path: Path) -> None:
    """Two re-runs with step digests, two with the state of the step that these name."""
    located = locate_step(*(run(tmp_path, arm, LUCID_STEP_DIGESTS="1") for arm in ("whole", "broken")))
    difference = located.difference
    assert difference is not None
    # The change comes after step 4: what the next step's gradients are made from has it.
    assert (located.num_steps, difference.step, difference.when, difference.part) == (4, 5, "before", "gradients")
    for arm in ("whole", "broken"):
        saving = {"LUCID_SAVE_STATE": "saved", "LUCID_SAVE_NAME": arm, "LUCID_SAVE_STEP": str(difference.step)}
        run(tmp_path, arm, **saving)
    folders = [tmp_path / "saved" / arm for arm in ("whole", "broken")]
    found = locate_element(folders[0], folders[1], difference)
    assert found is not None
    assert found.tensor == difference.tensor
    values = [struct.unpack("<f", int(bits, 16).to_bytes(4, "little"))[0] for bits in found.bits]
    assert [repr(value) for value in values] == list(found.values)
    assert found.ulps
    assert locate_element(folders[0], folders[0], difference) is None


def test_a_step_that_was_not_saved_is_told(tmp_path: Path) -> None:
    """With run, part and step."""
    difference = first_difference(steps(2), steps(2, parameters={"a": 2.0})).difference
    assert difference is not None
    with pytest.raises(ReportError, match="a: parameters was not saved after step 2"):
        locate_element(tmp_path / "a", tmp_path / "b", difference)
