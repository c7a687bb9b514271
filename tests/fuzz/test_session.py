"""A hostile broker: whatever bytes it answers with, the session says that it is down and tries again."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import Disconnected
from edgefl.wire.mqtt.session import Session

CONNACK = b"\x20\x02\x00\x00"
PUBLISH = b"\x32\x0a\x00\x03a/b\x00\x01xyz"
ANSWERS = [
    b"",
    b"\xff" * 50,
    b"\x20\x00",
    b"\x20\x02\x00\xff",
    b"\x20\x7f" + bytes(127),
    CONNACK + b"\x30\x00",  # a PUBLISH without a topic
    CONNACK + b"\x32\x02\xff\xff",  # whose topic is longer than the packet
    CONNACK + b"\x30\x05\x00\x03\xff\xfe\xfd",  # whose topic is no UTF-8
    CONNACK + b"\x36\x07\x00\x03a/b\x00\x01",  # of a QoS that does not exist
    CONNACK + b"\x30\x05\x00\x03a/+",
    CONNACK + b"\x90\x02\x00\x01",  # a SUBACK without codes
    CONNACK + b"\x90\x00",
    CONNACK + b"\x40\x00" + b"\x40\x01\x00",
    CONNACK + b"\x62\x01\x00" + b"\x70\x00",
    CONNACK + b"\xd0\x05hello",
    CONNACK + b"\xb0\x00",
    CONNACK + b"\x30\xff\xff\xff\x7f",  # 256 MiB are said to follow
    CONNACK + b"\x30\xff\xff\xff\xff\xff",
    CONNACK + CONNACK,
    CONNACK + PUBLISH + b"\xf0\x00",
]


class HostileBroker:
    """Answers each connection with the next of ``answers``, and ends it."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = iter(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.served = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        for answer in self._answers:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                try:
                    connection.recv(1000)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1000):
                        pass
                except OSError:
                    continue
        self.served.set()
        self._listener.close()

    def stop(self) -> None:
        self._listener.close()


def mutated_answers() -> list[bytes]:
    rng, made = random.Random(9), []
    for _ in range(150):
        answer = bytearray(CONNACK + rng.choice(ANSWERS)[4:] + PUBLISH)
        for _ in range(rng.randint(1, 4)):
            answer[rng.randrange(4, len(answer))] = rng.randrange(256)
        made.append(bytes(answer))
    return made


@pytest.fixture
def patient() -> Limits:
    return Limits(reconnect_min_s=0.001, reconnect_max_s=0.002, keepalive_s=2)


@pytest.mark.parametrize("answers", [ANSWERS, mutated_answers()], ids=["by-hand", "mutated"])
def test_no_answer_of_a_broker_ends_the_session(answers: list[bytes], patient: Limits) -> None:
    broker = HostileBroker(answers)
    session = Session(broker.address, "hostile", limits=patient)
    session.subscribe(["a/b"])
    session.start()
    try:
        assert broker.served.wait(60), "the session came no more"
        assert session._thread.is_alive()
        assert any(isinstance(event, Disconnected) for event in _events(session))
    finally:
        broker.stop()
        session.stop(drain_s=0.1)


def _events(session: Session) -> Iterator[object]:
    while not session.inbox.empty():
        yield session.inbox.get()
