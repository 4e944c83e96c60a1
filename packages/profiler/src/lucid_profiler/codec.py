"""Records to plain JSON data and back, checked against the types that the records declare."""

import dataclasses
import functools
import itertools
import types
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

__all__ = ["from_plain", "to_plain"]

T = TypeVar("T")


def to_plain(record: Any) -> dict[str, Any]:
    """Return a record's fields as a dict of plain data; lists, tuples and dicts inside may alias the record's.

    Fields whose metadata say `optional` are left out at their default, as a file of an older version lacks them.
    """
    fields = {field.name: (field, getattr(record, field.name)) for field in dataclasses.fields(record)}
    return {
        name: _plain(value)
        for name, (field, value) in fields.items()
        if not (field.metadata.get("optional") and value == _default(field))
    }


def from_plain(record_type: type[T], data: dict[str, Any], unknown: Counter[str]) -> T:
    """Build a record from plain data.

    Args:
        record_type: A dataclass whose fields are numbers, text, Literals, tuples, str-keyed dicts, NamedTuples and
            dataclasses of these.
        data: What `to_plain` gave, as it came back from JSON.
        unknown: Mutated: counts the keys that no field has, by their path.

    Raises:
        ValueError: If a field is missing or of another type; the message begins with its path.
    """
    name = getattr(record_type, "kind", record_type.__name__)
    record: T = _decode_dataclass(record_type, data, name, unknown)
    return record


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


@functools.cache
def _hints(record_type: type) -> dict[str, Any]:
    return typing.get_type_hints(record_type)


def _decode(hint: Any, value: Any, path: str, unknown: Counter[str]) -> Any:
    if hint is Any or (hint in _SCALARS and type(value) is hint):
        return value
    if hint is float and type(value) is int:
        return float(value)
    origin = typing.get_origin(hint)
    if origin in _UNIONS:
        return _decode_union(typing.get_args(hint), value, path, unknown)
    if origin is Literal:
        return _decode_literal(typing.get_args(hint), value, path)
    return _decode_container(hint, value, path, unknown)


def _decode_container(hint: Any, value: Any, path: str, unknown: Counter[str]) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple and isinstance(value, list):
        return _decode_tuple(typing.get_args(hint), value, path, unknown)
    if origin is dict and isinstance(value, dict):
        (_, item_hint) = typing.get_args(hint)
        if (quick := _quick(item_hint)) is not None:
            with suppress(_OddError):
                return dict(zip(value, quick(list(value.values())), strict=True))
        return {key: _decode(item_hint, item, f"{path}.{key}", unknown) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _decode_dataclass(hint, value, path, unknown)
    if hasattr(hint, "_fields") and isinstance(value, list):
        return hint(*_decode_tuple(tuple(_hints(hint).values()), value, path, unknown))
    raise ValueError(f"{path} is {_shown(value)}, expected {getattr(hint, '__name__', hint)}")


class _OddError(Exception):
    """A value that needs a closer look."""


_Column = Callable[[Sequence[Any]], Sequence[Any]]


@functools.cache
def _quick(hint: Any) -> _Column | None:
    """Return what reads many values at once, of a scalar, a tuple of one kind of scalars, or a named tuple of these.

    It raises `_OddError` if one of them is not exactly that. Reports hold tens of thousands of digests in this form.
    """
    if hint in _SCALARS:
        return functools.partial(_quick_scalars, hint)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and arguments[1:] == (Ellipsis,) and arguments[0] in _SCALARS:
        return functools.partial(_quick_tuples, arguments[0])
    if hasattr(hint, "_fields"):
        columns = [_quick(field) for field in _hints(hint).values()]
        known = [column for column in columns if column is not None]
        return functools.partial(_quick_named, hint, known) if len(known) == len(columns) else None
    return None


def _quick_scalars(kind: type, values: Sequence[Any]) -> Sequence[Any]:
    if set(map(type, values)) <= {kind}:
        return values
    raise _OddError


def _quick_tuples(kind: type, values: Sequence[Any]) -> Sequence[Any]:
    if set(map(type, values)) <= {list} and set(map(type, itertools.chain.from_iterable(values))) <= {kind}:
        return list(map(tuple, values))
    raise _OddError


def _quick_named(kind: Any, columns: list[_Column], values: Sequence[Any]) -> Sequence[Any]:
    if set(map(type, values)) <= {list} and set(map(len, values)) == {len(columns)}:
        found = [column(items) for column, items in zip(columns, zip(*values, strict=True), strict=True)]
        return list(itertools.starmap(kind, zip(*found, strict=True)))
    raise _OddError


def _decode_union(hints: tuple[Any, ...], value: Any, path: str, unknown: Counter[str]) -> Any:
    if value is None and types.NoneType in hints:
        return None
    if type(value) in hints:
        return value
    others = [hint for hint in hints if hint is not types.NoneType]
    if len(others) == 1:
        return _decode(others[0], value, path, unknown)
    raise ValueError(f"{path} is {_shown(value)}, expected {' or '.join(hint.__name__ for hint in hints)}")


def _decode_literal(allowed: tuple[Any, ...], value: Any, path: str) -> Any:
    if isinstance(value, str) and value in allowed:
        return value
    raise ValueError(f"{path} is {_shown(value)}, expected one of {', '.join(map(str, allowed))}")


def _decode_tuple(hints: tuple[Any, ...], value: list[Any], path: str, unknown: Counter[str]) -> tuple[Any, ...]:
    if hints[-1] is Ellipsis:
        return tuple(_decode(hints[0], item, f"{path}[{index}]", unknown) for index, item in enumerate(value))
    if len(value) != len(hints):
        raise ValueError(f"{path} has {len(value)} items, expected {len(hints)}")
    pairs = zip(hints, value, strict=True)
    return tuple(_decode(hint, item, f"{path}[{index}]", unknown) for index, (hint, item) in enumerate(pairs))


def _decode_dataclass(record_type: Any, data: dict[str, Any], path: str, unknown: Counter[str]) -> Any:
    hints = _hints(record_type)
    fields = {field.name: field for field in dataclasses.fields(record_type)}
    unknown.update(f"{path}.{key}" for key in data if key not in fields)
    missing = [name for name, field in fields.items() if name not in data and _is_required(field)]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    known = {name: _decode(hints[name], data[name], f"{path}.{name}", unknown) for name in fields if name in data}
    return record_type(**known)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}… ({type(value).__name__})" if len(text) > 60 else f"{text} ({type(value).__name__})"


_SCALARS = frozenset({int, float, str, bool})
_UNIONS = frozenset({typing.Union, types.UnionType})
