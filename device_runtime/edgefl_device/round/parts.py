"""What of a bundle a device's files are read by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgefl.errors import BundleError
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.tensors import Array
from edgefl_device.data.rows import Parts
from edgefl_device.engine.base import Engine
from edgefl_device.round.graphs import Blobs, check_port


def parts_of(engine: Engine, manifest: Manifest, blobs: Blobs) -> Parts:
    """The blobs of a bundle, and its graphs that make a sample of what a file holds: one ``batch`` port, one ``record``."""

    def graph(name: str) -> Callable[[Array], Array]:
        spec = manifest.graph(name)
        if len(spec.inputs) != 1 or len(spec.outputs) != 1:
            raise BundleError(
                f"graph {name!r} makes samples of files, so that it reads one array and gives one; export the bundle again"
            )
        loaded, (port,), (output,) = engine.load(spec, blobs.get(spec.blob)), spec.inputs, spec.outputs

        def apply(rows: Array) -> Array:
            check_port(port, rows)
            return np.array(loaded.run({port.name: rows}, {}).arrays[output.name])  # memory of its own

        return apply

    return Parts(blobs.get, graph)
