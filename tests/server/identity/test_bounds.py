"""What a list of devices takes: how many keys and names, when it is written, and what a full disk keeps."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from edgefl.wire.enrolment import new_token, prove
from edgefl.wire.keys import MOST_SUCCESSIONS
from edgefl.wire.mqtt.envelope import MessageSigner
from edgefl.wire.mqtt.messages import Hello, Message, Status
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.identity.registry import Registry
from tests.server.identity.lab import CHUNK, MINE, Lab, hello, rotated, topic_of
from tests.support.errors import IdentityError, refuses


def test_a_key_follows_another_only_so_often(lab: Lab, phone: MessageSigner, tmp_path: Path) -> None:
    lab.say(phone, hello())
    lab.say(rotated(tmp_path / "phone.key", 0, lab.now), hello())
    hasty = rotated(tmp_path / "phone.key", 1, lab.now)
    lab.refuses_of(hasty, hello(), "too-soon")
    lab.restart()
    lab.refuses_of(hasty, hello(), "too-soon")
    lab.now += 61

    lab.say(hasty, hello())


def test_a_device_has_few_keys_at_any_time(lab: Lab, phone: MessageSigner, tmp_path: Path) -> None:
    lab.registry.add("phone", b"\x01" * 32, source="request", now=lab.now)
    lab.registry.revoke("phone")
    lab.registry.add("phone", phone.keys.public, source="request", now=lab.now)
    for number in range(12):
        overlap_s = 1e9 if number == 2 else 60.0  # that one is good for long, whatever came after it
        phone = rotated(tmp_path / "phone.key", number, lab.now, overlap_s)
        lab.say(phone, hello())
        lab.now += 61

    states = [each.state for each in lab.registry.keys("phone")]
    assert states == ["revoked", *["retired"] * (MOST_SUCCESSIONS - 1), "active"]
    assert lab.registry.keys("phone")[1].until > lab.now
    lab.say(phone, CHUNK)


def test_names_on_first_use_are_bounded(lab: Lab, phone: MessageSigner) -> None:
    def come(name: str) -> None:
        topic = Topics("demo").device(name).hello
        payload = phone.seal(topic, hello())
        lab.authenticator.accept(lab.authenticator.verify(Hello, name, topic, payload, max_devices=3))

    for name in ("a", "b", "c", "b"):
        come(name)
    lab.restart()
    with refuses(IdentityError, device="d", reason="too-many-devices") as caught:
        come("d")
    assert caught.value.reason == "too-many-devices" and lab.registry.devices() == 3
    come("c")
    lab.registry.forget("b")
    come("d")


def full_disk(path: Path, on: bool = True) -> None:
    with sqlite3.connect(path) as disk:
        for what in ("insert", "update"):
            name = f"full_{what}"
            if on:
                disk.execute(
                    f"CREATE TRIGGER {name} BEFORE {what} ON keys BEGIN SELECT raise(abort, 'disk is full'); END"
                )
            else:
                disk.execute(f"DROP TRIGGER {name}")


@pytest.mark.parametrize("how", ["first-use", "rotation", "token"])
def test_a_full_disk_keeps_nobody_out(
    lab: Lab, phone: MessageSigner, thief: MessageSigner, tmp_path: Path, how: str
) -> None:
    greeting = hello()
    if how == "token":
        token = new_token(b"\x01" * 32)
        lab.registry.issue(token, "phone", valid_until=lab.now + 1000)
        greeting = hello(token=token.name, proof=prove(token.secret, MINE.hello, phone.keys.public))
    if how == "rotation":
        lab.say(phone, hello())
        phone = rotated(tmp_path / "phone.key", 0, lab.now)
    before = lab.registry.all()
    full_disk(lab.path)

    lab.say(phone, greeting)
    said = lab.say(phone, greeting)
    lab.say(phone, Status(online=True))
    lab.say(phone, CHUNK)
    assert "disk is full" in str(lab.authenticator.take_error()) and lab.authenticator.take_error() is None
    lab.refuses_of(thief, hello(), "wrong-key")
    assert lab.registry.all() == before
    last = lab.say(phone, greeting)

    full_disk(lab.path, on=False)
    lab.now += 2
    lab.say(phone, CHUNK)
    lab.restart()
    assert (lab.registry.keys("phone")[-1].key, lab.registry.keys("phone")[-1].source) == (
        phone.keys.public,
        how,
    )
    lab.refuses(said, greeting, "replayed")
    lab.take(last, greeting)
    if how == "token":
        assert lab.registry.token(token.name, lab.now) is None


def test_a_pending_key_yields_to_a_decision(lab: Lab, phone: MessageSigner, thief: MessageSigner) -> None:
    full_disk(lab.path)
    lab.say(thief, hello())
    full_disk(lab.path, on=False)

    other_process = Registry(lab.path, "demo")
    other_process.add("phone", phone.keys.public, source="request", now=lab.now)
    other_process.close()

    lab.refuses_of(thief, CHUNK, "wrong-key")
    lab.now += 2
    lab.say(phone, hello())
    assert [each.key for each in lab.registry.keys("phone")] == [phone.keys.public]


def test_a_checked_message_writes_nothing(lab: Lab, phone: MessageSigner, tmp_path: Path) -> None:
    def check(speaker: MessageSigner, message: Message) -> None:
        before = lab.registry.all()
        topic = topic_of(message)
        lab.authenticator.verify(type(message), "phone", topic, speaker.seal(topic, message))
        assert lab.registry.all() == before

    check(phone, hello())
    lab.say(phone, hello())
    check(phone, Status(online=True))
    check(rotated(tmp_path / "phone.key", 0, lab.now), hello())
