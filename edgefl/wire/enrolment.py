"""One-time tokens by which a device brings its public key onto the server's list of devices.

The token never travels: the hello names it, and proves by an HMAC over the device's topic and key that the device has it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from edgefl.wire.errors import ConfigError
from edgefl.wire.keys import parse_key

_TOKEN = re.compile(r"efl1\.([0-9a-f]{16})\.([0-9a-f]{64})\.([0-9a-f]{64})")


@dataclass(frozen=True)
class Token:
    """``name`` is public, ``secret`` proves, ``server`` is the server's public key, which the device trusts from then on."""

    name: str
    secret: bytes
    server: bytes

    @property
    def text(self) -> str:
        """What is given to the device, on a way that nobody else reads."""
        return f"efl1.{self.name}.{self.secret.hex()}.{self.server.hex()}"


def new_token(server: bytes) -> Token:
    """A token that nobody can guess, of the server with this public key."""
    return Token(secrets.token_hex(8), secrets.token_bytes(32), server)


def parse_token(text: str) -> Token:
    """The token in ``text``; ConfigError for another text, which it does not repeat."""
    found = _TOKEN.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            "the token is not one of `edgefl enroll token`: it begins with efl1. and has three parts of hexadecimal digits"
        )
    return Token(found[1], bytes.fromhex(found[2]), parse_key(found[3]))


def proof(secret: bytes, topic: str, public: bytes) -> bytes:
    """32 bytes that only who has the token can make, for one device and key; ``topic`` is the one of the hello."""
    text = f"edgefl/enrolment/1\n{topic}\n{public.hex()}\n".encode()
    return hmac.new(secret, text, hashlib.sha256).digest()


def proves(secret: bytes, topic: str, public: bytes, given: bytes) -> bool:
    """Whether ``given`` is the proof."""
    return hmac.compare_digest(proof(secret, topic, public), given)
