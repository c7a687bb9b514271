"""TLS, client certificates, WebSocket and both versions of MQTT, against a real Mosquitto; what is said where they fail."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import Disconnected, IncomingMessage, Refusal
from edgefl_server.access.certificates import LabAuthority
from edgefl_server.lab_broker import _hash_password
from tests import needs
from tests.conftest import Amqtt, BrokerProcess, Mosquitto, SessionFactory
from tests.secure import SecureBroker
from tests.wire.mqtt.events import wait_for, wait_message, wait_up

TASKS = "edgefl/v1/orchard/devices/pi-1/tasks"
HELLO = "edgefl/v1/orchard/devices/pi-1/hello"


class HangsUp:
    """A way to a broker on which the first connection is ended at once, and the others when it is :meth:`cut`."""

    def __init__(self, broker: Address) -> None:
        self._broker = broker
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _serve(self) -> None:
        with suppress(OSError):
            self._listener.accept()[0].close()
            while True:
                ends = (
                    self._listener.accept()[0],
                    socket.create_connection((self._broker.host, self._broker.port)),
                )
                self._open.extend(ends)
                for source, target in (ends, ends[::-1]):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    with SecureBroker(tmp_path_factory.mktemp("secure")) as broker:
        yield broker


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    with SecureBroker(tmp_path_factory.mktemp("mutual"), certificates=True) as broker:
        yield broker


def reaches(connect: SessionFactory, server: Address, device: Address) -> str:
    """A task goes from one to the other; the version that the device speaks."""
    sending, hearing = connect(server), connect(device)
    wait_up(sending)
    wait_up(hearing)
    task = uuid.uuid4().bytes
    sending.publish(TASKS, task, retain=True)  # whichever comes first, this or the subscription
    hearing.subscribe([TASKS])
    wait_for(hearing, IncomingMessage, lambda event: event.payload == task)
    return hearing.version


# -- ways that work --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["auto", "5", "3.1.1"])
def test_tls_with_a_password(secure: SecureBroker, connect: SessionFactory, version: str) -> None:
    device = secure.user("pi-1", mqtt=version)
    assert reaches(connect, secure.user("server"), device) == ("3.1.1" if version == "3.1.1" else "5")


def test_websocket_over_tls(secure: SecureBroker, connect: SessionFactory) -> None:
    over = {"port": secure.websocket_port, "path": "/mqtt"}
    reaches(connect, secure.user("server", **over), secure.user("pi-1", **over))


def test_a_client_certificate_is_the_user(mutual: SecureBroker, connect: SessionFactory) -> None:
    reaches(connect, mutual.user("server"), mutual.user("pi-1"))


def test_alpn_is_offered(secure: SecureBroker, connect: SessionFactory) -> None:
    reaches(connect, secure.user("server"), secure.user("pi-1", alpn="mqtt"))


def test_a_broker_of_3_1_1_gets_3_1_1(amqtt: Amqtt, connect: SessionFactory, federation: str) -> None:
    session = connect(amqtt.address)
    delivery = session.publish(f"{federation}/x", b"queued before the version was known", expires_s=60)
    wait_up(session)
    assert session.version == "3.1.1"
    assert delivery.wait(300.0)


@pytest.mark.needs("mosquitto")
def test_a_broker_that_hung_up_once_gets_version_5(mosquitto: BrokerProcess, connect: SessionFactory) -> None:
    """As one does that is being stopped: the older version that is tried next is not kept for good."""
    with HangsUp(mosquitto.address) as between:
        session = connect(between.address)
        wait_up(session)
        assert session.version == "3.1.1"
        between.cut()
        wait_up(session)
        assert session.version == "5"


def test_no_more_is_on_its_way_than_the_broker_takes(tmp_path: Path, connect: SessionFactory) -> None:
    with Mosquitto(tmp_path, "max_inflight_messages 3") as broker:
        session = connect(broker.address, start=False)
        deliveries = [session.publish(f"a/{index}", b"x" * 2000) for index in range(100)]
        session.start()
        wait_up(session)
        assert all(delivery.wait(300.0) for delivery in deliveries)
        assert session.inbox.empty(), "the broker ended no connection for too many"


def test_a_packet_above_the_brokers_limit_is_refused(tmp_path: Path, connect: SessionFactory) -> None:
    with Mosquitto(tmp_path, "max_packet_size 5000") as broker:
        session = connect(broker.address, start=False)
        queued = session.publish("a/queued", b"x" * 6000)
        session.start()
        assert "5000 at most" in wait_for(session, Refusal).limit
        wait_up(session)
        later = session.publish("a/later", b"x" * 6000)
        assert (wait_for(session, Refusal).topic, queued.done(), later.done()) == ("a/later", True, True)
        assert session.publish("a/small", b"x").wait(300.0)


# -- what does not work, and what is said ----------------------------------------------------------------------


def test_another_authority_is_named(secure: SecureBroker, connect: SessionFactory, tmp_path: Path) -> None:
    other = LabAuthority(tmp_path).own.certificate
    reason = wait_for(connect(secure.user("pi-1", ca_file=str(other))), Disconnected).reason
    assert "CERTIFICATE_VERIFY_FAILED" in reason and f"not of the authority in {other}" in reason


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ca_file": "", "tls": True}, "of no authority known here"),
        ({"host": "127.1"}, "for another name than 127.1"),
    ],
)
def test_a_certificate_of_another_authority_or_name_is_named(
    secure: SecureBroker, connect: SessionFactory, change: dict[str, Any], text: str
) -> None:
    assert text in wait_for(connect(secure.user("pi-1", **change)), Disconnected).reason


@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_a_wrong_password_is_named(secure: SecureBroker, connect: SessionFactory, version: str) -> None:
    reason = wait_for(connect(secure.user("pi-1", password="s3cret", mqtt=version)), Disconnected).reason
    assert "it does not take user 'pi-1' with this password" in reason
    assert "s3cret" not in reason


def test_a_missing_client_certificate_is_named(mutual: SecureBroker, connect: SessionFactory) -> None:
    address = mutual.user("pi-1", cert_file="", key_file="", mqtt="3.1.1")
    reason = wait_for(connect(address), Disconnected).reason
    assert "does it want a client certificate" in reason or "CERTIFICATE_REQUIRED" in reason


def test_plain_mqtt_at_a_port_of_tls_is_named(secure: SecureBroker, connect: SessionFactory) -> None:
    reason = wait_for(connect(Address("127.0.0.1", secure.port)), Disconnected).reason
    assert "does it want TLS" in reason


@pytest.mark.parametrize(
    ("change", "text"),
    [({"tls": True}, "is this port one for TLS?"), ({"path": "/mqtt"}, "cannot reach the broker")],
)
def test_tls_or_websocket_at_a_plain_port_is_named(
    mosquitto: BrokerProcess, connect: SessionFactory, change: dict[str, Any], text: str
) -> None:
    assert text in wait_for(connect(replace(mosquitto.address, **change)), Disconnected).reason


def test_a_refused_publish_is_told_with_its_topic(secure: SecureBroker, connect: SessionFactory) -> None:
    session = connect(secure.user("pi-2"))
    wait_up(session)
    session.publish(HELLO, b"as another")
    refused = wait_for(session, Refusal)
    assert (refused.action, refused.topic, refused.reason) == ("publish", HELLO, "Not authorized")
    assert "user 'pi-2' write to it" in refused.text(secure.user("pi-2"))


@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_a_refused_subscription_is_tried_again(tmp_path: Path, connect: SessionFactory, version: str) -> None:
    with _Subscriptions(tmp_path) as broker:
        session = connect(replace(broker.address, username="pi-1", password="pw", mqtt=version))
        wait_up(session)
        session.subscribe(["mine/a", "theirs/b"])
        for _ in range(2):
            refused = wait_for(session, Refusal)
            assert (refused.action, refused.topic) == ("subscribe", "theirs/b")
            assert refused.reason in ("Not authorized", "Unspecified error")
        session.publish("mine/a", b"heard")
        assert wait_message(session, "mine/a") == b"heard"


# -- brokers ---------------------------------------------------------------------------------------------------


class _Subscriptions(Mosquitto):
    """Refuses subscriptions, which an access list in a file does not: Mosquitto's dynamic security."""

    def __init__(self, folder: Path) -> None:
        plugin = next(Path("/usr/lib").glob("**/mosquitto_dynamic_security.so"), None)
        needs.require("mosquitto")
        if plugin is None:
            needs.skip("Mosquitto's dynamic security plugin is missing: apt install mosquitto")
        kinds = ("subscribePattern", "publishClientSend", "publishClientReceive", "unsubscribePattern")
        _, _, rounds, salt, digest = _hash_password("pw").split("$")
        lists = [{"acltype": kind, "topic": "mine/#", "allow": True} for kind in kinds]
        client = {"username": "pi-1", "password": digest, "salt": salt, "iterations": int(rounds)}
        rules = {
            "defaultACLAccess": dict.fromkeys(kinds[1:3], False) | {"subscribe": False},
            "roles": [{"rolename": "own", "acls": lists}],
            "clients": [{**client, "roles": [{"rolename": "own"}]}],
        }
        (folder / "dynsec.json").write_text(json.dumps(rules))
        super().__init__(folder, f"plugin {plugin}\nplugin_opt_config_file {folder / 'dynsec.json'}")
