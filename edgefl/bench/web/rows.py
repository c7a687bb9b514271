"""One training step in Chromium beside Python's agent, which runs the same graph natively on one thread, by turns."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from edgefl import programs
from edgefl.bench.common.browser import Browser
from edgefl.bench.common.device_graph import worker, written
from edgefl.bench.common.machine import processor
from edgefl.bench.common.turns import take_turns
from edgefl.bench.train_step.model import built
from edgefl.bench.train_step.rows import SGD
from edgefl.bench.web.chromium import Chromium, served, write_safetensors
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import tiers
from edgefl.web.built import built_page
from edgefl.wire.errors import ConfigError
from exporters.bundle.formats import format_of

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
    program = programs.build("sgd", Objective.of(submodel), batch=batch, **SGD)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-web-") as name:
        folder = Path(name)
        say(f"{model}, {tier}: exporting")
        weights = {f"weights.{name}": value.detach() for name, value in submodel.suffix.state_dict().items()}
        step, form = program.phases[0].function, format_of("onnx")
        artifact = written(folder, form, step, program.start(weights), program.hyper)
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
