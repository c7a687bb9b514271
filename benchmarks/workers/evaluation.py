"""Worker that evaluates a model on a device's held-out rows: a round, its forward passes, or its transfers alone.

``python -m benchmarks.workers.evaluation WORK BUNDLE WEIGHTS DATA``. ``round``: a whole round without a broker. ``forward``:
the same batches through the loaded ``evaluate`` graph. ``transfer``: the weights and graphs become blobs with their digests,
which is a part of ``round`` and takes the place of the download.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.repetition import serve
from edgefl.wire.bundle.archive import read_bundle
from edgefl_device.data.arrays import archive
from edgefl_device.data.samples import fit_rows
from edgefl_device.engine import open_engine
from edgefl_device.host import return_memory_early
from edgefl_device.round.graph_loader import GraphLoader, RoundProfiler
from edgefl_device.round.inputs import RoundInputs
from edgefl_device.round.offline import MemoryBlobs, offline_job, read_weights, train_round


def load(work: str, bundle_file: Path, weights_file: Path, data_file: Path) -> Callable[[], object]:
    """Return one repetition of ``work``."""
    bundle, weights, source = read_bundle(bundle_file), read_weights(weights_file), archive(data_file)
    manifest = bundle.manifest
    if work == "transfer":
        return lambda: offline_job(bundle, weights, manifest.of_round, "the weights")
    engine = open_engine(manifest.graphs[0].format)
    if work == "round":
        return lambda: train_round(bundle, weights, source, engine)
    data, spec = fit_rows(source, manifest), manifest.graph(manifest.evaluate)
    graph = GraphLoader(engine, manifest, MemoryBlobs(dict(bundle.blobs)), RoundProfiler()).load(spec.name)
    inputs = RoundInputs(0, data, {})
    fixed = {port.name: weights[port.label] for port in spec.inputs_of("weights")}

    def forward() -> None:
        for step in range(-(-len(data) // manifest.batch)):
            graph.run(fixed | inputs.masked_batch(spec, step), {})

    return forward


if __name__ == "__main__":
    return_memory_early()
    work, *files = sys.argv[1:]
    serve(lambda: load(work, *map(Path, files)))
