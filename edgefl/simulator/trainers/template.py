"""Template process from which workers are forked. It has imported all modules and computed nothing.

So a worker starts in milliseconds, and torch's threads and autograd work as in a new process.

``python -m edgefl.simulator.trainers.template SOCKET``: each descriptor received through the socket is the pipe of a
new worker. The process ends with the socket, and a worker with its pipe.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback

import numpy as np
import torch

from edgefl.errors import not_on_windows
from edgefl.simulator.trainers import worker
from edgefl_export.decompositions import first_table
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from edgefl_server.workers.process import serve

assert worker  # all that a worker imports


def main(descriptor: int) -> None:
    """Fork a worker for each descriptor that arrives on socket ``descriptor``. Exit the process when the socket closes."""
    if sys.platform == "win32":
        raise not_on_windows("a template of workers")
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
                _work(found[0])
            os.close(found[0])


def _load_the_rest() -> None:
    """Import modules that are loaded lazily, and run compiled code once. Each worker would otherwise need as long for
    that as for importing torch.
    """
    first_table()
    with torch.no_grad():
        torch.nn.Linear(1, 1, device="meta")(torch.zeros(1, 1, device="meta"))
    weights = {"any": np.zeros(1, np.float32)}
    aggregator = Aggregator(layout_of(weights), weight_limit=1, device="cpu", threads=1)
    aggregator.add(aggregator.check(weights, {"any": None}), 1)
    aggregator.partial()


def _work(descriptor: int) -> None:
    if sys.platform != "win32":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        serve(descriptor)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
