"""Mosquitto with TLS, users and an access list, whose files are all in one folder.

Existing files are used again, so a restarted broker accepts the same clients.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import ConfigError
from edgefl.system.files import write_text
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, read_secret
from edgefl.wire.mqtt.topics import checked_name
from edgefl_server.access.certificates import CertificatePair, LabAuthority
from edgefl_server.access.files import mosquitto
from edgefl_server.access.rules import AccessRules
from edgefl_server.broker import check_ports, mosquitto_base, mosquitto_program

_ROUNDS = 101  # of PBKDF2, as mosquitto_passwd makes them
_PASSWORD_BYTES = 18
_EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class LabBroker:
    """Configuration of a Mosquitto broker for one federation.

    Attributes:
        folder: Folder of all files.
        federation: Name of the federation.
        devices: User names of the devices.
        host: Address to listen on.
        port: Port of MQTT over TLS.
        websocket_port: Port of MQTT over WebSocket; 0 for none.
        names: Further host names for the broker's certificate; clients use the first.
        ca_file: Authority of the broker's own certificate. Without the three files, a lab authority issues one.
        cert_file: Certificate of the broker.
        key_file: Key of that certificate.
        client_certificates: True if clients authenticate by certificates of the lab authority instead of
            passwords.
        limits: Limits of the federation.
        memory_bytes: Memory for messages; 0 for a quarter of the machine's.
    """

    folder: Path
    federation: str = "demo"
    devices: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 8883
    websocket_port: int = 0
    names: Sequence[str] = ()
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    client_certificates: bool = False
    limits: Limits = Limits()
    memory_bytes: int = 0

    @property
    def access(self) -> AccessRules:
        return AccessRules(self.federation)

    @property
    def users(self) -> tuple[str, ...]:
        """Return the names of all users, the server first."""
        return (self.access.server, self.access.asker, *self.devices)

    @property
    def name(self) -> str:
        """Return the host name that clients connect to."""
        if self.names:
            return self.names[0]
        return socket.gethostname() if self.host in _EVERYWHERE else self.host

    def command(self) -> list[str]:
        """Write the broker's configuration, access rules and hashed passwords, and return the command that runs Mosquitto.

        Existing certificates and passwords are kept, and missing ones are created; the other files are replaced.

        Raises:
            BrokerError: If Mosquitto is not installed, or a port is in use.
            ConfigError: If two users have one name, a name is invalid, or only some of the certificate files are
                given.
        """
        self._check()
        program = mosquitto_program()
        ports = check_ports(self.host, self.port, self.websocket_port)
        self.folder.mkdir(parents=True, exist_ok=True)
        authority, broker = self._certificates()
        write_text(self.folder / "mosquitto.acl", mosquitto(self.access))
        lines = [
            *mosquitto_base(self.limits, self.memory_bytes),
            "allow_anonymous false",
            f"acl_file {self.folder / 'mosquitto.acl'}",
        ]
        if not self.client_certificates:
            lines.append(f"password_file {self._passwords()}")
        for port in ports:
            lines += [
                f"listener {port} {self.host}",
                f"certfile {broker.certificate}",
                f"keyfile {broker.key}",
            ]
            lines += ["protocol websockets"] if port == self.websocket_port else []
            if self.client_certificates:
                lines += [f"cafile {authority}", "require_certificate true", "use_identity_as_username true"]
        config = self.folder / "mosquitto.conf"
        write_text(config, "\n".join(lines) + "\n")
        return [program, "-c", str(config)]

    def needs(self, user: str) -> dict[str, str]:
        """Return the options of ``edgefl`` commands with which ``user`` connects, by name.

        They are ``broker``, a URL, and ``password-file``, unless certificates are used. A missing certificate is
        created.
        """
        ca_file = self.ca_file or str(self.folder / "ca.crt")
        if self.client_certificates:
            pair = self._authority().client(user)
            certificate, key = str(pair.certificate), str(pair.key)
            address = Address(self.name, self.port, ca_file=ca_file, cert_file=certificate, key_file=key)
            return {"broker": address.url}
        return {
            "broker": Address(self.name, self.port, user, ca_file=ca_file).url,
            "password-file": str(self._password_file(user)),
        }

    def _check(self) -> None:
        checked_name("federation", self.federation)
        for device in self.devices:
            checked_name("device", device)
        if len(set(self.users)) != len(self.users):
            raise ConfigError(
                f"users {', '.join(self.users)}: two have one name; {self.access.server!r} and {self.access.asker!r} are no "
                "devices' names here"
            )
        given = [name for name in ("ca_file", "cert_file", "key_file") if getattr(self, name)]
        if given and len(given) < 3:
            raise ConfigError(
                f"{' and '.join(given)} alone: give the broker's certificate, its key and its authority, or none of them",
                given=given,
            )
        if given and self.client_certificates:
            raise ConfigError(
                "a lab makes certificates for clients of its own authority: leave `ca_file` out, or `client_certificates`"
            )

    def _authority(self) -> LabAuthority:
        return LabAuthority(self.folder)

    def _certificates(self) -> tuple[Path, CertificatePair]:
        if self.cert_file:
            return Path(self.ca_file), CertificatePair(Path(self.cert_file), Path(self.key_file))
        authority = self._authority()
        if self.client_certificates:
            for user in self.users:
                authority.client(user)
        here = (*self.names, self.name, "localhost", "127.0.0.1", socket.gethostname())
        return authority.own.certificate, authority.broker(*here)

    def _password_file(self, user: str) -> Path:
        return self.folder / "passwords" / user

    def _passwords(self) -> Path:
        """Write the file with the hashed passwords of all users, and return its path.

        A user without a password gets a random one, in a file ``passwords/<user>``.
        """
        lines = []
        for user in self.users:
            path = self._password_file(user)
            if not path.is_file():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                path.touch(mode=0o600)
                path.write_text(secrets.token_urlsafe(_PASSWORD_BYTES) + "\n", encoding="ascii")
            lines.append(f"{user}:{_hash_password(read_secret(path))}")
        found = self.folder / "passwords.hashed"
        found.touch(mode=0o600)
        write_text(found, "\n".join(lines) + "\n")
        found.chmod(0o600)
        return found


def _hash_password(password: str) -> str:
    """Return the hash of ``password`` in the format of mosquitto_passwd: PBKDF2 with SHA-512."""
    salt = secrets.token_bytes(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ROUNDS)
    return f"$7${_ROUNDS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"
