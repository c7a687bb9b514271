"""Worker that evaluates a model on a device's held-out rows, and prints processor times as one line of JSON.

``python -m benchmarks.workers.evaluation REPEAT BUNDLE WEIGHTS DATA``. ``round_ms``: a whole round without a broker.
``forward_ms``: the same batches through the loaded ``evaluate`` graph. ``transfer_ms``: weights and graphs become blobs with
their digests, and the weights are decoded; this part of a round takes the place of the download.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.repetition import median
from edgefl.cli.device import process
from edgefl.wire.bundle.archive import read_bundle
from edgefl_device.data.samples import fit_rows
from edgefl_device.data.sources import load
from edgefl_device.engine import open_engine
from edgefl_device.host import return_memory_early
from edgefl_device.round.graph_loader import GraphLoader, RoundProfiler
from edgefl_device.round.inputs import RoundInputs
from edgefl_device.round.offline import MemoryBlobs, offline_job, read_weights, train_round


def measure(repeat: int, bundle_file: Path, weights_file: Path, data_file: Path) -> dict[str, float]:
    """Return the medians of ``repeat`` turns, the time of the first round, and the number of held-out rows."""
    bundle, weights, source = read_bundle(bundle_file), read_weights(weights_file), load(data_file)
    manifest = bundle.manifest
    engine = open_engine(manifest.graphs[0].format)
    spec = manifest.graph(manifest.evaluate)
    graph = GraphLoader(engine, manifest, MemoryBlobs(dict(bundle.blobs)), RoundProfiler()).load(spec.name)
    fixed = {port.name: weights[port.label] for port in spec.inputs_of("weights")}

    def evaluate() -> None:
        train_round(bundle, weights, source, engine)

    def forward() -> None:
        for step in range(-(-len(data) // manifest.batch)):
            graph.run(fixed | inputs.masked_batch(spec, step), {})

    def transfer() -> None:
        job, blobs = offline_job(bundle, weights, manifest.of_round, "the weights")
        GraphLoader(engine, manifest, blobs, RoundProfiler()).fetch_weights(job, manifest.suffix)

    first_ms = _processor_ms(evaluate)
    data = fit_rows(source, manifest)
    inputs = RoundInputs(0, data, {})
    forward()
    turns = [[_processor_ms(work) for work in (evaluate, forward, transfer)] for _ in range(repeat)]
    names = ("round_ms", "forward_ms", "transfer_ms")
    medians = {name: median(times) for name, times in zip(names, zip(*turns, strict=True), strict=True)}
    return {**medians, "first_ms": round(first_ms, 3), "held_out": len(data)}


def _processor_ms(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


if __name__ == "__main__":
    process.load()  # as a device does: modules are no garbage to look for
    return_memory_early()
    print(json.dumps(measure(int(sys.argv[1]), *map(Path, sys.argv[2:]))))
