import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid_profiler.monitor.protocol import MAX_FRAME_BYTES, Decoder, ProtocolError, encode, encode_answer

MESSAGES = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20) | st.none(), max_size=5)


@given(messages=st.lists(MESSAGES, max_size=5), sizes=st.lists(st.integers(1, 50), min_size=1))
def test_messages_arrive_whole_however_they_are_cut(messages: list[dict[str, object]], sizes: list[int]) -> None:
    """A stream may be delivered in any pieces."""
    stream = b"".join(map(encode, messages))
    decoder = Decoder()
    got = []
    while stream:
        for size in sizes:
            decoder.feed(stream[:size])
            stream = stream[size:]
            while (message := decoder.next()) is not None:
                got.append(message)
    assert got == messages
    assert decoder.next() is None


def test_a_frame_is_its_length_and_json() -> None:
    """Four bytes, big-endian, then the object: anybody can write a client."""
    assert encode({"verb": "stop"}) == b'\0\0\0\x0f{"verb":"stop"}'


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (struct.pack(">I", MAX_FRAME_BYTES + 1), "at most 65536"),
        (struct.pack(">I", 2**32 - 1), "at most 65536"),
        (b"\0\0\0\x03{{}", "no JSON"),
        (b"\0\0\0\x02[]", "no JSON object"),
        (b"\0\0\0\0", "no JSON"),
        (b"\0\0\0\x02\xff\xff", "no JSON"),
    ],
)
def test_what_is_no_frame_is_refused(frame: bytes, words: str) -> None:
    """A length is not believed, and nothing but an object is taken."""
    decoder = Decoder()
    decoder.feed(frame)
    with pytest.raises(ProtocolError, match=words):
        decoder.next()


def test_what_no_frame_can_hold_is_not_sent() -> None:
    """The cap holds for both directions."""
    with pytest.raises(ProtocolError, match="more than the 65536"):
        encode({"name": "x" * MAX_FRAME_BYTES})
    with pytest.raises(ProtocolError, match="cannot be written"):
        encode({"name": object()})


@pytest.mark.parametrize(
    ("answer", "words", "number"),
    [
        ({"ok": True, "id": 7, "argv": ["x" * MAX_FRAME_BYTES]}, "more than the 65536 of a frame", 7),
        ({"ok": False, "id": 7, "error": "x" * MAX_FRAME_BYTES}, "more than the 65536 of a frame", 7),
        ({"ok": True, "id": 7, "argv": {1, 2}}, "is of type builtins.set", 7),
        ({"ok": True, "id": 7, "x" * MAX_FRAME_BYTES: object()}, "cannot be written", 7),
        ({"ok": True, "id": "7" * MAX_FRAME_BYTES}, "more than the 65536 of a frame", None),
        ({"ok": True, "argv": object()}, "is of type builtins.object", None),
    ],
)
def test_an_answer_that_no_frame_can_hold_becomes_a_refusal(
    answer: dict[str, object], words: str, number: int | None
) -> None:
    """Whoever asked is told, whatever the answer holds; its number goes along where there is room."""
    decoder = Decoder()
    decoder.feed(encode_answer(answer))
    refusal = decoder.next()
    assert refusal is not None
    assert (refusal["ok"], refusal.get("id")) == (False, number)
    assert refusal["error"].startswith("the answer cannot be sent: ")
    assert words in refusal["error"]
    assert encode_answer({"ok": True, "id": 1}) == encode({"ok": True, "id": 1})
