from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucid_profiler.monitor.visible import Known, names_by_number, resolve

A, B, C = "GPU-aaaaaa11-0000", "GPU-aaaaaa22-0000", "GPU-cccccc33-0000"
GPUS = tuple(Known(uuid=uuid) for uuid in (A, B, C))
FIRST, SECOND = "MIG-11112222-0000", "MIG-33334444-0000"
DIVIDED = (
    Known(uuid=A),
    Known(uuid=B),
    Known(uuid=FIRST, parent_uuid=B, gpu_instance=1, compute_instance=0),
    Known(uuid=SECOND, parent_uuid=B, gpu_instance=2, compute_instance=0),
)
ENTRIES = ("0", "1", "2", "99", "-1", "", " 1 ", "2gpu", "+0", "x", A, B[:12], "GPU-", "GPU-zzz")

# No two of them name the same GPU: torch looks for duplicates after the list's end too.
UNLIKE_ENTRIES = ("+0", " 1 ", "2gpu", "99", "-1", "", "x", A, B[:12], "GPU-", "GPU-zzz")


@pytest.mark.parametrize(
    ("text", "uuids"),
    [
        (None, (A, B, C)),
        ("", ()),
        (" ", ()),
        ("-1", ()),
        ("1", (B,)),
        ("1,0", (B, A)),
        ("0,,1", (A,)),
        (" 1 , 0 ", (B, A)),
        ("0,0", ()),
        ("0,1,0", ()),
        ("0,99,1", (A,)),
        ("0,2,-1,1", (A, C)),
        ("1gpu2,0", (B, A)),
        ("no", ()),
        ("NoDevFiles", ()),
        ("0," + "9" * 5_000, (A,)),
        ("²", ()),
        ("\udcff", ()),
        (A, (A,)),
        (f"{C},{A}", (C, A)),
        (f"{A},{A}", ()),
        (f"{A},0,{B}", (A,)),
        (f"0,{B}", (A,)),
        (A.lower(), ()),
    ],
)
def test_a_list_reads_as_cuda_reads_it(text: str | None, uuids: tuple[str, ...]) -> None:
    """Numbers, UUIDs, blanks, what ends a list and what voids it."""
    assert resolve(text, GPUS) == uuids


@pytest.mark.parametrize(
    ("prefix", "uuids"), [("GPU-a", ()), ("GPU-aaaaaa", ()), ("GPU-aaaaaa1", (A,)), ("GPU-c", (C,)), ("GPU-", ())]
)
def test_a_prefix_must_be_unique(prefix: str, uuids: tuple[str, ...]) -> None:
    """Of two GPUs whose UUIDs share six characters, the seventh tells."""
    assert resolve(prefix, GPUS) == uuids


def test_two_prefixes_of_one_gpu_void_the_list() -> None:
    """A device named twice leaves none, however it is spelled."""
    assert resolve("GPU-aaaaaa1,GPU-aaaaaa11", GPUS) == ()


@pytest.mark.parametrize(
    ("text", "uuids"),
    [
        (SECOND, (SECOND,)),
        ("MIG-3", (SECOND,)),
        ("MIG-", ()),
        (f"{SECOND},{FIRST}", (SECOND,)),
        (f"MIG-{B}/2/0", (SECOND,)),
        (f"MIG-{B}/9/0", ()),
        ("1", (FIRST,)),
        (B, (FIRST,)),
        ("0", (A,)),
        ("0,1", (FIRST,)),
        (None, (FIRST,)),
        (f"{SECOND},0", (SECOND,)),
    ],
)
def test_cuda_shows_one_instance_of_a_divided_gpu(text: str | None, uuids: tuple[str, ...]) -> None:
    """An instance is named by its UUID, old or new; a divided GPU means its first; no whole GPU stands beside it."""
    assert resolve(text, DIVIDED) == uuids


@settings(deadline=None)  # the machine may be busy
@given(st.one_of(st.none(), st.text(), st.lists(st.sampled_from([*ENTRIES, FIRST, SECOND])).map(",".join)))
def test_no_value_is_too_odd(text: str | None) -> None:
    """Any text gives known UUIDs, none twice."""
    for devices in (GPUS, DIVIDED, ()):
        uuids = resolve(text, devices)
        assert set(uuids) <= {device.uuid for device in devices}
        assert len(set(uuids)) == len(uuids)
    names_by_number(text)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.sampled_from(UNLIKE_ENTRIES), unique=True, min_size=1).map(",".join))
def test_torch_counts_the_same_devices(text: str) -> None:
    """torch, which follows libcuda, sees as many devices."""
    cuda: Any = pytest.importorskip("torch").cuda
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", text)
        parsed = cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        expected = [GPUS[at].uuid for at in cuda._transform_uuid_to_ordinals(parsed, [gpu.uuid for gpu in GPUS])]
    else:
        ends = next((place for place, number in enumerate(parsed) if number >= len(GPUS)), len(parsed))
        expected = [GPUS[number].uuid for number in parsed[:ends]]
    assert resolve(text, GPUS) == tuple(expected)


@pytest.mark.parametrize(("text", "answer"), [("0,1", True), (" 1", True), (A, False), ("", False), (None, False)])
def test_numbers_are_told_from_uuids(text: str | None, answer: bool) -> None:
    """Only numbers need CUDA's order to be understood."""
    assert names_by_number(text) is answer
