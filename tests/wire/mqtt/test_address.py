"""How a broker is reached, as text: what may not be used, and what reads back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, read_secret
from edgefl.wire.mqtt.session import Session
from edgefl_server.access.certificates import LabAuthority
from tests.support.errors import BrokerError, refuses
from tests.wire.texts import LETTERS


def test_a_password_without_tls_is_refused_unless_asked_for(limits: Limits) -> None:
    address = Address("broker.example", 1883, "pi-1", "s3cret")
    with pytest.raises(
        BrokerError, match=r"user 'pi-1' would travel to broker\.example:1883 in clear"
    ) as caught:
        Session(address, "x", limits=limits)
    assert "s3cret" not in f"{caught.value}{address!r}"
    for allowed in (
        replace(address, insecure_password=True),
        replace(address, tls=True),
        replace(address, host="127.0.0.1"),
        replace(address, password=""),
    ):
        Session(allowed, "x", limits=limits)


def test_half_a_client_certificate_is_refused(limits: Limits) -> None:
    with pytest.raises(BrokerError, match=r"two files, and only pi-1\.crt is given"):
        Session(Address("localhost", cert_file="pi-1.crt"), "x", limits=limits)


def test_a_key_of_another_certificate_is_refused(limits: Limits, tmp_path: Path) -> None:
    authority = LabAuthority(tmp_path)
    one, other = authority.client("one"), authority.client("other")
    address = Address("localhost", cert_file=str(one.certificate), key_file=str(other.key))
    with refuses(BrokerError, cert_file=str(tmp_path / "one.crt"), key_file=str(tmp_path / "other.key")):
        Session(address, "x", limits=limits)


def test_a_password_comes_from_the_first_line_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pw"
    path.write_text("s3 cret\nnotes\n")
    assert read_secret(path) == "s3 cret"
    path.write_text("\n")
    with refuses(BrokerError, path=str(path)):
        read_secret(path)
    with refuses(BrokerError, path=str(tmp_path / "none"), error=...):
        read_secret(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mqtts://host", Address("host", 8883, tls=True)),
        ("mqtt://anna:p%40ss@host", Address("host", 1883, "anna", "p@ss")),
        ("ws://host:8080/a/b", Address("host", 8080, path="/a/b")),
        ("wss://host", Address("host", 443, tls=True, path="/mqtt")),
        (
            "mqtts://host?mqtt=3.1.1&client-ids=full",
            Address("host", 8883, tls=True, mqtt="3.1.1", client_ids="full"),
        ),
    ],
)
def test_urls_parse(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["http://host", "mqtt://host/path", "mqtts://host?mqtt=4", "mqtts://host?pasword=x", "ws://"]
)
def test_urls_that_do_not_parse_are_broker_errors(text: str) -> None:
    with pytest.raises(BrokerError):
        Address.parse(text)


NAMES = st.text("abc:/?@%=& \u00e4", max_size=8)


@given(
    NAMES,
    NAMES,
    NAMES,
    st.sampled_from(["auto", "5", "3.1.1"]),
    st.booleans(),
    st.sampled_from(["", "/mqtt"]),
)
def test_an_address_reads_back_from_its_url(
    user: str, secret: str, file: str, version: str, insecure: bool, path: str
) -> None:
    address = Address(
        "host",
        1,
        user,
        secret if user else "",
        ca_file=file,
        path=path,
        mqtt=version,
        insecure_password=insecure,  # type: ignore[arg-type]
    )
    assert Address.parse(address.url) == replace(address, tls=address.secure)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost", Address("localhost", 1883)),
        ("broker.example:8883", Address("broker.example", 8883)),
        ("anna:se:cret@host:1", Address("host", 1, "anna", "se:cret")),
        ("anna:p@ss@host", Address("host", 1883, "anna", "p@ss")),
        ("[::1]", Address("::1", 1883)),
        ("anna@[fe80::1%eth0]:8883", Address("fe80::1%eth0", 8883, "anna")),
        ("mqtts://[2001:db8::2]", Address("2001:db8::2", 8883, tls=True)),
        ("ws://[::1]:8080/a", Address("::1", 8080, path="/a")),
    ],
)
def test_addresses_parse(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected == Address.parse(expected.url)


@pytest.mark.parametrize(
    "text",
    [
        "[::1",
        "[::1]1883",
        "[name]:1",
        "[127.0.0.1]:1",
        "fe80::1:1883",
        "",
        ":1883",
        "host:",
        "host:x",
        "host:0",
        "host:65536",
        "host:99999999",
        "host:²",
        "host:-1",
        "::1",
    ],
)
def test_addresses_that_do_not_parse_say_how_one_reads(text: str) -> None:
    if text == "host:":
        assert Address.parse(text).port == 1883
        return
    with pytest.raises(BrokerError, match="should read host:port"):
        Address.parse(text)


def test_a_refused_address_does_not_repeat_the_password() -> None:
    with pytest.raises(BrokerError) as caught:
        Address.parse("anna:secret@host:x")
    assert "secret" not in f"{caught.value} {caught.value.details}"


@given(st.text(LETTERS, max_size=30))
def test_arbitrary_addresses_raise_nothing_but_broker_error(text: str) -> None:
    try:
        assert 1 <= Address.parse(text).port <= 65535
    except BrokerError:
        return


def test_a_missing_certificate_file_is_named(limits: Limits, tmp_path: Path) -> None:
    address = Address("localhost", 8883, ca_file=str(tmp_path / "ca.pem"))

    with refuses(BrokerError, ca_file=str(tmp_path / "ca.pem")):
        Session(address, "x", limits=limits)
