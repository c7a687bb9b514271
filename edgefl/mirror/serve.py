"""HTTP server of a mirror: ``GET`` and ``HEAD`` of ``/<sha256>``, whole or a range."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edgefl.errors import MirrorError
from edgefl.mirror.blobs import Blob, BlobFolder, Cache, CacheSettings, FailureLog
from edgefl.system.listener import WebServer, certificate_fault, listening

_STEP = 256 * 1024
_LOOK_S = 0.02
_SEND_S = 60.0
"""Limit for a client to take one step."""
_SIZE_S = 15.0
"""Limit for an upstream mirror to report whether it has a blob."""
_FOR_PAGES = {"Access-Control-Allow-Origin": "*", "Cross-Origin-Resource-Policy": "cross-origin"}
"""Headers for browsers, whose page is another origin. All blobs are public."""
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")


def application(blobs: BlobFolder | Cache) -> Starlette:
    """Return the web application of a mirror.

    Args:
        blobs: the folder or cache of blobs.

    Returns:
        The ASGI application.
    """

    async def get(request: Request) -> Response:
        try:
            blob = await anyio.to_thread.run_sync(blobs.open, request.path_params["name"])
        except MirrorError:
            return _busy()
        if blob is None:
            return _missing()
        try:
            with anyio.move_on_after(_SIZE_S):
                while blob.size is None and not blob.failed:
                    await anyio.sleep(_LOOK_S)
            if blob.size is None:
                blob.close()
                return _missing() if blob.lacks else _busy()
            return _answer(request, blob, blob.size)
        except BaseException:
            blob.close()
            raise

    served = Starlette(routes=[Route("/{name}", get, methods=["GET", "HEAD"])])
    served.router.redirect_slashes = False
    return served


def _answer(request: Request, blob: Blob, size: int) -> Response:
    headers = {
        **_FOR_PAGES,
        "Accept-Ranges": "bytes",
        "Cache-Control": "public, max-age=31536000, immutable",
        "ETag": f'"{request.path_params["name"]}"',
        "X-Content-Type-Options": "nosniff",
    }
    part = _part(request.headers.get("range", ""), size)
    if part is None:
        blob.close()
        return Response(status_code=416, headers={**_FOR_PAGES, "Content-Range": f"bytes */{size}"})
    first, last, partial = part
    headers["Content-Length"] = str(last - first)
    if partial:
        headers["Content-Range"] = f"bytes {first}-{last - 1}/{size}"
    if request.method == "HEAD":
        blob.close()
        return _HeadResponse(headers, 206 if partial else 200)
    return _BodyResponse(blob, first, last, headers, 206 if partial else 200)


def _part(text: str, size: int) -> tuple[int, int, bool] | None:
    """Return (first byte, byte after the last, True for a part) for the Range header ``text`` of a blob of ``size``
    bytes.

    Return None for a range outside of the blob. Only one range is supported. Other Range headers are ignored, as HTTP
    allows, and the whole blob is sent.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None or (found[2] and int(found[2]) < int(found[1])):
        return 0, size, False
    first, last = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
    return None if first >= size else (first, last, True)


class _HeadResponse(Response):
    """Response with the headers of a blob and no body; Content-Length is the size of the blob."""

    def __init__(self, headers: Mapping[str, str], status: int) -> None:
        super().__init__(b"", status, headers, "application/octet-stream")


class _BodyResponse(Response):
    """Response with the bytes of a blob from ``first`` to before ``last``, sent step by step at the client's speed."""

    def __init__(self, blob: Blob, first: int, last: int, headers: Mapping[str, str], status: int) -> None:
        super().__init__(b"", status, headers, "application/octet-stream")
        self._blob, self._first, self._last = blob, first, last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async with anyio.create_task_group() as group:
                group.start_soon(self._until_gone, receive, group.cancel_scope)
                with suppress(TimeoutError):  # uvicorn closes the connection of an incomplete response
                    await self._send_all(send)
                group.cancel_scope.cancel()
        finally:
            self._blob.close()

    async def _until_gone(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def _send_all(self, send: Send) -> None:
        start = self._first
        while start < self._last:
            piece = await anyio.to_thread.run_sync(self._blob.read, start, min(_STEP, self._last - start))
            if not piece and self._blob.failed:
                return
            if not piece:
                await anyio.sleep(_LOOK_S)
                continue
            start += len(piece)
            with anyio.fail_after(_SEND_S):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _missing() -> Response:
    return Response(status_code=404, headers={**_FOR_PAGES, "Cache-Control": "no-store"})


def _busy() -> Response:
    return Response(status_code=503, headers={**_FOR_PAGES, "Cache-Control": "no-store", "Retry-After": "10"})


_END_S = 5


@dataclass(frozen=True)
class MirrorAddress:
    """Listening address of a mirror; port 0 takes a free port. With a certificate and key (PEM files) it serves HTTPS
    only.
    """

    host: str = "127.0.0.1"
    port: int = 8480
    cert_file: str = ""
    key_file: str = ""


class MirrorServer:
    """HTTP server of a folder of blobs, or of a cache if ``upstream`` is set. It listens as soon as it is constructed.

    Args:
        folder: folder of the blobs.
        place: listening address.
        upstream: mirror to cache; None to serve the folder only.
        log: receives a line for each blob that could not be fetched.

    Raises:
        MirrorError: if the folder, port or certificate cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        place: MirrorAddress = MirrorAddress(),
        *,
        upstream: CacheSettings | None = None,
        log: FailureLog | None = None,
    ) -> None:
        if fault := certificate_fault(place.cert_file, place.key_file, "`cert_file`, `key_file`"):
            raise MirrorError(fault)
        self._cache = None if upstream is None else Cache(folder, upstream, log)
        blobs = self._cache or BlobFolder(folder)
        try:
            self._socket = _listening(place)
        except MirrorError:
            self._release()
            raise
        host, self.port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if place.cert_file else 'http'}://{shown}:{self.port}"
        self._server = WebServer(
            application(blobs),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            timeout_graceful_shutdown=_END_S,
            ssl_certfile=place.cert_file or None,
            ssl_keyfile=place.key_file or None,
        )

    def run(self) -> None:
        """Serve until :meth:`stop` is called or the process gets a signal. Then close the socket and the cache."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._release()

    def stop(self) -> None:
        """Let :meth:`run` return soon. Call it from another thread."""
        self._server.should_exit = True

    def _release(self) -> None:
        if self._cache is not None:
            self._cache.close()


def _listening(place: MirrorAddress) -> socket.socket:
    try:
        return listening(place.host, place.port)
    except (OSError, OverflowError) as error:
        raise MirrorError(
            f"the mirror cannot listen on {place.host}:{place.port} ({getattr(error, 'strerror', '') or error}): stop what "
            "uses that port, or name another one (`port`, `host`)",
            host=place.host,
            port=place.port,
        ) from error
