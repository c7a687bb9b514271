"""Ed25519 signatures of bundles. The digest of a manifest covers every graph it lists, so one signature covers all.

Needs the package cryptography (extra ``secure``), and only where a key is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.system.files import naming
from edgefl.wire.errors import BundleError, ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_BYTES = 32


def signed_text(sha256: str) -> bytes:
    """What is signed for the bundle whose manifest has this digest: it cannot be mistaken for anything else."""
    return f"edgefl/v1/bundle/{sha256}".encode()


class Signer:
    """The server's private key, kept in a file of 64 hexadecimal digits that only its owner may read."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            _write_new_key(path)
        self._key = _private_key(path)

    @property
    def public_key(self) -> str:
        """What devices are given as ``--server-key``: 64 hexadecimal digits."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, sha256: str) -> bytes:
        return self._key.sign(signed_text(sha256))


def check(public_key: str, sha256: str, signature: bytes) -> None:
    """BundleError unless ``signature`` is the holder's of ``public_key`` for the bundle ``sha256``."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key = Ed25519PublicKey.from_public_bytes(parse_key(public_key))
    try:
        key.verify(signature, signed_text(sha256))
    except InvalidSignature as error:
        flaw = "a wrong signature" if signature else "no signature"
        raise BundleError(
            f"bundle {sha256[:12]} carries {flaw} for the server key {public_key[:12]}: it is not loaded; "
            "give the device the key that the server prints, or find out who published this bundle",
            sha256=sha256,
        ) from error


def parse_key(text: str) -> bytes:
    """32 bytes out of 64 hexadecimal digits, else ConfigError."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"a key has {2 * KEY_BYTES} hexadecimal digits, found {len(text)} characters")
    return key


def _private_key(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        return Ed25519PrivateKey.from_private_bytes(parse_key(path.read_text(encoding="ascii").strip()))
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            f"{path} holds no signing key: {error}; move it away and a new one is made"
        ) from error


def _write_new_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with naming(path), os.fdopen(opened, "w") as file:
        file.write(os.urandom(KEY_BYTES).hex() + "\n")
