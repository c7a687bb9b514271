"""A server process that is killed and started again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.server.forked import FORKED
from tests.server.killed import kill_me

Serve = Callable[[Connection, int, str, Path], None]


class Victim:
    """The server process; its events come one by one."""

    def __init__(self, port: int, federation: str, out: Path, *, serve: Serve = kill_me.serve) -> None:
        self._serve = serve
        self._arguments = port, federation, out
        self.out = out
        self.start()

    def start(self) -> None:
        self._events, events = FORKED.Pipe(duplex=False)
        self.process = FORKED.Process(target=self._serve, args=(events, *self._arguments))
        self.process.start()
        events.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """Until the process has ended."""
        while True:
            try:
                yield json.loads(self._events.recv_bytes())
            except (EOFError, OSError):
                return

    def kill_at(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """SIGKILL as soon as an event fits, then start again."""
        assert any(condition(event) for event in self.events()), "the server ended before"
        self.kill()
        self.start()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def finish(self) -> tuple[list[dict[str, Any]], bytes]:
        """The rounds that it told of since it was started last, and the trained model."""
        closed = [event for event in self.events() if event["event"] == "roundclosed"]
        self.process.join(300)
        assert self.process.exitcode == 0
        return closed, (self.out / "model.safetensors").read_bytes()
