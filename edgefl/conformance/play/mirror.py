"""A mirror of blobs: a small server of HTTP, which gives what it is told to."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Mapping
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Mirror:
    """``blobs`` by digest, as they are given; ``asked`` are those that somebody asked for. ``tls``: a certificate."""

    def __init__(self, blobs: Mapping[str, bytes], tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.removeprefix("/")
                asked.append(name)
                data = blobs.get(name)
                self.send_response(404 if data is None else 200)
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="mirror", daemon=True).start()

    def close(self) -> None:
        """No requests any more."""
        self._server.shutdown()
        self._server.server_close()


def mirrored(blobs: Mapping[str, bytes], tls: ssl.SSLContext | None = None) -> closing[Mirror]:
    """Return a mirror that the ``with`` statement closes."""
    return closing(Mirror(blobs, tls))
