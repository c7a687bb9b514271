"""``python -m benchmarks web``: a training step in Chromium beside Python's agent, which runs the same graph, in turns."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import psutil
import typer

from benchmarks.browser import Browser
from benchmarks.graphs import worker, write_job
from benchmarks.machine import cpu_seconds, processor
from benchmarks.options import Json, check_choice
from benchmarks.repetition import median, take_turns
from benchmarks.results import bench, mebibytes
from benchmarks.train_step.command import SGD
from benchmarks.train_step.eager import built
from edgefl import algorithms
from edgefl.errors import ConfigError
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import tiers
from edgefl.system.memory import status_bytes
from edgefl.web.page import PACKED, built_page
from edgefl.wire import tensors
from edgefl_export.compiler.compiler import target_of

MODELS = ("resnet20", "cnn")
WARM_UP = 8
"""Steps before any counts: a browser compiles WebAssembly twice, the second time while it runs."""
_PAGE = "bench.html"
_RENDERER = "--type=renderer"


class WebRow(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a step, medians and minima, in the browser and natively.

    Attributes:
        threads: threads of the browser.
        ratio: ratio of the minima, which other work on the machine changes least.
        cpu_ms: processor time of all threads of the page's process, a median of blocks.
        peak_over_idle_bytes: peak of resident memory over the same process with its engine open and nothing loaded.
        wasm_bytes: WebAssembly's part of it.
        load_s: seconds until the graph can run.
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


def web(
    model: Annotated[
        list[str] | None,
        typer.Option(help="a model with preset tiers, may be repeated; default: resnet20, cnn"),
    ] = None,
    tier: Annotated[list[str] | None, typer.Option(help="a tier, may be repeated; default: all")] = None,
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 32,
    threads: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="threads of WebAssembly, may be repeated; default: 1, and 2, which an isolated page may have; "
            "the native side has one",
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="blocks of steps for each side")] = 5,
    as_json: Json = False,
) -> None:
    """A training step in headless Chromium (WebAssembly with SIMD) beside Python's agent, which runs the same graph
    natively on one thread: time and memory, for each tier of ResNet-20 and the CNN, weak to strong.

    Both sides take turns in blocks of equally many steps. It needs Chromium, and the page that `make agents-web` builds.

    Examples:

      python -m benchmarks web --json

      python -m benchmarks web --threads 2 --json

      python -m benchmarks web --model cnn --tier weak --repeat 3
    """

    check_choice(model or (), tiers=tier or ())

    chosen = cases(tuple(model or MODELS), tuple(tier or ()))
    bench(
        "web",
        f"a step in Chromium, batch {batch}",
        [
            (*case, count)
            for count in threads or ([1, 2] if (os.cpu_count() or 1) > 1 else [1])
            for case in chosen
        ],
        lambda case, say: measure(*case[:2], batch=batch, threads=case[2], repeat=repeat, say=say),
        _web_columns,
        as_json,
    )


def _web_columns(row: WebRow) -> dict[str, Any]:
    return {
        "model": row.model,
        "tier": row.tier,
        "threads": row.threads,
        "ms": row.ms,
        "native ms": row.native_ms,
        "ratio": f"{row.ratio:.2f}",
        "memory MiB": mebibytes(row.peak_over_idle_bytes),
        "native MiB": mebibytes(row.native_peak_over_idle_bytes),
        "wasm MiB": mebibytes(row.wasm_bytes),
    }


def cases(models: tuple[str, ...], chosen: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Return (model, tier) for each of the models' tiers, or the ``chosen`` ones, weak to strong. Raises ConfigError."""
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
    """Export one tier's step and run it on both sides, natively on one thread.

    Raises:
        ConfigError: the page is not built, or Chromium is not installed.
    """
    page = built_page()
    submodel = built(model, {}, tier)
    algorithm = algorithms.build("sgd", Objective.of(submodel), batch=batch, **SGD)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-web-") as name:
        folder = Path(name)
        say(f"{model}, {tier}: exporting")
        weights = {f"weights.{name}": value.detach() for name, value in submodel.suffix.state_dict().items()}
        step, form = algorithm.phases[0].function, target_of("onnx")
        artifact = write_job(folder, form, step, algorithm.start(weights), algorithm.hyper)
        write_safetensors(folder)
        with served(page, folder) as url, worker(folder, 1) as native, Browser() as browser:
            chromium = ChromiumRunner(browser, url, threads)
            chromium.begin()
            take_turns((native, chromium), repeat, lambda text: say(f"{model}, {tier}: {text}"), WARM_UP)
            return WebRow(
                model=model,
                tier=tier,
                batch=batch,
                threads=threads,
                ms=median(chromium.times),
                native_ms=native.median_ms,
                ms_min=round(min(chromium.times), 3),
                native_ms_min=native.fastest_ms,
                ratio=round(min(chromium.times) / min(native.times), 3),
                cpu_ms=median(chromium.cpu_ms),
                native_cpu_ms=median(native.cpu_ms),
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


def write_safetensors(folder: Path) -> None:
    """Convert the folder's npz files, which Python reads, to safetensors for the browser."""
    for path in folder.glob("*.npz"):
        with np.load(path) as file:
            path.with_suffix(".safetensors").write_bytes(
                tensors.dump({name: file[name] for name in file.files})
            )


class _PageHandler(SimpleHTTPRequestHandler):
    """Handler of the built page, and of the job's files below /job/."""

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
    """Serve the page and the job on this machine; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_PageHandler, page=page, job=job))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class ChromiumRunner:
    """Steps in the page of ``browser`` at ``url``. Memory is resident memory of the page's process."""

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
        """Return the milliseconds of each step. Processor time is a mean of the block, with compilation and garbage."""
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
        """Bytes of WebAssembly's memory."""
        return int(self.browser.value("bench.bytes()"))

    @property
    def loss(self) -> float:
        """Loss of one more step."""
        return float(self.browser.value("bench.metrics().then(found => String(found['metric.loss']))"))

    def _renderer(self) -> psutil.Process:
        """Return the process of the page: the largest renderer."""
        own = psutil.Process(self.browser.pid).children(recursive=True)
        renderers = [each for each in own if _RENDERER in " ".join(each.cmdline())]
        return max(renderers, key=lambda each: each.memory_info().rss)
