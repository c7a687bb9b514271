"""Client ids: no two alike, and as short as brokers want them."""

from __future__ import annotations

import re
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.mqtt.client_ids import ClientIds, Role, client_id

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True) | st.sampled_from(
    ["server", "a", "a-b", "b-c", "c"]
)
WHO = st.tuples(st.sampled_from(get_args(Role)), NAMES, NAMES | st.just(""))


def test_the_ids_that_once_collided_differ() -> None:
    assert client_id("device", "server", "demo") != client_id("server", "demo")
    assert client_id("device", "a-b", "c") != client_id("device", "a", "b-c")


@given(WHO, WHO, st.sampled_from(get_args(ClientIds)))
def test_ids_of_different_clients_differ(
    one: tuple[Role, str, str], two: tuple[Role, str, str], style: ClientIds
) -> None:
    same = client_id(*one, style=style) == client_id(*two, style=style)
    assert same == (one == two)


@given(WHO)
def test_ids_are_as_short_as_they_are_said_to_be(who: tuple[Role, str, str]) -> None:
    assert len(client_id(*who)) <= 128
    assert re.fullmatch("[0-9A-Za-z]{23}", client_id(*who, style="short"))


def test_ids_stay_the_same_over_releases() -> None:
    assert client_id("device", "demo", "pi-1") == "edgefl:device:demo:pi-1"
    assert client_id("server", "demo") == "edgefl:server:demo"
    assert client_id("device", "demo", "pi-1", style="short") == client_id(
        "device", "demo", "pi-1", style="short"
    )
    assert client_id("device", "f" * 63, "d" * 63).startswith("edgefl:device=")
