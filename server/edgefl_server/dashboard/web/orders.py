"""Handler of an operator's orders, which need a token in a header."""

from __future__ import annotations

import asyncio
import hmac
import time

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgefl.errors import EdgeflError
from edgefl_server import operations
from edgefl_server.dashboard.web.upstream import RemoteMailbox
from edgefl_server.operations import AnyOrder, Mailbox

_MOST_BYTES = 4096
_PAUSE_S = 0.5
"""Delay after a wrong token, which makes guessing slow."""


class OrderHandler:
    """Endpoint for operators' orders: checks the token and writes the order to ``target``, the server's mailbox.

    ``token`` is the operator's. If it is empty, all orders are refused, except with a remote mailbox, which checks
    tokens itself.
    """

    def __init__(self, target: Mailbox | RemoteMailbox, token: str = "") -> None:
        self._mailbox = target
        self._token = token.encode()
        self._is_remote = isinstance(target, RemoteMailbox)

    @property
    def open(self) -> bool:
        """True if orders with a valid token are accepted."""
        return bool(self._token) or self._is_remote

    async def take(self, request: Request) -> Response:
        """Handle a ``POST`` of an order as JSON with ``Authorization: Bearer TOKEN``, and return the response.

        Its status is 202 if the order was written, 401 or 403 without a valid token, and 400 or 415 for an invalid
        order. It is 502 or 503 if the order could not be written. A foreign web page cannot make a browser send that
        header, so orders cannot be forged by cookies or forms.
        """
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if not self.open:
            return _answer(
                "this page is read-only: start it by `edgefl dashboard --operator-token-file FILE`", 403
            )
        if scheme.lower() != "bearer" or not self._is_valid(token):
            await asyncio.sleep(_PAUSE_S)
            return _answer("the operator's token is missing or wrong", 401)
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _answer("an order is JSON, with content type application/json", 415)
        return await self._forward(request, token)

    async def _forward(self, request: Request, token: str) -> Response:
        """Decode the order of an authorized request, send it to the mailbox, and return the response."""
        try:
            order = operations.read(await _body(request))
        except ValueError as error:
            return _answer(f"this is no order: {error}", 400)
        by = request.client.host if request.client else ""
        order = msgspec.structs.replace(order, by=by, at=time.time())
        try:
            await asyncio.to_thread(self._send, order, token)
        except OSError as error:
            return _answer(f"the order cannot be left for the server: {error.strerror or error}", 503)
        except EdgeflError as error:
            return _answer(error.message, 502)
        return _answer(f"{order.name}: left for the server; its log has the result", 202)

    def _send(self, order: AnyOrder, token: str) -> None:
        if isinstance(self._mailbox, RemoteMailbox):
            self._mailbox.send(order, token)
        else:
            self._mailbox.send(order)

    def _is_valid(self, token: str) -> bool:
        return self._is_remote or hmac.compare_digest(token.encode(), self._token)


async def _body(request: Request) -> bytes:
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
    return data


def _answer(text: str, status: int) -> Response:
    return JSONResponse({"text": text}, status, headers={"Cache-Control": "no-store, max-age=0"})
