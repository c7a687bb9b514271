"""Certificate-signing requests (PKCS #10, PEM) by which a device's public key is carried to its server by hand.

The subject's common name is the device's, its organization the federation's; the request is signed by the key itself, so
that nobody brings in a key that is not his.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.wire.errors import ConfigError
from edgefl.wire.keys import KeyPair
from edgefl.wire.mqtt.topics import checked_name


@dataclass(frozen=True)
class Request:
    """Who asks, and the key."""

    federation: str
    device: str
    key: bytes


def request_of(keys: KeyPair, federation: str, device: str) -> bytes:
    """A request for ``device``, signed by its key."""
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


def read_request(data: bytes, source: str) -> Request:
    """The request in ``data``; ConfigError if it is none, is not signed by its key, or has a key of another kind."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        found = x509.load_pem_x509_csr(data)
        valid, key = found.is_signature_valid, found.public_key()
    except Exception as error:  # whatever a parser makes of hostile bytes
        raise ConfigError(
            f"{source} is no certificate-signing request in PEM: {error}", source=source
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
    return Request(
        checked_name("federation", federation), checked_name("device", device), key.public_bytes_raw()
    )
