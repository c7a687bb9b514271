"""What the page's server answers. Its files are everybody's; all else is for who has the secret of the scanned address."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from edgefl.web.built import PACKED
from edgefl.web.code import as_svg
from edgefl.web.offer import Offer
from edgefl.web.relay import Relay
from edgefl.web.samples import sample_of

_MOST_NAME = 64
_REFUSED = 1008


def application(
    offer: Offer, *, secret: str, url: str, static: Path, samples: Path, relay: Relay | None
) -> Starlette:
    """The page in ``static`` at ``url`` (as people scan it), for browsers that join what is on ``offer``."""

    def known(request: HTTPConnection) -> bool:
        return hmac.compare_digest(request.query_params.get("join", "").encode(), secret.encode())

    async def offered(request: Request) -> Response:
        if not known(request):
            return _unknown()
        return Response(msgspec.json.encode(offer), media_type="application/json")

    async def sample(request: Request) -> Response:
        device = request.query_params.get("device", "")
        if not known(request):
            return _unknown()
        if not offer.samples or not device or len(device) > _MOST_NAME:
            return PlainTextResponse("there is no sample here: bring data of your own\n", 404)
        data = await anyio.to_thread.run_sync(sample_of(samples, device).read_bytes)
        return Response(data, media_type="application/octet-stream")

    async def code(request: Request) -> Response:
        return Response(as_svg(url), media_type="image/svg+xml") if known(request) else _unknown()

    async def mqtt(browser: WebSocket) -> None:
        if relay is None or not known(browser):
            await browser.close(_REFUSED)
        else:
            await relay.serve(browser)

    routes = [
        Route("/api/offer", offered),
        Route("/api/sample.npz", sample),
        Route("/api/code.svg", code),
        WebSocketRoute("/mqtt", mqtt),
        Mount("/", _Files(directory=static, html=True)),
    ]
    connects = [place for place in (offer.broker, *offer.mirrors) if place]
    return Starlette(routes=routes, middleware=[Middleware(_Headers, connects=connects)])


def _unknown() -> Response:
    return PlainTextResponse("scan the code in the terminal: its address holds what lets you in\n", 403)


class _Files(StaticFiles):
    """The page's files. Large ones lie there as browsers get them: packed, beside the name that is asked for."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        place, found = super().lookup_path(path)
        return (place, found) if found else super().lookup_path(path + PACKED)

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        if str(full_path).endswith(PACKED):
            response.headers["Content-Encoding"] = "gzip"
        return response


class _Headers:
    """Of every answer: the page loads nothing from elsewhere, speaks to nobody but ``connects``, and is isolated from other
    origins, which threads of WebAssembly ask for."""

    def __init__(self, app: ASGIApp, connects: list[str]) -> None:
        self._app = app
        self._connects = connects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = self._of(Headers(scope=scope).get("host", ""), scope["scheme"])

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                own.update(headers)
                if scope["path"].startswith("/api/"):
                    own["Cache-Control"] = "no-store"
                else:
                    own.setdefault(
                        "Cache-Control", "no-cache"
                    )  # asked for anew, and mostly answered "not modified"
            await send(message)

        await self._app(scope, receive, answered)

    def _of(self, host: str, scheme: str) -> dict[str, str]:
        sockets = f"{'wss' if scheme == 'https' else 'ws'}://{host}" if _is_host(host) else ""
        connects = " ".join(filter(None, ["'self'", sockets, *map(_origin, self._connects)]))
        return {
            "Content-Security-Policy": (
                "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self'; "
                f"img-src 'self' blob:; connect-src {connects}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Embedder-Policy": "require-corp",
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }


def _is_host(text: str) -> bool:
    """Whether a Host header is one, and nothing that would end a directive of the policy."""
    return bool(text) and all(letter.isalnum() or letter in ".-:[]" for letter in text)


def _origin(url: str) -> str:
    """``wss://host:port`` of a URL."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"
