"""A bucket over HTTP as S3 speaks it, as far as updates need it, and with bad hours."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

_SLOW = b"<Error><Code>ServiceUnavailable</Code><Message>Please reduce your request rate.</Message></Error>"


class Bucket:
    """Objects by key. ``refusals``: so many writes are answered 503 first; ``refused`` counts them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.refusals = 0
        self.refused = 0
        self.written: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler_of(bucket: Bucket) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            data = self._body()
            if bucket.refusals > 0:
                bucket.refusals, bucket.refused = bucket.refusals - 1, bucket.refused + 1
                self._answer(503, _SLOW)
                return
            bucket.objects[self._key()] = data
            bucket.written.append(self._key())
            self._answer(200, b"", ETag='"etag"')

        def do_GET(self) -> None:
            asked = parse_qs(urlsplit(self.path).query)
            if "list-type" in asked:
                keys = sorted(key for key in bucket.objects if key.startswith(asked.get("prefix", [""])[0]))
                rows = "".join(
                    f"<Contents><Key>{key}</Key><Size>{len(bucket.objects[key])}</Size>"
                    '<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"etag"</ETag></Contents>'
                    for key in keys
                )
                text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
                self._answer(200, text.encode(), **{"Content-Type": "application/xml"})
                return
            data = bucket.objects.get(self._key())
            if data is None:
                self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
                return
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            begin, end = (int(span[1]), int(span[2]) + 1) if span else (0, len(data))
            total = f"bytes {begin}-{end - 1}/{len(data)}"
            self._answer(206 if span else 200, data[begin:end], ETag='"etag"', **{"Content-Range": total})

        def do_POST(self) -> None:
            for key in re.findall(r"<Key>([^<]*)</Key>", self._body().decode()):
                bucket.objects.pop(key, None)
            self._answer(200, b"<DeleteResult></DeleteResult>", **{"Content-Type": "application/xml"})

        def do_DELETE(self) -> None:
            bucket.objects.pop(self._key(), None)
            self._answer(204, b"")

        def _key(self) -> str:
            return unquote(urlsplit(self.path).path).removeprefix("/bucket/")

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "") == "chunked":
                return b"".join(iter(self._part, b""))
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
                return data
            return _unchunked(data)

        def _part(self) -> bytes:
            size = int(self.rfile.readline().partition(b";")[0], 16)
            data = self.rfile.read(size)
            self.rfile.readline()
            return data

        def _answer(self, code: int, data: bytes, **headers: str) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    return Handler


def _unchunked(data: bytes) -> bytes:
    """What lies in the chunks that a signing client makes of a body."""
    found = b""
    while data:
        head, _, rest = data.partition(b"\r\n")
        size = int(head.partition(b";")[0], 16)
        if not size:
            break
        found, data = found + rest[:size], rest[size + 2 :]
    return found
