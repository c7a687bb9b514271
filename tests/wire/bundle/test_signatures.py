"""Bundles are signed with Ed25519; a device that knows the server's key loads no other."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from edgefl.wire.bundle.archive import Signer, check
from edgefl.wire.keys import parse_key
from tests.support.errors import BundleError, ConfigError, refuses

DIGEST = "ab" * 32


def test_a_signature_holds_for_its_bundle_and_key_only(tmp_path: Path) -> None:
    signer, other = Signer(tmp_path / "a.key"), Signer(tmp_path / "b.key")
    signature = signer.sign(DIGEST)

    check([signer.keys.public], DIGEST, signature)
    with refuses(BundleError, sha256=DIGEST, signed=True):
        check([other.keys.public], DIGEST, signature)
    with refuses(BundleError, sha256="cd" * 32, signed=True):
        check([signer.keys.public], "cd" * 32, signature)
    with refuses(BundleError, sha256=DIGEST, signed=False):
        check([signer.keys.public], DIGEST, b"")


def test_the_key_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "server.key"

    assert Signer(path).public_key == Signer(path).public_key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_without_a_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "server.key"
    path.write_text("not a key")

    with refuses(ConfigError, path=str(path), error=...):
        Signer(path)


@pytest.mark.parametrize("text", ["", "ab", "zz" * 32, "ab" * 33])
def test_a_public_key_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        parse_key(text)
