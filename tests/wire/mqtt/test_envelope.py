"""Signed messages: good for one kind, one topic and one number, and unreadable garbage is refused as such."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.enrolment import new_token, parse_token, prove, proves
from edgefl.wire.keys import KeyPair
from edgefl.wire.mqtt.envelope import (
    CounterStore,
    Envelope,
    MessageCounter,
    MessageSigner,
    open_message,
    peek,
    unsigned,
    unwrap,
)
from edgefl.wire.mqtt.messages import ENVELOPE_BYTES, Status, Task, UpdateChunk, encode
from tests.support.errors import ConfigError, IdentityError, ProtocolError, refuses
from tests.wire.mqtt.speakers import speaker_in

TOPIC = "edgefl/v1/demo/devices/phone/status"
STATUS = Status(online=True)


@pytest.fixture
def speaker(tmp_path: Path) -> MessageSigner:
    return speaker_in(tmp_path / "key")


def test_a_message_is_opened_with_the_key_that_signed_it(speaker: MessageSigner) -> None:
    opened = open_message(Status, TOPIC, speaker.seal(TOPIC, STATUS, 7))

    assert (opened.message, opened.key, opened.at) == (STATUS, speaker.keys.public, 7)
    assert open_message(Status, TOPIC, unsigned(TOPIC, STATUS)).key == b""


def test_a_signature_holds_for_its_topic_kind_and_number_only(speaker: MessageSigner, tmp_path: Path) -> None:
    payload = speaker.seal(TOPIC, STATUS, 7)
    sealed = msgspec.msgpack.decode(payload, type=Envelope)
    other = KeyPair(tmp_path / "other")

    with refuses(IdentityError, reason="wrong-signature"):
        open_message(Status, TOPIC.replace("demo", "other"), payload)
    with refuses(IdentityError, reason="wrong-signature"):
        open_message(Status, TOPIC.replace("phone", "laptop"), payload)
    with refuses(IdentityError, reason="wrong-signature"):
        open_message(Task, TOPIC, payload)
    for changed in (
        msgspec.structs.replace(sealed, at=8),
        msgspec.structs.replace(sealed, key=other.public),
        msgspec.structs.replace(sealed, body=encode(Status(online=False))),
        msgspec.structs.replace(sealed, signature=bytes(64)),
    ):
        with refuses(IdentityError, reason="wrong-signature"):
            open_message(Status, TOPIC, msgspec.msgpack.encode(changed))


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_never_crashes(data: bytes) -> None:
    for payload in (
        data,
        msgspec.msgpack.encode({"v": 2, "body": data, "key": data, "signature": data, "at": 1}),
    ):
        with pytest.raises(ProtocolError):
            open_message(Status, TOPIC, payload)
    envelope = {"v": 2, "key": bytes(32), "signature": bytes(64), "at": 1, "body": data}
    with pytest.raises(ProtocolError):
        open_message(Status, TOPIC, msgspec.msgpack.encode(envelope))


def test_a_number_or_a_chain_beyond_all_bounds_is_refused(speaker: MessageSigner) -> None:
    sealed = msgspec.msgpack.decode(speaker.seal(TOPIC, STATUS))
    link = {"old": bytes(32), "new": bytes(32), "until": 1, "signature": bytes(64)}

    for changes in ({"at": -1}, {"at": 2**63}, {"succession": [link] * 9}):
        with refuses(ProtocolError, kind="Message"):
            unwrap(msgspec.msgpack.encode({**sealed, **changes}))


def test_people_may_look_without_believing(speaker: MessageSigner) -> None:
    assert peek(Status, speaker.seal(TOPIC, STATUS)) == peek(Status, encode(STATUS)) == STATUS


def test_a_signed_chunk_stays_within_its_room(speaker: MessageSigner) -> None:
    chunk = UpdateChunk(
        nonce="0" * 64, sha256="0" * 64, index=1 << 30, count=1 << 30, size=1 << 40, data=bytes(1000)
    )

    assert len(speaker.seal("edgefl/v1/demo/devices/phone/updates/1/1", chunk)) <= 1000 + ENVELOPE_BYTES


def test_numbers_grow_over_restarts_without_a_clock() -> None:
    kept = [0]
    store = Mock(spec=CounterStore, number=lambda: kept[-1], keep_number=kept.append)

    def start() -> MessageCounter:
        return MessageCounter(store, now=0.0)

    first, last = start(), 0
    for _ in range(3):
        last = first.next(2)
    assert len(kept) == 2  # not one write for each number
    assert start().next() > last + 1
    set_back = MessageCounter(now=5e9)
    assert set_back.next() > start().next()  # healed by the clock


def test_a_token_proves_one_key_on_one_topic() -> None:
    token = new_token(b"\x01" * 32)
    given_to = parse_token(token.text + "\n")
    made = prove(given_to.secret, TOPIC, b"\x02" * 32)

    assert given_to == token and token.secret.hex() not in made.hex()
    assert proves(token.secret, TOPIC, b"\x02" * 32, made)
    assert not proves(token.secret, TOPIC, b"\x03" * 32, made)
    assert not proves(token.secret, TOPIC.replace("phone", "thief"), b"\x02" * 32, made)
    with pytest.raises(ConfigError, match="not one of `edgefl enroll token`"):
        parse_token(token.text[:-1])
