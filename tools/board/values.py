"""Values that a device or server computes, written into a folder to be compared with another processor's.

``python values.py FOLDER INPUTS``: it runs in the board's root and here, on installed packages alone. INPUTS has a
folder of samples for each of :data:`SAMPLES`, and bundles. Files of ``bits/`` have to be equal to the bit, arrays of
``floats/`` within a tolerance.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edgefl.wire import tensors
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.bundle.manifest import DataSpec, Graph
from edgefl.wire.bundle.readers import ImageSpec, SeriesSpec, SoundSpec, TableSpec, TextSpec
from edgefl_conformance.material.bundles import FORMATS, material, names
from edgefl_conformance.vectors.write import write_vectors
from edgefl_device.data.samples import NO_BUNDLE, LabelSpec, LocalData
from edgefl_device.data.sources import load
from edgefl_device.engine import open_engine
from edgefl_device.round import offline

Values = NDArray[Any]
CODED = ("coded", "onebit", "sparse", "masked")
"""Bundles of the kit whose ``finish`` packs an update."""
SAMPLES = {
    "images": DataSpec(shape=(3, 8, 8), dtype="float32", classes=3, scale=1 / 255, reader=ImageSpec()),
    "sounds": DataSpec(shape=(1, 64), dtype="float32", classes=3, reader=SoundSpec(rate=8000, length=64)),
    "table": DataSpec(
        shape=(2,),
        dtype="float32",
        classes=3,
        reader=TableSpec(columns=("a", "b"), label="c", mean=(0.3, 1.7), deviation=(0.7, 3.1)),
    ),
    "series": DataSpec(
        shape=(2, 4),
        dtype="float32",
        classes=3,
        reader=SeriesSpec(
            columns=("a", "b"), window=4, step=2, label="c", mean=(0.3, 1.7), deviation=(0.7, 3.1)
        ),
    ),
    "texts": DataSpec(shape=(16,), dtype="int64", classes=3, below=256, reader=TextSpec()),
}
"""Data of a device by name of their folder."""
ROWS, STEP = 16, 0.1


def main(folder: Path, inputs: Path) -> None:
    """Write all values into ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    bits, floats = folder / "bits", folder / "floats"
    write_vectors(folder / "vectors", FORMATS)
    bits.mkdir()
    floats.mkdir()
    (folder / "vectors" / "signatures.json").rename(bits / "protocol-signatures.json")
    (folder / "vectors" / "blobs.json").rename(bits / "protocol-blobs.json")
    (folder / "vectors" / "draws.json").rename(bits / "random-draws.json")
    (bits / "protocol-update.bin").write_bytes(_encoded_update())
    for name, arrays in read_samples(inputs):
        _save(bits / f"data-{name}.safetensors", arrays)
    _save(bits / "sums-mean.safetensors", sums())
    for format in FORMATS:
        for name in names():
            for graph, arrays in run_graphs(name, format):
                codes = name in CODED and graph == "finish"
                _save(
                    (bits if codes else floats)
                    / f"{'codecs' if codes else 'graph'}-{format}-{name}-{graph}.safetensors",
                    arrays,
                )
        for place in sorted((folder / "vectors" / "rounds" / format).iterdir()):
            _save(
                floats / f"round-{format}-{place.name}.safetensors",
                tensors.load((place / "update.safetensors").read_bytes()),
            )
    for bundle in sorted(inputs.glob("*.efl")):
        _save(floats / f"model-{bundle.stem}.safetensors", train(bundle))
    shutil.rmtree(folder / "vectors")
    packages = ("numpy", "onnxruntime", "executorch", "numba")
    facts = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
    (folder / "facts.json").write_text(json.dumps(facts))


def _save(file: Path, arrays: Mapping[str, Values]) -> None:
    save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, file)


def drawn(name: str, shape: tuple[int, ...], dtype: str) -> Values:
    """Return an array that is a function of its name: small floats, or whole numbers 0 to 2."""
    count = int(np.prod(shape, dtype=np.int64))
    words = np.frombuffer(hashlib.shake_128(name.encode()).digest(2 * count), "<u2")
    if np.dtype(dtype).kind == "f":
        return (words.astype(np.float32) / np.float32(1 << 16)).reshape(shape).astype(dtype)
    return (words % (2 if dtype == "bool" else 3)).reshape(shape).astype(dtype)


def run_graphs(name: str, format: str) -> Iterator[tuple[str, dict[str, Values]]]:
    """Run each graph of a bundle of the kit on inputs that are functions of their names; yield its outputs."""
    engine, bundle = open_engine(format), material(name, format).bundle
    for graph in bundle.manifest.of_round:
        if graph.segments:
            continue
        loaded = engine.load(graph, bundle.blobs[graph.blob.sha256])
        outputs = loaded.run(*_feeds(engine, graph))
        yield graph.name, {**outputs.arrays, **engine.read_state(outputs.state)}


def _feeds(engine: Any, graph: Graph) -> tuple[dict[str, Values], Any]:
    arrays = {port.name: drawn(port.name, tuple(port.shape), port.dtype) for port in graph.inputs}
    state = {port.name for port in graph.inputs if port.role == "state"}
    return (
        {name: array for name, array in arrays.items() if name not in state},
        engine.write_state({name: arrays[name] for name in state}),
    )


def _encoded_update() -> bytes:
    """Return tensors in the bytes in which an update travels: floats of both widths, codes, and a mask as gaps."""
    parts = {
        "f32": drawn("f32", (5, 7), "float32"),
        "f16": drawn("f16", (9,), "float16"),
        "codes": drawn("codes", (31,), "uint8"),
        "mask": np.packbits(drawn("mask", (335,), "bool"), bitorder="little"),
    }
    return tensors.dump(parts, {"mask": 335})


def read_samples(inputs: Path) -> Iterator[tuple[str, dict[str, Values]]]:
    """Read the files of samples as a device does; yield the arrays that it feeds."""
    label = LabelSpec.of(material("plain", "onnx").manifest)
    for name, spec in SAMPLES.items():
        data = load(inputs / name).fitted(spec, label, NO_BUNDLE)
        yield name, {"x": data.rows(np.arange(len(data))), "y": data.y}


def sums() -> dict[str, Values]:
    """Return the mean of three updates as the server computes it, of floats and of codes of one bit."""
    from edgefl.wire.regions import Region
    from edgefl.wire.update.form import DENSE, CodeEncoding, Form, Section
    from edgefl_server.aggregate.aggregator import Aggregator, layout_of

    weights = {name: drawn(name, shape, "float32") for name, shape in (("a", (33, 17)), ("b", (257,)))}
    regions: dict[str, Region] = dict.fromkeys(weights)
    section = Section(tuple(weights), CodeEncoding(1, (-1.0, 1.0), 0.01))
    signs = Form("signs", sections=(section,), change=True)
    found = dict[str, Values]()
    for form in (DENSE, signs):
        aggregator = Aggregator(layout_of(weights), weight_limit=64, device="cpu", threads=1)
        for place, weight in enumerate((1, 20, 7)):
            expected = aggregator.pieces(regions, form).expected
            arrays = {
                name: drawn(f"{place}{name}", shape, dtype) for name, (dtype, shape) in expected.items()
            }
            aggregator.add(aggregator.check(arrays, regions, form), weight)
        found |= {f"{form.codec}-{name}": array for name, array in aggregator.result(weights).items()}
    return found


def train(place: Path) -> dict[str, Values]:
    """Train one round of a bundle from drawn weights on drawn samples, on the graph's own form."""
    bundle = read_bundle(place)
    manifest = bundle.manifest
    ports = {port.label: port for graph in manifest.of_round for port in graph.inputs_of("weights")}
    weights = {
        name: ((drawn(name, tuple(port.shape), port.dtype) - 0.5) * STEP + (len(port.shape) == 1)).astype(
            port.dtype
        )
        for name, port in ports.items()
    }
    x = drawn("x", (ROWS, *manifest.data.shape), manifest.data.dtype)
    y = np.arange(ROWS, dtype=np.int64) % manifest.data.classes
    engine = open_engine(manifest.graphs[0].format)
    result = offline.train_round(bundle, weights, LocalData(x, y, "drawn", {}), engine, seed=5)
    return {**result.update, "loss": np.array(result.metrics["loss"], np.float32)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
