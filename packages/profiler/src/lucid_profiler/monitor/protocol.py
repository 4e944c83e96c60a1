"""Frames of the control socket: a length of four bytes, big-endian, then one JSON object of at most 64 KiB."""

import struct
from typing import Any

from lucid_profiler import jsonio

MAX_FRAME_BYTES = 64 << 10
VERBS = ("hello", "start", "stop", "status", "mark", "flush")
_LENGTH = struct.Struct(">I")
_MAX_REASON_CHARS = 1000

__all__ = ["MAX_FRAME_BYTES", "VERBS", "Decoder", "ProtocolError", "encode", "encode_answer"]


class ProtocolError(Exception):
    """The other side does not speak this protocol; the message says how that shows."""


def encode(message: dict[str, Any]) -> bytes:
    """Return the frame of a message.

    Raises:
        ProtocolError: it is too long for a frame, or holds what JSON cannot carry.
    """
    try:
        body = jsonio.dumps(message)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"the message cannot be written: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"the message takes {len(body)} bytes, more than the {MAX_FRAME_BYTES} of a frame")
    return _LENGTH.pack(len(body)) + body


def encode_answer(answer: dict[str, Any]) -> bytes:
    """Return the frame of an answer; of one that no frame can hold, a refusal that says so.

    Who asked is told in any case: without the `id` of the request where that is what does not fit.
    """
    try:
        return encode(answer)
    except ProtocolError as error:
        refusal = {"ok": False, "error": f"the answer cannot be sent: {error}"[:_MAX_REASON_CHARS]}
    try:
        return encode({**refusal, **{name: answer[name] for name in ("id",) if name in answer}})
    except ProtocolError:
        return encode(refusal)


class Decoder:
    """Puts frames together from the pieces in which they arrive; never holds more than one frame and one piece."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has arrived that `next` has not returned."""
        return not self._buffer

    def feed(self, data: bytes) -> None:
        """Take in what has arrived."""
        self._buffer += data

    def next(self) -> dict[str, Any] | None:
        """Return the next message, None while it is not whole.

        Raises:
            ProtocolError: the frame is too long, or holds no JSON object.
        """
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are read")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return _parse(body)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = jsonio.loads(body)
    except ValueError as error:
        raise ProtocolError(f"a frame that is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError("a frame that is no JSON object")
    return message
