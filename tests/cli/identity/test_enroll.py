"""`edgefl enroll` and `edgefl key`."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from edgefl.cli.commands import app
from edgefl.wire.enrolment import parse_token
from edgefl.wire.keys import KeyPair
from tests.cli.runner import runner
from tests.support.errors import ConfigError, refuses


def run(*arguments: object) -> Any:
    result = runner().invoke(app, [*map(str, arguments), "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_token_has_the_servers_key_and_lies_where_only_its_owner_reads(tmp_path: Path) -> None:
    made = run("enroll", "token", "phone", "--list", tmp_path / "list", "--sign-key", tmp_path / "server.key")

    assert parse_token(made["token"]).server == KeyPair(tmp_path / "server.key").public
    assert stat.S_IMODE((tmp_path / "list").stat().st_mode) == 0o600


def test_a_device_is_listed_until_it_is_forgotten(tmp_path: Path) -> None:
    entries, request, store = tmp_path / "list", tmp_path / "phone.csr", tmp_path / "store"
    asked = run("enroll", "request", "phone", "--store", store, "--out", request)
    added = run("enroll", "add", request, "--list", entries)

    key = KeyPair(store / "device.key").public_key
    assert asked["key"] == added["key"] == key
    [row] = run("enroll", "ls", "--list", entries)
    assert (row["device"], row["state"], row["source"], row["key"]) == ("phone", "active", "request", key)
    assert run("enroll", "ls", "--list", entries, "--federation", "other") == []
    assert run("enroll", "revoke", "phone", "--list", entries)["revoked"] == 1
    with refuses(ConfigError, device="phone"):
        run("enroll", "add", request, "--list", entries)
    with refuses(ConfigError, device="phone", keys=0):
        run("enroll", "revoke", "phone", "--list", entries)
    assert run("enroll", "forget", "phone", "--list", entries)["forgotten"] == 1


def test_what_is_no_request_of_an_ed25519_key_is_refused(tmp_path: Path) -> None:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "phone")])
    other = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(name)
        .sign(generate_private_key(SECP256R1()), SHA256())
    )
    for data, details in (
        (b"no request", {"error": ...}),
        (other.public_bytes(Encoding.PEM), {}),
    ):
        (tmp_path / "r").write_bytes(data)
        with refuses(ConfigError, source=str(tmp_path / "r"), **details):
            run("enroll", "add", tmp_path / "r", "--list", tmp_path / "list")


def test_a_key_is_made_rotated_and_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make it: `edgefl key new"):
        run("key", "show", tmp_path / "server.key")
    assert not (tmp_path / "server.key").exists()

    before = run("key", "new", tmp_path / "server.key")["public_key"]
    with pytest.raises(ConfigError, match="exists: show its key"):
        run("key", "new", tmp_path / "server.key")
    assert run("key", "show", tmp_path / "server.key")["public_key"] == before
    after = run("key", "rotate", tmp_path / "server.key", "--overlap", 2)["public_key"]

    assert run("key", "show", tmp_path / "server.key")["public_key"] == after != before
    with refuses(ConfigError, path=str(tmp_path / "nowhere.key")):
        run("key", "rotate", tmp_path / "nowhere.key")


def test_a_list_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no list"):
        run("enroll", "ls", "--list", tmp_path / "list")
    assert not (tmp_path / "list").exists()
