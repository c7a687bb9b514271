"""Routes of the dashboard. Reading needs no token; orders need the operator's."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl_server.dashboard.state.fleet import DeviceRound, LogEntry, VitalSample
from edgefl_server.dashboard.views import boards, pages
from edgefl_server.dashboard.views.boards import PageContents
from edgefl_server.dashboard.views.html import Html
from edgefl_server.dashboard.views.metrics import CONTENT_TYPE, exposition
from edgefl_server.dashboard.views.summary import (
    Charts,
    DeviceFilter,
    DeviceRow,
    EvaluationRow,
    FleetSnapshot,
    RoundSummary,
    RunRow,
    TierRow,
    device_row,
    evaluation_rows,
    run_row,
)
from edgefl_server.dashboard.web.hub import Hub
from edgefl_server.dashboard.web.orders import OrderHandler
from edgefl_server.dashboard.web.upstream import feed

# Rows as CSV that a spreadsheet may open: text of devices must not become a formula.

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(kind: type[msgspec.Struct], rows: Iterable[Any]) -> str:
    """Return ``rows`` of the struct ``kind`` as CSV with a header line. Nested values are JSON.

    Texts that a spreadsheet would run as a formula get a leading apostrophe.
    """
    out = io.StringIO()
    names = kind.__struct_fields__
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(names)
    writer.writerows([_cell(getattr(row, name)) for name in names] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return f"'{text}" if text.startswith(_FORMULAS) else text


Listing = tuple[type[msgspec.Struct], Callable[[FleetSnapshot, DeviceFilter], list[Any]]]
"""Struct type of a table's rows, and a function that returns the rows."""

TABLES: dict[str, Listing] = {
    "run": (RunRow, lambda glance, _: [run_row(glance.fleet)]),
    "rounds": (RoundSummary, lambda glance, _: glance.rounds()[::-1]),
    "devices": (
        DeviceRow,
        lambda glance, view: [device_row(glance.fleet, each) for each in view.of(glance.fleet)],
    ),
    "evaluations": (EvaluationRow, lambda glance, _: evaluation_rows(glance.fleet)),
    "tiers": (TierRow, lambda glance, _: glance.tiers),
    "log": (LogEntry, lambda glance, _: list(glance.fleet.log)),
    "vitals": (VitalSample, lambda glance, _: list(glance.fleet.vitals)),
}


# Stream of changes to each open page, once a second at most.

Look = Callable[[FleetSnapshot], PageContents]
"""Function that returns the current contents of a page."""

PAUSE_S = 1.0
_HEARTBEAT_S = 15.0
RETRY_MS = 2000
"""Delay until a browser reconnects if the page's process is gone."""


class PageChanges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes of a page, as sent to its script.

    Attributes:
        html: New contents of elements, by element id.
        rows: New or changed table rows, by element id and row key.
        order: All row keys in order, for each table whose set or order of rows changed.
        charts: New chart data, or None.
    """

    html: dict[str, str] = {}
    rows: dict[str, dict[str, str]] = {}
    order: dict[str, list[str]] = {}
    charts: Charts | None = None


class PageState:
    """Contents that were last sent to one open page.

    ``look`` returns the page's current contents. ``charts`` is True if the page has charts.
    """

    def __init__(self, look: Look, *, charts: bool) -> None:
        self._look = look
        self._charts = charts
        self._sent = PageContents()
        self._tick = 0
        self._vitals = 0
        self._edition = -1

    def news(self, glance: FleetSnapshot) -> PageChanges | None:
        """Return the changes of the page since the last call, and remember them as sent; None without changes."""
        board = self._look(glance)
        html = _find_changed(board.pieces, self._sent.pieces)
        rows = {
            name: _find_changed(each, self._sent.tables.get(name, {})) for name, each in board.tables.items()
        }
        order = {
            name: list(each)
            for name, each in board.tables.items()
            if name not in self._sent.tables or list(each) != list(self._sent.tables[name])
        }
        self._sent = board
        rows = {name: each for name, each in rows.items() if each}
        charts = self._new_charts(glance) if self._charts else None
        if not (html or rows or order or charts):
            return None
        return PageChanges(html=html, rows=rows, order=order, charts=charts)

    def _new_charts(self, glance: FleetSnapshot) -> Charts | None:
        fleet = glance.fleet
        if (fleet.tick, fleet.edition) == (self._tick, self._edition):
            return None
        since = self._tick if fleet.edition == self._edition else 0
        charts = glance.charts(since, self._vitals if since else 0)
        self._tick, self._edition = fleet.tick, fleet.edition
        self._vitals = fleet.vitals[-1].n if fleet.vitals else 0
        return charts


def _find_changed(now: dict[str, Html], before: dict[str, Html]) -> dict[str, str]:
    return {key: str(each) for key, each in now.items() if before.get(key) != each}


async def stream(hub: Hub, look: Look, *, charts: bool) -> AsyncGenerator[bytes]:
    """Yield server-sent events with the changes of one page, about once a second, until the process is about to end.

    Args:
        hub: State of the fleet.
        look: Function that returns the current contents of the page.
        charts: True to include chart data.
    """
    listener = PageState(look, charts=charts)
    yield b"retry: %d\n\n" % RETRY_MS
    quiet = 0.0
    while not hub.ending:
        news = listener.news(hub.glance)
        if news is not None:
            yield b"data: " + msgspec.json.encode(news) + b"\n\n"
            quiet = 0.0
        elif quiet >= _HEARTBEAT_S:
            yield b": still here\n\n"
            quiet = 0.0
        await hub.pause(PAUSE_S)
        quiet += PAUSE_S


# Headers of every answer, and the host names that are answered.

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


class HostMiddleware:
    """Middleware that adds security headers, and answers 421 to requests whose Host header is not in ``hosts`` (None:
    any).

    The check protects a page that is bound to this machine against DNS rebinding: otherwise a website could read the
    fleet through a visitor's browser.
    """

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
    """Return the host name without the port: ``[::1]:8090`` is ``::1``."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


STATIC = Path(__file__).parents[1] / "static"
_MOST_PAGE = 10**6
_RETRY_S = "10"


def application(hub: Hub, handler: OrderHandler, *, hosts: frozenset[str] | None) -> Starlette:
    """Return the web application.

    Args:
        hub: Source of the fleet's state.
        handler: Handler of operators' orders.
        hosts: Accepted values of the Host header; None for any.
    """

    async def overview(request: Request) -> Response:
        view = _view(request)
        board = boards.overview(hub.glance, view)
        return HTMLResponse(pages.overview(hub.fleet, board, view, orders=handler.open))

    async def device(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in hub.fleet.devices:
            return HTMLResponse(pages.missing(f"There is no device {name!r}."), 404)
        return HTMLResponse(pages.device(hub.fleet, name, boards.device(hub.glance, name)))

    async def round_(request: Request) -> Response:
        number = _number(request.path_params["number"])
        if number not in hub.fleet.rounds:
            return HTMLResponse(pages.missing("There is no such round."), 404)
        return HTMLResponse(pages.round_(hub.fleet, number, boards.round_(hub.glance, number)))

    async def live(request: Request) -> Response:
        asked = request.query_params
        look: Look = partial(boards.overview, view=_view(request))
        if "device" in asked:
            look = partial(boards.device, name=asked["device"])
        elif "round" in asked:
            look = partial(boards.round_, number=_number(asked["round"]))
        charts = not {"device", "round"} & set(asked)
        return _events(hub, stream(hub, look, charts=charts))

    async def listing(request: Request) -> Response:
        found = TABLES.get(request.path_params["table"])
        if found is None:
            return _no_table(request)
        kind, rows = found
        return _table_response(request, kind, rows(hub.glance, _view(request)))

    async def of_device(request: Request) -> Response:
        found = hub.fleet.devices.get(request.path_params["name"])
        if found is None:
            return _no_table(request)
        if request.path_params["what"] == "log":
            return _table_response(request, LogEntry, found.log)
        return _table_response(request, DeviceRound, [found.parts[number] for number in sorted(found.parts)])

    async def of_round(request: Request) -> Response:
        found = hub.fleet.rounds.get(_number(request.path_params["number"]))
        if found is None:
            return _no_table(request)
        return _table_response(request, DeviceRound, [found.parts[name] for name in sorted(found.parts)])

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
        Route("/rounds/{number}", round_),
        Route("/live", live),
        Route("/feed", whole),
        Route("/api/orders", handler.take, methods=["POST"]),
        Route("/api/rounds/{number}.{format}", of_round),
        Route("/api/devices/{name}/{what}.{format}", of_device),
        Route("/api/{table}.{format}", listing),
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(
        routes=routes, middleware=[Middleware(HostMiddleware, hosts=hosts)], lifespan=hub.running
    )


def _events(hub: Hub, events: AsyncGenerator[bytes]) -> Response:
    if hub.full:
        return PlainTextResponse(
            "too many pages are open: close some\n", 503, headers={"Retry-After": _RETRY_S}
        )
    return StreamingResponse(
        hub.counted(events), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
    )


def _table_response(request: Request, kind: type[msgspec.Struct], rows: Sequence[msgspec.Struct]) -> Response:
    match request.path_params["format"]:
        case "csv":
            return Response(csv_text(kind, rows), media_type="text/csv; charset=utf-8")
        case "json":
            return Response(msgspec.json.encode(rows), media_type="application/json")
    return _no_table(request)


def _no_table(request: Request) -> Response:
    return PlainTextResponse(f"there is no {request.url.path}\n", 404)


def _view(request: Request) -> DeviceFilter:
    asked = request.query_params
    page = min(_MOST_PAGE, max(1, _number(asked.get("page", "1"))))
    return DeviceFilter(
        q=asked.get("q", ""), tier=asked.get("tier", ""), state=asked.get("state", ""), page=page
    )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
