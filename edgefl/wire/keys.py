"""Ed25519 keys: the key file, signatures, and key rotation.

A key file holds the private key as 64 hexadecimal digits. After a rotation ``<file>.chain`` lies in the same folder: the
statements by which each key introduced its successor. Server and devices use the same files. ::

    keys = KeyPair(Path("server.key"))      # created if missing
    verify(keys.public, keys.sign(b"text"), b"text")
    rotate(Path("server.key"), overlap_s=86_400, now=time.time())
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from edgefl.errors import ConfigError
from edgefl.system.files import make_folder, write_whole

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEY_BYTES = 32
SIGNATURE_BYTES = 64
MOST_SUCCESSIONS = 8
"""Most statements in a message. A device that missed more rotations needs the new key by other means."""
FOREVER = 1 << 62
"""Expiry of a key without a successor, in seconds since 1970."""

_KEY = re.compile(r"[0-9a-fA-F]{64}")

PublicKey = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Moment = Annotated[int, msgspec.Meta(ge=0, le=FOREVER)]


class Succession(msgspec.Struct, frozen=True, kw_only=True):
    """Statement, signed by the key ``old``, that the key ``new`` replaces it.

    Attributes:
        old: Public key that is replaced.
        new: Public key that replaces it.
        until: Time until which ``old`` stays valid, in seconds since 1970.
        signature: Signature of the statement by ``old``.
    """

    old: PublicKey
    new: PublicKey
    until: Moment
    signature: Signature

    @property
    def is_valid(self) -> bool:
        """True if ``signature`` is a valid signature of this statement by the key ``old``."""
        return verify(self.old, self.signature, _succession_text(self.old, self.new, self.until))


class KeyPair:
    """Ed25519 key pair, whose private key is in a file that only its owner may read.

    Args:
        path: Key file. It is created with a random key if it does not exist.

    Attributes:
        public: Public key, 32 bytes.
        successions: Statements of earlier keys that lead to this one, oldest first.

    Raises:
        ConfigError: The file holds no key, or its chain of statements is damaged.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            _write_key(path, os.urandom(KEY_BYTES))
        self._key = _private_key(path)
        self.public = self._key.public_key().public_bytes_raw()
        # A rotation that was interrupted leaves a statement about a key that is nowhere.
        self.successions = tuple(each for each in _read_chain(chain_path(path)) if each.old != self.public)

    @property
    def public_key(self) -> str:
        """The public key as 64 hexadecimal digits."""
        return self.public.hex()

    @property
    def client_secret(self) -> bytes:
        """Secret from which MQTT client ids are derived. It is the same at each start, and never sent."""
        return self.sign(b"edgefl/v1/client-id")

    @property
    def private(self) -> Ed25519PrivateKey:
        """Private key, for certificate-signing requests."""
        return self._key

    def sign(self, text: bytes) -> bytes:
        """Return the signature of ``text``, 64 bytes.

        ``text`` must begin with a prefix that names its purpose, so that a signature for one purpose is not valid for
        another.
        """
        return self._key.sign(text)


def verify(public: bytes, signature: bytes, text: bytes) -> bool:
    """Return True if the holder of the key ``public`` made ``signature`` for ``text``."""
    from cryptography.exceptions import InvalidSignature

    try:
        _public_key(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=1024)
def _public_key(public: bytes) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(public)


def parse_key(text: str) -> bytes:
    """Return the 32 bytes that 64 hexadecimal digits encode.

    Raises:
        ConfigError: ``text`` is anything else.
    """
    if not _KEY.fullmatch(text):
        raise ConfigError(f"a key has {2 * KEY_BYTES} hexadecimal digits, found {len(text)} characters")
    return bytes.fromhex(text)


def parse_keys(text: str) -> tuple[bytes, ...]:
    """Return the keys of a comma-separated list. An empty text returns no keys.

    Raises:
        ConfigError: A part of the list is no key (:func:`parse_key`).
    """
    return tuple(parse_key(part.strip()) for part in text.split(",")) if text else ()


def short_key(key: bytes) -> str:
    """Return the short form of a public key for display: its first 12 hexadecimal digits."""
    return key.hex()[:12]


def rotate(path: Path, *, overlap_s: float, now: float) -> KeyPair:
    """Replace the key in a file by a new random one, which the old key signs as its successor.

    Writes the key file and its chain file.

    Args:
        path: Key file.
        overlap_s: Seconds for which the old key stays valid.
        now: Current time, seconds since 1970.

    Returns:
        The new key pair.

    Raises:
        ConfigError: The key file does not exist or is damaged.
    """
    if not path.exists():
        raise ConfigError(
            f"there is no key {path}: name the file whose key is to be replaced", path=str(path)
        )
    old = KeyPair(path)
    fresh = os.urandom(KEY_BYTES)
    new = _public_of(fresh)
    until = int(min(now + overlap_s, FOREVER - 1))
    signature = old.sign(_succession_text(old.public, new, until))
    statement = Succession(old=old.public, new=new, until=until, signature=signature)
    chain = (*old.successions, statement)[-MOST_SUCCESSIONS:]
    # The statement first: one without its key is ignored, and no device knows a key without its statement.
    write_whole(chain_path(path), "".join(f"{_line(each)}\n" for each in chain).encode(), durable=True)
    _write_key(path, fresh)
    return KeyPair(path)


def apply_successions(known: Mapping[bytes, int], statements: Iterable[Succession]) -> dict[bytes, int]:
    """Return the trusted keys after the sender's statements about new keys were applied.

    A key that already has a successor cannot introduce another one, so a stolen old key is useless.

    Args:
        known: Expiry of each trusted key in seconds since 1970; :data:`FOREVER` if the key has no successor.
        statements: Statements of the sender, in any order. Those with a wrong signature are ignored.

    Returns:
        Expiry of each trusted key, new keys included.
    """
    keys, waiting = dict(known), list(statements)
    while found := next((each for each in waiting if keys.get(each.old) == FOREVER and each.is_valid), None):
        waiting.remove(found)
        if found.new not in keys:
            keys[found.old] = min(found.until, FOREVER - 1)
            keys[found.new] = FOREVER
    return keys


def chain_path(path: Path) -> Path:
    """Return the path of the file that stores the succession statements of the key file ``path``."""
    return path.with_name(path.name + ".chain")


def _succession_text(old: bytes, new: bytes, until: int) -> bytes:
    """Return the bytes that the key ``old`` signs in a :class:`Succession`."""
    return f"edgefl/succession/1\n{old.hex()}\n{new.hex()}\n{until}\n".encode()


def _line(statement: Succession) -> str:
    parts = (statement.old.hex(), statement.new.hex(), str(statement.until), statement.signature.hex())
    return " ".join(parts)


def _read_chain(path: Path) -> tuple[Succession, ...]:
    """Return the statements in a chain file, oldest first; an empty tuple if the file does not exist.

    Raises:
        ConfigError: The file is damaged.
    """
    if not path.exists():
        return ()
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return tuple(
            Succession(
                old=parse_key(old), new=parse_key(new), until=int(until), signature=bytes.fromhex(signature)
            )
            for old, new, until, signature in rows
        )
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged: {error}; restore it, or move it away and give the new key to all who know the old one",
            chain=str(path),
        ) from error


def _public_of(private: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _private_key(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        return Ed25519PrivateKey.from_private_bytes(parse_key(path.read_text(encoding="ascii").strip()))
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            f"{path} holds no signing key: {error}; move it away and a new one is made",
            path=str(path),
            error=str(error),
        ) from error


def _write_key(path: Path, private: bytes) -> None:
    """Write the key file atomically: after a power cut, half a key would be a different identity."""
    make_folder(path.parent)
    write_whole(path, f"{private.hex()}\n".encode(), durable=True, shared=True, private=True)
