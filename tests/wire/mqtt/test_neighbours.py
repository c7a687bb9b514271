"""Who else is on a broker, and clients that take each other's place, on real brokers."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from edgefl.lab.broker import free_port
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import neighbours
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import Disconnected
from edgefl.wire.mqtt.messages import Status, encode
from edgefl.wire.mqtt.neighbours import NeighbourMonitor, Neighbours, NeighbourSearch, list_devices
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import ALL_ROUNDS, ALL_STATUSES, Topics
from tests import needs
from tests.conftest import BrokerProcess, Mosquitto, SessionFactory, on_each_broker
from tests.wire.mqtt.events import PATIENCE_S, wait_for, wait_message, wait_up
from tests.wire.mqtt.rounds import announcement

FILTERS = (ALL_ROUNDS, ALL_STATUSES)


def announce(session: Session, federation: str, state: str = "open", *, online: tuple[str, ...] = ()) -> None:
    """What a server and its devices leave on a broker; ``state`` "" leaves devices only."""
    topics = Topics(federation)
    announced = announcement(state=state or "open")  # type: ignore[arg-type]
    if state:
        assert session.publish(topics.current_round, encode(announced), retain=True).wait(PATIENCE_S)
    for device in online:
        status = encode(Status(online=True))
        assert session.publish(topics.device(device).status, status, retain=True).wait(PATIENCE_S)


@on_each_broker
def test_a_look_sees_what_other_federations_announced_and_their_devices(
    broker: BrokerProcess, connect: SessionFactory, federation: str, limits: Limits
) -> None:
    session = connect(broker.address)
    wait_up(session)
    announce(session, f"{federation}-a", "open", online=("phone-2", "phone-1"))
    announce(session, f"{federation}-b", "done", online=("pi",))
    announce(session, f"{federation}-c", "", online=("watch",))
    gone = Topics(f"{federation}-c").device("gone").status
    assert session.publish(gone, encode(Status(online=False)), retain=True).wait(PATIENCE_S)
    assert session.publish(Topics(f"{federation}-d").current_round, b"\xc1", retain=True).wait(PATIENCE_S)

    seen = NeighbourSearch(broker.address, f"look-{federation}", FILTERS, limits).run()

    own = {name: seen.rounds[name] for name in seen.rounds if name.startswith(federation)}
    assert own == {f"{federation}-a": "open", f"{federation}-b": "done"}
    assert seen.devices[f"{federation}-a"] == ["phone-1", "phone-2"]
    assert f"{federation}-a" in seen.served(but=f"{federation}-b")
    assert f"{federation}-b" not in seen.served(but=f"{federation}-b")
    unserved = seen.unserved(but=f"{federation}-x")
    assert unserved[f"{federation}-b"] == ["pi"] and unserved[f"{federation}-c"] == ["watch"]
    assert f"{federation}-a" not in unserved and f"{federation}-c" not in seen.unserved(but=f"{federation}-c")


def test_a_look_at_a_broker_that_is_away_sees_nothing(limits: Limits) -> None:
    assert NeighbourSearch(Address("127.0.0.1", free_port()), "look", FILTERS, limits).run() == Neighbours()


@pytest.fixture
def restricted(tmp_path: Path, federation: str) -> Iterator[Mosquitto]:
    (tmp_path / "acl").write_text(f"topic readwrite edgefl/v1/{federation}/#\n")
    with Mosquitto(tmp_path, f"acl_file {tmp_path / 'acl'}") as broker:
        yield broker


def test_an_access_list_hides_other_federations(
    restricted: Mosquitto, connect: SessionFactory, federation: str, limits: Limits
) -> None:
    session = connect(restricted.address)
    wait_up(session)
    announce(session, "others", "open")
    announce(session, federation, "open")
    topic = f"{Topics(federation).root}/devices/phone/acks"
    session.subscribe([topic])

    seen = NeighbourSearch(restricted.address, "look", FILTERS, limits).run()

    assert dict(seen.rounds) == {federation: "open"}
    session.publish(topic, b"still here")
    assert wait_message(session, topic) == b"still here"


def test_a_lonely_monitor_looks_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(neighbours.time, "monotonic", lambda: now[0])
    found: queue.SimpleQueue[Neighbours] = queue.SimpleQueue()
    search = Mock(spec=NeighbourSearch, run=Neighbours)
    lookout = NeighbourMonitor(search, found, 5.0)

    assert lookout.step(alone=False) is None
    assert lookout.step(alone=True) == 5.0 and found.empty()
    now[0] += 5
    assert lookout.step(alone=True) == 10.0
    assert found.get(timeout=PATIENCE_S) == Neighbours()
    assert lookout._thread is not None
    lookout._thread.join()
    assert lookout.has_looked() and not lookout.has_looked()
    now[0] += 4
    assert lookout.step(alone=True) == 6.0 and found.empty()
    assert lookout.step(alone=False) is None
    assert lookout.step(alone=True) == 5.0, "whoever is alone anew waits as long as at first"


def test_devices_are_named_up_to_five() -> None:
    assert list_devices(["a", "b"]) == "a, b"
    assert list_devices(list("abcdefgh")) == "a, b, c, d, e and 3 more"


def test_clients_of_one_id_are_rivals(mosquitto: Mosquitto, connect: SessionFactory, federation: str) -> None:
    needs.require("mosquitto")  # the embedded broker may leave two such clients connected
    one, other = connect(mosquitto.address, federation), connect(mosquitto.address, federation)

    for session in (one, other):
        assert wait_for(session, Disconnected, lambda down: down.rival)


def test_a_broker_that_is_killed_is_no_rival(own_mosquitto: Mosquitto, connect: SessionFactory) -> None:
    session = connect(own_mosquitto.address, "phone")
    for _ in range(4):
        wait_up(session)
        own_mosquitto.kill()
        downs = [
            wait_for(session, Disconnected) for _ in range(3)
        ]  # the end of the connection, and attempts in vain
        assert not any(down.rival for down in downs)
        own_mosquitto.start()
