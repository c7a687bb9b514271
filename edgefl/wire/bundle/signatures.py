"""Signatures of bundles. The digest of a manifest covers every graph it lists, so one signature covers all."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from edgefl.wire.errors import BundleError
from edgefl.wire.keys import KeyPair, shown, verify


def signed_text(sha256: str) -> bytes:
    """What is signed for the bundle whose manifest has this digest: it cannot be mistaken for anything else."""
    return f"edgefl/v1/bundle/{sha256}".encode()


class Signer:
    """The server's key (:class:`edgefl.wire.keys.KeyPair`), made if there is none."""

    def __init__(self, path: Path) -> None:
        self.keys = KeyPair(path)

    @property
    def public_key(self) -> str:
        """What devices are given as ``--server-key``: 64 hexadecimal digits."""
        return self.keys.public_key

    def sign(self, sha256: str) -> bytes:
        return self.keys.sign(signed_text(sha256))


def check(known: Collection[bytes], sha256: str, signature: bytes) -> None:
    """BundleError unless ``signature`` is that of one of the ``known`` keys for the bundle ``sha256``."""
    if signature and any(verify(key, signature, signed_text(sha256)) for key in known):
        return
    flaw = "a wrong signature" if signature else "no signature"
    keys = ", ".join(shown(key) for key in known) or "none"
    raise BundleError(
        f"bundle {sha256[:12]} carries {flaw} for the server key {keys}: it is not loaded; "
        "give the device the key that the server prints, or find out who published this bundle",
        sha256=sha256,
    )
