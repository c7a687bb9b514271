"""A web server with few descriptors as a process: ``python -m tests.system.listening DESCRIPTORS BROKER_PORT [CERT KEY]``.

It prints its port. ``/`` answers ``here``, ``/large`` with 64 MiB in pieces, ``/whole`` with 4 MiB in one; ``/never`` does
not answer; ``/mqtt`` leads to the broker.
"""

from __future__ import annotations

import resource
import socket
import sys
from itertools import repeat

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute

from edgefl.system.listener import WebServer
from edgefl.web.relay import BrowserRelay
from edgefl.wire.mqtt.address import Address


async def here(request: Request) -> Response:
    """Answer once the body is whole."""
    await request.body()
    return PlainTextResponse("here")


async def large(_request: Request) -> Response:
    """Answer with more than the system's buffers hold."""
    return StreamingResponse(repeat(bytes(1 << 20), 64))


async def never(request: Request) -> Response:
    """Answer when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return Response()


async def whole(_request: Request) -> Response:
    """Answer with more than the buffers of a connection hold."""
    return Response(bytes(1 << 22))


def main() -> None:
    descriptors, broker, *certificate = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), int(descriptors)))
    relay = BrowserRelay(Address("127.0.0.1", int(broker)))
    app = Starlette(
        routes=[
            Route("/", here, methods=["GET", "POST"]),
            Route("/large", large),
            Route("/whole", whole),
            Route("/never", never),
            WebSocketRoute("/mqtt", relay.serve),
        ]
    )
    options = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate, strict=False))
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    WebServer(app, timeout_graceful_shutdown=1, **options).run(sockets=[listening])


if __name__ == "__main__":
    main()
