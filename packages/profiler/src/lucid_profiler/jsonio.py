"""JSON that gives back exactly what it was given; the only module that knows a JSON library.

JSON has no NaN, no infinity, no integer beyond 2**53 that every reader keeps, no string that is not Unicode. These
travel as objects with one `$` key: `$float` (with `bits` for a NaN of its own payload), `$int`, `$bytes` (a string
that came from undecodable bytes, as file names and arguments do), `$surrogates` (any other lone surrogates).
A key of the caller that begins with `$` gets a second one. Tuples come back as lists.

The agent also runs in interpreters where only the program's own packages are installed; there the standard library
writes the same values, only slower.
"""

import json
import math
import struct
from typing import Any, NoReturn

try:
    import orjson
except ModuleNotFoundError:
    orjson = None  # type: ignore[assignment]

__all__ = ["MAX_DEPTH", "MAX_SAFE_INT", "dumps", "loads"]

# Every JSON reader keeps integers up to here: https://www.rfc-editor.org/rfc/rfc8259#section-6
MAX_SAFE_INT = 2**53 - 1
MAX_DEPTH = 200
_CANONICAL_NAN = struct.pack(">d", math.nan)
_BYTES_KEY = "$bytes:"
_SURROGATES_KEY = "$surrogates:"
_ANY_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
# What stands before a number where nothing else may, and as many digits as an integer of doubtful length has.
_LONG_INTS = tuple(begin + b"0" * len(str(MAX_SAFE_INT)) for begin in (b":", b",", b"[", b"-"))


def dumps(value: Any) -> bytes:
    """Write a value as one line of UTF-8 JSON with sorted keys and without a newline.

    Args:
        value: None, bool, int, float, str, and lists, tuples and str-keyed dicts of these.

    Raises:
        TypeError: On anything else; the message names its place.
        ValueError: On nesting deeper than `MAX_DEPTH`.
    """
    plain = _encode(value, "$", 0)
    if orjson is None:
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()
    return orjson.dumps(plain, option=orjson.OPT_SORT_KEYS)


def loads(line: bytes) -> Any:
    """Read a value that `dumps` wrote.

    Raises:
        ValueError: On invalid UTF-8 or JSON, a byte-order mark, duplicate keys, numbers that are not exact, unknown
            `$` objects, or nesting that is too deep.
    """
    quick = _read_quickly(line)
    if quick is not None:
        return _untagged(quick) if b'"$' in line else quick
    text = line.decode("utf-8")
    if text.startswith("\ufeff"):
        raise ValueError("a byte-order mark before the value")
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error
    except json.JSONDecodeError as error:
        # Its own text names a line, which is always the first one of this text and never the one of the file.
        what = error.msg.removesuffix(" starting at")
        raise ValueError(f"{what} at character {error.pos + 1}") from error


def _read_quickly(line: bytes) -> Any:
    """Return what a line holds, tags as they are, if orjson, which is lenient, would write these very bytes; else None.

    Then nothing was lost: no duplicate key, no number that is not exact. Integers that other readers do not keep it
    writes as they were, so they are looked for.
    """
    if orjson is None:
        return None
    try:
        value = orjson.loads(line)
        if orjson.dumps(value, option=orjson.OPT_SORT_KEYS) != line:
            return None
    except (ValueError, TypeError):  # what orjson refuses to read, to write
        return None
    digits = line.translate(_ANY_DIGIT)
    may_be_long = type(value) is int or any(begin in digits for begin in _LONG_INTS)
    return None if may_be_long and _holds_long_int(value) else value


def _untagged(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == _LONG_INT_KEYS:  # as the times of a machine have that runs for months
            return _decode_tag(value)
        return _decode_pairs([(name, _untagged(item)) for name, item in value.items()])
    if isinstance(value, list) and not {dict, list}.isdisjoint(map(type, value)):
        return [_untagged(item) for item in value]
    return value


def _holds_long_int(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_long_int, value.values()))
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds == {int}:
            return bool(max(value) > MAX_SAFE_INT or min(value) < -MAX_SAFE_INT)
        return not kinds.isdisjoint({int, list, dict}) and any(map(_holds_long_int, value))
    return type(value) is int and abs(value) > MAX_SAFE_INT


def _encode(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if isinstance(value, str):
        return _encode_str(str.__str__(value))
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -MAX_SAFE_INT <= value <= MAX_SAFE_INT else _encode_int(value, path)
    if kind is float:
        return value if math.isfinite(value) else _encode_nonfinite(value)
    if depth >= MAX_DEPTH:
        raise ValueError(f"{path[:80]}… is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {_encode_key(key, path): _encode(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise TypeError(f"{path} is of type {kind.__module__}.{kind.__qualname__}; convert it to a plain number or text")


def _encode_int(value: int, path: str) -> dict[str, str]:
    try:
        return {"$int": str(value)}
    except ValueError as error:
        raise TypeError(f"{path} is an integer of {value.bit_length()} bits; write it as text") from error


def _encode_nonfinite(value: float) -> dict[str, str]:
    if math.isinf(value):
        return {"$float": "inf" if value > 0 else "-inf"}
    bits = struct.pack(">d", value)
    return {"$float": "nan"} if bits == _CANONICAL_NAN else {"$float": "nan", "bits": bits.hex()}


def _encode_str(value: str) -> str | dict[str, str]:
    if not _has_surrogates(value):
        return value
    tag, digits = _surrogate_hex(value)
    return {tag: digits}


def _encode_key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{path} has the key {key!r} of type {type(key).__qualname__}; keys must be str")
    plain = str.__str__(key)
    if _has_surrogates(plain):
        return ":".join(_surrogate_hex(plain))
    return "$" + plain if plain.startswith("$") else plain


def _has_surrogates(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _surrogate_hex(text: str) -> tuple[str, str]:
    """Return the tag and the hex digits for a string that UTF-8 cannot hold."""
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "$surrogates", text.encode("utf-8", "surrogatepass").hex()
    # Surrogates that happen to spell valid UTF-8 would come back as the character.
    if raw.decode("utf-8", "surrogateescape") != text:
        return "$surrogates", text.encode("utf-8", "surrogatepass").hex()
    return "$bytes", raw.hex()


def _decode_pairs(pairs: list[tuple[str, Any]]) -> Any:
    result: dict[str, Any] = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} appears twice in one object")
    if not any(name.startswith("$") for name in result):
        return result
    if not _TAGS.isdisjoint(result):
        return _decode_tag(result)
    return {_decode_key(name): item for name, item in result.items()}


def _decode_tag(tagged: dict[str, Any]) -> Any:
    if tagged.keys() == _LONG_INT_KEYS and isinstance(tagged["$int"], str):
        return _decode_int(tagged["$int"])
    name = next(name for name in tagged if name in _TAGS)
    allowed = {name, "bits"} if tagged[name] == "nan" else {name}
    if not set(tagged) <= allowed or not all(isinstance(item, str) for item in tagged.values()):
        raise ValueError(f"a malformed {name} object")
    if name == "$float":
        return _decode_float(tagged["$float"], tagged.get("bits"))
    if name == "$int":
        return _decode_int(tagged["$int"])
    return _decode_hex(name, tagged[name])


def _decode_float(text: str, bits: str | None) -> float:
    if text not in {"nan", "inf", "-inf"}:
        raise ValueError(f"a $float object that says {text!r}")
    if bits is None:
        return float(text)
    raw = bytes.fromhex(bits)
    if len(raw) == struct.calcsize(">d"):
        value: float = struct.unpack(">d", raw)[0]
        if math.isnan(value):
            return value
    raise ValueError(f"a $float object with the bits {bits!r}, which are no NaN")


def _decode_int(text: str) -> int:
    value = int(text)
    if str(value) != text or abs(value) <= MAX_SAFE_INT:
        raise ValueError(f"an $int object that says {text!r}")
    return value


def _decode_hex(tag: str, digits: str) -> str:
    text = bytes.fromhex(digits).decode("utf-8", "surrogateescape" if tag == "$bytes" else "surrogatepass")
    # Only the one spelling that dumps gives: else two keys of one object could mean the same string.
    if not _has_surrogates(text) or _surrogate_hex(text) != (tag, digits):
        raise ValueError(f"a {tag} that says {digits[:40]!r}, which needs no tag")
    return text


def _decode_key(name: str) -> str:
    if name.startswith("$$"):
        return name[1:]
    if name.startswith((_BYTES_KEY, _SURROGATES_KEY)):
        tag, _, digits = name.partition(":")
        return _decode_hex(tag, digits)
    if name.startswith("$"):
        raise ValueError(f"an object with the unknown key {name!r}")
    return name


def _parse_int(digits: str) -> int:
    value = int(digits)
    if abs(value) > MAX_SAFE_INT:
        raise ValueError(f"the bare integer {digits[:40]} is beyond 2**53 - 1 and not exact in every reader")
    return value


def _parse_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is beyond the range of a double")
    return value


def _parse_constant(name: str) -> NoReturn:
    raise ValueError(f"the literal {name} is not JSON")


_LONG_INT_KEYS = {"$int"}
_TAGS = frozenset({"$float", "$int", "$bytes", "$surrogates"})
_DECODER = json.JSONDecoder(
    object_pairs_hook=_decode_pairs, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_parse_constant
)
