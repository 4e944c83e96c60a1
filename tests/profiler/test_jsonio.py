import enum
import json
import math
import struct
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lucid_profiler import jsonio


def float_from_bits(bits: int) -> float:
    """Return the double with these 64 bits."""
    value: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    return value


def identity(value: Any) -> Any:
    """Return a form in which == means the same types, the same bits and the same code points."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, dict):
        return ("dict", {key: identity(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return ("list", [identity(item) for item in value])
    return (type(value), value)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**53 - 3, max_value=2**53 + 3)
    | st.integers(min_value=0, max_value=2**64 - 1).map(float_from_bits)
    | st.floats()
    | st.text()
    | st.text(st.characters(categories=["Cs", "Ll"]))
    | st.binary(max_size=6).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(), max_size=4), inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["$", "$$", "$float", "$int", "$bytes", "$surrogates", "$bytes:80", "bits", "\udc80"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(anything)
@example(float_from_bits(0xFFF8_0000_0000_0001))
@example(float_from_bits(0x7FF0_0000_0000_0001))
@example([-0.0, 0.0, 0, False, 1, 1.0, True])
@example({"$float": "nan", "bits": "00"})
@example("\udcc3\udca9")
@example("\ud83d\ude00")
@example("a\u2028b\u0085c\x00\n\r")
@settings(max_examples=400)
def test_every_value_comes_back_with_its_type_and_bits(value: Any) -> None:
    """What dumps writes, loads gives back: types, sign of zero, NaN payloads, big integers, lone surrogates."""
    assert identity(jsonio.loads(jsonio.dumps(value))) == identity(value)


@given(anything)
@example({"b": 1e16, "a": 1e-7, "c": [5e-324, -0.0]})
@settings(max_examples=200)
def test_without_orjson_the_standard_library_writes_the_same_value(value: Any) -> None:
    """An interpreter that lacks orjson writes lines which everyone reads back to the bit."""
    with mock.patch.object(jsonio, "orjson", None):
        line = jsonio.dumps(value)
    assert b"\n" not in line
    assert identity(jsonio.loads(line)) == identity(value)


@given(anything)
@settings(max_examples=100)
def test_a_value_is_one_line_of_standard_json(value: Any) -> None:
    """The line holds no newline and no carriage return, and the standard reader accepts it."""
    line = jsonio.dumps(value)
    assert b"\n" not in line
    assert b"\r" not in line
    json.loads(line.decode("utf-8"), parse_constant=pytest.fail)
    orjson.loads(line)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (math.nan, b'{"$float":"nan"}'),
        (math.inf, b'{"$float":"inf"}'),
        (-math.inf, b'{"$float":"-inf"}'),
        (float_from_bits(0xFFF8_0000_0000_0000), b'{"$float":"nan","bits":"fff8000000000000"}'),
        (2**53 - 1, b"9007199254740991"),
        (2**53 + 1, b'{"$int":"9007199254740993"}'),
        (2**64, b'{"$int":"18446744073709551616"}'),
        (-(2**53), b'{"$int":"-9007199254740992"}'),
        (-0.0, b"-0.0"),
        ("caf\udce9", b'{"$bytes":"636166e9"}'),
        ("\ud800", b'{"$surrogates":"eda080"}'),
        ({"\udcff": 1}, b'{"$bytes:ff":1}'),
        ({"$int": 1}, b'{"$$int":1}'),
        ({"b": 1, "a": (2, [])}, b'{"a":[2,[]],"b":1}'),
        ("\u2028\u0085", b'"\xe2\x80\xa8\xc2\x85"'),
    ],
)
def test_the_written_form_is_fixed(value: Any, line: bytes) -> None:
    """The bytes of the format are part of it: other tools read them."""
    assert jsonio.dumps(value) == line
    assert identity(jsonio.loads(line)) == identity(value)


class _Colour(enum.Enum):
    RED = 1


class _Version(str):
    """As torch.__version__ is: text with methods."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {"b": np.float32(1)}]}, r"\$\.a\[1\]\.b is of type numpy\.float32"),
        ([np.float64(1)], r"\$\[0\] is of type numpy\.float64"),
        ({"runs": {1: "x"}}, r"\$\.runs has the key 1 of type int"),
        ([b"raw"], r"\$\[0\] is of type builtins\.bytes"),
        ({"s": {1, 2}}, r"\$\.s is of type builtins\.set"),
        (_Colour.RED, r"\$ is of type .*_Colour"),
        ([10**5000], r"\$\[0\] is an integer of 16610 bits"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_place(value: Any, place: str) -> None:
    """A value that would not come back is a TypeError that says where it is."""
    with pytest.raises(TypeError, match=place):
        jsonio.dumps(value)


def test_text_of_a_subclass_is_written_as_text() -> None:
    """A version object that is a str, as torch has it, is written and comes back as plain text."""
    back = jsonio.loads(jsonio.dumps({_Version("k"): _Version("2.4")}))
    assert identity(back) == identity({"k": "2.4"})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"a":1,"a":2}', "'a' appears twice"),
        (b'{"o":{"a":1,"a":1}}', "'a' appears twice"),
        (b"NaN", "literal NaN"),
        (b"[Infinity]", "literal Infinity"),
        (b"[-Infinity]", "literal -Infinity"),
        (b"1e400", "beyond the range"),
        (b"9007199254740992", "beyond 2\\*\\*53"),
        (b"147573952589676412928", "beyond 2\\*\\*53"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        (b"{}{}", "Extra data"),
        (b"{}\x00\x00", "Extra data"),
        (b"", "Expecting value"),
        (b'"\xff"', "invalid start byte"),
        (b'"a\nb"', "control character"),
        (b'{"$float":"1.5"}', r"\$float object that says '1.5'"),
        (b'{"$float":1.5}', r"malformed \$float"),
        (b'{"$float":"nan","bits":"0000000000000000"}', "no NaN"),
        (b'{"$float":"nan","bits":"7ff8"}', "no NaN"),
        (b'{"$float":"nan","x":"7ff8"}', r"malformed \$float"),
        (b'{"$int":"1"}', r"\$int object that says '1'"),
        (b'{"$int":"1_8446744073709551616"}', r"\$int object"),
        (b'{"$bytes":"6162"}', "needs no tag"),
        (b'{"$bytes:61":1,"a":2}', "needs no tag"),
        (b'{"$future":1}', r"unknown key '\$future'"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    ],
)
def test_what_dumps_never_writes_is_refused(line: bytes, why: str) -> None:
    """Ambiguous, inexact or damaged JSON is a ValueError with the reason, never a guess."""
    with pytest.raises(ValueError, match=why):
        jsonio.loads(line)


def test_nesting_is_bounded_when_writing() -> None:
    """A value nested too deeply, a cycle above all, is refused and not a crash."""
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="nested deeper than 200"):
        jsonio.dumps(cycle)
    deep: Any = 1
    for _ in range(jsonio.MAX_DEPTH):
        deep = [deep]
    assert jsonio.loads(jsonio.dumps(deep)) == deep


@given(st.binary(max_size=40))
@settings(max_examples=200)
def test_arbitrary_bytes_are_a_value_or_a_value_error(line: bytes) -> None:
    """No input makes loads fail in another way than ValueError."""
    try:
        value = jsonio.loads(line)
    except ValueError:
        return
    jsonio.dumps(value)
