"""Digests of training state: equal bytes give equal digests, one flipped bit gives another.

A state is flattened to leaves. Lengths are 64-bit little-endian, values are little-endian whatever the host is:

    leaf    = SHA-256("lucid.leaf/1" kind, dtype as text; number of dims, dims; number of bytes, bytes)
    digest  = SHA-256("lucid.state/1" and for each leaf, in the order of its path: path, leaf)
    path    = number of steps, each step as one letter, length, bytes

where text is its length and its UTF-8. torch and numpy are taken from `sys.modules`, never imported.
"""

import ctypes
import hashlib
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

__all__ = ["StateDigest", "TensorDigest", "digest_state", "first_difference"]

_MAX_DEPTH = 100
_ROOT_NAME = "(value)"
_NUM_TENSOR_DIGITS = 16
_MAX_VALUES = 10_000
_MAX_VALUE_CHARS = 60
_MAX_DECIMAL_BITS = 200  # longer integers are shown in hex, which Python never refuses
_ADDRESSED = ("cpu", "cuda")  # devices on which a tensor with values has an address


class TensorDigest(NamedTuple):
    """What identifies one leaf of a state: a tensor, or a number or text beside the tensors."""

    digest: str
    """First 16 hex digits of SHA-256 over dtype, shape and values."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest:
    """What identifies a state."""

    digest: str
    """SHA-256, 64 hex digits, over names, dtypes, shapes and values."""
    strides_digest: str
    """SHA-256, 64 hex digits, over names and strides: the memory layout, which `digest` does not see."""
    num_tensors: int
    num_bytes: int
    """Bytes of the tensors' values."""
    tensors: dict[str, TensorDigest]
    """By flattened name, such as `state.0.momentum_buffer`."""
    values: dict[str, str]
    """By flattened name: the first 10,000 plain numbers, texts and None as Python writes them, 60 characters each."""
    nonfinite: int
    """Leaves that hold a NaN or an infinity."""


class _Leaf(NamedTuple):
    """One value with everything that its digest covers."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    data: Any
    """Bytes-like: the values, row-major, little-endian."""
    is_finite: bool


class _Entry(NamedTuple):
    path: bytes
    name: str
    value: Any


def digest_state(state: Any) -> StateDigest:
    """Return the digest of a state; the state is not changed, device tensors come to the host one at a time.

    Args:
        state: A tensor, a numpy array, a bool, int, float, complex, str, bytes or None, or mappings (keys str or
            int), lists and tuples of these, nested.

    Raises:
        TypeError: On any other value or key, and on tensors without readable values (sparse, quantized, meta, without
            memory of their own unless they tell which tensors they wrap); the message names the place.
        ValueError: On nesting deeper than 100 levels, which a cycle is.
    """
    entries = sorted(_flatten(state, b"", (), 0), key=lambda entry: entry.path)
    names = _unique_names(entries)
    total, layout = hashlib.sha256(_text("lucid.state/1")), hashlib.sha256(_text("lucid.strides/1"))
    tensors: dict[str, TensorDigest] = {}
    values: dict[str, str] = {}
    num_tensors = num_bytes = nonfinite = 0
    for entry, name in zip(entries, names, strict=True):
        leaf = _leaf(entry.value, name)
        leaf_digest = _hash_leaf(leaf)
        total.update(entry.path + leaf_digest)
        layout.update(entry.path + _sizes(leaf.strides))
        tensors[name] = TensorDigest(leaf_digest.hex()[:_NUM_TENSOR_DIGITS], leaf.dtype, leaf.shape)
        nonfinite += not leaf.is_finite
        if leaf.kind == "tensor":
            num_tensors, num_bytes = num_tensors + 1, num_bytes + len(leaf.data)
        elif len(values) < _MAX_VALUES and (shown := _shown(entry.value)) is not None:
            values[name] = shown
    return StateDigest(
        digest=total.hexdigest(),
        strides_digest=layout.hexdigest(),
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        tensors=tensors,
        values=values,
        nonfinite=nonfinite,
    )


def first_difference(a: Mapping[str, TensorDigest], b: Mapping[str, TensorDigest]) -> str | None:
    """Return the first name, in sorted order, whose tensors differ or that one side lacks; None if there is none."""
    return next((name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)), None)


def _size(number: int) -> bytes:
    return struct.pack("<q", number)


def _sizes(numbers: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(numbers) + 1}q", len(numbers), *numbers)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return _size(len(data)) + data


def _hash_leaf(leaf: _Leaf) -> bytes:
    head = _text("lucid.leaf/1") + _text(leaf.kind) + _text(leaf.dtype) + _sizes(leaf.shape)
    hashed = hashlib.sha256(head + _size(len(leaf.data)))
    hashed.update(leaf.data)
    return hashed.digest()


def _flatten(value: Any, steps: bytes, names: tuple[str, ...], depth: int) -> Iterator[_Entry]:
    """Yield the leaves of a state; a container without items is a leaf itself, a wrapper one beside what is in it."""
    children = _children(value, names)
    if not children or _is_wrapper(value):
        yield _Entry(_size(depth) + steps, ".".join(names) or _ROOT_NAME, value)
    if children and depth >= _MAX_DEPTH:
        raise ValueError(f"the state is nested deeper than {_MAX_DEPTH} levels at {'.'.join(names)[:80]}: a cycle?")
    for letter, key, child in children:
        yield from _flatten(child, steps + letter + _text(key), (*names, key), depth + 1)


def _children(value: Any, names: tuple[str, ...]) -> list[tuple[bytes, str, Any]]:
    """Return letter, key and value of each item: s and i for str and int keys, l and t for lists and tuples.

    Of a wrapper as `_wrapped` does.
    """
    if isinstance(value, Mapping):
        return [(*_key(key, names), item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        letter = b"l" if isinstance(value, list) else b"t"
        return [(letter, str(index), item) for index, item in enumerate(value)]
    return _wrapped(value) if _is_wrapper(value) else []


def _is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor of a class that tells which tensors it wraps, and they can be read."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(type(value), "__tensor_flatten__") or not isinstance(value, torch.Tensor):
        return False
    # A collective that is not completed may still write to what its tensor wraps.
    return value.layout is torch.strided and bool(getattr(value, "completed", True))


def _wrapped(tensor: Any) -> list[tuple[bytes, str, Any]]:
    """Return letter, name and value of each tensor in a wrapper, which is a, and of what it keeps beside them, c."""
    attributes, context = tensor.__tensor_flatten__()
    # Where it is a part of another tensor's class, it is loaded; before torch 2.5 under the second name.
    homes: list[Any] = [sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "_tensor")]
    distributed = tuple(home.DTensor for home in homes if hasattr(home, "DTensor"))
    if isinstance(tensor, distributed):
        # The rest is the mesh, which has no digest, and what the wrapper's own leaf covers.
        attributes, context = ["_local_tensor"], str(tensor.placements)
    inner = [(b"a", attribute, getattr(tensor, attribute)) for attribute in attributes]
    return inner if context is None else [*inner, (b"c", "context", context)]


def _key(key: Any, names: tuple[str, ...]) -> tuple[bytes, str]:
    if isinstance(key, str):
        return b"s", key
    if isinstance(key, int) and not isinstance(key, bool):
        return b"i", str(int(key))
    place = ".".join(names) or _ROOT_NAME
    raise TypeError(f"{place} has the key {key!r} of type {type(key).__name__}; keys must be str or int")


def _unique_names(entries: list[_Entry]) -> list[str]:
    """Return names in the order of the entries; of different paths with one spelling, the later get a number."""
    taken: dict[str, int] = {}
    return [_numbered(entry.name, taken) for entry in entries]


def _numbered(name: str, taken: dict[str, int]) -> str:
    """Return the name, with a number where it is taken; `taken`, the last number of each name, is mutated."""
    free = name
    while free in taken:
        taken[name] += 1
        free = f"{name} ({taken[name]})"
    taken[free] = 1
    return free


def _leaf(value: Any, name: str) -> _Leaf:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return _wrapper_leaf(value) if _is_wrapper(value) else _tensor_leaf(torch, value, name)
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _array_leaf(numpy, value, name)
    return _plain_leaf(value, name)


def _plain_leaf(value: Any, name: str) -> _Leaf:
    if isinstance(value, bool):
        return _scalar("bool", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _scalar("int", f"{int(value):x}".encode())
    if isinstance(value, (float, complex)):
        numbers = (value.real, value.imag) if isinstance(value, complex) else (value,)
        is_finite = all(abs(number) < float("inf") for number in numbers)
        kind = "complex" if isinstance(value, complex) else "float"
        return _scalar(kind, struct.pack(f"<{len(numbers)}d", *numbers), is_finite=is_finite)
    if isinstance(value, str):
        return _scalar("str", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray)):
        return _scalar("bytes", bytes(value))
    return _empty_leaf(value, name)


def _empty_leaf(value: Any, name: str) -> _Leaf:
    for kind, container in (("none", NoneType), ("dict", Mapping), ("list", list), ("tuple", tuple)):
        if isinstance(value, container):
            return _scalar(kind, b"")
    raise TypeError(f"{name} is of type {_class_name(value)}, which has no digest")


def _scalar(kind: str, data: bytes, *, is_finite: bool = True) -> _Leaf:
    return _Leaf("plain", kind, (), (), data, is_finite)


def _shown(value: Any) -> str | None:
    """Return a number, text or None as Python writes it, cut to 60 characters; None for every other value."""
    if isinstance(value, str):
        text = str.__repr__(str.__getitem__(value, slice(_MAX_VALUE_CHARS)))
    elif isinstance(value, int) and int.bit_length(value) > _MAX_DECIMAL_BITS:
        text = hex(value)
    else:
        # The builtin's own words, whatever a subclass says.
        kind: Any = next((one for one in (NoneType, bool, int, float, complex) if isinstance(value, one)), None)
        if kind is None:
            return None
        text = kind.__repr__(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 1] + "…"


def _wrapper_leaf(tensor: Any) -> _Leaf:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Leaf("wrapper", f"{_class_name(tensor)}[{dtype}]", tuple(tensor.shape), (), b"", is_finite=True)


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _tensor_leaf(torch: Any, tensor: Any, name: str) -> _Leaf:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        raise TypeError(
            f"{name} is a {tensor.dtype} tensor of layout {tensor.layout} on {tensor.device}: no plain values"
        )
    _require_memory(torch, tensor, name)
    # resolve_*: conj and neg views keep their sign in a flag, not in their bytes.
    host = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    width = host.element_size() // (2 if host.is_complex() else 1)
    # A single element may keep a stride other than 1, which no view as bytes accepts.
    values = host.reshape(-1).as_strided((host.numel(),), (1,))
    flat = _little_endian(values.view(torch.uint8), width, sys.byteorder)
    _require_memory(torch, flat, name)
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Leaf("tensor", dtype, shape, _strides(shape, tensor.stride()), _memory(flat), _is_finite(torch, host))


def _require_memory(torch: Any, tensor: Any, name: str) -> None:
    """Refuse a tensor that is not wholly in memory of its own; to read one is fatal.

    Raises:
        TypeError: It is not, as far as its device tells.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes or tensor.device.type not in _ADDRESSED:
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - what a subclass says of its memory does not count
        storage = torch.Tensor.untyped_storage(tensor)
        # The device first: torch warns who asks a fake tensor, whose storage is elsewhere, for its address.
        has_memory = storage.device == tensor.device and torch.Tensor.data_ptr(tensor) and end_bytes <= storage.nbytes()
    if not has_memory:
        raise TypeError(
            f"{name} is a {_class_name(tensor)} of {num_bytes:,} bytes on {tensor.device} that are not in memory "
            "of its own, as of a wrapper, a stand-in, or a storage that was freed: no plain values"
        )


def _little_endian(flat: Any, width: int, byteorder: str) -> Any:
    """Return bytes (n,) whose words of `width` bytes are little-endian; aliases its argument on such hosts."""
    return flat if byteorder == "little" or width == 1 else flat.reshape(-1, width).flip(1).reshape(-1)


def _memory(flat: Any) -> Any:
    """Return a copy-free view of a contiguous uint8 host tensor, which it keeps alive; numpy may be absent."""
    if flat.numel() == 0:
        return b""
    view = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    view.owner = flat
    return view


def _is_finite(torch: Any, host: Any) -> bool:
    if not (host.is_floating_point() or host.is_complex()):
        return True
    # isfinite lacks the 8-bit floats.
    wide = host if host.element_size() > 1 else host.to(torch.float32)
    return bool(torch.isfinite(wide).all())


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides in elements, 0 where they address nothing: dims of size 1, and all dims of an empty tensor."""
    is_empty = 0 in shape
    return tuple(0 if is_empty or size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def _array_leaf(numpy: Any, value: Any, name: str) -> _Leaf:
    array = numpy.asarray(value)
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8):
        raise TypeError(f"{name} is an array of {array.dtype}, which has no digest")
    data = array.astype(array.dtype.newbyteorder("<"), order="C").tobytes()
    strides = tuple(stride // array.dtype.itemsize for stride in array.strides)
    is_finite = array.dtype.kind not in "fc" or bool(numpy.isfinite(array).all())
    return _Leaf("tensor", array.dtype.name, array.shape, _strides(array.shape, strides), data, is_finite)
