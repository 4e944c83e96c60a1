"""Reading the states of a report: equal runs leave equal digests, so each set of them is decoded once and shared."""

import marshal
from collections import Counter
from dataclasses import replace
from typing import Any

from lucid_profiler.codec import from_plain
from lucid_profiler.digest import TensorDigest
from lucid_profiler.records import State

_MAX_KNOWN = 64  # parts times arms; what is older is decoded again
_WITHOUT_REFERENCES = 2  # the version of marshal whose bytes depend on the value alone, and tell 1 from 1.0 and True

__all__ = ["StateDecoder"]


class StateDecoder:
    """Decodes the states of one file; those with the same digests have the very same mapping of them."""

    def __init__(self) -> None:
        self._known: dict[bytes, dict[str, TensorDigest]] = {}

    def decode(self, body: dict[str, Any], unknown: Counter[str]) -> State:
        """Return the record of a line.

        Args:
            body: its fields, as they came from JSON.
            unknown: mutated: counts the keys that no field has.

        Raises:
            ValueError: a field is missing or of another type.
        """
        form = marshal.dumps(body.get("tensors"), _WITHOUT_REFERENCES)
        known = self._known.get(form)
        if known is not None:
            return replace(from_plain(State, {**body, "tensors": {}}, unknown), tensors=known)
        state = from_plain(State, body, unknown)
        if len(self._known) >= _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[form] = state.tensors
        return state
