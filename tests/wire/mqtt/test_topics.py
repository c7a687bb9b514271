"""Topic names: what we make we can read, and nothing else gets in."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.mqtt.topics import Topics
from tests.support.errors import ConfigError, ProtocolError, refuses
from tests.wire.texts import LETTERS

_FIRST = "azAZ019"


NAMES = st.builds(str.__add__, st.sampled_from(_FIRST), st.text(_FIRST + "._-", max_size=62))


def hexadecimal(least: int) -> st.SearchStrategy[str]:
    return st.text("0123456789abcdef", min_size=least, max_size=64)


@given(NAMES, NAMES, st.integers(0, 10**6), st.integers(0, 10**6))
def test_device_topics_read_back(federation: str, device: str, round_number: int, index: int) -> None:
    topics = Topics(federation)
    mine = topics.device(device)

    assert topics.parse_device(mine.status) == (device, "status", ())
    assert topics.parse_device(mine.update(round_number, index)) == (device, "updates", (round_number, index))


@given(NAMES, hexadecimal(64), st.integers(0, 10**6))
def test_blob_topics_read_back(federation: str, sha256: str, index: int) -> None:
    topics = Topics(federation)

    assert topics.parse_blob(topics.blob_chunk(sha256, index)) == (sha256, index)


@given(NAMES, hexadecimal(8))
def test_topics_of_profiles_read_back(federation: str, nonce: str) -> None:
    topics = Topics(federation)
    own = topics.profile(nonce)

    assert topics.parse_offer(own.offer) == nonce
    assert topics.parse_device(topics.device("phone").profiles) == ("phone", "profiles", ())
    assert own.blob_chunk("ab" * 32, 3).endswith(f"/profiles/{nonce}/blobs/{'ab' * 32}/3")
    with pytest.raises(ProtocolError):
        topics.parse_blob(own.blob_chunk("ab" * 32, 3))


@pytest.mark.parametrize(
    "topic", ["", "profiles//offer", "profiles/+/offer", "profiles/0011aabb", "profiles/0011AABB/offer"]
)
def test_topics_of_no_offer_are_refused(topic: str) -> None:
    with pytest.raises(ProtocolError):
        Topics("demo").parse_offer(f"edgefl/v1/demo/{topic}")


@pytest.mark.parametrize("name", ["", "+", "#", "a/b", "a+", "-a", ".a", "a" * 64, "é", "a b", "a\n", "a\0"])
def test_names_that_would_break_a_topic_are_refused(name: str) -> None:
    with refuses(ConfigError, kind="federation", name=name):
        Topics(name)
    with refuses(ConfigError, kind="device", name=name):
        Topics("demo").device(name)


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "edgefl/v1/demo",
        "edgefl/v1/demo/devices",
        "edgefl/v1/demo/devices/",
        "edgefl/v1/demo/devices/phone",
        "edgefl/v1/demo/devices//status",
        "edgefl/v1/demo/devices/pho ne/status",
        "edgefl/v1/other/devices/phone/status",
        "edgefl/v1/demo2/devices/phone/status",
        "edgefl/v2/demo/devices/phone/status",
        "edgefl/v1/demo/devices/phone/updates/x",
        "edgefl/v1/demo/devices/phone/updates/3/",
        "edgefl/v1/demo/devices/phone/updates/-3/0",
        "edgefl/v1/demo/devices/phone/updates/+3/0",
        "edgefl/v1/demo/devices/phone/updates/1_0/0",
        "edgefl/v1/demo/devices/phone/updates/ 3/0",
        "edgefl/v1/demo/devices/phone/updates/٣/0",
        "edgefl/v1/demo/devices/phone/updates/" + "9" * 5000,
    ],
)
def test_topics_of_no_device_are_refused(topic: str) -> None:
    with pytest.raises(ProtocolError):
        Topics("demo").parse_device(topic)


def test_a_topic_outside_devices_is_not_mistaken_for_one() -> None:
    with pytest.raises(ProtocolError):
        Topics("7").parse_device("edgefl/v1/7/3")


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "edgefl/v1/demo/blobs/" + "ab" * 32,
        "edgefl/v1/demo/blobs/" + "ab" * 32 + "/x",
        "edgefl/v1/demo/blobs/" + "ab" * 32 + "/²",
        "edgefl/v1/demo/blobs/" + "ab" * 32 + "/1/2",
        "edgefl/v1/demo/blobs/short/1",
        "edgefl/v1/other/blobs/" + "ab" * 32 + "/1",
        "ab" * 32 + "/1",
    ],
)
def test_topics_of_no_blob_are_refused(topic: str) -> None:
    with pytest.raises(ProtocolError):
        Topics("demo").parse_blob(topic)


@given(st.text(LETTERS, max_size=60))
def test_arbitrary_topics_raise_nothing_but_protocol_error(text: str) -> None:
    topics = Topics("demo")
    for topic in (text, f"{topics.root}/devices/{text}", f"{topics.root}/blobs/{text}"):
        for parse in (topics.parse_device, topics.parse_blob):
            try:
                parse(topic)
            except ProtocolError:
                continue


def test_the_servers_filters_cover_what_devices_publish() -> None:
    topics = Topics("demo")
    mine = topics.device("phone")
    patterns = [re.compile(one.replace("+", "[^/]+").replace("#", ".*")) for one in topics.server_filters]

    def covered(topic: str) -> bool:
        return any(pattern.fullmatch(topic) for pattern in patterns)

    assert all(map(covered, (mine.status, mine.hello, mine.progress, mine.update(1, 0))))
    assert covered(topics.current_round), "whether it still stands"
    assert not any(map(covered, (mine.tasks, mine.acks, topics.blob_chunk("a", 0))))
