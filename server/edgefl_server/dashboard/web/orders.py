"""Handler of an operator's orders, which need a token in a header."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgefl.errors import EdgeflError
from edgefl_server import operations
from edgefl_server.operations import AnyOrder

_MOST_BYTES = 4096
_PAUSE_S = 0.5
"""Delay after a wrong token, which makes guessing slow."""


Give = Callable[[AnyOrder, str], None]
"""Forwards an order with its token. Raises OSError or EdgeflError on failure."""


class OrderHandler:
    """Endpoint for orders, which checks the token and forwards the order by ``give``.

    ``token``: token of the operator; "" refuses all orders. ``elsewhere``: the receiver of ``give`` checks the token.
    """

    def __init__(self, give: Give, token: str = "", *, elsewhere: bool = False) -> None:
        self._give = give
        self._token = token.encode()
        self._elsewhere = elsewhere

    @property
    def open(self) -> bool:
        """True if orders are accepted with a token."""
        return bool(self._token) or self._elsewhere

    async def take(self, request: Request) -> Response:
        """Handle the ``POST`` of an order as JSON with ``Authorization: Bearer TOKEN``.

        A page of somebody else cannot make a browser send that header, so no cookie and no form gives orders.
        """
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if not self.open:
            return _said(
                "this page is read-only: start it by `edgefl dashboard --operator-token-file FILE`", 403
            )
        if scheme.lower() != "bearer" or not self._knows(token):
            await asyncio.sleep(_PAUSE_S)
            return _said("the operator's token is missing or wrong", 401)
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _said("an order is JSON, with content type application/json", 415)
        return await self._given(request, token)

    async def _given(self, request: Request, token: str) -> Response:
        """Forward the order of an authorized request."""
        try:
            order = operations.read(await _body(request))
        except ValueError as error:
            return _said(f"this is no order: {error}", 400)
        by = request.client.host if request.client else ""
        order = msgspec.structs.replace(order, by=by, at=time.time())
        try:
            await asyncio.to_thread(self._give, order, token)
        except OSError as error:
            return _said(f"the order cannot be left for the server: {error.strerror or error}", 503)
        except EdgeflError as error:
            return _said(error.message, 502)
        return _said(f"{order.name}: left for the server; the log tells what becomes of it", 202)

    def _knows(self, token: str) -> bool:
        return self._elsewhere or hmac.compare_digest(token.encode(), self._token)


async def _body(request: Request) -> bytes:
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
    return data


def _said(text: str, status: int) -> Response:
    return JSONResponse({"text": text}, status, headers={"Cache-Control": "no-store, max-age=0"})
