"""Where a broker listens: read from text without loading what talks to it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgefl.wire.errors import BrokerError

_LAST_PORT = 65535


@dataclass(frozen=True)
class Address:
    """Where the broker listens. ``ca_file`` switches TLS on."""

    host: str
    port: int = 1883
    username: str = ""
    password: str = ""
    ca_file: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """``host``, ``host:port`` or ``user:password@host:port``."""
        credentials, _, place = text.rpartition("@")
        username, _, password = credentials.partition(":")
        host, _, port = place.partition(":")
        number = int(port or 1883) if re.fullmatch(r"[0-9]{0,5}", port) else 0
        if not host or not 1 <= number <= _LAST_PORT:
            raise BrokerError(
                f"broker address {place!r} should read host:port with a port up to {_LAST_PORT}, "
                "for example localhost:1883",
                address=place,
            )
        return cls(host, number, username, password)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"
