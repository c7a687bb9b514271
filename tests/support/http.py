"""Requests to pages that tests serve, and their answers."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    url: str, method: str, path: str, headers: dict[str, str], body: bytes | None = None, authority: str = ""
) -> Answer:
    """Return what a server answers; ``authority`` is the file of the certificate that vouches for it."""
    at = urlsplit(url)
    assert at.hostname is not None
    if at.scheme == "https":
        context = ssl.create_default_context(cafile=authority)
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            at.hostname, at.port, timeout=300, context=context
        )
    else:
        connection = http.client.HTTPConnection(at.hostname, at.port, timeout=300)
    try:
        connection.request(method, path, body, headers)
        found = connection.getresponse()
        return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
    finally:
        connection.close()
