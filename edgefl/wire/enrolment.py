"""Two ways to bring a device's public key onto the server's list: one-time tokens and certificate-signing requests.

A token never travels: the hello names it and proves possession by an HMAC over the device's topic and key. A request
(PKCS #10, PEM) is carried by hand. Its common name is the device, its organization the federation. The key itself signs
the request, which proves that the requester owns it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from edgefl.errors import ConfigError
from edgefl.wire.keys import KeyPair, parse_key
from edgefl.wire.mqtt.topics import checked_name

_TOKEN = re.compile(r"efl1\.([0-9a-f]{16})\.([0-9a-f]{64})\.([0-9a-f]{64})")


@dataclass(frozen=True)
class Token:
    """One-time token with which a new device enrols.

    Attributes:
        name: Public name of the token; 16 hexadecimal digits.
        secret: Secret key of the proof; 32 bytes.
        server: Public key of the server, which the device trusts from then on.
    """

    name: str
    secret: bytes
    server: bytes

    @property
    def text(self) -> str:
        """The token as text, for a confidential channel to the device."""
        return f"efl1.{self.name}.{self.secret.hex()}.{self.server.hex()}"


def new_token(server: bytes) -> Token:
    """Return a new random token.

    Args:
        server: Public key of the server that issues it.
    """
    return Token(secrets.token_hex(8), secrets.token_bytes(32), server)


def parse_token(text: str) -> Token:
    """Return the token that ``text`` encodes (:attr:`Token.text`).

    Raises:
        ConfigError: ``text`` is no token. The error does not repeat it, because it may be a secret.
    """
    found = _TOKEN.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            "the token is not one of `edgefl enroll token`: it begins with efl1. and has three parts of hexadecimal digits"
        )
    return Token(found[1], bytes.fromhex(found[2]), parse_key(found[3]))


def prove(secret: bytes, topic: str, public: bytes) -> bytes:
    """Return a proof of 32 bytes that the sender has a token. It is valid for one device and one key.

    Args:
        secret: Secret of the token.
        topic: MQTT topic of the device's hello.
        public: Public key of the device.
    """
    text = f"edgefl/enrolment/1\n{topic}\n{public.hex()}\n".encode()
    return hmac.new(secret, text, hashlib.sha256).digest()


def proves(secret: bytes, topic: str, public: bytes, given: bytes) -> bool:
    """Return True if ``given`` equals :func:`prove` of the first three arguments. Compares in constant time."""
    return hmac.compare_digest(prove(secret, topic, public), given)


@dataclass(frozen=True)
class SigningRequest:
    """Verified certificate-signing request.

    Attributes:
        federation: Name of the federation that the device wants to join.
        device: Name of the device.
        key: Public key of the device; 32 bytes.
    """

    federation: str
    device: str
    key: bytes


def signing_request(keys: KeyPair, federation: str, device: str) -> bytes:
    """Return a PEM certificate-signing request for ``device`` in ``federation``, signed with the private
    key of ``keys``.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    subject = x509.Name(
        [
            x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, federation),
            x509.NameAttribute(x509.NameOID.COMMON_NAME, device),
        ]
    )
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(keys.private, None)
    return made.public_bytes(Encoding.PEM)


def read_signing_request(data: bytes, source: str) -> SigningRequest:
    """Return the verified content of a certificate-signing request.

    Args:
        data: PEM bytes.
        source: Name of the file, for error texts.

    Raises:
        ConfigError: ``data`` is no request, is not signed by its own Ed25519 key, or names an unusable federation or
            device.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        found = x509.load_pem_x509_csr(data)
        valid, key = found.is_signature_valid, found.public_key()
    except Exception as error:  # whatever a parser makes of hostile bytes
        raise ConfigError(
            f"{source} is no certificate-signing request in PEM: {error}", source=source, error=str(error)
        ) from error
    if not valid or not isinstance(key, Ed25519PublicKey):
        raise ConfigError(
            f"{source} is not signed by an Ed25519 key of its own: make it with `edgefl enroll request`",
            source=source,
        )
    names = {
        attribute.oid: attribute.value for attribute in found.subject if isinstance(attribute.value, str)
    }
    federation = names.get(x509.NameOID.ORGANIZATION_NAME, "")
    device = names.get(x509.NameOID.COMMON_NAME, "")
    return SigningRequest(
        checked_name("federation", federation), checked_name("device", device), key.public_bytes_raw()
    )
