"""Who is let in: first use, enrolment, rotation, revocation, and what is said again."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.errors import IdentityError
from edgefl.wire.enrolment import new_token, prove
from edgefl.wire.keys import rotate
from edgefl.wire.mqtt.envelope import MessageSigner
from edgefl.wire.mqtt.messages import Decline, Hello, Message, Status, encode
from edgefl_server.identity.registry import Registry
from tests.server.fleet import progress
from tests.server.identity.lab import CHUNK, DECLINE, MINE, Lab, hello, topic_of
from tests.wire.mqtt.speakers import speaker_in


def test_the_first_key_of_a_name_is_trusted(lab: Lab, phone: MessageSigner, thief: MessageSigner) -> None:
    lab.say(phone, hello())
    lab.say(phone, DECLINE)

    assert lab.notes == [
        f"trust on first use: device phone is who has the key {phone.keys.public_key} from now on"
    ]
    for message in (hello(), Status(online=False), DECLINE, CHUNK):
        lab.refuses_of(thief, message, "wrong-key")
        lab.refuses(encode(message), message, "unsigned")
    lab.restart()
    lab.refuses_of(thief, hello(), "wrong-key")


def test_a_stranger_who_says_no_hello_leaves_nothing(lab: Lab, thief: MessageSigner) -> None:
    lab.say(thief, CHUNK)

    assert lab.registry.all() == []


@pytest.mark.parametrize(
    "message", [hello(), Status(online=True), DECLINE], ids=["hello", "status", "decline"]
)
def test_what_was_said_before_is_not_said_again(lab: Lab, phone: MessageSigner, message: Message) -> None:
    lab.say(phone, hello(samples=5))
    old = lab.say(phone, message)
    new = lab.say(phone, message)

    lab.refuses(old, message, "replayed")
    lab.take(new, message)  # brokers send twice, and keep what is retained
    if not isinstance(message, Decline):  # of a restarted server the task's nonce decides
        lab.restart()
        lab.refuses(old, message, "replayed")
        lab.take(new, message)


def test_what_was_heard_is_a_copy_and_once_news_to_a_restarted_server(lab: Lab, phone: MessageSigner) -> None:
    def again(payload: bytes, message: Message) -> bool:
        return lab.authenticator.verify(type(message), "phone", topic_of(message), payload).is_copy

    said = [(message, lab.say(phone, message)) for message in (hello(), Status(online=True), DECLINE)]
    assert all(again(payload, message) for message, payload in said)
    lab.restart()
    for message, payload in said:
        assert not again(payload, message)
        lab.take(payload, message)
        assert again(payload, message)
    lab.registry.forget("phone")
    assert not again(said[0][1], hello())  # it brings its key in


def test_a_will_is_old_once_its_device_is_back(lab: Lab, phone: MessageSigner) -> None:
    def connection() -> tuple[bytes, bytes]:
        number = phone.numbers.next(2)
        return tuple(phone.seal(MINE.status, Status(online=at == 0), number + at) for at in (0, 1))  # type: ignore[return-value]

    lab.say(phone, hello())
    (online, will), (online_again, second_will) = connection(), connection()
    for payload in (online, will, online_again):
        lab.take(payload, Status(online=True))

    lab.refuses(will, Status(online=False), "replayed")
    lab.take(second_will, Status(online=False))


def test_chunks_may_come_in_any_order(lab: Lab, phone: MessageSigner) -> None:
    lab.say(phone, hello())
    first, second = (phone.seal(topic_of(CHUNK), CHUNK) for _ in range(2))

    lab.take(second, CHUNK)
    lab.take(first, CHUNK)


def test_enrolment_admits_listed_keys_only(fleet: Lab, phone: MessageSigner, thief: MessageSigner) -> None:
    for message in (hello(), Status(online=True), DECLINE, CHUNK):
        fleet.refuses_of(phone, message, "unknown-key")
        fleet.refuses(encode(message), message, "unsigned")

    fleet.registry.add("phone", phone.keys.public, source="request", now=fleet.now)

    fleet.say(phone, hello())
    fleet.say(phone, CHUNK)
    fleet.refuses_of(thief, hello(), "wrong-key")


def test_a_token_admits_one_key_once(fleet: Lab, phone: MessageSigner, thief: MessageSigner) -> None:
    token = new_token(b"\x01" * 32)
    fleet.registry.issue(token, "phone", valid_until=fleet.now + 10)

    def asking(speaker: MessageSigner, secret: bytes = token.secret) -> Hello:
        return hello(token=token.name, proof=prove(secret, MINE.hello, speaker.keys.public))

    fleet.refuses_of(thief, asking(phone), "unknown-key")  # a proof that was overheard is for another key
    fleet.refuses_of(thief, asking(thief, bytes(32)), "unknown-key")
    fleet.say(phone, asking(phone))
    fleet.say(phone, asking(phone))  # a device that is started again with it is known

    assert fleet.notes == [f"device phone is enrolled by a token, with the key {phone.keys.public_key}"]
    fleet.refuses_of(thief, asking(thief), "wrong-key")


def test_a_token_ends(fleet: Lab, phone: MessageSigner) -> None:
    token = new_token(b"\x01" * 32)
    fleet.registry.issue(token, "phone", valid_until=fleet.now + 10)
    fleet.now += 11

    asking = hello(token=token.name, proof=prove(token.secret, MINE.hello, phone.keys.public))
    fleet.refuses_of(phone, asking, "unknown-key")


def test_a_revoked_key_is_refused_at_once(fleet: Lab, phone: MessageSigner, tmp_path: Path) -> None:
    fleet.registry.add("phone", phone.keys.public, source="request", now=fleet.now)
    fleet.say(phone, hello())

    other_process = Registry(fleet.path, "demo")
    assert other_process.revoke("phone") == 1
    other_process.close()

    for message in (hello(), Status(online=True), DECLINE, CHUNK):
        fleet.refuses_of(phone, message, "revoked-key")
    rotate(tmp_path / "phone.key", overlap_s=1e6, now=fleet.now)
    fleet.refuses_of(speaker_in(tmp_path / "phone.key", 1 << 41), hello(), "unknown-key")


def test_a_device_without_keys_is_barred(lab: Lab, fleet: Lab, phone: MessageSigner, tmp_path: Path) -> None:
    assert fleet.authenticator.is_barred("phone")  # with a list, names that are not on it
    lab.registry.forget("phone")
    lab.say(phone, hello())
    assert not lab.authenticator.is_barred("phone")
    lab.registry.revoke("phone")
    assert lab.authenticator.is_barred("phone")
    lab.registry.add("phone", bytes(32), source="request", now=lab.now)
    assert not lab.authenticator.is_barred("phone")


@pytest.mark.parametrize("gate", ["lab", "fleet"])
def test_a_rotated_key_is_let_in_and_the_old_one_for_a_while(
    gate: str, phone: MessageSigner, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    door: Lab = request.getfixturevalue(gate)
    door.registry.add("phone", phone.keys.public, source="request", now=door.now)
    door.say(phone, hello())

    rotate(tmp_path / "phone.key", overlap_s=60, now=door.now)
    renewed = speaker_in(tmp_path / "phone.key", 1 << 41)
    door.refuses_of(renewed, CHUNK, "wrong-key")  # its hello brings it in
    door.say(renewed, hello())
    door.say(renewed, CHUNK)
    door.say(phone, CHUNK)
    door.now += 61

    door.refuses_of(phone, CHUNK, "old-key")
    assert [(each.state, each.source) for each in door.registry.keys("phone")] == [
        ("retired", "request"),
        ("active", "rotation"),
    ]


@pytest.mark.parametrize("online", [True, False])
def test_the_status_before_the_hello_that_brings_a_key_in_counts_after_it(
    lab: Lab, phone: MessageSigner, thief: MessageSigner, tmp_path: Path, online: bool
) -> None:
    lab.say(phone, hello())
    assert lab.authenticator.take_status("phone") is None  # the status of a name's first key is let in
    rotate(tmp_path / "phone.key", overlap_s=60, now=lab.now)
    renewed = speaker_in(tmp_path / "phone.key", 1 << 41)
    lab.refuses_of(renewed, Status(online=online), "wrong-key")
    lab.refuses_of(thief, Status(online=not online), "wrong-key")

    lab.say(renewed, hello())

    assert lab.authenticator.take_status("phone") == Status(online=online)
    lab.say(renewed, hello())
    assert lab.authenticator.take_status("phone") is None


def test_a_forged_status_does_not_follow_a_new_key(lab: Lab, phone: MessageSigner, tmp_path: Path) -> None:
    lab.say(phone, hello())
    rotate(tmp_path / "phone.key", overlap_s=60, now=lab.now)
    renewed = speaker_in(tmp_path / "phone.key", 1 << 41)
    elsewhere = renewed.seal("elsewhere", Status(online=False))
    lab.refuses(elsewhere, Status(online=False), "wrong-key")

    lab.say(renewed, hello())

    assert lab.authenticator.take_status("phone") == Status(online=True)


def test_a_forgotten_device_may_have_a_new_key(lab: Lab, phone: MessageSigner, thief: MessageSigner) -> None:
    lab.say(phone, hello())
    lab.refuses_of(thief, hello(), "wrong-key")

    assert lab.registry.forget("phone") == 1

    lab.say(thief, hello())


def test_the_same_refusal_is_new_once(lab: Lab) -> None:
    error = IdentityError("wrong-key", "text")

    assert [lab.authenticator.is_new("phone", error) for _ in range(3)] == [True, False, False]
    assert lab.authenticator.is_new("laptop", error)


def test_progress_of_an_unsigned_name_is_as_before(lab: Lab) -> None:
    training = progress("train")

    assert lab.take(encode(training), training) == training
