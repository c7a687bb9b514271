"""The access list against a real Mosquitto with TLS: who is who can neither read nor write what is not its own."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from edgefl.wire.mqtt.events import IncomingMessage, Refusal
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.access.files import BROKERS, build_access_files
from edgefl_server.access.rules import ROLES, AccessRules, Role
from tests.conftest import SessionFactory
from tests.secure import SecureBroker
from tests.wire.mqtt.events import wait_for, wait_message, wait_up

TOPICS = Topics("orchard")
OWN, OTHER = TOPICS.device("pi-1"), TOPICS.device("pi-2")
ASKED = TOPICS.profile("0" * 16)
BLOB = TOPICS.blob_chunk("a" * 64, 0)

WRITES: dict[str, set[str]] = {
    "server": {
        TOPICS.current_round,
        BLOB,
        *(each for of in (OWN, OTHER) for each in (of.tasks, of.acks, of.update(1, 0))),
    },
    "asker": {OWN.profile_requests, OTHER.profile_requests, ASKED.offer, ASKED.blob_chunk("a" * 64, 0)},
    "pi-1": {OWN.status, OWN.hello, OWN.progress, OWN.update(1, 0), OWN.declines, OWN.profiles},
    "pi-2": {OTHER.status, OTHER.hello, OTHER.progress, OTHER.update(1, 0), OTHER.declines, OTHER.profiles},
}
ALL = sorted(set().union(*WRITES.values()))
HEARD_BY_SERVER = (
    {f(of) for of in (OWN, OTHER) for f in (lambda d: d.status, lambda d: d.hello, lambda d: d.progress)}
    | {of.update(1, 0) for of in (OWN, OTHER)}
    | {OWN.declines, OTHER.declines, TOPICS.current_round}
)
SHARED = {TOPICS.current_round, BLOB, ASKED.offer, ASKED.blob_chunk("a" * 64, 0)}
"""What every device may hear; Mosquitto's patterns let every other user hear it, too."""
HEARD: dict[str, set[str]] = {
    "server": HEARD_BY_SERVER,
    "asker": {
        f(of) for of in (OWN, OTHER) for f in (lambda d: d.status, lambda d: d.hello, lambda d: d.profiles)
    }
    | {ASKED.offer},
    "pi-1": {
        TOPICS.current_round,
        BLOB,
        ASKED.offer,
        ASKED.blob_chunk("a" * 64, 0),
        OWN.tasks,
        OWN.acks,
        OWN.profile_requests,
    },
}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    # A second federation's topics, and one who may do everything, beside the list.
    broker = SecureBroker(tmp_path_factory.mktemp("acl"), devices=("pi-1", "pi-2", "all"))
    command = broker._command()
    path = broker.lab.folder / "mosquitto.acl"
    original = path.read_text()
    broker._command = lambda: (path.write_text(f"{original}\nuser all\ntopic readwrite #\n"), command)[1]  # type: ignore[method-assign]
    broker.start()
    yield broker
    broker.stop()


def fenced(session: Session, name: str) -> set[str]:
    """Topics of what came before a last message that everybody of this role hears."""
    heard = set()
    while True:
        event = wait_for(session, IncomingMessage)
        if event.payload == name.encode():
            return heard
        heard.add(event.topic)


@pytest.mark.parametrize("user", ["server", "asker", "pi-1"])
def test_each_reads_its_own_topics(secure: SecureBroker, connect: SessionFactory, user: str) -> None:
    session, everyone = connect(secure.user(user)), connect(secure.user("all"))
    wait_up(session)
    wait_up(everyone)
    mark = uuid.uuid4().hex
    fence = {"server": TOPICS.current_round, "asker": ASKED.offer, "pi-1": OWN.acks}[user]
    everyone.publish(fence, b"first", retain=True)
    session.subscribe(["#", "edgefl/#"])
    wait_message(session, fence)  # subscribed

    for topic in (*ALL, "edgefl/v1/other/rounds/current", "other"):
        everyone.publish(topic, b"x")
    everyone.publish(fence, mark.encode())

    assert fenced(session, mark) == HEARD[user] | SHARED


@pytest.mark.parametrize("user", ["server", "asker", "pi-1", "pi-2"])
def test_each_writes_its_own_topics(secure: SecureBroker, connect: SessionFactory, user: str) -> None:
    session, everyone = connect(secure.user(user)), connect(secure.user("all"))
    wait_up(session)
    wait_up(everyone)
    everyone.subscribe(["edgefl/#"])
    everyone.publish("edgefl/fence", b"subscribed")
    wait_message(everyone, "edgefl/fence")
    foreign = "edgefl/v1/other/rounds/current"

    deliveries = [session.publish(topic, user.encode()) for topic in (*ALL, foreign)]
    assert all(delivery.wait(300.0) for delivery in deliveries)
    everyone.publish("edgefl/fence", b"end")

    arrived = set()
    while (event := wait_for(everyone, IncomingMessage)).topic != "edgefl/fence":
        arrived |= {event.topic} if event.payload == user.encode() else set()
    assert arrived == WRITES[user]
    refused = {wait_for(session, Refusal).topic for _ in {*ALL, foreign} - WRITES[user]}
    assert refused == {*ALL, foreign} - WRITES[user]


def matched(rule: str, topic: str) -> bool:
    return re.fullmatch(re.escape(rule).replace(r"\+", "[^/]+"), topic) is not None


@pytest.mark.parametrize("role", ROLES)
def test_every_topic_in_use_is_in_the_rules(role: Role) -> None:
    rules = [(rule.filter.replace("{user}", "pi-1"), rule) for rule in AccessRules("orchard").of(role)]
    user = "pi-1" if role == "device" else role
    for topic in ALL:
        may_write = any(rule.write and matched(text, topic) for text, rule in rules)
        assert may_write == (topic in WRITES[user]), topic
        assert any(rule.read and matched(text, topic) for text, rule in rules) == (topic in HEARD[user]), (
            topic
        )
    filters = {"server": TOPICS.server_filters, "asker": TOPICS.profile_filters, "device": ()}[role]
    for each in filters:
        # Some brokers compare the filters themselves.
        assert any(rule.read and text == each for text, rule in rules) or role != "server", each
        assert any(rule.read and matched(text, each.replace("#", "1/0")) for text, rule in rules), each


@pytest.mark.parametrize("broker", BROKERS)
def test_each_list_names_every_leaf_of_a_device(broker: str) -> None:
    name = next(each for each in BROKERS if each == broker)
    text = "\n".join(build_access_files(AccessRules("orchard"), name).values())
    leaves = ("tasks", "acks", "hello") if broker != "aws" else ("CommonName}/*",)
    assert all(leaf in text for leaf in leaves)
    if broker == "hivemq":
        root = ElementTree.fromstring(text.encode())
        assert {role.findtext("id") for role in root.iter("role")} == set(ROLES)
        assert "edgefl/v1/orchard/devices/${{username}}/hello" in {each.text for each in root.iter("topic")}
    if broker == "emqx":
        assert text.splitlines()[-1] == "{deny, all}."
        assert '{allow, all, publish, ["edgefl/v1/orchard/devices/${username}/hello"]}.' in text


def test_the_example_of_a_fleet_has_the_list_as_it_is_written() -> None:
    shown = (Path(__file__).parents[3] / "examples" / "fleet" / "edgefl.acl").read_text()
    assert shown == build_access_files(AccessRules("orchard"), "mosquitto")["mosquitto.acl"]
