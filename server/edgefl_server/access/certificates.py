"""Certificates for brokers in a lab: one authority, one broker certificate and one for each client. Fleets in production
need a certificate authority of their own.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgefl.system.files import write_whole

_DAYS = 825
_LEEWAY = datetime.timedelta(days=1)
_PEM = serialization.Encoding.PEM
# Python verifies strictly from 3.13 on: RFC 5280 asks for this, and for the identifiers of both keys.
_SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class CertificatePair:
    """Paths of a certificate and of its private key (PEM, without a password). The files may not exist yet."""

    certificate: Path
    key: Path

    @property
    def exists(self) -> bool:
        """Return True if the files of the certificate and of the key exist."""
        return self.certificate.is_file() and self.key.is_file()


class LabAuthority:
    """Certificate authority whose files are in ``folder``; it is created if they do not exist.

    ``ca.crt`` is copied to the clients. ``ca.key`` is secret and stays in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.own = CertificatePair(folder / "ca.crt", folder / "ca.key")
        if not self.own.exists:
            key = ec.generate_private_key(ec.SECP256R1())
            made = (
                _builder("edgefl lab authority", "edgefl lab authority", key)
                .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
                .add_extension(_SIGNS_CERTIFICATES, critical=True)
                .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            )
            _write(self.own, made.sign(key, hashes.SHA256()), key)
        self._certificate = x509.load_pem_x509_certificate(self.own.certificate.read_bytes())
        found = serialization.load_pem_private_key(self.own.key.read_bytes(), None)
        assert isinstance(found, ec.EllipticCurvePrivateKey)  # as written above
        self._key = found

    def broker(self, *hosts: str) -> CertificatePair:
        """Return the files of the broker's certificate and key, ``broker.crt`` and ``broker.key``.

        They are created for ``hosts`` (at least one host name or IP address; the first becomes the common name) if the
        folder has none. Existing files are returned even if they name other hosts.
        """
        pair = CertificatePair(self._folder / "broker.crt", self._folder / "broker.key")
        if not pair.exists:
            names = x509.SubjectAlternativeName([_alternative(host) for host in dict.fromkeys(hosts)])
            self._issue(pair, hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, names)
        return pair

    def client(self, name: str) -> CertificatePair:
        """Return the files of the certificate and key of client ``name``, ``<name>.crt`` and ``<name>.key``.

        They are created if the folder has none. The common name is ``name``, which brokers take as the user name.
        """
        pair = CertificatePair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        if not pair.exists:
            self._issue(pair, name, ExtendedKeyUsageOID.CLIENT_AUTH)
        return pair

    def _issue(
        self,
        pair: CertificatePair,
        name: str,
        usage: x509.ObjectIdentifier,
        names: x509.ExtensionType | None = None,
    ) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = (
            _builder(name, str(issuer), key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(signer, critical=False)
        )
        if names is not None:
            made = made.add_extension(names, critical=False)
        _write(pair, made.sign(self._key, hashes.SHA256()), key)


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LEEWAY)  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(pair: CertificatePair, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pair.certificate.parent.mkdir(parents=True, exist_ok=True)
    secret = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pair.key.touch(mode=0o600)
    write_whole(pair.key, secret)
    pair.key.chmod(0o600)
    write_whole(pair.certificate, certificate.public_bytes(_PEM))
