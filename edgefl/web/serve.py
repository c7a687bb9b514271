"""Web server of the page: its files are public; its API requires the secret in the scanned address."""

from __future__ import annotations

import hmac
import os
import sys
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

from edgefl.config import Federation, load
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, EdgeflError
from edgefl.setup.data import open_data
from edgefl.system.listener import WebServer, certificate_fault
from edgefl.web.offer import WebOffer, offer_of, sample_of, write_samples
from edgefl.web.page import PACKED, WebSettings, as_svg, built_page
from edgefl.web.relay import BrowserRelay
from edgefl.wire.mqtt.address import Address
from edgefl_server.dashboard.web.serve import bind

# What the page's server answers. Its files are everybody's; all else is for who has the secret of the scanned address.

_MOST_NAME = 64
_REFUSED = 1008


def application(
    offer: WebOffer, *, secret: str, url: str, static: Path, samples: Path, relay: BrowserRelay | None
) -> Starlette:
    """Return the ASGI application of the page.

    Args:
        offer: facts about the federation, for browsers.
        secret: secret in the scanned address.
        url: the scanned address.
        static: folder of the page's files.
        samples: folder of the sample files.
        relay: relay to the broker; None if browsers connect to the broker directly.
    """

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
        Mount("/", _PageFiles(directory=static, html=True)),
    ]
    connects = [place for place in (offer.broker, *offer.mirrors) if place]
    return Starlette(routes=routes, middleware=[Middleware(_Headers, connects=connects)])


def _unknown() -> Response:
    return PlainTextResponse("scan the code in the terminal: its address holds what lets you in\n", 403)


class _PageFiles(StaticFiles):
    """Files of the page. Large ones are stored compressed, with a suffix after the requested name."""

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
    """Middleware that adds security headers to all responses.

    The page may load files from its own origin only and connect only to it and to ``connects`` (URLs). It is isolated
    from other origins, which threads of WebAssembly need.
    """

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
                    )  # browsers ask again, mostly for "not modified"
            await send(message)

        await self._app(scope, receive, answered)

    def _of(self, host: str, scheme: str) -> dict[str, str]:
        """Return the headers, by name, for a response to a request with this ``host`` and ``scheme``."""
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
    """Return True if a Host header has no characters that would end a directive of the security policy."""
    return bool(text) and all(letter.isalnum() or letter in ".-:[]" for letter in text)


def _origin(url: str) -> str:
    """Return ``wss://host:port`` of a URL."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"


_END_S = 3
_MOST_MESSAGE = 1 << 22
"""Bytes of a WebSocket message: a chunk of an update is 128 KiB."""


def serve(settings: WebSettings) -> None:
    """Serve the page until SIGTERM or SIGINT.

    Args:
        settings: the page's settings.

    Raises:
        ConfigError: if the page is not built, or a setting cannot be used.
    """
    static = built_page()
    check_certificate(settings.cert_file, settings.key_file)
    folder = Path(settings.folder)
    federation = load(folder / "federation.toml")
    relay = BrowserRelay(Address.parse(settings.relay)) if settings.relay else None
    dataset = _data(federation)
    samples = folder / "samples"
    rows = write_samples(samples, dataset, federation.federation.seed) if dataset is not None else 0
    keys = (settings.server_key,) if settings.server_key else ()
    offer = offer_of(
        federation, dataset, rows, broker=settings.broker, login=settings.login, server_keys=keys
    )
    served = application(
        offer, secret=settings.secret, url=settings.address, static=static, samples=samples, relay=relay
    )
    server = WebServer(
        served,
        timeout_graceful_shutdown=_END_S,
        ws_max_size=_MOST_MESSAGE,
        ws_per_message_deflate=False,  # weights are coded, and updates too
        ssl_certfile=settings.cert_file or None,
        ssl_keyfile=settings.key_file or None,
    )
    server.run(sockets=[bind(settings.host, settings.port)])


def _data(federation: Federation) -> Dataset | None:
    """Return the dataset for sample files. Return None if it cannot be opened here, and write the reason to standard
    error.
    """
    try:
        return open_data(federation)
    except EdgeflError as error:
        sys.stderr.write(f"no sample for browsers: {error.message}\n")
        return None


def check_certificate(cert_file: str, key_file: str) -> None:
    """Check a certificate and its key.

    Args:
        cert_file: certificate (PEM), or empty.
        key_file: private key (PEM), or empty.

    Raises:
        ConfigError: if one of them is missing, or they cannot be used.
    """
    if fault := certificate_fault(cert_file, key_file, "`web_cert_file`, `web_key_file`"):
        raise ConfigError(fault)
