"""Who is let in: first use, enrolment, rotation, revocation, and what is said again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edgefl.wire.enrolment import new_token, proof
from edgefl.wire.errors import IdentityError
from edgefl.wire.keys import rotate
from edgefl.wire.mqtt.envelope import Speaker
from edgefl.wire.mqtt.messages import Decline, Hello, Message, Progress, Status, UpdateChunk, encode
from edgefl.wire.mqtt.topics import Topics
from server.identity.door import Door
from server.identity.registry import Registry
from tests.wire.mqtt.speakers import speaker_in

MINE = Topics("demo").device("phone")
CHUNK = UpdateChunk(nonce="n", sha256="ab" * 32, index=0, count=1, size=1, data=b"x")
DECLINE = Decline(round=1, nonce="n", reason="failed")


def hello(samples: int = 1, **fields: object) -> Hello:
    return Hello(agent="t", memory_bytes=1, cores=1, samples=samples, engines={}, **fields)  # type: ignore[arg-type]


def topic_of(message: Message) -> str:
    topics = {Hello: MINE.hello, Status: MINE.status, Decline: MINE.declines, UpdateChunk: MINE.update(1, 0)}
    return topics.get(type(message), MINE.progress)


@dataclass
class Gate:
    """A door of a list of devices, which a test may close and open again."""

    path: Path
    enrolled: bool = False
    now: float = 1000.0
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.registry = Registry(self.path, "demo")
        self.door = Door(self.registry, self.notes.append, enrolled=self.enrolled, clock=lambda: self.now)

    def take(self, payload: bytes, message: Message) -> Message:
        return self.door.open(type(message), "phone", topic_of(message), payload)

    def say(self, speaker: Speaker, message: Message) -> bytes:
        payload = speaker.seal(topic_of(message), message)
        self.take(payload, message)
        return payload

    def refuses(self, payload: bytes, message: Message, reason: str) -> None:
        before = self.registry.all()
        with pytest.raises(IdentityError) as caught:
            self.take(payload, message)
        assert caught.value.reason == reason
        assert self.registry.all() == before

    def refuses_of(self, speaker: Speaker, message: Message, reason: str) -> None:
        self.refuses(speaker.seal(topic_of(message), message), message, reason)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "devices.sqlite")
    yield gate
    gate.registry.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "devices.sqlite", enrolled=True)
    yield gate
    gate.registry.close()


@pytest.fixture
def phone(tmp_path: Path) -> Speaker:
    return speaker_in(tmp_path / "phone.key")


@pytest.fixture
def thief(tmp_path: Path) -> Speaker:
    return speaker_in(tmp_path / "thief.key", first=1 << 40)


def test_the_first_key_of_a_name_is_trusted_and_it_is_said(lab: Gate, phone: Speaker, thief: Speaker) -> None:
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


def test_a_stranger_who_says_no_hello_leaves_nothing(lab: Gate, thief: Speaker) -> None:
    lab.say(thief, CHUNK)

    assert lab.registry.all() == []


@pytest.mark.parametrize(
    "message", [hello(), Status(online=True), DECLINE], ids=["hello", "status", "decline"]
)
def test_what_was_said_before_is_not_said_again(lab: Gate, phone: Speaker, message: Message) -> None:
    lab.say(phone, hello(samples=5))
    old = lab.say(phone, message)
    new = lab.say(phone, message)

    lab.refuses(old, message, "replayed")
    lab.take(new, message)  # brokers send twice, and keep what is retained
    if not isinstance(message, Decline):  # of a restarted server the task's nonce decides
        lab.restart()
        lab.refuses(old, message, "replayed")
        lab.take(new, message)


def test_a_will_is_old_once_its_device_is_back(lab: Gate, phone: Speaker) -> None:
    def connection() -> tuple[bytes, bytes]:
        number = phone.numbers.next(2)
        return tuple(phone.seal(MINE.status, Status(online=at == 0), number + at) for at in (0, 1))  # type: ignore[return-value]

    lab.say(phone, hello())
    (online, will), (online_again, second_will) = connection(), connection()
    for payload in (online, will, online_again):
        lab.take(payload, Status(online=True))

    lab.refuses(will, Status(online=False), "replayed")
    lab.take(second_will, Status(online=False))


def test_chunks_may_come_in_any_order(lab: Gate, phone: Speaker) -> None:
    lab.say(phone, hello())
    first, second = (phone.seal(topic_of(CHUNK), CHUNK) for _ in range(2))

    lab.take(second, CHUNK)
    lab.take(first, CHUNK)


def test_with_enrolment_only_keys_of_the_list_are_let_in(fleet: Gate, phone: Speaker, thief: Speaker) -> None:
    for message in (hello(), Status(online=True), DECLINE, CHUNK):
        fleet.refuses_of(phone, message, "unknown-key")
        fleet.refuses(encode(message), message, "unsigned")

    fleet.registry.add("phone", phone.keys.public, source="request", now=fleet.now)

    fleet.say(phone, hello())
    fleet.say(phone, CHUNK)
    fleet.refuses_of(thief, hello(), "wrong-key")


def test_a_token_lets_one_key_of_one_device_in_once(fleet: Gate, phone: Speaker, thief: Speaker) -> None:
    token = new_token(b"\x01" * 32)
    fleet.registry.issue(token, "phone", valid_until=fleet.now + 10)

    def asking(speaker: Speaker, secret: bytes = token.secret) -> Hello:
        return hello(token=token.name, proof=proof(secret, MINE.hello, speaker.keys.public))

    fleet.refuses_of(thief, asking(phone), "unknown-key")  # a proof that was overheard is for another key
    fleet.refuses_of(thief, asking(thief, bytes(32)), "unknown-key")
    fleet.say(phone, asking(phone))
    fleet.say(phone, asking(phone))  # a device that is started again with it is known

    assert fleet.notes == [f"device phone is enrolled by a token, with the key {phone.keys.public_key}"]
    fleet.refuses_of(thief, asking(thief), "wrong-key")


def test_a_token_ends(fleet: Gate, phone: Speaker) -> None:
    token = new_token(b"\x01" * 32)
    fleet.registry.issue(token, "phone", valid_until=fleet.now + 10)
    fleet.now += 11

    asking = hello(token=token.name, proof=proof(token.secret, MINE.hello, phone.keys.public))
    fleet.refuses_of(phone, asking, "unknown-key")


def test_a_revoked_key_is_refused_at_once_and_introduces_nobody(
    fleet: Gate, phone: Speaker, tmp_path: Path
) -> None:
    fleet.registry.add("phone", phone.keys.public, source="request", now=fleet.now)
    fleet.say(phone, hello())

    other_process = Registry(fleet.path, "demo")
    assert other_process.revoke("phone") == 1
    other_process.close()

    for message in (hello(), Status(online=True), DECLINE, CHUNK):
        fleet.refuses_of(phone, message, "revoked-key")
    rotate(tmp_path / "phone.key", overlap_s=1e6, now=fleet.now)
    fleet.refuses_of(speaker_in(tmp_path / "phone.key", 1 << 41), hello(), "unknown-key")


@pytest.mark.parametrize("gate", ["lab", "fleet"])
def test_a_rotated_key_is_let_in_and_the_old_one_for_a_while(
    gate: str, phone: Speaker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    door: Gate = request.getfixturevalue(gate)
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
    lab: Gate, phone: Speaker, thief: Speaker, tmp_path: Path, online: bool
) -> None:
    lab.say(phone, hello())
    assert lab.door.presence("phone") is None  # the status of a name's first key is let in
    rotate(tmp_path / "phone.key", overlap_s=60, now=lab.now)
    renewed = speaker_in(tmp_path / "phone.key", 1 << 41)
    lab.refuses_of(renewed, Status(online=online), "wrong-key")
    lab.refuses_of(thief, Status(online=not online), "wrong-key")

    lab.say(renewed, hello())

    assert lab.door.presence("phone") == Status(online=online)
    lab.say(renewed, hello())
    assert lab.door.presence("phone") is None


def test_a_forged_status_is_none_of_a_key_that_comes_in(lab: Gate, phone: Speaker, tmp_path: Path) -> None:
    lab.say(phone, hello())
    rotate(tmp_path / "phone.key", overlap_s=60, now=lab.now)
    renewed = speaker_in(tmp_path / "phone.key", 1 << 41)
    elsewhere = renewed.seal("elsewhere", Status(online=False))
    lab.refuses(elsewhere, Status(online=False), "wrong-key")

    lab.say(renewed, hello())

    assert lab.door.presence("phone") == Status(online=True)


def test_a_device_that_lost_its_store_is_let_in_once_it_was_forgotten(
    lab: Gate, phone: Speaker, thief: Speaker
) -> None:
    lab.say(phone, hello())
    lab.refuses_of(thief, hello(), "wrong-key")

    assert lab.registry.forget("phone") == 1

    lab.say(thief, hello())


def test_the_same_refusal_is_news_once(lab: Gate) -> None:
    error = IdentityError("wrong-key", "text")

    assert [lab.door.is_news("phone", error) for _ in range(3)] == [True, False, False]
    assert lab.door.is_news("laptop", error)


def test_progress_of_an_unsigned_name_is_as_before(lab: Gate) -> None:
    progress = Progress(
        round=1,
        tier="t",
        stage="train",
        step=1,
        steps=2,
        loss=0.0,
        step_ms=0.0,
        peak_bytes=0,
        down_bytes=0,
        up_bytes=0,
    )

    assert lab.take(encode(progress), progress) == progress
