"""Where two runs begin to differ: step, part and tensor by their digests, the element by their saved values.

Nothing here runs anything. Distances are counted in floating-point numbers of the type: neighbours are 1 apart, the two
zeros 0, the largest finite number and infinity 1; a NaN is at no distance from anything.
"""

import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

from lucid_profiler.errors import ReportError
from lucid_profiler.saved_state import (
    ProcessIdentity,
    SavedLeaf,
    process_folders,
    read_identity,
    read_saved,
    saved_file,
)
from lucid_profiler.step_digests import (
    PART_ORDER,
    Moment,
    PartDigest,
    StepState,
    When,
    read_process,
    read_steps,
    step_files,
    step_folder_name,
)

T = TypeVar("T")

__all__ = [
    "ElementDifference",
    "Located",
    "StepDifference",
    "element_difference",
    "first_difference",
    "locate_element",
    "locate_step",
    "ulp_distance",
]

_FLOAT_BITS = {"float64": (64, 52), "float32": (32, 23), "float16": (16, 10), "bfloat16": (16, 7)}
"""Width and bits of the fraction."""
_UNPACKED = {"float64": "<d", "float32": "<f", "float16": "<e"}
_COMPONENTS = {
    "complex128": "float64",
    "complex64": "float32",
    "complex32": "float16",
    "complex": "float64",
    "float": "float64",
}
_INTEGER = re.compile(r"(u?)int(?:8|16|32|64)")
_NUM_CHUNK_BYTES = 2**16
_MAX_SHOWN_CHARS = 60
_MAX_INT_DIGITS = 50  # hexadecimal; longer ones are shown so too, which Python never refuses


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """The first moment at which two re-runs differ."""

    step: int
    """Steps of all optimizers of the process, from 1."""
    when: When
    """`before` the step, as its gradients are, or `after` it."""
    part: str | None
    """None where the runs do not take the same steps."""
    tensor: str | None
    """None where the digests of single tensors do not tell."""
    text: str
    process: ProcessIdentity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What the step digests of two re-runs say."""

    num_steps: int
    """Steps in which they agree before they differ, or end."""
    difference: StepDifference | None
    num_unseen: int = 0
    """Moments that were not compared because a run could not read its state, as inside the capture of a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementDifference:
    """The first element of a part in which two saved states differ."""

    part: str
    tensor: str
    dtype: str
    index: tuple[int, ...] | None
    """None where the whole tensor differs in type, shape or presence, or is text."""
    component: str | None = None
    """`real` or `imag` of a complex number."""
    values: tuple[str, str]
    bits: tuple[str, str]
    """As hexadecimal numbers, empty where there are none."""
    ulps: int | None = None
    """None for what is no floating-point number, and for NaN."""
    difference: int | None = None
    """The second integer minus the first; None for what is no integer."""

    @property
    def text(self) -> str:
        """The difference in words."""
        place = str(list(self.index)) if self.index else ""
        name = f"{self.part} {self.tensor}{place}{f'.{self.component}' if self.component else ''}"
        a, b = (
            f"{value} ({bits})" if bits and bits != value else value
            for value, bits in zip(self.values, self.bits, strict=True)
        )
        return f"{name} ({self.dtype}): {a} against {b}{self._distance()}"

    def _distance(self) -> str:
        if self.ulps is not None:
            return f", {self.ulps:,} ULP{'s' * (self.ulps != 1)} apart"
        return "" if self.difference is None else f", a difference of {self.difference:+,}"


class _Item(NamedTuple):
    """A number: in words, its bits, and its place among the numbers of its type."""

    value: str
    bits: str
    place: int | None


def first_difference(run_a: Iterable[StepState], run_b: Iterable[StepState]) -> Located:
    """Compare two processes moment by moment, up to the first one that differs.

    Args:
        run_a: As `read_steps` gives them, of which one is in memory at a time.
        run_b: Likewise.
    """
    num_steps = num_unseen = 0
    for a, b in zip_longest(run_a, run_b):
        if (difference := _moment_difference(a, b, num_steps)) is not None:
            return Located(num_steps=num_steps, difference=difference, num_unseen=num_unseen)
        num_unseen += not a.parts.keys() & b.parts.keys()
        num_steps += a.moment.when == "after"
    return Located(num_steps=num_steps, difference=None, num_unseen=num_unseen)


def _moment_difference(a: StepState | None, b: StepState | None, num_steps: int) -> StepDifference | None:
    if a is None or b is None:
        moment = (a or b or StepState(moment=Moment(0, "before", 0), parts={})).moment
        which = "first" if a is None else "second"
        text = f"the {which} run ends after {num_steps} steps, the other goes on"
        return StepDifference(step=moment.step, when=moment.when, part=None, tensor=None, text=text)
    if a.moment != b.moment:
        moment = min(a.moment, b.moment)
        words = [f"{each.moment.when} step {each.moment.step} of optimizer {each.moment.optimizer}" for each in (a, b)]
        text = f"the runs take other steps: {words[0]} in the first, {words[1]} in the second"
        return StepDifference(step=moment.step, when=moment.when, part=None, tensor=None, text=text)
    shared = a.parts.keys() & b.parts.keys()
    for part in sorted(shared, key=lambda name: PART_ORDER.index(name) if name in PART_ORDER else len(PART_ORDER)):
        if a.parts[part].digest != b.parts[part].digest:
            return _part_difference(a.moment, part, (a.parts[part], b.parts[part]))
    return None


def _part_difference(moment: Moment, part: str, parts: tuple[PartDigest, PartDigest]) -> StepDifference:
    a, b = (each.by_name() for each in parts)
    known = all(each.tensors is not None for each in parts)
    tensor = next((name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)), None)
    if known and tensor is not None:
        missing = [words for of, words in ((a, "the first"), (b, "the second")) if tensor not in of]
        what = f"{part} {tensor}" + (f", which {missing[0]} run lacks" if missing else "")
    else:
        tensor = None
        what = f"{part}: the same tensors in another structure" if known else part
    text = f"{moment.when} step {moment.step}: {what}"
    return StepDifference(step=moment.step, when=moment.when, part=part, tensor=tensor, text=text)


def locate_step(run_dir_a: Path, run_dir_b: Path) -> Located:
    """Compare the step digests of all processes of two re-runs; the earliest difference counts.

    Processes are matched by rank and arguments, those left over by their order.

    Raises:
        ReportError: A file is damaged, or a run has no step digests.
        OSError: A file cannot be read.
    """
    located: list[Located] = []
    for a, b in _matched(step_files(run_dir_a), step_files(run_dir_b), read_process):
        found = first_difference(read_steps(a), read_steps(b))
        if found.difference is not None:
            found = replace(found, difference=replace(found.difference, process=read_process(a)))
        located.append(found)
    different = [each for each in located if each.difference is not None]
    num_unseen = sum(each.num_unseen for each in located)
    if different:
        return replace(min(different, key=_step_of), num_unseen=num_unseen)
    num_steps = min((each.num_steps for each in located), default=0)
    return Located(num_steps=num_steps, difference=None, num_unseen=num_unseen)


def _step_of(located: Located) -> tuple[int, bool]:
    difference = located.difference
    return (difference.step, difference.when == "after") if difference else (0, False)


def _matched(a: Sequence[T], b: Sequence[T], identify: Callable[[T], ProcessIdentity]) -> list[tuple[T, T]]:
    """Pair what has equal identities in its order, then the rest in its order; what is left over has no pair."""
    waiting = [(identify(each), each) for each in b]
    pairs: list[tuple[T, T]] = []
    rest: list[T] = []
    for each in a:
        identity = identify(each)
        place = next((place for place, (other, _) in enumerate(waiting) if other == identity), None)
        if place is None:
            rest.append(each)
        else:
            pairs.append((each, waiting.pop(place)[1]))
    return [*pairs, *zip(rest, (each for _, each in waiting), strict=False)]


def locate_element(run_folder_a: Path, run_folder_b: Path, difference: StepDifference) -> ElementDifference | None:
    """Find the element in what two further re-runs saved around the step; None where these do not differ there.

    Args:
        run_folder_a: The folder that `LUCID_SAVE_STATE` and `LUCID_SAVE_NAME` named in the first of them.
        run_folder_b: Likewise for the second.
        difference: What the step digests say.

    Raises:
        ReportError: A saved file is damaged, or the part was not saved.
        OSError: A saved file cannot be read.
    """
    if difference.part is None:
        return None
    part, folder = difference.part, step_folder_name(difference.step, difference.when)
    files = [
        [path for process in process_folders(run) if (path := saved_file(process / folder, part)).exists()]
        for run in (run_folder_a, run_folder_b)
    ]
    for run, found in zip((run_folder_a, run_folder_b), files, strict=True):
        if not found:
            raise ReportError(str(run), None, f"{part} was not saved {difference.when} step {difference.step}")
    pairs = _matched(files[0], files[1], read_identity)
    pairs.sort(key=lambda pair: read_identity(pair[0]) != difference.process)
    found_all = (element_difference(a.parent, b.parent, part=part, tensor=difference.tensor) for a, b in pairs)
    return next((found for found in found_all if found is not None), None)


def element_difference(
    saved_a: Path, saved_b: Path, *, part: str, tensor: str | None = None
) -> ElementDifference | None:
    """Return the first element in which two saved states differ, None if the bytes are equal.

    Args:
        saved_a: Folder of one process with its saved parts.
        saved_b: Likewise.
        part: Name of the part.
        tensor: Name of the tensor; None for the first one that differs.

    Raises:
        ReportError: A file is damaged.
        OSError: A file cannot be read.
    """
    leaves = (read_saved(saved_file(folder, part), only=tensor) for folder in (saved_a, saved_b))
    for a, b in zip_longest(*leaves):
        if (found := _leaf_difference(part, a, b)) is not None:
            return found
    return None


def _leaf_difference(part: str, a: SavedLeaf | None, b: SavedLeaf | None) -> ElementDifference | None:
    leaf = a or b
    if leaf is None or (a is not None and b is not None and _content(a) == _content(b)):
        return None
    if a is None or b is None or _content(a)[:-1] != _content(b)[:-1] or len(a.data) != len(b.data):
        return _unlike(part, leaf.name, a, b)
    return _value_difference(part, a, b)


def _content(leaf: SavedLeaf) -> tuple[object, ...]:
    return leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.data


def _unlike(part: str, name: str, a: SavedLeaf | None, b: SavedLeaf | None) -> ElementDifference:
    """Describe leaves that are not of one type, shape and length, or of which one is missing."""
    values = [_described(leaf, None if leaf is None or leaf.name == name else leaf.name) for leaf in (a, b)]
    dtypes = list(dict.fromkeys(leaf.dtype for leaf in (a, b) if leaf is not None))
    return ElementDifference(
        part=part,
        tensor=name,
        dtype=" and ".join(dtypes),
        index=None,
        values=(values[0], values[1]),
        bits=("", ""),
        difference=_int_difference(a, b),
    )


def _int_difference(a: SavedLeaf | None, b: SavedLeaf | None) -> int | None:
    if a is None or b is None or not a.dtype == b.dtype == "int" or max(len(a.data), len(b.data)) >= _MAX_INT_DIGITS:
        return None
    return _int(b) - _int(a)


def _described(leaf: SavedLeaf | None, name: str | None) -> str:
    if leaf is None:
        return "missing"
    text = f"{leaf.dtype}{list(leaf.shape)}" if leaf.kind == "tensor" else _plain_text(leaf)
    return text if name is None else f"{name}: {text}"


def _int(leaf: SavedLeaf) -> int:
    return int(leaf.data, 16)


def _plain_text(leaf: SavedLeaf) -> str:
    """Return a value beside the tensors in at most 60 characters."""
    if leaf.dtype == "str":
        return _cut(repr(leaf.data.decode("utf-8", "surrogatepass")[:_MAX_SHOWN_CHARS]))
    if leaf.dtype == "int":
        return str(_int(leaf)) if len(leaf.data) < _MAX_INT_DIGITS else _cut(hex(_int(leaf)))
    if leaf.dtype == "bytes":
        return _cut(repr(leaf.data[:_MAX_SHOWN_CHARS]))
    if leaf.dtype == "bool":
        return str(leaf.data != b"\x00")
    if leaf.dtype in ("float", "complex"):
        numbers = [struct.unpack_from("<d", leaf.data, place)[0] for place in range(0, len(leaf.data), 8)]
        return repr(numbers[0] if leaf.dtype == "float" else complex(*numbers))
    return leaf.dtype  # none, and containers without items


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"


def _value_difference(part: str, a: SavedLeaf, b: SavedLeaf) -> ElementDifference:
    """Describe the first element in which leaves of one type, shape and length differ."""
    byte = _first_differing_byte(a.data, b.data)
    if a.kind == "plain" and a.dtype in ("str", "bytes", "int"):
        return _unlike(part, a.name, a, b)
    is_complex = a.dtype.startswith("complex")
    dtype = _COMPONENTS.get(a.dtype, a.dtype)
    num_components = math.prod(a.shape) * (2 if is_complex else 1)
    width = len(a.data) // num_components
    place = byte // width
    items = [_item(leaf.data[place * width : (place + 1) * width], dtype) for leaf in (a, b)]
    places = items[0].place, items[1].place
    steps = None if places[0] is None or places[1] is None else places[1] - places[0]
    return ElementDifference(
        part=part,
        tensor=a.name,
        dtype=a.dtype,
        index=_index(place // (2 if is_complex else 1), a.shape),
        component=("real", "imag")[place % 2] if is_complex else None,
        values=(items[0].value, items[1].value),
        bits=(items[0].bits, items[1].bits),
        ulps=abs(steps) if steps is not None and dtype in _FLOAT_BITS else None,
        difference=steps if dtype not in _FLOAT_BITS else None,
    )


def _first_differing_byte(a: bytes, b: bytes) -> int:
    """Return the place of the first byte that differs between two texts of one length that are not equal."""
    begin = next(
        begin
        for begin in range(0, len(a), _NUM_CHUNK_BYTES)
        if a[begin : begin + _NUM_CHUNK_BYTES] != b[begin : begin + _NUM_CHUNK_BYTES]
    )
    return next(place for place in range(begin, len(a)) if a[place] != b[place])


def _index(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index, in a tensor of this shape, of a place in row-major order."""
    index = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return tuple(reversed(index))


def _item(data: bytes, dtype: str) -> _Item:
    bits = int.from_bytes(data, "little")
    shown = f"0x{bits:0{2 * len(data)}x}"
    if dtype in _FLOAT_BITS:
        return _Item(repr(_float(data, dtype)), shown, _float_place(bits, dtype))
    if (match := _INTEGER.fullmatch(dtype)) is not None:
        value = int.from_bytes(data, "little", signed=not match[1])
        return _Item(str(value), shown, value)
    return _Item(str(bool(bits)) if dtype == "bool" else shown, shown, None)


def _float(data: bytes, dtype: str) -> float:
    if dtype == "bfloat16":
        dtype, data = "float32", b"\x00\x00" + data  # the upper half of a float32
    value: float = struct.unpack(_UNPACKED[dtype], data)[0]
    return value


def ulp_distance(bits_a: int, bits_b: int, dtype: str) -> int | None:
    """Return how many numbers of a type two bit patterns are apart; None if one of them is a NaN.

    Args:
        bits_a: As an unsigned number.
        bits_b: Likewise.
        dtype: `float64`, `float32`, `float16` or `bfloat16`.
    """
    places = _float_place(bits_a, dtype), _float_place(bits_b, dtype)
    return None if places[0] is None or places[1] is None else abs(places[0] - places[1])


def _float_place(bits: int, dtype: str) -> int | None:
    """Return the place of a number in the order of its type, 0 for both zeros; None for NaN."""
    width, num_fraction_bits = _FLOAT_BITS[dtype]
    sign, magnitude = divmod(bits, 1 << (width - 1))
    infinity = ((1 << (width - 1 - num_fraction_bits)) - 1) << num_fraction_bits
    if magnitude > infinity:
        return None
    return -magnitude if sign else magnitude
