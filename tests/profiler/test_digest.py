import hashlib
import json
import math
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from lucid_profiler import digest as digest_module
from lucid_profiler.digest import TensorDigest, digest_state, first_difference

EVERY_KIND: dict[str, torch.Tensor] = {
    "float32": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "float64": torch.arange(3, dtype=torch.float64),
    "float16": torch.arange(5, dtype=torch.float16),
    "bfloat16": torch.arange(5, dtype=torch.bfloat16),
    "float8_e4m3fn": torch.arange(5).to(torch.float8_e4m3fn),
    "int64": torch.tensor(7),
    "int8": torch.tensor([-1, 2], dtype=torch.int8),
    "uint8": torch.tensor([255, 2], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "complex64": torch.tensor([1 + 2j, -0.0 - 1j], dtype=torch.complex64),
    "complex128": torch.tensor(1 - 2j, dtype=torch.complex128),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
}


class Opaque(torch.Tensor):
    """A wrapper that does not say what is in it."""

    @staticmethod
    def __new__(cls: type, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        raise AssertionError("what it does may be anything, communication included")


class Boastful(Opaque):
    """Such a wrapper that says where its inner tensor's memory is."""

    def data_ptr(self) -> int:
        return self.held.data_ptr()


class Open(Opaque):
    """A wrapper that says what is in it."""

    context: Any = None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], self.context


class Other(Open):
    """Another one."""


def freed(tensor: torch.Tensor, at: tuple[slice, ...] = ()) -> torch.Tensor:
    """Return a view of a tensor whose storage has been let go, as FSDP does."""
    view = tensor[at]
    tensor.untyped_storage().resize_(0)
    return view


def fake() -> torch.Tensor:
    """Return a tensor that only plays one on the host."""
    with FakeTensorMode():
        return torch.ones(3)


WITHOUT_MEMORY: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "opaque wrapper": (lambda: Opaque(torch.ones(3)), "Opaque"),
    "boastful wrapper": (lambda: Boastful(torch.ones(3)), "Boastful"),
    "opaque in a wrapper": (lambda: TwoTensor(torch.ones(3), Opaque(torch.ones(3))), "w.b is a .*Opaque"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(3)), r"torch\.Tensor of 12 bytes"),
    "zero": (lambda: torch._efficientzerotensor((3,)), r"torch\.Tensor of 12 bytes"),
    "fake": (fake, "FakeTensor"),
    "freed": (lambda: freed(torch.ones(4)), r"torch\.Tensor of 16 bytes"),
    "freed with an offset": (lambda: freed(torch.ones(4), at=(slice(2, None),)), r"torch\.Tensor of 8 bytes"),
    "freed and transposed": (
        lambda: freed(torch.ones(4, 4).T, at=(slice(1, None), slice(1, None))),
        r"torch\.Tensor of 36 bytes",
    ),
}


def packed(number: int) -> bytes:
    """Return a 64-bit little-endian integer."""
    return number.to_bytes(8, "little", signed=True)


def text(value: str) -> bytes:
    """Return length and UTF-8."""
    return packed(len(value.encode())) + value.encode()


def reference_leaf(kind: str, dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """Hash one leaf as the module's docstring says."""
    sizes = b"".join(map(packed, (len(shape), *shape)))
    blob = text("lucid.leaf/1") + text(kind) + text(dtype) + sizes + packed(len(data)) + data
    return hashlib.sha256(blob).digest()


def reference_bytes(tensor: torch.Tensor) -> bytes:
    """Return the logical row-major bytes element by element, without any view or copy of the tensor as a whole."""
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    out = b""
    for index in np.ndindex(*tensor.shape):
        item = tensor[index].clone()
        parts = [item.real.clone(), item.imag.clone()] if tensor.is_complex() else [item]
        for part in parts:
            size = part.element_size()
            bits = int(part.reshape(1).view(as_int[size]).item())
            out += bits.to_bytes(size, "little", signed=bits < 0)
    return out


def reference_tensor(tensor: torch.Tensor) -> bytes:
    """Hash a tensor's leaf."""
    return reference_leaf("tensor", str(tensor.dtype)[6:], tuple(tensor.shape), reference_bytes(tensor))


def reference_digest(leaves: list[tuple[list[tuple[str, str]], bytes]]) -> str:
    """Hash a state given as (steps, leaf digest), each step as (letter, key)."""
    named = [
        (packed(len(steps)) + b"".join(letter.encode() + text(key) for letter, key in steps), leaf)
        for steps, leaf in leaves
    ]
    return hashlib.sha256(text("lucid.state/1") + b"".join(path + leaf for path, leaf in sorted(named))).hexdigest()


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_tensor_of_every_kind_has_the_documented_digest(name: str) -> None:
    """Every dtype, a scalar and an empty tensor hash as an element-by-element reference does."""
    tensor = EVERY_KIND[name]
    got = digest_state({name: tensor})
    assert got.digest == reference_digest([([("s", name)], reference_tensor(tensor))])
    expected = TensorDigest(reference_tensor(tensor).hex()[:16], str(tensor.dtype)[6:], tuple(tensor.shape))
    assert got.tensors == {name: expected}
    assert (got.num_tensors, got.num_bytes) == (1, tensor.numel() * tensor.element_size())


def test_a_nested_optimizer_state_has_the_documented_digest() -> None:
    """Numbers, text and empty containers beside the tensors are hashed with their type and exact bits."""
    buffer = torch.ones(2, 2)
    state = {
        "state": {0: {"momentum_buffer": buffer, "step": 3}},
        "param_groups": [{"lr": -0.0, "betas": (0.9,), "foreach": None, "nesterov": True, "name": "ü", "params": []}],
        "scale": 1 + 2j,
        "raw": b"\x00",
    }
    group = [("s", "param_groups"), ("l", "0")]
    expected = reference_digest(
        [
            ([("s", "state"), ("i", "0"), ("s", "momentum_buffer")], reference_tensor(buffer)),
            ([("s", "state"), ("i", "0"), ("s", "step")], reference_leaf("plain", "int", (), b"3")),
            ([*group, ("s", "lr")], reference_leaf("plain", "float", (), struct.pack("<d", -0.0))),
            ([*group, ("s", "betas"), ("t", "0")], reference_leaf("plain", "float", (), struct.pack("<d", 0.9))),
            ([*group, ("s", "foreach")], reference_leaf("plain", "none", (), b"")),
            ([*group, ("s", "nesterov")], reference_leaf("plain", "bool", (), b"\x01")),
            ([*group, ("s", "name")], reference_leaf("plain", "str", (), "ü".encode())),
            ([*group, ("s", "params")], reference_leaf("plain", "list", (), b"")),
            ([("s", "scale")], reference_leaf("plain", "complex", (), struct.pack("<2d", 1, 2))),
            ([("s", "raw")], reference_leaf("plain", "bytes", (), b"\x00")),
        ]
    )
    got = digest_state(state)
    assert got.digest == expected
    assert "state.0.momentum_buffer" in got.tensors
    assert "param_groups.0.betas.0" in got.tensors
    assert (got.num_tensors, got.num_bytes) == (1, 16)


@given(st.sampled_from(sorted(EVERY_KIND)), st.integers(min_value=0))
@settings(max_examples=60)
def test_one_flipped_bit_is_found_and_the_tensor_named(name: str, position: int) -> None:
    """Whatever bit of whatever tensor changes, the digest changes and only that tensor's name is given."""
    raw = EVERY_KIND[name].clone().contiguous()
    flat = raw.reshape(-1).view(torch.uint8)
    if flat.numel() == 0:
        return
    place = position % (flat.numel() * 8)
    before = digest_state(EVERY_KIND)
    changed = dict(EVERY_KIND)
    flat[place // 8] ^= 1 << (place % 8)
    changed[name] = raw
    after = digest_state(changed)
    assert after.digest != before.digest
    assert first_difference(before.tensors, after.tensors) == name
    assert [key for key in before.tensors if before.tensors[key] != after.tensors[key]] == [name]


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_missing_key_is_a_difference(name: str) -> None:
    """A tensor that one side lacks is named, on whichever side it lacks."""
    whole = digest_state(EVERY_KIND)
    part = digest_state({key: value for key, value in EVERY_KIND.items() if key != name})
    assert whole.digest != part.digest
    assert first_difference(whole.tensors, part.tensors) == name
    assert first_difference(part.tensors, whole.tensors) == name


def test_equal_states_have_no_difference() -> None:
    """Order of keys, kind of mapping and identity of the tensors do not matter."""
    copy = OrderedDict((key, value.clone()) for key, value in reversed(EVERY_KIND.items()))
    assert digest_state(copy) == digest_state(EVERY_KIND)
    assert first_difference(digest_state(copy).tensors, digest_state(EVERY_KIND).tensors) is None


def test_signed_zeros_differ_and_equal_nan_bits_agree() -> None:
    """Bits decide: 0.0 is not -0.0, a NaN equals the NaN with its bits and no other."""
    assert digest_state(torch.tensor(0.0)).digest != digest_state(torch.tensor(-0.0)).digest
    assert digest_state({"loss": 0.0}).digest != digest_state({"loss": -0.0}).digest
    nan, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert digest_state(nan).digest == digest_state(nan.clone()).digest
    assert digest_state(nan).digest != digest_state(other).digest
    assert digest_state({"loss": math.nan}).digest == digest_state({"loss": math.nan}).digest
    payload = struct.unpack("<d", (0x7FF8_0000_0000_0001).to_bytes(8, "little"))[0]
    assert digest_state({"loss": math.nan}).digest != digest_state({"loss": payload}).digest


def test_non_finite_leaves_are_counted() -> None:
    """Tensors, arrays and numbers with a NaN or an infinity are counted, each once."""
    state = {
        "a": torch.tensor([1.0, math.nan, math.inf]),
        "b": torch.tensor([complex(0, -math.inf)]),
        "c": torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn),
        "d": math.nan,
        "e": np.array([np.inf], dtype=np.float32),
        "f": torch.tensor([2**62]),
        "g": 1.0,
        "h": torch.tensor([3e38]),
    }
    assert digest_state(state).nonfinite == 5


def test_memory_layout_changes_only_the_strides_digest() -> None:
    """channels_last, transposed and strided tensors with the same values have the same digest."""
    rows = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    base = digest_state({"w": rows})
    padded = torch.zeros(2, 3, 4, 9)
    padded[..., 2:7] = rows
    for other in (rows.to(memory_format=torch.channels_last), rows.mT.contiguous().mT, padded[..., 2:7]):
        assert not other.is_contiguous()
        got = digest_state({"w": other})
        assert got.digest == base.digest
        assert got.strides_digest != base.strides_digest
    assert digest_state({"w": rows.clone()}).strides_digest == base.strides_digest


def test_strides_that_address_nothing_do_not_count() -> None:
    """The strides of dims of size 1 and of empty tensors are free, so they change no digest."""
    for shape, strides in (((1, 4, 1), (99, 1, 77)), ((0, 3), (5, 5)), ((1,), (97,)), ((1, 1), (3, 9))):
        odd = torch.zeros(100).as_strided(shape, strides)
        plain = odd.clone(memory_format=torch.contiguous_format)
        assert digest_state(odd).strides_digest == digest_state(plain).strides_digest
        assert digest_state(odd).digest == digest_state(torch.zeros(shape)).digest


def test_views_are_hashed_by_their_values() -> None:
    """Shared, expanded, conjugated and negated views hash as copies of what they show."""
    base = torch.tensor([[1 + 2j, 3 - 4j], [5j, -6 + 0j]])
    views = {
        "conj": base.conj(),
        "neg": base.conj().imag,
        "row": base[1],
        "expanded": base[0].expand(3, 2),
        "t": base.T,
    }
    assert views["conj"].is_conj()
    assert views["neg"].is_neg()
    copies = {
        name: torch.tensor(view.resolve_conj().resolve_neg().tolist(), dtype=view.dtype) for name, view in views.items()
    }
    assert first_difference(digest_state(views).tensors, digest_state(copies).tensors) is None
    assert digest_state({"a": base, "b": base}).digest == digest_state({"a": base, "b": base.clone()}).digest


def test_a_training_graph_is_left_alone() -> None:
    """A parameter that requires grad is hashed as its values; nothing about it changes."""
    weight = torch.nn.Parameter(torch.ones(2))
    assert digest_state({"w": weight}) == digest_state({"w": torch.ones(2)})
    assert weight.requires_grad
    assert weight.grad_fn is None


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"a": b"xy", "b": b"z"}, {"a": b"x", "b": b"yz"}),
        ({"ab": 1}, {"a": {"b": 1}}),
        ({"a.b": 1}, {"a": {"b": 1}}),
        ({"a": [1, 2]}, {"a": (1, 2)}),
        ({"a": [1, 2]}, {"a": {0: 1, 1: 2}}),
        ({0: 1}, {"0": 1}),
        ({"a": []}, {}),
        ({"a": []}, {"a": {}}),
        ({"a": None}, {"a": ""}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": "1"}, {"a": 1}),
        ({"a": b"1"}, {"a": "1"}),
        ({"a": 1.0}, {"a": torch.tensor(1.0, dtype=torch.float64)}),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(6), torch.zeros(2, 3)),
        (torch.zeros(()), torch.zeros(1)),
        (torch.zeros(0, 3), torch.zeros(3, 0)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.zeros(2), {"(value)": torch.zeros(2)}),
        ({"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.zeros(4), "b": torch.zeros(0)}),
    ],
)
def test_states_that_only_look_alike_differ(a: Any, b: Any) -> None:
    """No two different states collide by moving bytes between names, types, shapes and values."""
    assert digest_state(a).digest != digest_state(b).digest


def test_names_that_are_spelt_alike_stay_apart() -> None:
    """Two paths with one spelling both appear in the map of tensors."""
    names = digest_state({"a.b": 1, "a": {"b": 2}, 0: 3, "0": 4}).tensors
    assert sorted(names) == ["0", "0 (2)", "a.b", "a.b (2)"]


def test_a_name_that_is_spelt_like_a_numbered_one_stays_apart() -> None:
    """No entry of the map takes another's place."""
    digest = digest_state({"0": 1, 0: 2, "0 (2)": 3, "0 (2) (2)": 4, "a": 5})
    alone = [digest_state({"a": number}).tensors["a"].digest for number in range(1, 6)]
    assert sorted(digest.tensors) == ["0", "0 (2)", "0 (2) (2)", "0 (2) (2) (2)", "a"]
    assert sorted(tensor.digest for tensor in digest.tensors.values()) == sorted(alone)


def test_arrays_hash_as_tensors() -> None:
    """A numpy array or scalar has the digest of the tensor with its values, in either byte order and layout."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = digest_state({"w": torch.from_numpy(values.copy())})
    for array in (values, values.astype(">f4"), np.asfortranarray(values)):
        assert digest_state({"w": array}).digest == expected.digest
    assert digest_state(np.asfortranarray(values)).strides_digest != digest_state(values).strides_digest
    assert digest_state(np.float64(2)).digest == digest_state(torch.tensor(2.0, dtype=torch.float64)).digest


def test_a_big_endian_host_would_give_the_same_bytes() -> None:
    """Words are reversed on big-endian hosts, single bytes never."""
    flat = torch.arange(8, dtype=torch.uint8)
    assert digest_module._little_endian(flat, 4, "big").tolist() == [3, 2, 1, 0, 7, 6, 5, 4]
    assert digest_module._little_endian(flat, 1, "big").tolist() == list(range(8))
    assert digest_module._little_endian(flat, 4, "little") is flat


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": object()}}, r"a\.b is of type builtins\.object"),
        ({"a": {1.5: 0}}, r"a has the key 1\.5 of type float"),
        ({True: 0}, r"\(value\) has the key True of type bool"),
        ({"a": {1, 2}}, r"a is of type builtins\.set"),
        ({"a": torch.empty(2, device="meta")}, r"a is a torch\.float32 tensor of layout torch\.strided on meta"),
        ({"a": torch.ones(2).to_sparse()}, r"a is a torch\.float32 tensor of layout torch\.sparse_coo"),
        ({"a": np.array(["x"])}, r"a is an array of <U1"),
        ({"a": np.array([object()])}, r"a is an array of object"),
    ],
)
def test_what_has_no_exact_bytes_is_refused_with_its_place(state: Any, message: str) -> None:
    """A value that cannot be digested is a TypeError that names it."""
    with pytest.raises(TypeError, match=message):
        digest_state(state)


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_nothing_is_read_where_there_may_be_no_memory(kind: str) -> None:
    """A tensor whose bytes are not all in memory of its own is refused by what it is; reading them would be fatal."""
    make, message = WITHOUT_MEMORY[kind]
    with pytest.raises(TypeError, match=message):
        digest_state({"w": make()})


def test_a_tensor_without_elements_needs_no_memory() -> None:
    """Freed or not, it hashes as an empty one."""
    assert digest_state(freed(torch.ones(4), at=(slice(0),))) == digest_state(torch.empty(0))


def test_a_subclass_with_memory_of_its_own_is_its_values() -> None:
    """It hashes as a plain tensor does."""
    plain = torch.arange(3.0)
    own: torch.Tensor = plain.clone().as_subclass(type("Own", (torch.Tensor,), {}))
    assert type(own) is not torch.Tensor
    assert digest_state(own) == digest_state(plain)


def test_a_wrapper_has_the_documented_digest() -> None:
    """A leaf of its own has its class, type and shape, and each tensor in it is a leaf below that."""
    a, b = torch.arange(3.0), torch.tensor([-0.0, math.nan, 1.0])
    got = digest_state({"w": torch.nn.Parameter(TwoTensor(a, b))})
    own = reference_leaf("wrapper", "torch.testing._internal.two_tensor.TwoTensor[float32]", (3,), b"")
    inner = [([("s", "w"), ("a", name)], reference_tensor(tensor)) for name, tensor in (("a", a), ("b", b))]
    assert got.digest == reference_digest([([("s", "w")], own), *inner])
    assert list(got.tensors) == ["w", "w.a", "w.b"]
    assert (got.num_tensors, got.num_bytes, got.nonfinite) == (2, 24, 1)


def test_wrappers_in_wrappers_are_digested_to_the_innermost() -> None:
    """One flipped bit at the bottom gives another digest."""
    inner = TwoTensor(torch.zeros(2), torch.zeros(2))
    wrapped = TwoTensor(inner, TwoTensor(torch.zeros(2), torch.zeros(2)))
    before = digest_state({"w": wrapped})
    inner.b.view(torch.int32)[1] = 1
    after = digest_state({"w": wrapped})
    assert list(before.tensors) == ["w", "w.a", "w.b", "w.a.a", "w.a.b", "w.b.a", "w.b.b"]
    assert first_difference(before.tensors, after.tensors) == "w.a.b"
    assert before.digest != after.digest


def test_a_wrapper_is_no_plain_tensor_of_equal_bytes() -> None:
    """Nor a wrapper of another class, nor a mapping of what is in it."""
    plain = torch.ones(2)
    states = (plain, Open(plain), Other(plain), {"held": plain})
    assert len({digest_state({"w": state}).digest for state in states}) == len(states)


def test_what_a_wrapper_keeps_beside_its_tensors_is_covered() -> None:
    """By value; a wrapper that keeps what has no digest has none itself."""
    wrappers = [Open(torch.ones(2)) for _ in range(4)]
    for wrapper, context in zip(wrappers, (None, (5, "b"), (6, "b"), object()), strict=True):
        wrapper.context = context
    assert list(digest_state({"w": wrappers[1]}).tensors) == ["w", "w.held", "w.context.0", "w.context.1"]
    assert len({digest_state({"w": wrapper}).digest for wrapper in wrappers[:3]}) == 3
    with pytest.raises(TypeError, match=r"w\.context is of type builtins\.object"):
        digest_state({"w": wrappers[3]})


DISTRIBUTED = """
import json, torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from lucid_profiler.digest import digest_state

distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
local = torch.arange(8.0).reshape(2, 4)
shard = {"w": torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))}
copy = {"w": DTensor.from_local(local, mesh, [Replicate()])}
with CommDebugMode() as communication:
    found = [digest_state(state) for state in (shard, copy, {"w": local})]
print(json.dumps([communication.get_total_counts(), [one.tensors for one in found], [one.digest for one in found]]))
"""


def test_a_distributed_tensor_is_its_local_shard() -> None:
    """Nothing is communicated; the shape of the whole and the placement are covered."""
    if torch.__version__ < "2.5" or not torch.distributed.is_available():
        pytest.skip("torch has no public distributed tensors")
    command = [sys.executable, "-W", "ignore", "-c", DISTRIBUTED]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    num_collectives, (shard, copy, plain), digests = json.loads(out.stdout)
    assert num_collectives == 0
    assert list(shard) == ["w", "w._local_tensor", "w.context"]
    assert shard["w._local_tensor"] == copy["w._local_tensor"] == plain["w"]
    assert (shard["w"][1:], copy["w"][2]) == (["torch.distributed.tensor.DTensor[float32]", [4, 4]], [2, 4])
    assert shard["w.context"] != copy["w.context"]
    assert len(set(digests)) == 3


def test_a_collective_that_is_under_way_is_not_read() -> None:
    """What it writes to has no digest yet."""
    if not torch.distributed.is_available():
        pytest.skip("torch is built without distributed")
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: PLC0415

    awaited = AsyncCollectiveTensor(torch.ones(2))
    with pytest.raises(TypeError, match=r"w is a .*AsyncCollectiveTensor"):
        digest_state({"w": awaited})
    awaited.completed = True
    assert list(digest_state({"w": awaited}).tensors) == ["w", "w.elem"]


def test_a_cycle_is_refused() -> None:
    """A state that contains itself is a ValueError, not a crash."""
    cycle: dict[str, Any] = {}
    cycle["a"] = cycle
    with pytest.raises(ValueError, match="nested deeper than 100"):
        digest_state(cycle)


def test_the_module_needs_neither_torch_nor_numpy() -> None:
    """Plain values are digested in a process that imports neither, to the same digest."""
    code = (
        "import sys; from lucid_profiler.digest import digest_state;"
        "print(digest_state({'lr': 0.1, 'x': [1, None]}).digest);"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == digest_state({"lr": 0.1, "x": [1, None]}).digest


class _Loud(int):
    def __repr__(self) -> str:
        raise ValueError("own")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.1000000001, "0.1000000001"),
        (-0.0, "-0.0"),
        (3, "3"),
        (True, "True"),
        (None, "None"),
        (1 - 2j, "(1-2j)"),
        ("a'b", repr("a'b")),
        ("x" * 61, "'" + "x" * 58 + "…"),
        ("x" * 10**6, "'" + "x" * 58 + "…"),
        (10**40, str(10**40)),
        (math.nan, "nan"),
    ],
)
def test_plain_values_are_shown_in_sixty_characters(value: Any, shown: str) -> None:
    """Numbers, texts and None are kept as Python writes them, bounded."""
    assert digest_state({"value": value}).values == {"value": shown}
    assert len(shown) <= 60


def test_an_integer_that_python_refuses_to_write_is_shown_in_hex() -> None:
    """Beyond 4,300 decimal digits Python raises; the digest and the script go on."""
    assert digest_state({"value": 16**5000}).values == {"value": "0x1" + "0" * 56 + "…"}


def test_a_subclass_is_shown_in_the_builtins_words() -> None:
    """What a subclass of int says of itself, or raises, is never asked for."""
    assert digest_state({"value": _Loud(7)}).values == {"value": "7"}


def test_only_plain_values_are_shown() -> None:
    """Tensors, arrays, bytes and empty containers have a digest alone."""
    state = {"a": torch.ones(2), "b": np.float32(1), "c": b"x", "d": {}, "e": [], "f": (), "lr": 0.1}
    assert digest_state(state).values == {"lr": "0.1"}


def test_the_number_of_values_is_bounded() -> None:
    """A long list of losses does not fill the report twice."""
    digest = digest_state([0.5] * 10_001)
    assert (len(digest.tensors), len(digest.values)) == (10_001, 10_000)
