"""The agent's engine in headless Chromium, run step by step like :class:`edgefl.bench.common.worker.Worker`."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from device_runtime.memory import status_bytes
from edgefl.bench.common.browser import Browser
from edgefl.bench.common.processes import cpu_seconds
from edgefl.web.built import PACKED
from edgefl.wire import tensors

_PAGE = "bench.html"
_RENDERER = "--type=renderer"


def write_safetensors(folder: Path) -> None:
    """The arrays that are there as npz for Python, for the browser."""
    for path in folder.glob("*.npz"):
        with np.load(path) as file:
            path.with_suffix(".safetensors").write_bytes(
                tensors.dump({name: file[name] for name in file.files})
            )


class _Files(SimpleHTTPRequestHandler):
    """The built page, and below /job/ what it runs."""

    def __init__(self, *args: Any, page: Path, job: Path) -> None:
        self._job = job
        self.extensions_map = self.extensions_map | {".wasm": "application/wasm", ".mjs": "text/javascript"}
        super().__init__(*args, directory=str(page))

    def guess_type(self, path: str | os.PathLike[str]) -> str:
        return super().guess_type(str(path).removesuffix(PACKED))

    def end_headers(self) -> None:
        if self.translate_path(self.path).endswith(PACKED):
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")  # threads ask for both
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def translate_path(self, path: str) -> str:
        name = path.removeprefix("/job/")
        if name != path:
            return str(self._job / Path(name).name)
        place = super().translate_path(path)
        return place if Path(place).exists() else place + PACKED

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(page: Path, job: Path) -> Iterator[str]:
    """The URL of both, on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, page=page, job=job))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Chromium:
    """Steps in the page of ``browser``, at ``url``. Memory is resident memory of the process that runs the page."""

    browser: Browser
    url: str
    threads: int = 1
    times: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    load_s: float = 0.0
    idle: int = 0

    def begin(self) -> None:
        """Open the engine, then load the graph."""
        self.browser.open(f"{self.url}/{_PAGE}?threads={self.threads}")
        self.browser.until("globalThis.bench !== undefined")
        self.browser.value("bench.open()")
        self._process = self._renderer()
        self.idle = self._process.memory_info().rss
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        self.load_s = self.browser.value("bench.load('job/')") / 1e3

    def run(self, steps: int, *, count: bool = True) -> list[float]:
        """Milliseconds of each step. Processor time, compiling and collecting garbage included, is a mean of the block."""
        before = cpu_seconds([self._process])
        times: list[float] = json.loads(self.browser.value(f"bench.steps({steps}).then(JSON.stringify)"))
        if count:
            self.times += times
            self.cpu_ms += [1e3 * (cpu_seconds([self._process]) - before) / steps] * steps
        return times

    @property
    def peak(self) -> int:
        """Highest resident memory over idle."""
        return max(0, status_bytes("VmHWM", self._process.pid) - self.idle)

    @property
    def wasm_bytes(self) -> int:
        return int(self.browser.value("bench.bytes()"))

    @property
    def loss(self) -> float:
        """Loss of one more step."""
        return float(self.browser.value("bench.metrics().then(found => String(found['metric.loss']))"))

    def _renderer(self) -> psutil.Process:
        """The process of the page: the renderer that works."""
        own = psutil.Process(self.browser.pid).children(recursive=True)
        renderers = [each for each in own if _RENDERER in " ".join(each.cmdline())]
        return max(renderers, key=lambda each: each.memory_info().rss)
