"""Client ids: no two alike, as short as brokers want them, and a secret of their owner."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.keys import KeyPair
from edgefl.wire.mqtt.address import ClientIds, Role, client_id

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True) | st.sampled_from(
    ["server", "a", "a-b", "b-c", "c"]
)
WHO = st.tuples(st.sampled_from(get_args(Role)), NAMES, NAMES | st.just(""))
SECRET = bytes(32)


def test_the_ids_that_once_collided_differ() -> None:
    assert client_id(SECRET, "device", "server", "demo") != client_id(SECRET, "server", "demo")
    assert client_id(SECRET, "device", "a-b", "c") != client_id(SECRET, "device", "a", "b-c")


@given(WHO, WHO, st.sampled_from(get_args(ClientIds)))
def test_ids_of_different_clients_differ(
    one: tuple[Role, str, str], two: tuple[Role, str, str], style: ClientIds
) -> None:
    same = client_id(SECRET, *one, style=style) == client_id(SECRET, *two, style=style)
    assert same == (one == two)


@given(WHO)
def test_ids_are_as_short_as_they_are_said_to_be(who: tuple[Role, str, str]) -> None:
    assert len(client_id(SECRET, *who, style="full")) <= 128
    assert re.fullmatch("[0-9A-Za-z]{23}", client_id(SECRET, *who))


def test_an_id_stays_the_same_and_depends_on_the_key(tmp_path: Path) -> None:
    """The other agents make the same of this key: golden.test.ts, wire_messages_test.cpp."""
    path = tmp_path / "device.key"
    path.write_text(bytes(range(32)).hex())
    path.chmod(0o600)
    for _ in range(2):
        secret = KeyPair(path).client_secret
        assert client_id(secret, "device", "demo", "phone-7") == "EXpwWIbPnCIdJvXTsMebJKC"
    other = KeyPair(tmp_path / "other.key").client_secret
    assert client_id(other, "device", "demo", "phone-7") != "EXpwWIbPnCIdJvXTsMebJKC"


def test_readable_ids_stay_the_same_over_releases() -> None:
    assert client_id(SECRET, "device", "demo", "pi-1", style="full") == "edgefl:device:demo:pi-1"
    assert client_id(SECRET, "server", "demo", style="full") == "edgefl:server:demo"
    assert client_id(SECRET, "device", "f" * 63, "d" * 63, style="full").startswith("edgefl:device=")
