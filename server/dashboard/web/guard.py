"""What every answer carries, and by which names the page may be asked for."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
