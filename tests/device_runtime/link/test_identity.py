"""Which server a device listens to."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgefl.errors import BundleError, IdentityError, StoreError
from edgefl.wire.bundle.archive import Signer
from edgefl.wire.keys import rotate
from edgefl.wire.mqtt.envelope import MessageSigner, unsigned
from edgefl.wire.mqtt.messages import Ack, Message, ProfileRequest, Round, Task
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.link import identity
from edgefl_device.link.identity import KEY_FILE, DuplicateMessageError, ServerTrust, load_signer
from edgefl_device.store.database import Store
from tests.support.device_logs import RecordedLog
from tests.wire.mqtt.rounds import announcement
from tests.wire.mqtt.speakers import speaker_in

TOPICS = Topics("demo")
MINE = TOPICS.device("phone")
TASK = Task(run="run", round=1, tier="weak", seed=1, nonce="n1")
ACK = Ack(round=1, nonce="n1", status="accepted", sha256="ab" * 32)
REQUEST = ProfileRequest(nonce="0" * 16, bundles={}, within_s=1.0)


def topic_of(message: Message) -> str:
    topics = {Round: TOPICS.current_round, Task: MINE.tasks, ProfileRequest: MINE.profile_requests}
    return topics.get(type(message), MINE.acks)


Start = Callable[..., ServerTrust]


class Device:
    """A device's store; ``start`` is a process of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder, limit_bytes=1 << 20, history_rounds=5)
        self.log = RecordedLog()
        self.said = self.log.texts
        self.now = 1000.0

    def start(self, *pinned: bytes) -> ServerTrust:
        return ServerTrust(self.store, pinned, self.log)


def hears(trust: ServerTrust, speaker: MessageSigner, message: Message) -> bytes:
    payload = speaker.seal(topic_of(message), message)
    assert trust.open(type(message), topic_of(message), payload) == message
    return payload


def refuses(trust: ServerTrust, payload: bytes, message: Message, reason: str) -> None:
    known = trust.keys
    with pytest.raises(IdentityError) as caught:
        trust.open(type(message), topic_of(message), payload)
    assert caught.value.reason == reason
    assert trust.keys == known


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device(tmp_path / "state")
    monkeypatch.setattr(identity, "time", SimpleNamespace(time=lambda: made.now))
    yield made
    made.store.close()


@pytest.fixture
def server(tmp_path: Path) -> MessageSigner:
    return speaker_in(tmp_path / "server.key")


@pytest.fixture
def stranger(tmp_path: Path) -> MessageSigner:
    return speaker_in(tmp_path / "stranger.key", 1 << 40)


def test_the_first_key_is_trusted(device: Device, server: MessageSigner, stranger: MessageSigner) -> None:
    trust = device.start()
    hears(trust, server, announcement())

    assert device.said == [
        f"trust on first use: this device follows the server with the key {server.keys.public_key} from now on"
    ]
    for now in (trust, device.start()):
        for message in (announcement(), TASK, ACK):
            refuses(now, stranger.seal(topic_of(message), message), message, "unknown-key")
            refuses(now, unsigned(topic_of(message), message), message, "unsigned")


def test_a_device_that_was_given_keys_trusts_no_first_use(
    device: Device, server: MessageSigner, stranger: MessageSigner
) -> None:
    trust = device.start(server.keys.public)

    refuses(trust, stranger.seal(TOPICS.current_round, announcement()), announcement(), "unknown-key")
    hears(trust, server, announcement())
    assert device.said == []
    # A start that is given none goes on with it.
    refuses(device.start(), stranger.seal(MINE.tasks, TASK), TASK, "unknown-key")


def test_an_unsigned_server_is_heard_without_keys(device: Device, server: MessageSigner) -> None:
    trust = device.start()

    for _ in range(2):
        assert trust.open(Task, MINE.tasks, unsigned(MINE.tasks, TASK)) == TASK
    assert device.said == ["this server does not sign: whoever reaches the broker can be taken for it"]
    hears(trust, server, announcement())
    refuses(trust, unsigned(MINE.tasks, TASK), TASK, "unsigned")


def test_a_first_key_is_learnt_from_an_announcement_only(
    device: Device, server: MessageSigner, stranger: MessageSigner
) -> None:
    """Until there is one, what is signed by anybody is as good as what is not signed at all."""
    trust = device.start()
    for message in (TASK, ACK):
        hears(trust, stranger, message)
    assert not trust.keys

    hears(trust, server, announcement())

    assert trust.keys == {server.keys.public}
    refuses(trust, stranger.seal(MINE.tasks, TASK), TASK, "unknown-key")


def test_a_forgers_number_is_no_number_of_the_given_key(
    device: Device, server: MessageSigner, stranger: MessageSigner
) -> None:
    forged = stranger.seal(TOPICS.current_round, announcement(9), at=1 << 62)
    device.start().open(Round, TOPICS.current_round, forged)

    trust = device.start(server.keys.public)

    old = hears(trust, server, announcement(1))
    hears(trust, server, announcement(2))
    for now in (trust, device.start()):
        refuses(now, old, announcement(1), "replayed")
        refuses(now, forged, announcement(9), "unknown-key")
    hears(device.start(), server, announcement(3))


def test_a_replaced_key_announces_nothing(device: Device, server: MessageSigner, tmp_path: Path) -> None:
    trust = device.start()
    missed = server.seal(TOPICS.current_round, announcement(3))
    last = server.seal(TOPICS.current_round, announcement(4), at=1 << 62)
    trust.open(Round, TOPICS.current_round, last)
    rotate(tmp_path / "server.key", overlap_s=60, now=device.now)
    renewed = speaker_in(tmp_path / "server.key", 100)

    hears(trust, renewed, announcement(5))

    for now in (trust, device.start()):
        refuses(now, missed, announcement(3), "old-key")
        refuses(now, last, announcement(4), "old-key")
        hears(now, server, ACK)  # it is good for all else for a while
        hears(now, renewed, announcement(6))


def test_of_two_given_keys_the_older_announcement_is_old(
    device: Device, server: MessageSigner, stranger: MessageSigner
) -> None:
    trust = device.start(server.keys.public, stranger.keys.public)
    last = hears(trust, server, announcement(1))
    hears(trust, stranger, announcement(2))

    refuses(trust, last, announcement(1), "replayed")
    hears(trust, server, announcement(3))


def copied(trust: ServerTrust, payload: bytes, message: Message) -> None:
    with pytest.raises(DuplicateMessageError):
        trust.open(type(message), topic_of(message), payload)


def test_an_old_announcement_is_not_acted_on_again(device: Device, server: MessageSigner) -> None:
    trust = device.start()
    old, new = hears(trust, server, announcement(1)), hears(trust, server, announcement(2))
    copied(trust, new, announcement(2))

    again = device.start()
    refuses(again, old, announcement(1), "replayed")
    assert again.open(Round, TOPICS.current_round, new) == announcement(2)  # it is retained
    copied(again, new, announcement(2))
    refuses(again, old, announcement(1), "replayed")


@pytest.mark.parametrize("message", [TASK, ACK, REQUEST], ids=["task", "ack", "profile-request"])
def test_old_messages_are_not_acted_on_again(device: Device, server: MessageSigner, message: Message) -> None:
    trust = device.start(server.keys.public)
    old, new = hears(trust, server, message), hears(trust, server, message)

    for now in (trust, device.start()):
        refuses(now, old, message, "replayed")
        copied(now, new, message)
    hears(trust, server, message)


def test_a_disk_that_takes_nothing_stops_no_message(
    device: Device, server: MessageSigner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreError("full")

    monkeypatch.setattr(device.store, "keep_fact", full)
    trust = device.start(server.keys.public)
    copied(trust, hears(trust, server, TASK), TASK)


def test_a_task_is_no_task_of_another_device(device: Device, server: MessageSigner) -> None:
    trust = device.start(server.keys.public)
    payload = server.seal(TOPICS.device("laptop").tasks, TASK)

    refuses(trust, payload, TASK, "wrong-signature")


def test_a_new_key_is_learnt_from_the_old(device: Device, server: MessageSigner, tmp_path: Path) -> None:
    trust = device.start()
    hears(trust, server, announcement(1))
    rotate(tmp_path / "server.key", overlap_s=60, now=device.now)
    renewed = speaker_in(tmp_path / "server.key", 100)

    refuses(trust, renewed.seal(MINE.tasks, TASK), TASK, "unknown-key")  # the announcement introduces it
    hears(trust, renewed, announcement(2))

    for now in (trust, device.start()):
        assert now.keys == {server.keys.public, renewed.keys.public}
        hears(now, renewed, TASK)
    hears(trust, server, ACK)
    device.now += 61
    refuses(trust, server.seal(MINE.acks, ACK), ACK, "old-key")
    assert device.start().keys == {renewed.keys.public}
    assert "which its old one introduced" in device.said[-1]


def test_a_key_without_introduction_is_refused(device: Device, server: MessageSigner, tmp_path: Path) -> None:
    trust = device.start(server.keys.public)
    speaker_in(tmp_path / "stranger.key")
    rotate(tmp_path / "stranger.key", overlap_s=60, now=device.now)
    renewed = speaker_in(tmp_path / "stranger.key")

    refuses(trust, renewed.seal(TOPICS.current_round, announcement()), announcement(), "unknown-key")


def test_an_executable_bundle_is_loaded_only_if_a_known_key_signed_it(device: Device, tmp_path: Path) -> None:
    signer, other, digest = Signer(tmp_path / "server.key"), Signer(tmp_path / "other.key"), "ab" * 32
    knows_nobody, knows = device.start(), device.start(signer.keys.public)

    knows_nobody.check_bundle(digest, b"", "onnx")
    knows.check_bundle(digest, signer.sign(digest), "executorch")
    with pytest.raises(BundleError, match="knows no key of a server"):
        knows_nobody.check_bundle(digest, signer.sign(digest), "executorch")
    for signature in (b"", other.sign(digest), signer.sign("cd" * 32)):
        with pytest.raises(BundleError, match="signature for the server key"):
            knows.check_bundle(digest, signature, "executorch")
        with pytest.raises(BundleError, match="signature for the server key"):
            knows.check_bundle(digest, signature, "onnx")


def test_a_device_makes_its_key_once_and_its_numbers_grow(device: Device) -> None:
    first = load_signer(device.folder, device.store)
    number = first.numbers.next()
    again = load_signer(device.folder, device.store)

    assert again.keys.public == first.keys.public
    assert stat.S_IMODE((device.folder / KEY_FILE).stat().st_mode) == 0o600
    assert again.numbers.next() > number
