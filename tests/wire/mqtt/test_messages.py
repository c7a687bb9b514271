"""Messages from an untrusted sender: read, or refused with ProtocolError, whatever the bytes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import ProtocolError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.messages import Message, Task, UpdateChunk
from tests.wire.make_golden import MESSAGES
from tests.wire.texts import LETTERS

KINDS = sorted({type(message) for message in MESSAGES.values()}, key=lambda kind: kind.__name__)
ENCODED = [messages.encode(message) for message in MESSAGES.values()]

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(LETTERS, max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(LETTERS, max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def _decodes_or_refuses(kind: type[Message], data: bytes) -> None:
    try:
        assert isinstance(messages.decode(kind, data), kind)
    except ProtocolError as error:
        assert kind.__name__ in error.message


@given(st.sampled_from(KINDS), st.binary(max_size=100))
def test_arbitrary_bytes_raise_nothing_but_protocol_error(kind: type[Message], data: bytes) -> None:
    _decodes_or_refuses(kind, data)


@given(st.sampled_from(KINDS), st.sampled_from(ENCODED), st.data())
def test_damaged_messages_raise_protocol_error(kind: type[Message], data: bytes, draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, len(data) - 1))
    value = draw.draw(st.integers(0, 255))
    _decodes_or_refuses(kind, data[:place] + bytes([value]) + data[place + 1 :])
    _decodes_or_refuses(kind, data[:place])


@given(st.sampled_from(sorted(MESSAGES)), st.data())
def test_wrong_types_in_any_field_raise_nothing_but_protocol_error(name: str, draw: st.DataObject) -> None:
    fields = msgspec.msgpack.decode(messages.encode(MESSAGES[name]))
    field = draw.draw(st.sampled_from(sorted(fields)))
    fields[field] = draw.draw(VALUES)
    _decodes_or_refuses(type(MESSAGES[name]), msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nested", [b"\x91" * 200_000 + b"\x01", b"\x81\xa1x" * 200_000 + b"\x01"])
def test_deep_nesting_does_not_end_the_reader(kind: type[Message], nested: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        messages.decode(kind, b"\x81\xa1x" + nested)


def test_a_wrong_type_is_named() -> None:
    fields = msgspec.msgpack.decode(messages.encode(MESSAGES["task"])) | {"round": "three"}

    with pytest.raises(ProtocolError, match=r"Expected `int`, got `str` - at `\$.round`"):
        messages.decode(Task, msgspec.msgpack.encode(fields))


def test_a_message_without_version_is_read_as_version_1() -> None:
    fields = msgspec.msgpack.decode(messages.encode(MESSAGES["task"]))
    del fields["v"]

    assert messages.decode(Task, msgspec.msgpack.encode(fields)) == MESSAGES["task"]


def test_an_update_chunk_with_full_data_fits_the_chunk_size() -> None:
    """The limit of hosted brokers counts the whole payload, not only the piece inside it."""
    limit = Limits().chunk_bytes
    chunk = UpdateChunk(
        nonce="f" * 64,
        sha256="f" * 64,
        index=2**31,
        count=2**31,
        size=2**40,
        data=bytes(limit - messages.ENVELOPE_BYTES),
    )

    assert len(messages.encode(chunk)) <= limit


def test_limits_refuse_an_unknown_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="chunk_byte"):
        msgspec.convert({"chunk_byte": 1}, Limits)


def test_limits_have_a_reason_beside_each_default() -> None:
    source = Limits.__module__
    text = __import__(source, fromlist=["_"]).__loader__.get_source(source)

    for name in Limits.__struct_fields__:
        after = text.split(f"    {name}: ", 1)[1].split("\n", 2)[1]
        assert after.strip().startswith('"""'), name
