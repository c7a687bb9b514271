"""One training step in Chromium beside Python's agent, which runs the same graph natively on one thread, by turns."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from benchmarks.common.browser import Browser
from benchmarks.common.device_graph import worker, written
from benchmarks.common.machine import cpu_seconds, processor, take_turns
from benchmarks.train_step.model import built
from benchmarks.train_step.rows import SGD
from edgefl import algorithms
from edgefl.errors import ConfigError
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import tiers
from edgefl.system.memory import status_bytes
from edgefl.web.page import PACKED, built_page
from edgefl.wire import tensors
from edgefl_export.bundle.formats import format_of

MODELS = ("resnet20", "cnn")
WARM_UP = 8
"""Steps before any counts: a browser compiles WebAssembly twice, the second time while it runs."""


class WebRow(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds a step, medians and minima, in the browser and natively; ``ratio`` is that of the minima, which other
    work on the machine changes least. ``threads`` are the browser's. ``cpu_ms`` is processor time, medians of blocks, of all
    threads of the page's process.

    Memory is the peak of resident memory over the same process with its engine open and nothing loaded; ``wasm_bytes`` is
    WebAssembly's own part of it. ``load_s``: until the graph can be run.
    """

    model: str
    tier: str
    batch: int
    threads: int
    ms: float
    native_ms: float
    ms_min: float
    native_ms_min: float
    ratio: float
    cpu_ms: float
    native_cpu_ms: float
    steps: int
    load_s: float
    native_load_s: float
    peak_over_idle_bytes: int
    native_peak_over_idle_bytes: int
    idle_bytes: int
    native_idle_bytes: int
    wasm_bytes: int
    loss: float
    artifact_bytes: int
    cpu: str
    browser: str


def cases(models: tuple[str, ...], chosen: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """(model, tier) for each of the models' own tiers, or those that are ``chosen``, weak to strong."""
    found = [
        (model, tier)
        for model in models
        for tier in reversed(list(tiers(model)))
        if not chosen or tier in chosen
    ]
    if not found:
        raise ConfigError(
            f"no model of {', '.join(models)} has a tier {', '.join(chosen)}; there are: "
            + ", ".join(dict.fromkeys(tier for model in models for tier in tiers(model)))
        )
    return found


def measure(
    model: str,
    tier: str,
    *,
    batch: int = 32,
    threads: int = 1,
    repeat: int = 5,
    say: Callable[[str], None] = lambda _: None,
) -> WebRow:
    """Export one tier's step and run it on both sides, natively on one thread. ConfigError where the page is not built or
    there is no Chromium."""
    page = built_page()
    submodel = built(model, {}, tier)
    algorithm = algorithms.build("sgd", Objective.of(submodel), batch=batch, **SGD)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-web-") as name:
        folder = Path(name)
        say(f"{model}, {tier}: exporting")
        weights = {f"weights.{name}": value.detach() for name, value in submodel.suffix.state_dict().items()}
        step, form = algorithm.phases[0].function, format_of("onnx")
        artifact = written(folder, form, step, algorithm.start(weights), algorithm.hyper)
        write_safetensors(folder)
        with served(page, folder) as url, worker(folder, 1) as native, Browser() as browser:
            chromium = Chromium(browser, url, threads)
            chromium.begin()
            take_turns((native, chromium), repeat, lambda text: say(f"{model}, {tier}: {text}"), WARM_UP)
            return WebRow(
                model=model,
                tier=tier,
                batch=batch,
                threads=threads,
                ms=_median(chromium.times),
                native_ms=native.median_ms,
                ms_min=round(min(chromium.times), 3),
                native_ms_min=native.fastest_ms,
                ratio=round(min(chromium.times) / min(native.times), 3),
                cpu_ms=_median(chromium.cpu_ms),
                native_cpu_ms=_median(native.cpu_ms),
                steps=len(chromium.times),
                load_s=round(chromium.load_s, 4),
                native_load_s=round(native.load_s, 4),
                peak_over_idle_bytes=chromium.peak,
                native_peak_over_idle_bytes=native.peak,
                idle_bytes=chromium.idle,
                native_idle_bytes=native.idle,
                wasm_bytes=chromium.wasm_bytes,
                loss=chromium.loss,
                artifact_bytes=len(artifact.model),
                cpu=processor(),
                browser=str(browser.value("navigator.userAgent.match(/Chrome\\/[0-9.]+/)?.[0] ?? ''")),
            )


def _median(times: list[float]) -> float:
    return round(statistics.median(times), 3)


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
