"""Entry point of the torch process, which answers requests until its server ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgefl.system.processes import end_with_input
from edgefl_server.torch_process.connection import ConnectionEnded, PickleConnection
from edgefl_server.torch_process.messages import Done, EventMessage, Failed, portable

if TYPE_CHECKING:
    from edgefl_server.events import Event, EventListener
    from edgefl_server.torch_process.messages import WorkRequest
    from edgefl_server.torch_process.worker import Answer


def main(first: int, beside: int) -> None:
    """Answer the server's requests until it ends, then exit this process.

    ``first`` and ``beside`` are the file descriptors of the two sockets, whose requests are answered at the same time.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the server, which ends this process
        signal.signal(number, signal.SIG_IGN)
    end_with_input()
    os.dup2(2, 1)  # the output of a user's model must not mix with the server's
    answer = _answerer()
    other = threading.Thread(
        target=_serve, args=(PickleConnection(socket.socket(fileno=beside)), answer), daemon=True
    )
    other.start()
    _serve(PickleConnection(socket.socket(fileno=first)), answer)
    os._exit(0)  # stops an evaluation whose answer is no longer needed


@dataclass(frozen=True)
class _ServerListener:
    """Listener that sends events to the server."""

    connection: PickleConnection

    def emit(self, event: Event) -> None:
        self.connection.send(EventMessage(event))


def _answerer() -> Callable[[WorkRequest, EventListener], Answer]:
    """Return the function that answers requests: (request, listener of events) to (result, placeholders in it).

    If its module cannot be imported, the function raises that error each time.
    """
    try:
        from edgefl.setup.torch_start import without_dynamo

        without_dynamo()
        from edgefl_server.torch_process.worker import ModelWorker
    except Exception as error:
        failed = error

        def refuse(request: WorkRequest, listener: EventListener) -> Answer:
            raise failed

        return refuse
    return ModelWorker().answer


def _serve(connection: PickleConnection, answer: Callable[[WorkRequest, EventListener], Answer]) -> None:
    listener = _ServerListener(connection)
    try:
        while True:
            request: WorkRequest = connection.receive()
            try:
                value, names = answer(request, listener)
                _send(connection, Done(value), names)
            except ConnectionEnded:
                raise
            except Exception as error:  # the server handles it
                _send(connection, Failed(portable(error)))
            del request
    except ConnectionEnded:
        return


def _send(
    connection: PickleConnection, message: Done | Failed, names: Mapping[int, object] | None = None
) -> None:
    connection.send(message, names)
