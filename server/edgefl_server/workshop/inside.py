"""The process of a workshop, from its inside: it answers words until its server is gone."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from edgefl.system.parent import end_with_input
from edgefl_server.workshop.line import Line, LineEnded
from edgefl_server.workshop.messages import Done, Failed, Told, portable

if TYPE_CHECKING:
    from edgefl_server.events import Event
    from edgefl_server.workshop.bench import Answer
    from edgefl_server.workshop.messages import Word

_Tell = Callable[[Told], None]


def main(first: int, beside: int) -> None:
    """Answer what comes on these two sockets."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # whoever stops the server means the server, which ends this process
        signal.signal(number, signal.SIG_IGN)
    end_with_input()
    os.dup2(2, 1)  # what a user's model prints is no line of the server's
    answer = _answerer()
    other = threading.Thread(target=_serve, args=(Line(socket.socket(fileno=beside)), answer), daemon=True)
    other.start()
    _serve(Line(socket.socket(fileno=first)), answer)
    os._exit(0)  # an evaluation that nobody waits for


def _answerer() -> Callable[[Word, Callable[[Event], None]], Answer]:
    """What answers words; where it cannot be loaded, each of them with the reason."""
    try:
        from edgefl.setup.torch_start import without_dynamo

        without_dynamo()
        from edgefl_server.workshop.bench import Bench
    except Exception as error:
        failed = error

        def refuse(word: Word, tell: Callable[[Event], None]) -> Answer:
            raise failed

        return refuse
    return Bench().answer


def _serve(line: Line, answer: Callable[[Word, Callable[[Event], None]], Answer]) -> None:
    try:
        while True:
            word: Word = line.receive()
            try:
                value, names = answer(word, lambda event: line.send(Told(event)))
                _send(line, Done(value), names)
            except LineEnded:
                raise
            except Exception as error:  # the server's to judge
                _send(line, Failed(portable(error)))
            del word
    except LineEnded:
        return


def _send(line: Line, said: Done | Failed, names: Mapping[int, object] | None = None) -> None:
    line.send(said, names)
