"""Search for the fastest form of a step, like a device in its first round, in a process of its own.

``python -m benchmarks.train_step.tuning FOLDER THREADS`` prints what was found, as JSON; :mod:`benchmarks.workers.step`
reads the same folder, which has a file for each variant.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from edgefl.errors import EdgeflError
from edgefl.system.processes import module_command
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.bundle.variants import compress
from edgefl_device.engine import open_engine
from edgefl_device.round.autotune import Autotuner, MemoryTuningStore, TrialStep, TuningResult


def take_fastest(
    folder: Path, own: bytes, variants: Mapping[str, bytes], threads: int, environment: Mapping[str, str]
) -> tuple[str, bytes]:
    """Return name ("" for the graph's own form) and artifact of the fastest form, and write it as the folder's graph."""
    place = folder / "graph.msgpack"
    graph = msgspec.msgpack.decode(place.read_bytes(), type=Graph)
    pairs = [compress(name, model, graph.blob.chunk, base=own) for name, model in variants.items()]
    for variant, frame in pairs:
        (folder / variant.blob.sha256).write_bytes(frame)
    listed = msgspec.structs.replace(graph, variants=tuple(variant for variant, _ in pairs))
    place.write_bytes(msgspec.msgpack.encode(listed))
    command = module_command(__name__, str(folder), str(threads))
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=dict(environment))
    if ran.returncode:
        raise EdgeflError(f"the process that tries the forms of the step ended: {ran.stderr.strip()[-500:]}")
    chosen = msgspec.json.decode(ran.stdout, type=TuningResult).variant
    model = variants.get(chosen, own)
    (folder / "graph.bin").write_bytes(model)
    return chosen, model


class _FolderBlobs:
    """Blobs of the graph and its variants in a folder."""

    def __init__(self, folder: Path, graph: Graph) -> None:
        self._folder, self._own = folder, graph.blob.sha256

    def get(self, ref: BlobRef) -> bytes:
        return (self._folder / ("graph.bin" if ref.sha256 == self._own else ref.sha256)).read_bytes()


def main(folder: Path, threads: int) -> None:
    graph = msgspec.msgpack.decode((folder / "graph.msgpack").read_bytes(), type=Graph)
    engine, random = open_engine(graph.format, threads), np.random.default_rng(0)
    with np.load(folder / "state.npz") as file:
        state = engine.write_state({name: file[name] for name in file.files})
    feeds = dict(np.load(min(folder.glob("batch*.npz"))))
    feeds |= {port.name: random.random(port.shape, np.float32) for port in graph.inputs_of("noise")}
    trial = TrialStep(engine, graph, _FolderBlobs(folder, graph), feeds, state)
    found = Autotuner(MemoryTuningStore()).fastest(trial)
    sys.stdout.write(msgspec.json.encode(found or TuningResult()).decode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
