"""Process that workers are forked from. It has imported everything and computed nothing.

So a worker starts in milliseconds, and torch's threads and gradients work there as in a new process.

``python -m edgefl.simulator.trainers.template SOCKET``: each descriptor received through the socket is the connection of a
new worker. The process ends with the socket, and a worker with its connection.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from queue import SimpleQueue

import numpy as np
import torch

from edgefl.simulator.trainers.processes import SharedReference, mapped
from edgefl.simulator.trainers.worker import Method, TrainingWorker
from edgefl_export.decompositions import first_table
from edgefl_server.aggregate.aggregator import Aggregator, layout_of

Asked = tuple[Method, tuple[object, ...]]


def main(descriptor: int) -> None:
    """Fork workers until the socket closes."""
    torch.set_num_threads(1)
    os.dup2(2, 1)  # what a user's model prints is no line of the command's
    _load_the_rest()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as own:
        while True:
            message, found, _, _ = socket.recv_fds(own, 1, 1)
            if not message:
                os._exit(0)
            if os.fork() == 0:
                own.close()
                _work(Connection(found[0]))
            os.close(found[0])


def _load_the_rest() -> None:
    """Import lazily loaded modules and compiled code now: they take as long as torch itself."""
    first_table()
    with torch.no_grad():
        torch.nn.Linear(1, 1, device="meta")(torch.zeros(1, 1, device="meta"))
    weights = {"any": np.zeros(1, np.float32)}
    aggregator = Aggregator(layout_of(weights), weight_limit=1, device="cpu", threads=1)
    aggregator.add(aggregator.check(weights, {"any": None}), 1)
    aggregator.partial()


def _work(connection: Connection) -> None:
    """Answer the calls in order."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked: SimpleQueue[Asked] = SimpleQueue()
    # A thread reads, so that the sender never waits for a portion, and the worker ends with the connection.
    threading.Thread(target=_read, args=(connection, asked), daemon=True).start()
    worker = TrainingWorker()
    try:
        while True:
            method, given = asked.get()
            connection.send(worker.answer(method, *given))
    except OSError:
        os._exit(0)


def _read(connection: Connection, asked: SimpleQueue[Asked]) -> None:
    try:
        while True:
            method, given = connection.recv()
            whole = (
                mapped(recv_handle(connection)) if isinstance(each, SharedReference) else each
                for each in given
            )
            asked.put((method, tuple(whole)))
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
