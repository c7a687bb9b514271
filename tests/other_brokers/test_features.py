"""Features of brokers as a small client sees them, and the refusal of a broker that lacks one."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from edgefl.errors import BrokerError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.broker_limits import check_features
from edgefl.wire.mqtt.events import Disconnected
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.profiling.fleet import FleetProfiler, ProfilingOptions
from edgefl_server.profiling.reports import by_tier
from tests.conftest import BrokerProcess, SessionFactory
from tests.e2e.inside import edgefl, refused
from tests.e2e.runs import TINY
from tests.other_brokers.brokers import Aedes, RabbitMQ, ScriptedBroker
from tests.pairs import slow
from tests.secure import SecureBroker
from tests.server.fleet import RunningServer, plan_for
from tests.server.profiling.phones import WEAK
from tests.wire.mqtt.events import wait_for

ANSWER_S = 30.0
NEEDED = {
    "MQTT 5",
    "retained by topic",
    "retained by wildcard",
    "dot in a name",
    "queue for absent clients",
    "retained will",
    "will at a takeover",
}
LACKS: dict[str, set[str]] = {
    "mosquitto": set(),
    "amqtt": {"MQTT 5", "will at a takeover"},
    "aedes": {"MQTT 5"},
    "rabbitmq": {"MQTT 5", "retained by wildcard", "dot in a name", "will at a takeover"},
}
"""Features of :data:`NEEDED` that a broker lacks. edgefl needs retained messages by wildcard, and dots only in names that
have some. docs/security/transport.md has the same table."""
NAMED = "sends no retained messages to subscriptions with wildcards"


class Client:
    """Connected client; ``up`` is False if the broker refused it. A lost one ends without a DISCONNECT."""

    def __init__(
        self, port: int, name: str = "", *, clean: bool = True, version: int = 4, will: str = ""
    ) -> None:
        self.messages: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._acknowledged, answered = threading.Event(), threading.Event()
        self.up = self.ended = False
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2,
            name or f"test-{uuid.uuid4().hex[:12]}",
            clean_session=clean if version == 4 else None,
            protocol=MQTTProtocolVersion(version),
            reconnect_on_failure=False,
        )

        def connected(_c: object, _d: object, _f: object, code: paho.ReasonCode, _p: object) -> None:
            self.up = not code.is_failure
            answered.set()

        def disconnected(*_: object) -> None:
            self.ended = True
            answered.set()

        self._client.on_connect = connected
        self._client.on_disconnect = disconnected
        self._client.on_subscribe = lambda *_: self._acknowledged.set()
        self._client.on_message = lambda _c, _d, each: self.messages.put((each.topic, bytes(each.payload)))
        if will:
            self._client.will_set(will, b"gone", 1, retain=True)
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        assert answered.wait(ANSWER_S), "the broker answers"

    def subscribe(self, topic: str) -> None:
        self._acknowledged.clear()
        self._client.subscribe(topic, 1)
        assert self._acknowledged.wait(ANSWER_S), "the broker answers"

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self._client.publish(topic, payload, 1, retain).wait_for_publish(ANSWER_S)

    def gets(self, topic: str, payload: bytes, fence: str) -> bool:
        """Return True if this message comes before one that this client sends itself to the topic ``fence``."""
        self.subscribe(fence)
        self.publish(fence, b"fence")
        seen = [self.messages.get(timeout=ANSWER_S)]
        while seen[-1] != (fence, b"fence"):
            seen.append(self.messages.get(timeout=ANSWER_S))
        return (topic, payload) in seen

    def leave(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def lose(self) -> None:
        self._client.loop_stop()
        self._client._sock_close()


class Probe:
    """Trials of one broker, each below topics of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._clients: list[Client] = []

    def client(self, name: str = "", *, clean: bool = True, version: int = 4, will: str = "") -> Client:
        self._clients.append(Client(self._port, name, clean=clean, version=version, will=will))
        return self._clients[-1]

    def close(self) -> None:
        for each in self._clients:
            each.leave()

    def speaks_5(self, _: str) -> bool:
        return self.client(version=5).up

    def retains(self, topic: str, topic_filter: str) -> bool:
        self.client().publish(topic, b"kept", retain=True)
        reader = self.client()
        reader.subscribe(topic_filter)
        return self._within(reader, topic, b"kept")

    def keeps_dots(self, root: str) -> bool:
        reader = self.client()
        reader.subscribe(f"{root}/+/status")
        self.client().publish(f"{root}/pi.1/status", b"here")
        return reader.gets(f"{root}/pi.1/status", b"here", f"{root}/fence")

    def queues(self, root: str) -> bool:
        name = f"test-{uuid.uuid4().hex[:12]}"
        absent = self.client(name, clean=False)
        absent.subscribe(f"{root}/+/updates")
        absent.leave()
        self.client().publish(f"{root}/pi/updates", b"missed")
        back = self.client(name, clean=False)
        return back.gets(f"{root}/pi/updates", b"missed", f"{root}/fence")

    def retains_will(self, root: str) -> bool:
        reader = self.client()
        reader.subscribe(f"{root}/will")
        self.client(will=f"{root}/will").lose()
        assert reader.messages.get(timeout=ANSWER_S) == (f"{root}/will", b"gone")
        later = self.client()
        later.subscribe(f"{root}/will")
        return self._within(later, f"{root}/will", b"gone")

    def wills_at_takeover(self, root: str) -> bool:
        name = f"test-{uuid.uuid4().hex[:12]}"
        reader = self.client()
        reader.subscribe(f"{root}/will")
        old = self.client(name, will=f"{root}/will")
        self.client(name, will=f"{root}/will")
        deadline = time.monotonic() + ANSWER_S
        while not old.ended and time.monotonic() < deadline:
            time.sleep(0.01)
        assert old.ended, "a second client with an id ends the first one's connection"
        return self._within(reader, f"{root}/will", b"gone")

    def _within(self, reader: Client, topic: str, payload: bytes, seconds: float = 1.0) -> bool:
        """Return True if the message comes in time. Brokers send retained messages and wills beside others."""
        try:
            return reader.messages.get(timeout=seconds) == (topic, payload)
        except queue.Empty:
            return False


def features(port: int, root: str) -> set[str]:
    """The features of :data:`NEEDED` that the broker on this port has."""
    probe = Probe(port)
    trials: dict[str, Callable[[str], bool]] = {
        "MQTT 5": probe.speaks_5,
        "retained by topic": lambda below: probe.retains(f"{below}/pi/hello", f"{below}/pi/hello"),
        "retained by wildcard": lambda below: probe.retains(f"{below}/pi/hello", f"{below}/+/hello"),
        "dot in a name": probe.keeps_dots,
        "queue for absent clients": probe.queues,
        "retained will": probe.retains_will,
        "will at a takeover": probe.wills_at_takeover,
    }
    try:
        return {name for index, (name, trial) in enumerate(trials.items()) if trial(f"{root}/{index}")}
    finally:
        probe.close()


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    with RabbitMQ(tmp_path_factory.mktemp("rabbitmq")) as broker:
        yield broker


@pytest.fixture
def exact(tmp_path: Path) -> Iterator[Aedes]:
    """A broker that sends no retained messages to subscriptions with wildcards."""
    with Aedes(tmp_path, exact=True) as broker:
        yield broker


@pytest.mark.parametrize("name", [name if name == "aedes" else slow(name) for name in LACKS])
def test_a_small_client_sees_what_a_broker_lacks(
    request: pytest.FixtureRequest, name: str, federation: str
) -> None:
    broker: BrokerProcess = request.getfixturevalue(name)

    assert NEEDED - features(broker.port, f"edgefl/v1/{federation}/devices") == LACKS[name]


def test_a_broker_that_lacks_a_feature_is_refused(
    exact: Aedes, federation: str, limits: Limits, tmp_path: Path
) -> None:
    server = RunningServer.start(plan_for(federation, limits), exact.address, tmp_path / "out")
    options = ProfilingOptions(federation=federation, offered=by_tier([WEAK]), limits=limits)
    profiler = FleetProfiler(exact.address, options)

    with pytest.raises(BrokerError, match=NAMED) as of_profiler:
        profiler.run()
    assert server.thread is not None
    server.thread.join(ANSWER_S)

    assert isinstance(server.error, BrokerError)
    assert server.error.details == of_profiler.value.details == {"address": str(exact.address)}


def test_a_version_that_a_broker_lacks_is_named(aedes: BrokerProcess, connect: SessionFactory) -> None:
    down = wait_for(connect(replace(aedes.address, mqtt="5")), Disconnected)

    assert "refused us: Unsupported protocol version; it has no MQTT 5" in down.reason


def test_a_check_leaves_nothing_at_the_broker(broker: BrokerProcess, federation: str) -> None:
    topics = Topics(federation)
    probe = Probe(broker.port)
    other = probe.client()
    other.subscribe(f"{topics.root}/#")

    check_features(broker.address, "3.1.1", "checks", topics.probe, topics.update_filters[0])

    last = [other.messages.get(timeout=ANSWER_S) for _ in range(2)]
    later = probe.client()
    later.subscribe(f"{topics.root}/#")
    assert last[1] == (topics.probe, b"") and last[0][0] == topics.probe
    assert later.gets(f"{topics.root}/fence", b"fence", f"{topics.root}/fence")
    assert later.messages.empty()
    probe.close()


@pytest.mark.parametrize("user", ["pi-1", "server"])
def test_an_access_list_is_no_missing_feature(tmp_path: Path, user: str) -> None:
    topics = Topics("orchard")
    with SecureBroker(tmp_path) as broker:
        check_features(broker.user(user), "5", "checks", topics.probe, topics.update_filters[0])


@pytest.mark.parametrize(
    ("delays", "clears"),
    [((), False), ((0.01,), False), ((0.02, 2.3), True), ((2.1,), True)],
    ids=["hangs up at once", "hangs up at the filter", "slow", "too slow to judge"],
)
def test_a_bad_link_is_no_missing_feature(delays: tuple[float, ...], clears: bool) -> None:
    topics = Topics("orchard")
    with ScriptedBroker(*delays) as broker:
        check_features(broker.address, "3.1.1", "checks", topics.probe, topics.update_filters[0])

    assert len(broker.published[0]) == 16
    assert broker.published[1:] == ([b""] if clears else [])


@pytest.mark.slow
def test_rabbitmq_is_refused_by_each_command_that_needs_more(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    file, broker = tmp_path / "federation.toml", ("--broker", str(rabbitmq.address))
    file.write_text(TINY + "[tiers.all]\n")
    exported = edgefl("export", file, "--out", tmp_path / "bundles")
    assert exported.returncode == 0, exported.stderr

    served = edgefl("server", "--config", file, *broker, "--out", tmp_path / "out")
    profiled = edgefl("profile", "--fleet", tmp_path / "bundles", *broker, "--federation", "e2e")

    for ran in (served, profiled):
        refused(ran, BrokerError, NAMED, "Mosquitto")
