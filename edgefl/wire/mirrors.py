"""Mirrors: HTTP servers that serve each blob at ``BASE/<sha256>``, besides the broker.

A mirror need not be trusted: devices compare its bytes with the digests that the server signed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from edgefl.errors import ConfigError

MOST_MIRRORS = 8
"""Most mirrors in an announcement, and most that a device asks."""
MOST_LETTERS = 500
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]*:[0-9a-f:.]*(%[a-z0-9._-]+)?")
_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*")
_REMEDY = "write it like https://weights.example.org/demo or http://gateway.lan:8480"


@dataclass(frozen=True)
class Mirror:
    """Base URL of a mirror.

    Attributes:
        scheme: ``http`` or ``https``.
        host: Name or IP address, without brackets.
        port: TCP port.
        path: Path of the base. Empty, or it begins with a slash and does not end with one.
    """

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> Mirror:
        """Return the mirror at ``http(s)://host[:port][/path]``.

        Raises:
            ConfigError: ``text`` has another form, or contains a user name, a query or a fragment.
        """
        try:
            parts = urlsplit(text)
            port, host = parts.port, parts.hostname or ""
        except ValueError as error:
            raise ConfigError(f"{text[:MOST_LETTERS]!r} is no mirror ({error}): {_REMEDY}") from error
        path = parts.path.rstrip("/")
        good = (
            parts.scheme in _PORTS
            and _HOST.fullmatch(host)
            and port != 0
            and not (parts.username or parts.password or parts.query or parts.fragment)
            and _PATH.fullmatch(path)
            and len(text) <= MOST_LETTERS
            and text.isascii()
            and text.isprintable()
        )
        if not good:
            raise ConfigError(f"{text[:MOST_LETTERS]!r} is no mirror: {_REMEDY}")
        return cls(parts.scheme, host, port or _PORTS[parts.scheme], path)

    @property
    def secure(self) -> bool:
        """True if the connection uses TLS, which hides the requested digests from observers."""
        return self.scheme == "https"

    @property
    def netloc(self) -> str:
        """Host and port for the HTTP header Host, without the port if it is the default of the scheme."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def target(self, sha256: str) -> str:
        """Return the path of a blob's URL."""
        return f"{self.path}/{sha256}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.path}"


def is_near(address: str) -> bool:
    """Return True if an IP address is a loopback or private one. False for link-local addresses and for text that is no
    address.
    """
    import ipaddress  # a device without mirrors has no use for it

    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    plain = getattr(found, "ipv4_mapped", None) or found
    return bool(plain.is_private and not plain.is_link_local and not plain.is_unspecified)
