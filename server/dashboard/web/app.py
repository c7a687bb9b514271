"""What the page serves. Whoever reaches it may read; orders need the operator's token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.dashboard.shown import api, boards, pages
from server.dashboard.shown.api import Listing, csv_text
from server.dashboard.shown.boards import Look
from server.dashboard.shown.metrics import CONTENT_TYPE, exposition
from server.dashboard.shown.rows import View
from server.dashboard.web.desk import Desk
from server.dashboard.web.hub import Hub
from server.dashboard.web.live import stream
from server.dashboard.web.upstream import feed

# What every answer carries, and by which names the page may be asked for.

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """``hosts``: the names in a request's Host header that are answered. A page that is bound to this machine alone knows
    its own: else a website could make its name lead here and read the fleet through a visitor's browser."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if not scope["path"].startswith("/static/"):
                    headers.setdefault("Cache-Control", "no-store, max-age=0")
            await send(message)

        name = _name(Headers(scope=scope).get("host", ""))
        if self._hosts is not None and name not in self._hosts:
            answer = PlainTextResponse(f"this page is not {name!r}: ask for it by its address\n", 421)
            await answer(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)


def _name(host: str) -> str:
    """Without the port: ``[::1]:8090`` is ``::1``."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


STATIC = Path(__file__).parents[1] / "static"
_MOST_PAGE = 10**6
_RETRY_S = "10"

Answer = Callable[[Request], Awaitable[Response]]


def application(hub: Hub, desk: Desk, *, hosts: frozenset[str] | None) -> Starlette:
    """The page of ``hub``; orders go to ``desk``. ``hosts``: names by which it may be asked for; None for any."""

    async def overview(request: Request) -> Response:
        view = _view(request)
        board = boards.overview(view)(hub.glance)
        return HTMLResponse(pages.overview(hub.fleet, board, view, orders=desk.open))

    async def device(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in hub.fleet.devices:
            return HTMLResponse(pages.missing(f"There is no device {name!r}."), 404)
        return HTMLResponse(pages.device(hub.fleet, name, boards.device(name)(hub.glance)))

    async def round_(request: Request) -> Response:
        number = request.path_params["number"]
        if number not in hub.fleet.rounds:
            return HTMLResponse(pages.missing(f"There is no round {number}."), 404)
        return HTMLResponse(pages.round_(hub.fleet, number, boards.round_(number)(hub.glance)))

    async def live(request: Request) -> Response:
        asked = request.query_params
        look: Look = boards.overview(_view(request))
        if "device" in asked:
            look = boards.device(asked["device"])
        elif "round" in asked:
            look = boards.round_(_number(asked["round"]))
        charts = not {"device", "round"} & set(asked)
        return _events(hub, stream(hub, look, charts=charts))

    async def listing(request: Request) -> Response:
        found = api.TABLES.get(request.path_params["table"])
        return _listed(request, found) if found else _no_table(request)

    async def of_device(request: Request) -> Response:
        name = request.path_params["name"]
        kind = api.log_of(name) if request.path_params["what"] == "log" else api.of_device(name)
        return _listed(request, kind) if name in hub.fleet.devices else _no_table(request)

    async def of_round(request: Request) -> Response:
        number = request.path_params["number"]
        return _listed(request, api.of_round(number)) if number in hub.fleet.rounds else _no_table(request)

    def _listed(request: Request, listing: Listing) -> Response:
        found = listing.of(hub.glance, _view(request))
        if request.path_params["format"] not in ("csv", "json"):
            return _no_table(request)
        if request.path_params["format"] == "csv":
            return Response(csv_text(listing.kind, found), media_type="text/csv; charset=utf-8")
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def metrics(_: Request) -> Response:
        return Response(exposition(hub.glance), media_type=CONTENT_TYPE)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        return PlainTextResponse("ready\n" if hub.ready else "reading\n", 200 if hub.ready else 503)

    async def whole(_: Request) -> Response:
        return _events(hub, feed(hub))

    routes = [
        Route("/", overview),
        Route("/devices/{name}", device),
        Route("/rounds/{number:int}", round_),
        Route("/live", live),
        Route("/feed", whole),
        Route("/api/orders", desk.take, methods=["POST"]),
        Route("/api/rounds/{number:int}.{format}", of_round),
        Route("/api/devices/{name}/{what}.{format}", of_device),
        Route("/api/{table}.{format}", listing),
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, hosts=hosts)], lifespan=hub.running)


def _events(hub: Hub, events: AsyncGenerator[bytes]) -> Response:
    if hub.full:
        return PlainTextResponse(
            "too many pages are open: close some\n", 503, headers={"Retry-After": _RETRY_S}
        )
    return StreamingResponse(
        hub.counted(events), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
    )


def _no_table(request: Request) -> Response:
    return PlainTextResponse(f"there is no {request.url.path}\n", 404)


def _view(request: Request) -> View:
    asked = request.query_params
    page = min(_MOST_PAGE, max(1, _number(asked.get("page", "1"))))
    return View(q=asked.get("q", ""), tier=asked.get("tier", ""), state=asked.get("state", ""), page=page)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0
