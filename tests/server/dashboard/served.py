"""The fleet's page as the process that it is, and what it answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.http import Answer, ask

TOKEN = "0123456789abcdef-operator"


@dataclass
class PageProcess:
    """``edgefl dashboard`` with these arguments, at a free port of this machine. Ready when the block begins."""

    arguments: list[str]
    token: str = ""
    url: str = field(default="", init=False)

    @classmethod
    def of(cls, folder: Path, token: str = "") -> PageProcess:
        return cls([str(folder)], token)

    def __enter__(self) -> PageProcess:
        command = [sys.executable, "-m", "edgefl", "dashboard", *self.arguments, "--listen", "0", "--json"]
        environment = {**os.environ, "EDGEFL_OPERATOR_TOKEN": self.token}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the page ended with {self.process.wait(300)}"
        self.url = json.loads(line)["url"]
        while self.get("/readyz").status != 200:
            pass
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(300)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers)

    def order(self, content: object, token: str = TOKEN, **headers: str) -> Answer:
        own = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        return self.ask("POST", "/api/orders", own | headers, json.dumps(content).encode())

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> Answer:
        return ask(self.url, method, path, headers, body)
