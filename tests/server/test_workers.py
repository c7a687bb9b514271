"""Workers as processes: their last message, also where one of theirs cannot be read."""

from __future__ import annotations

import gc
import queue
import threading
from typing import Any

import psutil
import pytest

from edgefl_server.workers.process import ProcessLauncher
from edgefl_server.workers.protocol import Died

PATIENT_S = 60.0


def fail() -> None:
    raise ModuleNotFoundError("a module that only the worker has")


class Unreadable:
    def __reduce__(self) -> Any:
        return fail, ()


class SendingLoop:
    """Worker that sends a message and waits."""

    stop_s = 0.0

    def __init__(self, sink: Any, message: object) -> None:
        self._sink = sink
        self._message = message
        self._stopped = threading.Event()

    def send(self, command: object) -> None:
        self._stopped.set()

    def run(self) -> None:
        self._sink.put(self._message)
        self._stopped.wait()


class SendingSettings:
    def __init__(self, message: object) -> None:
        self._message = message

    def build(self, sink: Any) -> SendingLoop:
        return SendingLoop(sink, self._message if self._message != "unreadable" else Unreadable())


@pytest.mark.parametrize(
    ("message", "reason"),
    # A worker whose pipe is closed may end by itself before the signal arrives.
    [("unreadable", ("sent a message that cannot be read",)), ("hello", ("was killed by", "ended with"))],
)
def test_every_worker_ends_with_one_message_and_no_open_file(message: str, reason: tuple[str, ...]) -> None:
    sink: queue.SimpleQueue[Any] = queue.SimpleQueue()
    gc.disable()  # collection would close them, too
    try:
        before = psutil.Process().num_fds()
        handle = ProcessLauncher().launch(SendingSettings(message), sink)
        if message == "hello":
            assert sink.get(timeout=PATIENT_S) == message
            handle.kill()
        died = sink.get(timeout=PATIENT_S)

        assert isinstance(died, Died) and died.reason.startswith(reason)
        assert psutil.Process().num_fds() == before
        handle.send("too late")
        handle.kill()
    finally:
        gc.enable()
